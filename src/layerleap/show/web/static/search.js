// @ts-check
// Concepts: search of all value vectors by token, and clusters of vectors that point the same way.

import { isAbort, json, mayRecover, patiently, queueText } from "./api.js";
import { byId, failed, fill, hit, keepFocus, loading, make } from "./dom.js";
import { indexParts } from "./indexing.js";
import { now, on, set } from "./state.js";
import { chip, count, neuronName, number, sentence } from "./words.js";

/** @import { Cluster } from "./types.js" */

const TYPING = 180; // milliseconds without a key before the search
const SHOWN = 7; // tokens of a result, those that match first
/** @type {AbortController|null} */
let asking = null;
/** What is shown, asked once more. */
let again = () => search();

/** @param {string} id @returns {HTMLSelectElement} */
function choice(id) {
  return byId(id);
}

export function start() {
  const input = /** @type {HTMLInputElement} */ (byId("query"));
  let timer = 0;
  const soon = (/** @type {number} */ wait) => {
    clearTimeout(timer);
    timer = window.setTimeout(search, wait);
  };
  input.addEventListener("input", () => set({ query: input.value }));
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    soon(0);
  });
  for (const id of ["search-side", "search-space"]) choice(id).addEventListener("change", () => soon(0));
  on(["query", "model"], (state) => {
    if (input.value !== state.query) input.value = state.query;
    if (state.model) soon(state.query ? TYPING : 0);
  });
  on(["indexing", "connection"], ({ model, connection }) => {
    if (model && !model.index.ready) search();
    else if (connection === "ok" && byId("found").querySelector("[data-retry]")) again();
  });
  on(["vector"], markChosen);
  byId("found").addEventListener("click", (event) => {
    const vector = hit(event, "[data-neuron]");
    const cluster = hit(event, "[data-cluster]");
    const end = vector?.dataset.side === "suppressed" ? "suppressed" : "promoted";
    if (vector) set({ vector: { block: Number(vector.dataset.block), neuron: Number(vector.dataset.neuron), end } });
    else if (cluster) openCluster(Number(cluster.dataset.cluster));
    else if (hit(event, "[data-back]")) search();
    else if (hit(event, "[data-retry]")) again();
  });
}

/**
 * @param {string[]} paths asked at the same time; those after the first are extras
 * @param {(...answers: any[]) => (Node|false)[]} view
 */
async function show(paths, view) {
  again = () => show(paths, view);
  asking?.abort();
  const controller = new AbortController();
  asking = controller;
  const place = byId("found");
  place.classList.add("loading");
  try {
    const asked = paths.map((path, index) => {
      const answer = patiently(
        controller.signal,
        (queue) => fill(place, loading(queueText(queue))),
        () => json(path, { signal: controller.signal }),
      );
      return index ? answer.catch(() => ({ clusters: [] })) : answer; // An index may have no clusters.
    });
    const answers = await Promise.all(asked);
    fill(place, ...view(...answers));
    markChosen();
  } catch (error) {
    if (isAbort(error)) return;
    fill(place, ...failed(/** @type {Error} */ (error).message, mayRecover(error)));
  }
  place.classList.remove("loading");
}

function search() {
  const { model, query } = now();
  const ready = model?.index.ready ?? false;
  const input = /** @type {HTMLInputElement} */ (byId("query"));
  input.disabled = !ready;
  if (!ready) return keepFocus(byId("found"), () => fill(byId("found"), ...indexParts()));
  if (!query.trim()) return show(["clusters?top=40"], clusters);
  const parts = new URLSearchParams({
    q: query,
    top: "30",
    side: choice("search-side").value,
    space: choice("search-space").value,
  });
  const named = new URLSearchParams({ q: query, top: "5" });
  return show([`search?${parts}`, `clusters?${named}`], (matches, groups) => [
    ...results(matches),
    ...(groups.clusters.length ? clusters(groups) : []),
  ]);
}

/** @param {import("./types.js").Search} answer */
function results({ results, notes, milliseconds }) {
  const words = notes.map((note) => make("p", { class: "soft note" }, sentence(note)));
  if (!results.length)
    return [
      ...words,
      make(
        "p",
        { class: "empty" },
        "No value vector has these tokens among its 50 strongest. Try another word, or both ends.",
      ),
    ];
  const items = results.map((match) => {
    const down = match.side === "suppressed";
    const matched = new Set(match.matched.map((token) => token.id));
    const others = (down ? match.suppresses : match.promotes).filter((token) => !matched.has(token.id));
    const tokens = [...match.matched, ...others].slice(0, SHOWN).map((token) => {
      const element = chip(token);
      if (matched.has(token.id)) element.classList.add("matched");
      return element;
    });
    const title = [match.name, match.partial && "partial match"].filter(Boolean).join(", ");
    return row(match, title || null, match.side, tokens);
  });
  return [
    make("p", { class: "soft" }, `${count(results.length, "vector")}, ${number(milliseconds, 0)} ms`),
    ...words,
    make("ol", { class: "vectors" }, ...items),
  ];
}

/** @param {import("./types.js").Clusters} answer */
function clusters({ clusters }) {
  if (!clusters.length) return [make("p", { class: "empty" }, "Type a word to search. The index has no clusters.")];
  // A vector alone is no group.
  const items = clusters
    .filter(({ size }) => size > 1)
    .map((cluster) =>
      make(
        "li",
        {},
        make(
          "button",
          { type: "button", class: "row", "data-cluster": cluster.number },
          make("b", {}, `Cluster ${cluster.number}`),
          make("small", { title: count(cluster.size, "vector") }, cluster.size.toLocaleString("en")),
          make("span", { class: "tokens" }, ...cluster.tokens.slice(0, 5).map(chip)),
        ),
      ),
    );
  return [make("h3", {}, "Clusters"), make("ol", { class: "vectors" }, ...items)];
}

/** @param {number} number */
export function openCluster(number) {
  return show([`clusters/${number}`], (/** @type {Cluster} */ cluster) => [
    make("p", {}, make("button", { type: "button", class: "link", "data-back": true }, "‹ All")),
    make("h3", {}, `Cluster ${cluster.number}: ${count(cluster.size, "vector")}`),
    make("p", { class: "tokens" }, ...cluster.tokens.map(chip)),
    make(
      "ol",
      { class: "vectors" },
      ...cluster.members.map((member) => row(member, member.name, "", member.promotes.map(chip))),
    ),
  ]);
}

/**
 * @param {{block: number, neuron: number}} neuron
 * @param {string|null} name
 * @param {string} side
 * @param {Node[]} tokens
 */
function row(neuron, name, side, tokens) {
  const title = name ? `${name} · ${neuronName(neuron)}` : neuronName(neuron);
  return make(
    "li",
    {},
    make(
      "button",
      {
        type: "button",
        class: "row",
        "data-block": neuron.block,
        "data-neuron": neuron.neuron,
        "data-side": side || null,
      },
      make("b", {}, title),
      side && make("small", {}, side === "suppressed" ? "− suppresses" : "+ promotes"),
      make("span", { class: "tokens" }, ...tokens),
    ),
  );
}

function markChosen() {
  const chosen = now().vector;
  for (const button of byId("found").querySelectorAll("[data-neuron]")) {
    const { block, neuron } = /** @type {HTMLElement} */ (button).dataset;
    if (Number(block) === chosen?.block && Number(neuron) === chosen?.neuron)
      button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
}
