"""The study of saturation on tiny models: every section, every refusal, every note."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from saturation_studies import made, settings

from contract_bank import bank_of
from families import build
from golden import differences
from intervals import require_inside
from layerleap.errors import BadSettings, BadText, CannotFetch, WrongModel
from layerleap.lens.lens import Lens
from layerleap.lens.saturation import saturate
from layerleap.lens.scores import score
from layerleap.models.transformer import Transformer
from layerleap.stream import espeak
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Sampling
from layerleap.study.result import StudyResult
from layerleap_papers.beyond_the_top1 import (
    STUDY,
    SaturationSettings,
    order,
    probe,
    saturation_context,
)
from layerleap_papers.beyond_the_top1.exits import compared
from layerleap_papers.beyond_the_top1.live_exits import prompts_of
from layerleap_papers.beyond_the_top1.order import only_first_three
from layerleap_papers.beyond_the_top1.rows import observe
from media import seeing, sets
from tiny_models import sentences, text_file, tiny

PROBE_CLAIM = "The rank that is being decided can be told from a single state."


def llama():
    return tiny("llama", seed=1, num_hidden_layers=8)


def test_every_section_is_there_and_plain_data(tmp_path):
    result = made()
    assert not result.failed
    assert StudyResult.load(result.save(tmp_path / "study.json")).tables == result.tables
    lenses = {"logit", "linear"}
    for table in ("order", "places", "steps", "tau", "ranks", "histogram", "guesses", "probe"):
        assert {row["lens"] for row in result.rows(table)} == lenses, table
    assert {row["map"] for row in result.rows("exits")} == lenses
    assert result.row("intervention_runs")["identical"]
    assert {row["model"] for row in result.rows("twin_intervention")} == {"untrained twin"}
    assert result.rows("twin_order")
    assert [row["role"] for row in result.data] == ["fit", "read", "twin"]
    assert result.model["reads"] == "text"


def test_rows_are_flat():
    for name, rows in made().tables.items():
        for row in rows if name != "texts" else []:
            assert not any(isinstance(value, dict) for value in row.values()), name


def test_every_rule_is_judged_on_the_same_rows():
    result = made()
    rules = {"task", "gap", "similarity", "patience", "learned", "fixed", "oracle"}
    assert {row["rule"] for row in result.rows("exits")} == rules
    assert len({(row["rows"], row["documents"]) for row in result.rows("exits")}) == 1
    oracle = result.rows("exits", rule="oracle")
    assert all(row["agreement"] == 1 for row in oracle)
    full = result.row("exits_about")["accuracy"]
    assert all(row["accuracy"] == full for row in oracle)


def test_a_rule_that_never_exits_has_the_models_own_accuracy():
    result = made()
    whole = result.rows("exits", rule="task", saved=0)
    assert whole
    assert {row["accuracy"] for row in whole} == {result.row("exits_about")["accuracy"]}


def test_claims_are_each_answered_or_said_to_be_untested():
    rows = made().claims
    assert {row["agrees"] for row in rows} <= {"yes", "partly", "no", "cannot tell", "not tested"}
    assert all(row["seen"] for row in rows)
    assert all(row["why"] for row in rows if row["agrees"] != "not tested")
    assert len(rows) == 8
    assert not any("speech" in row["claim"] for row in rows)  # it does not hear


def test_ranks_that_grow_where_both_saturate_but_not_on_the_whole_grow_partly():
    def answer(means):
        steps = [
            {
                "lens": "logit",
                "filtered": False,
                "rank": rank,
                "value": 0.4,
                "low": 0.1,
                "high": 0.7,
            }
            for rank in range(2, 6)
        ]
        places = [{"lens": "logit", "filtered": False, "value": mean} for mean in means]
        result = replace(made(), tables={"steps": steps, "places": places})
        return order._growing(result).agrees

    assert answer([1.0, 1.4, 1.8, 1.9, 2.0]) == "yes"
    assert answer([1.0, 1.4, 1.9, 1.8, 2.0]) == "partly"


def test_claims_of_speech_are_for_models_that_hear():
    claim = next(claim for claim in order.SECTION.claims if "speech" in claim.text)
    hears = replace(made(), model={**made().model, "reads": "sound"})
    assert claim.when(hears)
    assert claim.test(hears).agrees in ("yes", "partly", "no", "cannot tell")


@pytest.mark.parametrize(
    ("lows", "answer"),
    [
        ((1, 1), "cannot tell"),
        ((1, 1, -3, -3), "yes"),
        ((1, 1, 1, 1), "partly"),
        ((1, 1, -1, -1), "cannot tell"),
        ((1, -3, 1, 1), "partly"),
        ((-3, -3, -3, -3), "no"),
        ((1, -1, -3, -3), "cannot tell"),
    ],
)
def test_only_the_first_three_ranks_means_that_later_ones_do_not(lows, answer):
    steps = [
        {"rank": rank, "filtered": False, "low": low, "high": low + 2}
        for rank, low in enumerate(lows, 2)
    ]
    assert only_first_three(steps)[0] == answer


def test_no_claim_is_decided_by_a_value_without_an_interval():
    """Every interval set to straddle its threshold: nothing can be told, whatever the values."""
    ends = {"low": -1e9, "high": 1e9}
    tables = {
        name: [{**row, **{key: ends[key] for key in ends if key in row}} for row in rows]
        for name, rows in made().tables.items()
    }
    for row in tables["tau"]:
        row |= {"beats_exchangeable": "cannot tell", "beats_walk": "cannot tell"}
    result = replace(made(), tables=tables)
    for section in STUDY.sections:
        for claim in section.claims:
            if claim.when(result):
                assert claim.test(result).agrees in ("cannot tell", "not tested"), claim.text


def test_findings_say_something_under_every_figure():
    result = made()
    under = {row["under"] for row in result.findings}
    figures = {"places", "histogram", "tau", "probe", "intervention", "exits", "calibrated"}
    assert under >= figures
    assert {row["section"] for row in result.findings if not row["under"]} >= {"guesses", "twin"}
    assert len(result.headlines) == 7


def test_the_same_settings_give_the_same_numbers(tmp_path):
    few = settings(text_file(tmp_path), n_read=60)
    first, second = (STUDY(llama(), few, sections=["guesses"]) for _ in range(2))
    assert first.tables == second.tables


def test_what_too_few_rows_do_not_allow_is_noted_and_not_made(tmp_path):
    few = settings(text_file(tmp_path, 30), n_fit=20, n_read=3)
    result = STUDY(llama(), few)
    assert set(result.failed) == {"probe", "intervention", "exits"}
    assert "documents are too few for 5 folds" in result.failed["probe"]
    assert not result.rows("probe")
    assert not result.rows("tau")
    assert result.rows("places")  # where ranks saturate can be said of any number of rows
    notes = " ".join(result.notes)
    assert "Order of saturation through logit: left out" in notes
    assert "Order of saturation through logit in the untrained twin: left out" in notes
    answers = {row["claim"]: row["agrees"] for row in result.claims}
    assert answers[PROBE_CLAIM] == "not tested"


def test_one_lens_that_cannot_be_made_is_noted_and_the_other_shown(tmp_path, monkeypatch):
    few = settings(text_file(tmp_path), n_read=60)
    real = probe._score

    def score_one(run, lens):
        if lens == "logit":
            raise BadText("logit has none")
        return real(run, lens)

    monkeypatch.setattr(probe, "_score", score_one)
    result = STUDY(llama(), few, sections=["probe"])
    assert not result.failed
    assert {row["lens"] for row in result.rows("probe")} == {"linear"}
    assert "The task probe through logit: left out. Logit has none." in result.notes


@pytest.mark.parametrize("error", [CannotFetch("scipy is not installed"), BadSettings("no")])
@pytest.mark.parametrize(
    "what",
    [
        "layerleap.study.exits.calibrate",
        "layerleap_papers.beyond_the_top1.exits.live_exits",
        "layerleap_papers.beyond_the_top1.guesses.guesses",
    ],
)
def test_a_missing_library_or_a_bad_setting_fails_the_section(tmp_path, monkeypatch, what, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(what, fail)
    key = "guesses" if "guesses" in what else "exits"
    result = STUDY(llama(), settings(text_file(tmp_path)), sections=[key])
    assert result.failed == {key: str(error)}
    assert not any(str(error) in note for note in result.notes)


def test_a_model_that_does_not_generate_text_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("layerleap.study.exits.generates_text", lambda _: False)
    result = STUDY(llama(), settings(text_file(tmp_path)), sections=["exits"])
    assert not result.failed
    assert any("does not generate text token by token" in note for note in result.notes)
    assert result.rows("exits")
    assert not result.rows("live")


def test_one_pass_over_the_text_gives_layers_walks_evidence_and_states(tmp_path):
    transformer = tiny("llama")
    passes = []

    def batches():
        passes.append(1)
        sampling = Sampling(positions="every:2")
        return batches_of(transformer, sentences(20), sampling, side="both")

    lenses = {"logit": Lens(transformer), "linear": Lens(transformer, bank_of(transformer))}
    data = observe(transformer, lenses, batches, tmp_path / "rows", k=3, walk_share=0.5)
    assert passes == [1]
    apart = saturate(transformer, lenses, batches(), k=3)
    scores = score(transformer, lenses, batches())
    for name in lenses:
        assert torch.equal(data.saturation[name].layer, apart[name].layer)
        assert torch.equal(data.evidence[name].top, scores.top[name])
        assert torch.equal(data.evidence[name].top_prob, scores.top_prob[name])
        rows = data.walks[name].rows
        assert 0 < len(rows) < len(data.gold)
        assert torch.equal(data.walks[name].saturation.documents, apart[name].documents[rows])
    assert torch.equal(data.states.documents, apart["logit"].documents)


def test_sections_that_were_not_asked_for_are_left_out_without_a_note(tmp_path):
    result = STUDY(llama(), settings(text_file(tmp_path), n_read=60), sections=[])
    assert [row["key"] for row in result.sections] == ["order"]
    assert not {"guesses", "probe", "intervention", "exits", "twin_order"} & set(result.tables)
    assert not [note for note in result.notes if "left out" in note]
    rows = {row["claim"]: row for row in result.claims}
    assert rows[PROBE_CLAIM]["agrees"] == "not tested"
    assert rows[PROBE_CLAIM]["seen"] == "section 'probe' was not run"


def test_the_twin_is_patched_only_if_the_model_is(tmp_path):
    result = STUDY(llama(), settings(text_file(tmp_path), n_read=60), sections=["twin"])
    assert result.rows("twin_tau")
    assert not result.rows("twin_intervention")


def test_a_bank_that_is_given_is_used_and_none_is_fitted(tmp_path):
    few, bank = settings(text_file(tmp_path), n_read=60), bank_of(llama())
    result = STUDY(llama(), few, bank=bank, sections=[])
    assert [row["role"] for row in result.data] == ["read"]
    assert result.settings["bank"] == bank.digest()
    assert "The bank was given" in result.notes[0]
    bank.save_pretrained(tmp_path / "bank")
    named = STUDY(llama(), few, bank=str(tmp_path / "bank"), sections=[])
    assert named.tables == result.tables
    with pytest.raises(WrongModel):
        STUDY(llama(), few, bank=bank_of(tiny("gpt2")), sections=[])


def test_an_interrupted_study_continues_where_it_stopped(tmp_path, monkeypatch):
    few = settings(text_file(tmp_path), n_read=60)
    model, work, chosen = llama(), tmp_path / "work", ["guesses", "probe", "twin"]
    whole = STUDY(model, few, folder=tmp_path / "another", sections=chosen)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(probe, "score_probe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            STUDY(model, few, folder=work, sections=chosen)
    real = saturation_context.observe

    def observe_control(given, *more, **options):
        assert given is not model, "the text was read a second time"
        return real(given, *more, **options)

    monkeypatch.setattr(saturation_context, "observe", observe_control)
    result = STUDY(model, few, folder=work, sections=chosen)
    assert "Sections taken from an earlier run in the same folder" in result.notes[-1]
    assert result.notes[:-1] == whole.notes
    assert [one.run["whole"] for one in (whole, result)] == [True, False]
    assert result.tables == whole.tables
    assert result.claims == whole.claims
    assert result.findings == whole.findings
    assert [_timeless(row) for row in result.data] == [_timeless(row) for row in whole.data]


def _timeless(row):
    return {key: row[key] for key in row if key != "seconds"}


def test_a_pass_that_was_cut_short_is_made_again(tmp_path):
    few = settings(text_file(tmp_path), n_read=60)
    work = tmp_path / "work"
    first = STUDY(llama(), few, folder=work, sections=[])
    for path in work.glob("section-*.json"):
        path.unlink()
    (marker,) = work.glob("work-*/read.json")
    marker.unlink()  # it is written last
    second = STUDY(llama(), few, folder=work, sections=[])
    assert second.tables == first.tables
    assert marker.exists()


def test_sections_run_with_another_bank_or_dtype_are_run_again(tmp_path):
    few, model, work = settings(text_file(tmp_path), n_read=60), llama(), tmp_path / "work"
    first = STUDY(model, few, bank=bank_of(model), folder=work, sections=[])
    same = STUDY(model, few, bank=bank_of(model), folder=work, sections=[])
    assert same.tables == first.tables
    assert same.sections[0]["resumed"]
    other = STUDY(model, few, bank=bank_of(model, seed=2), folder=work, sections=[])
    narrow = llama()
    narrow.model.bfloat16()
    cast = Transformer.wrap(narrow.model, tokenizer=narrow.tokenizer)
    cast = STUDY(cast, few, bank=bank_of(model), folder=work, sections=[])
    for result in (other, cast):
        assert not result.sections[0]["resumed"]


def test_sections_of_other_settings_or_another_text_are_not_taken_over(tmp_path):
    model, work, text = llama(), tmp_path / "work", text_file(tmp_path)
    STUDY(model, settings(text, n_read=60, k=5), folder=work, sections=[])
    assert (work / "section-order.json").exists()
    result = STUDY(model, settings(text, n_read=60, k=4), folder=work, sections=[])
    assert result.row("order")["k"] == 4
    assert not result.sections[0]["resumed"]
    lines = text.read_text(encoding="utf8").splitlines()
    text.write_text("\n".join(lines[1:]), encoding="utf8")
    changed = STUDY(model, settings(text, n_read=60, k=4), folder=work, sections=[])
    assert not changed.sections[0]["resumed"]


def test_with_nothing_to_fit_on_all_is_read_through_the_logit_lens(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"text": " ".join(sentences(80))}), encoding="utf8")
    one = settings(path, positions=None, held_out=0.99, per_document=None)
    result = STUDY(llama(), one)
    assert {row["lens"] for row in result.rows("order")} == {"logit"}
    assert [row["role"] for row in result.data] == ["read", "twin"]
    assert "the whole text is read through the logit lens: no position to fit" in result.notes[0]


@pytest.mark.parametrize(
    ("task", "other", "words"),
    [
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), "no rule saves any"),
        ((1.0, 0.9, 1.1), (1.0, 0.9, 1.1), "gap saves 1.0"),
        ((1.1, 0.9, 1.3), (1.0, 0.8, 1.2), "but not clearly (gap 1.0)"),
        ((2.0, 1.9, 2.1), (1.0, 0.8, 1.2), "clearly more than any other"),
    ],
)
def test_a_lead_is_called_one_only_if_it_is(task, other, words):
    row = lambda rule, ends: dict(zip(("rule", "value", "low", "high"), (rule, *ends), strict=True))  # noqa: E731
    assert words in compared(row("task", task), [row("gap", other)])


def test_prompts_are_drawn_from_texts_of_any_length_and_from_no_document_left_out(tmp_path):
    model, path = tiny("llama"), text_file(tmp_path, 80)
    how = Sampling(positions="every:2", held_out=0.6)
    batches = list(batches_of(model, path, how, side="held-out", n_texts=60))
    every = {int(one) for batch in batches for one in batch.documents}
    prompts = prompts_of(batches, 100, 4, without=[min(every)])
    assert len(prompts) == len(every) - 1
    assert {prompt.shape for prompt in prompts} == {(1, 4)}
    assert any(
        not torch.equal(a, b)
        for a, b in zip(
            prompts, prompts_of(batches, 100, 4, without=[min(every)], seed=1), strict=True
        )
    )


def test_images_go_through_the_same_study(tmp_path):
    model = seeing("vit", seed=1, num_hidden_layers=6)
    few = settings(sets(tmp_path, 200), positions=None)
    result = STUDY(model, few, sections=["guesses"])
    assert result.model["reads"] == "images"
    assert result.data[1]["rows"] > 60
    assert {row["lens"] for row in result.rows("order")} == {"logit", "linear"}


def test_masked_models_are_read_at_one_position_of_each_text():
    assert SaturationSettings().resolved(tiny("bert")).positions == "one"
    assert SaturationSettings().resolved(tiny("llama")).positions == "every:4"
    assert SaturationSettings(positions="all").resolved(tiny("bert")).positions == "all"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": "-"}, "standard input"),
        ({"k": 2}, "3 ranks or more"),
        ({"n_read": 0}, "n_read is"),
        ({"draws": 5}, "19 or more"),
        ({"walk_share": 0}, "walk_share"),
        ({"tolerance": 1}, "tolerance"),
        ({"pairs": 0}, "pairs"),
        ({"text": "news", "starts": "x"}, "starts"),
        ({"held_out": 0}, "held_out"),
    ],
)
def test_settings_without_meaning_are_refused(changes, words):
    with pytest.raises(BadSettings, match=words):
        SaturationSettings(**changes)


def test_a_section_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(BadSettings, match="no section 'magic'"):
        STUDY(llama(), settings(text_file(tmp_path, 10)), sections=["magic"])


def test_more_ranks_than_outputs_and_a_single_layer_are_refused(tmp_path):
    text = text_file(tmp_path, 10)
    with pytest.raises(BadSettings, match="outputs"):
        STUDY(tiny("llama"), settings(text, k=62))
    with pytest.raises(BadSettings, match="2 layers or more"):
        STUDY(tiny("llama", num_hidden_layers=1), settings(text))


def test_quick_is_smaller_and_never_larger():
    quick = SaturationSettings(n_read=20).scaled_down().resolved(tiny("llama"))
    assert (quick.n_fit, quick.n_read, quick.permutations) == (200, 20, 19)
    assert (quick.cells, quick.pairs, quick.reach, quick.prompts) == (600, 16, 1, 0)
    assert quick.positions == "every:2"
    assert (
        SaturationSettings(positions="all").scaled_down().resolved(tiny("llama")).positions == "all"
    )
    assert quick.text == "wikipedia"
    assert SaturationSettings().resolved(tiny("llama")).text == "enwik8"
    whole = SaturationSettings().resolved(tiny("llama"))
    assert (whole.n_fit, whole.n_read) == (3000, 800)
    hearing = (
        SaturationSettings(text="beckett")
        .scaled_down()
        .resolved(Transformer.wrap(build("whisper")))
    )
    assert (hearing.n_fit, hearing.n_read) == (40, 30)


def test_of_speech_fewer_clips_are_taken_and_all_of_their_positions():
    hearing = Transformer.wrap(build("whisper"))
    chosen = SaturationSettings(text="beckett").resolved(hearing)
    assert (chosen.n_fit, chosen.n_read) == (200, 120)
    assert chosen.positions == "all"


@pytest.mark.parametrize(("is_installed", "text"), [(True, "spoken"), (False, "beckett")])
def test_speech_is_spoken_where_that_can_be_done(monkeypatch, is_installed, text):
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/espeak-ng" if is_installed else None)
    assert SaturationSettings().resolved(Transformer.wrap(build("whisper"))).text == text


@pytest.mark.parametrize(
    ("text", "is_said"), [("spoken", True), ("spoken:news", True), ("beckett", False)]
)
def test_a_report_on_synthetic_speech_says_so(tmp_path, text, is_said):
    hearing = Transformer.wrap(build("whisper"))
    chosen = SaturationSettings(text=text).resolved(hearing)
    run = saturation_context.SaturationContext(hearing, chosen, tmp_path, lambda *_: None)
    run.source()
    assert (espeak.NOTE in run.notes) == is_said


def test_every_estimate_of_the_study_lies_inside_its_interval():
    require_inside(made().tables, 10)


def test_a_small_study_measures_what_it_did_before():
    assert not differences(made(), "beyond_the_top1")
