"""The optional sections of the shortcuts study, and what decides its claims."""

import copy
from dataclasses import replace

import pytest
import torch

from layerleap.errors import BadSettings, LayerleapError
from layerleap_papers.jump_to_conclusions import STUDY, ShortcutSettings
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext
from tiny_models import sentences, tiny

LAST = 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "one.txt"
    file.write_text("\n".join(sentences(500)))
    return ShortcutSettings(text=str(file), other=None, n_fit=600, n_read=300, tuned_rows=1024)


@pytest.fixture(scope="module")
def study(settings):
    return STUDY(tiny("llama"), settings)


@pytest.fixture(scope="module")
def six_layers(settings):
    """A study of a model that has round-robins."""
    sections = ["parts", "alternation"]
    return STUDY(tiny("llama", num_hidden_layers=6), settings, sections=sections)


@pytest.mark.parametrize("lens", ["id", "mat", "tuned"])
def test_the_ends_of_the_papers_grid_exit_at_once_and_never(study, lens):
    (first,) = study.rows("exits", map=lens, rule="gap", knob=-1.112)
    (fixed,) = study.rows("exits", map=lens, rule="fixed", knob=1)
    assert first["layers"] == 1
    assert first["agreement"] == fixed["agreement"]
    (never,) = study.rows("exits", map=lens, rule="gap", knob=1.112)
    assert (never["layers"], never["agreement"]) == (LAST, 1)
    gap = sorted(study.rows("exits", map=lens, rule="gap"), key=lambda row: row["knob"])
    assert [row["layers"] for row in gap] == sorted(row["layers"] for row in gap)


@pytest.mark.parametrize("lens", ["id", "mat", "tuned"])
def test_the_agreement_of_fixed_exits_is_precision_at_1(study, lens):
    fit = {"id": "-", "mat": study.settings["text"], "tuned": "tuned"}[lens]
    table = "tuned_scores" if lens == "tuned" else "scores"
    for row in study.rows("exits", map=lens, rule="fixed"):
        (score,) = study.rows(table, fit=fit, metric="precision@1", layer=row["knob"])
        assert row["agreement"] == pytest.approx(score["value"])


def test_a_higher_wanted_agreement_never_saves_more(study):
    by = {}
    for row in study.rows("exits_saved"):
        by.setdefault((row["map"], row["rule"]), []).append((row["target"], row["saved"]))
        assert 0 <= row["saved"] < LAST
    assert len(by) == 3 * 6
    for targets in by.values():
        saved = [saved for _, saved in sorted(targets)]
        assert saved == sorted(saved, reverse=True)


def test_rows_are_divided_and_a_rule_is_not_judged_by_rows_it_was_trained_on(study):
    first = study.rows("calibrated")[0]
    assert first["trained_on"] + first["calibrated_on"] + first["rows"] == 300
    for row in study.rows("exits_saved", rule="learned"):
        assert row["rows"] == 300 - first["trained_on"]
    for row in study.rows("calibrated"):
        assert (row["calibrated_on"], row["rows"]) == (first["calibrated_on"], first["rows"])
        assert row["promised"]
    for row in study.rows("same_rows"):
        assert row["rows"] == 300 - first["trained_on"]


def test_the_full_model_costs_one_and_no_exit_costs_less_than_its_blocks(study):
    (cost,) = study.rows("exits_cost")
    for row in study.rows("exits"):
        assert row["flops"] >= row["layers"] * cost["block"] / cost["full"] * 0.999
    (late,) = study.rows("exits", rule="fixed", map="id", knob=LAST - 1)
    assert late["flops"] < 1


def test_parts_and_schedules_end_at_the_model_and_at_the_lens(study):
    assert {row["map"] for row in study.rows("parts")} == {"attn", "ffn", "norms"}
    for row in study.rows("parts", layer=LAST, metric="precision@1"):
        assert row["value"] == 1
    jumps = study.rows("schedules", kind="single jump", metric="precision@1")
    assert jumps
    for row in jumps:
        (score,) = study.rows(
            "scores", fit=study.settings["text"], metric="precision@1", layer=row["blocks"]
        )
        assert row["value"] == pytest.approx(score["value"])


def test_only_some_texts_may_be_spent_on_parts_and_schedules(settings, study):
    some = STUDY(
        tiny("llama"),
        settings,
        sections=["parts", "alternation"],
        part_texts=100,
        schedule_texts=40,
    )
    counts = {row["rows"] for row in some.rows("parts")}
    assert len(counts) == 1
    assert 60 < counts.pop() < 140  # each text is drawn with a chance of 100 in 300
    assert 15 < some.rows("schedules")[0]["rows"] < 70
    everywhere = {
        (row["map"], row["layer"]): row["value"]
        for row in study.rows("parts", metric="precision@1", bias=False)
    }
    for row in some.rows("parts", metric="precision@1", bias=False):
        assert row["value"] == pytest.approx(everywhere[row["map"], row["layer"]], abs=0.2)


def test_the_rows_run_again_are_those_of_the_reading(settings, tmp_path):
    llama = tiny("llama")
    context = ShortcutContext(llama, settings.resolved(llama), tmp_path, lambda *_: None)
    scores, documents = context.readings[context.text].scores, []

    class Taker:
        def add(self, recording, batch):
            documents.append(batch.documents)

    rows = context.run_again(100, "looking", Taker().add)
    assert len(rows) == len(scores.documents)
    assert 60 < rows.sum() < 140
    assert torch.cat(documents).equal(scores.documents[rows])


def mean(rows):
    values = [row["value"] for row in rows]
    return sum(values) / len(values)


def test_leads_are_differences_of_the_tables_with_intervals(study, six_layers):
    text = study.settings["text"]
    for row in study.rows("lead"):
        where = {"read": text, "metric": row["metric"], "layer": row["layer"]}
        mat, plain = (study.row("scores", fit=fit, **where) for fit in (text, "-"))
        assert row["value"] == pytest.approx(mat["value"] - plain["value"])
        assert row["low"] <= row["value"] <= row["high"]
    for row in study.rows("r2_lead"):
        pair = {"src": row["src"], "dst": row["dst"]}
        mat, plain = (study.row("r2", map=name, **pair)["r2"] for name in ("mat", "id"))
        assert row["value"] == pytest.approx(mat - plain)
        assert row["low"] <= row["value"] <= row["high"]
    for row in six_layers.rows("part_leads"):
        where = {"metric": "precision@1", "bias": False}
        chosen = [
            r
            for r in six_layers.rows("parts", map=row["part"], **where)
            if row["start"] <= r["layer"] < 6
        ]
        if row["against"] == "jump":
            other = six_layers.rows("scores", fit=text, metric="precision@1")
        else:
            other = six_layers.rows("parts", map=row["against"], **where)
        other = [r for r in other if row["start"] <= r["layer"] < 6]
        assert row["value"] == pytest.approx(mean(chosen) - mean(other))
        assert row["low"] <= row["value"] <= row["high"]
    for row in six_layers.rows("part_steps"):
        where = {"map": row["map"], "metric": "precision@1", "bias": False}
        low, high = (six_layers.row("parts", layer=row["layer"] + n, **where) for n in (0, 1))
        assert row["value"] == pytest.approx(high["value"] - low["value"])


def test_schedules_are_compared_with_the_single_jump_of_as_many_blocks(six_layers):
    rows = six_layers.rows("schedules", metric="precision@1")
    single = {row["blocks"]: row["value"] for row in rows if row["kind"] == "single jump"}
    by = {(row["kind"], row["schedule"]): row for row in rows}
    leads = six_layers.rows("schedule_leads")
    assert {row["kind"] for row in leads} == {"round robin", "best R2"}
    for row in leads:
        own = by[row["kind"], row["schedule"]]
        assert row["value"] == pytest.approx(own["value"] - single[own["blocks"]])
    for row in six_layers.rows("schedule_means"):
        chosen = [
            lead
            for lead in leads
            if lead["kind"] == row["kind"] and (lead["blocks"] <= 3) == (row["blocks"] == "few")
        ]
        assert row["schedules"] == len(chosen)
        assert row["value"] == pytest.approx(mean(chosen))


def test_a_rule_is_compared_with_fixed_exits_at_the_same_mean_number_of_layers(study):
    rows = study.rows("exits_lead")
    assert {row["map"] for row in rows} == {"id", "mat", "tuned"}
    for row in rows:
        fixed = {
            r["knob"]: r["agreement"] for r in study.rows("exits", map=row["map"], rule="fixed")
        }
        fixed[LAST] = 1.0
        rule = study.row("exits", map=row["map"], rule="gap", knob=row["knob"])
        below = min(int(row["layers"]), LAST - 1)
        share = row["layers"] - below
        level = (1 - share) * fixed[below] + share * fixed[below + 1]
        assert row["layers"] == rule["layers"]
        assert row["value"] == pytest.approx(rule["agreement"] - level)
        assert row["low"] <= row["value"] <= row["high"]


def test_sections_can_be_left_out_and_the_claims_say_so(settings, tmp_path):
    bare = STUDY(tiny("llama"), settings, sections=[])
    assert not {"parts", "schedules", "exits", "calibrated", "tuned"} & set(bare.tables)
    assert {row["fit"] for row in bare.tables["scores"]} == {"-", settings.text}
    tested = [row for row in bare.claims if row["agrees"] != "not tested"]
    assert 3 <= len(tested) < len(bare.claims)
    assert all(row["why"] for row in tested)
    assert any(row["seen"] == "section 'exits' was not run" for row in bare.claims)
    assert bare.report(tmp_path).exists()


def test_the_verdict_of_a_claim_follows_the_intervals(study):
    def answers(ends, sign=1):
        """With all leads and savings times `sign`, and intervals around them."""
        tables = copy.deepcopy(study.tables)
        for name, key in (("lead", "value"), ("r2_lead", "value"), ("exits_saved", "saved")):
            for row in tables[name]:
                row[key] *= sign
                row["low"], row["high"] = ends(row[key])
        changed = replace(study, tables=tables, findings=[], claims=[])
        return {row["claim"]: row["agrees"] for row in STUDY.conclude(changed).claims}

    narrow = answers(lambda value: (value - 1e-4, value + 1e-4))
    turned = answers(lambda value: (value - 1e-4, value + 1e-4), -1)
    wide = answers(lambda value: (value - 9.0, value + 9.0))
    unknown = answers(lambda _: (None, None))
    for word in ("more often", "less surprised", "all pairs", "early exit saves"):
        (claim,) = (claim for claim in narrow if word in claim)
        assert (narrow[claim], turned[claim]) == ("yes", "no"), claim
        assert wide[claim] == unknown[claim] == "cannot tell"


def test_too_few_rows_for_a_promise_are_noted_and_the_rest_is_there(settings, tmp_path):
    few = STUDY(tiny("llama"), settings, n_read=60, sections=["exits"])
    assert few.rows("exits")
    assert not few.rows("calibrated")
    assert not few.failed
    (note,) = (note for note in few.notes if note.startswith("Calibrated exits: left out."))
    assert "at least 59 are needed" in note
    assert few.report(tmp_path).exists()


def test_a_model_whose_parts_are_not_known_says_why(settings, monkeypatch):
    transformer = tiny("llama")
    monkeypatch.setattr(transformer, "anatomy", ("nothing adds up",) * LAST)
    study = STUDY(transformer, settings, sections=["parts"])
    assert "nothing adds up" in study.failed["parts"]
    untested = [row for row in study.claims if "nothing adds up" in row["seen"]]
    assert [row["agrees"] for row in untested] == ["not tested"] * 3


def test_training_that_is_impossible_costs_its_own_section_alone(tmp_path):
    # Half of the documents are held out, and one is left to train on and to stop by.
    (tmp_path / "two.txt").write_text("\n".join(sentences(2, 3)))
    for seed in range(30):
        settings = ShortcutSettings(
            text=str(tmp_path / "two.txt"), other=None, seed=seed, held_out=0.5, n_read=2
        )
        try:
            study = STUDY(tiny("llama"), settings, sections=["tuned"])
            break
        except LayerleapError:  # both fell to one side
            continue
    assert "cannot be split" in study.failed["tuned"]
    assert study.rows("scores")
    assert not study.rows("tuned_scores")


def test_exits_use_the_trained_lens_if_it_is_there(study, settings, tmp_path):
    llama = tiny("llama")
    first = STUDY(llama, settings, sections=["exits"], folder=tmp_path)
    assert {row["map"] for row in first.rows("exits")} == {"id", "mat"}
    second = STUDY(llama, settings, sections=["exits", "tuned"], folder=tmp_path)
    assert second.tables["exits"] == study.tables["exits"]


def test_several_models_are_compared_over_relative_depth(study, settings, tmp_path):
    other = tiny("gpt2")
    compared = STUDY(
        tiny("llama"), settings, sections=[], beside=(other,), folder=tmp_path / "work"
    )
    assert {row["model"] for row in compared.rows("sizes")} == {"tiny-llama", "tiny-gpt2"}
    assert [row["text"] for row in compared.findings if row["section"] == "sizes"]
    (claim,) = (row for row in compared.claims if "different size" in row["claim"])
    assert claim["agrees"] != "not tested"
    assert compared.report(tmp_path).exists()
    own = STUDY(other, settings, sections=[], pairs="final")
    for row in compared.rows("sizes", model="tiny-gpt2"):
        fit = "-" if row["map"] == "id" else settings.text
        score = own.row("scores", fit=fit, metric=row["metric"], layer=row["layer"])
        assert (row["value"], row["low"], row["high"]) == tuple(
            score[key] for key in ("value", "low", "high")
        )


def test_models_that_cannot_be_compared_are_said(settings):
    llama = tiny("llama")
    twice = STUDY(llama, settings, sections=[], beside=(tiny("llama"),))
    assert "given twice" in twice.failed["sizes"]
    none = STUDY(llama, settings, sections=["sizes"])
    assert "no models to compare with" in none.failed["sizes"]
    missing = STUDY(llama, settings, sections=[], beside=("./nowhere",))
    assert "nowhere" in missing.failed["sizes"]


def test_a_text_that_suits_only_the_first_model_is_replaced_for_the_others(
    settings, tmp_path, monkeypatch
):
    (tmp_path / "other.txt").write_text("\n".join(sentences(200, 4)))
    texts = {"tiny-llama": settings.text, "tiny-gpt2": str(tmp_path / "other.txt")}
    name = "layerleap.study.texts.default_text"
    monkeypatch.setattr(name, lambda model, n_texts: texts[model.identity.name])
    compared = STUDY(tiny("llama"), settings, text=None, sections=[], beside=(tiny("gpt2"),))
    assert {(row["model"], row["read"]) for row in compared.rows("sizes")} == set(texts.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tolerance": 1.5}, "tolerance is 1.5; expected a share between 0 and 1"),
        ({"delta": 0.0}, "delta is 0.0"),
        ({"part_texts": 0}, "part_texts is 0; expected 1 or more"),
        ({"text": "tuned"}, "write ./tuned"),
    ],
)
def test_settings_outside_their_meaning_are_refused(change, message):
    with pytest.raises(BadSettings, match=message):
        ShortcutSettings(**change)


def test_every_section_runs_by_default_but_other_models_have_to_be_named():
    keys = [section.key for section in STUDY.chosen(None, ShortcutSettings())]
    assert keys == ["readings", "parts", "alternation", "tuned", "exits"]
    named = STUDY.chosen(["exits"], ShortcutSettings(beside=("gpt2",)))
    assert [section.key for section in named] == ["readings", "exits", "sizes"]
    with pytest.raises(BadSettings, match="poetry"):
        STUDY.chosen(["parts", "poetry"], ShortcutSettings())
