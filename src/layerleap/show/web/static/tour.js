// @ts-check
// The tour: six stops, a minute. A card beside the page's parts, which stay visible and usable.

import { byId, fill, hit, make } from "./dom.js";
import { openExample } from "./examples.js";
import { now } from "./state.js";

const SEEN = "layerleap-tour";
const STOPS = [
  {
    target: "ask",
    title: "Ask",
    text: "Type a prompt. Its tokens appear while you type. Choose how hidden states are read (the lens), and a token to watch. Enter runs the model.",
  },
  {
    target: "middle",
    title: "Read the layers",
    text: "Each row is a token of the prompt, each column a layer. A cell shows what the model would say next if it stopped there; colour and bar show how sure it is. Arrow keys walk, Enter selects.",
  },
  {
    target: "paths",
    title: "Follow tokens",
    text: "The paths show how the leading tokens rise and fall over the layers. Click a token anywhere to pin it. The dashed line marks where the answer has settled.",
  },
  {
    target: "right",
    title: "Find who writes it",
    text: "The selected cell: predictions before the block, after attention and after the FFN, and the neurons that write most there. Click one to read the tokens that it promotes and suppresses.",
  },
  {
    target: "concepts",
    title: "Search concepts",
    text: "Every neuron writes a vector that reads as tokens. Search all of them by word, or browse clusters of vectors that point the same way.",
  },
  {
    target: "dock",
    title: "Edit and compare",
    text: "“Add to edits” turns a neuron off or sets it. Run again to see what changes in the grid, and press Generate to compare the text without and with edits.",
  },
];

let stop = 0;
/** @type {HTMLElement|null} */
let from = null;

export function startTour() {
  from = document.activeElement instanceof HTMLElement ? document.activeElement : null;
  stop = 0;
  if (!now().prompt) openExample(0); // There is more to see with a run.
  show();
}

export function closeTour() {
  const card = byId("tour");
  if (card.hidden) return false;
  card.hidden = true;
  mark("");
  try {
    localStorage.setItem(SEEN, "yes");
  } catch {
    // Without storage the button in the welcome stays prominent.
  }
  from?.focus();
  return true;
}

/** @param {string} target */
function mark(target) {
  for (const { target: id } of STOPS) byId(id).classList.toggle("tour-target", id === target);
}

function show() {
  const { target, title, text } = STOPS[stop];
  const card = byId("tour");
  mark(target);
  byId(target).scrollIntoView({ block: "nearest" });
  // The card stays out of the way of what it explains.
  card.className = `tour ${target === "right" || target === "dock" ? "left" : "right"} ${target === "dock" ? "up" : ""}`;
  const last = stop === STOPS.length - 1;
  fill(
    card,
    make("p", { class: "soft" }, `${stop + 1} of ${STOPS.length}`),
    make("h2", { id: "tour-title" }, title),
    make("p", {}, text),
    make(
      "div",
      { class: "bar" },
      make("button", { type: "button", "data-step": -1, disabled: stop === 0 }, "Back"),
      make("button", { type: "button", class: "primary", "data-step": last ? "end" : 1 }, last ? "Done" : "Next"),
      make("span", { class: "spring" }),
      !last && make("button", { type: "button", class: "quiet", "data-step": "end" }, "Close"),
    ),
  );
  card.hidden = false;
  /** @type {HTMLElement|null} */ (card.querySelector(".primary"))?.focus();
}

export function start() {
  byId("start-tour").addEventListener("click", startTour);
  byId("tour").addEventListener("click", (event) => {
    const step = hit(event, "[data-step]")?.dataset.step;
    if (!step) return;
    if (step === "end") return closeTour();
    stop += Number(step);
    show();
  });
}
