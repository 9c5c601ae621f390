// Asking the server, with a key where it wants one, and following the pool's events.

const KEY_NAME = "quire-key";
const LONGEST_WAIT = 30; // seconds between two attempts to connect
const INTERVAL = 2000; // milliseconds between two events: the server makes no more maps
const STALLED = 60_000; // milliseconds without an event after which a connection is given up

const byId = (id) => document.getElementById(id);
const savedKey = () => sessionStorage.getItem(KEY_NAME);

class KeyNeeded extends Error {}

/** The response to a request, whose status is good. Throws KeyNeeded, or an Error with the server's words. */
async function ask(path, options = {}) {
  const key = savedKey();
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered with status ${response.status}`;
  throw response.status === 401 ? new KeyNeeded(message) : new Error(message);
}

/** The data of server-sent events, as text. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
  }
}

/** Follows the pool: `show` gets each event; `say` gets "live", "lost" with seconds to wait, or "key" with a message. */
class Watch {
  #selected = null;
  #running = null;

  constructor(show, say) {
    this.show = show;
    this.say = say;
  }

  /** Begin anew, with the pages of one request or of none. */
  start(selected = this.#selected) {
    this.stop();
    this.#selected = selected;
    this.#running = new AbortController();
    this.#follow(this.#running.signal);
  }

  stop() {
    this.#running?.abort();
  }

  async #follow(signal) {
    for (let wait = 1; !signal.aborted; wait = Math.min(2 * wait, LONGEST_WAIT)) {
      try {
        for await (const data of this.#events(signal)) {
          this.show(JSON.parse(data));
          this.say("live");
          wait = 0.5;
        }
      } catch (error) {
        if (error instanceof KeyNeeded) return this.say("key", error.message);
      }
      if (signal.aborted) return;
      this.say("lost", Math.ceil(wait));
      await new Promise((wake) => setTimeout(wake, 1000 * wait * (0.75 + Math.random() / 2)));
    }
  }

  async *#events(signal) {
    const stalled = new AbortController();
    const expect = () => setTimeout(() => stalled.abort(), STALLED);
    const query = new URLSearchParams({ map: "true", interval_ms: INTERVAL, ...(this.#selected ? { request: this.#selected } : {}) });
    let timer = expect();
    try {
      const response = await ask(`/v1/pool/events?${query}`, { signal: AbortSignal.any([signal, stalled.signal]) });
      for await (const data of eventsOf(response)) {
        if (signal.aborted) return;
        clearTimeout(timer);
        timer = expect();
        yield data;
      }
    } finally {
      clearTimeout(timer);
    }
  }
}
