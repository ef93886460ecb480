// @ts-check
// The selected cell: the stages of its block, and the sub-updates that its feed-forward layer writes.

import { isAbort, json, mayRecover, patiently, queueText } from "./api.js";
import { bar, byId, failed, fill, hit, keepFocus, loading, make } from "./dom.js";
import { addEdit } from "./edits.js";
import { togglePin } from "./paths.js";
import { now, on, set } from "./state.js";
import { cellAt, nameOf } from "./trace.js";
import { chip, measure, neuronName, percent, pin, rankChange, sentence, signed } from "./words.js";

/** @import { State, Trace } from "./state.js" */
/** @import { BlockReading, CellReading, Stage, Update } from "./types.js" */

const WHERE = { before: "Before", attention: "After attention", ffn: "After the FFN" };
const SHORT = 6; // tokens per stage before "show all"
let all = false;
/** @type {AbortController|null} */
let asking = null;
let loadedKey = "";

/** What the shown cell depends on. @param {Readonly<State>} state @returns {import("./types.js").CellRequest|null} */
function wanted(state) {
  const chosen = state.selected;
  const trace = chosen && state.traces[chosen.grid];
  if (!chosen || !trace?.layers.length) return null;
  const { input, lens, watch, edits } = trace.question;
  const given = trace.tokens.length ? { ids: trace.tokens.map((token) => token.id) } : input;
  const top = Math.min(10, state.model?.limits.top ?? 10);
  return { input: given, block: chosen.layer, position: chosen.position, lens, watch, edits, top };
}

async function load() {
  const body = wanted(now());
  const key = JSON.stringify(body);
  if (key === loadedKey) return;
  loadedKey = key;
  asking?.abort();
  if (!body || body.block === 0) return set({ cell: { status: "done", message: "", reading: null } });
  const controller = new AbortController();
  asking = controller;
  const old = now().cell.reading;
  set({ cell: { status: "loading", message: "", reading: old } });
  try {
    const reading = await patiently(
      controller.signal,
      (place) => set({ cell: { status: "loading", message: queueText(place), reading: old } }),
      () => json("cell", { method: "POST", body, signal: controller.signal }),
    );
    set({ cell: { status: "done", message: "", reading } });
  } catch (error) {
    if (isAbort(error)) return;
    loadedKey = "";
    set({ cell: { status: "error", message: /** @type {Error} */ (error).message, gone: mayRecover(error), reading: null } });
  }
}

export function start() {
  let timer = 0;
  on(["selected", "traces"], () => {
    clearTimeout(timer);
    timer = window.setTimeout(load, 40);
  });
  on(["connection"], (state) => {
    if (state.connection === "ok" && state.cell.status === "error") load();
  });
  on(["cell", "selected", "view", "pinned", "vector"], draw);
  // The embedding's reading is part of the trace, whose cells may come after the selection.
  on(["traces"], (state) => state.selected?.layer === 0 && draw(state));
  byId("cell").addEventListener("click", (event) => {
    const token = hit(event, "[data-pin]");
    if (token) return togglePin({ id: Number(token.dataset.pin), label: token.dataset.label ?? "" });
    if (hit(event, "[data-retry]")) return load();
    if (hit(event, "[data-all]")) {
      all = !all;
      return draw(now());
    }
    const add = hit(event, "[data-off]");
    const row = hit(event, "[data-neuron]");
    const block = now().cell.reading?.block;
    if (!row || !block) return;
    const neuron = { block, neuron: Number(row.dataset.neuron) };
    if (add) addEdit({ ...neuron, operation: "off", value: 0, positions: "all", on: true });
    else set({ vector: neuron });
  });
}

/** Move the keyboard to the strongest sub-update. */
export function focusUpdates() {
  /** @type {HTMLElement|null} */ (byId("cell").querySelector(".updates tbody button"))?.focus();
}

/** @param {Readonly<State>} state */
function draw(state) {
  keepFocus(byId("cell"), () => render(state));
}

/** @param {Readonly<State>} state */
function render(state) {
  const place = byId("cell");
  const chosen = state.selected;
  const trace = chosen && state.traces[chosen.grid];
  if (!chosen || !trace?.layers.length) {
    return fill(
      place,
      make("h2", {}, "Selected cell"),
      make(
        "p",
        { class: "empty" },
        "Run a prompt, then choose a cell of the grid. Its predictions, stage by stage, and the neurons that write them appear here.",
      ),
    );
  }
  const { reading, status, message, gone } = state.cell;
  const token = trace.tokens[chosen.position];
  const last = trace.layers[trace.layers.length - 1];
  const where = chosen.layer === 0 ? "Layer 0, before block 1" : `Block ${chosen.layer} of ${last}`;
  const head = make(
    "div",
    { class: "bar" },
    make("h2", {}, where),
    make("span", { class: "soft" }, `position ${chosen.position}`),
    chip(token),
  );
  if (chosen.layer === 0) return fill(place, head, ...embedding(trace, chosen.position));
  if (status === "error") return fill(place, head, ...failed(message, gone));
  const fresh = reading && reading.block === chosen.layer && reading.position === chosen.position;
  place.classList.toggle("loading", status === "loading");
  if (!fresh) return fill(place, head, loading(message || "Reading the cell…"));
  const shown = reading.after && state.view !== "before" ? reading.after : reading;
  fill(place, head, ...stages(shown, reading), ...updates(shown, shown === reading.after));
}

/** @param {Trace} trace @param {number} position */
function embedding(trace, position) {
  const cell = cellAt(trace, "before", 0, position);
  const items = (cell?.top ?? []).map(([id, share]) =>
    make("li", {}, pin(nameOf(id), pinned(id)), bar(percent(share), share)),
  );
  return [
    make(
      "p",
      { class: "soft" },
      "The embedding of the token, read by the lens. No block has run yet, so there are no sub-updates.",
    ),
    make("ol", { class: "guesses-list" }, ...items),
  ];
}

/** @param {number} id */
function pinned(id) {
  return now().pinned.some((token) => token.id === id);
}

/** @param {BlockReading} shown @param {CellReading} reading */
function stages(shown, reading) {
  const columns = shown.stages.map(stageColumn);
  const longest = Math.max(...shown.stages.map((stage) => stage.top.length));
  const notes = [];
  if (reading.after) notes.push(shown === reading ? "Without edits." : "With edits.");
  if (shown.missing.attention) notes.push(sentence(shown.missing.attention));
  else if (shown.style === "parallel") notes.push("Attention and FFN of this model run in parallel: both read the same state.");
  return [
    make("h3", {}, "Predictions"),
    notes.length > 0 && make("p", { class: "soft" }, notes.join(" ")),
    make("div", { class: "stages" }, ...columns),
    longest > SHORT &&
      make(
        "button",
        { type: "button", class: "quiet more-tokens", id: "more-tokens", "data-all": true },
        all ? "Show fewer" : `Show ${longest}`,
      ),
  ];
}

/** @param {Stage} stage */
function stageColumn({ where, top, watched }) {
  const items = top.slice(0, all ? top.length : SHORT).map(({ token, prob, climbed }) => {
    const moved = climbed !== null && rankMark(climbed); // There is nothing to compare the first stage with.
    const numbers = make("span", { class: "numbers" }, bar(percent(prob), prob), moved);
    return make("li", {}, pin(token, pinned(token.id)), numbers);
  });
  return make(
    "div",
    { class: "stage" },
    make("h4", {}, WHERE[where]),
    make("ol", { class: "guesses-list" }, ...items),
    watched &&
      make("p", { class: "soft watched" }, `${watched.token.label} ${percent(watched.prob)}, rank ${watched.rank}`),
  );
}

/** @param {number} change of the rank since the stage before */
function rankMark(change) {
  const tone = change > 0 ? "up" : change < 0 ? "down" : "even";
  const title = change ? `Rank ${tone} by ${Math.abs(change)}` : "Same rank as before";
  return make("span", { class: `moved ${tone}`, title }, rankChange(change));
}

/** @param {BlockReading} shown @param {boolean} edited */
function updates(shown, edited) {
  const head = make("h3", {}, "Dominant sub-updates");
  const { updates, shown_share, bias_share, rest_share, total_norm, missing } = shown;
  if (missing.neurons) return [head, make("p", { class: "empty" }, sentence(missing.neurons))];
  const most = Math.max(...updates.map((update) => update.strength), 1e-9);
  const rows = updates.map((update) => updateRow(shown.block, update, most));
  const table = make(
    "table",
    { class: "updates" },
    make("caption", { class: "hidden" }, "Neurons that write most at this cell. Choose one to read its tokens."),
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        ...["Neuron", "Coefficient", "Share", "Pushes towards", ""].map((text, i) =>
          make("th", { scope: "col" }, i === 4 ? make("span", { class: "hidden" }, "Switch off") : text),
        ),
      ),
    ),
    make("tbody", {}, ...rows),
  );
  const parts = [
    { name: "shown", text: `these ${updates.length}: ${percent(shown_share)}`, share: shown_share },
    { name: "bias", text: `bias: ${percent(bias_share)}`, share: bias_share },
    { name: "rest", text: `the rest: ${percent(rest_share)}`, share: rest_share },
  ];
  const strip = make(
    "div",
    { class: "shares", "aria-hidden": "true" },
    ...parts.map(({ name, share }) => {
      const part = make("i", { class: name });
      part.style.flexGrow = String(Math.max(0, share));
      return part;
    }),
  );
  const words = parts.map(({ name, text }) =>
    make("span", { class: "entry" }, make("i", { class: `key ${name}` }), text),
  );
  return [
    head,
    make(
      "p",
      { class: "soft" },
      `Ranked by |coefficient| × length of the value vector.${edited ? " Coefficients as edited." : ""} Share of the FFN's output (norm ${measure(total_norm ?? NaN)}):`,
    ),
    strip,
    make("p", { class: "soft legend" }, ...words),
    missing.vectors && make("p", { class: "soft" }, sentence(missing.vectors)),
    table,
  ];
}

/** @param {number} block @param {Update} update @param {number} most */
function updateRow(block, update, most) {
  const name = neuronName({ block, neuron: update.neuron });
  const towards = update.coefficient < 0 ? update.suppresses : update.promotes;
  const current = now().vector;
  const chosen = current?.block === block && current.neuron === update.neuron;
  const range = update.range;
  const natural = range
    ? `natural range ${measure(range.low)} to ${measure(range.high)}, mean ${measure(range.mean)}`
    : "natural range not known";
  const meter = bar(signed(update.coefficient), update.strength / most);
  meter.classList.add(update.coefficient < 0 ? "less" : "more");
  meter.title = `strength ${measure(update.strength)}; ${natural}`;
  return make(
    "tr",
    { "data-neuron": update.neuron, class: chosen ? "chosen" : null },
    make(
      "th",
      { scope: "row" },
      make(
        "button",
        { type: "button", class: "link", id: `update-${block}-${update.neuron}`, "aria-pressed": String(chosen) },
        update.name ? make("span", { class: "given", title: update.name }, update.name) : name,
      ),
      update.name && make("small", {}, name),
    ),
    make("td", {}, meter),
    make("td", { class: "number" }, percent(update.share)),
    make("td", {}, make("span", { class: "tokens" }, ...towards.slice(0, 4).map(({ token }) => chip(token)))),
    make(
      "td",
      {},
      make(
        "button",
        {
          type: "button",
          class: "quiet",
          "data-off": true,
          title: `Add an edit that switches ${name} off`,
          "aria-label": `Switch ${name} off`,
        },
        "off",
      ),
    ),
  );
}
