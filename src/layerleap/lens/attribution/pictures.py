"""Pictures of attributions: a waterfall through the blocks, heads by block, heads by source."""

from collections.abc import Sequence

from layerleap.results.columns import Row
from layerleap.results.shapes import block_ticks, heat_map, waterfall

KINDS = {"attn": "attention", "cross": "attention", "ffn": "FFN"}
MOST = 16  # heads or neurons with a name


def pictures(
    what: str, by: str, lines: Sequence[Row], tokens: Sequence[str], total: float
) -> list[Row]:
    """Shapes for the template, the most telling first."""
    if by == "neuron":
        return [_strongest(what, lines, total)]
    shapes = [_by_block(what, lines, total)]
    if not any(row["block"] for row in lines):  # layer 0 has only the embedding
        return shapes
    if by == "head":
        shapes.append(_heads(what, lines))
    if by == "source":
        shapes.append(_sources(what, lines, tokens))
    return shapes


def _kind(row: Row) -> str:
    return KINDS.get(row["part"].partition(" ")[0], "other")


def _by_block(what: str, lines: Sequence[Row], total: float) -> Row:
    """Attention and FFN of every block, in order, whatever they were split into."""
    sums: dict[tuple[int | None, str], float] = {}
    kinds: dict[tuple[int | None, str], str] = {}
    for row in lines:
        key = row["block"], row["part"].partition(" ")[0] if row["block"] else row["part"]
        sums[key], kinds[key] = sums.get(key, 0.0) + row["direct"], _kind(row)
    steps = []
    for (block, part), value in sums.items():
        is_first = block is not None and part == next(one for at, one in sums if at == block)
        tick = block_ticks([block])[0] if block and is_first else "" if block else part
        steps.append((f"L{block}.{part}" if block else part, tick, value, kinds[block, part]))
    return waterfall(what, steps, total)


def _strongest(what: str, lines: Sequence[Row], total: float) -> Row:
    """The strongest neurons, then everything else."""
    neurons = [row for row in lines if row["neuron"] is not None]
    neurons = sorted(neurons, key=lambda row: -abs(row["direct"]))[: 2 * MOST]
    steps = [(row["name"], row["name"], row["direct"], "FFN") for row in neurons]
    others = dict.fromkeys(("attention", "FFN", "other"), 0.0)
    for row in lines:
        if row not in neurons:
            others[_kind(row)] += row["direct"]
    names = ("all attention", "other neurons", "embedding, biases")
    rest = zip(names, others.items(), strict=True)
    return waterfall(what, [*((n, n, value, kind) for n, (kind, value) in rest), *steps], total)


def _heads(what: str, lines: Sequence[Row]) -> Row:
    """Heads down, blocks across, and each block's FFN below."""
    values = {(row["head"], row["block"]): row["direct"] for row in lines if row["part"] == "attn"}
    values |= {("FFN", row["block"]): row["direct"] for row in lines if row["part"] == "ffn"}
    blocks = sorted({block for _, block in values})
    heads = sorted({head for head, _ in values if isinstance(head, int)})
    names = [*heads, "FFN"]
    rows = [[values.get((name, block), 0.0) for block in blocks] for name in names]
    labels = ["FFN" if name == "FFN" else f"head {name}" for name in names]
    return heat_map(f"{what}, by head", rows, labels, block_ticks(blocks))


def _sources(what: str, lines: Sequence[Row], tokens: Sequence[str]) -> Row:
    """What the strongest heads take from each position, below the sum of all heads."""
    taken: dict[str, list[float]] = {"all heads": [0.0] * len(tokens)}
    for row in lines:
        if row["source"] is not None:
            values = taken.setdefault(row["name"], [0.0] * len(tokens))
            values[row["source"]] += row["direct"]
            taken["all heads"][row["source"]] += row["direct"]
    sizes = sorted(taken, key=lambda name: -max(map(abs, taken[name])))
    names = ["all heads", *[name for name in sizes if name != "all heads"][:MOST]]
    return heat_map(f"{what}, by source", [taken[name] for name in names], names, tokens)
