"""`evaluate`: a bank's scores on text it was not fitted on."""

import csv
import json
import math
from dataclasses import replace

import pytest
import torch

from contract_bank import bank_of
from layerleap.errors import BadSettings, BadText, WrongModel
from layerleap.lens.evaluate import Evaluation, evaluate
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import fit
from layerleap.maps.linear import LinearMap, TunedMap
from layerleap.models.transformer import Transformer
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Sampling
from tiny_models import sentences, tiny

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
    assert {name for name, *_ in keys} == {"logit", "linear"}
    for row in evaluation.scores:
        assert row["low"] <= row["value"] + 1e-12
        assert row["value"] <= row["high"] + 1e-12
        assert (row["rows"], row["documents"]) == (evaluation.n_rows, evaluation.n_documents)


@torch.no_grad()
def reference(model: Transformer, maps: list[torch.Tensor | None]) -> list[dict[str, float]]:
    """All metrics of one map per layer, written out row by row."""
    rows: list[list[torch.Tensor]] = []
    for batch in batches_of(model, TEXTS, SAMPLING, side="held-out"):
        h = model.capture(batch.inputs, keep=batch.keep).states
        rows += [[h[layer][row] for layer in range(model.n_layers + 1)] for row in range(len(h[0]))]
    scores = []
    for layer, weight in enumerate(maps):
        right = {1: 0, 5: 0, 10: 0}
        surprisal = kl = 0.0
        carried = [row[layer] if weight is None else row[layer] @ weight for row in rows]
        for row, state in zip(rows, carried, strict=True):
            own = model.logits(row[-1][None])[0].double()
            read = model.logits(state[None])[0].double()
            p, q = own.softmax(0), read.softmax(0)
            top = int(read.argmax())
            order = own.argsort(descending=True).tolist()
            for k in right:
                right[k] += top in order[:k]
            surprisal -= math.log(p[top])
            kl += float((p * (p / q).log()).sum())
        final, predicted = torch.stack([r[-1] for r in rows]), torch.stack(carried)
        spread = (final - final.mean(0)).double().square().sum(0)
        error = (final - predicted).double().square().sum(0)
        scores.append(
            {f"precision@{k}": count / len(rows) for k, count in right.items()}
            | {"surprisal": surprisal / len(rows), "kl": kl / len(rows)}
            | {"r2": float((1 - error / spread).mean())}
        )
    return scores


def test_every_score_equals_a_reference_written_out_by_hand(model, evaluation):
    bank, last = bank_of(model), model.n_layers
    expected = {
        "logit": reference(model, [None] * last),
        "linear": reference(model, [bank.maps[src, last].weight for src in range(last)]),
    }
    for name, layers in expected.items():
        for metric in METRICS:
            actual = values(evaluation, name, metric)[:-1]
            wanted = [scores[metric] for scores in layers]
            assert actual == pytest.approx(wanted, rel=1e-4, abs=1e-5), (name, metric)


def test_a_bank_of_identity_maps_equals_the_logit_lens(model):
    actual = evaluate(model, identity_bank(model), TEXTS, SAMPLING)
    for metric in METRICS:
        assert values(actual, "linear", metric) == pytest.approx(
            values(actual, "logit", metric), rel=1e-6
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
    for name in ("logit", "linear"):
        rows = {row["metric"]: row for row in evaluation.at(-1) if row["map"] == name}
        assert {metric: row["value"] for metric, row in rows.items()} == {
            **expected,
            "kl": pytest.approx(0.0, abs=1e-6),
        }


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
            **expected,
            "value": 0,
            "low": 0,
            "high": 0,
        }


def test_only_documents_that_were_not_fitted_on_are_read_by_default(model, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXTS))
    sampling = replace(SAMPLING, held_out=0.4, seed=3)
    bank = fit(model, path, sampling)
    actual = evaluate(model, bank, path)  # sampled like the bank
    both = evaluate(model, bank, path, side="both", keep_fitted=True)
    assert actual.n_documents + bank.data["documents"] == both.n_documents == len(TEXTS)
    assert (actual.side, actual.fitted_on, both.fitted_on) == ("both", False, True)
    assert actual.left_out == bank.data["documents"]
    assert "unseen documents" in str(actual)
    held_out = evaluate(model, bank, path, side="held-out")
    assert (held_out.scores, held_out.left_out) == (actual.scores, 0)
    assert "held-out documents" in str(held_out)
    assert "fitted on some of these documents" not in str(actual)
    assert "fitted on some of these documents" in str(both)
    assert evaluate(model, bank, path, side="fit").fitted_on


def test_documents_the_bank_was_fitted_on_are_recognised_in_any_text_and_left_out(model):
    """They were read as if they were new: another seed, or another name of the text, hid them."""
    bank = fit(model, TEXTS[:40], replace(SAMPLING, held_out=0.0))
    assert len(bank.documents) == 40
    actual = evaluate(model, bank, [*TEXTS[20:60], *sentences(5, seed=9)])
    assert (actual.n_documents, actual.left_out, actual.fitted_on) == (25, 20, False)
    assert "20 documents that a bank was fitted on were left out" in str(actual)
    with pytest.raises(BadText, match=r"\(40 more were left out: a bank was fitted on them\)"):
        evaluate(model, bank, TEXTS[:40])


def test_a_saved_bank_still_knows_its_documents_and_an_unknown_one_is_named(model, tmp_path):
    bank = fit(model, TEXTS[:40], SAMPLING)
    bank.save_pretrained(tmp_path / "bank")
    again = ShortcutBank.from_pretrained(tmp_path / "bank")
    assert again.documents == bank.documents
    assert 0 < len(again.documents) < 40
    assert evaluate(model, again, TEXTS, SAMPLING).unknown == ()
    actual = evaluate(model, identity_bank(model), TEXTS, SAMPLING)
    assert actual.unknown == ("linear",)
    assert "linear: which documents it was fitted on is not known" in str(actual)


def test_several_banks_are_compared_on_the_same_rows(model, tmp_path):
    one, two = fit(model, TEXTS[:30], SAMPLING), identity_bank(model)
    two.save_pretrained(tmp_path / "plain")
    named = evaluate(model, {"mine": one, "plain": two}, TEXTS, SAMPLING)
    listed = evaluate(model, [one, tmp_path / "plain", two], TEXTS, SAMPLING)
    assert named.maps == ["logit", "mine", "plain"]
    assert listed.maps == ["logit", "linear", "plain", "linear 2"]
    alone = evaluate(model, one, TEXTS, SAMPLING, side="held-out")
    for metric in METRICS:
        assert values(named, "mine", metric) == pytest.approx(values(alone, "linear", metric))
        assert values(named, "plain", metric) == pytest.approx(values(named, "logit", metric))
    assert one.evaluate(model, TEXTS, SAMPLING, side="held-out").scores == alone.scores


def test_wrong_choices_are_refused(model):
    with pytest.raises(
        BadSettings, match=r"side is 'heldout'; expected .*'fit', 'held-out', 'both'"
    ):
        evaluate(model, bank_of(model), TEXTS, SAMPLING, side="heldout")
    with pytest.raises(BadSettings, match="expected at least one"):
        evaluate(model, [], TEXTS, SAMPLING)
    bank = fit(model, TEXTS, replace(SAMPLING, held_out=0.0))
    with pytest.raises(BadSettings, match=r"held_out 0; read all documents .* \(side='both'\)"):
        evaluate(model, bank, sentences(40, seed=9), side="held-out")
    assert evaluate(model, bank, sentences(40, seed=9)).side == "both"


def test_the_report_holds_page_figure_and_numbers(model, evaluation, tmp_path):
    page = evaluation.report(tmp_path / "scores")
    text = page.read_text(encoding="utf8")
    assert "<svg" in text
    assert model.identity.name in text
    assert (page.parent / "evaluation.svg").read_text(encoding="utf8").startswith("<svg")
    with (page.parent / "evaluation.csv").open(newline="", encoding="utf8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(evaluation.scores)
    assert float(rows[0]["value"]) == evaluation.scores[0]["value"]
    content = json.loads((page.parent / "evaluation.json").read_text(encoding="utf8"))
    assert content == json.loads(json.dumps(evaluation.to_dict()))
    assert evaluation._repr_html_() in text


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
    maps = [TunedMap(m.src, m.dst, m.weight) for m in identity_bank(model).maps.values()]
    tuned = identity_bank(model).changed(maps=maps)
    actual = evaluate(model, tuned, TEXTS, SAMPLING)
    assert {row["map"] for row in actual.scores} == {"logit", "tuned"}
    assert repr(actual).startswith(f"Evaluation(logit and tuned of {model.identity.name} on given")


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
    words = " ".join(str(evaluation).split())
    assert f"{evaluation.n_rows} rows from {evaluation.n_documents} held-out documents" in words
    assert all(note in words for note in evaluation.notes)
    head = next(line for line in lines if line.startswith("layer"))
    assert head.split() == ["layer", "map", "P@1,", "%", "P@10,", "%", "surprisal", "KL", "R2"]
    rows = [line for line in lines if line[:6].strip().isdigit()]
    assert len(rows) == 2 * (model.n_layers + 1)
    assert "all numbers: to_pandas()" in words
    assert rows[-1].split()[:2] == [str(model.n_layers), "linear"]
    assert "100 100 to 100" in rows[-1]


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
