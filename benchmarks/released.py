"""The inner loops of the released code, on a sample, against ours on the same texts.

Early exit as released: for each of 35 thresholds every text is run again, at batch size 1, block by
block, with a map, a head and a softmax after each block. Ours: one recorded pass of all texts,
readings of all layers, and a replay of the thresholds; if exits differ, the run fails. Parts as
released: for each kind and each start layer, all later blocks are run again at all positions.
"""

import math
from functools import partial

import torch
from common import MODEL, Row, interleave, median, timed

from layerleap import Lens, Sampling, fit, load
from layerleap.act.edits.replace import PartMaps, cascades
from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.replay import sweep
from layerleap.act.exits.rules import LAMBDAS, MORE_LAMBDAS, Gap, family
from layerleap.lens.scores import score
from layerleap.models.discovery.parts import KINDS
from layerleap.models.hooks.recording import record
from layerleap.stream.examples import collate, iter_batches, iter_examples

GRID = {"mat": LAMBDAS, "-": (*LAMBDAS, *MORE_LAMBDAS)}  # the paper's 13 and 22 settings
ROWS, LAYERS = 3000, 31  # of the replay, which must take less than a second


def run(*, smoke: bool) -> list[Row]:
    """Rows for the replay alone, and for both loops against the released ones."""
    model = load(MODEL)
    bank = fit(model, "wikipedia", n_texts=60 if smoke else 1500, parts=True)
    texts = list(
        iter_examples(model, "wikipedia", Sampling(), side="held-out", n_texts=4 if smoke else 32)
    )
    few = texts[:1] if smoke else texts[:: len(texts) // 4]
    return [_replay(smoke), _exits(model, bank, texts, few), _parts(model, bank, texts, smoke)]


def _replay(smoke: bool) -> Row:
    rows = 50 if smoke else ROWS
    draw = torch.Generator().manual_seed(0)
    p = torch.rand(rows, LAYERS, 2, generator=draw).sort(-1).values
    top = torch.randint(4, (rows, LAYERS), generator=draw)
    evidence = Evidence(
        top,
        p[..., 1],
        p[..., 0],
        p[..., 0],
        p[..., 0],
        torch.randint(60, (rows,), generator=draw),
        torch.arange(rows),
        tuple(range(LAYERS)),
        final=top[:, -1],
    )
    kind = family(Gap, length=15.0)
    knobs = [*GRID["mat"], *GRID["-"]]
    samples = [timed(partial(sweep, kind, evidence, knobs)) for _ in range(5)]
    detail = {
        "samples": samples,
        "n": rows,
        "layers": LAYERS,
        "thresholds": len(knobs),
        "note": "replay of all thresholds of the paper from existing readings",
    }
    return Row("replay_time", median(samples), None, "seconds", at_most=1.0, detail=detail)


def _exits(model, bank, texts, few) -> Row:  # type: ignore[no-untyped-def]
    lenses = {"-": Lens(model), "mat": Lens(model, bank)}
    length = 1 + sum(text.keep[0] for text in texts) / len(texts)

    def ours(_: int) -> dict[str, torch.Tensor]:
        scores = score(model, lenses, iter_batches(model, texts))
        kind = family(Gap, length=length)
        return {
            name: sweep(kind, Evidence.from_scores(scores, name), GRID[name]).layer
            for name in lenses
        }

    # Embeddings and masks are computed once and not timed: they are not part of the loop.
    recorded = [(record(model, collate(model, [text]).inputs), text.keep[0]) for text in few]

    def peer(_: int) -> dict[str, list[list[int]]]:
        return {
            name: [[_alone(lens, *one, lam, length) for lam in GRID[name]] for one in recorded]
            for name, lens in lenses.items()
        }

    same = _same(ours(0), peer(0), texts, few, model)  # also warms up both sides
    if same < 1:
        raise RuntimeError(f"only {same:.2%} of the exits equal those of the released loop")
    samples = interleave({"ours": ours, "peer": peer}, 1)
    per_text = {
        "ours": median(samples["ours"]) / len(texts),
        "peer": median(samples["peer"]) / len(few),
    }
    detail = {
        "note": "35 thresholds, id and mat: one pass and a replay, against one run per "
        "threshold at batch size 1 with a head after every block",
        "samples": samples,
        "n": {"ours": len(texts), "peer": len(few)},
        "same_exits": same,
        "peer_hours_for_3000_texts": per_text["peer"] * 3000 / 3600,
    }
    sides = per_text.values()
    return Row("released_exits", *sides, "s/text", at_least=1.0, over="peer/ours", detail=detail)


@torch.no_grad()
def _alone(lens, recording, place: int, lam: float, length: float) -> int:  # type: ignore[no-untyped-def]
    """The exit layer of one text, found by running it: the released loop."""
    h, last = recording.states[0], len(recording.calls)
    bar = 0.9 * lam + 0.1 * math.exp(-4 * place / length)
    for layer in range(1, last):
        h = recording.calls[layer - 1](h)
        p = lens.logits(h[:, place], layer).softmax(-1).topk(2).values.double()[0]
        if p[0] - p[1] > bar:
            return layer
    return int(last)


def _same(ours, peer, texts, few, model) -> float:  # type: ignore[no-untyped-def]
    """The share of equal exits; our rows are in the order of the batches."""
    order = [tuple(row) for batch in iter_batches(model, texts) for row in _rows(batch)]
    equal = []
    for name, exits in peer.items():
        for text, layers in zip(few, exits, strict=True):
            row = order.index((tuple(text.ids), text.keep[0]))
            equal += [a == b for a, b in zip(ours[name][row].tolist(), layers, strict=True)]
    return sum(equal) / len(equal)


def _rows(batch):  # type: ignore[no-untyped-def]
    for ids, mask, keep in zip(
        batch.inputs["input_ids"], batch.inputs["attention_mask"], batch.keep, strict=True
    ):
        yield tuple(ids[: int(mask.sum())].tolist()), int(keep.nonzero()[0, 0])


def _parts(model, bank, texts, smoke: bool) -> Row:  # type: ignore[no-untyped-def]
    part_maps = PartMaps(model, bank)
    batch = collate(model, texts)
    starts = list(range(model.n_layers))[:: 10 if smoke else 1]

    def ours(_: int) -> None:
        recording = record(model, batch.inputs)
        for kind in KINDS:
            list(cascades(part_maps, recording, batch.keep, [kind], starts))

    def peer(_: int) -> None:
        recording = record(model, batch.inputs)
        for kind in KINDS:
            for start in starts:
                with model.edit(part_maps.replacing([kind], start)):
                    recording.run(recording.states[start], start)

    samples = interleave({"ours": ours, "peer": peer}, 1)
    sides = (median(samples[side]) / len(texts) for side in ("ours", "peer"))
    detail = {
        "note": "three kinds of parts from every start layer: all starts at once, only the "
        "read position where attention is replaced, against all positions, start by start",
        "samples": samples,
        "n": len(texts),
    }
    return Row("released_parts", *sides, "s/text", at_least=1.0, over="peer/ours", detail=detail)
