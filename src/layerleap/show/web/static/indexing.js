// @ts-check
// The concept index: what building it takes, how far it is, and the buttons to start and stop it. The build
// belongs to the server, so that it goes on without this page and is the same in all of them.

import { check, json } from "./api.js";
import { byId, hit, make, say } from "./dom.js";
import { now, on, set } from "./state.js";
import { sentence } from "./words.js";

/** @import { IndexBuild } from "./types.js" */

const OFTEN = 700; // milliseconds between looks while it is built
const SELDOM = 3_000; // and while it is not: another page may start it
const BUSY = ["waiting", "building", "stopping"];
let timer = 0;
let turn = 0;
let problem = "";

export function start() {
  on(["model", "connection"], poll);
  byId("found").addEventListener("click", (event) => {
    if (hit(event, "#build-index")) ask("POST");
    if (hit(event, "#stop-index")) ask("DELETE");
  });
}

/** Look how far it is, now and from time to time, as long as there is none. */
async function poll() {
  clearTimeout(timer);
  const mine = ++turn;
  const { model, connection } = now();
  if (!model?.index.buildable || model.index.ready || connection === "gone") return;
  try {
    const indexing = await json("index");
    if (mine === turn) take(indexing);
  } catch {
    // The next look says more; a server that is gone is noticed by the request itself.
  }
  const wait = BUSY.includes(now().indexing?.state ?? "") ? OFTEN : SELDOM;
  if (mine === turn) timer = window.setTimeout(poll, wait);
}

/** @param {"POST"|"DELETE"} method */
async function ask(method) {
  problem = "";
  try {
    take(await json("index", { method, body: method === "POST" ? {} : undefined }));
  } catch (error) {
    problem = /** @type {Error} */ (error).message;
    set({ indexing: now().indexing && { .../** @type {IndexBuild} */ (now().indexing) } });
  }
  poll();
}

/** @param {IndexBuild} indexing */
function take(indexing) {
  set({ indexing });
  if (indexing.state !== "ready") return;
  say("The concept index is ready.");
  check(); // the model says so, too, and the search begins
}

/** The placeholder of search results while there is no index. */
export function indexParts() {
  const { model, indexing, connection } = now();
  if (!model?.index.buildable || !indexing || indexing.state === "unavailable") {
    const reason = model?.index.reason ?? "there is no index of this model's concepts yet";
    return [
      make("p", { class: "empty" }, sentence(reason)),
      make("p", { class: "soft" }, "Everything else on this page works without it."),
    ];
  }
  if (connection === "gone")
    return [make("p", { class: "empty" }, "The server does not answer. What it has built of the index is kept.")];
  return BUSY.includes(indexing.state) ? busyParts(indexing) : offerParts(indexing);
}

/** @param {IndexBuild} indexing */
function offerParts({ seconds, megabytes, share, message, state }) {
  const begun = (share ?? 0) > 0.01;
  const size = megabytes === null ? "" : `, ${megabytes < 1 ? "less than 1" : Math.round(megabytes)} MB`;
  const takes = seconds === null ? "" : ` (about ${duration(seconds)}${begun ? " left" : ""}${size})`;
  const wrong = problem || (message && sentence(message));
  return [
    make(
      "p",
      { class: "empty" },
      "Search, clusters, neighbours and natural ranges come from the concept index: every neuron of this model, read in its vocabulary.",
    ),
    wrong && make("p", { class: state === "failed" || problem ? "error" : "soft", role: "status" }, wrong),
    make(
      "button",
      { type: "button", class: "primary build", id: "build-index" },
      `${wrong ? "Try again" : begun ? "Go on building" : "Build the index"}${takes}`,
    ),
    make("p", { class: "soft" }, "Everything else on this page works meanwhile, and without it."),
  ];
}

/** @param {IndexBuild} indexing */
function busyParts({ state, phase, done, total, unit, share, seconds }) {
  const left = seconds !== null && state === "building" ? `about ${duration(seconds)} left` : "";
  const step = total ? `${phase}: ${done?.toLocaleString("en")} of ${total.toLocaleString("en")} ${unit}` : "";
  const words = { stopping: "Stopping after this step…", waiting: "Waiting for the model…" };
  return [
    make("h3", { class: "building" }, "Building the index"),
    make("progress", { max: 1, value: (share ?? 0).toFixed(3), "aria-label": "Progress of the index" }),
    make(
      "p",
      { class: "soft" },
      words[/** @type {keyof typeof words} */ (state)] ?? [step, left].filter(Boolean).join(" · "),
    ),
    make("button", { type: "button", id: "stop-index", disabled: state === "stopping" }, "Stop"),
    make("p", { class: "soft" }, "The page stays usable. What is built is kept, even if the server is stopped."),
  ];
}

/** @param {number} seconds */
function duration(seconds) {
  if (seconds < 55) return `${Math.max(5, 5 * Math.round(seconds / 5))} seconds`;
  const minutes = Math.round(seconds / 60);
  return minutes === 1 ? "1 minute" : `${minutes} minutes`;
}
