"""One task and seed: queries observed zero-shot, in context, and after every way of training.

In: the context of the study. Out: tensors by name, one row per query:

    aou/WAY/CONTROL    SimAOU by block; amd: SimAM delta; am: SimAM
    prediction/CASE    the answer; right/CASE: whether it is correct
    tops/LENS/CASE     the token that each layer would predict
                       (CASE is zero-shot, in-context, WAY, or WAY/labels)
    shots/K/WAY/...    the same measures after K demonstrations, mean over blocks
    gain/WAY           log p(trained) - log p(zero-shot) of the right answer
    failed/WAY/CONTROL a training that ended with NaN or infinity

WAY is gd, or lcgd with its lens. CONTROL is empty, or: "queries", the training's change of another
query; "labels", training on shuffled answers; "untrained", a model with untrained blocks.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from layerleap import Lens, Transformer
from layerleap.act.edits import ApplyDelta
from layerleap.act.learning import (
    Delta,
    Demonstration,
    Observation,
    Prompt,
    learn,
    measures,
    observe,
)
from layerleap.errors import BadText, NotFinite
from layerleap.lens import finite_top
from layerleap.stream.tasks import EncodedTask, Piece, still_right
from layerleap_papers.icl_and_gradient_descent.icl_context import FAILED, IclContext, layer_mean

CURVE_QUERIES = 25  # on which similarity is measured after fewer demonstrations
READ_QUERIES = 50  # whose layers are read: each layer goes through the whole head
CONTROLLED = ("gd", "lcgd-logit")  # the paper's ways, which get the controls that cost training

Observed = list[Observation]  # queries in one condition
Change = tuple[Tensor, list[Tensor]]  # of the attention outputs of a query, and of its scores


@dataclass(eq=False)
class Trial:
    """Queries of a draw on one model, and what demonstrations and training change."""

    model: Transformer
    encoded: EncodedTask
    shown: Sequence[Piece]
    queries: Sequence[Piece]

    def _observe(self, context: tuple[int, ...]) -> Observed:
        prompts = [Prompt(context + piece.prompt, len(piece.prompt)) for piece in self.queries]
        labels = [tokens[0] for tokens in self.encoded.labels.values()]
        return observe(self.model, prompts, labels=labels)

    @cached_property
    def zero_shot(self) -> Observed:
        """Without demonstrations."""
        return self._observe(self.encoded.start)

    @cached_property
    def in_context(self) -> Observed:
        """After all demonstrations."""
        return self._observe(self.encoded.context(self.shown))

    def trained(self, delta: Delta) -> Observed:
        """Without demonstrations, after training."""
        with self.model.edit(ApplyDelta(delta)):
            return self._observe(self.encoded.start)

    def predictions(self, observed: Observed) -> Tensor:
        """Answers: numbers of labels, or tokens of a mapping."""
        is_mapping = self.encoded.task.kind == "mapping"
        return torch.tensor([one.top if is_mapping else one.prediction for one in observed])

    def _labels(self) -> Tensor:
        """The numbers of the right labels."""
        labels = list(self.encoded.labels)
        return torch.tensor([labels.index(piece.label) for piece in self.queries])

    def right(self, observed: Observed) -> Tensor:
        """Which queries are answered correctly."""
        truth = self._labels()
        if self.encoded.task.kind == "mapping":
            truth = torch.tensor([piece.answer[0] for piece in self.queries])
        return self.predictions(observed) == truth

    def log_p(self, observed: Observed) -> Tensor:
        """The log-probability of the right answer; of classes, among the labels: (query,)."""
        rows = torch.stack([one.labels for one in observed if one.labels is not None])
        if self.encoded.task.kind == "classes":
            rows = rows.log_softmax(1)
        return rows.gather(1, self._labels()[:, None])[:, 0]

    def _changes(self, after: Observed, smallest: float = measures.TRAINED) -> list[Change]:
        """What a condition changes in each query against zero-shot."""
        return [
            (measures.attention_update(*pair), measures.score_update(*pair, smallest))
            for pair in zip(after, self.zero_shot, strict=True)
        ]

    @cached_property
    def by_context(self) -> list[Change]:
        """What context changes in each query."""
        return self._changes(self.in_context, measures.IN_CONTEXT)

    def similarity(
        self, trained: Observed, partner: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """SimAOU and SimAM delta by query and block; with a partner, its training's change."""
        changes = self._changes(trained)
        if partner is not None:
            changes = [changes[other] for other in partner]
        pairs = list(zip(self.by_context, changes, strict=True))
        return {
            "aou": torch.stack([measures.cosine(ours[0], theirs[0]) for ours, theirs in pairs]),
            "amd": torch.stack(
                [measures.score_similarity(ours[1], theirs[1]) for ours, theirs in pairs]
            ),
        }

    def sim_am(self, other: Observed) -> Tensor:
        """Plain SimAM of context and another condition, by query and block."""
        return torch.stack(list(map(measures.sim_am, self.in_context, other)))

    def noise(self, seed: int) -> dict[str, Tensor]:
        """The same measures with isotropic noise for what training changes."""
        pairs = list(zip(self.in_context, self.zero_shot, strict=True))
        seeds = [1_000_003 * seed + 1000 * n for n in range(len(pairs))]
        return {
            name: torch.stack([of(*pair, n) for pair, n in zip(pairs, seeds, strict=True)])
            for name, of in (("aou", measures.noise_aou), ("amd", measures.noise_am))
        }


def train(
    context: IclContext,
    trial: Trial,
    way: str,
    rate: float,
    pieces: Sequence[Piece],
    start: Delta | None = None,
) -> Delta:
    """What a way of training learns from demonstrations, in the order in which they are shown."""
    s, is_plain = context.settings, way == "gd"
    encoded = trial.encoded
    return learn(
        trial.model,
        [Demonstration(encoded.demonstration(piece), len(piece.answer)) for piece in pieces],
        how="full" if is_plain else "layer-causal",
        learning_rate=rate,
        parameters=s.chosen_parameters,
        tokens=s.tokens,  # type: ignore[arg-type]
        lens=None if is_plain or trial.model is not context.model else context.lenses[way],
        start=start,
    ).delta


def measure(context: IclContext, task: str, seed: int) -> dict[str, Tensor]:
    """All measurements of one task and seed."""
    cell, ways = _Cell(context, task, seed), context.settings.ways
    for number, way in enumerate(ways):
        context.progress(f"training on {task}, seed {seed}", number, len(ways), "ways")
        try:
            cell.way(way)
        except NotFinite:
            cell.fail(way)
    cell.untrained()
    return cell.tensors


class _Cell:
    """One task and seed in progress: begins with zero-shot, in context, and noise."""

    def __init__(self, context: IclContext, task: str, seed: int) -> None:
        self.context, self.task, self.seed = context, task, seed
        self.drawn, self.encoded = context.draw(task, seed), context.encoded[task]
        shown, queries = self.drawn.demonstrations, self.drawn.queries
        if len(queries) < 2:
            raise BadText("there are fewer than two queries; shuffled queries are a control")
        self.partner = measures.shuffled(len(queries), seed)
        self.trial = trial = Trial(context.model, self.encoded, shown, queries)
        self.shorter = {  # context is the same for all ways
            stop: Trial(context.model, self.encoded, shown[:stop], queries[:CURVE_QUERIES])
            for stop in context.settings.stops[:-1]
        }
        self.tensors: dict[str, Tensor] = {"am/zero-shot/": trial.sim_am(trial.zero_shot)}
        self._keep("noise", "", trial.noise(seed))
        self._answers("zero-shot", trial.zero_shot)
        self._answers("in-context", trial.in_context)

    def way(self, way: str) -> None:
        """One way of training, with its controls, and looked at after fewer demonstrations."""
        rate, trial = self.context.rate(self.task, way), self.trial
        for stop, delta in self._stages(way, rate):
            if shorter := self.shorter.get(stop):
                for name, values in shorter.similarity(shorter.trained(delta)).items():
                    self.tensors[f"shots/{stop}/{way}/{name}"] = layer_mean(values)
        trained = trial.trained(delta)  # with all demonstrations
        self.tensors[f"gain/{way}"] = trial.log_p(trained) - trial.log_p(trial.zero_shot)
        self._answers(way, trained, delta)
        self._keep(way, "", trial.similarity(trained))
        self._keep(way, "queries", trial.similarity(trained, self.partner))
        self.tensors[f"am/{way}/"] = trial.sim_am(trained)
        dealt = self.drawn.shuffled()
        # A single demonstration keeps its answer: this would be no control.
        if way in CONTROLLED and still_right(self.drawn.demonstrations, dealt) < 1:
            self._control(self.trial, way, "labels", dealt)

    def _stages(self, way: str, rate: float) -> Iterator[tuple[int, Delta]]:
        """What was learned after fewer demonstrations, and after all: one pass of training."""
        delta: Delta | None = None
        done = 0
        for stop in self.context.settings.stops:
            pieces = self.drawn.demonstrations[done:stop]
            delta = train(self.context, self.trial, way, rate, pieces, delta)
            done = stop
            yield stop, delta

    def untrained(self) -> None:
        """The paper's ways on a model whose blocks are untrained, with the same rates."""
        shown, control = self.drawn.demonstrations, self.context.untrained_control(self.seed)
        trial = Trial(control, self.encoded, shown, self.drawn.queries)
        for way in CONTROLLED:
            self._control(trial, way, "untrained", shown)

    def _control(self, trial: Trial, way: str, control: str, pieces: Sequence[Piece]) -> None:
        """Another training at the same rate, which may diverge."""
        try:
            rate = self.context.rate(self.task, way)
            delta = train(self.context, trial, way, rate, pieces)
            trained = trial.trained(delta)
        except NotFinite:
            self.fail(way, control)
            return
        self._keep(way, control, trial.similarity(trained))
        if control == "labels":
            self._answers(f"{way}/labels", trained, delta)

    def fail(self, way: str, control: str = "") -> None:
        """Mark a training that diverged, and drop what was measured on the way to it."""
        for key in [key for key in self.tensors if way in key.split("/") and not control]:
            del self.tensors[key]
        self.tensors[f"{FAILED}{way}/{control}"] = torch.tensor(True)

    def _keep(self, way: str, control: str, values: dict[str, Tensor]) -> None:
        self.tensors |= {f"{name}/{way}/{control}": value for name, value in values.items()}

    def _answers(self, case: str, observed: Observed, delta: Delta | None = None) -> None:
        """Predictions, and readings of layers through the model as it was observed."""
        self.tensors[f"prediction/{case}"] = self.trial.predictions(observed)
        self.tensors[f"right/{case}"] = self.trial.right(observed)
        states = torch.stack([one.states for one in observed[:READ_QUERIES]])
        # Training may have changed the norm and the head that layers are read with.
        with nullcontext() if delta is None else self.context.model.edit(ApplyDelta(delta)):
            for way, lens in self.context.lenses.items():
                name = way.removeprefix("lcgd-")
                self.tensors[f"tops/{name}/{case}"] = readings(lens, states)


@torch.no_grad()
def readings(lens: Lens, states: Tensor) -> Tensor:
    """The token that each layer would predict: (query, layer, d_model) -> (query, layer)."""
    model = lens.transformer
    tops = []
    for layer, h in enumerate(states.unbind(1)):
        logits = lens.logits(h.to(model.device(layer)), layer)
        tops.append(finite_top(logits, 1, f"lens {lens.name!r}", layer)[:, 0].cpu())
    return torch.stack(tops, 1)
