// The numbers on top, and the table of running requests.

const SHORT = 10, LONG = 60; // seconds that rates are about
const decimal = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const percent = (share) => `${decimal.format(100 * share)} %`;

class Tiles {
  #samples = []; // of the last LONG seconds, the newest last

  show({ requests, prefix_cache: cache, map }) {
    const newest = { ...map.counters, seconds: map.seconds, hits: cache.hit_tokens, queries: cache.query_tokens };
    const last = this.#samples.at(-1);
    // Counters only grow, and the host's clock goes on when another server takes the place of this one.
    if (last && Object.keys(newest).some((name) => newest[name] < last[name])) this.#samples = [];
    if (!last || newest.seconds !== last.seconds) this.#samples.push(newest);
    while (this.#samples[0].seconds < newest.seconds - LONG) this.#samples.shift();
    this.#showRates(newest, cache);
    setText("queue", number.format(requests.waiting));
    setText("queue-more", `waiting; ${number.format(requests.running)} running`);
    this.#showMemory(map.memory);
  }

  /** What was added to each counter in the last `seconds`, and the time that really went by. */
  #change(newest, seconds) {
    const first = this.#samples.find((sample) => sample.seconds >= newest.seconds - seconds);
    return Object.fromEntries(Object.keys(newest).map((name) => [name, newest[name] - first[name]]));
  }

  #showRates(newest, cache) {
    const short = this.#change(newest, SHORT), long = this.#change(newest, LONG);
    setText("hit-rate", cache.hit_rate === null ? "–" : percent(cache.hit_rate));
    setText("hit-rate-more", long.queries ? `${percent(long.hits / long.queries)} in the last minute` : "since the start");
    const rate = (count, seconds) => (seconds ? decimal.format(count / seconds) : "–");
    setText("speed", rate(short.generated_tokens, short.seconds));
    setText("speed-more", `generated; ${rate(long.prompt_tokens, long.seconds)} of prompts`);
    const times = long.first_tokens ? long : newest;
    setText("first-token", times.first_tokens ? duration(times.first_token_seconds / times.first_tokens) : "–");
    setText("first-token-more", long.first_tokens ? "on average, last minute" : "on average, since the start");
  }

  #showMemory(memory) {
    const most = Math.max(memory.bytes, memory.bytes_in_16_bit, 1);
    setText("memory", bytes(memory.bytes));
    setText("memory-more", `${bytes(memory.bytes_in_16_bit)} in 16 bit; ${number.format(memory.tokens)} tokens`);
    byId("memory-open-note").hidden = !memory.open_bytes;
    const size = `${memory.open_bits} bit`;
    setText("memory-open-more", `${bytes(memory.open_bytes)} of it in first and newest pages: ${size}, counted whole`);
    byId("memory-open").style.width = `${(100 * memory.open_bytes) / most}%`;
    byId("memory-sealed").style.width = `${(100 * (memory.bytes - memory.open_bytes)) / most}%`;
    byId("memory-16").style.width = `${(100 * memory.bytes_in_16_bit) / most}%`;
  }
}

const duration = (seconds) => (seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${decimal.format(seconds)} s`);

function bytes(count) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; unit++) count /= 1024;
  return `${decimal.format(count)} ${units[unit]}`;
}

const REQUEST_COLUMNS = ["Phase", "Prompt", "Cached", "Generated", "Pages"];

class RequestTable {
  #body = byId("requests");
  #rows = new Map(); // by id of a request
  #selected = null;

  /** `select` gets the id of the request that somebody selects, or null. */
  constructor(select) {
    this.select = select;
  }

  show(map) {
    const gone = new Set(this.#rows.keys());
    const focused = document.activeElement, hadFocus = byId("requests-scroll").contains(focused);
    byId("requests-scroll").hidden = !map.requests.length;
    for (const request of map.requests) {
      gone.delete(request.id);
      const cells = this.#rows.get(request.id) ?? this.#make(request.id);
      const counts = [request.prompt_tokens, request.cached_tokens, request.generated_tokens, request.pages];
      [request.phase, ...counts.map((count) => number.format(count))].forEach((value, at) => setText(cells[at], value));
    }
    for (const id of gone) {
      this.#rows.get(id)[0].parentElement.remove();
      this.#rows.delete(id);
      if (id === this.#selected) this.#press(null);
    }
    if (hadFocus) focusOn(focused, this.#body.querySelector("button"), byId("requests-title"));
    const more = map.running - map.requests.length;
    const text = map.running ? "Select a request to see its pages in the map." : "No request is running.";
    setText("requests-note", more > 0 ? `${text} ${number.format(more)} more are not listed.` : text);
  }

  #make(id) {
    const tr = this.#body.insertRow();
    tr.setAttribute("role", "row"); // which a table that is laid out otherwise would lose
    const head = document.createElement("th");
    head.scope = "row";
    head.setAttribute("role", "rowheader");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = button.title = id;
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => this.#press(this.#selected === id ? null : id));
    head.append(button);
    tr.append(head);
    const cells = REQUEST_COLUMNS.map((name, place) => {
      const cell = tr.insertCell();
      if (place > 0) cell.className = "number";
      cell.setAttribute("role", "cell");
      cell.dataset.name = name;
      return cell;
    });
    this.#rows.set(id, cells);
    return cells;
  }

  #press(id) {
    this.#selected = id;
    for (const button of this.#body.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", button.title === id);
    }
    this.select(id);
  }
}
