// @ts-check
// Saved sessions: views with a title that the server keeps.

import { json, mayRecover } from "./api.js";
import { byId, closes, dialogHead, failed, fill, hit, loading, make, say } from "./dom.js";
import { fromSnapshot, show, snapshot } from "./link.js";
import { now, set } from "./state.js";
import { run } from "./trace.js";

/** @import { SavedTitle } from "./types.js" */

/** @type {HTMLDialogElement} */
let dialog;

export function start() {
  dialog = byId("sessions");
  byId("open-sessions").addEventListener("click", open);
  dialog.addEventListener("click", click);
  dialog.addEventListener("submit", (event) => {
    event.preventDefault();
    save();
  });
}

async function open() {
  const title = now().prompt.trim().slice(0, 60);
  fill(
    dialog,
    dialogHead("sessions-title", "Sessions"),
    make(
      "form",
      { class: "inline" },
      make("input", {
        name: "title",
        "aria-label": "Title of this session",
        placeholder: "Title",
        value: title,
        maxlength: 120,
        autocomplete: "off",
      }),
      make("button", { class: "primary" }, "Save this view"),
    ),
    make(
      "p",
      { class: "soft", role: "status" },
      "A session keeps the prompt, lens, edits, pins and the selected cell. The address of this page keeps them, too.",
    ),
    make("div", { class: "saved" }, loading("Loading…")),
  );
  dialog.showModal();
  await list();
}

/** @param {string} [message] */
async function list(message = "") {
  try {
    const answer = await json("sessions");
    render(answer);
    if (message) tell(message);
  } catch (error) {
    const place = /** @type {HTMLElement} */ (dialog.querySelector(".saved"));
    fill(place, ...failed(/** @type {Error} */ (error).message, mayRecover(error)));
  }
}

/** @param {string} message */
function tell(message) {
  /** @type {HTMLElement} */ (dialog.querySelector("[role=status]")).textContent = message;
}

/** @param {SavedTitle[]} sessions */
function render(sessions) {
  const items = sessions.map((session) =>
    make(
      "li",
      { "data-id": session.id },
      make(
        "button",
        { type: "button", class: "row", "data-open": true },
        make("b", {}, session.title || "Untitled"),
        make("small", {}, when(session.updated)),
      ),
      make(
        "button",
        {
          type: "button",
          class: "quiet close",
          "data-delete": true,
          "aria-label": `Delete ${session.title || "Untitled"}`,
        },
        "×",
      ),
    ),
  );
  const place = /** @type {HTMLElement} */ (dialog.querySelector(".saved"));
  fill(
    place,
    items.length
      ? make("ol", { class: "vectors" }, ...items)
      : make("p", { class: "empty" }, "No session is saved yet."),
  );
}

/** @param {number} updated in seconds since 1970 */
function when(updated) {
  const date = new Date(updated * 1000);
  return Number.isNaN(date.getTime()) ? "" : date.toLocaleString();
}

/** An id of letters and digits. `crypto.randomUUID` is missing on plain http. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function save() {
  const field = /** @type {HTMLInputElement} */ (dialog.querySelector("input[name=title]"));
  const title = field.value.trim() || "Untitled";
  try {
    await json(`sessions/${newId()}`, { method: "PUT", body: { title, state: { ...snapshot(), title } } });
    await list(`Saved as “${title}”.`);
  } catch (error) {
    await list(/** @type {Error} */ (error).message);
  }
}

/** @param {Event} event */
async function click(event) {
  if (closes(event)) return dialog.close();
  if (hit(event, "[data-retry]")) return list();
  const id = hit(event, "[data-id]")?.dataset.id;
  if (!id) return;
  try {
    if (hit(event, "[data-delete]")) {
      await json(`sessions/${id}`, { method: "DELETE" });
      await list("Deleted.");
    } else if (hit(event, "[data-open]")) {
      const session = await json(`sessions/${id}`);
      dialog.close();
      set({ traces: [null, null] });
      show(fromSnapshot(session.state));
      say(`Opened ${session.title}.`);
      run();
    }
  } catch (error) {
    await list(/** @type {Error} */ (error).message);
  }
}
