"""What the paper says about similarity, and what nobody has tried, tested on the tables.

In: a study with similarities of all tasks. Out: claims. Only tasks that the model learns in context
count; without one, a claim is not tested.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from layerleap import StudyResult, study
from layerleap.lens import nested_means
from layerleap.study import above, all_of, at_every, in_words, more_than_half, untested
from layerleap_papers.icl_and_gradient_descent.icl_accuracy import names, working
from layerleap_papers.icl_and_gradient_descent.rates import NAMES

MEASURES = {"aou": "SimAOU", "amd": "SimAM delta", "am": "SimAM"}
LESS = 0.2  # share of the trained model's value: lower by less than this counts as the same
WAYS = ("gd", "lcgd-logit")  # the paper's
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


@dataclass(frozen=True)
class Judged:
    """A test on every task that works, or with `by_way` on both of the paper's ways on each.

    What has no value, such as a task where training diverged, cannot be told; nor can that for
    which a way that the claim needs does not learn.
    """

    find: Callable[..., study.Row | None]  # of a result and a task, and with `by_way` a way
    why: str
    said: str | Callable[[study.Row], str] = "+.3f"  # how a row is written: the form of its value
    ways: tuple[str, ...] = ()  # that have to learn
    by_way: bool = False
    answer: Callable[[study.Row], study.Answer] = above
    together: Callable[[Iterable[study.Answer]], study.Answer] = all_of

    def __call__(self, result: StudyResult) -> study.Verdict:
        """One verdict for all of them."""
        if not working(result):
            return not_learned(result)
        ways = WAYS if self.by_way else ("",)
        cases = [(task, way) for task in working(result) for way in ways]
        rows = [self.find(result, *filter(None, case)) for case in cases]
        if not any(map(is_known, rows)):
            return untested("it was not measured in this run")
        answers: list[study.Answer] = []
        seen: list[str] = []
        for (task, way), row in zip(cases, rows, strict=True):
            name = f"{task}, {NAMES[way]}" if way else task
            idle = idle_words(result, task, *self.ways)
            if way and not learns(result, {"task": task, "way": way}):
                idle = IDLE
            if row is None or not is_known(row) or idle:
                answers.append("cannot tell")
                seen.append(f"{name} {idle or 'not measured'}")
            else:
                answers.append(self.answer(row))
                words = interval(row, self.said) if isinstance(self.said, str) else self.said(row)
                seen.append(f"{name} {words}")
        return study.Verdict(self.together(answers), "; ".join(seen), self.why)


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
    return study.Claim(
        text,
        Judged(
            lambda result, task: lead(result, task, measure, of, over),
            "yes if the interval of the difference, query by query, is above 0 on all tasks that "
            "are learned in context",
            ways=(of.strip("/"), over.strip("/")),
        ),
    )


def _untrained_lead(result: StudyResult, task: str) -> study.Row | None:
    row = result.row("untrained_leads", task=task)
    noise = lead(result, task, "aou", "gd/", "noise/")
    return None if row is None else {**row, "noise": noise, "reached": _reached(result, task)}


def _is_reached(row: study.Row) -> study.Answer:
    """Cannot tell if there is no similarity that could be reached."""
    return above(row["reached"]) if above(row["noise"]) == "yes" else "cannot tell"


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


def _layers(measure: str) -> study.Claim:
    def find(result: StudyResult, task: str) -> study.Row | None:
        leads = result.rows("layer_leads", measure=measure)
        known = [row for row in leads if row["task"] == task and row["value"] is not None]
        return {"value": len(known), "answers": list(map(above, known))} if leads else None

    def said(row: study.Row) -> str:
        own = row["answers"]
        return f"{own.count('yes')} of {len(own)} layers, {own.count('no')} not"

    return study.Claim(
        f"Layer-causal training is closer in most layers ({MEASURES[measure]}).",
        Judged(
            find,
            "yes for a task if the interval of the difference is above 0 in more than half of the "
            "layers",
            said,
            ("lcgd-logit", "gd"),
            answer=lambda row: more_than_half(row["answers"]),
        ),
    )


def _above_control(control: str, text: str) -> study.Claim:
    def find(result: StudyResult, task: str, way: str) -> study.Row | None:
        over = control if control == "noise/" else f"{way}/{control}"
        return lead(result, task, "aou", f"{way}/", over)

    return study.Claim(
        text,
        Judged(
            find,
            "yes if the interval of the difference is above 0 for both ways on all tasks, partly "
            "if for more than half of them",
            by_way=True,
            together=at_every,
        ),
    )


CLAIMS = (
    _lead_claim(
        "Layer-causal gradient descent is closer to in-context learning than plain "
        "gradient descent (SimAOU).",
        "aou",
        "lcgd-logit/",
        "gd/",
    ),
    _lead_claim(
        "Layer-causal gradient descent is closer to in-context learning than plain "
        "gradient descent (SimAM delta).",
        "amd",
        "lcgd-logit/",
        "gd/",
    ),
    _layers("aou"),
    _layers("amd"),
    study.Claim(
        "A model with untrained blocks reaches the SimAOU of the trained one.",
        Judged(
            _untrained_lead,
            f"untrained minus trained is shown; yes if the interval of untrained minus "
            f"{1 - LESS:g} times trained, seed by seed, is above 0 on all tasks that are learned "
            "in context; cannot tell where the trained value is not above noise. Untrained blocks "
            "are drawn anew for every seed",
            ways=("gd",),
            answer=_is_reached,
        ),
    ),
    study.Claim(
        "Plain SimAM is high before any training.",
        Judged(
            lambda result, task: mean(result, task, "am", "zero-shot"),
            "SimAM of context and zero-shot, with no training at all: yes if its interval is above "
            f"{HIGH}",
            ".3f",
            answer=partial(above, threshold=HIGH),
        ),
    ),
    _lead_claim(
        "Through linear shortcuts, layer-causal training is closer than through the logit "
        "lens (SimAOU; not in the paper).",
        "aou",
        "lcgd-linear/",
        "lcgd-logit/",
    ),
    _lead_claim(
        "Through linear shortcuts, layer-causal training is closer than through the logit "
        "lens (SimAM delta; not in the paper).",
        "amd",
        "lcgd-linear/",
        "lcgd-logit/",
    ),
    _lead_claim(
        "Through tuned maps, layer-causal training is closer than through the logit lens "
        "(SimAOU; not in the paper).",
        "aou",
        "lcgd-tuned/",
        "lcgd-logit/",
    ),
    _lead_claim(
        "Through tuned maps, layer-causal training is closer than through the logit lens "
        "(SimAM delta; not in the paper).",
        "amd",
        "lcgd-tuned/",
        "lcgd-logit/",
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
