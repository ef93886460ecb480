// @ts-check
// Elements are made here and nowhere else. Text goes in as text, never as markup.

/** @typedef {Node|string|number|null|undefined|false} Child */

/**
 * An element with attributes and children. `null` and `false` leave an attribute or child out.
 * @template {keyof HTMLElementTagNameMap} Name
 * @param {Name} name
 * @param {Record<string, string|number|boolean|null|undefined>} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Name]}
 */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  setAll(element, attributes);
  add(element, children);
  return element;
}

/** A new, hidden place for a panel, at the end of the right column. @param {string} id @param {string} label */
export function panel(id, label) {
  const place = make("div", { id, class: id, role: "region", "aria-label": label, hidden: true });
  byId("right").append(place);
  return place;
}

/**
 * @param {string} name
 * @param {Record<string, string|number|boolean|null|undefined>} [attributes]
 * @param {...Child} children
 */
export function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  setAll(element, attributes);
  add(element, children);
  return element;
}

/** @param {Element} element @param {Record<string, string|number|boolean|null|undefined>} attributes */
function setAll(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(key, value === true ? "" : String(value));
  }
}

/** @param {Element} element @param {Child[]} children */
function add(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(typeof child === "number" ? String(child) : child);
  }
}

/**
 * Replace what an element contains.
 * @param {Element} element
 * @param {...Child} children
 */
export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
}

/**
 * The element with an id, which index.html has.
 * @template {HTMLElement} [T=HTMLElement]
 * @param {string} id
 * @returns {T}
 */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`index.html has no element #${id}`);
  return /** @type {T} */ (element);
}

/**
 * The closest ancestor of an event's target that matches, within the element that listens.
 * @param {Event} event
 * @param {string} selector
 * @returns {HTMLElement|null}
 */
export function hit(event, selector) {
  const target = /** @type {Element|null} */ (event.target);
  const element = target?.closest?.(selector) ?? null;
  const within = /** @type {Element} */ (event.currentTarget);
  return element && within.contains(element) ? /** @type {HTMLElement} */ (element) : null;
}

/**
 * Redraw a place and keep the keyboard focus in it.
 * @param {HTMLElement} place
 * @param {() => void} work
 */
export function keepFocus(place, work) {
  const had = document.activeElement;
  if (!(had instanceof HTMLElement) || !place.contains(had)) return work();
  const same = had.dataset.pin ? `[data-pin="${had.dataset.pin}"]` : `[id="${had.id}"]`;
  const index = [...place.querySelectorAll(same)].indexOf(had);
  work();
  if (place.contains(document.activeElement)) return;
  const again = /** @type {NodeListOf<HTMLElement>} */ (place.querySelectorAll(same));
  const next = again[index] ?? again[0] ?? (had.dataset.pin ? place.querySelector("[data-pin]") : null);
  next?.focus({ preventScroll: true });
}

/** Tell a screen reader something that the eye sees anyway. @param {string} text */
export function say(text) {
  byId("said").textContent = text;
}

/** @param {string} text @param {number} [share] */
export function bar(text, share = 0) {
  const element = make("span", { class: "meter" }, make("span", { class: "number" }, text));
  element.style.setProperty("--p", String(Math.max(0, Math.min(1, share))));
  return element;
}

/** The placeholder of an answer that is on its way. @param {string} text */
export function loading(text) {
  return make("p", { class: "loading" }, make("span", { class: "spinner" }), text);
}

/**
 * The placeholder of an answer that failed, with a button to retry where that may help.
 * @param {string} text
 * @param {boolean|undefined} again
 * @returns {(Node|false)[]}
 */
export function failed(text, again) {
  const retry = make("button", { type: "button", class: "retry", "data-retry": true }, "Try again");
  return [make("p", { class: "error" }, text), again === true && retry];
}

/** The head of a dialog, with its button to close. @param {string} id @param {string} title */
export function dialogHead(id, title) {
  const close = make(
    "button",
    { type: "button", class: "quiet close", "data-close": true, "aria-label": "Close" },
    "×",
  );
  return make("div", { class: "bar" }, make("h2", { id }, title), make("span", { class: "spring" }), close);
}

/** A dialog closes by its button and by a click beside it. @param {Event} event */
export function closes(event) {
  return event.target === event.currentTarget || hit(event, "[data-close]") !== null;
}
