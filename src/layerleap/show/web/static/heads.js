// @ts-check
// The heads of the selected block, read from their weights: which tokens look for which, and what attending writes.

import { isAbort, json, mayRecover, patiently, queueText } from "./api.js";
import { bar, byId, failed, fill, hit, keepFocus, loading, make, panel } from "./dom.js";
import { on } from "./state.js";
import { chip, measure, sentence } from "./words.js";

/** @import { Heads, Pairs } from "./types.js" */

const FORMS = {
  vo: "Attending to the first token writes the second (W_VO)",
  qk: "The first token looks for the second (W_QK)",
};
let block = 0;
let isOpen = false;
/** @type {Heads|null} */
let heads = null;
/** @type {number|null} */
let chosen = null;
/** @type {Partial<Record<keyof typeof FORMS, Pairs|string>>} by form, the pairs or why there are none */
let pairs = {};
let message = "";
/** @type {(() => void)|null} what failed, asked once more */
let again = null;
/** @type {AbortController|null} */
let asking = null;

export function start() {
  const place = panel("heads", "Heads");
  on(["selected", "traces"], ({ selected, traces }) => {
    const layer = (selected && traces[selected.grid]?.layers.length && selected.layer) || 0;
    if (layer === block) return;
    asking?.abort();
    [block, heads, chosen, pairs, message] = [layer, null, null, {}, ""];
    render();
    if (isOpen && block) loadHeads();
  });
  on(["connection"], ({ connection }) => {
    if (connection === "ok" && message) again?.();
  });
  place.addEventListener("click", (event) => {
    if (hit(event, "[data-open]")) return toggle();
    if (hit(event, "[data-retry]")) return again?.();
    const head = hit(event, "[data-head]");
    if (head) loadPairs(Number(head.dataset.head));
  });
}

function toggle() {
  isOpen = !isOpen;
  if (isOpen && !heads) loadHeads();
  else render();
}

/** Ask, and draw what came; an answer for another block or head is not waited for. @param {() => Promise<void>} work */
async function ask(work) {
  asking?.abort();
  const controller = new AbortController();
  asking = controller;
  message = "";
  render();
  try {
    await work();
  } catch (error) {
    if (isAbort(error)) return;
    message = /** @type {Error} */ (error).message;
    again = mayRecover(error) ? () => ask(work) : null;
  }
  if (asking === controller) asking = null;
  render();
}

/** @param {string} path */
function get(path) {
  const { signal } = /** @type {AbortController} */ (asking);
  return patiently(
    signal,
    (place) => fill(byId("heads").querySelector(".loading") ?? make("p"), queueText(place)),
    () => json(path, { signal }),
  );
}

function loadHeads() {
  return ask(async () => {
    heads = await get(`heads/${block}`);
  });
}

/** @param {number} head */
function loadPairs(head) {
  chosen = head;
  pairs = {};
  return ask(async () => {
    pairs.vo = await get(`heads/${block}/${head}?form=vo`);
    render();
    pairs.qk = heads?.qk_reason ?? (await get(`heads/${block}/${head}?form=qk`));
  });
}

function render() {
  const place = byId("heads");
  place.hidden = !block;
  if (block) keepFocus(place, () => fill(place, ...contents()));
}

/** @returns {(Node|string|false)[]} */
function contents() {
  const title = `Heads of block ${block}, from their weights`;
  const head = make(
    "h3",
    {},
    make(
      "button",
      { type: "button", class: "link", id: "open-heads", "data-open": true, "aria-expanded": String(isOpen) },
      `${isOpen ? "▾" : "▸"} ${title}`,
    ),
  );
  if (!isOpen) return [head];
  const error = message === "" ? [] : failed(sentence(message), again !== null);
  if (!heads) return [head, ...(message ? error : [loading("Finding the heads…")])];
  const buttons = Array.from({ length: heads.n_heads }, (_, number) =>
    make(
      "button",
      {
        type: "button",
        id: `head-${block}-${number}`,
        "data-head": number,
        "aria-pressed": String(number === chosen),
        class: number === chosen ? "chosen" : null,
      },
      `H${number}`,
    ),
  );
  const shared = heads.n_kv_heads < heads.n_heads && `${heads.n_heads} heads share ${heads.n_kv_heads} keys and values.`;
  return [
    head,
    make("div", { class: "head-list", role: "group", "aria-label": title }, ...buttons),
    shared && make("p", { class: "soft" }, shared),
    ...error,
    ...(chosen === null ? [] : forms()),
  ];
}

/** @returns {(Node|false)[]} */
function forms() {
  return /** @type {(keyof typeof FORMS)[]} */ (Object.keys(FORMS)).flatMap((form) => {
    const answer = pairs[form];
    const head = make("h4", {}, FORMS[form]);
    if (typeof answer === "string") return [head, make("p", { class: "empty" }, sentence(answer))];
    if (!answer) return message ? [] : [head, loading("Reading the weights…")];
    return [head, table(answer), make("p", { class: "soft" }, `${answer.title}: ${answer.legend}.`)];
  });
}

/** @param {Pairs} answer */
function table(answer) {
  const most = Math.max(...answer.pairs.map(({ score }) => Math.abs(score)), 1e-9);
  const rows = answer.pairs.map(({ first, second, score }) => {
    const meter = bar(measure(score), Math.abs(score) / most);
    meter.classList.add(score < 0 ? "less" : "more");
    return make("tr", {}, make("td", {}, chip(first)), make("td", {}, chip(second)), make("td", {}, meter));
  });
  return make(
    "table",
    { class: "pairs" },
    make("caption", { class: "hidden" }, answer.title),
    make("thead", {}, make("tr", {}, ...[...answer.roles, "score"].map((text) => make("th", { scope: "col" }, text)))),
    make("tbody", {}, ...rows),
  );
}
