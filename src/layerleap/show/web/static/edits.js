// @ts-check
// Edits, each a sentence whose words can be changed. Nothing runs until Run or Generate is pressed.

import { byId, fill, hit, make, say } from "./dom.js";
import { parse, spec } from "./specs.js";
import { now, on, set } from "./state.js";
import { count, neuronName, sentence } from "./words.js";

/** @import { Edit } from "./state.js" */

const OPERATIONS = { set: "Set", scale: "Multiply", add: "Add to", off: "Switch off" };
const PLACES = {
  all: "at every position",
  last: "at the last position",
  generated: "at generated tokens",
  some: "at positions",
};

/** @param {Edit} edit */
export function addEdit(edit) {
  const { edits, model } = now();
  const limit = model?.limits.edits ?? Infinity;
  const same = edits.findIndex((each) => spec(each) === spec(edit));
  if (same >= 0) {
    set({ edits: edits.map((each, index) => (index === same ? { ...each, on: true } : each)) });
  } else if (edits.length >= limit) {
    return refuse(`At most ${limit} edits are possible. Delete one first.`);
  } else {
    set({ edits: [...edits, edit] });
  }
  refuse("");
  say(`Added: ${spec(edit)}. Press Run to see what it changes.`);
}

/** An edit of a neuron that this model has. @param {string} change such as "=5" */
function example(change) {
  const blocks = now().model?.blocks.filter((block) => block.n_neurons) ?? [];
  const { block, n_neurons } = blocks[Math.floor(blocks.length * 0.4)] ?? { block: 1, n_neurons: null };
  return neuronName({ block, neuron: Math.min(34, (n_neurons ?? 35) - 1) }) + change;
}

/** Say what is wrong with an edit; nothing takes it back. @param {string} text */
export function refuse(text) {
  const place = byId("edit-error");
  place.hidden = !text;
  place.textContent = text;
}

/** What is wrong with editing a neuron of this model; empty if nothing is. @param {{block: number, neuron: number, part?: string}} edit */
export function fault(edit) {
  const model = now().model;
  if (!model) return "";
  const block = model.blocks.find((each) => each.block === edit.block);
  if (!block) return `Block ${edit.block} does not exist: this model has blocks 1 to ${model.n_layers}.`;
  if (edit.part !== undefined) return ""; // The server knows which parts there are.
  if (block.n_neurons === null)
    return `Neurons of block ${edit.block} cannot be edited. ${sentence(block.reason ?? "they could not be verified")}`;
  if (edit.neuron >= block.n_neurons)
    return `Neuron ${edit.neuron} does not exist: block ${edit.block} has neurons 0 to ${block.n_neurons - 1}.`;
  return "";
}

export function start() {
  const input = /** @type {HTMLInputElement} */ (byId("edit-spec"));
  byId("add-edit").addEventListener("submit", (event) => {
    event.preventDefault();
    const edit = parse(input.value);
    if (!edit)
      return refuse(
        `"${input.value}" is not an edit. Write for example ${example("=5")}, ${example("*2@last")}, ${example("+3@0,4")} or ${example("=off")}.`,
      );
    const wrong = fault(edit);
    if (wrong) return refuse(wrong);
    addEdit(edit);
    input.value = "";
  });
  const list = byId("edit-list");
  list.addEventListener("change", change);
  list.addEventListener("click", (event) => {
    const index = indexOf(event);
    if (index === null) return;
    const edit = now().edits[index];
    if (hit(event, "[data-delete]")) {
      set({ edits: now().edits.filter((_, each) => each !== index) });
      input.focus();
    } else if (hit(event, "[data-open]")) {
      set({ vector: { block: edit.block, neuron: edit.neuron } });
    }
  });
  on(["edits", "model"], render);
  on(["model"], () => {
    input.placeholder = example("=5@last");
  });
  let known = "";
  on(["traces"], () => {
    const remarks = now().traces.flatMap((trace) => trace?.edits.map((edit) => edit.remark ?? "") ?? []);
    const key = [...unmetSpecs(), ...remarks].join(";");
    if (key !== known) render();
    known = key;
  });
}

/** The edits of the last run that changed no position of the prompt. */
function unmetSpecs() {
  const specs = now().traces.flatMap((trace) =>
    trace ? trace.question.edits.filter((_, index) => trace.edits[index]?.applied === false) : [],
  );
  return new Set(specs);
}

/** Why an edit changed nothing in the last run; empty if it did. @param {Edit} edit */
function unmet(edit) {
  const length = now().traces[0]?.tokens.length;
  if (!edit.on || !length || !unmetSpecs().has(spec(edit))) return "";
  return edit.positions === "generated"
    ? "Changed nothing in the grid: it acts on generated tokens only."
    : `Changed nothing: the prompt has positions 0 to ${length - 1}.`;
}

/** How far the last run's edit was out of the neuron's range; empty if it was not. @param {Edit} edit */
function outside(edit) {
  for (const trace of now().traces) {
    const known = edit.on ? trace?.edits[trace.question.edits.indexOf(spec(edit))] : null;
    if (known?.remark) return sentence(known.remark);
  }
  return "";
}

/** @param {Event} event */
function indexOf(event) {
  const item = hit(event, "[data-index]");
  return item ? Number(item.dataset.index) : null;
}

/** @param {Event} event */
function change(event) {
  const index = indexOf(event);
  const field = /** @type {HTMLInputElement} */ (event.target);
  if (index === null) return;
  const edit = { ...now().edits[index] };
  if (field.name === "on") edit.on = field.checked;
  if (field.name === "operation") changeOperation(edit, /** @type {any} */ (field.value));
  if (field.name === "value" && field.value !== "" && Number.isFinite(Number(field.value)))
    edit.value = Number(field.value);
  if (field.name === "place")
    edit.positions = field.value === "some" ? String(now().selected?.position ?? 0) : field.value;
  if (field.name === "positions" && /^\s*\d+(\s*,\s*\d+)*\s*$/.test(field.value))
    edit.positions = field.value.replaceAll(/\s/g, "");
  set({ edits: now().edits.map((each, other) => (other === index ? edit : each)) });
}

/** @param {Edit} edit @param {Edit["operation"]} operation */
function changeOperation(edit, operation) {
  edit.operation = operation;
  if (operation === "off") edit.value = 0;
  else if (edit.value === 0) edit.value = operation === "scale" ? 2 : 5;
}

function render() {
  const { edits } = now();
  const list = byId("edit-list");
  const on = edits.filter((edit) => edit.on).length;
  byId("edits-count").textContent = edits.length ? `${on} of ${count(edits.length, "edit")} on` : "";
  const kept =
    document.activeElement instanceof HTMLElement && list.contains(document.activeElement)
      ? document.activeElement.id
      : "";
  if (!edits.length)
    return fill(
      list,
      make(
        "li",
        { class: "empty" },
        `No edits. Choose a sub-update, read its tokens and press “Add to edits”, or type one such as ${example("=5@last")}.`,
      ),
    );
  fill(list, ...edits.map(editRow));
  if (kept) document.getElementById(kept)?.focus();
}

/** @param {Edit} edit @param {number} index */
function editRow(edit, index) {
  const name = edit.part === undefined ? neuronName(edit) : `L${edit.block}.${edit.part}`;
  const { scale, off } = OPERATIONS;
  const own = /^\d/.test(edit.positions);
  /** @param {Record<string, string>} options @param {string} chosen */
  const options = (options, chosen) =>
    Object.entries(options).map(([value, text]) => make("option", { value, selected: value === chosen }, text));
  const failed = fault(edit) || unmet(edit);
  const wrong = failed || outside(edit);
  const tone = !failed || edit.positions === "generated" ? "soft" : "error";
  const value = make("input", {
    type: "number",
    name: "value",
    id: `value-${index}`,
    step: "any",
    value: edit.value,
    "aria-label": `Value for ${name}`,
  });
  value.style.width = `calc(${Math.max(4, Math.min(24, String(edit.value).length))}ch + 1.9rem)`; // with its arrows
  return make(
    "li",
    { "data-index": index, class: edit.on ? null : "off" },
    make(
      "label",
      { class: "switch" },
      make("input", {
        type: "checkbox",
        role: "switch",
        name: "on",
        id: `on-${index}`,
        checked: edit.on,
        "aria-label": `Edit of ${name}`,
      }),
      make("i", { "aria-hidden": "true" }),
    ),
    make(
      "select",
      { name: "operation", id: `operation-${index}`, "aria-label": `What to do with ${name}` },
      ...options(edit.part === undefined ? OPERATIONS : { scale, off }, edit.operation),
    ),
    edit.part === undefined
      ? make("button", { type: "button", class: "link", "data-open": true, id: `open-${index}` }, name)
      : make("code", {}, name),
    edit.operation !== "off" && make("span", {}, { set: "to", scale: "by", add: "" }[edit.operation]),
    edit.operation !== "off" && value,
    make(
      "select",
      { name: "place", id: `place-${index}`, "aria-label": `Where ${name} is edited` },
      ...options(PLACES, own ? "some" : edit.positions),
    ),
    own &&
      make("input", {
        name: "positions",
        id: `positions-${index}`,
        class: "positions",
        value: edit.positions,
        "aria-label": "Positions, with commas",
        pattern: "\\s*\\d+(\\s*,\\s*\\d+)*\\s*",
      }),
    make(
      "button",
      { type: "button", class: "quiet close", "data-delete": true, "aria-label": `Delete the edit of ${name}` },
      "×",
    ),
    wrong && make("span", { class: `remark ${tone}` }, wrong),
  );
}
