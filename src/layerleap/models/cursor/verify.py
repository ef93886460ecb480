"""Can a cursor run this model? Found out once, with a few short passes.

In: a wrapped model.
Out: the `Axes` with which a `Cursor` runs it, or `ModelRefused` with the reason.
"""

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from layerleap.errors import LayerleapError, ModelRefused
from layerleap.models.cursor.axes import Axes, compare
from layerleap.models.cursor.batch import BatchCursor
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.cursor.tree import Tree
from layerleap.models.discovery.compare import rounding, row_gap
from layerleap.models.discovery.probe import probe_ids
from layerleap.models.transformer import Transformer

_FOUND: "WeakKeyDictionary[Transformer, Axes]" = WeakKeyDictionary()


def find_axes(transformer: Transformer) -> Axes:
    """Find how the blocks are called, and prove it: once for each model, a few short passes.

    Refuses a model that cannot be walked, and says why: one that does not speak about the next
    token, whose memory of the text cannot be rolled back (recurrent and linear-attention layers),
    or whose states come out otherwise when positions wait.
    """
    if transformer not in _FOUND:
        _FOUND[transformer] = _find_axes(transformer)
    return _FOUND[transformer]


def _find_axes(transformer: Transformer) -> Axes:
    model = transformer.model
    if transformer.kind != "next-token" or model.config.is_encoder_decoder:
        raise ModelRefused(
            f"{transformer.identity.name} is no decoder that continues a text by itself "
            f"({transformer.kind}{', encoder-decoder' if model.config.is_encoder_decoder else ''})"
        )
    ids = probe_ids(model, 1, 8, seed=31)[0].tolist()
    try:
        with Cursor(transformer) as walk:
            walk.run(ids[:3])
            calls = []
            for start, stop in ((3, 5), (5, 8)):
                walk.run(ids[start:stop])
                calls.append(walk.called)
            lengths = {layer.length for layer in walk.cache.layers}
    except LayerleapError:
        raise
    except Exception as error:
        raise ModelRefused(
            f"{type(model).__name__} cannot be run over a cache whose end can be taken back, as "
            "attention keeps one; recurrent and linear-attention layers cannot go back "
            f"({type(error).__name__}: {error})"
        ) from error
    if lengths != {8}:
        raise ModelRefused(
            f"after 8 tokens the layers of {type(model).__name__} keep keys of {sorted(lengths)}; "
            "8 in each were wanted (recurrent and linear-attention layers, and those that share "
            "or drop keys, cannot be taken back)"
        )
    axes = compare((calls[0], calls[1]))
    gaps = _gaps(transformer, axes, ids)
    # What cutting a text into passes does by itself, measured; never more than the dtype explains.
    like = next(model.parameters())
    allowed = min(4 * rounding(like), 10 * max(gaps["pieces"], 4 * torch.finfo(like.dtype).eps))
    if gaps["waiting"] > allowed:
        raise ModelRefused(
            f"law 'waiting' failed for {type(model).__name__}: positions that wait at a layer end "
            f"elsewhere than those that do not, by {gaps['waiting']:.1e} of their length "
            f"({allowed:.0e} is what rounding explains)"
        )
    branches = gaps["branching"] <= allowed
    is_abreast = branches and _gap_abreast(transformer, axes, ids) <= allowed
    return replace(axes, branches=branches, abreast=is_abreast)


def _gaps(transformer: Transformer, axes: Axes, ids: list[int]) -> dict[str, float]:
    """How far states move when positions wait, and when a tree branches; 0 but for rounding."""
    with Cursor(transformer, axes) as walk:
        whole = walk.run(ids).h
        walk.cut(3)
        parts = [walk.run(ids[start:stop]).h for start, stop in ((3, 4), (4, 5), (5, 8))]
        pieces = row_gap(torch.cat(parts), whole[3:])
        waiting = 0.0
        for layer in sorted({1, transformer.n_layers - 1} - {0, transformer.n_layers}):
            walk.cut(3)
            walk.run(ids[3:4], watch=lambda *_: True, checks=[layer])
            waiting = max(waiting, row_gap(walk.run(ids[4:5]).h, whole[3:5]))
        walk.cut(5)
        try:  # a stranger beside them must not be seen
            branched = walk.run(Tree((ids[0], ids[5], ids[6]), (-1, -1, 1))).h[1:]
        except (RuntimeError, ModelRefused):  # a mask that is not among the arguments
            return {"pieces": pieces, "waiting": waiting, "branching": float("inf")}
    return {"pieces": pieces, "waiting": waiting, "branching": row_gap(branched, whole[5:7])}


def _gap_abreast(transformer: Transformer, axes: Axes, ids: list[int]) -> float:
    """How far states move when another text goes along; 0 but for rounding."""
    texts = {0: ids[:5], 1: ids[:1:-1]}
    alone, both = {}, BatchCursor(transformer, axes)
    for text, own in texts.items():
        with Cursor(transformer, axes) as walk:
            alone[text] = walk.run(own).h[-2:]
            walk.cut(len(own) - 2)
            both.join(text, walk)
    try:
        with both:
            h = both.run_all({text: Tree.chain(own[-2:]) for text, own in texts.items()})
    except (RuntimeError, ModelRefused):  # as for trees
        return float("inf")
    return max(row_gap(h[text], alone[text]) for text in texts)
