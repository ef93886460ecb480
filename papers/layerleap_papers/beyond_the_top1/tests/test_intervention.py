"""The intervention on tiny models: against one injection at a time, and what must hold always."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from families import build
from layerleap.act.edits import PatchState
from layerleap.errors import BadSettings, BadText
from layerleap.lens.intervals import wilson
from layerleap.lens.lens import Lens
from layerleap.lens.readings import saturation_layers
from layerleap.lens.saturation import Saturation, saturate
from layerleap.models.discovery.probe import probe
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Batch, Sampling, iter_batches, iter_examples
from layerleap.study.result import StudyResult, Tables
from layerleap_papers.beyond_the_top1.donors import KINDS, PairSettings, find_pairs, make_trials
from layerleap_papers.beyond_the_top1.intervention import BY_DEFINITION, SECTION, intervene, words
from layerleap_papers.beyond_the_top1.trial_runs import Runner
from made_evidence import partial_evidence
from tiny_models import sentences, tiny

PLAN = PairSettings((-1, 0, 1), 2, 2, limit=60)


class Kept:
    """States of every row in memory, as `Rows` has them in a file."""

    def __init__(self, states: torch.Tensor, documents: torch.Tensor) -> None:
        self.h, self.documents, self.model = states, documents, {"name": "tiny"}
        self.n_layers, self.d_model = states.shape[1] - 1, states.shape[2]

    def __len__(self) -> int:
        return len(self.h)

    def cells(self, rows, layers):
        return self.h[rows, layers]


def texts_of(name: str) -> tuple[Transformer, list[Batch]]:
    model = tiny(name, seed=1, **({"n_layer": 8} if name == "gpt2" else {"num_hidden_layers": 8}))
    positions = "every:3" if model.kind == "next-token" else "every:7"
    sampling = Sampling(unit="document", positions=positions)
    examples = iter_examples(model, sentences(60), sampling, side="both")
    return model, list(iter_batches(model, examples, tokens_per_batch=200))


def others_of(name: str) -> tuple[Transformer, list[Batch]]:
    """Images, sound, two texts: whatever the family takes."""
    changes = {
        "whisper": {"decoder_layers": 8},
        "t5": {"num_decoder_layers": 8},
        "vit": {"num_hidden_layers": 8},
    }[name]
    model = Transformer.wrap(build(name, 1, **changes), name=f"tiny-{name}")
    batches = []
    for index in range(12):
        inputs = probe(model.model, rows=16, seed=index)
        keep = torch.zeros(model.capture(inputs, layers=[0]).states[0].shape[:2], dtype=torch.bool)
        keep[:, 0 if model.kind == "image-class" else 3] = True
        rows = int(keep.sum())
        documents = torch.arange(rows) + 16 * index
        blank = torch.zeros(rows, dtype=torch.bool)
        batches.append(
            Batch(index, inputs, keep, documents, keep.nonzero()[:, 1], blank, 16, keep.numel())
        )
    return model, batches


@cache
def pass_over(name: str):
    """Model, batches, and all that one pass shows."""
    model, batches = (others_of if name in ("whisper", "t5", "vit") else texts_of)(name)
    lens, kept = Lens(model), []
    of = saturate(
        model,
        {"logit": lens},
        batches,
        k=2,
        on_states=lambda states, _: kept.append(torch.stack([*states.values()], 1)),
    )["logit"]
    states = torch.cat(kept)
    p = torch.stack(
        [lens.logits(states[:, layer], layer).softmax(-1) for layer in range(model.n_layers + 1)], 1
    )
    best = p.topk(2).values
    evidence = partial_evidence(
        tuple(range(model.n_layers + 1)),
        of.positions,
        of.documents,
        final=of.tokens[:, 0],
        top=p.argmax(-1),
        top_prob=best[..., 0],
        second_prob=best[..., 1],
    )
    return model, lens, batches, of, evidence, Kept(states, of.documents)


@cache
def done(name: str) -> Tables:
    return intervene(*pass_over(name), PLAN)


def about(found: Tables) -> dict:
    (row,) = found["intervention_runs"]
    return row


def row(found: Tables, kind: str, offset: int) -> dict:
    rows = found["intervention"]
    return next(r for r in rows if (r["kind"], r["offset"]) == (kind, offset))


ALL = ["llama", "gpt2", "bert", "albert", "mixtral", "whisper", "t5", "vit"]


@pytest.mark.parametrize("name", ALL)
def test_what_is_true_by_definition_is_found_in_every_family(name):
    found = done(name)
    assert about(found)["pairs"] >= 20
    before = row(found, "donor", -1)
    assert (before["reads"], before["successes"]) == (0, 0)
    for offset in (0, 1):
        donor = row(found, "donor", offset)
        assert donor["reads"] == donor["pairs"] == about(found)["pairs"]
        assert donor["successes"] <= donor["stays"]
        if any(r["kind"] == "unsaturated" and r["offset"] == offset for r in found["intervention"]):
            control = row(found, "unsaturated", offset)
            assert control["reads"] == control["pairs"] <= about(found)["pairs"]
    assert "offset -1 a donor cannot succeed" in BY_DEFINITION


@pytest.mark.parametrize("name", ALL)
def test_the_own_state_changes_nothing_to_the_bit_and_never_succeeds(name):
    """A recipient settles later than any layer of an injection, so its own state cannot."""
    found = done(name)
    assert about(found)["identical"]
    assert about(found)["moved"] == 0
    for offset in (0, 1):
        assert row(found, "no-op", offset)["successes"] == 0
        assert row(found, "no-op", offset)["pairs"] == about(found)["pairs"]


@pytest.mark.parametrize("name", ["llama", "albert", "whisper", "t5", "vit"])
def test_batches_of_recipients_are_one_injection_at_a_time(name):
    """By hooks, through the whole model, one trial after the other."""
    model, lens, batches, of, evidence, states = pass_over(name)
    plan = replace(PLAN, limit=20)
    pairs = find_pairs(of, plan)
    trials = make_trials(of, evidence, pairs, plan)
    runner = Runner(model, lens, pairs, trials, states, tokens=300)
    first = 0
    where = []
    for batch in batches:
        where += [(batch, *place) for place in batch.keep.nonzero().tolist()]
        here = (pairs.recipient >= first) & (pairs.recipient < first + len(batch.documents))
        if here.any():
            runner.run(batch, here.nonzero()[:, 0], first)
        first += len(batch.documents)
    success = runner.success(evidence)
    for trial in range(0, len(trials.pair), 7):
        kind = KINDS[int(trials.kind[trial])]
        if kind == "random":
            continue
        layer, pair = int(trials.layer[trial]), int(trials.pair[trial])
        batch, text, position = where[int(pairs.recipient[pair])]
        h = states.cells(trials.source[trial], trials.layer[trial])[None]
        with model.edit(PatchState(layer, h, position, text)):
            states_after = model.capture(batch.inputs).states
        trace = [states_after[at][text, position][None] for at in range(model.n_layers + 1)]
        top = torch.cat([lens.logits(one, at).argmax(-1) for at, one in enumerate(trace)])
        settled = int(saturation_layers(top[None, :, None]))
        right = int(top[-1]) == int(pairs.token[pair])
        assert bool(success[trial]) == (right and settled == layer), kind
        assert bool(runner.stays[trial]) == (right and settled <= layer)
        assert bool(runner.reads[trial]) == (int(top[layer]) == int(pairs.token[pair]))


def test_a_random_state_is_as_long_as_the_donors_and_the_same_in_any_batch():
    model, lens, batches, of, evidence, states = pass_over("llama")
    plan = replace(PLAN, limit=20)
    pairs = find_pairs(of, plan)
    trials = make_trials(of, evidence, pairs, plan)
    found = []
    for tokens in (1, 2000):
        put_in = {}

        class Watching(Runner):
            def _patches(self, recording, slots, chosen, at, put_in=put_in):
                given = super()._patches(recording, slots, chosen, at)
                put_in.update(zip(chosen.tolist(), given, strict=True))
                return given

        runner = Watching(model, lens, pairs, trials, states, tokens=tokens)
        first = 0
        for batch in batches:
            here = (pairs.recipient >= first) & (pairs.recipient < first + len(batch.documents))
            if here.any():
                runner.run(batch, here.nonzero()[:, 0], first)
            first += len(batch.documents)
        found.append((put_in, runner))
    (few, one), (many, other) = found
    assert few.keys() == many.keys() == set(range(len(trials.pair)))
    random = (trials.kind == KINDS.index("random")).nonzero()[:, 0].tolist()
    for trial in random:
        assert torch.equal(few[trial], many[trial])
        donor = states.cells(trials.source[trial], trials.layer[trial])
        assert float(few[trial].norm()) == pytest.approx(float(donor.norm()), rel=1e-5)
        assert abs(float(torch.cosine_similarity(few[trial], donor, dim=0))) < 0.9
    assert torch.equal(one.success(evidence), other.success(evidence))
    assert torch.equal(one.stays, other.stays)


def test_the_donor_is_set_beside_the_control_on_the_same_pairs():
    found = done("llama")
    assert [c["offset"] for c in found["contrasts"]] == [0, 1]
    for contrast in found["contrasts"]:
        control = row(found, "unsaturated", contrast["offset"])
        assert contrast["pairs"] == control["pairs"]
        assert contrast["control"] == pytest.approx(control["stays"] / control["pairs"])
        assert contrast["difference"] == pytest.approx(contrast["donor"] - contrast["control"])
        share = (contrast["only_donor"] - contrast["only_control"]) / contrast["pairs"]
        assert contrast["difference"] == pytest.approx(share)
        assert contrast["low"] <= contrast["difference"] <= contrast["high"]
        assert 0 <= contrast["p"] <= 1
        assert abs(contrast["donor_margin"] - contrast["control_margin"]) < 0.1


def test_even_a_random_model_keeps_what_it_kept_elsewhere():
    """A state that survived its own text survives others more often: no sign of anything learned.

    So a trained model has to be compared with an untrained one.
    """
    at = done("llama")["contrasts"][0]
    assert at["offset"] == 0
    assert at["low"] > 0


def test_words_say_what_is_left_beyond_the_definition():
    contrast = {**done("llama")["contrasts"][0], "donor": 0.9, "control": 0.3, "p": 0.001}
    more = words({**contrast, "low": 0.4, "high": 0.7}, 30)
    assert "stays more often than" in more
    assert "90% against 30%" in more
    assert "stays less often than" in words({**contrast, "low": -0.4, "high": -0.1}, 30)
    assert "not clearly more often" in words({**contrast, "low": -0.4, "high": 0.1}, 30)
    assert "not clearly more often" in words({**contrast, "low": None, "high": None}, 30)
    assert "no state to compare" in words(None, 30)


@pytest.mark.parametrize(("p", "answer"), [(0.01, "yes"), (0.12, "cannot tell")])
def test_an_interval_above_zero_is_not_enough_if_the_test_of_pairs_is_unsure(p, answer):
    at = {
        "offset": 0,
        "value": 0.3,
        "low": 0.1,
        "high": 0.5,
        "difference": 0.3,
        "donor": 0.5,
        "control": 0.2,
        "pairs": 15,
        "p": p,
    }
    result = StudyResult("saturation", "1", "", {}, {}, {"contrasts": [at]})
    stays = SECTION.claims[1].test(result)
    assert stays.agrees == answer


def test_the_result_is_plain_values_with_counts_and_intervals():
    found = json.loads(json.dumps(done("llama")))
    whole = about(found)
    assert whole["plan_offsets"] == [-1, 0, 1]
    assert whole["lens"] == "logit"
    assert 1 <= whole["donors"] <= whole["pairs"]
    assert whole["documents"] <= whole["pairs"]
    for r in found["intervention"]:
        assert 0 <= r["low"] <= r["share"] <= r["high"] <= 1
        assert r["share"] == r["successes"] / r["pairs"]


def test_wilsons_interval_is_the_textbooks():
    z = 1.959963984540054
    for successes, n in ((0, 20), (3, 20), (20, 20), (50, 117)):
        p = successes / n
        middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5
        assert wilson(successes, n) == pytest.approx((middle - half, middle + half), abs=1e-9)


def test_evidence_or_states_of_other_rows_or_another_lens_are_refused():
    model, lens, batches, of, evidence, states = pass_over("llama")
    shuffled = replace(of, layer=of.layer.roll(1, 0))
    with pytest.raises(BadSettings, match="does not saturate where"):
        intervene(model, lens, batches, shuffled, evidence, states, PLAN)
    with pytest.raises(BadSettings, match="every layer"):
        intervene(model, lens, batches, of, evidence.at([1, 2]), states, PLAN)
    other = Kept(states.h[1:], states.documents[1:])
    with pytest.raises(BadSettings, match="same rows in the same order"):
        intervene(model, lens, batches, of, evidence, other, PLAN)


def test_batches_of_another_pass_are_refused():
    model, lens, batches, of, evidence, states = pass_over("llama")
    with pytest.raises(BadText, match="give the batches that they were read from"):
        intervene(model, lens, batches[:-1], of, evidence, states, PLAN)


def test_too_few_rows_are_refused_before_anything_runs():
    model, lens, _, of, evidence, states = pass_over("llama")
    some = torch.arange(12)
    few: Saturation = of.rows(some)
    with pytest.raises(BadText, match="expected 20"):
        intervene(
            model,
            lens,
            iter(()),
            few,
            evidence.rows(some),
            Kept(states.h[some], states.documents[some]),
            PLAN,
        )


def test_progress_counts_pairs():
    told, pairs = [], about(done("gpt2"))["pairs"]
    intervene(*pass_over("gpt2"), PLAN, progress=lambda *said: told.append(said))
    assert told[-1] == ("patching states in", pairs, pairs, "pairs")
    assert [said[1] for said in told] == sorted(said[1] for said in told)
