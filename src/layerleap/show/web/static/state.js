// @ts-check
// The page's one state. Views subscribe to the keys they show and are called once per change.

/** @import { AppliedEdit, Cell, CellReading, Exits, IndexBuild, InputRequest, Keys, Model, Neighbour, Side, Token, Vector } from "./types.js" */

/**
 * What a run was asked for; the grid is stale when the page would ask for something else.
 * @typedef {object} Question
 * @property {InputRequest} input
 * @property {string} text
 * @property {string} lens
 * @property {number|null} watch
 * @property {string[]} edits
 * @property {number[]} follow pinned tokens; those that are pinned later do not make the grid stale
 */

/**
 * @typedef {object} Trace
 * @property {Question} question
 * @property {"waiting"|"running"|"done"|"stopped"|"error"} status
 * @property {string} message
 * @property {"gone"|"refused"|null} end why an error is one: the server went away, or refuses this question
 * @property {Token[]} tokens
 * @property {number[]} positions
 * @property {number[]} layers
 * @property {number} selected the position that the server chose
 * @property {AppliedEdit[]} edits
 * @property {number|null} lowest
 * @property {Record<Side, Map<string, Cell>>} cells by `layer.position`
 * @property {Map<number, Token>} names
 * @property {Map<number, {before: number, after: number|null, exits: Exits}>} saturation
 * @property {number} seconds
 */

/**
 * `end` says which end of its tokens was searched for, if any.
 * @typedef {{block: number, neuron: number, end?: "promoted"|"suppressed"}} Neuron
 */

/** @typedef {"set"|"scale"|"add"|"off"} Operation */

/**
 * @typedef {object} Edit
 * @property {number} block
 * @property {number} neuron -1 where `part` is given
 * @property {string} [part] a head or a part of the block, such as "H3" or "attn"
 * @property {Operation} operation
 * @property {number} value
 * @property {string} positions "all", "last", "generated" or numbers with commas
 * @property {boolean} on
 */

/** @typedef {{grid: number, layer: number, position: number}} Selection */

/** @typedef {{id: number, label: string}} Named */

/**
 * What a link or a session keeps.
 * @typedef {object} View
 * @property {string} prompt
 * @property {string|null} second
 * @property {string} lens
 * @property {Named|null} watch
 * @property {Edit[]} edits
 * @property {Selection|null} selected
 * @property {Named[]} pinned
 * @property {"top"|"watch"|"final"} colour
 * @property {"before"|"after"|"difference"} view
 * @property {boolean} allLayers
 * @property {Neuron|null} vector
 * @property {string} query
 * @property {number} newTokens
 */

/**
 * `waits` if the server could not be asked.
 * @typedef {{text: string, model: string, tokens: Token[], limit: number, error: string|null, waits?: boolean}} Live
 */

/** @typedef {{status: "idle"|"loading"|"done"|"error", message: string, gone?: boolean}} Progress `gone` if the same may succeed later */

/** @typedef {{pieces: Token[], status: "waiting"|"running"|"done"|"stopped", seconds: number}} Written */

/**
 * What only this tab knows.
 * @typedef {object} Now
 * @property {Model|null} model
 * @property {"loading"|"ok"|"gone"} connection
 * @property {string} trouble why there is no connection
 * @property {IndexBuild|null} indexing
 * @property {(Live|null)[]} live
 * @property {(Trace|null)[]} traces
 * @property {Progress & {reading: CellReading|null}} cell
 * @property {Progress & {vector: Vector|null, neighbours: Neighbour[]|null, keys?: Keys|null}} vectorReading
 * @property {Progress & {sides: Record<string, Written>}} generation
 */

/** @typedef {View & Now} State */
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
