// @ts-check
// Export: the view as one HTML file that opens offline, as JSON, and as Python that reproduces it.

import { json } from "./api.js";
import { byId, closes, dialogHead, fill, hit, make } from "./dom.js";
import { whole } from "./grid.js";
import { LONGEST, snapshot } from "./link.js";
import { now } from "./state.js";
import { percent } from "./words.js";
import { cellAt, nameOf } from "./trace.js";

/** @type {HTMLDialogElement} */
let dialog;
const CONTROLS =
  "script, link, dialog, .splitter, .skip, .tools, #ask .asks, #ask .more, #add-edit, #tour, #said, noscript, #search, .choices, #maximise, #all-layers, .close, [data-off], [data-edit], .switch i, #notice, .connection, [data-all], #stop-generate, #generate-too, [hidden]";

export function start() {
  dialog = byId("export");
  byId("open-export").addEventListener("click", open);
  dialog.addEventListener("click", click);
}

function open() {
  const ready = now().traces[0]?.layers.length;
  /** @param {string} kind @param {string} title @param {string} text */
  const choice = (kind, title, text) =>
    make(
      "li",
      {},
      make(
        "button",
        { type: "button", class: "row", "data-export": kind, disabled: !ready },
        make("b", {}, title),
        make("small", {}, text),
      ),
    );
  fill(
    dialog,
    dialogHead("export-title", "Export"),
    make(
      "ol",
      { class: "vectors" },
      choice("html", "HTML file", "This view as one page that opens without a server."),
      choice("json", "JSON", "The question, the settings and the readings, with labels."),
      choice("python", "Python", "A snippet that reproduces it with layerleap."),
    ),
    make(
      "p",
      { class: "soft", role: "status" },
      !ready
        ? "Run a prompt first: there is nothing to export yet."
        : now().prompt.length > LONGEST
          ? `A prompt of more than ${LONGEST.toLocaleString("en")} characters is not in the link. Sessions keep it.`
          : "A link to this view is in the address bar: it opens with this server.",
    ),
    make("pre", { class: "code", hidden: true, tabindex: "0", "aria-label": "Python snippet" }),
  );
  dialog.showModal();
}

/** @param {Event} event */
async function click(event) {
  if (closes(event)) return dialog.close();
  const kind = hit(event, "[data-export]")?.dataset.export;
  if (!kind) return;
  const status = /** @type {HTMLElement} */ (dialog.querySelector("[role=status]"));
  try {
    if (kind === "html") {
      save(`${fileName()}.html`, "text/html", await page());
      status.textContent = "Saved. The file opens in any browser, offline.";
      return;
    }
    const { python, json: data } = await json("export", { method: "POST", body: { state: snapshot() } });
    if (kind === "json")
      save(`${fileName()}.json`, "application/json", JSON.stringify({ ...data, shown: readings() }, null, 1));
    else {
      save(`${fileName()}.py`, "text/x-python", python);
      const code = /** @type {HTMLElement} */ (dialog.querySelector("pre"));
      code.hidden = false;
      code.textContent = python;
    }
    status.textContent = "Saved.";
  } catch (error) {
    status.textContent = /** @type {Error} */ (error).message;
  }
}

/** The readings of the grid with labels, so that the file can be read without the tokenizer. */
function readings() {
  return now().traces.flatMap((trace) => {
    if (!trace?.layers.length) return [];
    const sides = /** @type {const} */ (["before", "after"]).slice(0, trace.question.edits.length ? 2 : 1);
    const cells = sides.flatMap((side) =>
      trace.positions.flatMap((position) =>
        trace.layers.flatMap((layer) => {
          const cell = cellAt(trace, side, layer, position);
          return cell
            ? [
                {
                  side,
                  ...cell,
                  top: cell.top.map(([id, probability]) => ({ id, label: nameOf(id).label, probability })),
                },
              ]
            : [];
        }),
      ),
    );
    return [
      {
        ...trace.question,
        tokens: trace.tokens,
        layers: trace.layers,
        saturation: Object.fromEntries(trace.saturation),
        cells,
      },
    ];
  });
}

function fileName() {
  const words = now()
    .prompt.toLowerCase()
    .match(/[a-z0-9]+/g) ?? ["view"];
  return `layerleap-${words.slice(0, 5).join("-").slice(0, 40)}`;
}

/** @param {string} name @param {string} type @param {string} text */
function save(name, type, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** The page as it looks now, without anything that needs the server. */
async function page() {
  /** @type {HTMLElement|null} */
  let root = null;
  whole(() => {
    root = /** @type {HTMLElement} */ (document.documentElement.cloneNode(true));
  });
  const copy = /** @type {HTMLElement} */ (/** @type {unknown} */ (root));
  freezeFields(copy);
  for (const element of copy.querySelectorAll(CONTROLS)) element.remove();
  for (const button of copy.querySelectorAll("button")) button.replaceWith(frozenButton(button));
  for (const element of copy.querySelectorAll("[tabindex]")) element.removeAttribute("tabindex");
  const head = /** @type {HTMLElement} */ (copy.querySelector("head"));
  const styles = [...document.styleSheets].map((sheet) => [...sheet.cssRules].map((rule) => rule.cssText).join("\n"));
  head.append(
    make("meta", { "http-equiv": "Content-Security-Policy", content: "default-src 'none'; style-src 'unsafe-inline'" }),
    make("style", {}, styles.join("\n")),
  );
  const body = /** @type {HTMLElement} */ (copy.querySelector("body"));
  body.classList.add("exported");
  body.append(make("footer", {}, colophon()));
  return `<!DOCTYPE html>\n${copy.outerHTML}`;
}

/** Fields become their values: a copy has no state of its own. @param {HTMLElement} copy */
function freezeFields(copy) {
  const fields = document.querySelectorAll("textarea, select, input");
  const copies = copy.querySelectorAll("textarea, select, input");
  fields.forEach((field, index) => {
    const value =
      field instanceof HTMLSelectElement
        ? (field.selectedOptions[0]?.textContent ?? "")
        : field instanceof HTMLInputElement && field.type === "checkbox"
          ? field.checked
            ? "on"
            : "off"
          : /** @type {HTMLInputElement} */ (field).value;
    copies[index].replaceWith(make("span", { class: "frozen" }, value));
  });
}

/** @param {HTMLButtonElement} button */
function frozenButton(button) {
  const span = make("span", { class: button.className, title: button.title || null });
  if (button.getAttribute("aria-pressed") === "true") span.classList.add("pressed");
  span.append(...button.cloneNode(true).childNodes);
  return span;
}

function colophon() {
  const { model, traces } = now();
  const last = traces[0];
  const settled = last?.positions[last.positions.length - 1];
  const cell =
    last && settled !== undefined ? cellAt(last, "before", last.layers[last.layers.length - 1], settled) : null;
  const answer = cell ? ` The model's answer: ${nameOf(cell.top[0][0]).label}, ${percent(cell.top[0][1])}.` : "";
  return `A view of ${model?.name ?? "a model"}, saved on ${new Date().toLocaleString()} from the debugger of layerleap ${model?.version ?? ""}.${answer}`;
}
