// @ts-check
// The page's one state. Views subscribe to the keys they show and are called once per change.

/** @typedef {import("./types.js").State} State */
/** @typedef {import("./types.js").View} View */
/** @typedef {keyof State} Key */

/** What a link leaves out. @type {Readonly<View>} */
export const DEFAULTS = Object.freeze({
  prompt: "",
  second: null,
  lens: "logit",
  watch: null,
  edits: [],
  selected: null,
  pinned: [],
  colour: "top",
  view: "after", // matters only with edits: a link with edits shows what they do
  allLayers: false,
  vector: null,
  query: "",
  newTokens: 20,
});

/** @type {State} */
const state = {
  ...DEFAULTS,
  model: null,
  connection: "loading",
  trouble: "",
  indexing: null,
  live: [null, null],
  traces: [null, null],
  cell: { status: "idle", message: "", reading: null },
  vectorReading: { status: "idle", message: "", vector: null, neighbours: null },
  generation: { status: "idle", message: "", sides: {} },
};

/** @type {{keys: Set<Key>, call: (state: Readonly<State>) => void}[]} */
const listeners = [];
/** @type {Set<Key>} */
let changed = new Set();

/** @returns {Readonly<State>} */
export function now() {
  return state;
}

/** @param {Partial<State>} patch */
export function set(patch) {
  for (const key of /** @type {Key[]} */ (Object.keys(patch))) {
    if (Object.is(state[key], patch[key])) continue;
    /** @type {any} */ (state)[key] = patch[key];
    if (!changed.size) queueMicrotask(tell);
    changed.add(key);
  }
}

/**
 * Call `call` now, and again whenever one of `keys` has changed.
 * @param {Key[]} keys
 * @param {(state: Readonly<State>) => void} call
 */
export function on(keys, call) {
  listeners.push({ keys: new Set(keys), call });
  call(state);
}

function tell() {
  const keys = changed;
  changed = new Set();
  for (const listener of listeners) {
    if ([...keys].some((key) => listener.keys.has(key))) listener.call(state);
  }
}

/** Say that what a key holds was changed in place. @param {Key} key */
export function touch(key) {
  if (!changed.size) queueMicrotask(tell);
  changed.add(key);
}
