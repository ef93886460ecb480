// @ts-check
// Starts the parts of the page. Each redraws itself when the state changes; none calls another to redraw.

import * as cell from "./cell.js";
import * as edits from "./edits.js";
import * as exporting from "./export.js";
import * as generation from "./generate.js";
import * as grid from "./grid.js";
import * as heads from "./heads.js";
import * as help from "./help.js";
import * as indexing from "./indexing.js";
import * as keys from "./keys.js";
import * as link from "./link.js";
import * as notice from "./notice.js";
import * as paths from "./paths.js";
import * as peek from "./peek.js";
import * as prompt from "./prompt.js";
import * as search from "./search.js";
import * as sessions from "./sessions.js";
import * as split from "./split.js";
import * as theme from "./theme.js";
import * as tour from "./tour.js";
import * as vector from "./vector.js";
import { check } from "./api.js";
import { byId } from "./dom.js";
import { now, on, set } from "./state.js";
import { run, serverIsBack } from "./trace.js";
import { count } from "./words.js";

const KINDS = {
  "next-token": "predicts the next token",
  "masked-token": "fills in masked tokens",
  "text-class": "classifies texts",
  "token-class": "classifies tokens",
};

theme.start();
split.start();
set(link.fromFragment(location.hash));
for (const part of [
  prompt,
  notice,
  grid,
  peek,
  paths,
  cell,
  heads,
  vector,
  indexing,
  search,
  edits,
  generation,
  sessions,
  exporting,
  tour,
  help,
  keys,
  link,
])
  part.start();

on(["model", "connection", "trouble"], ({ model, connection, trouble }) => {
  const place = byId("connection");
  place.className = `connection ${connection}`;
  place.textContent = connection === "gone" ? `${trouble} Trying again…` : "";
  document.body.classList.toggle("gone", connection === "gone");
  if (!model) return;
  const kind = KINDS[/** @type {keyof typeof KINDS} */ (model.kind)] ?? model.kind;
  byId("model").textContent = [
    model.name,
    model.class,
    count(model.n_layers, "layer"),
    `width ${model.d_model}`,
    kind,
  ].join(" · ");
  document.title = `${model.name} · layerleap debugger`;
});

on(["connection"], ({ connection }) => {
  if (connection === "ok") serverIsBack();
});

// A link with a prompt is a view: run it as soon as the model is known, and again if the model is another.
let ran = "";
on(["model"], ({ model, prompt }) => {
  if (!model || ran === model.fingerprint) return;
  if (ran) set({ traces: [null, null], vector: null });
  ran = model.fingerprint;
  if (prompt) run();
});

/** Say which edits of a damaged link were left out. @param {string} fragment */
function warn(fragment) {
  const lost = link.unreadEdits(fragment).map((text) => `"${text}"`);
  if (lost.length) edits.refuse(`In the link ${lost.join(" and ")} cannot be read as an edit, so it was left out.`);
}
warn(location.hash);

// The event comes later than the change. By then the page may have written its own view over the
// address, so the link is taken from the event.
window.addEventListener("hashchange", (event) => {
  const fragment = new URL(event.newURL).hash;
  const before = link.toFragment(now());
  const view = link.fromFragment(fragment);
  if (link.toFragment(view) === before || !fragment.includes("=")) return;
  set({ traces: [null, null] });
  edits.refuse("");
  warn(fragment);
  link.show(view);
  if (view.prompt) run();
});

check();
