// @ts-check
// The grid: a real table of tokens by layers, with one handler per table. Long prompts have only the
// rows in view in the document.

import { byId, fill, hit, make } from "./dom.js";
import { fittingStride, strided, strideText } from "./layers.js";
import { look } from "./look.js";
import { hide, showSoon } from "./peek.js";
import { now, on, set } from "./state.js";
import { changes } from "./trace.js";
import { noun, spoken, tokenTitle } from "./words.js";

/** @import { Trace } from "./state.js" */
/** @typedef {{layer: number, position: number}} Spot */

const LEAST = 48; // pixels that a column needs for a short token
const HEAD = 118; // and the column with the prompt's tokens
const ROW = 27; // height of a row; style.css has the same
const WHOLE = 120; // prompts up to this length are in the document as a whole
const SPARE = 12; // rows above and below those in view

class Grid {
  /** @param {number} number 0, or 1 for the second prompt */
  constructor(number) {
    this.number = number;
    /** @type {Trace|null} */
    this.trace = null;
    /** @type {number[]} */
    this.columns = [];
    this.stride = 1;
    this.first = 0;
    this.last = 0;
    /** @type {Spot|null} */
    this.cursor = null;
    this.signature = "";
    this.revealed = "";
    /** @type {WeakMap<Element, string>} */
    this.painted = new WeakMap();
    this.head = make("thead", { role: "rowgroup" });
    this.body = make("tbody", { role: "rowgroup" });
    this.table = make("table", { role: "grid", id: `grid-${number}` }, this.head, this.body);
    this.scroll = make("div", { class: "scroll" }, this.table);
    this.title = make("p", { class: "title" });
    this.box = make("div", { class: "gridbox", "data-grid": number, hidden: true }, this.title, this.scroll);
    this.listen();
  }

  listen() {
    this.table.addEventListener("click", (event) => {
      const spot = spotOf(hit(event, "[data-layer]"));
      if (!spot) return;
      this.move(spot);
      this.select(spot);
    });
    this.table.addEventListener("keydown", (event) => this.key(event));
    this.table.addEventListener("mouseover", (event) => this.peek(event));
    this.table.addEventListener("focusin", (event) => this.peek(event));
    this.table.addEventListener("mouseleave", hide);
    this.table.addEventListener("focusout", hide);
    this.scroll.addEventListener("scroll", () => this.scrolled(), { passive: true });
    new ResizeObserver(() => this.update()).observe(this.scroll);
  }

  /** @param {Event} event */
  peek(event) {
    const spot = spotOf(hit(event, "td[data-layer]"));
    if (spot) showSoon({ grid: this.number, ...spot });
  }

  /** @param {Spot} spot */
  select(spot) {
    set({ selected: { grid: this.number, ...spot } });
  }

  /** Bring the table in step with the state. */
  update() {
    const state = now();
    const trace = state.traces[this.number];
    this.box.hidden = !trace || (!trace.layers.length && !this.trace);
    if (!trace) {
      this.trace = null;
      this.signature = "";
      return;
    }
    const old = changes(state, this.number).length > 0;
    this.box.classList.toggle("stale", old || !trace.layers.length);
    if (!trace.layers.length) return; // The last run stays visible, marked, until this one answers.
    // In another text the keyboard's place is that of the selection.
    if (this.trace && this.trace.question.text !== trace.question.text) this.cursor = null;
    this.trace = trace;
    this.place(trace);
    this.columns = this.chooseColumns(trace, state.allLayers);
    const window = this.rowsInView(trace);
    const signature = [trace.tokens.map((token) => token.id), trace.positions, this.columns, window].join("|");
    if (signature !== this.signature) {
      this.signature = signature;
      this.layout(trace, window[0], window[1]);
    }
    this.paint();
    this.reveal(trace);
  }

  /** The keyboard's place, where it has none. @param {Trace} trace */
  place(trace) {
    if (this.cursor && trace.positions.includes(this.cursor.position)) return;
    const chosen = now().selected;
    const fits = chosen?.grid === this.number && trace.positions.includes(chosen.position);
    const end = { layer: trace.layers[trace.layers.length - 1], position: trace.positions[trace.positions.length - 1] };
    this.cursor = fits ? chosen : end;
  }

  /** Scroll, within the table only, to a row that was selected elsewhere. @param {Trace} trace */
  reveal(trace) {
    const chosen = now().selected;
    const key =
      chosen?.grid === this.number ? `${chosen.position} of ${trace.positions.length}, ${trace.edits.length}` : "";
    if (!key || key === this.revealed) return;
    this.revealed = key;
    const top = trace.positions.indexOf(chosen?.position ?? 0) * ROW;
    const room = this.scroll.clientHeight - 2 * ROW - 2; // under the head, which stays in place
    if (top < this.scroll.scrollTop) this.scroll.scrollTop = top;
    else if (top > this.scroll.scrollTop + room) this.scroll.scrollTop = top - room;
  }

  /** @param {Trace} trace @param {boolean} all */
  chooseColumns(trace, all) {
    const width = this.scroll.clientWidth - HEAD;
    this.stride = all || width <= 0 ? 1 : fittingStride(trace.layers.length, width, LEAST);
    return strided(trace.layers, this.stride);
  }

  /** @param {Trace} trace @returns {[number, number]} */
  rowsInView(trace) {
    const rows = trace.positions.length;
    if (rows <= WHOLE) return [0, rows];
    const start = Math.floor(this.scroll.scrollTop / ROW) - SPARE;
    const first = Math.max(0, start - (start % SPARE)); // In steps, so that not every pixel rebuilds.
    const last = Math.ceil((this.scroll.scrollTop + this.scroll.clientHeight) / ROW) + 2 * SPARE;
    return [first, Math.min(rows, last)];
  }

  /** @param {Trace} trace @param {number} first @param {number} last */
  layout(trace, first, last) {
    const focused = this.table.contains(document.activeElement);
    this.table.setAttribute(
      "aria-label",
      `${this.number ? "Second prompt" : "Prompt"}: top ${noun(now().model)} by token and layer`,
    );
    this.table.setAttribute("aria-rowcount", String(trace.positions.length + 1));
    this.table.setAttribute("aria-colcount", String(trace.layers.length + 1));
    this.table.style.setProperty("--columns", String(this.columns.length));
    const heads = this.columns.map((layer) =>
      make(
        "th",
        {
          role: "columnheader",
          scope: "col",
          "aria-colindex": layer + 2,
          "data-column": layer,
          title: layer ? `After block ${layer}` : "Before block 1: the embedding",
        },
        layer,
      ),
    );
    fill(
      this.head,
      make(
        "tr",
        { role: "row", "aria-rowindex": 1 },
        make("th", { role: "columnheader", scope: "col", "aria-colindex": 1, class: "corner" }, "token \\ layer"),
        ...heads,
      ),
    );
    const rows = trace.positions.slice(first, last).map((position, index) => this.row(trace, position, first + index));
    fill(this.body, space(first), ...rows, space(trace.positions.length - last));
    if (focused && this.cursor) this.cellOf(this.cursor)?.focus({ preventScroll: true });
  }

  /** @param {Trace} trace @param {number} position @param {number} index */
  row(trace, position, index) {
    const token = trace.tokens[position];
    const last = trace.layers[trace.layers.length - 1];
    const name = make(
      "th",
      {
        role: "rowheader",
        scope: "row",
        "aria-colindex": 1,
        "data-layer": last,
        "data-position": position,
        title: `Position ${position}: ${tokenTitle(token)}`,
      },
      make("span", { class: "place" }, position),
      make("span", { class: `token ${token.kind}` }, token.label),
    );
    const cells = this.columns.map((layer) =>
      make(
        "td",
        { role: "gridcell", "aria-colindex": layer + 2, "data-layer": layer, "data-position": position, tabindex: -1 },
        make("span"),
      ),
    );
    return make("tr", { role: "row", "aria-rowindex": index + 2, "data-row": position }, name, ...cells);
  }

  /** Colours, tokens and marks of the cells that are in the document. */
  paint() {
    const state = now();
    const trace = this.trace;
    if (!trace) return;
    const chosen = state.selected?.grid === this.number ? state.selected : null;
    const edited = trace.question.edits.length > 0;
    const how = { colour: state.colour, view: edited ? state.view : /** @type {const} */ ("before") };
    const cursor = this.cursor && { ...this.cursor, layer: this.nearest(this.cursor.layer) };
    for (const row of this.body.rows) {
      if (!row.dataset.row) continue;
      const position = Number(row.dataset.row);
      const settled = trace.saturation.get(position)?.[how.view === "before" ? "before" : "after"] ?? null;
      const mark = settled === null ? null : (this.columns.find((layer) => layer >= settled) ?? null);
      row.classList.toggle("chosen", chosen?.position === position);
      for (const cell of row.cells) {
        if (cell.tagName !== "TD") continue;
        const layer = Number(cell.dataset.layer);
        const here = chosen?.position === position && this.nearest(chosen.layer) === layer;
        const stop = cursor?.position === position && cursor.layer === layer;
        this.paintCell(
          cell,
          look(trace, how, layer, position),
          here,
          mark === layer,
          stop,
          spoken(trace.tokens[position]),
        );
      }
    }
    for (const cell of this.head.rows[0]?.cells ?? []) {
      cell.classList.toggle("chosen", chosen !== null && cell.dataset.column === String(this.nearest(chosen.layer)));
    }
    this.showTitle(trace);
  }

  /**
   * @param {HTMLTableCellElement} cell
   * @param {import("./look.js").Look} shown
   * @param {boolean} chosen
   * @param {boolean} settled
   * @param {boolean} stop whether Tab stops here
   * @param {string} word
   */
  paintCell(cell, shown, chosen, settled, stop, word) {
    const signature = [
      shown.token?.label,
      shown.share.toFixed(3),
      shown.tone,
      shown.agrees,
      shown.same,
      shown.swapped,
      shown.spoken,
      chosen,
      settled,
      stop,
    ].join();
    if (this.painted.get(cell) === signature) return;
    this.painted.set(cell, signature);
    /** @type {(string|undefined)[]} */
    const classes = [shown.tone, shown.token?.kind];
    for (const [name, is] of Object.entries({
      waiting: !shown.token,
      agrees: shown.agrees,
      same: shown.same,
      swapped: shown.swapped,
      chosen,
      settled,
    }))
      if (is) classes.push(name);
    cell.className = classes.filter(Boolean).join(" ");
    cell.style.setProperty("--p", shown.share.toFixed(3));
    cell.tabIndex = stop ? 0 : -1;
    cell.setAttribute("aria-selected", String(chosen));
    cell.setAttribute(
      "aria-label",
      `${word}, position ${cell.dataset.position}, layer ${cell.dataset.layer}: ${shown.spoken}${settled ? ", saturated from here" : ""}`,
    );
    /** @type {Element} */ (cell.firstElementChild).textContent = shown.token?.label ?? "·";
  }

  /** @param {Trace} trace */
  showTitle(trace) {
    const words = [];
    if (now().second !== null) words.push(this.number ? "Second prompt" : "First prompt");
    if (trace.status === "running") words.push("reading…");
    if (trace.status === "done") words.push(`${trace.seconds.toFixed(2)} s`);
    if (trace.edits.length)
      words.push(
        trace.edits.map((edit) => edit.sentence + (edit.applied === false ? " (no such position in this prompt)" : "")).join(" · "),
      );
    this.title.textContent = words.join(" · ");
    this.title.hidden = now().second === null && trace.edits.length === 0;
  }

  /** The column that stands for a layer. @param {number} layer */
  nearest(layer) {
    return this.columns.find((column) => column >= layer) ?? this.columns[this.columns.length - 1];
  }

  /** @param {Spot} spot @returns {HTMLElement|null} */
  cellOf(spot) {
    const layer = this.nearest(spot.layer);
    return this.body.querySelector(`td[data-layer="${layer}"][data-position="${spot.position}"]`);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const trace = this.trace;
    const from = spotOf(hit(event, "td[data-layer]"));
    if (!trace || !from || event.altKey || event.metaKey) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      return this.select(from);
    }
    const column = this.columns.indexOf(from.layer);
    const row = trace.positions.indexOf(from.position);
    const end = { column: this.columns.length - 1, row: trace.positions.length - 1 };
    /** @type {Record<string, [number, number]>} */
    const steps = {
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      PageUp: [row - 10, column],
      PageDown: [row + 10, column],
      Home: [event.ctrlKey ? 0 : row, 0],
      End: [event.ctrlKey ? end.row : row, end.column],
    };
    const to = steps[event.key];
    if (!to) return;
    event.preventDefault();
    const next = { row: Math.max(0, Math.min(end.row, to[0])), column: Math.max(0, Math.min(end.column, to[1])) };
    this.move({ layer: this.columns[next.column], position: trace.positions[next.row] });
  }

  /** Put the keyboard's place on a cell. @param {Spot} spot */
  move(spot) {
    this.cursor = spot;
    if (!this.cellOf(spot) && this.trace) {
      this.scroll.scrollTop = this.trace.positions.indexOf(spot.position) * ROW - this.scroll.clientHeight / 2;
      this.update();
    }
    this.paint();
    const cell = this.cellOf(spot);
    cell?.focus({ preventScroll: true });
    cell?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  scrolled() {
    const other = grids[1 - this.number];
    if (other.trace && !other.box.hidden) {
      other.scroll.scrollTop = this.scroll.scrollTop;
      other.scroll.scrollLeft = this.scroll.scrollLeft;
    }
    if (this.trace && this.trace.positions.length > WHOLE) this.update();
  }
}

/** @param {HTMLElement|null} cell @returns {Spot|null} */
function spotOf(cell) {
  return cell ? { layer: Number(cell.dataset.layer), position: Number(cell.dataset.position) } : null;
}

/** Rows that are not in the document, as empty height. @param {number} rows */
function space(rows) {
  if (!rows) return null;
  const row = make("tr", { "aria-hidden": "true", class: "space" });
  row.style.height = `${rows * ROW}px`;
  return row;
}

/** @type {Grid[]} */
const grids = [];

export function start() {
  for (const number of [0, 1]) {
    const grid = new Grid(number);
    grids.push(grid);
    byId("grids").append(grid.box);
  }
  let due = 0;
  on(["traces", "selected", "colour", "view", "allLayers", "prompt", "second", "lens", "watch", "edits"], () => {
    due ||= requestAnimationFrame(() => {
      due = 0;
      for (const grid of grids) grid.update();
      showStride();
    });
  });
  on(["traces"], chooseFirst);
  startControls();
}

/** A run without a selection selects where its answer is: the last layer. */
function chooseFirst() {
  const state = now();
  const chosen = state.selected;
  const trace = state.traces[chosen?.grid ?? 0] ?? state.traces[0];
  if (!trace?.layers.length) return;
  const fits = chosen && trace.positions.includes(chosen.position) && trace.layers.includes(chosen.layer);
  if (fits && state.traces[chosen.grid]) return;
  set({ selected: { grid: 0, layer: trace.layers[trace.layers.length - 1], position: trace.selected } });
}

function startControls() {
  const colour = /** @type {HTMLSelectElement} */ (byId("colour"));
  colour.addEventListener("change", () => set({ colour: /** @type {any} */ (colour.value) }));
  byId("views").addEventListener("click", (event) => {
    const view = hit(event, "[data-view]")?.dataset.view;
    if (view) set({ view: /** @type {any} */ (view) });
  });
  byId("all-layers").addEventListener("click", () => set({ allLayers: !now().allLayers }));
  byId("maximise").addEventListener("click", () => {
    const wide = document.body.classList.toggle("wide");
    byId("maximise").setAttribute("aria-pressed", String(wide));
  });
  on(["model"], ({ model }) => {
    for (const option of colour.options)
      option.textContent = `${{ watch: "watched" }[option.value] ?? option.value} ${noun(model)}`;
  });
  on(["colour", "watch", "view", "traces"], (state) => {
    colour.value = state.colour;
    const option = colour.querySelector("option[value=watch]");
    if (option) /** @type {HTMLOptionElement} */ (option).disabled = !state.watch;
    const edited = state.traces.some((trace) => trace && trace.question.edits.length > 0);
    byId("views").hidden = !edited;
    for (const button of byId("views").querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(button.dataset.view === state.view));
    }
  });
}

function showStride() {
  const stride = Math.max(...grids.map((grid) => (grid.box.hidden ? 1 : grid.stride)));
  const all = now().allLayers;
  byId("stride").textContent = strideText(stride);
  const button = byId("all-layers");
  button.hidden = stride === 1 && !all;
  button.textContent = all ? "Fit them" : "Show all";
}

/** Move the keyboard into the grid. */
export function focusGrid() {
  const grid = grids[now().selected?.grid ?? 0];
  if (grid.cursor) grid.cellOf(grid.cursor)?.focus();
}

/** Have every row in the document, for an export. @param {() => void} work */
export function whole(work) {
  for (const grid of grids) if (grid.trace) grid.layout(grid.trace, 0, grid.trace.positions.length);
  for (const grid of grids) grid.paint();
  work();
  for (const grid of grids) {
    grid.signature = "";
    grid.update();
  }
}
