// @ts-check
// Requests to the server: JSON in, JSON or lines of JSON out. Reports when the server is gone or back.

import { now, set } from "./state.js";
import { sentence } from "./words.js";

const HEARTBEAT = 10_000; // milliseconds between looks at a server that answers
const RETRY = 1_500; // and at one that does not

/** A request that the server refused: `message` is its sentence. */
export class Refused extends Error {
  /** @param {string} message @param {number} status @param {number|null} place */
  constructor(message, status, place) {
    super(sentence(message));
    this.status = status;
    this.place = place;
  }
}

/** The server does not answer at all. */
export class Gone extends Error {}

/** Whether the same request may succeed later: a refusal stays one. @param {unknown} error */
export function mayRecover(error) {
  return !(error instanceof Refused) || error.status >= 500;
}

/** @param {unknown} error */
export function isAbort(error) {
  return error instanceof DOMException && error.name === "AbortError";
}

/**
 * @param {string} path relative, so that the page works below any address
 * @param {{method?: string, body?: unknown, signal?: AbortSignal}} [options]
 * @returns {Promise<Response>}
 */
async function send(path, { method = "GET", body, signal } = {}) {
  /** @type {RequestInit} */
  const request = { method, signal: signal ?? null, cache: "no-store" };
  if (body !== undefined) {
    request.body = JSON.stringify(body);
    request.headers = { "Content-Type": "application/json" };
  }
  let response;
  try {
    response = await fetch(`api/${path}`, request);
  } catch (error) {
    if (isAbort(error)) throw error;
    lost();
    throw new Gone("The server does not answer.");
  }
  if (now().connection === "gone") check();
  if (!response.ok) throw await refusal(response);
  return response;
}

/** @param {Response} response */
async function refusal(response) {
  /** @type {any} */
  let body = null;
  try {
    body = await response.json();
  } catch {
    // Not JSON: the status has to do.
  }
  const message = typeof body?.error === "string" ? body.error : `The server answered with status ${response.status}.`;
  return new Refused(message, response.status, typeof body?.place === "number" ? body.place : null);
}

/**
 * @param {string} path
 * @param {{method?: string, body?: unknown, signal?: AbortSignal}} [options]
 * @returns {Promise<any>}
 */
export async function json(path, options) {
  const response = await send(path, options);
  return response.status === 204 ? null : response.json();
}

/** @import { GenerateFrame, GenerateRequest, TraceFrame, TraceRequest } from "./types.js" */

/**
 * The frames of a streamed answer, one by one.
 * @template {"trace"|"generate"} P
 * @param {P} path
 * @param {P extends "trace" ? TraceRequest : GenerateRequest} body
 * @param {string} last the frame that ends a whole answer; an error does, too
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<P extends "trace" ? TraceFrame : GenerateFrame>}
 */
export async function* frames(path, body, last, signal) {
  const response = await send(path, { method: "POST", body, signal });
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let ended = false;
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (isAbort(error)) throw error;
      lost();
      throw new Gone("The server went away in the middle of its answer.");
    }
    rest += decoder.decode(part.value ?? new Uint8Array(), { stream: !part.done });
    const lines = rest.split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      if (!line.trim()) continue;
      const frame = JSON.parse(line);
      ended = frame.frame === last || frame.frame === "error";
      yield frame;
    }
    if (!part.done) continue;
    if (ended) return;
    check(); // a server that is shutting down closes its streams before it goes
    throw new Gone("The server stopped before its answer was complete.");
  }
}

/**
 * Repeat a request while the server is busy; `waiting` hears the place in its queue.
 * @template T
 * @param {AbortSignal} signal
 * @param {(place: number|null) => void} waiting
 * @param {() => Promise<T>} request
 * @returns {Promise<T>}
 */
export async function patiently(signal, waiting, request) {
  for (;;) {
    try {
      return await request();
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 429) throw error;
      waiting(error.place);
      await pause(700, signal);
    }
  }
}

/** @param {number} milliseconds @param {AbortSignal} signal */
function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("Stopped", "AbortError"));
    });
  });
}

/** @param {number|null} place */
export function queueText(place) {
  return place === null ? "The model is busy. Waiting for it…" : `The model is busy. Place ${place} in the queue…`;
}

let timer = 0;

function lost() {
  if (now().connection === "gone") return;
  set({ connection: "gone", trouble: "The server does not answer." });
  clearTimeout(timer);
  timer = window.setTimeout(check, RETRY);
}

/** Ask for the model, now and from time to time: this is also the heartbeat. */
export async function check() {
  clearTimeout(timer);
  try {
    const response = await fetch("api/model", { cache: "no-store" });
    if (!response.ok) throw await refusal(response);
    const model = await response.json();
    const known = now().model;
    const same = known?.fingerprint === model.fingerprint && known?.index.ready === model.index.ready;
    set(same ? { connection: "ok" } : { connection: "ok", model });
    timer = window.setTimeout(check, HEARTBEAT);
  } catch (error) {
    // Refused rather than silent: the server is there but wants something, such as a new link.
    set({ connection: "gone", trouble: error instanceof Refused ? error.message : "The server does not answer." });
    timer = window.setTimeout(check, RETRY);
  }
}
