// @ts-check
// Paths: how the probability of tokens changes over the layers, at the selected position. Shown are pinned
// tokens and those that led at some layer, ranked by their maximum.

import { byId, draw, fill, hit, keepFocus, make } from "./dom.js";
import { now, on, set } from "./state.js";
import { cellAt, nameOf } from "./trace.js";
import { percent, pin, tokenTitle } from "./words.js";

/** @import { Named, Trace } from "./state.js" */
/** @import { Side } from "./types.js" */
/** @typedef {{layer: number, share: number}} Point */
/** @typedef {{id: number, points: Point[], most: number, mostAt: number, pinned: boolean}} Path */

/** @typedef {{layer: number, words: string, name: string, title?: string}} Label */

const ROW = 14; // pixels per row of labels above the chart
const NARROW = 420; // pixels of a chart below which its labels are short
const LED = 6; // tokens that led, besides the pinned ones
const MARKS = ["circle", "square", "diamond", "triangle"];

/** @param {Named} token */
export function togglePin(token) {
  const { pinned } = now();
  const without = pinned.filter((each) => each.id !== token.id);
  set({ pinned: without.length < pinned.length ? without : [...pinned, { id: token.id, label: token.label }] });
}

/**
 * The probability of a token in a cell, as far as the reading says it.
 * @param {import("./types.js").Cell} cell
 * @param {number} id
 * @param {number|null} watch
 * @param {number|null} final
 */
function shareIn(cell, id, watch, final) {
  if (id === watch && cell.watch) return cell.watch[0];
  if (id === final) return cell.final[0];
  const followed = cell.follow?.[id];
  if (followed) return followed[0];
  return cell.top.find(([other]) => other === id)?.[1] ?? null;
}

/**
 * @param {Trace} trace
 * @param {Side} side
 * @param {number} position
 * @param {number[]} ids
 * @returns {Map<number, Point[]>}
 */
function pointsOf(trace, side, position, ids) {
  const last = cellAt(trace, "before", trace.layers[trace.layers.length - 1], position);
  const final = last?.top[0]?.[0] ?? null;
  /** @type {Map<number, Point[]>} */
  const lines = new Map(ids.map((id) => [id, []]));
  for (const layer of trace.layers) {
    const cell = cellAt(trace, side, layer, position);
    if (!cell) continue;
    for (const [id, points] of lines) {
      const share = shareIn(cell, id, trace.question.watch, final);
      if (share !== null) points.push({ layer, share });
    }
  }
  return lines;
}

/**
 * Tokens that led at some layer, those with the highest maximum first.
 * @param {Trace} trace
 * @param {Side} side
 * @param {number} position
 */
function leaders(trace, side, position) {
  /** @type {Map<number, number>} */
  const most = new Map();
  for (const layer of trace.layers) {
    const guess = cellAt(trace, side, layer, position)?.top[0];
    if (guess) most.set(guess[0], Math.max(guess[1], most.get(guess[0]) ?? 0));
  }
  return [...most].sort((a, b) => b[1] - a[1]).map(([id]) => id);
}

/** @param {Trace} trace @param {Side} side @param {number} position @returns {Path[]} */
function chosenPaths(trace, side, position) {
  const { pinned, watch } = now();
  const own = [
    ...new Set([...(watch && trace.question.watch === watch.id ? [watch.id] : []), ...pinned.map((token) => token.id)]),
  ];
  const led = leaders(trace, side, position)
    .filter((id) => !own.includes(id))
    .slice(0, LED);
  // The answer is always among them, however short it led.
  const answer = cellAt(trace, side, trace.layers[trace.layers.length - 1], position)?.top[0]?.[0];
  if (answer !== undefined && !own.includes(answer) && !led.includes(answer)) led.splice(LED - 1, 1, answer);
  return [...pointsOf(trace, side, position, [...own, ...led])].map(([id, points]) => {
    const best = points.reduce((a, b) => (b.share > a.share ? b : a), { layer: 0, share: 0 });
    return { id, points, most: best.share, mostAt: best.layer, pinned: own.includes(id) };
  });
}

export function start() {
  const place = byId("paths");
  place.addEventListener("click", (event) => {
    const token = hit(event, "[data-pin]");
    if (token) togglePin({ id: Number(token.dataset.pin), label: token.dataset.label ?? "" });
  });
  let due = 0;
  const soon = () => {
    due ||= requestAnimationFrame(() => {
      due = 0;
      keepFocus(place, render);
    });
  };
  on(["traces", "selected", "pinned", "view", "watch"], soon);
  new ResizeObserver(soon).observe(place);
}

function render() {
  const { selected, traces, view } = now();
  const place = byId("paths");
  const trace = selected && traces[selected.grid];
  if (!selected || !trace)
    return fill(place, make("p", { class: "empty" }, "The paths of tokens over the layers appear here after a run."));
  if (!trace.layers.length || !trace.tokens[selected.position]) return;
  const edited = trace.question.edits.length > 0;
  const side = edited && view !== "before" ? "after" : "before";
  const paths = chosenPaths(trace, side, selected.position);
  const others = edited
    ? pointsOf(
        trace,
        side === "after" ? "before" : "after",
        selected.position,
        paths.filter((path) => path.pinned).map((path) => path.id),
      )
    : new Map();
  const other = side === "after" ? "without" : "with";
  const title = make(
    "p",
    { class: "title" },
    make("b", {}, "Paths"),
    ` at position ${selected.position}`,
    make(
      "span",
      { class: "soft" },
      ` · tokens that led at some layer${edited ? ` · ${side === "after" ? "with" : "without"} edits; pinned ones also ${other} (dashed)` : ""}`,
    ),
  );
  const room = make("div", { class: "chart" });
  const gaps = gapText(trace, paths);
  fill(place, title, gaps && make("p", { class: "soft gaps", role: "status" }, gaps), room);
  room.append(chart(trace, paths, others, selected), legend(paths));
}

/**
 * Why paths of pinned tokens have gaps: a token is read in every cell only if it was pinned before the run.
 * @param {Trace} trace
 * @param {Path[]} paths
 */
function gapText(trace, paths) {
  const most = now().model?.limits.follow ?? 0;
  const broken = paths.filter(
    ({ id, pinned, points }) => pinned && points.length < trace.layers.length && !trace.question.follow.includes(id),
  );
  if (!broken.length || trace.status !== "done") return "";
  const names = broken.map(({ id }) => nameOf(id).label).join(", ");
  const late = now().pinned.slice(0, most);
  return broken.some(({ id }) => late.some((token) => token.id === id))
    ? `${names}: known only where it is in a cell's list. Run again for the whole path.`
    : `${names}: known only where it is in a cell's list, because at most ${most} pinned tokens are followed.`;
}

/** @param {Path[]} paths */
function legend(paths) {
  const items = paths.map((path, index) => {
    const key = draw(
      "svg",
      { class: `swatch line-${index % 8}`, viewBox: "0 0 26 12", "aria-hidden": "true" },
      draw("path", { class: "path", d: "M1 6H25" }),
      mark(13, 6, index),
    );
    return make(
      "li",
      {},
      key,
      pin(nameOf(path.id), path.pinned),
      make(
        "span",
        { class: "soft number", title: `Highest at layer ${path.mostAt}` },
        path.points.length ? `max ${percent(path.most)} at ${path.mostAt}` : "never in the list",
      ),
    );
  });
  return make("ol", { class: "lines", tabindex: "0", "aria-label": "Tokens of the paths" }, ...items);
}

/**
 * A sign of its own per line, so that colour is not needed to tell them apart.
 * @param {number} x
 * @param {number} y
 * @param {number} index
 */
function mark(x, y, index) {
  const kind = MARKS[index % MARKS.length];
  if (kind === "circle") return draw("circle", { class: "mark", cx: x, cy: y, r: 3 });
  const shapes = {
    square: "m-2.7-2.7h5.4v5.4h-5.4z",
    diamond: "m0-4l4 4l-4 4l-4-4z",
    triangle: "m0-3.8l3.8 6.6h-7.6z",
  };
  return draw("path", { class: "mark", d: `M${x} ${y}${shapes[/** @type {keyof typeof shapes} */ (kind)]}` });
}

/**
 * @param {Trace} trace
 * @param {Path[]} paths
 * @param {Map<number, Point[]>} others
 * @param {import("./state.js").Selection} selected
 */
function chart(trace, paths, others, selected) {
  const box = byId("paths");
  const room = /** @type {HTMLElement} */ (box.querySelector(".chart"));
  // Below each other, the box is as high as the chart, so its height must not be asked.
  const stacked = getComputedStyle(room).flexDirection === "column";
  const width = Math.max(260, box.clientWidth - (stacked ? 26 : 250));
  const left = 40;
  const bottom = 24;
  const last = trace.layers[trace.layers.length - 1];
  /** @param {number} layer */
  const x = (layer) => left + ((width - left - 14) * layer) / last;
  const marks = [...settledMarks(trace, selected.position), ...exitMark(trace, selected.position, width)];
  const labels = inRows(marks, x, width);
  const top = 12 + ROW * Math.max(0, ...labels.map((label) => label.row + 1));
  const height = stacked ? 146 + top : Math.max(74 + top, room.clientHeight);
  /** @param {number} share */
  const y = (share) => top + (height - bottom - top) * (1 - share);
  const svg = draw("svg", {
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": `${describe(paths)}. ${marks.map(({ words }) => words).join("; ")}`,
  });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(draw("path", { class: "rule", d: `M${left} ${y(share)}H${width - 14}` }));
    if ((100 * share) % 50 === 0)
      svg.append(
        draw("text", { class: "tick", x: left - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`),
      );
  }
  const every = Math.ceil(last / Math.max(2, Math.floor((width - left) / 44)));
  for (const layer of trace.layers) {
    if (layer % every && layer !== last) continue;
    if (layer !== last && last - layer < every) continue;
    svg.append(draw("text", { class: "tick", x: x(layer), y: height - 6, "text-anchor": "middle" }, layer));
  }
  svg.append(draw("path", { class: "here", d: `M${x(selected.layer)} ${y(1)}V${y(0)}` }));
  for (const { layer, words, name, title, at, row } of labels) {
    const text = { class: `tick ${name}`, x: at + 4, y: 11 + ROW * row };
    svg.append(
      draw("path", { class: name, d: `M${x(layer)} ${top - 4}V${y(0)}` }, draw("title", {}, title ?? words)),
      draw("text", text, draw("title", {}, title ?? words), words),
    );
  }
  paths.forEach((path, index) => {
    const group = draw(
      "g",
      { class: `line-${index % 8}${path.pinned ? " pinned" : ""}` },
      draw("title", {}, `${nameOf(path.id).label} (${tokenTitle(nameOf(path.id))})`),
    );
    const also = others.get(path.id);
    if (also) group.append(draw("path", { class: "path other", d: line(also, trace.layers, x, y) }));
    group.append(draw("path", { class: "path", d: line(path.points, trace.layers, x, y) }));
    for (const point of path.points) if (point.share > 0.004) group.append(mark(x(point.layer), y(point.share), index));
    svg.append(group);
  });
  return svg;
}

/** @param {Trace} trace @param {number} position @returns {Label[]} */
function settledMarks(trace, position) {
  const settled = trace.saturation.get(position);
  const edited = trace.question.edits.length > 0;
  return /** @type {Side[]} */ (["before", "after"]).flatMap((side) => {
    const layer = settled?.[side] ?? null;
    if (layer === null || (side === "after" && !edited)) return [];
    const whose = edited ? (side === "after" ? " with edits" : " without edits") : "";
    return [{ layer, words: `saturated from layer ${layer}${whose}`, name: `settled ${side}` }];
  });
}

/**
 * Where early exit by the server's example rule would stop, for the side that is shown: an offer if the exit
 * gives the model's answer, else a warning.
 * @param {Trace} trace
 * @param {number} position
 * @param {number} width of the chart
 * @returns {Label[]}
 */
function exitMark(trace, position, width) {
  const side = trace.question.edits.length > 0 && now().view !== "before" ? "after" : "before";
  const stop = trace.saturation.get(position)?.exits?.[side];
  if (!stop) return [];
  const { layer, agrees, top, answer } = stop;
  const rule = now().model?.exit_rule ?? "";
  if (agrees) return [{ layer, words: `could exit at layer ${layer}`, name: "exit", title: rule }];
  const tokens = [top, answer].map(({ label }) => (label.length > 12 ? `${label.slice(0, 11)}…` : label));
  const verb = width < NARROW ? "exit at" : "would exit at layer";
  return [
    {
      layer,
      words: `⚠ ${verb} ${layer} with “${tokens[0]}”, not “${tokens[1]}”`,
      name: "exit wrong",
      title: `Early exit${rule && ` by ${rule}`} would give “${top.label}” here instead of the model's answer “${answer.label}”.`,
    },
  ];
}

/**
 * Labels above the lines that they name, in as many rows as they need.
 * @param {Label[]} labels
 * @param {(layer: number) => number} x
 * @param {number} width
 * @returns {(Label & {at: number, row: number})[]} `at` is where the label starts
 */
function inRows(labels, x, width) {
  /** @type {[number, number][][]} */
  const rows = [];
  return labels.map((label) => {
    const size = 5.6 * label.words.length + 8; // 11 pixels high, so about this wide
    const middle = x(label.layer);
    const starts = [middle, middle - size].filter((at) => at >= 0 && at + size <= width);
    starts.push(Math.max(0, Math.min(middle - size / 2, width - size)));
    /** @param {[number, number][]} row @param {number} at */
    const fits = (row, at) => row.every(([start, end]) => at > end || at + size < start);
    let row = rows.findIndex((each) => starts.some((at) => fits(each, at)));
    if (row < 0) row = rows.push([]) - 1;
    const at = starts.find((start) => fits(rows[row], start)) ?? starts[0];
    rows[row].push([at, at + size]);
    return { ...label, at, row };
  });
}

/**
 * A line with gaps where the token is out of the list.
 * @param {Point[]} points
 * @param {number[]} layers
 * @param {(layer: number) => number} x
 * @param {(share: number) => number} y
 */
function line(points, layers, x, y) {
  let before = -2;
  return points
    .map(({ layer, share }) => {
      const index = layers.indexOf(layer);
      const joined = index === before + 1;
      before = index;
      return `${joined ? "L" : "M"}${x(layer).toFixed(1)} ${y(share).toFixed(1)}`;
    })
    .join("");
}

/** @param {Path[]} paths */
function describe(paths) {
  const words = paths
    .filter((path) => path.points.length)
    .map((path) => `${nameOf(path.id).label} at most ${percent(path.most)} at layer ${path.mostAt}`);
  return `Probability of tokens over the layers: ${words.join("; ")}`;
}
