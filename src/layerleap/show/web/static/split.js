// @ts-check
// Columns and rows that resize: by dragging, or with the arrow keys.

import { byId } from "./dom.js";

const KEPT = "layerleap-sizes";
const SPLITS = [
  { id: "split-left", name: "--left", panel: "concepts", least: 150, most: 480, grows: "right" },
  { id: "split-right", name: "--right", panel: "right", least: 260, most: 760, grows: "left" },
  { id: "split-paths", name: "--paths", panel: "paths", least: 90, most: 520, grows: "up" },
  { id: "split-dock", name: "--dock", panel: "dock", least: 70, most: 520, grows: "up" },
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
    const measure = () => {
      const box = byId(split.panel).getBoundingClientRect();
      return Math.round(across ? box.height : box.width);
    };
    /** @param {number} next */
    const resize = (next) => {
      const size = Math.round(Math.max(split.least, Math.min(split.most, next)));
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
    if (Number(sizes[split.name])) resize(sizes[split.name]);
    else bar.setAttribute("aria-valuenow", String(Math.max(split.least, measure())));
    bar.addEventListener("pointerdown", (event) => {
      bar.setPointerCapture(event.pointerId);
      const from = { at: across ? event.clientY : event.clientX, size: measure() };
      /** @param {PointerEvent} move */
      const drag = (move) => resize(from.size + sign * ((across ? move.clientY : move.clientX) - from.at));
      bar.addEventListener("pointermove", drag);
      bar.addEventListener(
        "lostpointercapture",
        () => {
          bar.removeEventListener("pointermove", drag);
          keep();
        },
        { once: true },
      );
    });
    bar.addEventListener("keydown", (event) => {
      /** @type {Record<string, number>} */
      const steps = across ? { ArrowUp: 16, ArrowDown: -16 } : { ArrowRight: 16 * sign, ArrowLeft: -16 * sign };
      const step = steps[event.key];
      if (!step) return;
      event.preventDefault();
      resize(measure() + step);
      keep();
    });
    bar.addEventListener("dblclick", () => {
      document.body.style.removeProperty(split.name);
      delete sizes[split.name];
      keep();
    });
  }
}
