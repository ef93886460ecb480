// @ts-check
// A run: asks for the readings of a prompt and collects the frames as they arrive.

import { Gone, Refused, frames, isAbort, patiently, queueText } from "./api.js";
import { inForce } from "./specs.js";
import { now, set, touch } from "./state.js";
import { sentence } from "./words.js";

/** @import { Question, State, Trace } from "./state.js" */
/** @import { Cell, Side } from "./types.js" */

export const TOP = 8; // guesses per cell: enough for the paths of tokens that led at some layer

/** @type {(AbortController|null)[]} */
const running = [null, null];
const reselect = [false, false]; // whether the next answer selects its own position

/** @param {Readonly<State>} state @param {number} grid */
export function promptOf(state, grid) {
  return grid === 0 ? state.prompt : (state.second ?? "");
}

/**
 * What the page would ask now.
 * @param {Readonly<State>} state
 * @param {number} grid
 * @returns {Question}
 */
export function question(state, grid) {
  const text = promptOf(state, grid);
  const live = state.live[grid];
  // Ids where they are known: text that was decoded is never tokenised again.
  const known = live && live.text === text && live.model === state.model?.fingerprint && !live.error;
  const input = known ? { ids: live.tokens.map((t) => t.id) } : { text };
  const follow = state.pinned.slice(0, state.model?.limits.follow ?? 0).map((token) => token.id);
  return { input, text, lens: state.lens, watch: state.watch?.id ?? null, edits: inForce(state.edits), follow };
}

/**
 * What has changed since a run, in words; empty if nothing has.
 * @param {Readonly<State>} state
 * @param {number} grid
 * @returns {string[]}
 */
export function changes(state, grid) {
  const trace = state.traces[grid];
  if (!trace) return [];
  const asked = trace.question;
  const next = question(state, grid);
  const words = [];
  if (asked.text !== next.text) words.push("prompt");
  if (asked.lens !== next.lens) words.push("lens");
  if (asked.watch !== next.watch) words.push("watched token");
  if (asked.edits.join(";") !== next.edits.join(";")) words.push("edits");
  return words;
}

/** @param {number} layer @param {number} position */
export function cellKey(layer, position) {
  return `${layer}.${position}`;
}

/**
 * A reading. Where edits change nothing, bit for bit, the server sends no second one.
 * @param {Trace} trace
 * @param {Side} side
 * @param {number} layer
 * @param {number} position
 * @returns {Cell|undefined}
 */
export function cellAt(trace, side, layer, position) {
  const key = cellKey(layer, position);
  const before = trace.cells.before.get(key);
  if (side === "before") return before;
  return trace.cells.after.get(key) ?? (before && { ...before, change: 0, changed: false });
}

/** A token's label, from any run or pin. @param {number} id @returns {import("./types.js").Token} */
export function nameOf(id) {
  const state = now();
  for (const trace of state.traces) {
    const name = trace?.names.get(id);
    if (name) return name;
  }
  const known = [state.watch, ...state.pinned].find((token) => token?.id === id);
  return { id, text: "", label: known?.label ?? `#${id}`, kind: "text" };
}

/** Run what the page shows; a run that is still going is stopped. */
export function run() {
  const state = now();
  const last = state.traces[0]?.question;
  // The first run with edits shows what they do.
  if (last && !last.edits.length && inForce(state.edits).length && state.view === "before") set({ view: "after" });
  if (state.generation.status === "error") set({ generation: { status: "idle", message: "", sides: {} } });
  for (const grid of [0, 1]) {
    running[grid]?.abort();
    if (promptOf(state, grid)) start(grid);
    else if (grid === 1) setTrace(1, null);
  }
}

/** A run that the server broke off can be asked again when it is back. */
export function serverIsBack() {
  for (const trace of now().traces)
    if (trace?.end === "gone")
      change(trace, { status: "stopped", end: null, message: "The server was away before all cells were read." });
}

export function stop() {
  for (const controller of running) controller?.abort();
}

/** @param {number} grid @param {Trace|null} trace */
function setTrace(grid, trace) {
  const traces = [...now().traces];
  traces[grid] = trace;
  set({ traces });
}

/** @param {Question} asked @returns {Trace} */
function emptyTrace(asked) {
  return {
    question: asked,
    status: "waiting",
    message: "",
    end: null,
    tokens: [],
    positions: [],
    layers: [],
    selected: 0,
    edits: [],
    lowest: null,
    cells: { before: new Map(), after: new Map() },
    names: new Map(),
    saturation: new Map(),
    seconds: 0,
  };
}

/** @param {number} grid */
async function start(grid) {
  const controller = new AbortController();
  running[grid] = controller;
  const state = now();
  const trace = emptyTrace(question(state, grid));
  const last = state.traces[grid];
  const chosen = state.selected?.grid === grid ? state.selected : null;
  // In another text the old position means nothing. Without a last run, the selection came with a link.
  reselect[grid] ||= last !== null && last.question.text !== trace.question.text;
  const selected = chosen && !reselect[grid] ? chosen.position : null;
  const { input, lens, watch, edits, follow } = trace.question;
  const top = Math.min(TOP, state.model?.limits.top ?? TOP);
  const body = { input, lens, watch, edits, follow, top, selected };
  setTrace(grid, trace);
  const titles = state.model?.lenses.map(({ title }) => title).join(", ");
  if (state.model && !state.model.lenses.some(({ name }) => name === lens))
    return change(trace, { status: "error", end: "refused", message: `The lens "${lens}" is not loaded. Choose one of: ${titles}.` });
  try {
    await patiently(
      controller.signal,
      (place) => change(trace, { message: queueText(place) }),
      async () => {
        for await (const frame of frames("trace", body, "done", controller.signal)) {
          take(trace, frame);
          if (frame.frame !== "meta" || !reselect[grid]) continue;
          reselect[grid] = false;
          if (chosen) set({ selected: { ...chosen, position: trace.selected } });
        }
      },
    );
  } catch (error) {
    const { message } = /** @type {Error} */ (error);
    const end = error instanceof Gone ? "gone" : error instanceof Refused ? "refused" : null;
    change(trace, isAbort(error) ? { status: "stopped", message: "" } : { status: "error", message, end });
  } finally {
    if (running[grid] === controller) running[grid] = null;
  }
}

/** @param {Trace} trace @param {Partial<Trace>} patch */
function change(trace, patch) {
  Object.assign(trace, patch);
  touch("traces");
}

/** @param {Trace} trace @param {import("./types.js").TraceFrame} frame */
function take(trace, frame) {
  switch (frame.frame) {
    case "queued":
      change(trace, { message: queueText(frame.place) });
      break;
    case "meta": {
      const { tokens, positions, layers, selected, edits, lowest } = frame;
      change(trace, { status: "running", message: "", tokens, positions, layers, selected, edits, lowest });
      break;
    }
    case "cells":
      for (const [id, token] of Object.entries(frame.names)) trace.names.set(Number(id), token);
      for (const cell of frame.cells) trace.cells[frame.side].set(cellKey(cell.layer, cell.position), cell);
      touch("traces");
      break;
    case "saturation":
      trace.saturation.set(frame.position, { before: frame.before, after: frame.after, exits: frame.exits });
      touch("traces");
      break;
    case "done":
      change(trace, { status: "done", seconds: frame.seconds });
      break;
    case "error":
      // What the server says of the question stays true; a failure of its own may not happen again.
      change(trace, {
        status: "error",
        message: sentence(frame.error),
        end: frame.place !== null || frame.error.startsWith("the server failed") ? null : "refused",
      });
      break;
  }
}
