// @ts-check
// Help: keys, what the grid's signs mean, and the words used here.

import { byId, closes, dialogHead, fill, make } from "./dom.js";

const KEYS = [
  ["Arrow keys", "walk the grid; Home, End, Page Up and Page Down jump"],
  ["Enter", "select the cell; in the prompt: run"],
  ["n", "go to the first neuron of the selected cell"],
  ["/", "search concepts"],
  ["e", "type an edit"],
  ["g", "generate, without and with edits"],
  ["r", "run"],
  ["?", "this help"],
  ["Esc", "close what is open; leave a field"],
];
const SIGNS = [
  ["␣ ⏎ ⇥", "a space, a newline and a tab that belong to the token"],
  ["<E2 82>", "bytes of a character that is not complete yet"],
  ["colour and bar", "the probability of the top, watched or final token"],
  ["corner", "the top token is the one that the whole model predicts"],
  ["thick left edge", "from this layer on the answer does not change any more"],
  ["could exit", "early exit would stop at this layer and give the model's answer"],
  ["⚠ would exit", "early exit would stop at this layer and give another token than the model"],
  ["▲ ▼ new", "a token's rank went up or down, or it was not in the list"],
];
const WORDS = [
  ["layer, block", "Block 12 turns layer 11 into layer 12. Layer 0 is the embedding."],
  ["numbers", "Blocks count from 1. Layers, positions and neurons count from 0."],
  [
    "lens",
    "how a hidden state is read as a prediction: directly (logit lens), or after a learned map to the last layer",
  ],
  ["sub-update", "a neuron's coefficient times its value vector: one term of what the FFN adds"],
  ["share", "the part of the FFN's output that points along a sub-update; parts can cancel, so shares may be negative"],
  [
    "edit",
    "a neuron's coefficient set, scaled, shifted or switched off. L12.N34=5@last sets neuron 34 of block 12 to 5 at the last position.",
  ],
  ["natural range", "where the coefficient of a neuron lies on ordinary text"],
];

export function start() {
  const dialog = /** @type {HTMLDialogElement} */ (byId("help"));
  /** @param {string[][]} rows @param {boolean} keys */
  const list = (rows, keys) =>
    make(
      "dl",
      {},
      ...rows.flatMap(([name, text]) => [make("dt", {}, keys ? make("kbd", {}, name) : name), make("dd", {}, text)]),
    );
  fill(
    dialog,
    dialogHead("help-title", "Help"),
    make("h3", {}, "Keys"),
    list(KEYS, true),
    make("h3", {}, "Signs"),
    list(SIGNS, false),
    make("h3", {}, "Words"),
    list(WORDS, false),
  );
  byId("open-help").addEventListener("click", openHelp);
  dialog.addEventListener("click", (event) => {
    if (closes(event)) dialog.close();
  });
}

export function openHelp() {
  /** @type {HTMLDialogElement} */ (byId("help")).showModal();
}
