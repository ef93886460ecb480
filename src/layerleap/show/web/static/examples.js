// @ts-check
// The model's example prompts.

import { json } from "./api.js";
import { submit } from "./prompt.js";
import { now, set } from "./state.js";

/** @param {number} index */
export async function openExample(index) {
  const example = now().model?.examples[index];
  if (!example) return;
  const { watch } = example;
  set({ prompt: example.text, selected: null });
  if (watch) await watchText(watch);
  submit();
}

/** @param {string} text */
async function watchText(text) {
  try {
    const { tokens } = await json("vocabulary", { method: "POST", body: { text } });
    const token = tokens.find((/** @type {import("./types.js").Token} */ token) => token.text === text) ?? tokens[0];
    if (token) set({ watch: { id: token.id, label: token.label } });
  } catch {
    // The example runs without a watched token.
  }
}
