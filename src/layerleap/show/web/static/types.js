// @ts-check
// What the page sends and gets; a number that is not finite arrives as null.
// Written by `python tests/web/page_types.py`: do not edit.

/** @typedef {"unavailable"|"missing"|"waiting"|"building"|"stopping"|"failed"|"ready"} BuildState */
/** @typedef {"before"|"after"} Side */
/** @typedef {"plain"|"edited"} TextSide */
/** @typedef {QueuedFrame|MetaFrame|CellsFrame|SaturationFrame|DoneFrame|ErrorFrame} TraceFrame */
/** @typedef {QueuedFrame|StartFrame|TokenFrame|TextFrame|EndFrame|ErrorFrame} GenerateFrame */
/** A token of the input or output, or a class; `label` is how it is shown. @typedef {{id: number, text: string, label: string, kind: "text"|"space"|"bytes"|"special"|"class"}} Token */
/** A block, and why its neurons cannot be read, if so. @typedef {{block: number, n_neurons: number|null, reason: string|null, style: string|null}} Block */
/** A way to read hidden states. @typedef {{name: string, title: string}} Lens */
/** A prompt to begin with. @typedef {{title: string, text: string, watch: string|null}} Example */
/** Whether concepts can be searched, and why not. @typedef {{ready: boolean, reason: string|null, vectors: number|null, buildable: boolean}} Index */
/** How far the concept index is; `seconds` are what is left, `megabytes` what it will take. @typedef {{state: BuildState, message: string|null, seconds: number|null, share: number|null, megabytes: number|null, phase: string|null, done: number|null, total: number|null, unit: string|null}} IndexBuild */
/** The most that one request may ask for. @typedef {{tokens: number, edits: number, new_tokens: number, top: number, follow: number}} RequestLimits */
/** The model that is served. @typedef {{name: string, class: string, kind: string, n_layers: number, d_model: number, d_vocab: number, blocks: Block[], lenses: Lens[], mask_token: string|null, can_generate: boolean, generate_reason: string|null, examples: Example[], longest: number|null, exit_rule: string, bank: string|null, index: Index, limits: RequestLimits, fingerprint: string, version: string}} Model */
/** A text, token by token, and how many tokens a prompt may have. @typedef {{tokens: Token[], limit: number}} Tokens */
/** Output tokens. @typedef {{tokens: Token[]}} Vocabulary */
/** A neuron, and what the user calls its value vector. @typedef {{block: number, neuron: number, name: string|null}} Neuron */
/** A value vector that matches a search. @typedef {{block: number, neuron: number, name: string|null, score: number, side: "promoted"|"suppressed", matched: Token[], promotes: Token[], suppresses: Token[], partial: boolean}} Match */
/** The value vectors that match words; `notes` are on words that are not tokens. @typedef {{query: string, results: Match[], notes: string[], milliseconds: number}} Search */
/** A token and its score. @typedef {{token: Token, score: number}} Scored */
/** The natural range of a coefficient; `positive` is the share of positions above 0. @typedef {{low: number, mean: number, high: number, std: number, positive: number}} Range */
/** A token of a stage; `climbed` counts ranks gained since the stage before. @typedef {{token: Token, prob: number, rank: number, climbed: number|null}} Predicted */
/** What a lens reads at one point of a block. @typedef {{where: "before"|"attention"|"ffn", layer: number, top: Predicted[], watched: Predicted|null}} Stage */
/** What a neuron adds to the residual stream, and what the user calls the neuron. @typedef {{block: number, neuron: number, name: string|null, coefficient: number, norm: number, strength: number, share: number, promotes: Scored[], suppresses: Scored[], range: Range|null}} Update */
/** The stages and neurons of a block; `missing` says what cannot be shown, and why. @typedef {{block: number, style: string|null, stages: Stage[], updates: Update[], total_norm: number|null, shown_share: number, bias_share: number, rest_share: number, missing: Record<string, string>}} BlockReading */
/** A block at one position; `after` is the same with edits. @typedef {{block: number, style: string|null, stages: Stage[], updates: Update[], total_norm: number|null, shown_share: number, bias_share: number, rest_share: number, missing: Record<string, string>, position: number, token: Token, after: BlockReading|null}} CellReading */
/** What the user calls a value vector. @typedef {{block: number, neuron: number, name: string|null, note: string|null}} VectorName */
/** A value vector of a cluster, and its cosine to the centre. @typedef {{block: number, neuron: number, name: string|null, cosine: number, promotes: Token[]}} Member */
/** A value vector that points the same way as another. @typedef {{block: number, neuron: number, name: string|null, cosine: number, promotes: Token[], suppresses: Token[]}} Neighbour */
/** The value vectors that are nearest to one. @typedef {{neighbours: Neighbour[]}} Neighbours */
/** A group of value vectors, and the tokens they share. @typedef {{number: number, size: number, tokens: Token[]}} ClusterTitle */
/** Groups of value vectors. @typedef {{clusters: ClusterTitle[]}} Clusters */
/** A group with the members that are nearest to its centre. @typedef {{number: number, size: number, tokens: Token[], members: Member[]}} Cluster */
/** A value vector: both ends of its tokens, and what the user calls it. @typedef {{block: number, neuron: number, name: string|null, note: string|null, norm: number, promotes: Scored[], suppresses: Scored[], range: Range|null, cluster: number|null}} Vector */
/** One kind of key of a neuron: the tokens it responds to most and least. @typedef {{kind: string, norm: number, promotes: Scored[], suppresses: Scored[]}} Key */
/** The keys of a neuron, and why they cannot be read, if so. @typedef {{keys: Key[], reason: string|null}} Keys */
/** The heads of a block. @typedef {{block: number, n_heads: number, n_kv_heads: number, positions: string, qk_reason: string|null}} Heads */
/** Two tokens, and their entry in a head's matrix. @typedef {{first: Token, second: Token, score: number}} TokenPair */
/** The strongest token pairs of a head; `roles` says what first and second are. @typedef {{title: string, legend: string, roles: string[], pairs: TokenPair[]}} Pairs */
/** A saved session without its state; `updated` is in seconds since 1970. @typedef {{id: string, title: string, updated: number}} SavedTitle */
/** A saved session. @typedef {{id: string, title: string, updated: number, state: Record<string, any>}} SavedSession */
/** That a session is gone. @typedef {{deleted: boolean}} Deleted */
/** A session as JSON, and as Python that reproduces it. @typedef {{json: Record<string, any>, python: string}} Exported */
/** A token and its probability. @typedef {[id: number, probability: number]} Guess */
/** The probability and rank of a token that is followed. @typedef {[probability: number, rank: number]} Place */
/** One reading of the grid; `change` is KL between the readings without and with edits. @typedef {{layer: number, position: number, top: Guess[], final: Place, watch: Place|null, follow: Record<string, Place>, agrees: boolean, kl: number, entropy: number, changed: boolean, change: number|null}} Cell */
/** An edit of a run, and whether it met a position. @typedef {{spec: string, sentence: string, applied: boolean, remark: string}} AppliedEdit */
/** Where early exit would stop; `agrees` if its token is the model's answer. @typedef {{layer: number, agrees: boolean, top: Token, answer: Token}} Stop */
/** Where early exit would stop without and with edits. @typedef {{before: Stop|null, after: Stop|null}} Exits */
/** How many requests are ahead. @typedef {{frame: "queued", place: number}} QueuedFrame */
/** Why a stream ends early; `place` if the server is busy. @typedef {{frame: "error", error: string, place: number|null}} ErrorFrame */
/** What a trace is of; `selected` is the position that comes first. @typedef {{frame: "meta", tokens: Token[], positions: number[], layers: number[], selected: number, lens: string, edits: AppliedEdit[], lowest: number|null}} MetaFrame */
/** Some cells of a trace, and the tokens in them that have not been named before. @typedef {{frame: "cells", side: Side, names: Record<string, Token>, cells: Cell[]}} CellsFrame */
/** From which layer on the top token of a position is the final one. @typedef {{frame: "saturation", position: number, before: number, after: number|null, exits: Exits}} SaturationFrame */
/** The end of a trace. @typedef {{frame: "done", seconds: number}} DoneFrame */
/** The beginning of a generated text. @typedef {{frame: "start", side: TextSide}} StartFrame */
/** A generated token and the text that it adds. @typedef {{frame: "token", side: TextSide, id: number, piece: string, label: string}} TokenFrame */
/** The end of a generated text. @typedef {{frame: "done", side: TextSide, text: string, seconds: number}} TextFrame */
/** The end of all generated texts. @typedef {{frame: "end"}} EndFrame */
/** A piece of text. @typedef {{text: string}} TextRequest */
/** A prompt: token ids, or a text that is still to be cut into tokens. @typedef {{ids?: number[]|null, text?: string|null}} InputRequest */
/** A prompt to read at every layer. @typedef {{input: InputRequest, lens?: string, watch?: number|null, edits?: string[], top?: number, follow?: number[], selected?: number|null}} TraceRequest */
/** One block at one position, to be read closely. @typedef {{input: InputRequest, block: number, position: number, lens?: string, watch?: number|null, edits?: string[], top?: number}} CellRequest */
/** A prompt to continue, with and without edits. @typedef {{input: InputRequest, edits?: string[], max_new_tokens?: number, sides?: TextSide[]}} GenerateRequest */
/** What the user calls a value vector; empty takes the name away. @typedef {{name: string, note?: string}} VectorNameRequest */
/** What the page wants to find again; only the page knows what is inside `state`. @typedef {{title: string, state: Record<string, any>}} SessionRequest */
/** A session to be written down for others. @typedef {{state: Record<string, any>}} ExportRequest */
export {};
