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

from collections.abc import Callable, Iterator, Sequence
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
from layerleap.errors import NotFinite
from layerleap.lens import finite_top
from layerleap.stream.tasks import Draw, EncodedTask, Piece, still_right
from layerleap_papers.icl_and_gradient_descent.icl_context import FAILED, IclContext, layer_mean

CURVE_QUERIES = 25  # on which similarity is measured after fewer demonstrations
READ_QUERIES = 50  # whose layers are read: each layer goes through the whole head
CONTROLLED = ("gd", "lcgd-logit")  # the paper's ways, which get the controls that cost training


@dataclass(frozen=True, eq=False)
class Observed:
    """Queries in one condition."""

    queries: list[Observation]

    @property
    def states(self) -> Tensor:
        """States at the last token: (query, layer, d_model)."""
        return torch.stack([one.states for one in self.queries])

    def predictions(self, encoded: EncodedTask) -> Tensor:
        """Answers: numbers of labels, or tokens of a mapping."""
        is_mapping = encoded.task.kind == "mapping"
        return torch.tensor([one.top if is_mapping else one.prediction for one in self.queries])

    def log_probs(self, encoded: EncodedTask, pieces: Sequence[Piece]) -> Tensor:
        """The log-probability of the right answer; of classes, among the labels: (query,)."""
        rows = torch.stack([one.labels for one in self.queries if one.labels is not None])
        if encoded.task.kind == "classes":
            rows = rows.log_softmax(1)
        labels = list(encoded.labels)
        return rows.gather(1, torch.tensor([[labels.index(p.label)] for p in pieces]))[:, 0]


def truth(encoded: EncodedTask, pieces: Sequence[Piece]) -> Tensor:
    """The right answers, as `predictions` gives them."""
    if encoded.task.kind == "mapping":
        return torch.tensor([piece.answer[0] for piece in pieces])
    labels = list(encoded.labels)
    return torch.tensor([labels.index(piece.label) for piece in pieces])


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
        return Observed(observe(self.model, prompts, labels=labels))

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

    @cached_property
    def attention(self) -> list[Tensor]:
        """What context changes of attention outputs, by query."""
        return self._pairs(self.in_context, measures.attention_update)

    @cached_property
    def scores(self) -> list[list[Tensor]]:
        """What context changes of attention scores, by query."""
        return [
            measures.score_update(after, before, measures.IN_CONTEXT)
            for after, before in zip(self.in_context.queries, self.zero_shot.queries, strict=True)
        ]

    def _pairs(self, after: Observed, update: Callable[..., Tensor]) -> list[Tensor]:
        pairs = zip(after.queries, self.zero_shot.queries, strict=True)
        return [update(one, before) for one, before in pairs]

    def similarity(
        self, trained: Observed, partner: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """SimAOU and SimAM delta by query and block; with a partner, its training's change."""
        attention = self._pairs(trained, measures.attention_update)
        scores = [
            measures.score_update(after, before)
            for after, before in zip(trained.queries, self.zero_shot.queries, strict=True)
        ]
        order = range(len(attention)) if partner is None else partner
        return {
            "aou": torch.stack(
                [
                    measures.cosine(own, attention[n])
                    for own, n in zip(self.attention, order, strict=True)
                ]
            ),
            "amd": torch.stack(
                [
                    measures.score_similarity(own, scores[n])
                    for own, n in zip(self.scores, order, strict=True)
                ]
            ),
        }

    def sim_am(self, other: Observed) -> Tensor:
        """Plain SimAM of context and another condition, by query and block."""
        pairs = zip(self.in_context.queries, other.queries, strict=True)
        return torch.stack([measures.sim_am(ours, theirs) for ours, theirs in pairs])

    def noise(self, seed: int) -> dict[str, Tensor]:
        """The same measures with isotropic noise for what training changes."""
        pairs = list(zip(self.in_context.queries, self.zero_shot.queries, strict=True))
        seeds = [1_000_003 * seed + 1000 * n for n in range(len(pairs))]
        return {
            "aou": torch.stack(
                [measures.noise_aou(*pair, n) for pair, n in zip(pairs, seeds, strict=True)]
            ),
            "amd": torch.stack(
                [measures.noise_am(*pair, n) for pair, n in zip(pairs, seeds, strict=True)]
            ),
        }


def lessons(encoded: EncodedTask, pieces: Sequence[Piece]) -> list[Demonstration]:
    """Demonstrations to train on, in the order in which they are shown."""
    return [Demonstration(encoded.demonstration(one), len(one.answer)) for one in pieces]


def train(
    context: IclContext,
    model: Transformer,
    way: str,
    rate: float,
    demonstrations: Sequence[Demonstration],
    start: Delta | None = None,
) -> Delta:
    """What a way of training learns."""
    s, is_plain = context.settings, way == "gd"
    lens = None if is_plain or model is not context.model else context.lenses[way]
    return learn(
        model,
        demonstrations,
        how="full" if is_plain else "layer-causal",
        learning_rate=rate,
        parameters=s.chosen_parameters,
        tokens=s.tokens,  # type: ignore[arg-type]
        lens=lens,
        start=start,
    ).delta


def measure(context: IclContext, task: str, seed: int) -> dict[str, Tensor]:
    """All measurements of one task and seed."""
    drawn = context.draw(task, seed)
    context.require_queries(drawn)
    cell = _Cell(context, task, seed, drawn)
    cell.references()
    ways = context.settings.ways
    for number, way in enumerate(ways):
        context.progress(f"training on {task}, seed {seed}", number, len(ways), "ways")
        try:
            cell.way(way)
        except NotFinite:
            cell.fail(way)
    cell.untrained()
    return cell.tensors


class _Cell:
    """One task and seed in progress."""

    def __init__(self, context: IclContext, task: str, seed: int, drawn: Draw) -> None:
        self.context, self.task, self.seed, self.drawn = context, task, seed, drawn
        self.encoded = context.encoded[task]
        self.trial = Trial(context.model, self.encoded, drawn.demonstrations, drawn.queries)
        self.partner = measures.shuffled(len(drawn.queries), seed)
        self.tensors: dict[str, Tensor] = {}

    def references(self) -> None:
        """Zero-shot and in context, noise, and SimAM before any training."""
        trial = self.trial
        self._answers("zero-shot", trial.zero_shot)
        self._answers("in-context", trial.in_context)
        for measure_, values in trial.noise(self.seed).items():
            self.tensors[f"{measure_}/noise/"] = values
        self.tensors["am/zero-shot/"] = trial.sim_am(trial.zero_shot)

    def way(self, way: str) -> None:
        """One way of training, with its controls, and looked at after fewer demonstrations."""
        rate = self.context.rate(self.task, way)
        trained: Observed | None = None
        for stop, delta in self._stages(way, rate):
            if stop < len(self.drawn.demonstrations):
                self._curve(way, stop, delta)
            else:
                trained = self.trial.trained(delta)
                gain = self._log_p(trained) - self._log_p(self.trial.zero_shot)
                self.tensors[f"gain/{way}"] = gain
                self._answers(way, trained, delta)
        assert trained is not None
        self._keep(way, "", self.trial.similarity(trained))
        self._keep(way, "queries", self.trial.similarity(trained, self.partner))
        self.tensors[f"am/{way}/"] = self.trial.sim_am(trained)
        if way in CONTROLLED:
            self._labels(way, rate)

    def _labels(self, way: str, rate: float) -> None:
        """The same training on demonstrations with shuffled answers."""
        dealt = self.drawn.shuffled()
        if still_right(self.drawn.demonstrations, dealt) == 1:
            return  # a single demonstration keeps its answer: this would be no control
        others = lessons(self.encoded, dealt)
        try:
            delta = train(self.context, self.context.model, way, rate, others)
            trained = self.trial.trained(delta)
        except NotFinite:
            self.fail(way, "labels")
            return
        self._keep(way, "labels", self.trial.similarity(trained))
        self._answers(f"{way}/labels", trained, delta)

    def _log_p(self, observed: Observed) -> Tensor:
        """The log-probability of each query's right answer."""
        return observed.log_probs(self.encoded, self.drawn.queries)

    def fail(self, way: str, control: str = "") -> None:
        """Mark a training that diverged, and drop what was measured on the way to it."""
        for key in [key for key in self.tensors if way in key.split("/") and not control]:
            del self.tensors[key]
        self.tensors[f"{FAILED}{way}/{control}"] = torch.tensor(True)

    def untrained(self) -> None:
        """The paper's ways on a model whose blocks are untrained, with the same rates."""
        drawn, control = self.drawn, self.context.untrained_control(self.seed)
        trial = Trial(control, self.encoded, drawn.demonstrations, drawn.queries)
        for way in CONTROLLED:
            try:
                rate = self.context.rate(self.task, way)
                own = lessons(self.encoded, drawn.demonstrations)
                trained = trial.trained(train(self.context, control, way, rate, own))
            except NotFinite:
                self.fail(way, "untrained")
                continue
            self._keep(way, "untrained", trial.similarity(trained))

    def _stages(self, way: str, rate: float) -> Iterator[tuple[int, Delta]]:
        """What was learned after fewer demonstrations, and after all: one pass of training."""
        own, done = lessons(self.encoded, self.drawn.demonstrations), 0
        delta: Delta | None = None
        for stop in self.context.settings.stops:
            delta = train(self.context, self.context.model, way, rate, own[done:stop], delta)
            done = stop
            yield stop, delta

    def _curve(self, way: str, stop: int, delta: Delta) -> None:
        some = self.drawn.queries[:CURVE_QUERIES]
        shown = self.drawn.demonstrations[:stop]
        key = f"curve-{stop}"
        if key not in self.__dict__:  # context is the same for all ways
            self.__dict__[key] = Trial(self.context.model, self.encoded, shown, some)
        trial: Trial = self.__dict__[key]
        for measure_, values in trial.similarity(trial.trained(delta)).items():
            self.tensors[f"shots/{stop}/{way}/{measure_}"] = layer_mean(values)

    def _keep(self, way: str, control: str, values: dict[str, Tensor]) -> None:
        for measure_, value in values.items():
            self.tensors[f"{measure_}/{way}/{control}"] = value

    def _answers(self, case: str, observed: Observed, delta: Delta | None = None) -> None:
        """Predictions, and readings of layers through the model as it was observed."""
        predictions = observed.predictions(self.encoded)
        self.tensors[f"prediction/{case}"] = predictions
        self.tensors[f"right/{case}"] = predictions == truth(self.encoded, self.drawn.queries)
        model, states = self.context.model, observed.states[:READ_QUERIES]
        # Training may have changed the norm and the head that layers are read with.
        with nullcontext() if delta is None else model.edit(ApplyDelta(delta)):
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
