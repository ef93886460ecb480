// @ts-check
// Columns and rows that resize: by dragging, or with the arrow keys.

import { byId } from "./dom.js";

const KEPT = "layerleap-sizes";
const SPLITS = [
  { id: "split-left", name: "--left", start: 220, least: 150, most: 480, grows: "right" },
  { id: "split-right", name: "--right", start: 430, least: 260, most: 760, grows: "left" },
  { id: "split-paths", name: "--paths", start: 210, least: 90, most: 520, grows: "up" },
  { id: "split-dock", name: "--dock", start: 190, least: 70, most: 520, grows: "up" },
];

/** @returns {Record<string, number>} */
function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEPT) ?? "{}");
  } catch {
    return {};
  }
}

export function start() {
  const sizes = kept();
  for (const split of SPLITS) {
    const bar = byId(split.id);
    const across = split.grows === "up";
    const sign = split.grows === "right" ? 1 : -1;
    let size = split.start;
    /** @param {number} next */
    const resize = (next) => {
      size = Math.round(Math.max(split.least, Math.min(split.most, next)));
      document.body.style.setProperty(split.name, `${size}px`);
      bar.setAttribute("aria-valuenow", String(size));
      sizes[split.name] = size;
    };
    const keep = () => {
      try {
        localStorage.setItem(KEPT, JSON.stringify(sizes));
      } catch {
        // Sizes are then forgotten with the tab.
      }
    };
    bar.setAttribute("aria-valuemin", String(split.least));
    bar.setAttribute("aria-valuemax", String(split.most));
    resize(Number(sizes[split.name]) || split.start);
    bar.addEventListener("pointerdown", (event) => {
      bar.setPointerCapture(event.pointerId);
      const from = { at: across ? event.clientY : event.clientX, size };
      /** @param {PointerEvent} move */
      const drag = (move) => resize(from.size + sign * ((across ? move.clientY : move.clientX) - from.at));
      bar.addEventListener("pointermove", drag);
      bar.addEventListener("lostpointercapture", () => {
        bar.removeEventListener("pointermove", drag);
        keep();
      }, { once: true });
    });
    bar.addEventListener("keydown", (event) => {
      /** @type {Record<string, number>} */
      const steps = across ? { ArrowUp: 16, ArrowDown: -16 } : { ArrowRight: 16 * sign, ArrowLeft: -16 * sign };
      const step = steps[event.key];
      if (!step) return;
      event.preventDefault();
      resize(size + step);
      keep();
    });
    bar.addEventListener("dblclick", () => {
      resize(split.start);
      keep();
    });
  }
}
