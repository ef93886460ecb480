"""What the paper says about similarity, and what nobody has tried, tested on the tables.

In: a study with similarities of all tasks. Out: claims. Only tasks that the model learns in context
count; without one, a claim is not tested.
"""

from collections.abc import Callable

import torch

from layerleap import StudyResult, study
from layerleap.lens import nested_means
from layerleap.study import above, all_of, at_every, in_words, more_than_half, untested
from layerleap_papers.icl_and_gradient_descent.icl_accuracy import names, working
from layerleap_papers.icl_and_gradient_descent.rates import NAMES

MEASURES = {"aou": "SimAOU", "amd": "SimAM delta", "am": "SimAM"}
LESS = 0.2  # share of the trained model's value: lower by less than this counts as the same
IDLE = "does not clearly learn"
HIGH = 0.8  # a plain SimAM above this is high


def mean(
    result: StudyResult, task: str, measure: str, way: str, control: str = ""
) -> study.Row | None:
    """The mean over layers and seeds."""
    where = {"task": task, "measure": measure, "way": way, "control": control}
    return result.row("similarity", **where, seed=None, layer=None)


def lead(result: StudyResult, task: str, measure: str, of: str, over: str) -> study.Row | None:
    """A paired lead."""
    return result.row("similarity_leads", task=task, measure=measure, of=of, over=over)


def interval(row: study.Row | None, form: str = ".3f") -> str:
    """A value with its interval."""
    return in_words(row, form, unknown="not measured")


def judged(
    result: StudyResult,
    rows: list[tuple[str, study.Row | None]],
    answer: Callable[[str, study.Row], study.Answer],
    why: str,
    form: str,
    ways: tuple[str, ...] = (),
) -> study.Verdict:
    """One verdict for all tasks that work; `answer` maps a row to an answer.

    A task without a value, such as one where training diverged, cannot be told; nor can one on
    which a way that the claim needs (`ways`) does not learn.
    """
    if not working(result):
        return not_learned(result)
    if not any(is_known(row) for _, row in rows):
        return untested("it was not measured in this run")
    answers: list[study.Answer] = []
    seen: list[str] = []
    for task, row in rows:
        reason = idle_words(result, task, *ways)
        is_told = row is not None and is_known(row) and not reason
        answers.append(answer(task, row) if is_told and row is not None else "cannot tell")
        seen.append(f"{task} {reason or interval(row, form)}")
    return study.Verdict(all_of(answers), "; ".join(seen), why)


def learns(result: StudyResult, row: study.Row) -> bool:
    """Whether the way of a row learns its task; True if that is not known."""
    found = result.row("learns", task=row["task"], way=row["way"])
    return found is None or found["learns"] == "yes"


def idle_words(result: StudyResult, task: str, *ways: str) -> str:
    """Which of the ways do not learn a task, in words; empty if all do."""
    idle = [NAMES[way] for way in ways if not learns(result, {"task": task, "way": way})]
    verb = IDLE if len(idle) == 1 else "do not clearly learn"
    return f"({' and '.join(idle)} {verb})" if idle else ""


def is_known(row: study.Row | None) -> bool:
    """Whether there is a value."""
    return row is not None and row["value"] is not None


def not_learned(result: StudyResult) -> study.Verdict:
    """The verdict where no task is learned in context."""
    return untested(
        f"{result.model['name']} does not clearly learn {' or '.join(names(result))} in "
        "context, so there is nothing to compare with"
    )


def _lead_claim(text: str, measure: str, of: str, over: str) -> study.Claim:
    def test(result: StudyResult) -> study.Verdict:
        rows = [(task, lead(result, task, measure, of, over)) for task in working(result)]
        return judged(
            result,
            rows,
            lambda _, row: above(row),
            "yes if the interval of the difference, query by query, is above 0 on all tasks that "
            "are learned in context",
            "+.3f",
            (of.strip("/"), over.strip("/")),
        )

    return study.Claim(text, test)


@study.claim("A model with untrained blocks reaches the SimAOU of the trained one.")
def _untrained(result: StudyResult) -> study.Verdict:
    rows = [(task, result.row("untrained_leads", task=task)) for task in working(result)]

    def answer(task: str, row: study.Row) -> study.Answer:
        if above(lead(result, task, "aou", "gd/", "noise/")) != "yes":
            return "cannot tell"  # there is no similarity that could be reached
        return above(_reached(result, task))

    return judged(
        result,
        rows,
        answer,
        f"untrained minus trained is shown; yes if the interval of untrained minus {1 - LESS:g} "
        "times trained, seed by seed, is above 0 on all tasks that are learned in context; cannot "
        "tell where the trained value is not above noise. Untrained blocks are drawn anew for "
        "every seed",
        "+.3f",
        ("gd",),
    )


def _reached(result: StudyResult, task: str) -> study.Row:
    """SimAOU with untrained blocks minus what counts as that of the trained model, over seeds."""
    seeds: dict[str, dict[int, float]] = {"": {}, "untrained": {}}
    for row in result.rows("similarity", task=task, measure="aou", way="gd", layer=None):
        if row["control"] in seeds and row["seed"] is not None and row["value"] is not None:
            seeds[row["control"]][row["seed"]] = row["value"]
    trained, untrained = seeds[""], seeds["untrained"]
    gaps = [untrained[n] - (1 - LESS) * trained[n] for n in sorted(trained) if n in untrained]
    if not gaps:
        return {"value": None, "low": None, "high": None}
    return nested_means([torch.tensor([[gap]]) for gap in gaps])[0].to_dict()


@study.claim("Plain SimAM is high before any training.")
def _high_before(result: StudyResult) -> study.Verdict:
    rows = [(task, mean(result, task, "am", "zero-shot")) for task in working(result)]
    return judged(
        result,
        rows,
        lambda _, row: above(row, HIGH),
        f"SimAM of context and zero-shot, with no training at all: yes if its interval is above "
        f"{HIGH}",
        ".3f",
    )


def _layers(measure: str) -> study.Claim:
    def test(result: StudyResult) -> study.Verdict:
        if not working(result):
            return not_learned(result)
        answers: list[study.Answer] = []
        seen: list[str] = []
        for task in working(result):
            rows = [
                row
                for row in result.rows("layer_leads", task=task, measure=measure)
                if row["value"] is not None
            ]
            own: list[study.Answer] = [above(row) for row in rows]
            if reason := idle_words(result, task, "lcgd-id", "gd"):
                answers.append("cannot tell")
                seen.append(f"{task} {reason}")
                continue
            answers.append(more_than_half(own))
            seen.append(f"{task} {own.count('yes')} of {len(rows)} layers, {own.count('no')} not")
        if not result.rows("layer_leads", measure=measure):
            return untested("it was not measured in this run")
        return study.Verdict(
            all_of(answers),
            "; ".join(seen),
            "yes for a task if the interval of the difference is above 0 in more than half of the "
            "layers",
        )

    return study.Claim(
        f"Layer-causal training is closer in most layers ({MEASURES[measure]}).", test
    )


def _above_control(control: str, text: str) -> study.Claim:
    def test(result: StudyResult) -> study.Verdict:
        if not working(result):
            return not_learned(result)
        answers: list[study.Answer] = []
        seen: list[str] = []
        is_measured = False
        for task in working(result):
            for way in ("gd", "lcgd-id"):
                over = control if control == "noise/" else f"{way}/{control}"
                row = lead(result, task, "aou", f"{way}/", over)
                is_idle = not learns(result, {"task": task, "way": way})
                is_measured = is_measured or is_known(row)
                answers.append("cannot tell" if is_idle else above(row))
                said = IDLE if is_idle else interval(row, "+.3f")
                seen.append(f"{task}, {NAMES[way]} {said}")
        if not is_measured:
            return untested("it was not measured in this run")
        return study.Verdict(
            at_every(answers),
            "; ".join(seen),
            "yes if the interval of the difference is above 0 for both ways on all tasks, partly "
            "if for more than half of them",
        )

    return study.Claim(text, test)


CLAIMS = (
    _lead_claim(
        "Layer-causal gradient descent is closer to in-context learning than plain "
        "gradient descent (SimAOU).",
        "aou",
        "lcgd-id/",
        "gd/",
    ),
    _lead_claim(
        "Layer-causal gradient descent is closer to in-context learning than plain "
        "gradient descent (SimAM delta).",
        "amd",
        "lcgd-id/",
        "gd/",
    ),
    _layers("aou"),
    _layers("amd"),
    _untrained,
    _high_before,
    _lead_claim(
        "Through linear shortcuts, layer-causal training is closer than through the logit "
        "lens (SimAOU; not in the paper).",
        "aou",
        "lcgd-mat/",
        "lcgd-id/",
    ),
    _lead_claim(
        "Through linear shortcuts, layer-causal training is closer than through the logit "
        "lens (SimAM delta; not in the paper).",
        "amd",
        "lcgd-mat/",
        "lcgd-id/",
    ),
    _lead_claim(
        "Through tuned maps, layer-causal training is closer than through the logit lens "
        "(SimAOU; not in the paper).",
        "aou",
        "lcgd-tuned/",
        "lcgd-id/",
    ),
    _lead_claim(
        "Through tuned maps, layer-causal training is closer than through the logit lens "
        "(SimAM delta; not in the paper).",
        "amd",
        "lcgd-tuned/",
        "lcgd-id/",
    ),
    _above_control("noise/", "SimAOU is higher than that of isotropic noise."),
    _above_control(
        "queries",
        "SimAOU is higher than with the training's change of another query (not in the paper).",
    ),
    _above_control(
        "labels", "SimAOU is higher than after training on shuffled answers (not in the paper)."
    ),
)
