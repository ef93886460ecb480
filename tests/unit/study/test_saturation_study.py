"""The study of saturation on tiny models: every section, every refusal, every note."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from contract_bank import bank_of
from families import build
from media import seeing, sets
from saturation_studies import made, settings, text_file
from tiny_models import sentences, tiny

from layerleap.errors import BadSettings, WrongModel
from layerleap.models.transformer import Transformer
from layerleap.read.lens import Lens
from layerleap.read.saturation import saturate
from layerleap.read.scores import score
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Sampling
from layerleap.study.saturation import study as studying
from layerleap.study.saturation.findings import _beside
from layerleap.study.saturation.live_exits import prompts_of
from layerleap.study.saturation.rows import observe
from layerleap.study.saturation.study import SaturationSettings, default_sampling, study_saturation


def test_every_section_is_there_and_plain_data():
    study = made()
    assert json.loads(json.dumps(study)) == study
    assert study["kind"] == "saturation"
    assert set(study["order"]) == {"id", "mat"}
    assert set(study["probe"]) == {"id", "mat"}
    assert study["intervention"]["identical"]
    assert study["twin"]["order"]["n_layers"] == 8
    assert {row["map"] for row in study["exits"]["curves"]} == {"id", "mat"}
    assert [row["role"] for row in study["data"]] == ["fit", "read", "twin"]


def test_every_rule_is_judged_on_the_same_rows():
    exits = made()["exits"]
    rules = {"task", "gap", "similarity", "patience", "learned", "fixed", "oracle"}
    assert {row["rule"] for row in exits["curves"]} == rules
    assert len({(row["rows"], row["documents"]) for row in exits["curves"]}) == 1
    oracle = [row for row in exits["curves"] if row["rule"] == "oracle"]
    assert all(row["agreement"] == 1 for row in oracle)
    assert all(row["accuracy"] == exits["full"]["accuracy"] for row in oracle)


def test_a_rule_that_never_exits_has_the_models_own_accuracy():
    exits = made()["exits"]
    whole = [row for row in exits["curves"] if row["saved"] == 0 and row["rule"] == "task"]
    assert whole
    assert {row["accuracy"] for row in whole} == {exits["full"]["accuracy"]}


def test_claims_are_each_answered_or_said_to_be_untested():
    rows = made()["claims"]
    assert {row["agrees"] for row in rows} <= {"yes", "partly", "no", "cannot tell", "not tested"}
    assert all(row["seen"] for row in rows if row["agrees"] != "not tested")
    assert all(row["why"] for row in rows)
    assert len(rows) == 9


def test_findings_say_something_on_every_topic():
    topics = {row["topic"] for row in made()["findings"]}
    assert topics >= {"headline", "places", "histogram", "tau", "probe", "intervention", "exits"}
    assert made()["findings"][0]["topic"] == "headline"


def test_the_same_settings_give_the_same_numbers(tmp_path):
    few = settings(text_file(tmp_path), sections=("guesses",), n_read=60)
    model = tiny("llama", seed=1, num_hidden_layers=8)
    first, second = (study_saturation(model, few) for _ in range(2))
    assert first["order"] == second["order"]
    assert first["guesses"] == second["guesses"]


def test_what_too_few_rows_do_not_allow_is_noted_and_not_made(tmp_path):
    few = settings(text_file(tmp_path, 30), n_fit=20, n_read=3)
    study = study_saturation(tiny("llama", seed=1, num_hidden_layers=8), few)
    assert study["probe"] == {}
    assert study["exits"] is None
    said = " ".join(study["notes"])
    assert "The task probe through id: left out" in said
    assert "Early exit: left out" in said
    answers = {row["claim"]: row["agrees"] for row in study["claims"]}
    assert answers["Which rank is being decided can be told from a single state."] == "not tested"


def test_one_pass_over_the_text_gives_layers_walks_evidence_and_states(tmp_path):
    transformer = tiny("llama")
    asked = []

    def batches():
        asked.append(1)
        sampling = Sampling(positions="every:2")
        return batches_of(transformer, sentences(20), sampling, side="both")

    lenses = {"id": Lens(transformer), "mat": Lens(transformer, bank_of(transformer))}
    seen = observe(transformer, lenses, batches, tmp_path / "rows", k=3, walk_share=0.5)
    assert asked == [1]
    apart = saturate(transformer, lenses, batches(), k=3)
    scores = score(transformer, lenses, batches())
    for name in lenses:
        assert torch.equal(seen.saturation[name].layer, apart[name].layer)
        assert torch.equal(seen.evidence[name].top, scores.top[name])
        assert torch.equal(seen.evidence[name].p1, scores.p1[name])
        rows = seen.walks[name].rows
        assert 0 < len(rows) < len(seen.gold)
        assert torch.equal(seen.walks[name].saturation.documents, apart[name].documents[rows])
    assert torch.equal(seen.states.documents, apart["id"].documents)


def test_sections_that_were_not_asked_for_are_left_out_without_a_note(tmp_path):
    none = settings(text_file(tmp_path), sections=(), n_read=60)
    study = study_saturation(tiny("llama", seed=1, num_hidden_layers=8), none)
    assert study["guesses"] == study["probe"] == {}
    assert study["intervention"] is study["exits"] is study["twin"] is None
    assert not [note for note in study["notes"] if "left out" in note]
    why = {row["claim"]: row["why"] for row in study["claims"]}
    assert why["Which rank is being decided can be told from a single state."] == (
        "section 'probe' was not asked for"
    )


def test_a_bank_that_is_given_is_used_and_none_is_fitted(tmp_path):
    model = tiny("llama", seed=1, num_hidden_layers=8)
    none = settings(text_file(tmp_path), sections=(), n_read=60)
    study = study_saturation(model, none, bank=bank_of(model))
    assert [row["role"] for row in study["data"]] == ["read"]
    with pytest.raises(WrongModel):
        study_saturation(model, none, bank=bank_of(tiny("gpt2")))


def test_an_interrupted_study_goes_on_with_the_parts_that_were_done(tmp_path, monkeypatch):
    few = settings(text_file(tmp_path), sections=("guesses", "probe", "twin"), n_read=60)
    model, work = tiny("llama", seed=1, num_hidden_layers=8), tmp_path / "work"
    whole = study_saturation(model, few, work=tmp_path / "another")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(studying, "claims", interrupted)  # when all parts are done
        with pytest.raises(KeyboardInterrupt):
            study_saturation(model, few, work=work)
    with monkeypatch.context() as patch:
        patch.setattr(studying, "order", interrupted)  # done already: it is not made again
        study = study_saturation(model, few, work=work)
    assert "in the same folder: order, guesses, probe" in study["notes"][-1]
    assert study["notes"][:-1] == whole["notes"]
    assert [one["summary"]["run"]["whole"] for one in (whole, study)] == [True, False]
    for part in ("order", "guesses", "probe", "twin", "claims", "findings"):
        assert study[part] == whole[part]
    assert [_timeless(row) for row in study["data"]] == [_timeless(row) for row in whole["data"]]


def _timeless(row):
    return {key: row[key] for key in row if key != "seconds"}


def test_parts_made_with_another_bank_or_dtype_are_made_anew(tmp_path):
    few = settings(text_file(tmp_path), sections=(), n_read=60)
    model, work = tiny("llama", seed=1, num_hidden_layers=8), tmp_path / "work"
    first = study_saturation(model, few, bank=bank_of(model), work=work)
    same = study_saturation(model, few, bank=bank_of(model), work=work)
    assert same["order"] == first["order"]
    assert "Taken over" in same["notes"][-1]
    other = study_saturation(model, few, bank=bank_of(model, seed=2), work=work)
    narrow = tiny("llama", seed=1, num_hidden_layers=8)
    narrow.model.bfloat16()
    cast = Transformer.wrap(narrow.model, tokenizer=narrow.tokenizer)
    cast = study_saturation(cast, few, bank=bank_of(model), work=work)
    for study in (other, cast):
        assert not any("Taken over" in note for note in study["notes"])


def test_parts_of_another_study_are_not_taken_over(tmp_path):
    model, work = tiny("llama", seed=1, num_hidden_layers=8), tmp_path / "work"
    text = text_file(tmp_path)
    study_saturation(model, settings(text, sections=(), n_read=60, k=5), work=work)
    assert (work / "order.json").exists()
    study = study_saturation(model, settings(text, sections=(), n_read=60, k=4), work=work)
    assert study["order"]["id"]["k"] == 4
    assert not any("Taken over" in note for note in study["notes"])


def test_with_nothing_to_fit_on_all_is_read_through_the_logit_lens(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"text": " ".join(sentences(80))}), encoding="utf8")
    one = settings(path, sampling=Sampling(held_out=0.99, per_document=None))
    study = study_saturation(tiny("llama", seed=1, num_hidden_layers=8), one)
    assert set(study["order"]) == {"id"}
    assert [row["role"] for row in study["data"]] == ["read", "twin"]
    assert "the logit lens alone, and all of it: no position to fit on" in study["notes"][0]


@pytest.mark.parametrize(
    ("task", "other", "said"),
    [((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), "no rule saves any"),
     ((1.0, 0.9, 1.1), (1.0, 0.9, 1.1), "gap saves 1.0"),
     ((1.1, 0.9, 1.3), (1.0, 0.8, 1.2), "but not clearly (gap 1.0)"),
     ((2.0, 1.9, 2.1), (1.0, 0.8, 1.2), "clearly more than any other")],
)  # fmt: skip
def test_a_lead_is_called_one_only_if_it_is(task, other, said):
    row = lambda rule, ends: dict(zip(("rule", "saved", "low", "high"), (rule, *ends), strict=True))  # noqa: E731
    assert said in _beside(row("task", task), [row("gap", other)])


def test_prompts_are_drawn_from_texts_of_any_length_and_from_no_document_left_out(tmp_path):
    model, path = tiny("llama"), text_file(tmp_path, 80)
    how = Sampling(positions="every:2", held_out=0.6)
    batches = list(batches_of(model, path, how, side="held-out", n_texts=60))
    every = {int(one) for batch in batches for one in batch.documents}
    found = prompts_of(batches, 100, 4, without=[min(every)])
    assert len(found) == len(every) - 1
    assert {prompt.shape for prompt in found} == {(1, 4)}
    assert any(
        not torch.equal(a, b)
        for a, b in zip(
            found, prompts_of(batches, 100, 4, without=[min(every)], seed=1), strict=True
        )
    )


def test_images_go_through_the_same_study(tmp_path):
    model = seeing("vit", seed=1, num_hidden_layers=6)
    few = settings(sets(tmp_path, 200), sampling=Sampling(held_out=0.6), sections=("guesses",))
    study = study_saturation(model, few)
    assert study["model"]["reads"] == "images"
    assert study["data"][1]["rows"] > 60
    assert set(study["order"]) | {note.split(":")[0] for note in study["notes"]}


def test_masked_models_are_read_at_one_position_of_each_text():
    assert default_sampling(tiny("bert")).positions == "one"
    assert default_sampling(tiny("llama")).positions == "every:4"


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"sections": ("magic",)}, "section 'magic'"), ({"text": "-"}, "standard input"),
     ({"k": 2}, "3 or more"), ({"n_read": 0}, "n_read 0"), ({"draws": 5}, "19 or more"),
     ({"walk_share": 0}, "walk_share"), ({"tolerance": 1}, "tolerance"), ({"pairs": 0}, "pairs"),
     ({"text": "news", "starts": "x"}, "starts"),
     ({"sampling": Sampling(held_out=0)}, "held_out")],
)  # fmt: skip
def test_settings_without_meaning_are_refused(changes, said):
    with pytest.raises(BadSettings, match=said):
        SaturationSettings(**changes)


def test_more_ranks_than_outputs_and_a_single_layer_are_refused(tmp_path: Path):
    text = text_file(tmp_path, 10)
    with pytest.raises(BadSettings, match="outputs"):
        study_saturation(tiny("llama"), settings(text, k=62))
    with pytest.raises(BadSettings, match="2 layers or more"):
        study_saturation(tiny("llama", num_hidden_layers=1), settings(text))


def test_quick_is_smaller_and_never_larger():
    quick = SaturationSettings(n_read=50).quickened().settled(tiny("llama"))
    assert (quick.n_fit, quick.n_read, quick.quick) == (600, 50, True)
    whole = SaturationSettings().settled(tiny("llama"))
    assert (whole.n_fit, whole.n_read) == (3000, 800)


def test_of_speech_fewer_clips_are_taken_and_all_of_their_positions():
    hearing = Transformer.wrap(build("whisper"))
    chosen = SaturationSettings(text="beckett").settled(hearing)
    assert (chosen.n_fit, chosen.n_read) == (200, 120)
    assert chosen.sampling.positions == "all"


@pytest.mark.parametrize(("is_installed", "text"), [(True, "spoken"), (False, "beckett")])
def test_speech_is_spoken_where_that_can_be_done(monkeypatch, is_installed, text):
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/espeak-ng" if is_installed else None)
    assert SaturationSettings().settled(Transformer.wrap(build("whisper"))).text == text
