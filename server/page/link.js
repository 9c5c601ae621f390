// How the connection stands, in the header; and how old the numbers are, once they are not renewed.

const QUIET = 10_000; // milliseconds without an event after which the numbers count as old

class Link {
  #state = "wait";
  #seen = null; // when the last event came
  #retry = 0; // when the next attempt to connect is due

  constructor() {
    setInterval(() => this.tick(), 1000);
  }

  live() {
    this.#seen = Date.now();
    this.#set("live", "Live");
  }

  /** `why`: in words; the next attempt is made in `delay` milliseconds. */
  lost(why, delay) {
    this.#retry = Date.now() + delay;
    this.#set("lost", capital(why));
  }

  keyNeeded() {
    this.#set("key", "A key is needed");
  }

  #set(state, words) {
    this.#state = state;
    byId("link").dataset.state = state;
    setText("link-state", words);
    this.tick();
  }

  /** What changes while nothing comes. */
  tick() {
    const now = Date.now();
    if (this.#state === "live" && now - this.#seen > QUIET) return this.#set("wait", "Waiting for the server");
    const left = Math.ceil((this.#retry - now) / 1000);
    const retry = left > 0 ? `; trying again in ${left} s` : "; trying again now";
    setText("link-more", this.#state === "lost" ? retry : "");
    const isOld = this.#seen !== null && this.#state !== "live";
    byId("main").classList.toggle("old", isOld);
    byId("old").hidden = !isOld;
    // Empty where it is hidden: it describes the sections, which would read it nevertheless.
    setText("old", isOld ? `Not live: these numbers are as of ${span((now - this.#seen) / 1000)} ago.` : "");
  }
}
