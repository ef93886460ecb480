// @ts-check
// Generation, without and with edits side by side, streamed; it can be stopped.

import { frames, isAbort, mayRecover, patiently, queueText, Refused } from "./api.js";
import { byId, fill, make, say } from "./dom.js";
import { inForce } from "./specs.js";
import { now, on, set } from "./state.js";
import { question } from "./trace.js";
import { count, sentence, tokenTitle } from "./words.js";

/** @import { State, Written } from "./state.js" */

const TITLES = { plain: "Without edits", edited: "With edits" };
const ECHO = 400; // characters of the prompt before its answer
/** @type {AbortController|null} */
let running = null;

export async function generate() {
  const state = now();
  if (!state.model?.can_generate) return;
  if (!state.prompt) {
    byId("prompt-0").focus();
    return set({ generation: { status: "error", message: "The prompt is empty. Type a text first.", sides: {} } });
  }
  running?.abort();
  const controller = new AbortController();
  running = controller;
  const edits = inForce(state.edits);
  /** @type {import("./types.js").TextSide[]} */
  const names = edits.length ? ["plain", "edited"] : ["plain"];
  const sides = Object.fromEntries(
    names.map((name) => [name, /** @type {Written} */ ({ pieces: [], status: "waiting", seconds: 0 })]),
  );
  const body = { input: question(state, 0).input, edits, max_new_tokens: state.newTokens, sides: names };
  /** @param {Partial<import("./state.js").Progress>} patch */
  const change = (patch) => set({ generation: { ...now().generation, ...patch, sides } });
  set({ generation: { status: "loading", message: "", sides, gone: false } });
  byId("generation").scrollIntoView({ block: "nearest" });
  try {
    await patiently(
      controller.signal,
      (place) => change({ message: queueText(place) }),
      async () => {
        for await (const frame of frames("generate", body, "end", controller.signal)) {
          if (frame.frame === "error") throw new Refused(frame.error, /^the server failed/.test(frame.error) ? 500 : 422, null);
          change({ message: frame.frame === "queued" ? queueText(frame.place) : "" });
          if ("side" in frame) take(sides[frame.side], frame);
        }
      },
    );
    change({ status: "done", message: "" });
    say("Generation is done.");
  } catch (error) {
    for (const side of Object.values(sides)) if (side.status !== "done") side.status = "stopped";
    if (running === controller)
      change(
        isAbort(error)
          ? { status: "done", message: "Stopped." }
          : { status: "error", message: /** @type {Error} */ (error).message, gone: mayRecover(error) },
      );
  } finally {
    if (running === controller) running = null;
  }
}

/** @param {Written|undefined} side @param {import("./types.js").GenerateFrame} frame */
function take(side, frame) {
  if (!side) return;
  if (frame.frame === "start") side.status = "running";
  if (frame.frame === "token") side.pieces.push({ id: frame.id, text: frame.piece, label: frame.label, kind: "text" });
  if (frame.frame === "done") Object.assign(side, { status: "done", seconds: frame.seconds });
}

export function start() {
  const field = /** @type {HTMLInputElement} */ (byId("new-tokens"));
  field.addEventListener("change", () => {
    const most = now().model?.limits.new_tokens ?? 100;
    const asked = Number(field.value);
    const newTokens = Math.max(1, Math.min(most, Math.round(asked) || 20));
    set({ newTokens });
    field.value = String(newTokens);
    const { generation } = now();
    if (generation.status === "loading") return;
    const message = newTokens === asked ? "" : `Set to ${newTokens}: new tokens can be 1 to ${most}.`;
    set({ generation: { ...generation, status: generation.status === "error" ? "idle" : generation.status, message } });
  });
  byId("generate").addEventListener("click", generate);
  byId("generate-too").addEventListener("click", generate);
  byId("stop-generate").addEventListener("click", () => running?.abort());
  on(["model", "newTokens"], ({ model, newTokens }) => {
    field.value = String(newTokens);
    if (!model) return;
    field.max = String(model.limits.new_tokens);
    for (const id of ["generate", "generate-too"])
      /** @type {HTMLButtonElement} */ (byId(id)).disabled = !model.can_generate;
  });
  on(["generation", "model", "edits"], render);
  on(["connection"], ({ connection, generation }) => {
    if (connection !== "ok" || !generation.gone) return;
    const message = "The server was away, so the text is not complete.";
    set({ generation: { ...generation, status: "done", message } });
  });
}

/** @param {Readonly<State>} state */
function render(state) {
  const { status, message, sides } = state.generation;
  byId("stop-generate").hidden = status !== "loading";
  byId("generate-too").hidden = status === "loading";
  byId("generate-too").textContent = state.generation.gone ? "Generate again" : "Generate";
  const note = byId("generation-note");
  note.textContent = message;
  note.className = status === "error" ? "error" : "soft";
  const place = byId("sides");
  const names = Object.keys(sides);
  if (state.model && !state.model.can_generate)
    return fill(
      place,
      make("p", { class: "empty" }, sentence(state.model.generate_reason ?? "this model does not continue a text")),
    );
  if (!names.length)
    return fill(
      place,
      make(
        "p",
        { class: "empty" },
        "Press Generate to continue the prompt. With edits switched on, the answer without and with them appears side by side.",
      ),
    );
  const first = parting(sides);
  fill(place, ...names.map((name) => column(name, sides[name], first)));
}

/** Where both answers part; null if only one was asked for. @param {Record<string, Written>} sides */
function parting(sides) {
  const { plain, edited } = sides;
  if (!plain || !edited) return null;
  const index = edited.pieces.findIndex((piece, at) => piece.id !== plain.pieces[at]?.id);
  return index < 0 ? null : index;
}

/** The end of a long prompt, which is what the answer continues. @param {string} prompt */
function ending(prompt) {
  return prompt.length > ECHO ? `…${prompt.slice(-ECHO)}` : prompt;
}

/** @param {string} name @param {Written} written @param {number|null} first */
function column(name, written, first) {
  const pieces = written.pieces.map((piece, index) => {
    const text = piece.text.includes("\n") ? piece.text.replaceAll("\n", "⏎\n") : piece.text || piece.label;
    return make(
      "span",
      { title: tokenTitle(piece), class: name === "edited" && index === first ? "piece parts" : "piece" },
      text,
    );
  });
  const facts = {
    waiting: "waiting",
    running: "writing…",
    stopped: "stopped",
    done: `${count(written.pieces.length, "token")}, ${written.seconds.toFixed(1)} s`,
  };
  return make(
    "div",
    { class: `side ${name} ${written.status}` },
    make(
      "h3",
      {},
      TITLES[/** @type {keyof typeof TITLES} */ (name)] ?? name,
      make("span", { class: "soft" }, ` ${facts[written.status]}`),
    ),
    make("p", { class: "text" }, make("span", { class: "asked" }, ending(now().prompt)), ...pieces),
  );
}
