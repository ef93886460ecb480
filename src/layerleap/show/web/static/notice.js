// @ts-check
// The message above the grid: busy, stale, stopped or failed; and the welcome.

import { byId, fill, hit, loading, make } from "./dom.js";
import { openExample } from "./examples.js";
import { submit } from "./prompt.js";
import { isRefused, obstacle } from "./ready.js";
import { on } from "./state.js";
import { startTour } from "./tour.js";
import { changes } from "./trace.js";
import { sentence } from "./words.js";

/** @import { State } from "./state.js" */
/** @import { Model } from "./types.js" */

export function start() {
  const welcome = make("div", { class: "welcome", id: "welcome" });
  byId("grids").prepend(welcome);
  welcome.addEventListener("click", (event) => {
    const example = hit(event, "[data-example]");
    if (example) openExample(Number(example.dataset.example));
    if (hit(event, "[data-tour]")) startTour();
  });
  byId("notice").addEventListener("click", (event) => {
    if (hit(event, "[data-run]")) submit();
  });
  on(["traces", "prompt", "second", "lens", "watch", "edits", "connection", "live", "model"], showNotice);
  on(["model", "traces", "connection"], (state) => showWelcome(welcome, state));
}

/** @param {Readonly<State>} state @returns {{tone: string, text: string, run: boolean}|null} */
function message(state) {
  const traces = state.traces.flatMap((trace) => (trace ? [trace] : []));
  const wrong = obstacle(state);
  const failed = traces.find((trace) => trace.status === "error");
  if (failed) return { tone: "bad", text: failed.message, run: !wrong && ![0, 1].some(isRefused) };
  const waiting = traces.find((trace) => trace.status === "waiting");
  if (waiting) return { tone: "busy", text: waiting.message || "Running the model…", run: false };
  if (traces.some((trace) => trace.status === "running")) return null;
  const stale = [...new Set([0, 1].flatMap((grid) => changes(state, grid)))];
  if (stale.length)
    return { tone: "stale", text: `These readings are old: the ${list(stale)} changed since. ${wrong}`, run: !wrong };
  const stopped = traces.find((trace) => trace.status === "stopped");
  if (stopped)
    return { tone: "stale", text: stopped.message || "Stopped before all cells were read.", run: !wrong };
  return null;
}

/** @param {string[]} words */
function list(words) {
  return words.length < 2 ? words.join() : `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;
}

/** @param {Readonly<State>} state */
function showNotice(state) {
  const place = byId("notice");
  const shown = message(state);
  place.hidden = !shown;
  if (!shown) return fill(place);
  place.className = `notice ${shown.tone}`;
  const spinner = shown.tone === "busy" && make("span", { class: "spinner" });
  fill(place, spinner, shown.text, shown.run && make("button", { type: "button", "data-run": true }, "Run again"));
}

/** @param {Element} welcome @param {Readonly<State>} state */
function showWelcome(welcome, state) {
  const any = state.traces.some((trace) => trace);
  document.body.classList.toggle("fresh", !any);
  /** @type {HTMLElement} */ (welcome).hidden = any;
  if (any) return;
  if (!state.model) {
    const text =
      state.connection === "gone"
        ? `${state.trouble} This page connects by itself when that changes.`
        : "Loading the model…";
    return fill(welcome, loading(text));
  }
  fill(welcome, ...welcomeParts(state.model));
}

/** @param {Model} model */
function welcomeParts(model) {
  const examples = model.examples
    .slice(0, 3)
    .map((example, index) =>
      make(
        "button",
        { type: "button", class: "example", "data-example": index },
        make("b", {}, example.title),
        make("span", {}, example.text),
      ),
    );
  const missing = model.blocks.find((block) => block.n_neurons === null);
  return [
    make("h3", {}, "What is the model about to say, layer by layer?"),
    make("p", {}, "Type a prompt above and press Run, or start with an example:"),
    make("div", { class: "examples" }, ...examples),
    make("p", {}, make("button", { type: "button", "data-tour": true }, "Take the one-minute tour")),
    model.kind === "masked-token" &&
      make("p", { class: "soft" }, "This model fills in masked tokens: put the mask token where it should answer."),
    missing &&
      make(
        "p",
        { class: "soft" },
        `Layers can be read, but neurons cannot be shown for every block. ${sentence(missing.reason ?? "Their weights could not be verified")}`,
      ),
  ];
}
