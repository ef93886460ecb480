// @ts-check
// A look at the cell under the pointer or the keyboard's focus. It has its own strip under the grid, so
// it never covers what one points at; without a cell the strip is the legend.

import { bar, byId, fill, make } from "./dom.js";
import { now, on } from "./state.js";
import { cellAt, nameOf } from "./trace.js";
import { chip, noun, number, percent } from "./words.js";

/** @import { Selection } from "./state.js" */

const OPEN = 150; // milliseconds before the strip follows the pointer
const CLOSE = 80;
let timer = 0;
/** @type {Selection|null} */
let shown = null;

/** @param {Selection} spot */
export function showSoon(spot) {
  clearTimeout(timer);
  timer = window.setTimeout(() => show(spot), OPEN);
}

export function hide() {
  clearTimeout(timer);
  timer = window.setTimeout(() => show(null), CLOSE);
}

/** @param {Selection|null} spot */
function show(spot) {
  shown = spot;
  const trace = spot && now().traces[spot.grid];
  if (!spot || !trace) return legend();
  const edited = trace.question.edits.length > 0;
  const side = edited && now().view !== "before" ? "after" : "before";
  const cell = cellAt(trace, side, spot.layer, spot.position);
  if (!cell) return legend();
  const guesses = cell.top
    .slice(0, 6)
    .map(([id, share]) => make("span", { class: "guess" }, chip(nameOf(id)), bar(percent(share), share)));
  const facts = [`KL to the answer ${number(cell.kl)}`, `entropy ${number(cell.entropy)} nats`];
  const watch = now().watch;
  if (cell.watch && watch) facts.unshift(`watched ${watch.label} ${percent(cell.watch[0])}, rank ${cell.watch[1]}`);
  if (side === "after")
    facts.push(cell.changed ? `edits change it by ${number(cell.change ?? NaN)} nats` : "edits change nothing here");
  const where = make(
    "span",
    { class: "where" },
    "layer ",
    make("b", {}, spot.layer),
    " at ",
    chip(trace.tokens[spot.position]),
  );
  fill(
    byId("peek"),
    make("span", { class: "guesses" }, where, ...guesses),
    make("span", { class: "soft facts" }, facts.join(" · ")),
  );
}

function legend() {
  const state = now();
  if (!state.traces[0]?.layers.length) return fill(byId("peek"));
  const edited = state.traces.some((trace) => trace && trace.question.edits.length > 0);
  const difference = edited && state.view === "difference";
  /** @param {string} name @param {string} text */
  const entry = (name, text) => make("span", { class: "entry" }, make("i", { class: `key ${name}` }), text);
  const entries = difference
    ? [
        entry("more", state.colour === "top" ? "" : "more likely"),
        entry("less", "less likely"),
        entry("swapped", `another top ${noun(state.model)}`),
        entry("same", "unchanged, bit for bit"),
      ]
    : [
        entry(
          "heat",
          `colour and bar: probability of the ${state.colour === "watch" ? "watched" : state.colour} ${noun(state.model)}`,
        ),
        entry("agrees", `same as the final ${noun(state.model)}`),
        entry("settled", "saturated from here on"),
      ];
  if (difference && state.colour === "top")
    entries.splice(0, 2, entry("change", "divergence between without and with edits"));
  fill(byId("peek"), make("span", { class: "legend soft" }, ...entries));
}

export function start() {
  on(["traces", "colour", "view"], () => {
    if (!shown) legend();
  });
}
