// @ts-check
// One value vector: both ends of its tokens, a name and a note, its natural range, its neighbours.

import { isAbort, json, mayRecover, patiently, queueText } from "./api.js";
import { bar, byId, failed, fill, hit, loading, make, say } from "./dom.js";
import { addEdit, fault } from "./edits.js";
import { openCluster } from "./search.js";
import { now, on, set } from "./state.js";
import { chip, measure, neuronName, number, sentence, signed } from "./words.js";

/** @import { Neuron, State } from "./state.js" */
/** @import { Neighbour, Range, Vector } from "./types.js" */

const SHORT = 10; // tokens per end before "show all"
let all = false;
/** @type {AbortController|null} */
let asking = null;

/** @param {Neuron|null} neuron */
async function load(neuron) {
  asking?.abort();
  all = false;
  if (!neuron) return set({ vectorReading: { status: "idle", message: "", vector: null, neighbours: null } });
  const controller = new AbortController();
  asking = controller;
  set({ vectorReading: { status: "loading", message: "", vector: null, neighbours: null } });
  const path = `vectors/${neuron.block}/${neuron.neuron}`;
  try {
    const vector = await patiently(
      controller.signal,
      (place) => set({ vectorReading: { status: "loading", message: queueText(place), vector: null, neighbours: null } }),
      () => json(path, { signal: controller.signal }),
    );
    set({ vectorReading: { status: "done", message: "", vector, neighbours: null } });
    // The panel says that these two are on their way.
    const later = (/** @type {string} */ part) =>
      patiently(
        controller.signal,
        () => {},
        () => json(`${path}/${part}`, { signal: controller.signal }),
      );
    const keys = await later("keys").catch((error) => {
      if (isAbort(error) || mayRecover(error)) throw error;
      return { keys: [], reason: /** @type {Error} */ (error).message };
    });
    set({ vectorReading: { ...now().vectorReading, keys } });
    if (!now().model?.index.ready) return;
    const { neighbours } = await later("neighbours?top=8");
    set({ vectorReading: { ...now().vectorReading, neighbours } });
  } catch (error) {
    if (isAbort(error)) return;
    const { vector, keys } = now().vectorReading;
    set({
      vectorReading: {
        status: vector ? "done" : "error",
        message: /** @type {Error} */ (error).message,
        gone: mayRecover(error),
        vector,
        neighbours: null,
        keys,
      },
    });
  }
}

export function start() {
  const place = byId("vector");
  let shown = "";
  on(["vector", "model"], (state) => {
    if (!state.model) return;
    // With an index that was built since, there is more to read.
    const key = state.vector ? `${neuronName(state.vector)} ${state.model.index.ready}` : "";
    if (key !== shown) {
      load(state.vector);
      const byKeyboard = document.activeElement?.matches("button:focus-visible") ?? false;
      if (key) requestAnimationFrame(() => reveal(place, byKeyboard));
    }
    shown = key;
  });
  on(["connection"], (state) => {
    if (state.connection === "ok" && state.vectorReading.gone) load(state.vector);
  });
  on(["vector", "vectorReading", "cell"], render);
  place.addEventListener("click", click);
  place.addEventListener("submit", (event) => {
    event.preventDefault();
    saveName();
  });
  place.addEventListener("change", (event) => {
    if (hit(event, "form.naming")) saveName();
  });
}

/**
 * Someone who opened the vector by keyboard goes on from there.
 * @param {HTMLElement} place
 * @param {boolean} byKeyboard
 */
function reveal(place, byKeyboard) {
  place.scrollIntoView({ block: "nearest" });
  if (byKeyboard && !place.contains(document.activeElement)) place.focus({ preventScroll: true });
}

/** @param {Event} event */
function click(event) {
  const vector = now().vectorReading.vector;
  const neighbour = hit(event, "[data-neuron]");
  const cluster = hit(event, "[data-cluster]");
  if (hit(event, "[data-close]")) return close();
  if (hit(event, "[data-retry]")) return load(now().vector);
  if (neighbour)
    return set({ vector: { block: Number(neighbour.dataset.block), neuron: Number(neighbour.dataset.neuron) } });
  if (cluster) return openCluster(Number(cluster.dataset.cluster));
  if (hit(event, "[data-all]")) {
    all = !all;
    return render(now());
  }
  const chosen = now().vector;
  if (hit(event, "[data-edit]") && chosen) addEdit(firstEdit(vector ?? chosen));
}

/** Close the vector and go back to the sub-update or result it came from. */
export function close() {
  const old = now().vector;
  set({ vector: null });
  if (old) requestAnimationFrame(() => document.getElementById(`update-${old.block}-${old.neuron}`)?.focus());
}

/** The coefficient that the selected cell shows for this vector. @param {Neuron} neuron */
function coefficient(neuron) {
  const reading = now().cell.reading;
  if (reading?.block !== neuron.block) return null;
  return reading.updates.find((update) => update.neuron === neuron.neuron)?.coefficient ?? null;
}

/**
 * A neuron that is active here is switched off first. One that was found by search is set to the end of
 * its natural range that pushes towards what was searched for.
 * @param {Neuron & {range?: Range|null}} vector
 * @returns {import("./state.js").Edit}
 */
function firstEdit(vector) {
  const { block, neuron, range } = vector;
  const edit = { block, neuron, positions: "all", on: true };
  const end = now().vector?.end;
  if (!end && coefficient(vector) !== null) return { ...edit, operation: "off", value: 0 };
  const [low, high] = range ? [range.low, range.high] : [-10, 10];
  return { ...edit, operation: "set", value: Number((end === "suppressed" ? low : high).toPrecision(3)) };
}

async function saveName() {
  const vector = now().vectorReading.vector;
  const form = byId("vector").querySelector("form");
  if (!vector || !form) return;
  const name = /** @type {HTMLInputElement} */ (form.elements.namedItem("name")).value.trim();
  const note = /** @type {HTMLTextAreaElement} */ (form.elements.namedItem("note")).value.trim();
  if (name === (vector.name ?? "") && note === (vector.note ?? "")) return;
  const status = form.querySelector("output");
  try {
    await patiently(
      new AbortController().signal,
      (place) => status && (status.textContent = queueText(place)),
      () => json(`vectors/${vector.block}/${vector.neuron}/name`, { method: "PUT", body: { name, note } }),
    );
    vector.name = name || null;
    vector.note = note || null;
    rename(vector, vector.name);
    if (status) status.textContent = "Saved.";
    say(`The name of ${neuronName(vector)} is saved.`);
  } catch (error) {
    if (status) status.textContent = `${/** @type {Error} */ (error).message} Press Enter in the name to save again.`;
  }
}

/** Show a new name in the list of sub-updates, too. @param {Neuron} neuron @param {string|null} name */
function rename(neuron, name) {
  const { reading } = now().cell;
  if (reading?.block !== neuron.block) return;
  for (const each of [reading, reading.after]) {
    const update = each?.updates.find((one) => one.neuron === neuron.neuron);
    if (update) update.name = name;
  }
  set({ cell: { ...now().cell } });
}

/** @param {Readonly<State>} state */
function render(state) {
  const place = byId("vector");
  const { vector: chosen, vectorReading } = state;
  place.hidden = !chosen;
  if (!chosen) return fill(place);
  const typing = document.activeElement instanceof HTMLElement && document.activeElement.closest("form.naming");
  if (typing && vectorReading.vector && place.contains(typing)) return;
  const { vector, status, message } = vectorReading;
  // A neuron whose tokens cannot be read can still be edited.
  const editable = vector !== null || (status === "error" && !fault(chosen));
  const head = make(
    "div",
    { class: "bar" },
    make("h2", {}, neuronName(chosen)),
    ...steps(chosen),
    make("span", { class: "spring" }),
    editable && make("button", { type: "button", class: "primary", "data-edit": true }, "Add to edits"),
    make("button", { type: "button", class: "quiet close", "data-close": true, "aria-label": "Close the vector" }, "×"),
  );
  if (status === "error")
    return fill(
      place,
      head,
      ...failed(message, vectorReading.gone),
      editable && make("p", { class: "soft" }, "Its tokens are missing for this reason. It can be edited all the same."),
    );
  if (!vector) return fill(place, head, loading(message || "Reading the vector…"));
  fill(
    place,
    head,
    naming(vector),
    ...facts(vector),
    ends("Value: what it writes", vector, "+ promotes", "− suppresses"),
    ...responses(vectorReading.keys),
    ...related(vector, vectorReading.neighbours, message),
  );
}

/**
 * Through the sub-updates of the selected cell without going back to their list.
 * @param {Neuron} chosen
 */
function steps(chosen) {
  const reading = now().cell.reading;
  const updates = reading?.block === chosen.block ? reading.updates : [];
  const at = updates.findIndex((update) => update.neuron === chosen.neuron);
  if (at < 0) return [make("span", { class: "soft" }, "value vector")];
  /** @param {number} to @param {string} sign @param {string} name */
  const step = (to, sign, name) => {
    const neuron = updates[to]?.neuron;
    return make(
      "button",
      {
        type: "button",
        class: "quiet",
        "aria-label": name,
        title: name,
        disabled: neuron === undefined,
        "data-block": chosen.block,
        "data-neuron": neuron,
      },
      sign,
    );
  };
  return [
    step(at - 1, "‹", "Stronger sub-update"),
    make("span", { class: "soft number" }, `${at + 1} of ${updates.length}`),
    step(at + 1, "›", "Weaker sub-update"),
  ];
}

/** @param {Vector} vector */
function naming(vector) {
  return make(
    "form",
    { class: "naming" },
    make("input", {
      name: "name",
      value: vector.name ?? "",
      placeholder: "Name it",
      "aria-label": "Name of this vector",
      maxlength: 80,
      autocomplete: "off",
    }),
    make(
      "textarea",
      { name: "note", rows: 1, placeholder: "Note", "aria-label": "Note on this vector", maxlength: 500 },
      vector.note ?? "",
    ),
    make("output", { class: "soft" }),
  );
}

/** @param {Vector} vector */
function facts(vector) {
  const here = coefficient(vector);
  const range = vector.range;
  const words = [`length ${measure(vector.norm)}`];
  if (here !== null) words.push(`coefficient here ${signed(here)}`);
  if (!range)
    words.push(`natural range not known: ${now().model?.index.ready ? "the index has none" : "it comes with the index"}`);
  return [make("p", { class: "soft" }, words.join(" · ")), range && ruler(range, here)];
}

/**
 * Where this cell's coefficient is in its natural range.
 * @param {Range} range
 * @param {number|null} here
 */
function ruler(range, here) {
  const ends = [range.low, range.high, 0, ...(here === null ? [] : [here])];
  const from = Math.min(...ends);
  const width = Math.max(...ends) - from || 1;
  /** @param {string} name @param {number} value @param {string} text */
  const mark = (name, value, text) => {
    const element = make("i", { class: name, title: text });
    element.style.left = `${(100 * (value - from)) / width}%`;
    return element;
  };
  const band = make("i", { class: "band" });
  band.style.left = `${(100 * (range.low - from)) / width}%`;
  band.style.width = `${(100 * (range.high - range.low)) / width}%`;
  const words = `Natural range ${measure(range.low)} to ${measure(range.high)}, mean ${measure(range.mean)}`;
  return make(
    "div",
    { class: "ruler" },
    make(
      "div",
      { class: "line", role: "img", "aria-label": here === null ? words : `${words}; here ${signed(here)}` },
      band,
      mark("zero", 0, "0"),
      mark("mean", range.mean, `mean ${measure(range.mean)}`),
      here !== null && mark("here", here, `here ${signed(here)}`),
    ),
    make("p", { class: "soft" }, words),
  );
}

const KEYS = { "ffn.key": "Key", "ffn.gate": "Gate key", "ffn.up": "Up key" };

/** What the neuron responds to, by each kind of key. @param {import("./types.js").Keys|null|undefined} answer */
function responses(answer) {
  if (!answer) return [make("h3", {}, "Keys"), loading("Reading the keys…")];
  if (!answer.keys.length)
    return [make("h3", {}, "Keys"), make("p", { class: "empty" }, sentence(answer.reason ?? "its keys are not known"))];
  return answer.keys.map((key) => {
    const name = KEYS[/** @type {keyof typeof KEYS} */ (key.kind)] ?? key.kind;
    return ends(`${name}: what it responds to`, key, "most", "least");
  });
}

/**
 * Both ends of a vector's tokens.
 * @param {string} heading
 * @param {{promotes: import("./types.js").Scored[], suppresses: import("./types.js").Scored[]}} vector
 * @param {string} high
 * @param {string} low
 */
function ends(heading, vector, high, low) {
  /** @param {string} title @param {import("./types.js").Scored[]} scored @param {string} tone */
  const end = (title, scored, tone) => {
    const most = Math.max(...scored.map(({ score }) => Math.abs(score)), 1e-9);
    const items = scored.slice(0, all ? scored.length : SHORT).map(({ token, score }) => {
      const meter = bar(measure(score), Math.abs(score) / most);
      meter.classList.add(tone);
      return make("li", {}, chip(token), meter);
    });
    return make("div", { class: "end" }, make("h3", {}, title), make("ol", { class: "guesses-list" }, ...items));
  };
  const longest = Math.max(vector.promotes.length, vector.suppresses.length);
  return make(
    "div",
    { class: "ends", role: "group", "aria-label": heading },
    make("p", { class: "soft" }, heading),
    end(high, vector.promotes, "more"),
    end(low, vector.suppresses, "less"),
    longest > SHORT &&
      make("button", { type: "button", class: "quiet", "data-all": true }, all ? "Show fewer" : `Show all ${longest}`),
  );
}

/** @param {Vector} vector @param {Neighbour[]|null} neighbours @param {string} message */
function related(vector, neighbours, message) {
  const index = now().model?.index;
  const parts = [];
  if (vector.cluster !== null && vector.cluster !== undefined) {
    parts.push(
      make(
        "p",
        {},
        make("button", { type: "button", class: "link", "data-cluster": vector.cluster }, `Cluster ${vector.cluster}`),
      ),
    );
  }
  const head = make("h3", {}, "Neighbours by direction");
  if (!index?.ready)
    return [
      ...parts,
      head,
      make(
        "p",
        { class: "empty" },
        index?.buildable
          ? "They come with the concept index, which can be built under Concepts."
          : sentence(index?.reason ?? "there is no index"),
      ),
    ];
  if (message) return [...parts, head, ...failed(message, now().vectorReading.gone)];
  if (!neighbours)
    return [...parts, head, make("p", { class: "loading" }, make("span", { class: "spinner" }), "Searching…")];
  const items = neighbours.map((each) =>
    make(
      "li",
      {},
      make(
        "button",
        { type: "button", class: "link", "data-block": each.block, "data-neuron": each.neuron },
        each.name ?? neuronName(each),
      ),
      bar(number(each.cosine ?? 0), Math.abs(each.cosine ?? 0)),
      make("span", { class: "tokens" }, ...each.promotes.slice(0, 4).map(chip)),
    ),
  );
  return [...parts, head, make("ol", { class: "neighbours" }, ...items)];
}
