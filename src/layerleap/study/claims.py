"""Claims: sentences of a paper, each tested against what a study measured.

In: estimates with 95 % intervals, as rows with `value`, `low` and `high`.
Out: a `Verdict`: does it hold here, what was measured, and how that was decided.

One rule serves all studies. A comparison is "yes" only if the whole interval is on the claimed
side, "no" only if the whole interval is on the other side, and "cannot tell" otherwise. Claims that
rest on many comparisons count those answers; point estimates alone decide nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from layerleap.study.tables import in_words

if TYPE_CHECKING:
    from layerleap.study.result import StudyResult

Answer = Literal["yes", "partly", "no", "cannot tell", "not tested"]
LEVEL = 0.05  # a p-value confirms a "yes" if it is at most this


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds in a study."""

    agrees: Answer
    seen: str  # the numbers, in words
    why: str = ""  # how the answer follows from them


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper, and the test of it."""

    text: str
    test: Callable[["StudyResult"], Verdict]
    # Whether it is about this kind of model; others do not list it.
    when: Callable[["StudyResult"], bool] = lambda _: True

    def __call__(self, result: "StudyResult") -> Verdict:
        """Whether it holds in a result."""
        return self.test(result)


def claim(
    text: str, when: Callable[["StudyResult"], bool] = lambda _: True
) -> Callable[[Callable[["StudyResult"], Verdict]], Claim]:
    """A decorator that makes a claim of the function that tests it."""
    return lambda test: Claim(text, test, when)


@dataclass(frozen=True)
class Each:
    """A test that asks the same of every row, and makes one verdict of the answers.

    `seen` is a text with fields: `yes`, `no` and `n` count the answers, `estimate` is the first row
    with its interval (`{estimate:.3f}`, `{estimate:%}`), and its columns go by their names.
    """

    rows: Callable[["StudyResult"], Iterable[Mapping[str, Any]]]
    seen: str
    why: str
    ask: Callable[[Mapping[str, Any]], Answer] | None = None  # `above` 0 when None
    together: Callable[[Iterable[Answer]], Answer] | None = None  # `at_every` when None
    missing: str = "nothing was measured"  # the reason if there are no rows

    def __call__(self, result: "StudyResult") -> Verdict:
        """The verdict on a result."""
        rows = list(self.rows(result))
        if not rows:
            return untested(self.missing)
        answers = [(self.ask or above)(row) for row in rows]
        counts = {"yes": answers.count("yes"), "no": answers.count("no"), "n": len(answers)}
        seen = filled(self.seen, {**rows[0], **counts})
        return Verdict((self.together or at_every)(answers), seen, self.why)


def filled(text: str, row: Mapping[str, Any]) -> str:
    """A text with its fields filled in from a row; `estimate` is its value with the interval."""
    return text.format_map({**row, "estimate": _Estimate(row)})


class _Estimate:
    """Writes a row's value and interval in the form asked for."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row = row

    def __format__(self, form: str) -> str:
        return in_words(self.row, form or ".2f")


def untested(reason: str) -> Verdict:
    """The verdict on a claim that this study has no data for."""
    return Verdict("not tested", reason)


def above(estimate: Mapping[str, Any] | None, threshold: float = 0.0) -> Answer:
    """Is the estimate above the threshold? Decided by its interval."""
    low, high = _ends(estimate)
    if low is None or high is None:
        return "cannot tell"
    return "yes" if low > threshold else "no" if high <= threshold else "cannot tell"


def below(estimate: Mapping[str, Any] | None, threshold: float = 0.0) -> Answer:
    """Is the estimate below the threshold? Decided by its interval."""
    low, high = _ends(estimate)
    if low is None or high is None:
        return "cannot tell"
    return "yes" if high < threshold else "no" if low >= threshold else "cannot tell"


def _ends(estimate: Mapping[str, Any] | None) -> tuple[float | None, float | None]:
    return (None, None) if estimate is None else (estimate.get("low"), estimate.get("high"))


def between(estimate: Mapping[str, Any] | None, low: float, high: float) -> Answer:
    """Is the estimate between the two thresholds? Decided by its interval."""
    ends = {above(estimate, low), below(estimate, high)}
    return "no" if "no" in ends else "yes" if ends == {"yes"} else "cannot tell"


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, float | None]:
    """Return a - b for two separate estimates; its interval spans all differences of theirs.

    Conservative where both come from the same rows: prefer a paired interval if there is one.
    """
    value = None if None in (a["value"], b["value"]) else a["value"] - b["value"]
    if None in (*_ends(a), *_ends(b)):
        return {"value": value, "low": None, "high": None}
    return {"value": value, "low": a["low"] - b["high"], "high": a["high"] - b["low"]}


def confirmed(answer: Answer, is_sure: bool) -> Answer:
    """The answer of an interval, where "yes" needs something else to be sure of as well."""
    return "cannot tell" if answer == "yes" and not is_sure else answer


def all_of(answers: Iterable[Answer]) -> Answer:
    """One answer for a claim with several parts: "partly" if some parts hold and others do not."""
    kinds = set(answers)
    if kinds == {"yes"} or kinds == {"no"}:
        return kinds.pop()
    if {"yes", "no"} <= kinds or "partly" in kinds:
        return "partly"
    return "cannot tell"


def share_of(answers: Iterable[Answer], needed: float) -> Answer:
    """Does the claim hold in at least this share of cases? Undecided cases count for neither."""
    answers = list(answers)
    yes, may_be = answers.count("yes"), len(answers) - answers.count("no")
    least = needed * len(answers)
    if answers and yes >= least:
        return "yes"
    return "no" if may_be < least else "cannot tell"


def more_than_half(answers: Iterable[Answer]) -> Answer:
    """Does the claim hold in more than half of the cases? Undecided ones may be either."""
    answers = list(answers)
    yes, may_be = answers.count("yes"), len(answers) - answers.count("no")
    if 2 * yes > len(answers):
        return "yes"
    return "no" if answers and 2 * may_be <= len(answers) else "cannot tell"


def at_every(answers: Iterable[Answer]) -> Answer:
    """Does the claim hold in all cases? "partly" if it holds in more than half of them."""
    answers = list(answers)
    if share_of(answers, 1.0) == "yes":
        return "yes"
    most = more_than_half(answers)
    return "partly" if most == "yes" else most


def opposite(answer: Answer) -> Answer:
    """The answer to the contrary claim."""
    swapped: dict[Answer, Answer] = {"yes": "no", "no": "yes"}
    return swapped.get(answer, answer)
