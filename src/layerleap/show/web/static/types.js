// @ts-check
// The types of what the server sends and of what the page keeps. Types only: nothing here runs.

/** @typedef {{id: number, text: string, label: string, kind: string}} Token */
/** @typedef {[id: number, probability: number]} Guess */
/** @typedef {[probability: number, rank: number]} Place */

/**
 * @typedef {object} Model
 * @property {string} name
 * @property {string} class
 * @property {string} kind
 * @property {number} n_layers
 * @property {number} d_model
 * @property {number} d_vocab
 * @property {{block: number, n_neurons: number|null, reason: string|null, style: string}[]} blocks
 * @property {{name: string, title: string}[]} lenses
 * @property {Token|string|null} mask_token
 * @property {boolean} can_generate
 * @property {string} [exit_rule] the rule of the exit marks, in words
 * @property {string|null} generate_reason
 * @property {{ready: boolean, reason: string|null, vectors: number|null, buildable: boolean}} index
 * @property {{title: string, text: string, watch: Token|string|number|null}[]} examples
 * @property {{tokens: number, edits: number, new_tokens: number, top: number, follow: number}} limits
 * @property {string} version
 * @property {string} fingerprint
 */

/**
 * How far the concept index is; `seconds` are what is left.
 * @typedef {object} IndexBuild
 * @property {"unavailable"|"missing"|"waiting"|"building"|"stopping"|"failed"|"ready"} state
 * @property {string|null} message
 * @property {number|null} seconds
 * @property {number|null} share
 * @property {number|null} megabytes
 * @property {string|null} phase
 * @property {number|null} done
 * @property {number|null} total
 * @property {string|null} unit
 */

/** @typedef {"before"|"after"} Side */

/**
 * One reading of the grid.
 * @typedef {object} Cell
 * @property {number} layer
 * @property {number} position
 * @property {Guess[]} top
 * @property {Place|null} watch
 * @property {Record<string, Place>} follow by id, of the pinned tokens
 * @property {Place} final
 * @property {boolean} agrees
 * @property {number} kl
 * @property {number} entropy
 * @property {number} [change] KL between the readings without and with edits
 * @property {boolean} [changed]
 */

/**
 * What a run was asked for; the grid is stale when the page would ask for something else.
 * @typedef {object} Question
 * @property {{ids: number[]}|{text: string}} input
 * @property {string} text
 * @property {string} lens
 * @property {number|null} watch
 * @property {string[]} edits
 * @property {number[]} follow pinned tokens; those that are pinned later do not make the grid stale
 */

/**
 * Where early exit would stop; `agrees` if its token is the model's answer.
 * @typedef {{layer: number, agrees: boolean, top: Token, answer: Token}} Stop
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
 * @property {{spec: string, sentence: string, applied?: boolean, remark?: string}[]} edits
 * @property {number|null} lowest
 * @property {Record<Side, Map<string, Cell>>} cells by `layer.position`
 * @property {Map<number, Token>} names
 * @property {Map<number, {before: number|null, after: number|null, exits?: Record<Side, Stop|null>}>} saturation
 * @property {number} seconds
 */

/**
 * @typedef {object} Update
 * @property {number} neuron
 * @property {number} coefficient
 * @property {number} norm
 * @property {number} strength
 * @property {number} share
 * @property {Token[]} promotes
 * @property {Token[]} suppresses
 * @property {Range|null} range
 * @property {string|null} name
 */

/** @typedef {{low: number, mean: number, high: number}} Range */
/** @typedef {[id: number, probability: number, change: number|null]} Moved */
/** @typedef {{where: string, layer: number|null, top: Moved[], watch: Place|null}} Stage */

/**
 * @typedef {object} CellReading
 * @property {number} block
 * @property {number} position
 * @property {Token} token
 * @property {Stage[]} stages
 * @property {boolean} parallel
 * @property {string|null} reason
 * @property {{updates: Update[], shown_share: number, bias_share: number, rest_share: number, total_norm: number}|null} neurons
 * @property {string|null} neurons_reason
 * @property {Record<string, Token>} names
 * @property {CellReading} [after]
 */

/** @typedef {{token: Token, score: number}} Scored */

/**
 * @typedef {object} Vector
 * @property {number} block
 * @property {number} neuron
 * @property {number} norm
 * @property {Scored[]} promotes
 * @property {Scored[]} suppresses
 * @property {Range|null} range
 * @property {number|null} cluster
 * @property {string|null} name
 * @property {string|null} note
 */

/**
 * `end` says which end of its tokens was searched for, if any.
 * @typedef {{block: number, neuron: number, end?: "promoted"|"suppressed"}} Neuron
 */
/** @typedef {{block: number, neuron: number, cosine?: number, promotes: Token[], name?: string|null}} Neighbour */
/** @typedef {{number: number, size: number, tokens: Token[], members?: Neighbour[]}} Cluster */
/**
 * @typedef {object} Match
 * @property {number} block
 * @property {number} neuron
 * @property {number} score
 * @property {string} side
 * @property {Token[]} matched
 * @property {Token[]} promotes
 * @property {Token[]} suppresses
 * @property {boolean} partial no word of the query matches whole
 * @property {string|null} name
 */

/** @typedef {{kind: string, norm: number, promotes: Scored[], suppresses: Scored[]}} Key */
/** @typedef {{keys: Key[], reason: string|null}} Keys */
/**
 * @typedef {object} Heads
 * @property {number} block
 * @property {number} n_heads
 * @property {number} n_kv_heads
 * @property {string} positions
 * @property {string|null} qk_reason
 */
/** @typedef {{first: Token, second: Token, score: number}} TokenPair */
/** @typedef {{title: string, legend: string, roles: string[], pairs: TokenPair[]}} Pairs */

/** @typedef {"set"|"scale"|"add"|"off"} Operation */
/**
 * @typedef {object} Edit
 * @property {number} block
 * @property {number} neuron
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

export {};
