// @ts-check
// Numbers, tokens and neurons as people read them.

import { make } from "./dom.js";
import { now } from "./state.js";

/** @import { Named } from "./state.js" */
/** @import { Token } from "./types.js" */

/** A probability or share as percent. @param {number} share */
export function percent(share) {
  if (!Number.isFinite(share)) return "–"; // An edit can drive a model to infinity.
  const value = 100 * share;
  if (value !== 0 && Math.abs(value) < 0.1) return value > 0 ? "<0.1 %" : ">−0.1 %";
  return `${number(value, Math.abs(value) < 10 ? 1 : 0)} %`;
}

/** A change of a probability in percentage points, with its sign. @param {number} change */
export function points(change) {
  if (!Number.isFinite(change)) return "–";
  const value = 100 * change;
  return `${value > 0 ? "+" : ""}${number(value, Math.abs(value) < 10 ? 1 : 0)}`;
}

/** @param {number} value @param {number} [digits] */
export function number(value, digits = 2) {
  if (!Number.isFinite(value)) return "–";
  const text = value.toFixed(digits);
  return Number(text) === 0 ? (0).toFixed(digits) : text.replace("-", "−");
}

/** A quantity of any size, to three digits that count. @param {number} value */
export function measure(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const text = size >= 1000 && size < 1e6 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
  return text.replaceAll("-", "−");
}

/** A quantity with its sign, for coefficients. @param {number} value */
export function signed(value) {
  return `${value > 0 ? "+" : ""}${measure(value)}`;
}

/** @param {number} count @param {string} one @param {string} [many] */
export function count(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/** A message of the server, which writes them without a capital and a stop. @param {string} text */
export function sentence(text) {
  const named = text.startsWith(now().model?.name ?? "\n");
  const word = !named && /^[a-z]+(?![\w.-])/.test(text); // and not a name such as gpt2
  const start = word ? text.charAt(0).toUpperCase() + text.slice(1) : text;
  return /[.!?]$/.test(start) ? start : `${start}.`;
}

/** @param {{block: number, neuron: number}} neuron */
export function neuronName(neuron) {
  return `L${neuron.block}.N${neuron.neuron}`;
}

/** What a change of rank looks like. @param {number} change */
export function rankChange(change) {
  if (change === 0) return "=";
  const size = Math.abs(change);
  const short = size < 1000 ? String(size) : `${Math.round(size / 1000)}k`;
  return change > 0 ? `▲${short}` : `▼${short}`;
}

/** @param {Token|Named} token */
export function tokenTitle(token) {
  const text = "text" in token ? `${JSON.stringify(token.text)}, ` : "";
  const kind = "kind" in token && token.kind !== "text" ? `, ${token.kind}` : "";
  return `${text}id ${token.id}${kind}`;
}

/** What a model predicts. @param {import("./types.js").Model|null} model */
export function noun(model) {
  return model?.kind.endsWith("-class") ? "class" : "token";
}

/** A token's label for screen readers, which skip the sign for a space. @param {Token|Named} token */
export function spoken(token) {
  return token.label.replaceAll("␣", "space ").replaceAll("⏎", "newline ").replaceAll("⇥", "tab ").trim();
}

/** A token to look at. @param {Token|Named} token */
export function chip(token) {
  const kind = "kind" in token ? token.kind : "text";
  return make("span", { class: `token ${kind}`, title: tokenTitle(token) }, token.label);
}

/** A token to click, which pins it. @param {Token|Named} token @param {boolean} pinned */
export function pin(token, pinned = false) {
  const kind = "kind" in token ? token.kind : "text";
  return make(
    "button",
    {
      type: "button",
      class: `token pin ${kind}`,
      title: `${tokenTitle(token)}. Click to ${pinned ? "unpin" : "pin"} its path.`,
      "data-pin": token.id,
      "data-label": token.label,
      "aria-pressed": String(pinned),
    },
    token.label,
  );
}
