"""The study of stitching on tiny models."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import stitching_studies
import torch
from stitching_studies import SMALL

import layerleap as ll
from families import build
from golden import differences
from intervals import require_inside
from layerleap.errors import BadSettings, BadText
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Sampling
from layerleap.study.claims import Answer
from layerleap.study.result import StudyResult
from layerleap.study.texts import trained_on
from layerleap_papers.stitching import STUDY, StitchingSettings
from layerleap_papers.stitching.pairs import best, token_losses
from layerleap_papers.stitching.stitching_context import StitchingContext
from tiny_models import tiny, tokenizer


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return stitching_studies.files()


@pytest.fixture(scope="module")
def models() -> tuple[Transformer, Transformer, Transformer]:
    return stitching_studies.models()


@pytest.fixture(scope="module")
def result() -> StudyResult:
    return stitching_studies.made()


def test_a_small_study_measures_what_it_did_before(result: StudyResult) -> None:
    assert not differences(result, "stitching")


@pytest.mark.parametrize(
    ("model", "text", "changes", "warns"),
    [
        ("small-lm", "wikipedia", {}, False),
        ("small-lm", "wikipedia", {"seed": 3}, True),
        ("small-lm", "wikipedia", {"held_out": 0.5}, True),
        ("small-lm", "news", {"seed": 3}, False),
        ("smollm2", "wikipedia", {"seed": 3}, False),
        ("mine", "wikipedia", {"seed": 3}, False),
    ],
)
def test_reading_what_a_bundled_model_was_trained_on_is_said(model, text, changes, warns):
    notes = list(trained_on(model, text, Sampling(**changes)))
    assert len(notes) == warns
    assert all("it has seen" in note for note in notes)


def test_every_table_is_there_and_plain_data(result, tmp_path):
    assert not result.failed
    assert StudyResult.load(result.save(tmp_path / "study.json")).tables == result.tables
    kernels = {"embedding", "folded", "least-squares", "random", "identity"}
    assert {row["kernel"] for row in result.rows("costs")} == kernels
    assert len(result.rows("costs")) == 5 * 9
    assert {row["kernel"] for row in result.rows("accuracy")} == kernels - {"identity"}
    assert [row["role"] for row in result.data] == ["fit", "read", "fit kernels", "classify"]
    assert result.settings["other"] == "b"


def test_a_rotated_copy_costs_nothing_at_the_same_layer(result):
    """The kernel is the rotation, so the stitched model is the second one."""
    for kernel in ("embedding", "least-squares"):
        for row in result.rows("costs", kernel=kernel):
            if row["layer_a"] == row["layer_b"]:
                assert row["value"] == pytest.approx(0, abs=1e-3), kernel
    for row in best(result, "embedding"):
        assert row["value"] <= 1e-3
    own, first, _ = result.rows("alone")
    assert own["value"] == pytest.approx(first["value"], abs=1e-6)


def test_leads_are_differences_of_costs_at_the_same_positions(result):
    for row in result.rows("leads"):
        place = {"layer_a": row["layer_a"], "layer_b": row["layer_b"]}
        other = result.row("costs", kernel=row["against"], **place)
        embedding = result.row("costs", kernel="embedding", **place)
        assert row["value"] == pytest.approx(other["value"] - embedding["value"], abs=1e-9)
        assert row["low"] <= row["value"] <= row["high"]


def test_costs_are_those_of_stitched_models(result, models, files):
    """The sweep over recorded passes gives what `ll.stitch` gives, text by text."""
    a, b, _ = models
    context = StitchingContext(
        a,
        StitchingSettings(other=b, classifier=None, **files, **SMALL).resolved(a),
        Path(),
        lambda *_: None,
    )
    stitched = ll.stitch(a, 2, b, 0)
    sums, count = 0.0, 0
    for batch in context.batches():
        logits = stitched(batch.inputs)[batch.keep]
        known = batch.gold >= 0
        losses = torch.nn.functional.cross_entropy(
            logits[known], batch.gold[known], reduction="none"
        )
        sums, count = sums + float(losses.sum()), count + int(known.sum())
    row = result.row("costs", kernel="embedding", layer_a=2, layer_b=0)
    assert row["rows"] == count
    assert row["loss"] == pytest.approx(sums / count, rel=1e-4)


def test_the_translated_classifier_agrees_with_the_splice(result):
    rows = result.rows("translation")
    assert len(rows) == 3
    for row in rows:
        assert row["gap"] < 1e-4 * max(1, row["size"])
        assert row["same"] == 1


def test_a_layer_is_chosen_on_one_half_and_judged_on_the_other(result):
    chosen = result.rows("chosen")
    assert {row["kernel"] for row in chosen} == {"embedding", "folded", "least-squares", "random"}
    assert all(row["rows"] == SMALL["n_reviews"] // 2 for row in chosen)
    assert result.tables["classifier"][0]["rows"] == SMALL["n_reviews"]


def test_claims_are_each_answered_or_said_to_be_untested(result):
    assert len(result.claims) == 5
    assert {row["agrees"] for row in result.claims} <= set(get_args(Answer))
    assert all(row["seen"] for row in result.claims)


def test_no_claim_is_decided_by_a_value_without_an_interval(result):
    ends = {"low": -1e9, "high": 1e9, "lead_low": -1e9, "lead_high": 1e9}
    tables = {
        name: [{**row, **{key: ends[key] for key in ends if key in row}} for row in rows]
        for name, rows in result.tables.items()
    }
    wide = replace(result, tables=tables)
    for section in STUDY.sections:
        for claim in section.claims:
            if "ranslat" not in claim.text:  # logits of the same texts are compared, not sampled
                assert claim.test(wide).agrees in ("cannot tell", "not tested"), claim.text


def test_a_translation_that_says_something_else_is_not_called_the_same(result):
    claim = next(c for s in STUDY.sections for c in s.claims if "ranslat" in c.text)
    assert claim.test(result).agrees == "yes"
    rows = [{**row, "gap": row["size"] / 50} for row in result.rows("translation")]
    wrong = replace(result, tables={**result.tables, "translation": rows})
    assert claim.test(wrong).agrees == "no"
    section = next(s for s in STUDY.sections if s.key == "classifier")
    assert any("do NOT agree" in str(found) for found in section.findings(wrong))


def test_findings_and_the_page_name_both_models(result, tmp_path):
    text = " ".join(row["text"] for row in result.findings)
    assert "layer" in text
    assert " b " in f" {text} "
    page = result.report(tmp_path).read_text(encoding="utf8")
    assert "The best partner of each layer" in page
    assert "Accuracy over the layer of the seam" in page


def test_models_of_other_widths_have_no_identity_kernel(files):
    a, b = tiny("llama"), tiny("llama", seed=1, hidden_size=16)
    result = STUDY(a, other=b, classifier=None, text=files["text"], **SMALL)
    kernels = {"embedding", "folded", "least-squares", "random"}
    assert {row["kernel"] for row in result.rows("costs")} == kernels
    assert [row["key"] for row in result.sections] == ["pairs"]
    assert any("differ in width" in row["seen"] for row in result.claims)


def test_a_narrow_first_model_has_no_translation_and_says_why(files, models):
    wide = Transformer.wrap(build("llama_text", 1, num_labels=2), tokenizer(), name="wide")
    a = tiny("llama", hidden_size=16)
    result = STUDY(a, other=tiny("llama", seed=1), classifier=wide, **files, **SMALL)
    assert result.rows("translation") == []
    assert any("no left inverse" in note for note in result.notes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kept_blocks": -1}, "kept_blocks is -1; expected 0 or more"),
        ({"layers": 1}, "layers is 1; expected 2 or more"),
        ({"n_reviews": 1}, "n_reviews is 1"),
        ({"ridge": -1.0}, "ridge is -1.0; expected 0 or more"),
    ],
)
def test_wrong_settings_are_refused(changes, words):
    with pytest.raises(BadSettings, match=words):
        StitchingSettings(**changes)


def test_what_cannot_be_stitched_is_refused_before_any_work(files):
    a = tiny("llama")
    with pytest.raises(BadSettings, match="does not predict the next token"):
        STUDY(tiny("bert"), other=a, text=files["text"])
    with pytest.raises(BadSettings, match="tiny-bert does not predict the next token"):
        STUDY(a, other=tiny("bert"), classifier=None, text=files["text"], **SMALL)
    with pytest.raises(BadSettings, match="no right inverse"):
        STUDY(a, other=tiny("llama", hidden_size=72), classifier=None, text=files["text"], **SMALL)


def test_a_bad_classifier_fails_its_section_only(files):
    a, b = tiny("llama"), tiny("llama", seed=1)
    result = STUDY(a, other=b, classifier=b, **files, **SMALL)
    assert "is not a classifier of texts" in result.failed["classifier"]
    assert result.rows("costs")
    small = {**SMALL, "kept_blocks": 9}
    c = Transformer.wrap(build("llama_text", 1), tokenizer(), name="c")
    assert "has 3 blocks" in STUDY(a, other=b, classifier=c, **files, **small).failed["classifier"]


def test_labelled_texts_that_are_none_are_refused(files, models, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "the cat sat on"}\n', "utf8")
    settings = StitchingSettings(other="x", reviews=str(broken))
    with pytest.raises(BadText, match="records have a text and a label"):
        StitchingContext(models[0], settings, tmp_path, lambda *_: None).reviews()


def test_losses_do_not_depend_on_chunks(models, monkeypatch):

    rows, gold = torch.randn(7, 24).double(), torch.arange(7)
    whole = token_losses(models[0], rows, gold)
    monkeypatch.setattr("layerleap.memory.LOGITS", 61 * 2)
    torch.testing.assert_close(token_losses(models[0], rows, gold), whole)


def test_quick_runs_are_smaller():
    quick = StitchingSettings().scaled_down()
    assert (quick.n_fit, quick.n_read, quick.n_reviews, quick.layers) == (100, 24, 60, 4)


def test_every_estimate_of_the_study_lies_inside_its_interval(result):
    require_inside(result.tables, 10)
