// @ts-check
// Edits as text: "L12.N34=5@last" to an edit and back. The server checks them.

/** @import { Edit } from "./state.js" */

const SPEC =
  /^L(\d+)(?:\.?N(\d+)|\.?(H\d+)|\.([a-z_]+(?:\.(?:in|out))?))(?:=?(off)|([=*+-])([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))(?:@([a-z]+|\d+(?:,\d+)*))?$/i;
/** @type {Record<string, Edit["operation"]>} */
const OPERATIONS = { "=": "set", "*": "scale", "+": "add", "-": "add" };

/**
 * @param {string} text
 * @returns {Edit|null} null if it is not an edit
 */
export function parse(text) {
  const match = SPEC.exec(text.replaceAll("−", "-").replaceAll(/\s/g, ""));
  if (!match) return null;
  const [, block, neuron, head, site, off, sign, value, where] = match;
  const positions = (where ?? "all").toLowerCase();
  if (/[a-z]/.test(positions) && !["all", "last", "generated"].includes(positions)) return null;
  const size = sign === "-" ? -Number(value) : Number(value ?? 0);
  const part = head?.toUpperCase() ?? site?.toLowerCase();
  // A head or a part of a block is switched off or multiplied.
  const isOff = Boolean(off) || (part !== undefined && sign === "=" && size === 0);
  if (part !== undefined && !isOff && sign !== "*") return null;
  return {
    block: Number(block),
    neuron: Number(neuron ?? -1),
    ...(part === undefined ? {} : { part }),
    operation: isOff ? "off" : OPERATIONS[sign],
    value: size,
    positions,
    on: true,
  };
}

/** @param {Edit} edit */
export function spec(edit) {
  const { operation, value } = edit;
  const signs = { set: `=${value}`, scale: `*${value}`, add: value < 0 ? `${value}` : `+${value}`, off: "=off" };
  const where = edit.positions === "all" ? "" : `@${edit.positions}`;
  return `L${edit.block}.${edit.part ?? `N${edit.neuron}`}${signs[operation]}${where}`;
}

/** The edits that are switched on. @param {Edit[]} edits */
export function inForce(edits) {
  return edits.filter((edit) => edit.on && Number.isFinite(edit.value)).map(spec);
}
