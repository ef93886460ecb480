"""What the paper says about similarity, and what nobody has tried, tested on the tables.

In: a study with similarities of all tasks. Out: claims. Only tasks that the model learns in context
count; without one, a claim is not tested.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from layerleap import StudyResult, study
from layerleap.study import Claim, above, all_of, at_every, in_words, more_than_half, untested
from layerleap_papers.icl_and_gradient_descent.icl_accuracy import names, working
from layerleap_papers.icl_and_gradient_descent.icl_context import NAMES, mean_of

MEASURES = {"aou": "SimAOU", "amd": "SimAM delta", "am": "SimAM"}
LESS = 0.2  # share of the trained model's value: lower by less than this counts as the same
WAYS = ("gd", "lcgd-logit")  # the paper's
HIGH = 0.8  # a plain SimAM above this is high
# By both ways, of which the first should be closer: the claim, on each of two measures.
CLOSER = {
    ("lcgd-logit", "gd"): "Layer-causal gradient descent is closer to in-context learning than "
    "plain gradient descent ({}).",
    ("lcgd-linear", "lcgd-logit"): "Through linear shortcuts, layer-causal training is closer than "
    "through the logit lens ({}; not in the paper).",
    ("lcgd-tuned", "lcgd-logit"): "Through tuned maps, layer-causal training is closer than "
    "through the logit lens ({}; not in the paper).",
}
ABOVE = {
    "noise": "SimAOU is higher than that of isotropic noise.",
    "queries": "SimAOU is higher than with the training's change of another query (not in the "
    "paper).",
    "labels": "SimAOU is higher than after training on shuffled answers (not in the paper).",
}


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
    words: str | Callable[[study.Row], str] = "+.3f"  # how a row is written: a form of its value
    ways: tuple[str, ...] = ()  # that have to learn
    by_way: bool = False
    answer: Callable[[study.Row], study.Answer] = above
    together: Callable[[Iterable[study.Answer]], study.Answer] = all_of

    def __call__(self, result: StudyResult) -> study.Verdict:
        """One verdict for all of them."""
        tasks = working(result)
        if not tasks:
            return untested(
                f"{result.model['name']} does not clearly learn {' or '.join(names(result))} in "
                "context, so there is nothing to compare with"
            )
        cases = [(task, way) for task in tasks for way in (WAYS if self.by_way else ("",))]
        rows = [self.find(result, *filter(None, case)) for case in cases]
        if not any(map(_is_known, rows)):
            return untested("it was not measured in this run")
        answers: list[study.Answer] = []
        seen: list[str] = []
        for (task, way), row in zip(cases, rows, strict=True):
            name = f"{task}, {NAMES[way]}" if way else task
            idle = _idle(result, task, *self.ways)
            if way and not _learns(result, task, way):
                idle = "does not clearly learn"
            if row is None or not _is_known(row) or idle:
                answers.append("cannot tell")
                seen.append(f"{name} {idle or 'not measured'}")
            else:
                answers.append(self.answer(row))
                form = self.words
                words = interval(row, form) if isinstance(form, str) else form(row)
                seen.append(f"{name} {words}")
        return study.Verdict(self.together(answers), "; ".join(seen), self.why)


def _learns(result: StudyResult, task: str, way: str) -> bool:
    """Whether a way learns a task; True if that is not known."""
    row = result.row("learns", task=task, way=way)
    return row is None or row["learns"] == "yes"


def _idle(result: StudyResult, task: str, *ways: str) -> str:
    """Which of the ways do not learn a task, in words; empty if all do."""
    idle = [NAMES[way] for way in ways if not _learns(result, task, way)]
    verb = "does not clearly learn" if len(idle) == 1 else "do not clearly learn"
    return f"({' and '.join(idle)} {verb})" if idle else ""


def _is_known(row: study.Row | None) -> bool:
    return row is not None and row["value"] is not None


def _closer(of: str, over: str) -> Iterator[Claim]:
    for measure in ("aou", "amd"):
        yield Claim(
            CLOSER[of, over].format(MEASURES[measure]),
            Judged(
                partial(lead, measure=measure, of=f"{of}/", over=f"{over}/"),
                "yes if the interval of the difference, query by query, is above 0 on all tasks "
                "that are learned in context",
                ways=(of, over),
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
    trained, untrained = (
        {
            row["seed"]: row["value"]
            for row in result.rows(
                "similarity",
                task=task,
                measure="aou",
                way="gd",
                control=control,
                layer=None,
                seed=study.KNOWN,
                value=study.KNOWN,
            )
        }
        for control in ("", "untrained")
    )
    gaps = [untrained[n] - (1 - LESS) * trained[n] for n in sorted(trained) if n in untrained]
    if not gaps:
        return {"value": None, "low": None, "high": None}
    return mean_of([torch.tensor([gap]) for gap in gaps])


def _layers(measure: str) -> Claim:
    def find(result: StudyResult, task: str) -> study.Row | None:
        known = result.rows("layer_leads", measure=measure, task=task, value=study.KNOWN)
        row = {"value": len(known), "answers": list(map(above, known))}
        return row if result.rows("layer_leads", measure=measure) else None

    def words(row: study.Row) -> str:
        answers = row["answers"]
        return f"{answers.count('yes')} of {len(answers)} layers, {answers.count('no')} not"

    return Claim(
        f"Layer-causal training is closer in most layers ({MEASURES[measure]}).",
        Judged(
            find,
            "yes for a task if the interval of the difference is above 0 in more than half of the "
            "layers",
            words,
            ("lcgd-logit", "gd"),
            answer=lambda row: more_than_half(row["answers"]),
        ),
    )


def _above_control(control: str) -> Claim:
    def find(result: StudyResult, task: str, way: str) -> study.Row | None:
        over = "noise/" if control == "noise" else f"{way}/{control}"
        return lead(result, task, "aou", f"{way}/", over)

    return Claim(
        ABOVE[control],
        Judged(
            find,
            "yes if the interval of the difference is above 0 for both ways on all tasks, partly "
            "if for more than half of them",
            by_way=True,
            together=at_every,
        ),
    )


CLAIMS = (
    *_closer("lcgd-logit", "gd"),
    _layers("aou"),
    _layers("amd"),
    Claim(
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
    Claim(
        "Plain SimAM is high before any training.",
        Judged(
            partial(mean, measure="am", way="zero-shot"),
            "SimAM of context and zero-shot, with no training at all: yes if its interval is above "
            f"{HIGH}",
            ".3f",
            answer=partial(above, threshold=HIGH),
        ),
    ),
    *_closer("lcgd-linear", "lcgd-logit"),
    *_closer("lcgd-tuned", "lcgd-logit"),
    *map(_above_control, ABOVE),
)
