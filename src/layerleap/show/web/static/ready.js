// @ts-check
// Whether a run can succeed: "Run again" is offered only where it can.

import { fault } from "./edits.js";
import { now } from "./state.js";
import { changes, promptOf } from "./trace.js";

/** @import { State } from "./state.js" */

/** Why the prompts and edits of the page cannot be run; empty if they can. @param {Readonly<State>} state */
export function obstacle(state) {
  for (const grid of state.second === null ? [0] : [0, 1]) {
    const wrong = wrongPrompt(state, grid);
    if (wrong) return wrong;
  }
  return state.edits.filter((edit) => edit.on).map(fault).find(Boolean) ?? "";
}

/** @param {Readonly<State>} state @param {number} grid */
function wrongPrompt(state, grid) {
  const text = promptOf(state, grid);
  const name = grid ? "The second prompt" : "The prompt";
  if (!text) return grid ? "" : "The prompt is empty.";
  const live = state.live[grid];
  if (live?.text !== text || live.waits) return ""; // not known yet
  if (live.error) return live.error;
  const { length } = live.tokens;
  return length > live.limit ? `${name} has ${length} tokens, but at most ${live.limit} can be read.` : "";
}

/** Whether the question of a run that was refused is still the same. @param {number} grid */
export function isRefused(grid) {
  const trace = now().traces[grid];
  return trace?.status === "error" && trace.end === "refused" && changes(now(), grid).length === 0;
}
