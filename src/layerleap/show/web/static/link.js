// @ts-check
// The view as a link: what differs from the defaults, in the address's fragment.

import { byId } from "./dom.js";
import { DEFAULTS, now, on, set } from "./state.js";
import { parse, spec } from "./specs.js";

/** @import { Named, View } from "./state.js" */

export const LONGEST = 2000; // characters of a prompt in a link: browsers and chats cut longer ones
const COLOURS = ["top", "watch", "final"];
const VIEWS = ["before", "after", "difference"];

/** @param {Readonly<View>} view */
export function toFragment(view) {
  const parts = new URLSearchParams();
  if (view.prompt && view.prompt.length <= LONGEST) parts.set("p", view.prompt);
  if (view.second !== null && view.second.length <= LONGEST) parts.set("p2", view.second);
  if (view.lens !== DEFAULTS.lens) parts.set("lens", view.lens);
  if (view.watch) parts.set("watch", JSON.stringify([view.watch.id, view.watch.label]));
  if (view.edits.length) parts.set("edits", view.edits.map((e) => (e.on ? "" : "!") + spec(e)).join(";"));
  if (view.selected) parts.set("cell", [view.selected.layer, view.selected.position, view.selected.grid].join("."));
  if (view.pinned.length) parts.set("pins", JSON.stringify(view.pinned.map((t) => [t.id, t.label])));
  if (view.colour !== DEFAULTS.colour) parts.set("colour", view.colour);
  if (view.view !== DEFAULTS.view) parts.set("view", view.view);
  if (view.allLayers) parts.set("layers", "all");
  if (view.vector) parts.set("vector", `${view.vector.block}.${view.vector.neuron}`);
  if (view.query) parts.set("q", view.query);
  if (view.newTokens !== DEFAULTS.newTokens) parts.set("new", String(view.newTokens));
  return parts.toString();
}

/**
 * A view from a link. What cannot be read is left at its default: a damaged link still opens.
 * @param {string} fragment
 * @returns {View}
 */
export function fromFragment(fragment) {
  const parts = new URLSearchParams(fragment.replace(/^#/, ""));
  const cell = numbers(parts.get("cell"), 3);
  const vector = numbers(parts.get("vector"), 2);
  const [watch = null] = named(`[${parts.get("watch") ?? ""}]`);
  const colour = parts.get("colour") ?? "";
  const view = parts.get("view") ?? "";
  return {
    prompt: parts.get("p") ?? DEFAULTS.prompt,
    second: parts.get("p2"),
    lens: parts.get("lens") ?? DEFAULTS.lens,
    watch,
    edits: readEdits((parts.get("edits") ?? "").split(";")),
    selected: cell && { layer: cell[0], position: cell[1], grid: Math.min(1, cell[2]) },
    pinned: named(parts.get("pins") ?? "[]"),
    colour: COLOURS.includes(colour) ? /** @type {View["colour"]} */ (colour) : DEFAULTS.colour,
    view: VIEWS.includes(view) ? /** @type {View["view"]} */ (view) : DEFAULTS.view,
    allLayers: parts.get("layers") === "all",
    vector: vector && { block: vector[0], neuron: vector[1] },
    query: parts.get("q") ?? DEFAULTS.query,
    newTokens: Number(parts.get("new")) || DEFAULTS.newTokens,
  };
}

/** What a link gives as edits but is none. @param {string} fragment */
export function unreadEdits(fragment) {
  const texts = new URLSearchParams(fragment.replace(/^#/, "")).get("edits")?.split(";") ?? [];
  return texts.filter((text) => text && !parse(text.replace(/^!/, "")));
}

/** @param {string[]} texts each a spec, with "!" before one that is switched off */
function readEdits(texts) {
  return texts.flatMap((text) => {
    const edit = parse(text.replace(/^!/, ""));
    return edit ? [{ ...edit, on: !text.startsWith("!") }] : [];
  });
}

/** @param {string|null} text @param {number} length */
function numbers(text, length) {
  const values = (text ?? "").split(".").map(Number);
  const whole = values.length === length && values.every((value) => Number.isInteger(value) && value >= 0);
  return text && whole ? values : null;
}

/** @param {string} text @returns {Named[]} */
function named(text) {
  try {
    const pairs = /** @type {[unknown, unknown][]} */ (JSON.parse(text));
    return pairs.flatMap(([id, label]) =>
      Number.isInteger(id) && typeof label === "string" ? [{ id: Number(id), label }] : [],
    );
  } catch {
    return [];
  }
}

/** What a session keeps and an export asks for; only what is not the default. */
export function snapshot() {
  const state = now();
  /** @type {Record<string, unknown>} */
  const kept = { prompt: state.prompt };
  if (state.second !== null) kept.second = state.second;
  for (const [grid, text] of [state.prompt, state.second].entries()) {
    const trace = state.traces[grid];
    if (trace && trace.question.text === text) kept[grid ? "second_ids" : "ids"] = trace.tokens.map(({ id }) => id);
  }
  if (state.lens !== DEFAULTS.lens) kept.lens = state.lens;
  if (state.watch) kept.watch = { id: state.watch.id, label: state.watch.label };
  const on = state.edits.filter((edit) => edit.on).map(spec);
  const off = state.edits.filter((edit) => !edit.on).map(spec);
  if (on.length) kept.edits = on;
  if (off.length) kept.edits_off = off;
  if (state.selected) kept.selected = state.selected;
  if (state.pinned.length) kept.pinned = state.pinned.map(({ id, label }) => ({ id, label }));
  if (state.colour !== DEFAULTS.colour) kept.colour = state.colour;
  if (state.view !== DEFAULTS.view) kept.view = state.view;
  if (state.allLayers) kept.all_layers = true;
  if (state.vector) kept.vector = state.vector;
  if (state.query) kept.query = state.query;
  const [side, space] = ["search-side", "search-space"].map((id) => /** @type {HTMLSelectElement} */ (byId(id)).value);
  if (side !== "both") kept.side = side;
  if (space !== "any") kept.space = space;
  if (state.newTokens !== DEFAULTS.newTokens) kept.new_tokens = state.newTokens;
  return kept;
}

/**
 * The inverse of `snapshot`, by way of the link's checks.
 * @param {any} kept
 * @returns {View}
 */
export function fromSnapshot(kept) {
  const edits = [...(kept.edits ?? []), ...(kept.edits_off ?? []).map((/** @type {string} */ text) => `!${text}`)];
  const parts = new URLSearchParams({ p: String(kept.prompt ?? ""), edits: edits.join(";") });
  const pairs = (kept.pinned ?? []).map((/** @type {Named} */ token) => [token.id, token.label]);
  parts.set("pins", JSON.stringify(pairs));
  if (kept.watch) parts.set("watch", JSON.stringify([kept.watch.id, kept.watch.label]));
  if (kept.selected)
    parts.set("cell", [kept.selected.layer, kept.selected.position, kept.selected.grid ?? 0].join("."));
  if (kept.vector) parts.set("vector", `${kept.vector.block}.${kept.vector.neuron}`);
  if (kept.all_layers) parts.set("layers", "all");
  const plain = { p2: "second", lens: "lens", colour: "colour", view: "view", q: "query", new: "new_tokens" };
  for (const [name, key] of Object.entries(plain)) {
    if (kept[key] !== undefined && kept[key] !== null) parts.set(name, String(kept[key]));
  }
  return fromFragment(parts.toString());
}

/** Keep the address in step with the view, without an entry in the history. */
export function start() {
  const keys = /** @type {(keyof View)[]} */ (Object.keys(DEFAULTS));
  let timer = 0;
  on(keys, () => {
    clearTimeout(timer);
    timer = window.setTimeout(write, 120);
  });
  window.addEventListener("pagehide", write);
}

function write() {
  const fragment = toFragment(now());
  if (fragment !== location.hash.replace(/^#/, "")) {
    history.replaceState(null, "", fragment ? `#${fragment}` : location.pathname + location.search);
  }
}

/** Take over a view, for example from a link. @param {View} view */
export function show(view) {
  set(view);
  write();
}
