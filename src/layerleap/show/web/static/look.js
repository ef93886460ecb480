// @ts-check
// What one cell of the grid shows: a token, how full its bar is, and its name for screen readers.

import { cellAt, nameOf } from "./trace.js";
import { number, percent, points, spoken } from "./words.js";

/** @import { Trace, View } from "./state.js" */
/** @import { Cell, Token } from "./types.js" */

/**
 * @typedef {object} Look
 * @property {Token|null} token null while the reading is on its way
 * @property {number} share 0 to 1: how strong the colour and how long the bar is
 * @property {"heat"|"more"|"less"|"change"} tone
 * @property {boolean} agrees the top token is the model's final one
 * @property {boolean} same difference view: edits change nothing here
 * @property {boolean} swapped difference view: edits change the top token
 * @property {string} spoken
 */

/** @type {Look} */
const WAITING = {
  token: null,
  share: 0,
  tone: "heat",
  agrees: false,
  same: false,
  swapped: false,
  spoken: "not read yet",
};

/**
 * @param {Cell} cell
 * @param {View["colour"]} colour
 */
export function shareOf(cell, colour) {
  const share = { watch: cell.watch?.[0], final: cell.final[0], top: cell.top[0]?.[1] }[colour];
  return share ?? 0;
}

/**
 * @param {Trace} trace
 * @param {Pick<View, "colour"|"view">} how
 * @param {number} layer
 * @param {number} position
 * @returns {Look}
 */
export function look(trace, how, layer, position) {
  const before = cellAt(trace, "before", layer, position);
  const after = cellAt(trace, "after", layer, position);
  if (how.view === "difference") return before && after ? difference(before, after, how.colour) : WAITING;
  const cell = how.view === "after" ? after : before;
  if (!cell) return WAITING;
  const share = shareOf(cell, how.colour);
  const token = nameOf(cell.top[0][0]);
  const whose = { top: "", watch: ", watched token ", final: ", final token " }[how.colour];
  const words =
    how.colour === "top" ? `${spoken(token)}, ${percent(share)}` : `${spoken(token)}${whose}${percent(share)}`;
  return {
    ...WAITING,
    token,
    share,
    agrees: cell.agrees,
    spoken: cell.agrees ? `${words}, same as the final token` : words,
  };
}

/**
 * The difference that edits make. Of the watched and the final token it is the change of probability;
 * of top tokens, which may differ, the divergence between both readings.
 * @param {Cell} before
 * @param {Cell} after
 * @param {View["colour"]} colour
 * @returns {Look}
 */
function difference(before, after, colour) {
  const token = nameOf(after.top[0][0]);
  const swapped = before.top[0][0] !== after.top[0][0];
  const moved = swapped ? `${spoken(nameOf(before.top[0][0]))} became ${spoken(token)}` : `still ${spoken(token)}`;
  const shown = { ...WAITING, token, swapped, agrees: after.agrees };
  if (after.changed === false) return { ...shown, same: true, tone: "change", spoken: `${spoken(token)}, unchanged` };
  if (colour === "top") {
    const change = after.change ?? 0;
    return {
      ...shown,
      share: 1 - Math.exp(-change),
      tone: "change",
      spoken: `${moved}, divergence ${number(change)} nats`,
    };
  }
  const change = shareOf(after, colour) - shareOf(before, colour);
  const words = `${moved}, ${colour === "watch" ? "watched" : "final"} token ${points(change)} points`;
  return { ...shown, share: Math.abs(change), tone: change < 0 ? "less" : "more", spoken: words };
}
