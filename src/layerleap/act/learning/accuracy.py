"""Does a model learn a task in context? Accuracy by number of demonstrations, with controls.

In: a wrapped decoder and a task. Out: `InContext`: accuracy zero-shot, with more and more
demonstrations, and with their answers shuffled, beside answers that need no model.

    majority   always the commonest answer of the task
    copy       the text of the query as its own answer
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from layerleap.act.learning.answers import right_answers
from layerleap.arguments import checked
from layerleap.errors import BadSettings, check_choice
from layerleap.lens.intervals import nested_means
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, reporting
from layerleap.results.base import Result
from layerleap.results.columns import Column, Row, Table, estimate
from layerleap.stream.tasks import Draw, EncodedTask, Task, draw, encode, load
from layerleap.stream.tasks.draw import still_right
from layerleap.stream.tasks.prompts import Answers

SHOTS = (0, 1, 2, 4, 8, 16, 32)
BASELINES = ("zero-shot", "majority", "copy")


@dataclass(frozen=True, repr=False)
class InContext(Result):
    """Which queries are answered correctly: by seed, (query,) booleans."""

    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "accuracy",
            "right answers, with 95 % intervals over queries and seeds",
            lambda result: result.table,
            (
                Column("answers"),
                Column("shots", "demonstrations"),
                estimate("value", "right, %", "{:.0f}", 100),
            ),
        ),
    )

    model: str
    task: str
    kind: str
    shots: tuple[int, ...]
    seeds: tuple[int, ...]
    right: dict[tuple[str, int], list[Tensor]]  # by answers ("true", "shuffled") and shots
    baselines: dict[str, list[Tensor]]  # majority and copy
    left_out: int  # examples whose answers have too many tokens
    still_right: dict[int, float] = field(default_factory=dict)  # share after shuffling, by shots

    def short(self) -> str:
        """What it is, in one line."""
        first, best = (self.accuracy("true", n) for n in (self.shots[0], self.shots[-1]))
        return (
            f"InContext({self.task} on {self.model}: {first['value']:.0%} right with "
            f"{self.shots[0]} demonstrations, {best['value']:.0%} with {self.shots[-1]}; "
            f"{'it learns' if self.works() else 'no clear learning'} in context)"
        )

    def accuracy(self, answers: str, shots: int) -> Row:
        """The share of queries answered correctly, with its interval over queries and seeds."""
        return self._row(self._measured(answers, shots))

    def _measured(self, answers: str, shots: int) -> list[Tensor]:
        check_choice(answers, ("true", "shuffled"), "answers")
        if (answers, shots) not in self.right:
            known = ", ".join(str(n) for kind, n in self.right if kind == answers)
            raise BadSettings(
                f"shots is {shots}; with {answers} answers, {known or 'nothing'} were measured: "
                "choose one of them, or measure more (shots=...)"
            )
        return self.right[answers, shots]

    def _row(self, groups: list[Tensor], lowest: float = 0.0) -> Row:
        columns = [group[:, None].double() for group in groups]
        return nested_means(columns, bounds=(lowest, 1.0))[0].to_dict()

    @cached_property
    def table(self) -> list[Row]:
        """Accuracy by condition and number of demonstrations."""
        rows = [
            {"answers": answers, "shots": shots, **self.accuracy(answers, shots)}
            | ({"still_right": self.still_right.get(shots)} if answers == "shuffled" else {})
            for answers, shots in self.right
        ]
        return rows + [
            {"answers": name, "shots": None, **self._row(groups)}
            for name, groups in self.baselines.items()
        ]

    def lead(self, over: str, shots: int | None = None) -> Row | None:
        """How much more often a query is right than in another condition, query by query.

        Args:
            over: "zero-shot", "majority", "copy" or "shuffled".
            shots: with how many demonstrations; the most when None.
        """
        shots = self.shots[-1] if shots is None else shots
        check_choice(over, (*BASELINES, "shuffled"), "over")
        right = self._measured("true", shots)
        others = {"zero-shot": self.right.get(("true", 0)), **self.baselines}
        others["shuffled"] = self.right.get(("shuffled", shots))
        if (other := others[over]) is None:
            return None
        gaps = [a.double() - b.double() for a, b in zip(right, other, strict=True)]
        return self._row(gaps, lowest=-1.0)

    def works(self, shots: int | None = None) -> bool:
        """True if demonstrations clearly help: more than no demonstrations, majority and copying.

        All three intervals of the difference have to be above 0; what was not measured shows
        nothing.
        """
        leads = [self.lead(over, shots) for over in BASELINES]
        return all(lead is not None and (lead["low"] or 0.0) > 0 for lead in leads)

    def facts(self) -> Row:
        """The model, the task, and what demonstrations add."""
        about = {"model": self.model, "task": self.task, "kind": self.kind}
        leads = {over: self.lead(over) for over in (*BASELINES, "shuffled")}
        counts = {
            "queries": sum(map(len, self.right["true", self.shots[0]])),
            "seeds": len(self.seeds),
            "left_out": self.left_out,
        }
        return {**about, **counts, "works": self.works(), "leads": leads}


@checked
def in_context(
    transformer: Transformer,
    task: Task | str | Path | Iterable[tuple[str, str]],
    *,
    shots: Sequence[int] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    queries: int = 100,
    answers: Answers = "token",
    progress: Progress | bool = True,
) -> InContext:
    """Accuracy on a task by number of demonstrations, with shuffled answers and baselines.

        print(ll.learning.in_context(model, "capitals"))

    Args:
        task: a bundled name, a file, a `Task`, or anything else that `ll.tasks.load` accepts.
        shots: numbers of demonstrations; by default 0 to 32, as far as they fit the context and the
            task has as many other examples for queries. 0 is always among them, because learning
            is a lead over no demonstrations.
        seeds: each draws demonstrations and queries; demonstrations of fewer shots are the first of
            those of more.
        queries: per seed, at most.
        answers: "token" wants answers of one token, "sequence" takes any.
        progress: a function to call, True for bars on a terminal or in a notebook, or False.
    """
    encoded = encode(transformer, load(task), answers=answers)
    if not seeds:
        raise BadSettings("no seeds given; expected at least one")
    if queries < 2:
        raise BadSettings(f"queries is {queries}; expected 2 or more")
    usual = [n for n in SHOTS if len(encoded.pieces) >= 2 * max(n, 2)]
    numbers = sorted({*(usual if shots is None else shots)})
    if not numbers or numbers[0] < 0:
        raise BadSettings(f"shots {numbers}; expected one or more numbers from 0 on")
    numbers = sorted({0, *numbers})
    draws = [draw(encoded, seed, demonstrations=numbers[-1], queries=queries) for seed in seeds]
    if shots is None:
        fitting = min(encoded.fitting(one.demonstrations, one.queries) for one in draws)
        numbers = [n for n in numbers if n <= fitting]
    else:
        for one in draws:
            encoded.require_fit(one.demonstrations, one.queries)
    with reporting(progress) as report:
        return answered(transformer, encoded, draws, numbers, report)


def answered(
    transformer: Transformer,
    encoded: EncodedTask,
    draws: Sequence[Draw],
    shots: Sequence[int],
    progress: Progress,
) -> InContext:
    """Accuracy of draws that were made already, one per seed."""
    cases = [("true", n) for n in shots] + [("shuffled", n) for n in shots if n > 1]
    right: dict[tuple[str, int], list[Tensor]] = {}
    for number, (answers, n) in enumerate(cases, 1):
        right[answers, n] = []
        for one in draws:
            shown = one.demonstrations[:n] if answers == "true" else one.shuffled(n)
            context = encoded.context(shown)
            right[answers, n].append(right_answers(transformer, encoded, context, one.queries))
        progress(f"answering {encoded.task.name}", number, len(cases), "conditions")
    commonest = Counter(piece.label for piece in encoded.pieces).most_common(1)[0][0]
    texts = encoded.task.examples
    is_commonest = [[p.label == commonest for p in one.queries] for one in draws]
    is_copy = [[p.label == texts[p.number].text for p in one.queries] for one in draws]
    return InContext(
        transformer.identity.name,
        encoded.task.name,
        encoded.task.kind,
        tuple(shots),
        tuple(one.seed for one in draws),
        right,
        {
            "majority": [torch.tensor(right) for right in is_commonest],
            "copy": [torch.tensor(right) for right in is_copy],
        },
        encoded.left_out,
        {
            n: sum(still_right(d.demonstrations[:n], d.shuffled(n)) for d in draws) / len(draws)
            for n in shots
            if n > 1
        },
    )
