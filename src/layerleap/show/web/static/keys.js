// @ts-check
// Keys that work anywhere but in a field.

import { focusUpdates } from "./cell.js";
import { byId } from "./dom.js";
import { generate } from "./generate.js";
import { focusGrid } from "./grid.js";
import { openHelp } from "./help.js";
import { submit } from "./prompt.js";
import { now } from "./state.js";
import { closeTour } from "./tour.js";
import { close as closeVector } from "./vector.js";

const FIELDS = "input:not([type=checkbox]), textarea, select";

/** @type {Record<string, () => void>} */
const ACTIONS = {
  "/": () => byId("query").focus(),
  e: () => byId("edit-spec").focus(),
  g: () => void generate(),
  n: focusUpdates,
  r: submit,
  "?": openHelp,
};

export function start() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.key === "Escape") return escape(target);
    if (target.matches?.(FIELDS) || !ACTIONS[event.key]) return;
    event.preventDefault();
    ACTIONS[event.key]();
  });
}

/** @param {HTMLElement} target */
function escape(target) {
  if (closeTour()) return;
  if (target.matches?.(FIELDS)) return focusGrid();
  if (now().vector) closeVector();
}
