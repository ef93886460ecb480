"""Exits replayed from one pass, against running each text again and stopping for real."""

import pytest
import torch

from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.replay import replay
from layerleap.act.exits.rules import Entropy, Fixed, Gap, Patience, Similarity, TopProbability
from layerleap.lens.lens import Lens
from layerleap.lens.metrics import Distribution
from layerleap.lens.scores import score
from layerleap.maps.fit import fit
from layerleap.models.hooks.recording import record
from layerleap.stream.examples import Sampling, collate, iter_batches, iter_examples
from tiny_models import sentences, tiny

DOCUMENTS = sentences(60)


@torch.no_grad()
def exit_by_running(transformer, lens, example, rule):
    """Block by block, alone, looking only at what is known so far; the layer where it stops."""
    recording = record(transformer, collate(transformer, [example]).inputs)
    h, (place,) = recording.states[0], example.keep
    columns = {name: [] for name in ("top", "top_prob", "second_prob", "entropy", "cosine")}
    for layer in range(transformer.n_layers):
        if layer:
            before, h = h, recording.run(h, layer - 1, layer)
        cosine = torch.cosine_similarity(before[:, place], h[:, place]) if layer else None
        read = Distribution(lens.logits(h[:, place], layer))
        actual = (read.top, read.top_prob, read.second(), read.entropy)
        for name, value in zip(columns, (*actual, cosine), strict=True):
            columns[name].append(torch.tensor([torch.nan]) if value is None else value)
        evidence = Evidence(
            **{name: torch.stack(values, 1) for name, values in columns.items()},
            position=torch.tensor([place]),
            document=torch.tensor([0]),
            layers=tuple(range(layer + 1)),
        )
        if rule.stops(evidence)[0, -1]:
            return layer
    return transformer.n_layers


def compare(transformer, lens, examples, rules):
    """Exit layers by replay and by running, and how many different ones there are."""
    ordered = [e for b in iter_batches(transformer, examples) for e in in_order(b, examples)]
    scores = score(transformer, {"x": lens}, iter_batches(transformer, examples))
    evidence = Evidence.from_scores(scores, "x")
    exit_layers = set()
    for rule in rules:
        replayed = replay(rule, evidence).layer.tolist()
        again = [exit_by_running(transformer, lens, example, rule) for example in ordered]
        assert replayed == again, str(rule)
        exit_layers |= set(replayed)
    return exit_layers


def in_order(batch, examples):
    """The examples of a batch in its order."""
    by_ids = {(example.ids, example.keep): example for example in examples}
    for ids, mask, keep in zip(
        batch.inputs["input_ids"], batch.inputs["attention_mask"], batch.keep, strict=True
    ):
        key = tuple(ids[: int(mask.sum())].tolist()), tuple(keep.nonzero()[:, 0].tolist())
        yield by_ids[key]


def between(values):
    """A threshold half-way between two values seen, so that rounding decides nothing."""
    ordered = values[:, 1:-1].flatten().sort().values
    middle = len(ordered) // 2
    return (ordered[middle - 1] + ordered[middle]).item() / 2


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gemma2"])
@pytest.mark.parametrize("through", ["logit", "linear"])
def test_replay_exits_where_a_run_of_its_own_would(name, through):
    transformer = tiny(name)
    bank = fit(transformer, DOCUMENTS) if through == "linear" else None
    lens = Lens(transformer, bank)
    actual = iter_examples(transformer, DOCUMENTS, Sampling(), side="held-out", n_texts=12)
    examples = list({(e.ids, e.keep): e for e in actual}.values())
    scores = score(transformer, {"x": lens}, iter_batches(transformer, examples))
    middle = {key: between(getattr(scores, key)["x"]) for key in ("top_prob", "entropy")}
    gap, cosine = between(scores.top_prob["x"] - scores.second_prob["x"]), between(scores.cosine)
    rules = [
        Gap(-1.112, 6.0),
        Gap(gap / 0.9, 6.0),
        Gap(1.112, 6.0),
        TopProbability(middle["top_prob"]),
        Entropy(middle["entropy"]),
        Similarity(cosine),
        Patience(1),
        Patience(2),
        Fixed(2),
    ]
    exit_layers = compare(transformer, lens, examples, rules)
    assert exit_layers == {1, 2, 3}  # every layer is somebody's exit, or the test shows little


@pytest.mark.real
def test_replay_exits_where_a_run_of_its_own_would_on_a_real_model(smollm2):
    lens = Lens(smollm2)
    actual = iter_examples(smollm2, "wikipedia", Sampling(), side="held-out", n_texts=3)
    rules = [Gap(0.3, 15.0), TopProbability(0.5), Patience(3), Similarity(0.9)]
    exit_layers = compare(smollm2, lens, list(actual), rules)
    assert len(exit_layers) > 1
