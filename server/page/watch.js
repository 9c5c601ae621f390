// Asking the server, with a key where it wants one, and following the pool's events.

const KEY_NAME = "quire-key";
const LONGEST_WAIT = 30; // seconds between two attempts to connect
const INTERVAL = 2000; // milliseconds between two events: the server makes no more maps
const STALLED = 60_000; // milliseconds without an event after which a connection is given up

const AWAY = "the server is stopping or away"; // true of 503, of an orderly end, and of what comes after it
const UNREACHABLE = "the server cannot be reached";
const BROKEN = "the connection broke off";
const SILENT = "the server is silent";

const byId = (id) => document.getElementById(id);
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const savedKey = () => sessionStorage.getItem(KEY_NAME);

/** The focus goes to the first of these elements that takes it. */
function focusOn(...elements) {
  for (const element of elements) {
    if (element === document.body || !element?.checkVisibility()) continue;
    if (document.activeElement !== element) element.focus();
    if (document.activeElement === element) return;
  }
}

class KeyNeeded extends Error {}

/** What a browser says of the network, `TypeError: Failed to fetch` say, in words of ours. */
const inWordsOf = (error, words) => (error instanceof TypeError ? new Error(words) : error);

/** The response to a request, whose status is good. Throws KeyNeeded, or an Error with words for people. */
async function ask(path, options = {}) {
  const key = savedKey();
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const sent = fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  const response = await sent.catch((error) => Promise.reject(inWordsOf(error, UNREACHABLE)));
  if (response.ok) return response;
  if (response.status === 503) throw new Error(AWAY);
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `the server answered with status ${response.status}`;
  throw response.status === 401 ? new KeyNeeded(message) : new Error(message);
}

/** The data of server-sent events, as text. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => Promise.reject(inWordsOf(error, BROKEN)));
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
  }
}

/**
 * Follows the pool: `show` gets each event. Of `say` is called `live` after each; `lost` with why, in words, and the
 * milliseconds to the next attempt; `key` with the server's words where it wants a key.
 */
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
      let why = AWAY;
      try {
        for await (const data of this.#events(signal)) {
          this.show(JSON.parse(data));
          this.say.live();
          wait = 0.5;
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof KeyNeeded) return this.say.key(error.message);
        why = error.message;
      }
      if (signal.aborted) return;
      const delay = 1000 * wait * (0.75 + Math.random() / 2);
      this.say.lost(why, delay);
      await new Promise((wake) => setTimeout(wake, delay));
    }
  }

  async *#events(signal) {
    const stalled = new AbortController();
    const expect = () => setTimeout(() => stalled.abort(new Error(SILENT)), STALLED);
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
