"""Finding a direction: the vector along which two sets of prompts lie apart, layer by layer.

In: a wrapped model and two sets of prompts. Out: a `Direction` at the layer that separates prompts
best that it was not found on.

Every fold of the prompts is scored by a vector found on the others, and, where the layer is chosen
as well, by a layer chosen on the others. So the AUC that is reported has seen neither. A prompt
that is given several times is in one fold only.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.act.steering.saved import Direction
from layerleap.arguments import checked
from layerleap.errors import BadSettings, BadText, ModelRefused, NotFinite
from layerleap.lens.intervals import SHARE, ends
from layerleap.lens.vocabulary.ends import Scored, vector_ends
from layerleap.models.hooks.capture import check_layer
from layerleap.models.inputs import as_inputs, real_positions
from layerleap.models.prompts import several
from layerleap.models.transformer import Transformer
from layerleap.models.weights.norms import fold_writer
from layerleap.progress import Progress, reporting
from layerleap.results.columns import Row
from layerleap.stream.examples import require_length
from layerleap.stream.records import LINES_SUFFIXES, kind_of, opened, records_of

Method = Literal["mean", "pca"]
At = Literal["last", "mean"]
LEAST, FEW = 4, 20  # prompts per set: needed, and below which a note says that they are few
FOLDS = 5
AT_ONCE = 16  # prompts per pass
IDS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}


@checked
def direction(
    transformer: Transformer,
    positive: Any,
    negative: Any,
    *,
    layer: int | None = None,
    method: Method = "mean",
    at: At | None = None,
    tokens: int = 10,
    progress: Progress | bool = True,
) -> Direction:
    """The vector at a layer that points from one set of prompts to another.

        direction = ll.direction(model, ["I love it", ...], ["I hate it", ...])
        with model.edit(ll.edits.AddVector(direction.layer, direction, 2.0)):
            print(ll.generate(model, "I think that"))

    Args:
        positive: prompts, or a file: text with one prompt per line, or .jsonl with the field text.
        negative: prompts to point away from; with "pca", one for each of the others, in order.
        layer: the layer; by default the one that separates held-out prompts best.
        method: "mean" is the difference of the means; "pca" is the first principal component of the
            differences within pairs, as long as the means lie apart along it.
        at: read the state of the "last" token of each prompt (the default of models that continue
            texts), or the "mean" over its tokens, without the first of a text of several: many
            models have a state of outsized length there, which would drown all others.
        tokens: how many tokens to list that the direction promotes and suppresses.
    """
    transformer.require_eval()
    if layer is not None:
        check_layer(transformer, layer)
    sets = [
        _prompts(transformer, given, name)
        for given, name in ((positive, "positive"), (negative, "negative"))
    ]
    if method == "pca" and len(sets[0]) != len(sets[1]):
        raise BadSettings(
            f"{len(sets[0])} positive and {len(sets[1])} negative prompts are not pairs; method "
            "'pca' takes differences within pairs, so give as many of each, in order"
        )
    chosen_at: At = at or ("last" if transformer.kind == "next-token" else "mean")
    with reporting(progress) as report:
        pos, neg, *names = _states(transformer, sets, chosen_at, report)
    states = _Sets(pos, neg, method, *_groups(names, method))
    per_layer = states.held_out()
    alike: list[str] = []
    if layer is None:
        best = per_layer.best()
        layer, auc = _middle(best), states.nested()
        if len(best) > 1:
            alike.append(
                f"AUC is equally high at {len(best)} layers, {best[0]} to {best[-1]}, and the "
                "middle one was taken: which of them steers best, only steering tells."
            )
        alike += _compared(auc["value"], layer, per_layer.interval(layer)["value"])
    else:
        auc = per_layer.interval(layer)
    vector = states.vectors()[layer]
    length = float(torch.linalg.vector_norm(vector))
    if not length:
        raise BadSettings(
            f"both sets of prompts have the same mean state at layer {layer}; choose a later layer"
        )
    norms, unit = states.norms(), vector / length
    coordinates = [float((one[layer].double() @ unit).mean()) for one in (states.neg, states.pos)]
    promoted, suppressed, remarks = _tokens(transformer, vector, tokens)
    lengths = torch.linalg.vector_norm(states.vectors(), dim=1) / norms
    transformer.refresh()
    return Direction(
        layer,
        vector.float(),
        method,
        chosen_at,
        length / float(norms[layer]),
        (coordinates[0], coordinates[1]),
        auc,
        [
            {
                "layer": n,
                "auc": scores.pop("value"),
                **scores,
                "norm": float(lengths[n]),
                "state_length": float(norms[n]),
            }
            for n in range(transformer.n_layers + 1)
            for scores in [dict(per_layer.interval(n))]
        ],
        promoted,
        suppressed,
        (len(sets[0]), len(sets[1])),
        transformer.identity.to_dict(),
        transformer.n_layers,
        [*alike, *remarks, *_few(min(states.n_groups))],
    )


def _prompts(transformer: Transformer, given: Any, name: str) -> list[Any]:
    """The prompts of one set, those of a file included."""
    if isinstance(given, str | Path):
        given = read_prompts(given)
    prompts = several(transformer, given)
    if prompts is None or len(prompts) < LEAST:
        is_empty = isinstance(given, Sized) and not len(given)
        n = 0 if is_empty else 1 if prompts is None else len(prompts)
        raise BadText(
            f"{n} {name} prompt{'s' if n != 1 else ''}; expected {LEAST} or more, because some are "
            "held out"
        )
    return prompts


def read_prompts(source: str | Path) -> list[str]:
    """The prompts of a file: one per line, or the field text of .jsonl records."""
    path = Path(source).expanduser()
    if not path.is_file():
        raise BadText(
            f"there is no file {source}; expected a list of prompts, or a file with one per line"
        )
    with opened(path) as stream:
        if kind_of(path) in LINES_SUFFIXES:
            return [str(record["text"]) for record in records_of(stream, path, str(source))]
        try:
            lines = stream.read().decode("utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise BadText(f"{source} is not UTF-8 text; save it as UTF-8") from error
    return [line for line in lines if line.strip()]


def _compared(value: float, layer: int, chosen: float) -> Iterator[str]:
    if f"{value:.2f}" != f"{chosen:.2f}":
        yield (
            f"The AUC of the direction, {value:.2f}, is not that of layer {layer} in the table, "
            f"{chosen:.2f}: the prompts that the table is about chose the layer, while each of "
            "those of the first line is scored at a layer that others chose."
        )


def _few(least: int) -> Iterator[str]:
    if least < FEW:
        yield (
            f"The smaller set has {least} prompts: the layer and the vector are uncertain, and "
            "whatever else tells these prompts apart is part of the direction."
        )


@torch.no_grad()
def _states(
    transformer: Transformer, sets: Sequence[Sequence[Any]], at: At, progress: Progress
) -> tuple[Tensor, Tensor, list[Hashable], list[Hashable]]:
    """One state per prompt and layer, for each set: (layer, prompt, d_model); then prompts' names.

    Prompts with the same name are the same.
    """
    both, names, total, done = [], [], sum(map(len, sets)), 0
    for prompts in sets:
        parts: list[Tensor] = []
        names.append(own_names := list[Hashable]())
        for start in range(0, len(prompts), AT_ONCE):
            given = list(prompts[start : start + AT_ONCE])
            inputs = as_inputs(transformer, given)
            for ids in (inputs[name] for name in IDS if name in inputs):
                require_length(transformer, ids.shape[1], "a prompt has")
            own_names += [_name(transformer, inputs, row) for row in range(len(given))]
            states = transformer.capture(inputs).states
            h = torch.stack([states[layer].float().cpu() for layer in sorted(states)])
            real = real_positions(transformer, inputs, h.shape[1:]).long()
            last = (real * torch.arange(1, real.shape[1] + 1)).argmax(1)
            if at == "last":
                parts.append(h[:, torch.arange(len(last)), last])
            else:
                if any(ids in inputs for ids in IDS):  # the first token of texts is left out
                    real = real * ((real.cumsum(1) > 1) | (real.sum(1, keepdim=True) == 1))
                weights = (real / real.sum(1, keepdim=True)).float()
                parts.append(torch.einsum("lbpd,bp->lbd", h, weights))
            done += len(given)
            progress("reading prompts", done, total, "prompts")
        both.append(torch.cat(parts, 1))
    if not all(torch.isfinite(one).all() for one in both):
        raise NotFinite(f"states of {transformer.identity.name} are not finite for these prompts")
    return both[0], both[1], names[0], names[1]


def _name(transformer: Transformer, inputs: Mapping[str, Tensor], row: int) -> Hashable:
    """What tells a prompt from others: its token ids without padding, or an image's pixels."""
    known = {ids: mask for ids, mask in IDS.items() if ids in inputs}
    if not known:
        pixels = inputs[transformer.model.main_input_name][row]
        return pixels.float().cpu().numpy().tobytes()
    real = {ids: inputs.get(mask, torch.ones_like(inputs[ids])) for ids, mask in known.items()}
    return tuple(tuple(inputs[ids][row][mask[row].bool()].tolist()) for ids, mask in real.items())


def _groups(names: Sequence[Sequence[Hashable]], method: Method) -> tuple[Tensor, Tensor]:
    """For each set, the number of the group that a prompt is in; groups are in one fold together.

    A group is a prompt with its repetitions. Pairs stay whole, so those that share a prompt are one
    group, and those that share one with these as well.
    """
    numbers = []
    for set_names in names:
        first = {name: number for number, name in enumerate(dict.fromkeys(set_names))}
        numbers.append(torch.tensor([first[name] for name in set_names]))
    if method == "pca":
        groups, before = numbers[0], None
        while before is None or not torch.equal(groups, before):
            before = groups
            for same in numbers:  # prompts of one name all take the lowest number among them
                lowest = torch.full_like(same, len(same)).scatter_reduce(0, same, groups, "amin")
                groups = lowest[same]
        numbers = [groups, groups]
    groups_of = [one.unique(return_inverse=True)[1] for one in numbers]
    if (least := min(int(one.max()) + 1 for one in groups_of)) < LEAST:
        what = "pairs that share no prompt" if method == "pca" else "different prompts in a set"
        raise BadText(f"{least} {what}; expected {LEAST} or more, because some are held out")
    return groups_of[0], groups_of[1]


@dataclass(frozen=True, eq=False)
class _Ranks:
    """How often held-out prompts are in the right order.

    Each value is a share of the prompts of the other set in the same fold: (layer, prompt).
    """

    pos: Tensor
    neg: Tensor
    n_groups: tuple[int, int]  # a prompt's repetitions say nothing new

    def interval(self, layer: int) -> dict[str, float]:
        """The AUC with its interval (DeLong's variance, Wilson's shape near 0 and 1)."""
        pos, neg = self.pos[layer], self.neg[layer]
        n, m = self.n_groups
        value = pos.mean()
        variance = pos.var() / n + neg.var() / m
        low, high = ends(value[None], variance[None], n + m - 2, SHARE, float(min(n, m)))
        return {"value": float(value), "low": float(low), "high": float(high)}

    def best(self) -> list[int]:
        """The layers with the highest AUC."""
        aucs = self.pos.mean(1)
        return (aucs > aucs.max() - 1e-9).nonzero()[:, 0].tolist()


def _middle(layers: Sequence[int]) -> int:
    """Of layers that separate equally well, the one in the middle."""
    return layers[len(layers) // 2]


@dataclass(frozen=True, eq=False)
class _Sets:
    """The states of two sets of prompts, (layer, prompt, d_model), and how a vector is made."""

    pos: Tensor
    neg: Tensor
    method: Method
    pos_groups: Tensor  # (prompt,): numbers from 0; a group is never divided between folds
    neg_groups: Tensor

    def norms(self) -> Tensor:
        """The mean length of states by layer: (layer,)."""
        both = torch.cat([self.pos, self.neg], 1).double()
        return torch.linalg.vector_norm(both, dim=2).mean(1).clamp_min(1e-30)

    def vectors(self) -> Tensor:
        """The vector of each layer, in float64: (layer, d_model)."""
        mean = self.pos.double().mean(1) - self.neg.double().mean(1)
        if self.method == "mean":
            return mean
        pairs = self.pos.double() - self.neg.double()
        # The component of most variance, from the small matrix of products of pairs.
        _, basis = torch.linalg.eigh(pairs @ pairs.transpose(1, 2))
        main = torch.einsum("lpd,lp->ld", pairs, basis[:, :, -1])
        main = main / torch.linalg.vector_norm(main, dim=1, keepdim=True).clamp_min(1e-30)
        return main * (main * mean).sum(1, keepdim=True)

    def _without(self, fold: int, folds: int) -> tuple["_Sets", "_Sets"]:
        """What a fold leaves to be found on, and the fold."""
        parts = []
        for inside in (False, True):
            p, n = (
                (groups % folds == fold) == inside for groups in (self.pos_groups, self.neg_groups)
            )
            groups = (
                one.unique(return_inverse=True)[1]
                for one in (self.pos_groups[p], self.neg_groups[n])
            )
            parts.append(_Sets(self.pos[:, p], self.neg[:, n], self.method, *groups))
        return parts[0], parts[1]

    @property
    def n_groups(self) -> tuple[int, int]:
        """How many different prompts there are, or pairs."""
        return int(self.pos_groups.max()) + 1, int(self.neg_groups.max()) + 1

    def held_out(self) -> _Ranks:
        """Each prompt against those of the other set in its fold, by vectors of the other folds."""
        return self._ranked(None)

    def nested(self) -> dict[str, float]:
        """The AUC where each fold is read at the layer that the other folds chose."""
        return self._ranked(lambda rest: _middle(rest.held_out().best())).interval(0)

    def _ranked(self, choose: Any) -> _Ranks:
        rows = 1 if choose else len(self.pos)
        pos = torch.full((rows, self.pos.shape[1]), torch.nan, dtype=torch.float64)
        neg = torch.full((rows, self.neg.shape[1]), torch.nan, dtype=torch.float64)
        folds = min(FOLDS, *self.n_groups)
        for fold in range(folds):
            rest, held = self._without(fold, folds)
            vectors = rest.vectors()[:, :, None]
            layers = slice(None) if choose is None else [choose(rest)]
            p, n = ((one.double() @ vectors)[layers, :, 0] for one in (held.pos, held.neg))
            right = (p[:, :, None] > n[:, None]).double() + (p[:, :, None] == n[:, None]) / 2
            pos[:, self.pos_groups % folds == fold] = right.mean(2)
            neg[:, self.neg_groups % folds == fold] = right.mean(1)
        return _Ranks(pos, neg, self.n_groups)


def _tokens(
    transformer: Transformer, vector: Tensor, top: int
) -> tuple[list[Row], list[Row], list[str]]:
    """What the lens says of a vector: promoted and suppressed outputs; or why it says nothing."""
    try:
        folded = fold_writer(transformer, vector.float()[None])
        (high, low) = vector_ends(transformer, folded, top)[0]
    except ModelRefused as error:
        return [], [], [f"The direction is not read as tokens: {error}."]
    return _rows(high), _rows(low), []


def _rows(scored: Sequence[Scored]) -> list[Row]:
    return [
        {"id": one.token.id, "label": one.token.label, "score": float(one.score)} for one in scored
    ]
