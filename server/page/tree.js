// The prefix tree as a treegrid: runs of pages, which open and close, and keep their place while they change.

const OPEN_DEPTH = 2; // levels that are open until somebody closes them
const RUN_COLUMNS = ["Pages", "Tokens", "Requests", "Hits", "Last use", "Where"];
const PLACES = { pool: "pool", host: "host memory", computing: "computing" };

class PrefixTree {
  #body = byId("tree");
  #rows = new Map(); // by id of a run: its elements
  #opened = new Map(); // by id: what somebody chose
  #tree = null;

  constructor() {
    this.#body.addEventListener("keydown", (event) => this.#onKey(event));
    this.#body.addEventListener("focusin", (event) => this.#onFocus(event.target.closest("tr")));
  }

  show(tree) {
    this.#tree = tree;
    const numShown = tree.runs.filter((run) => run.state !== "computing").reduce((sum, run) => sum + run.pages, 0);
    const all = tree.pages === 1 ? "1 page is known" : `${number.format(tree.pages)} pages are known`;
    const cut = numShown < tree.pages ? `; ${number.format(numShown)} of them are listed, those in use first` : "";
    setText("tree-note", tree.pages || tree.runs.length ? `${all}${cut}.` : "No page is known yet.");
    this.#render();
  }

  #render() {
    const children = new Map();
    const add = (parent, run) => children.set(parent, [...(children.get(parent) ?? []), run]);
    const { roots, runs } = this.#tree;
    for (const run of runs) add(run.parent ?? `root-${run.root}`, run);
    const seen = [];
    const visit = (id, depth) => {
      for (const run of children.get(id) ?? []) {
        const behind = children.get(run.id) ?? [];
        const isOpen = this.#opened.get(run.id) ?? depth < OPEN_DEPTH;
        seen.push({ run, depth, numBehind: behind.length, isOpen });
        if (behind.length && isOpen) visit(run.id, depth + 1);
      }
    };
    for (const { root, children: size } of roots) {
      if (roots.length > 1) {
        const id = `root-${root}`;
        const isOpen = this.#opened.get(id) ?? true;
        seen.push({ run: { id, label: `Key ${root}`, children: size }, depth: 0, numBehind: children.get(id)?.length ?? 0, isOpen });
        if (isOpen) visit(id, 1);
      } else visit(`root-${root}`, 0);
    }
    this.#place(seen);
  }

  #place(seen) {
    const gone = new Set(this.#rows.keys());
    const focused = document.activeElement, hadFocus = byId("tree-scroll").contains(focused);
    byId("tree-scroll").hidden = !seen.length;
    let next = this.#body.firstElementChild;
    for (const item of seen) {
      gone.delete(item.run.id);
      const row = this.#rows.get(item.run.id) ?? this.#make(item.run.id);
      this.#fill(row, item);
      if (row.tr === next) next = next.nextElementSibling;
      else this.#body.insertBefore(row.tr, next);
    }
    for (const id of gone) {
      this.#rows.get(id).tr.remove();
      this.#rows.delete(id);
    }
    if (!this.#body.querySelector("tr[tabindex='0']")) this.#onFocus(this.#body.firstElementChild);
    // A row that goes, or moves, loses the focus.
    if (hadFocus) focusOn(focused, this.#body.querySelector("tr[tabindex='0']"), byId("tree-title"));
  }

  #make(id) {
    const tr = document.createElement("tr");
    tr.setAttribute("role", "row");
    tr.tabIndex = -1;
    tr.dataset.id = id;
    const cells = RUN_COLUMNS.map((name, place) => {
      const cell = tr.insertCell();
      cell.setAttribute("role", "gridcell");
      if (place > 0 && place < 5) cell.className = "number";
      cell.dataset.name = name;
      return cell;
    });
    const toggle = document.createElement("button");
    toggle.type = "button";
    toggle.className = "toggle";
    toggle.tabIndex = -1; // the row takes the arrow keys
    toggle.addEventListener("click", () => {
      tr.focus();
      this.#toggle(tr);
    });
    const [text, more] = [1, 2].map(() => document.createElement("span"));
    more.className = "more";
    cells[0].append(toggle, text, more);
    const row = { tr, cells, toggle, text, more };
    this.#rows.set(id, row);
    return row;
  }

  #fill({ tr, cells, toggle, text, more }, { run, depth, numBehind, isOpen }) {
    tr.style.setProperty("--depth", depth);
    tr.setAttribute("aria-level", depth + 1);
    if (numBehind) tr.setAttribute("aria-expanded", isOpen);
    else tr.removeAttribute("aria-expanded");
    toggle.disabled = !numBehind;
    setText(toggle, numBehind ? (isOpen ? "▾" : "▸") : "");
    toggle.setAttribute("aria-label", isOpen ? "Close" : "Open");
    const pages = run.pages === 1 ? "1 page" : `${number.format(run.pages)} pages`;
    const counted = run.cut ? `at least ${pages}` : pages;
    const preview = run.preview?.replaceAll(/\s/g, (space) => (space === "\n" ? "⏎" : " "));
    text.className = preview === undefined ? "" : "preview";
    setText(text, run.label ?? preview ?? counted);
    const hidden = run.cut ? 0 : run.children - numBehind;
    const hiddenText = hidden > 0 ? `${number.format(hidden)} more behind, not listed` : "";
    const words = [preview === undefined ? "" : counted, hiddenText].filter(Boolean).join("; ");
    setText(more, words && ` ${words}`);
    if (run.label) return;
    const isIdle = run.state !== "computing" && run.sequences === 0;
    const values = [number.format(run.tokens), number.format(run.sequences), number.format(run.hits)];
    values.push(isIdle ? `${span(run.idle_seconds)} ago` : "now", PLACES[run.state]);
    values.forEach((value, place) => setText(cells[place + 1], value));
  }

  #toggle(tr, isOpen = tr.getAttribute("aria-expanded") !== "true") {
    this.#opened.set(tr.dataset.id, isOpen);
    this.#render();
  }

  #onFocus(tr) {
    if (!tr) return;
    for (const other of this.#body.querySelectorAll("tr[tabindex='0']")) other.tabIndex = -1;
    tr.tabIndex = 0;
  }

  #onKey(event) {
    const tr = event.target.closest("tr");
    const expanded = tr.getAttribute("aria-expanded");
    const parent = () => {
      let row = tr.previousElementSibling;
      while (row && row.ariaLevel >= tr.ariaLevel) row = row.previousElementSibling;
      return row;
    };
    const moves = {
      ArrowDown: () => tr.nextElementSibling,
      ArrowUp: () => tr.previousElementSibling,
      Home: () => this.#body.firstElementChild,
      End: () => this.#body.lastElementChild,
      ArrowRight: () => (expanded === "false" ? this.#toggle(tr, true) : expanded && tr.nextElementSibling),
      ArrowLeft: () => (expanded === "true" ? this.#toggle(tr, false) : parent()),
      Enter: () => expanded && this.#toggle(tr),
    };
    if (!moves[event.key] || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    (moves[event.key]() || tr).focus();
  }
}

/** A number of seconds, in words. */
function span(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} d`;
}
