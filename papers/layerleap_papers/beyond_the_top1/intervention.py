"""Does a saturated state stay saturated in another text? The paper's intervention, with controls.

In: a model, a lens, the batches that saturation was read from, and the states of their rows.
Out: how often a recipient saturates at the very layer at which a donor's state was patched in, by
the distance from the donor's saturation layer; the same for every control of `donors`; the donor
beside the control that shares everything it has by definition; and the section that shows them.

From "Looking Beyond the Top-1" (arXiv 2410.20210). Success: the recipient ends with its own top
token, and its new saturation layer is the layer of the patch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from layerleap import Lens, StudyResult, Transformer, study
from layerleap.act.exits import Evidence
from layerleap.errors import BadSettings, BadText
from layerleap.extras import learn_library
from layerleap.lens import (
    DIFFERENCE,
    Saturation,
    States,
    mean_interval,
    require_aligned,
    saturation_layers,
    wilson,
)
from layerleap.progress import Progress, silent
from layerleap.stream import Batch
from layerleap.study import p_words
from layerleap_papers.beyond_the_top1.donors import KINDS, PairSettings, find_pairs, make_trials
from layerleap_papers.beyond_the_top1.rows import SaturationData
from layerleap_papers.beyond_the_top1.saturation_context import SaturationContext
from layerleap_papers.beyond_the_top1.trial_runs import Runner

PAGE = study.Page(__file__)
BY_DEFINITION = str(PAGE.say("by_definition"))
THIS, UNTRAINED = "this model", "untrained twin"


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
) -> study.Tables:
    """Patch donors' states into recipients, and see where these then saturate.

    Saturation, evidence and states are those of all rows of the batches, through the same lens and
    in the same order. Without a plan, pairs and offsets follow from the depth of the model.
    Recipients run side by side, several times each, up to `tokens_per_batch`.

    Returns "intervention" by kind of state and offset, "contrasts" of donor and unsaturated state
    on the same pairs by offset, and "intervention_runs", one row about the whole.
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
            progress("patching states in", done, len(pairs.donor), "pairs")
        row += len(batch.documents)
    if row != len(saturation.documents):
        raise BadText(
            f"the batches have {row} rows and the saturation layers {len(saturation.documents)}; "
            "give the batches that they were read from"
        )
    documents = saturation.documents[pairs.recipient]
    about = {
        "lens": saturation.lens,
        "pairs": len(pairs.donor),
        "donors": len(pairs.donor.unique()),
        "documents": len(documents.unique()),
        "identical": runner.identical,
        "moved": runner.moved,
        **{f"plan_{key}": value for key, value in asdict(plan).items()},
    }
    return {
        "intervention": list(_shares(runner, evidence)),
        "contrasts": list(_contrasts(runner, evidence, documents)),
        "intervention_runs": [about],
    }


def _require_same(saturation: Saturation, evidence: Evidence, states: States) -> None:
    require_aligned(saturation, states)
    expected = tuple(range(saturation.n_layers + 1))
    same = evidence.layers == expected and torch.equal(evidence.document, saturation.documents)
    if same:
        again = saturation_layers(evidence.top[:, :, None])[:, 0]
        same = torch.equal(again.long(), saturation.layer[:, 0].long())
    if not same:
        raise BadSettings(
            "the evidence does not saturate where the saturation layers say; give evidence of "
            "every layer, through the same lens and for the same rows"
        )


def _shares(runner: Runner, evidence: Evidence) -> Iterator[study.Row]:
    """Shares of pairs that succeed, with Wilson's intervals."""
    trials, success = runner.trials, runner.success(evidence)
    for number, kind in enumerate(KINDS):
        for offset in trials.offset[trials.kind == number].unique().tolist():
            here = (trials.kind == number) & (trials.offset == offset)
            n, successes = int(here.sum()), int(success[here].sum())
            low, high = wilson(successes, n)
            yield {
                "kind": kind,
                "offset": offset,
                "pairs": n,
                "successes": successes,
                "share": successes / n,
                "low": low,
                "high": high,
                "reads": int(runner.reads[here].sum()),
                "stays": int(runner.stays[here].sum()),
            }


def _contrasts(runner: Runner, evidence: Evidence, documents: Tensor) -> Iterator[study.Row]:
    """Donor against unsaturated on the same pairs: both read as the same token, as surely.

    What is counted is whether the token stays: that the recipient did not read so one layer
    before is the same for both.
    """
    trials = runner.trials
    binomtest = learn_library("scipy.stats").binomtest
    other = KINDS.index("unsaturated")
    for offset in trials.offset[trials.kind == other].unique().tolist():
        control = ((trials.kind == other) & (trials.offset == offset)).nonzero()[:, 0]
        donors = ((trials.kind == 0) & (trials.offset == offset)).nonzero()[:, 0]
        which = trials.pair[control]
        donor = donors[torch.searchsorted(trials.pair[donors], which)]
        a, b = runner.stays[donor], runner.stays[control]
        gap = (a.double() - b.double())[:, None]
        estimate = mean_interval(gap, documents[which], DIFFERENCE)[0]
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
            "p": study.bounded(float(binomtest(more, more + less).pvalue)) if more + less else 1.0,
            "donor_margin": evidence.gap[trials.source[donor], layer].mean().item(),
            "control_margin": evidence.gap[trials.source[control], layer].mean().item(),
        }


def tables_of(context: SaturationContext, data: SaturationData, model: str) -> study.Tables:
    """The intervention through the logit lens, every row with the name of the model."""
    s = context.settings
    plan = PairSettings.of(data.transformer.n_layers, reach=s.reach, limit=s.pairs, seed=s.seed)
    tables = intervene(
        data.transformer,
        data.lenses["logit"],
        data.batches(),
        data.saturation["logit"],
        data.evidence["logit"],
        data.states,
        plan,
        progress=context.progress,
    )
    return {name: [{"model": model, **row} for row in rows] for name, rows in tables.items()}


def words(contrast: study.Row | None, pairs: int) -> str:
    """What was found beyond what is true by definition."""
    if contrast is None:
        return f"no state to compare donors with was found among {pairs} pairs"
    more = "more often than" if study.above(contrast) == "yes" else "not clearly more often than"
    verdict = "less often than" if study.below(contrast) == "yes" else more
    return str(PAGE.say("contrast", row=contrast, verdict=verdict, p=p_words(contrast["p"])))


def _findings(result: StudyResult) -> Iterator[study.Said]:
    (about,) = result.rows("intervention_runs")
    text = words(result.row("contrasts", offset=0), about["pairs"])
    yield f"{text[:1].upper()}{text[1:]}."
    yield BY_DEFINITION
    yield PAGE.say("no_op" if about["identical"] else "no_op_changes")
    for control in result.rows("twin_intervention_runs"):
        text = words(result.row("twin_contrasts", offset=0), control["pairs"])
        yield f"In the untrained twin, {text}."


@PAGE.claim("step")
def _step(result: StudyResult) -> study.Tested:
    before, at = (result.row("intervention", kind="donor", offset=offset) for offset in (-1, 0))
    if before is None or at is None:
        return study.untested("no pair has both offsets")
    shares = ({**row, "value": row["share"]} for row in (at, before))
    return study.above(study.difference(*shares)), {"before": before, "at": at}


@PAGE.claim("saturated")
def _saturated(result: StudyResult) -> study.Tested:
    at, control = result.row("contrasts", offset=0), result.row("twin_contrasts", offset=0)
    if at is None or at["low"] is None:
        return study.untested("no states to compare donors with, or too few documents")
    # Intervals of few documents are narrow, so p decides as well.
    answers = [study.confirmed(study.above(at), at["p"] <= study.LEVEL)]
    untrained = ""
    if control is not None:
        untrained = f"; in the untrained twin {control['donor']:.0%} and {control['control']:.0%}"
        values = ({**row, "value": row["difference"]} for row in (at, control))
        answers.append(study.above(study.difference(*values)))
    return study.all_of(answers), {"at": at, "p": p_words(at["p"]), "untrained": untrained}


def _rows(result: StudyResult) -> Iterator[study.Row]:
    for name in ("", "twin_"):
        for about in result.rows(f"{name}intervention_runs"):
            for row in result.rows(f"{name}intervention"):
                yield {
                    **row,
                    "x": row["offset"],
                    "y": row["share"],
                    "line": row["kind"],
                    "panel": f"{about['model']}, {about['pairs']} pairs".capitalize(),
                    "rows": row["pairs"],
                    "documents": about["documents"],
                }


SECTION = PAGE.section(
    "intervention",
    lambda context: tables_of(context, context.observed, THIS),
    findings=_findings,
    shows=(
        _step,
        _saturated,
        PAGE.figure("intervention", _rows),
        PAGE.table("contrasts-table", study.pick("contrasts", "twin_contrasts")),
    ),
)
