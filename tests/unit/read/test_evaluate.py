"""`evaluate`: a bank's scores on text it was not fitted on."""

import json
from dataclasses import replace

import pytest
import torch
from contract_bank import bank_of
from tiny_models import sentences, tiny

from layerleap.errors import BadSettings, BadText, WrongModel
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import fit
from layerleap.maps.linear import LinearMap
from layerleap.models.transformer import Transformer
from layerleap.read.evaluate import Evaluation, evaluate
from layerleap.read.lens import Lens
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Sampling

TEXTS = sentences(60)
SAMPLING = Sampling(unit="document", positions="every:7")
METRICS = ("precision@1", "precision@5", "precision@10", "surprisal", "kl", "r2")


@pytest.fixture(scope="module", params=["llama", "bert"])
def model(request) -> Transformer:
    return tiny(request.param)


@pytest.fixture(scope="module")
def evaluation(model) -> Evaluation:
    return evaluate(model, bank_of(model), TEXTS, SAMPLING)


def values(evaluation: Evaluation, name: str, metric: str) -> list[float]:
    """One value per layer."""
    rows = [row for row in evaluation.scores if (row["map"], row["metric"]) == (name, metric)]
    assert [row["layer"] for row in rows] == list(range(evaluation.n_layers + 1))
    return [row["value"] for row in rows]


def identity_bank(model: Transformer) -> ShortcutBank:
    maps = [
        LinearMap(src, model.n_layers, weight=torch.eye(model.d_model))
        for src in range(model.n_layers)
    ]
    return ShortcutBank(
        maps, model=model.identity.to_dict(), n_layers=model.n_layers, d_model=model.d_model
    )


def test_every_map_layer_and_metric_has_a_row_with_interval_and_sizes(evaluation):
    keys = [(row["map"], row["metric"], row["layer"]) for row in evaluation.scores]
    assert len(keys) == len(set(keys)) == 2 * len(METRICS) * (evaluation.n_layers + 1)
    assert {metric for _, metric, _ in keys} == set(METRICS)
    assert {name for name, *_ in keys} == {"id", "mat"}
    for row in evaluation.scores:
        assert row["low"] <= row["value"] + 1e-12
        assert row["value"] <= row["high"] + 1e-12
        assert (row["rows"], row["documents"]) == (evaluation.n_rows, evaluation.n_documents)


def test_scores_are_those_of_the_rows_read_directly(model, evaluation):
    bank, last = bank_of(model), model.n_layers
    lens = Lens(model, bank)
    right, kl, states = [], [], []
    for batch in batches_of(model, TEXTS, SAMPLING, side="held-out"):
        h = model.capture(batch.inputs, keep=batch.keep).states
        own, read = model.logits(h[last]).double(), lens.logits(h[1], 1).double()
        right.append(own.argmax(-1) == read.argmax(-1))
        p = own.softmax(-1)
        kl.append((p * (own.log_softmax(-1) - read.log_softmax(-1))).sum(-1))
        states.append(torch.stack([bank[1, last](h[1]), h[last]]).double())
    predicted, final = torch.cat(states, dim=1)
    spread = (final - final.mean(0)).square().sum(0)
    r2 = (1 - (predicted - final).square().sum(0) / spread).mean()
    assert evaluation.n_rows == len(torch.cat(right))
    actual = {row["metric"]: row["value"] for row in evaluation.at(1) if row["map"] == "mat"}
    assert actual["precision@1"] == pytest.approx(torch.cat(right).double().mean().item())
    assert actual["kl"] == pytest.approx(torch.cat(kl).mean().item(), rel=1e-4)
    assert actual["r2"] == pytest.approx(r2.item(), rel=1e-4)


def test_a_bank_of_identity_maps_equals_the_logit_lens(model):
    actual = evaluate(model, identity_bank(model), TEXTS, SAMPLING)
    for metric in METRICS:
        assert values(actual, "mat", metric) == pytest.approx(
            values(actual, "id", metric), rel=1e-6
        )


def test_the_last_layer_has_its_known_values(model, evaluation):
    p_max = [
        model.logits(model.capture(batch.inputs, keep=batch.keep).states[model.n_layers])
        .softmax(-1)
        .amax(-1)
        for batch in batches_of(model, TEXTS, SAMPLING, side="held-out")
    ]
    surprisal = -torch.cat(p_max).log().mean().item()
    expected = {f"precision@{k}": 1.0 for k in (1, 5, 10)} | {"kl": 0.0, "r2": 1.0}
    expected["surprisal"] = pytest.approx(surprisal, rel=1e-5)
    for name in ("id", "mat"):
        rows = {row["metric"]: row for row in evaluation.at(-1) if row["map"] == name}
        assert {metric: row["value"] for metric, row in rows.items()} == {
            **expected, "kl": pytest.approx(0.0, abs=1e-6),
        }  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 50, 10**6])
@pytest.mark.parametrize("side", ["right", "left"])
def test_neither_batch_size_nor_padding_changes_it(model, evaluation, tokens, side):
    family = model.identity.name.removeprefix("tiny-")
    padded = tiny(family, side=side)
    actual = evaluate(padded, bank_of(padded), TEXTS, SAMPLING, tokens_per_batch=tokens)
    for row, expected in zip(actual.scores, evaluation.scores, strict=True):
        for key in ("value", "low", "high"):
            assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5)
        assert {**row, "value": 0, "low": 0, "high": 0} == {
            **expected, "value": 0, "low": 0, "high": 0,
        }  # fmt: skip


def test_only_documents_held_out_of_the_fit_are_read_by_default(model, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXTS))
    sampling = replace(SAMPLING, held_out=0.4, seed=3)
    bank = fit(model, path, sampling)
    actual = evaluate(model, bank, path)  # sampled like the bank
    both = evaluate(model, bank, path, side="both")
    assert actual.n_documents + bank.data["documents"] == both.n_documents == len(TEXTS)
    assert (actual.side, actual.fitted_on, both.fitted_on) == ("held-out", False, True)
    assert "held-out documents" in str(actual)
    assert "fitted on some of these documents" not in str(actual)
    assert "fitted on some of these documents" in str(both)
    smaller, other = (replace(sampling, **change) for change in ({"held_out": 0.2}, {"seed": 4}))
    assert not evaluate(model, bank, path, smaller).fitted_on
    assert evaluate(model, bank, path, other).fitted_on


def test_a_bank_fitted_on_everything_needs_another_text(model):
    bank = fit(model, TEXTS, replace(SAMPLING, held_out=0.0))
    with pytest.raises(BadSettings, match=r"held_out 0; read all documents .* \(side='both'\)"):
        evaluate(model, bank, sentences(40, seed=9))
    actual = evaluate(model, bank, sentences(40, seed=9), side="both")
    assert actual.n_documents == 40


def test_too_few_documents_are_a_clear_error(model):
    held_out = [any(batches_of(model, [text], SAMPLING, side="held-out")) for text in TEXTS]
    with pytest.raises(BadText, match="the text is empty, or none of it is held out"):
        evaluate(model, bank_of(model), [TEXTS[held_out.index(False)]], SAMPLING)
    with pytest.raises(BadText, match=r"given texts gives \d+ rows of 1 document; an interval"):
        evaluate(model, bank_of(model), [TEXTS[held_out.index(True)]], SAMPLING)


def test_the_bank_must_belong_to_the_model_and_reach_the_last_layer_from_every_layer(model):
    other = tiny(model.identity.name.removeprefix("tiny-"), seed=1)
    with pytest.raises(WrongModel, match="fit a bank"):
        evaluate(model, bank_of(other), TEXTS)
    whole = identity_bank(model)
    some = whole.changed(maps=[m for m in whole.maps.values() if m.src != 1])
    with pytest.raises(BadSettings, match=r"no map to the last layer from layers \[1\]"):
        evaluate(model, some, TEXTS)


def test_a_tuned_bank_is_called_tuned(model):
    tuned = identity_bank(model).changed(settings={"lens": "tuned"})
    actual = evaluate(model, tuned, TEXTS, SAMPLING)
    assert {row["map"] for row in actual.scores} == {"id", "tuned"}
    assert repr(actual).startswith(f"Evaluation(id and tuned of {model.identity.name} on given")


def test_it_is_read_by_layer_as_a_table_as_json_and_as_text(model, evaluation):
    assert evaluation.at(-1) == evaluation.at(model.n_layers)
    with pytest.raises(BadSettings, match=f"layer {model.n_layers + 1} does not exist"):
        evaluation.at(model.n_layers + 1)
    frame = evaluation.to_pandas()
    assert len(frame) == len(evaluation.scores)
    assert {"map", "layer", "metric", "value", "low", "high", "rows", "documents"} == {*frame}
    reported = json.loads(json.dumps(evaluation.to_dict(), allow_nan=False))
    assert reported["scores"] == evaluation.scores
    assert reported["model"] == model.identity.to_dict()
    lines = str(evaluation).splitlines()
    assert f"{evaluation.n_rows} rows from {evaluation.n_documents} held-out documents" in lines[0]
    assert lines[1].split() == ["layer", "map", "precision@1", "surprisal", "kl", "r2"]
    assert len(lines) == 2 + 2 * (model.n_layers + 1)
    assert lines[-1].split()[:2] == [str(model.n_layers), "mat"]
    assert "1.000 [1.000, 1.000]" in lines[-1]


def test_progress_counts_texts(model):
    reported = []
    evaluate(
        model,
        bank_of(model),
        TEXTS,
        SAMPLING,
        n_texts=8,
        progress=lambda *step: reported.append(step),
    )
    assert reported[-1] == ("evaluating", 8, 8)
