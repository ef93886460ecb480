"""Does a settled state stay settled in another text? The intervention of the paper, with controls.

In: a model, a lens, the batches that saturation was read from, and the states of their rows.
Out: `Intervention`: how often a recipient settles at the very layer at which a donor's state was
put into its stream, against the distance from the donor's saturation layer; the same for every
control of `donors`; and the donor beside the control that shares all it has by definition.

From "Looking Beyond the Top-1" (arXiv 2410.20210). Success: the recipient ends with its own top
token, and its new saturation layer is the layer of the injection.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from layerleap.act.exits.evidence import Evidence
from layerleap.errors import BadSettings, BadText
from layerleap.extras import learn_library
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.read.lens import Lens
from layerleap.read.metrics import mean_interval
from layerleap.read.probes.task import States, require_aligned
from layerleap.read.saturation import Saturation, saturation_layers
from layerleap.stream.examples import Batch
from layerleap.study.saturation.donors import KINDS, Pairs, PairSettings, find_pairs, make_trials
from layerleap.study.saturation.trial_runs import Outcome, Runner

Row = dict[str, Any]
BY_DEFINITION = (
    "At offset -1 a donor cannot succeed: one layer before its saturation layer its state reads as "
    "another token. From offset 0 on it reads as the right token, so it succeeds unless later "
    "blocks change that, or the recipient read so already one layer before. The step at 0 is "
    "therefore no finding; what the donor does beyond the control 'unsaturated', which reads as "
    "the same token as surely, is one."
)


@dataclass(frozen=True)
class Intervention:
    """Plain values, ready for tables."""

    rows: tuple[Row, ...]  # by kind and offset
    contrasts: tuple[Row, ...]  # donor and unsaturated on the same pairs, by offset
    pairs: int
    donors: int
    documents: int  # of recipients
    identical: bool
    moved: int
    lens: str
    plan: Row
    by_definition: str = BY_DEFINITION

    def to_dict(self) -> Row:
        """Plain JSON types."""
        lists = {"rows": list(self.rows), "contrasts": list(self.contrasts)}
        return {**asdict(self), **lists, "plan": {**self.plan, "offsets": [*self.plan["offsets"]]}}

    def words(self) -> str:
        """What was found beyond what is true by definition."""
        at = next((row for row in self.contrasts if row["offset"] == 0), None)
        if at is None:
            return f"no state to compare donors with was found among {self.pairs} pairs"
        verdict = (
            "more often than"
            if at["low"] is not None and at["low"] > 0
            else "less often than"
            if at["high"] is not None and at["high"] < 0
            else "no more often, as far as can be told, than"
        )
        return (
            f"at its saturation layer a donor's state stays {verdict} one that reads as the same "
            f"token as surely and is not settled: {at['donor']:.0%} against {at['control']:.0%} of "
            f"{at['pairs']} pairs, p = {at['p']:.3g}"
        )


def intervene(
    transformer: Transformer,
    lens: Lens,
    batches: Iterable[Batch],
    saturation: Saturation,
    evidence: Evidence,
    states: States,
    plan: PairSettings | None = None,
    *,
    tokens_per_batch: int = 1024,
    progress: Progress = silent,
) -> Intervention:
    """Put donors' states into recipients, and see where these then settle.

    Args:
        transformer: the model.
        lens: through which saturation was read, and is read again.
        batches: those that saturation was read from, in the same order.
        saturation: of all their rows.
        evidence: what each layer read as through the same lens, of the same rows.
        states: of the same rows.
        plan: which pairs and offsets; by the depth of the model when None.
        tokens_per_batch: recipients run side by side, several times each, up to so many tokens.
        progress: told the number of pairs done.
    """
    plan = plan or PairSettings.of(transformer.n_layers)
    _require_same(saturation, evidence, states)
    pairs = find_pairs(saturation, plan)
    trials = make_trials(saturation, evidence, pairs, plan)
    runner = Runner(
        transformer, lens, pairs, trials, states, tokens=tokens_per_batch, seed=plan.seed
    )
    done, row = 0, 0
    for batch in batches:
        here = (pairs.recipient >= row) & (pairs.recipient < row + len(batch.documents))
        if here.any():
            runner.run(batch, here.nonzero()[:, 0], row)
            done += int(here.sum())
            progress("putting states in", done, len(pairs), "pairs")
        row += len(batch.documents)
    if row != len(saturation.documents):
        raise BadText(
            f"the batches have {row} rows and the saturation layers {len(saturation.documents)}; "
            "give the batches that they were read from"
        )
    outcome = runner.outcome(evidence)
    documents = saturation.documents[pairs.recipient]
    return Intervention(
        tuple(_table(outcome)), tuple(_contrasts(outcome, pairs, evidence, documents)),
        len(pairs), len(pairs.donor.unique()), len(documents.unique()), outcome.identical,
        outcome.moved, saturation.lens, asdict(plan),
    )  # fmt: skip


def _require_same(saturation: Saturation, evidence: Evidence, states: States) -> None:
    require_aligned(saturation, states)
    wanted = tuple(range(saturation.n_layers + 1))
    same = evidence.layers == wanted and torch.equal(evidence.document, saturation.documents)
    if same:
        again = saturation_layers(evidence.top[:, :, None])[:, 0]
        same = torch.equal(again.long(), saturation.layer[:, 0].long())
    if not same:
        raise BadSettings(
            "the evidence does not settle where the saturation layers say; give evidence of every "
            "layer, through the same lens and of the same rows"
        )


def _table(outcome: Outcome) -> Iterator[Row]:
    """Shares with Wilson's intervals: with few pairs, or none that succeed, they stay honest."""
    trials = outcome.trials
    for number, kind in enumerate(KINDS):
        for offset in trials.offset[trials.kind == number].unique().tolist():
            here = (trials.kind == number) & (trials.offset == offset)
            n, successes = int(here.sum()), int(outcome.success[here].sum())
            low, high = wilson(successes, n)
            yield {
                "kind": kind,
                "offset": offset,
                "pairs": n,
                "successes": successes,
                "share": successes / n,
                "low": low,
                "high": high,
                "reads": int(outcome.reads[here].sum()),
                "stays": int(outcome.stays[here].sum()),
            }


def wilson(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, spread = successes / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (share * (1 - share) / n + spread / (4 * n)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def _contrasts(
    outcome: Outcome, pairs: Pairs, evidence: Evidence, documents: Tensor
) -> Iterator[Row]:
    """Donor against unsaturated on the same pairs: both read as the same token, as surely.

    What is counted is whether the token stays: that the recipient did not read so one layer
    before is the same for both.
    """
    trials = outcome.trials
    binomtest = learn_library("scipy.stats").binomtest
    other = KINDS.index("unsaturated")
    for offset in trials.offset[trials.kind == other].unique().tolist():
        control = ((trials.kind == other) & (trials.offset == offset)).nonzero()[:, 0]
        donors = ((trials.kind == 0) & (trials.offset == offset)).nonzero()[:, 0]
        which = trials.pair[control]
        donor = donors[torch.searchsorted(trials.pair[donors], which)]
        a, b = outcome.stays[donor], outcome.stays[control]
        estimate = mean_interval((a.double() - b.double())[:, None], documents[which])[0]
        more, less = int((a & ~b).sum()), int((b & ~a).sum())
        layer = trials.layer[control]
        yield {
            "offset": offset,
            "pairs": len(which),
            "donor": a.double().mean().item(),
            "control": b.double().mean().item(),
            "difference": estimate.value,
            "low": estimate.low,
            "high": estimate.high,
            "only_donor": more,
            "only_control": less,
            "p": float(binomtest(more, more + less).pvalue) if more + less else 1.0,
            "donor_margin": evidence.gap[trials.source[donor], layer].mean().item(),
            "control_margin": evidence.gap[trials.source[control], layer].mean().item(),
        }
