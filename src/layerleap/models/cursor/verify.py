"""Can a cursor run this model? Checked once, with a few short passes.

In: a wrapped model.
Out: the `Axes` with which a `Cursor` runs it, or `ModelRefused` with the reason.
"""

from dataclasses import replace

import torch

from layerleap.errors import LayerleapError, ModelRefused
from layerleap.models.changes import Known
from layerleap.models.cursor.axes import Axes, compare
from layerleap.models.cursor.batch import BatchCursor
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.cursor.packed import Packed
from layerleap.models.cursor.tree import Tree
from layerleap.models.discovery.compare import rounding, row_gap
from layerleap.models.discovery.probe import probe_ids
from layerleap.models.hooks.edit import unedited
from layerleap.models.hooks.forward import hooks_of
from layerleap.models.transformer import Transformer

_AXES: Known[Axes] = Known()


def find_axes(transformer: Transformer) -> Axes:
    """How the blocks are called, discovered and verified once per model with a few short passes.

    Refuses a model that a cursor cannot run, and says why: one that does not predict the next
    token, whose memory of the text cannot be rolled back (recurrent and linear-attention layers),
    or whose states change when positions wait.
    """
    with hooks_of(transformer.model).lock, unedited(transformer.model):
        return _AXES.of(transformer, lambda: _find_axes(transformer))


def _find_axes(transformer: Transformer) -> Axes:
    model = transformer.model
    if transformer.kind != "next-token" or model.config.is_encoder_decoder:
        raise ModelRefused(
            f"{transformer.identity.name} is not a causal language model "
            f"({transformer.kind}{', encoder-decoder' if model.config.is_encoder_decoder else ''})"
        )
    ids = probe_ids(model, 1, 8, seed=31)[0].tolist()
    try:
        with Cursor(transformer) as cursor:
            cursor.run(ids[:3])
            calls = []
            for start, stop in ((3, 5), (5, 8)):
                cursor.run(ids[start:stop])
                calls.append(cursor.called)
            lengths = {layer.length for layer in cursor.cache.layers}
    except LayerleapError:
        raise
    except Exception as error:
        raise ModelRefused(
            f"{type(model).__name__} cannot be run over a cache that can be rolled back, as "
            "attention keeps one; recurrent and linear-attention layers cannot go back "
            f"({type(error).__name__}: {error})"
        ) from error
    if lengths != {8}:
        raise ModelRefused(
            f"after 8 tokens the layers of {type(model).__name__} hold keys of {sorted(lengths)} "
            "positions; expected 8 in each (recurrent and linear-attention layers, and those that "
            "share or drop keys, cannot be rolled back)"
        )
    axes = compare((calls[0], calls[1]))
    gaps = _gaps(transformer, axes, ids)
    # The effect of splitting a text into passes, measured; never more than the dtype explains.
    like = next(model.parameters())
    allowed = min(4 * rounding(like), 10 * max(gaps["pieces"], 4 * torch.finfo(like.dtype).eps))
    if gaps["waiting"] > allowed:
        raise ModelRefused(
            f"law 'waiting' failed for {type(model).__name__}: states of positions that waited at "
            f"a layer differ by {gaps['waiting']:.1e} of their length ({allowed:.0e} is what "
            "rounding explains); decode it with transformers' own loop: "
            'll.generate(..., decoder="transformers")'
        )
    branches = gaps["branching"] <= allowed
    batches = branches and _batch_gap(transformer, axes, ids) <= allowed
    return replace(axes, branches=branches, batches=batches)


def _gaps(transformer: Transformer, axes: Axes, ids: list[int]) -> dict[str, float]:
    """How far states move when positions wait, and when a tree branches; 0 up to rounding."""
    with Cursor(transformer, axes) as cursor:
        whole = cursor.run(ids).h
        cursor.cut(3)
        parts = [cursor.run(ids[start:stop]).h for start, stop in ((3, 4), (4, 5), (5, 8))]
        pieces = row_gap(torch.cat(parts), whole[3:])
        waiting = 0.0
        for layer in sorted({1, transformer.n_layers - 1} - {0, transformer.n_layers}):
            cursor.cut(3)
            cursor.run(ids[3:4], watch=lambda *_: True, checks=[layer])
            waiting = max(waiting, row_gap(cursor.run(ids[4:5]).h, whole[3:5]))
        cursor.cut(5)
        try:  # the first node is on another branch, and must not be visible to the others
            branched = cursor.run(Tree((ids[0], ids[5], ids[6]), (-1, -1, 1))).h[1:]
        except (RuntimeError, ModelRefused):  # a mask that is not among the arguments
            return {"pieces": pieces, "waiting": waiting, "branching": float("inf")}
    return {"pieces": pieces, "waiting": waiting, "branching": row_gap(branched, whole[5:7])}


def _batch_gap(transformer: Transformer, axes: Axes, ids: list[int]) -> float:
    """How far states move when another text shares the pass; 0 up to rounding."""
    texts = {0: ids[:5], 1: ids[:1:-1]}
    alone, batch = {}, BatchCursor(transformer, axes)
    for text, tokens in texts.items():
        with Cursor(transformer, axes) as cursor:
            alone[text] = cursor.run(tokens).h[-2:]
            cursor.cut(len(tokens) - 2)
            batch.join(text, cursor)
    try:
        with batch:
            h = batch.run_all({text: Tree.chain(tokens[-2:]) for text, tokens in texts.items()})
    except (RuntimeError, ModelRefused):  # as for trees
        return float("inf")
    return max(row_gap(h[text], alone[text]) for text in texts)


def keeps_bits(transformer: Transformer, axes: Axes, packed: Packed | None) -> bool:
    """True if a pass over several tokens, row by row, gives the bits of passes over one token each.

    Then narrow dtypes choose the same tokens either way. It takes attention that goes through
    transformers' interface, and products that sum in the same order for any number of rows.
    """
    ids = probe_ids(transformer.model, 1, 24, seed=43)[0].tolist()
    parents = (-1, 0, 1, 2, 3, 1, 5, 0, 7, 4) if axes.branches else tuple(range(-1, 9))
    tree = Tree(tuple(ids[12:22]), parents)
    paths = [[0, 1, 2, 3, 4, 9], [0, 1, 5, 6], [0, 7, 8]] if axes.branches else [list(range(10))]
    with unedited(transformer.model), torch.inference_mode():
        with Cursor(transformer, axes, packed=packed, rowwise=True) as cursor:
            cursor.run(ids[:12])
            together = cursor.run(tree).h
            logits = transformer.logits(together)
            if cursor.attention.n_split < transformer.n_layers:
                return False  # some attention took all rows at once: longer texts would show it
        with Cursor(transformer, axes) as cursor:
            cursor.run(ids[:12])
            for path in paths:
                alone = torch.cat([cursor.run([tree.ids[node]]).h for node in path])
                ends = torch.cat([transformer.logits(row[None]) for row in alone])
                if not (torch.equal(together[path], alone) and torch.equal(logits[path], ends)):
                    return False
                cursor.cut(12)
    return True
