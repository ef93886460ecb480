// @ts-check
// Which layers have a column. Layers may be left out when space is short, tokens never.

/**
 * Every `stride`-th layer, counted from the last, which is always there.
 * @param {number[]} layers
 * @param {number} stride
 */
export function strided(layers, stride) {
  return layers.filter((_, index) => (layers.length - 1 - index) % stride === 0);
}

/**
 * The smallest stride at which the layers fit.
 * @param {number} count
 * @param {number} width room for all columns, in pixels
 * @param {number} least width of one column
 */
export function fittingStride(count, width, least) {
  const fit = Math.max(2, Math.floor(width / least));
  return Math.max(1, Math.ceil(count / fit));
}

/** @param {number} stride */
export function strideText(stride) {
  if (stride === 1) return "";
  const ending = { 2: "nd", 3: "rd" }[stride] ?? "th";
  return `every ${stride}${ending} layer`;
}
