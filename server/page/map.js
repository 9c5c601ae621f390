// The page map: a square for each page, or for some of them, on a canvas.

const HEIGHT = 320; // CSS pixels that a map takes if it can
const LARGEST = 14, SMALLEST = 2;
const COLORS = ["free", "cached", "held", "most-held", "open", "sink", "window", "selected"];
const LETTERS = { ".": "free", 0: "cached", o: "open", s: "sink", w: "window" };
const number = new Intl.NumberFormat("en");

/** The colours of the scheme that is on now, by the letter of a cell. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const named = Object.fromEntries(COLORS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const [from, to] = [parts(named.held), parts(named["most-held"])];
  const colors = { selected: named.selected };
  for (const [letter, name] of Object.entries(LETTERS)) colors[letter] = named[name];
  for (let count = 1; count <= 9; count++) {
    // The step from one holder to two is the largest: whether a page is shared matters more than by how many.
    const share = Math.log(count) / Math.log(9);
    colors[count] = `rgb(${from.map((value, part) => Math.round(value + share * (to[part] - value))).join(" ")})`;
  }
  return colors;
}

class PageMap {
  #colors = palette();
  #drawn = null;

  constructor(canvas) {
    this.canvas = canvas;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.#colors = palette();
      this.#redraw();
    });
    new ResizeObserver(() => this.#redraw()).observe(canvas.parentElement);
  }

  /** `pool`: a pool of the map; `selected`: numbers of pages that light up; `label`: the map in words. */
  show(pool, selected, label) {
    const lit = new Set(selected.map((page) => Math.floor(page / pool.pages_per_cell)));
    this.#drawn = { cells: pool.cells, lit };
    this.canvas.setAttribute("aria-label", label);
    this.#redraw();
  }

  #redraw() {
    if (!this.#drawn) return;
    const { cells, lit } = this.#drawn;
    const width = this.canvas.parentElement.clientWidth;
    const fitting = Math.floor(Math.sqrt((width * HEIGHT) / Math.max(1, cells.length)));
    const size = Math.max(SMALLEST, Math.min(LARGEST, fitting));
    const columns = Math.max(1, Math.floor(width / size));
    const height = size * Math.max(1, Math.ceil(cells.length / columns));
    const scale = window.devicePixelRatio || 1;
    const [pixelWidth, pixelHeight] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== pixelWidth) this.canvas.width = pixelWidth;
    if (this.canvas.height !== pixelHeight) this.canvas.height = pixelHeight;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const side = size - (size > 4 ? 1 : 0);
    for (let at = 0; at < cells.length; at++) {
      context.fillStyle = this.#colors[lit.has(at) ? "selected" : cells[at]];
      context.fillRect((at % columns) * size, Math.floor(at / columns) * size, side, side);
    }
  }
}

/** Both pools, with their legends. */
class PoolMaps {
  #sealed = new PageMap(byId("sealed"));
  #open = new PageMap(byId("open"));

  show({ tiers, map }) {
    const { sealed, open } = tiers;
    const selected = map.selected ?? { id: null, sealed: [], open: [] };
    const count = (tier, state) => tier.states[state]?.pages ?? 0;
    const numShared = map.sealed.pages_per_cell === 1 ? (map.sealed.cells.match(/[2-9]/g)?.length ?? 0) : null;
    const numHeld = count(sealed, "held") - (numShared ?? 0);
    setText("sealed-free", number.format(count(sealed, "free")));
    setText("sealed-cached", number.format(count(sealed, "cached")));
    setText("held-label", numShared === null ? "Held" : "Held by one");
    setText("sealed-held", number.format(numHeld));
    setText("sealed-shared", numShared === null ? "" : number.format(numShared));
    for (const state of ["free", "cached", "open", "sink", "window"]) {
      setText(`open-${state}`, number.format(count(open, state)));
    }
    setText("sealed-size", sizeOf(map.sealed, map.page_tokens));
    setText("open-size", sizeOf(map.open, map.page_tokens));
    const numSelected = selected.sealed.length + selected.open.length;
    byId("selected-legend").hidden = !map.selected;
    setText("selected-count", number.format(numSelected));
    this.#sealed.show(map.sealed, selected.sealed, inWords("Sealed pool", sealed));
    this.#open.show(map.open, selected.open, inWords("Open pool", open));
  }
}

function sizeOf(pool, pageTokens) {
  const pages = `${number.format(pool.pages)} pages of ${pageTokens} tokens`;
  return pool.pages_per_cell === 1 ? pages : `${pages}, ${pool.pages_per_cell} in each square`;
}

function inWords(name, tier) {
  const states = Object.entries(tier.states).map(([state, { pages }]) => `${number.format(pages)} ${state}`);
  return `${name}, ${number.format(tier.total.pages)} pages: ${states.join(", ")}`;
}

/** Set the text of an element only where it changes, so that nothing else is disturbed. */
function setText(target, text) {
  const element = typeof target === "string" ? byId(target) : target;
  if (element.textContent !== text) element.textContent = text;
}
