"""How alike are learning in context and learning by gradient descent? Pure functions per query.

In: observations of one query in several conditions, or predictions of many queries. Out: one number
per block, layer or query; averages and intervals are the caller's.

    SimAOU          cosine of the changes of attention outputs, of L2-normalised outputs
    SimAM           cosine of attention scores; far from 0 before any learning
    SimAM delta     cosine of the changes of attention scores
    change-Jaccard  of the changed predictions, the share that changed in the same way
    Rec2FTP         of the queries that fine-tuning made right, the share that context made right

as in "In-context Learning and Gradient Descent Revisited" (arXiv 2311.07772). All changes are those
from the zero-shot condition. A change of zero has no direction: its cosine is NaN. In the first
block of a model with rotary positions context changes no score, so SimAM delta is NaN there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap.act.learning.observe import Observation
from layerleap.errors import BadSettings
from layerleap.lens.lens import Lens
from layerleap.lens.readings import saturation_layers
from layerleap.lens.saturation import finite_top

# Score changes below this share of the scores are rounding. In context a query has other positions,
# and rotations by large angles are less exact; training leaves positions alone.
IN_CONTEXT, TRAINED = 1e-3, 1e-6


def sim_aou(in_context: Observation, trained: Observation, zero_shot: Observation) -> Tensor:
    """SimAOU of each block: (n_layers,) float64."""
    return cosine(attention_update(in_context, zero_shot), attention_update(trained, zero_shot))


def attention_update(after: Observation, zero_shot: Observation) -> Tensor:
    """The change of the normalised attention outputs: (n_layers, d_model)."""
    return _unit(after.attention) - _unit(zero_shot.attention)


def sim_am(first: Observation, second: Observation) -> Tensor:
    """SimAM of each block, the mean over heads: (n_layers,) float64.

    Scores are those of the query's tokens. If two queries differ in length, as in a control that
    shuffles queries, the last tokens of the longer one are compared.
    """
    pairs = zip(first.scores, second.scores, strict=True)
    return _stacked([cosine(*_common(a, b)).mean() for a, b in pairs])


def sim_am_delta(in_context: Observation, trained: Observation, zero_shot: Observation) -> Tensor:
    """SimAM delta of each block, the mean over heads: (n_layers,) float64."""
    return score_similarity(
        score_update(in_context, zero_shot, IN_CONTEXT), score_update(trained, zero_shot)
    )


def score_update(
    after: Observation, zero_shot: Observation, smallest: float = TRAINED
) -> list[Tensor]:
    """The change of the scores by block: (head, n_query); 0 for a head if it is rounding.

    Args:
        smallest: changes up to this share of a head's scores are rounding: `IN_CONTEXT` or
            `TRAINED`.
    """
    pairs = list(zip(after.scores, zero_shot.scores, strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        raise BadSettings("the two observations are of different queries, so scores cannot change")
    least = max(smallest, 4 * torch.finfo(after.states.dtype).eps)
    updates = []
    for a, b in pairs:
        update = a.double() - b.double()
        is_real = update.norm(dim=-1) > least * b.double().norm(dim=-1)
        updates.append(update * is_real[:, None])
    return updates


def score_similarity(first: list[Tensor], second: list[Tensor]) -> Tensor:
    """The mean cosine over heads of two changes, by block: (n_layers,) float64.

    Heads without a change are left out; a block is NaN if no head has changed.
    """
    pairs = zip(first, second, strict=True)
    return _stacked([cosine(*_common(a, b)).nanmean() for a, b in pairs])


def noise_aou(in_context: Observation, zero_shot: Observation, seed: int) -> Tensor:
    """SimAOU with isotropic Gaussian noise in place of what training changed: (n_layers,)."""
    update = attention_update(in_context, zero_shot)
    return cosine(update, _noise(update, seed))


def noise_am(in_context: Observation, zero_shot: Observation, seed: int) -> Tensor:
    """SimAM delta with isotropic Gaussian noise in place of what training changed: (n_layers,)."""
    update = score_update(in_context, zero_shot, IN_CONTEXT)
    return score_similarity(update, [_noise(u, seed + n) for n, u in enumerate(update)])


def shuffled(n: int, seed: int) -> list[int]:
    """For each of n queries another one: a permutation without fixed points, for a control."""
    if n < 2:
        raise BadSettings(f"{n} queries cannot be shuffled; expected 2 or more")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    partner = torch.empty_like(order)
    partner[order] = order.roll(1)  # one cycle through all
    return [int(other) for other in partner]


@dataclass(frozen=True, eq=False)
class Ratio:
    """A share with its counts per query, so that queries can be drawn again for an interval."""

    hits: Tensor  # like the predictions: what counts as a hit, 0 or 1
    counted: Tensor  # what it is a share of

    @property
    def value(self) -> float:
        """The share; NaN if nothing is counted."""
        total = int(self.counted.sum())
        return int(self.hits.sum()) / total if total else float("nan")

    @property
    def denominator(self) -> int:
        """How much is counted; a share of few says little."""
        return int(self.counted.sum())


def change_jaccard(
    zero_shot: Tensor, in_context: Tensor, trained: Tensor, partner: list[int] | None = None
) -> Ratio:
    """Same changes / all changes of predictions, as sets of (query, new prediction).

    Predictions may have any shape, such as (query,), or (query, layer) for readings of layers. A
    query that the two change differently counts twice.

    Args:
        partner: for a control, the query whose training's change is taken for each query's own.
    """
    by_context, by_training = in_context != zero_shot, trained != zero_shot
    if partner is not None:
        by_training, trained = by_training[partner], trained[partner]
    same = by_context & by_training & (in_context == trained)
    return Ratio(same, by_context.int() + by_training.int() - same.int())


def recall_to_fine_tuned(zero_shot: Tensor, in_context: Tensor, trained: Tensor) -> Ratio:
    """Rec2FTP, of booleans: is each query answered correctly in each condition?"""
    counted = trained & ~zero_shot
    return Ratio(counted & in_context, counted)


def recall_by_chance(zero_shot: Tensor, in_context: Tensor) -> Ratio:
    """Rec2FTP to expect if training made others of the wrong queries right: a control.

    That is the share of all queries wrong zero-shot that context made right.
    """
    return Ratio(in_context & ~zero_shot, ~zero_shot)


@torch.no_grad()
def readings(lens: Lens, observation: Observation) -> Tensor:
    """The token that each layer would predict, through a lens: (n_layers + 1,)."""
    tops = []
    for layer, h in enumerate(observation.states):
        logits = lens.logits(h[None].to(lens.transformer.device(layer)), layer)
        tops.append(finite_top(logits, 1, f"lens {lens.name!r}", layer)[0, 0])
    return torch.stack(tops)


def reading_agreement(first: Tensor, second: Tensor) -> Tensor:
    """Where two conditions read the same token: (n_layers + 1,) of booleans."""
    return first == second


def saturation_layer(tops: Tensor) -> int:
    """The layer from which the reading no longer changes; n_layers if only the last has it."""
    return int(saturation_layers(tops[None, :, None])[0, 0])


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Of the last axis, in float64; NaN where one of the two is zero."""
    a, b = a.double(), b.double()
    size = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(size > 0, (a * b).sum(-1) / size, torch.nan)


def _unit(vectors: Tensor) -> Tensor:
    exact = vectors.double()
    return exact / exact.norm(dim=-1, keepdim=True).clamp_min(1e-300)


def _noise(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)


def _common(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    n = min(a.shape[-1], b.shape[-1])
    return a[..., -n:], b[..., -n:]


def _stacked(values: list[Tensor]) -> Tensor:
    if not values:
        raise BadSettings("no scores were recorded; observe with scores=True")
    return torch.stack(values)
