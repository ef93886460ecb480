"""The optional sections of a study: exits, promises, parts, schedules, claims and sizes."""

import copy
from dataclasses import replace

import pytest
from tiny_models import sentences, tiny

from layerleap.errors import BadSettings
from layerleap.show.report.report import write_report
from layerleap.study.shortcuts.claims import claims
from layerleap.study.shortcuts.sizes import with_sizes
from layerleap.study.shortcuts.study import SECTIONS, ShortcutSettings, study_shortcuts

LAST = 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "one.txt"
    file.write_text("\n".join(sentences(500)))
    return ShortcutSettings(text=str(file), other=None, n_fit=600, n_read=300, tuned_rows=1024)


@pytest.fixture(scope="module")
def study(settings):
    return study_shortcuts(tiny("llama"), settings)[0]


def rows_of(rows, **wanted):
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


@pytest.mark.parametrize("lens", ["id", "mat", "tuned"])
def test_the_ends_of_the_papers_grid_exit_at_once_and_never(study, lens):
    curves = rows_of(study["exits"]["curves"], map=lens)
    (first,) = rows_of(curves, rule="gap", knob=-1.112)
    (fixed,) = rows_of(curves, rule="fixed", knob=1)
    assert first["layers"] == 1
    assert first["agreement"] == fixed["agreement"]
    (never,) = rows_of(curves, rule="gap", knob=1.112)
    assert (never["layers"], never["agreement"]) == (LAST, 1)
    gap = sorted(rows_of(curves, rule="gap"), key=lambda row: row["knob"])
    assert [row["layers"] for row in gap] == sorted(row["layers"] for row in gap)


@pytest.mark.parametrize("lens", ["id", "mat", "tuned"])
def test_the_agreement_of_fixed_exits_is_precision_at_1(study, lens):
    fit = {"id": "-", "mat": study["settings"]["text"], "tuned": "tuned"}[lens]
    for row in rows_of(study["exits"]["curves"], map=lens, rule="fixed"):
        (score,) = rows_of(study["scores"], fit=fit, metric="precision@1", layer=row["knob"])
        assert row["agreement"] == pytest.approx(score["value"])


def test_a_higher_wanted_agreement_never_saves_more(study):
    by = {}
    for row in study["exits"]["saved"]:
        by.setdefault((row["map"], row["rule"]), []).append((row["target"], row["saved"]))
        assert 0 <= row["saved"] < LAST
    assert len(by) == 3 * 6
    for targets in by.values():
        saved = [saved for _, saved in sorted(targets)]
        assert saved == sorted(saved, reverse=True)


def test_rows_are_divided_and_a_rule_is_not_judged_by_rows_it_was_trained_on(study):
    splits = study["calibrated"]["splits"]
    assert sum(splits.values()) == 300
    for row in rows_of(study["exits"]["saved"], rule="learned"):
        assert row["rows"] == 300 - splits["train"]
    for row in study["calibrated"]["rows"]:
        assert row["calibrated_on"] == splits["calibrate"]
        assert [fresh["rows"] for fresh in row["fresh"]] == [splits["verify"]]


def test_the_full_model_costs_one_and_no_exit_costs_less_than_its_blocks(study):
    cost = study["exits"]["cost"]
    for row in study["exits"]["curves"]:
        assert row["flops"] >= row["layers"] * cost["block"] / cost["full"] * 0.999
    never = rows_of(study["exits"]["curves"], rule="fixed", map="id", knob=LAST - 1)
    assert never[0]["flops"] < 1


def test_parts_and_schedules_end_at_the_model_and_at_the_lens(study):
    parts = study["parts"]["scores"]
    assert {row["map"] for row in parts} == {"attn", "ffn", "norms"}
    for row in rows_of(parts, layer=LAST, metric="precision@1"):
        assert row["value"] == 1
    jumps = rows_of(study["schedules"], kind="single jump", metric="precision@1")
    assert jumps
    for row in jumps:
        (score,) = rows_of(
            study["scores"], fit=study["settings"]["text"], metric="precision@1",
            layer=row["blocks"],
        )  # fmt: skip
        assert row["value"] == pytest.approx(score["value"], abs=0.05)  # of a part of the texts


def test_only_some_texts_may_be_spent_on_parts_and_schedules(settings, study):
    some = replace(settings, sections=("parts", "alternation"), part_texts=100, schedule_texts=40)
    found, _ = study_shortcuts(tiny("llama"), some)
    counts = {row["rows"] for row in found["parts"]["scores"]}
    assert len(counts) == 1
    assert 60 < counts.pop() < 140  # each text is drawn with a chance of 100 in 300
    assert 15 < found["schedules"][0]["rows"] < 70
    everywhere = {
        (row["map"], row["layer"]): row["value"]
        for row in study["parts"]["scores"]
        if row["metric"] == "precision@1" and not row["bias"]
    }
    for row in rows_of(found["parts"]["scores"], metric="precision@1", bias=False):
        assert row["value"] == pytest.approx(everywhere[row["map"], row["layer"]], abs=0.2)


def test_sections_can_be_left_out_and_the_claims_say_so(settings, tmp_path):
    bare, _ = study_shortcuts(tiny("llama"), replace(settings, sections=()))
    assert [bare[key] for key in ("parts", "schedules", "exits", "calibrated", "tuned")] == [
        None
    ] * 5
    assert {row["fit"] for row in bare["scores"]} == {"-", settings.text}
    said = {row["claim"]: row for row in bare["claims"]}
    tested = [row for row in said.values() if row["agrees"] != "not tested"]
    assert 3 <= len(tested) < len(said)
    assert all(row["why"] for row in said.values())
    assert write_report(bare, tmp_path).exists()


def test_the_verdict_of_a_claim_follows_the_data(study):
    before = {row["claim"]: row["agrees"] for row in claims(study)}
    turned = copy.deepcopy(study)
    text = study["settings"]["text"]
    for row in turned["scores"]:
        if row["fit"] in ("-", text):
            row["fit"] = "-" if row["fit"] == text else text
    for row in turned["r2"]:
        row["map"] = {"mat": "id", "id": "mat"}[row["map"]]
    for row in turned["exits"]["saved"]:
        row["saved"] = -row["saved"]
    after = {row["claim"]: row["agrees"] for row in claims(turned)}
    for word in ("more often", "less surprised", "all pairs", "early exit saves"):
        (claim,) = (claim for claim in before if word in claim)
        assert (before[claim], after[claim]) == ("yes", "no"), claim


def test_too_few_rows_for_a_promise_are_noted_and_the_rest_is_there(settings, tmp_path):
    few, _ = study_shortcuts(tiny("llama"), replace(settings, n_read=60))
    assert few["exits"] is not None
    assert few["calibrated"] is None
    (note,) = (note for note in few["notes"] if "promise" in note)
    assert "at least 59 are needed" in note
    assert write_report(few, tmp_path).exists()


def test_a_model_whose_parts_are_not_known_says_why(settings, monkeypatch):
    transformer = tiny("llama")
    monkeypatch.setattr(transformer, "anatomy", ("nothing adds up",) * LAST)
    found, _ = study_shortcuts(transformer, replace(settings, sections=("parts",)))
    assert "nothing adds up" in found["parts"]["reason"]
    assert found["parts"]["scores"] == []
    untested = [row for row in found["claims"] if "nothing adds up" in row["why"]]
    assert len(untested) == 3


def test_several_models_are_compared_over_relative_depth(study, settings, tmp_path):
    other = tiny("gpt2")
    monkey = {**study["model"], "name": "the first"}
    found = with_sizes({**study, "model": monkey}, [lambda: other], settings)
    assert {row["model"] for row in found["sizes"]} == {"the first", other.identity.name}
    assert any(row["topic"] == "sizes" for row in found["findings"])
    assert write_report(found, tmp_path).exists()
    with pytest.raises(BadSettings, match="given twice"):
        with_sizes({**study, "model": {**monkey, "name": other.identity.name}}, [lambda: other],
                   settings)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sections": ("parts", "poetry")}, "poetry"),
        ({"tolerance": 1.5}, "tolerance 1.5 is not between 0 and 1"),
        ({"delta": 0.0}, "delta 0.0"),
        ({"part_texts": 0}, "leave the sections out"),
    ],
)
def test_settings_outside_their_meaning_are_refused(change, message):
    with pytest.raises(BadSettings, match=message):
        ShortcutSettings(**change)


def test_every_section_is_on_by_default():
    assert ShortcutSettings().sections == SECTIONS
