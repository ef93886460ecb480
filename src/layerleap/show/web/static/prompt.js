// @ts-check
// The top bar: prompts with their tokens while one types, the lens, the watched token, Run.

import { Gone, json } from "./api.js";
import { byId, fill, hit, make } from "./dom.js";
import { obstacle } from "./ready.js";
import { now, on, set } from "./state.js";
import { changes, run, stop } from "./trace.js";
import { chip, count } from "./words.js";

/** @import { Live } from "./state.js" */
/** @import { Token } from "./types.js" */

const TYPING = 140; // milliseconds without a key before the text is tokenised

/** @param {number} grid @returns {HTMLTextAreaElement} */
function box(grid) {
  return byId(`prompt-${grid}`);
}

export function start() {
  for (const grid of [0, 1]) startPrompt(grid);
  startLens();
  startWatch();
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("stop").addEventListener("click", stop);
  byId("open-second").addEventListener("click", () => {
    set({ second: now().prompt });
    requestAnimationFrame(() => box(1).select());
  });
  byId("close-second").addEventListener("click", () => set({ second: null, traces: [now().traces[0], null] }));
  byId("insert-mask").addEventListener("click", insertMask);
  on(["traces", "prompt", "second", "lens", "watch", "edits", "live", "model"], showButtons);
  on(["model"], (state) => {
    byId("insert-mask").hidden = !state.model?.mask_token;
  });
}

/** Run if there is something to run. */
export function submit() {
  if (now().prompt === "") {
    box(0).focus();
    showLive(0, { text: "", model: "", tokens: [], limit: 0, error: "The prompt is empty. Type a text first." });
    return;
  }
  run();
}

function insertMask() {
  const mask = now().model?.mask_token;
  if (!mask) return;
  const area = box(0);
  area.setRangeText(mask, area.selectionStart, area.selectionEnd, "end");
  set({ prompt: area.value });
  area.focus();
}

/** @param {number} grid */
function startPrompt(grid) {
  const area = box(grid);
  let timer = 0;
  let asked = 0;
  area.addEventListener("input", () => set(grid === 0 ? { prompt: area.value } : { second: area.value }));
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  on([grid === 0 ? "prompt" : "second", "model", "connection"], (state) => {
    const text = grid === 0 ? state.prompt : state.second;
    if (grid === 1) {
      const block = /** @type {HTMLElement} */ (area.parentElement);
      block.hidden = text === null;
      byId("open-second").hidden = text !== null;
    }
    if (area.value !== (text ?? "")) area.value = text ?? "";
    clearTimeout(timer);
    if (!state.model || state.connection === "gone") return away(grid, text);
    if (!text) return setLive(grid, null);
    if (state.live[grid]?.text === text && state.live[grid]?.model === state.model.fingerprint) return;
    timer = window.setTimeout(async () => {
      const mine = ++asked;
      const live = await tokenise(text, state.model?.fingerprint ?? "");
      if (mine === asked && live) setLive(grid, live);
    }, TYPING);
  });
  on(["live"], (state) => showLive(grid, state.live[grid]));
}

/** Without a server the tokens of another text must not stay. @param {number} grid @param {string|null} text */
function away(grid, text) {
  if (now().connection !== "gone" || now().live[grid]?.text === text) return;
  const error = "Tokens appear here when the server answers again.";
  setLive(grid, text ? { text, model: "", tokens: [], limit: 0, error, waits: true } : null);
}

/** @param {string} text @param {string} model @returns {Promise<Live|null>} */
async function tokenise(text, model) {
  try {
    const { tokens, limit } = await json("tokens", { method: "POST", body: { text } });
    return { text, model, tokens, limit, error: null };
  } catch (error) {
    if (error instanceof Gone) return null;
    return { text, model, tokens: [], limit: 0, error: /** @type {Error} */ (error).message };
  }
}

/** @param {number} grid @param {Live|null} live */
function setLive(grid, live) {
  const all = [...now().live];
  all[grid] = live;
  set({ live: all });
}

/** @param {number} grid @param {Live|null} live */
function showLive(grid, live) {
  const place = byId(`live-${grid}`);
  if (!live)
    return fill(
      place,
      make("span", { class: "soft" }, "Tokens appear here while you type. Enter runs, Shift+Enter starts a new line."),
    );
  if (live.error) return fill(place, make("span", { class: live.waits ? "soft" : "error" }, live.error));
  const over = live.tokens.length > live.limit;
  const size = make(
    "span",
    { class: over ? "error" : "soft" },
    over
      ? `${count(live.tokens.length, "token")}: at most ${live.limit} can be read. Shorten the prompt.`
      : `${live.tokens.length} of ${live.limit} tokens`,
  );
  fill(place, size, ...live.tokens.slice(0, 300).map(chip), live.tokens.length > 300 && "…");
}

function startLens() {
  const select = /** @type {HTMLSelectElement} */ (byId("lens"));
  select.addEventListener("change", () => set({ lens: select.value }));
  on(["model", "lens"], ({ model, lens }) => {
    if (!model) return;
    const options = model.lenses.map(({ name, title }) => make("option", { value: name }, title));
    fill(select, ...options);
    const known = model.lenses.some(({ name }) => name === lens);
    if (!known) select.append(make("option", { value: lens }, `${lens} (not loaded)`));
    select.value = lens;
  });
}

/** The watched token: type a word, choose one of the tokens that it can be. */
function startWatch() {
  const input = /** @type {HTMLInputElement} */ (byId("watch"));
  const list = byId("watch-list");
  /** @type {Token[]} */
  let shown = [];
  let active = 0;
  let timer = 0;

  const close = () => {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };
  /** @param {Token[]} tokens */
  const open = (tokens) => {
    shown = tokens;
    active = 0;
    const items = tokens.map((token, index) =>
      make(
        "li",
        { role: "option", id: `watch-${index}`, "data-index": index, "aria-selected": String(index === active) },
        chip(token),
        make("span", { class: "soft" }, `id ${token.id}`),
      ),
    );
    if (!items.length)
      items.push(
        make(
          "li",
          { class: "soft", role: "option", "aria-disabled": true, "aria-selected": "false" },
          "No single token is written like this.",
        ),
      );
    fill(list, ...items);
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    if (tokens.length) input.setAttribute("aria-activedescendant", "watch-0");
  };
  /** @param {number} index */
  const choose = (index) => {
    const token = shown[index];
    if (!token) return;
    set({ watch: { id: token.id, label: token.label } });
    close();
  };
  const leave = () => {
    close();
    input.value = now().watch?.label ?? "";
  };

  input.addEventListener("input", () => {
    clearTimeout(timer);
    const text = input.value;
    if (!text.trim()) {
      close();
      set({ watch: null });
      return;
    }
    timer = window.setTimeout(async () => {
      try {
        const { tokens } = await json("vocabulary", { method: "POST", body: { text } });
        if (input.value === text && document.activeElement === input) open(tokens);
      } catch {
        close();
      }
    }, TYPING);
  });
  input.addEventListener("focus", () => input.select());
  input.addEventListener("blur", leave);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !list.hidden) {
      event.stopPropagation();
      leave();
    } else if (event.key === "Enter") {
      event.preventDefault();
      if (!list.hidden) choose(active);
      else submit();
    } else if (event.key.startsWith("Arrow") && !list.hidden && shown.length) {
      const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
      if (!step) return;
      event.preventDefault();
      active = (active + step + shown.length) % shown.length;
      for (const item of list.children) item.setAttribute("aria-selected", String(item.id === `watch-${active}`));
      input.setAttribute("aria-activedescendant", `watch-${active}`);
    }
  });
  // Before the input loses focus, hence not "click".
  list.addEventListener("mousedown", (event) => {
    event.preventDefault();
    const item = hit(event, "[data-index]");
    if (item) choose(Number(item.dataset.index));
  });
  byId("unwatch").addEventListener("click", () =>
    set({ watch: null, colour: now().colour === "watch" ? "top" : now().colour }),
  );
  on(["watch"], ({ watch }) => {
    if (document.activeElement !== input || watch) input.value = watch?.label ?? "";
    byId("unwatch").hidden = !watch;
  });
}

function showButtons() {
  const state = now();
  const busy = state.traces.some((trace) => trace?.status === "waiting" || trace?.status === "running");
  byId("stop").hidden = !busy;
  const runs = byId("run");
  const stale = !busy && !obstacle(state) && [0, 1].some((grid) => changes(state, grid).length > 0);
  runs.classList.toggle("stale", stale);
  runs.textContent = busy ? "Running…" : stale ? "Run again" : "Run";
}
