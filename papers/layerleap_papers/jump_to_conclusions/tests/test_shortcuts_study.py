"""The shortcuts study from text files to report, on tiny models."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import shortcut_studies

from golden import differences
from intervals import require_inside
from layerleap.errors import BadSettings, BadText
from layerleap.lens.metrics import lasting
from layerleap.maps.bank import ShortcutBank
from layerleap.stream.examples import DENSEST_MASKS, Sampling, iter_examples
from layerleap.stream.generated import NOTE, TextGeneration
from layerleap.study.result import StudyResult
from layerleap_papers.jump_to_conclusions import STUDY, ShortcutSettings, trained
from layerleap_papers.jump_to_conclusions.checks import laws
from layerleap_papers.jump_to_conclusions.curves import half_layers
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext
from studies import make_study
from tiny_models import WORDS, sentences, tiny

LAST = 3
METRICS = ("precision@1", "precision@5", "precision@10", "surprisal", "kl")


@pytest.fixture(scope="module")
def texts():
    """Two files of documents, one a line."""
    return shortcut_studies.texts()


@pytest.fixture(scope="module")
def settings():
    return shortcut_studies.settings()


@pytest.fixture(scope="module", params=["llama", "bert"])
def case(request):
    return tiny(request.param), shortcut_studies.made(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def value(study, fit, read, metric, layer):
    (row,) = study.rows("scores", fit=fit, read=read, metric=metric, layer=layer)
    return row["value"]


def without_times(study):
    """All that a study says but when it was made and how long that took."""
    if isinstance(study, StudyResult):
        study = study.to_dict()
        study["notes"] = [n for n in study["notes"] if not n.startswith("Sections taken")]
    if isinstance(study, list):
        return [without_times(value) for value in study]
    if not isinstance(study, dict):
        return study
    times = ("made", "seconds", "seconds_needed", "run", "resumed")
    return {key: without_times(value) for key, value in study.items() if key not in times}


def fitted_in(folder):
    """The banks that a study keeps, but for the second one that has its parts with a bias."""
    return [path for path in folder.glob("fitted-*") if not path.name.endswith("-biased")]


def test_a_small_study_measures_what_it_did_before():
    assert not differences(shortcut_studies.made(), "jump_to_conclusions")


def test_a_study_has_the_tables_that_the_report_is_tested_with(case):
    _, study = case
    wanted = make_study(full=True)
    assert set(wanted.tables) - set(study.tables) == {"sizes"}
    assert set(study.tables) - set(wanted.tables) == {"part_fits"}
    assert set(study.model) == set(wanted.model)
    assert set(study.data[0]) == set(wanted.data[0])
    for name in (
        "r2",
        "r2_lead",
        "scores",
        "lead",
        "transfer",
        "laws",
        "tail",
        "part_leads",
        "schedules",
        "schedule_leads",
        "schedule_means",
        "tuned_scores",
        "exits_lead",
        "exits_cost",
    ):
        assert {frozenset(row) for row in study.rows(name)} <= {frozenset(wanted.rows(name)[0])}, (
            name
        )
    plain = study.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert (plain["format"], study.study) == (2, "shortcuts")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", study.made)
    assert study.run["whole"]


def test_tables_have_a_row_for_everything(case, texts):
    _, study = case
    one, two = texts
    pairs = {(src, dst) for src in range(LAST) for dst in range(src + 1, LAST + 1)}
    assert {(r["map"], r["src"], r["dst"]) for r in study.tables["r2"]} == {
        (name, *pair) for name in ("mat", "id") for pair in pairs
    }
    assert [(r["src"], r["dst"]) for r in study.tables["fits"]] == sorted(pairs)
    rows = [*study.tables["scores"], *study.tables["tuned_scores"]]
    keys = [(r["fit"], r["read"], r["map"], r["metric"], r["layer"]) for r in rows]
    assert len(keys) == len(set(keys))
    assert set(keys) == {
        (fit, read, {"-": "id", "tuned": "tuned"}.get(fit, "mat"), metric, layer)
        for fit in ("-", one, two, "tuned")
        for read in (one, two)
        for metric in METRICS
        for layer in range(LAST + 1)
    }


def test_sizes_are_those_asked_for_and_those_seen(case, texts):
    _, study = case
    data = {(row["role"], row["text"]): row for row in study.data}
    assert list(data) == [(role, text) for role in ("fit", "read") for text in texts]
    for text in texts:
        assert data["fit", text]["texts"] == data["fit", text]["rows"] == 600
        assert data["read", text]["texts"] == 200
    assert {row["rows"] for row in study.tables["fits"]} == {600}
    for row in study.tables["scores"]:
        assert row["rows"] == data["read", row["read"]]["rows"]
        assert row["documents"] == data["read", row["read"]]["documents"]
    for row in study.tables["r2"]:
        assert row["rows"] == data["read", texts[0]]["rows"]


def test_fitted_and_read_documents_are_disjoint(case, settings, texts):
    transformer, study = case
    data = {(row["role"], row["text"]): row for row in study.data}
    for text in texts:
        sides = {
            side: list(iter_examples(transformer, text, Sampling(), side=side, n_texts=n))
            for side, n in (("fit", settings.n_fit), ("held-out", settings.n_read))
        }
        fitted, read = ({e.document for e in examples} for examples in sides.values())
        assert not fitted & read
        assert len(fitted) == data["fit", text]["documents"]
        assert len(read) == data["read", text]["documents"]


def test_all_laws_hold(case, texts):
    _, study = case
    assert [law["holds"] for law in study.tables["laws"]] == [True] * 3
    assert [check["text"] for check in study.tables["tail"]] == list(texts)
    for check in study.tables["tail"]:
        assert check["rows"] > 0
        assert check["agreement"] == 1
        assert f"100.0 % of {check['rows']} rows" in study.tables["laws"][0]["detail"]
    for fit in ("-", *texts):
        for read in texts:
            for k in (1, 5, 10):
                assert value(study, fit, read, f"precision@{k}", LAST) == 1
            for layer in range(LAST + 1):
                one, five, ten = (
                    value(study, fit, read, f"precision@{k}", layer) for k in (1, 5, 10)
                )
                assert one <= five <= ten
            floor = value(study, fit, read, "surprisal", LAST)
            assert all(
                value(study, fit, read, "surprisal", layer) >= floor - 1e-6 for layer in range(LAST)
            )
    assert all(fit["train_r2"] >= fit["train_r2_logit"] for fit in study.tables["fits"])


def test_a_broken_law_is_noticed(case):
    _, study = case
    tables = study.tables
    row = study.row("scores", metric="precision@5", layer=LAST)
    broken = {
        **tables,
        "scores": [{**r, "value": 0.5} if r is row else r for r in tables["scores"]],
    }
    assert [law["holds"] for law in laws(broken)] == [True, False, True]
    other_tail = [{**tables["tail"][0], "agreement": 0.98}]
    assert [law["holds"] for law in laws({**tables, "tail": other_tail})] == [False, True, True]
    unchecked = [{**other_tail[0], "rows": 0, "agreement": None}]
    assert not laws({**tables, "tail": unchecked})[0]["holds"]
    worse = {**tables, "fits": [{**tables["fits"][0], "train_r2": -9.0}, *tables["fits"][1:]]}
    assert [law["holds"] for law in laws(worse)] == [True, True, False]
    assert "5 of 6 fits" in laws(worse)[2]["detail"]


def said(study, under):
    return [row["text"] for row in study.findings if row["under"] == under]


def test_headlines_say_what_the_tables_say(case, texts):
    transformer, study = case
    one = texts[0]
    mat = [value(study, one, one, "precision@1", layer) for layer in range(LAST + 1)]
    plain = [value(study, "-", one, "precision@1", layer) for layer in range(LAST + 1)]
    first, second, third = study.headlines
    assert first.startswith("After 1 of 3 layers")
    shares = [f"{100 * share:.0f} %" for share in (mat[1], plain[1])]
    assert f"in {shares[0]} of cases, the logit lens in {shares[1]} (" in first
    assert ("masked token" in first) == (transformer.kind == "masked-token")
    wins = sum(a > b for a, b in zip(mat[:LAST], plain[:LAST], strict=True))
    lead = [a - b for a, b in zip(mat[:LAST], plain[:LAST], strict=True)]
    assert f"at {wins} of the 3 layers" in second
    assert f"at layer {lead.index(max(lead))}: {100 * max(lead):.0f} points" in second
    halves = [min(at for at in range(LAST + 1) if min(curve[at:]) >= 0.5) for curve in (mat, plain)]
    assert half_layers(study) == {"mat": halves[0], "id": halves[1]}
    read = next(row for row in study.data if row["role"] == "read")
    assert f"n = 200 texts of {read['documents']} documents" in first
    assert f"from layer {halves[0]} on, the logit lens from layer {halves[1]} on." in third


def test_other_findings_say_what_the_tables_say(case, texts):
    _, study = case
    one, _two = texts
    for sentence, k in zip(said(study, "precision"), (1, 5, 10), strict=True):
        mat, plain = (value(study, fit, one, f"precision@{k}", 0) for fit in (one, "-"))
        mat, plain = (f"{100 * share:.0f} %" for share in (mat, plain))
        assert f"Precision@{k} is between {mat} and {mat} with shortcuts" in sentence
        assert f"between {plain} and {plain} with the logit lens" in sentence
    (surprisal,) = said(study, "surprisal")
    at = [value(study, fit, one, "surprisal", 1) for fit in (one, "-")]
    assert f"is {at[0]:.1f} against {at[1]:.1f} nats" in surprisal
    assert f"is {value(study, one, one, 'surprisal', LAST):.2f} nats" in surprisal
    (kl,) = said(study, "kl")
    at = [value(study, fit, one, "kl", 1) for fit in (one, "-")]
    assert f"is {at[0]:.1f} nats for the shortcut and {at[1]:.1f} nats for the logit lens." in kl
    by = {(row["map"], row["src"], row["dst"]): row["r2"] for row in study.tables["r2"]}
    wins = sum(by["mat", *p] > by["id", *p] for p in {key[1:] for key in by})
    count, means, other = said(study, "r2")
    assert f"in {wins} of 6 pairs" in count
    steps = [sum(by[name, at, at + 1] for at in range(LAST)) / LAST for name in ("mat", "id")]
    assert f"mean R2 is {steps[0]:.2f} with shortcuts and {steps[1]:.2f} without" in means
    assert f"network it is {by['mat', 0, LAST]:.2f} and {by['id', 0, LAST]:.2f}." in means
    finals = [row for row in study.tables["r2"] if row["map"] == "mat" and row["dst"] == LAST]
    for key in ("r2", "weighted", "no_first"):
        assert f"{sum(row[key] for row in finals) / LAST:.2f}" in other


def test_transfer_is_the_mean_change_of_agreement(case, texts):
    _, study = case
    sentences_ = said(study, "transfer")
    assert {row["read"]: row["own_fit"] for row in study.rows("transfer")} == {t: t for t in texts}
    for sentence, (read, away) in zip(sentences_, (texts, texts[::-1]), strict=True):
        change = [
            value(study, away, read, "precision@1", layer)
            - value(study, read, read, "precision@1", layer)
            for layer in range(LAST)
        ]
        mean = 100 * sum(change) / LAST
        verb = "loses" if mean < 0 else "gains"
        assert f"fitted on {away} {verb} {abs(mean):.1f} points" in sentence
        row = study.row("transfer", read=read)
        assert 100 * row["value"] == pytest.approx(mean)
        assert row["low"] <= row["value"] <= row["high"]
        assert sentence.endswith(f"(600 rows of {away}, 600 of {read}).")


@pytest.mark.parametrize("order", [1, -1])
def test_transfer_between_texts_of_different_size_compares_fits_of_equal_size(
    llama, tmp_path, order
):
    for name, seed, count in (("large", 0, 400), ("small", 1, 60)):
        (tmp_path / f"{name}.txt").write_text("\n".join(sentences(count, seed)))
    large, small = (str(tmp_path / f"{name}.txt") for name in ("large", "small"))
    main, other = (large, small)[::order]
    settings = ShortcutSettings(text=main, other=other, n_fit=600, n_read=100)
    study = STUDY(llama, settings, folder=tmp_path / "work")
    bank = study.artifacts["bank"]
    data = {(row["role"], row["text"]): row for row in study.data}
    few = data["fit", small]["texts"]
    label = f"{large}, {few} rows"
    assert few < 200
    assert data["fit", label]["rows"] == data["fit", small]["rows"] == few
    assert {r["read"]: r["own_fit"] for r in study.rows("transfer")} == {large: label, small: small}
    rows = [*study.tables["scores"], *study.tables["tuned_scores"]]
    assert {(r["fit"], r["read"]) for r in rows} == {
        (fit, read) for fit in ("-", large, small, label, "tuned") for read in (large, small)
    }
    by_read = dict(zip((main, other), said(study, "transfer"), strict=True))
    for read, away, home in ((large, small, label), (small, label, small)):
        change = [
            value(study, away, read, "precision@1", layer)
            - value(study, home, read, "precision@1", layer)
            for layer in range(LAST)
        ]
        assert f"{abs(100 * sum(change) / LAST):.1f} points" in by_read[read]
        assert by_read[read].count(f"{few} ") == 2
    assert f"{small}: only {few} of 600 texts were found to fit on." in study.notes
    assert not any(label in note for note in study.notes)
    assert bank.data["rows_fitted"] == data["fit", main]["rows"]
    assert "fit on" not in " ".join(n for n in study.notes if n.startswith(large))
    again = STUDY(llama, settings, folder=tmp_path / "work")
    assert without_times(again) == without_times(study)
    assert study.report(tmp_path / "report").exists()


def test_the_bank_of_a_study_leads_to_the_last_layer_and_carries_its_scores(case, texts, tmp_path):
    transformer, study = case
    bank = study.artifacts["bank"]
    assert sorted(bank.maps) == [(src, LAST) for src in range(LAST)]
    bank.check_model(transformer)
    assert len(bank.quality) == LAST + 1
    for row in bank.quality:
        for fit, name in ((texts[0], "mat"), ("-", "id")):
            wanted = value(study, fit, texts[0], "precision@1", row["layer"])
            assert row[f"precision@1 {name}"] == wanted
            assert row[f"precision@1 {name} low"] <= wanted <= row[f"precision@1 {name} high"]
            for metric in ("surprisal", "kl"):
                wanted = value(study, fit, texts[0], metric, row["layer"])
                assert row[f"{metric} {name}"] == wanted
        assert (row["rows"], row["documents"]) == (
            study.tables["r2"][0]["rows"],
            study.tables["r2"][0]["documents"],
        )
    loaded = ShortcutBank.from_pretrained(bank.save_pretrained(tmp_path / "bank"))
    assert loaded.quality == bank.quality
    assert bank.data["text"] == texts[0]
    assert "Scores on held-out text:" in bank.card()


def test_a_report_is_written_from_it(case, tmp_path):
    _, study = case
    page = study.report(tmp_path)
    names = {"report.html", "study.json", "summary.png", "bank"}
    names |= {f"{name}.csv" for name, rows in study.tables.items() if rows}
    assert {p.name for p in tmp_path.iterdir()} >= names
    assert StudyResult.load(tmp_path / "study.json").to_dict() == study.to_dict()
    text = page.read_text(encoding="utf8")
    assert study.model["name"] in text
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == len(study.rows("scores")) + 1


def test_a_study_is_reproducible(case, settings):
    transformer, study = case
    assert without_times(STUDY(transformer, settings)) == without_times(study)


class Interrupter:
    """Progress that stops the run at the n-th batch of a phase, and notes what it was told."""

    def __init__(self, phase="", at=0):
        self.phase, self.at, self.told = phase, at, []

    def __call__(self, phase, done, total, unit="texts"):
        self.told.append((phase, done))
        if self.phase and phase == self.phase and len(self.done(phase)) == self.at:
            raise KeyboardInterrupt

    def done(self, phase):
        return [done for told, done in self.told if told == phase]


@pytest.mark.parametrize("which", [0, 1])
def test_an_interrupted_study_goes_on_and_ends_the_same(case, settings, tmp_path, which):
    transformer, study = case
    phase = f"fitting on {(settings.text, settings.other)[which]}"
    stopped = Interrupter(phase, at=2)
    with pytest.raises(KeyboardInterrupt):
        STUDY(transformer, settings, folder=tmp_path, progress=stopped)
    assert len(list(tmp_path.glob("fitting-*.safetensors"))) == 1
    assert len(fitted_in(tmp_path)) == which
    resumed = Interrupter()
    again = STUDY(transformer, settings, folder=tmp_path, progress=resumed)
    assert without_times(again) == without_times(study)
    assert resumed.done(phase)[0] > stopped.done(phase)[-1]  # not from the start
    assert bool(resumed.done(f"fitting on {settings.text}")) == (which == 0)
    assert not list(tmp_path.glob("fitting-*"))
    for pair, shortcut in study.artifacts["bank"].maps.items():
        assert shortcut.weight.equal(again.artifacts["bank"].maps[pair].weight)


@pytest.mark.parametrize(
    ("phase", "at"),
    [
        ("training from mat", 1),
        ("replacing parts", 1),
        ("running schedules", 1),
        ("study of shortcuts", 5),
    ],
)
def test_a_study_interrupted_in_a_section_goes_on_with_it(case, settings, tmp_path, phase, at):
    transformer, study = case
    with pytest.raises(KeyboardInterrupt):
        STUDY(transformer, settings, folder=tmp_path, progress=Interrupter(phase, at=at))
    resumed = Interrupter()
    again = STUDY(transformer, settings, folder=tmp_path, progress=resumed)
    assert without_times(again) == without_times(study)
    assert not [told for told, _ in resumed.told if told.startswith("fitting")]
    was_read = phase != "training from mat"
    assert bool(resumed.done(f"reading {settings.text}")) != was_read
    assert again.run["whole"] != was_read


def test_training_goes_on_where_another_number_of_threads_rounds_the_maps_differently(
    llama, settings, tmp_path, monkeypatch
):
    settings = replace(settings, other=None)
    study = STUDY(llama, settings, sections=["tuned"])
    run = partial(STUDY, llama, settings, folder=tmp_path, sections=["tuned"])
    with pytest.raises(KeyboardInterrupt):
        run(progress=Interrupter("training from mat", at=1))
    bank_of = trained.bank_of

    def rounded_differently(*args):
        bank = bank_of(*args)
        for shortcut in bank.maps.values():
            shortcut.weight.mul_(1 + 1e-6)
        return bank

    monkeypatch.setattr(trained, "bank_of", rounded_differently)
    assert without_times(run()) == without_times(study)


def test_a_study_interrupted_while_reading_does_not_fit_again(case, settings, tmp_path):
    transformer, study = case
    with pytest.raises(KeyboardInterrupt):
        STUDY(
            transformer,
            settings,
            folder=tmp_path,
            progress=Interrupter(f"reading {settings.other}", at=1),
        )
    resumed = Interrupter()
    again = STUDY(transformer, settings, folder=tmp_path, progress=resumed)
    assert without_times(again) == without_times(study)
    assert not [phase for phase, _ in resumed.told if phase.startswith("fitting")]
    assert not resumed.done(f"reading {settings.text}")  # the text that had been read


@pytest.mark.parametrize("change", ["n_read", "text", "damage", "bank"])
def test_a_text_is_read_again_if_anything_behind_its_tables_has_changed(llama, tmp_path, change):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(sentences(100)))
    settings = ShortcutSettings(text=str(file), other=None, n_fit=100, n_read=30)
    STUDY(llama, settings, folder=tmp_path / "work", sections=["tuned"])
    (saved,) = (tmp_path / "work").glob("read-*.json")
    if change == "n_read":
        settings = replace(settings, n_read=20)
    elif change == "text":
        file.write_text("\n".join(sentences(120, 5)))
    elif change == "damage":
        saved.write_text("{}")
        (tmp_path / "work" / "section-readings.json").write_text("{}")
    else:
        settings = replace(settings, ridge=0.5)
    told = Interrupter()
    again = STUDY(llama, settings, folder=tmp_path / "work", progress=told, sections=["tuned"])
    assert told.done(f"reading {file}")
    assert without_times(again) == without_times(STUDY(llama, settings, sections=["tuned"]))


@pytest.mark.parametrize("change", [{"n_fit": 300}, {"intercept": True}, {"ridge": 0.1}])
def test_work_of_other_settings_is_not_taken_up(llama, settings, tmp_path, change):
    STUDY(llama, settings, other=None, folder=tmp_path)
    again = STUDY(llama, settings, other=None, folder=tmp_path, **change)
    assert without_times(again) == without_times(STUDY(llama, settings, other=None, **change))


def test_an_unfinished_fit_with_other_settings_is_in_nobodys_way(llama, settings, tmp_path):
    stop = Interrupter(f"fitting on {settings.text}", at=2)
    with pytest.raises(KeyboardInterrupt):
        STUDY(llama, settings, other=None, folder=tmp_path, sections=[], progress=stop)
    changed = {"other": None, "sections": [], "n_fit": 200}
    again = STUDY(llama, settings, folder=tmp_path, **changed)
    assert without_times(again) == without_times(STUDY(llama, settings, **changed))


def test_work_of_another_model_or_damaged_work_is_not_taken_up(llama, settings, tmp_path):
    alone = replace(settings, other=None)
    STUDY(tiny("llama", seed=1), alone, folder=tmp_path)
    wanted = without_times(STUDY(llama, alone))
    before = set(fitted_in(tmp_path))
    assert without_times(STUDY(llama, alone, folder=tmp_path)) == wanted
    (saved,) = set(fitted_in(tmp_path)) - before
    (saved / "maps.safetensors").write_bytes(b"cut")
    for file in tmp_path.glob("section-*.json"):
        file.unlink()
    assert without_times(STUDY(llama, alone, folder=tmp_path)) == wanted


def test_texts_with_similar_names_do_not_share_their_work(llama, tmp_path):
    for name in ("a-b.txt", "a_b.txt"):
        (tmp_path / name).write_text("\n".join(sentences(60, len(name))))
    settings = ShortcutSettings(
        text=str(tmp_path / "a-b.txt"), other=str(tmp_path / "a_b.txt"), n_fit=90, n_read=30
    )
    STUDY(llama, settings, folder=tmp_path / "work", sections=[])
    assert len(fitted_in(tmp_path / "work")) == 2
    context = ShortcutContext(llama, settings, tmp_path, lambda *_: None)
    long = [context.file("read", f"{'x' * 100}/{end}/{'y' * 100}") for end in "ab"]
    assert long[0] != long[1]
    assert {path.parent for path in long} == {tmp_path}


def test_final_pairs_leave_out_inner_layers(llama, settings):
    study = STUDY(llama, settings, pairs="final")
    bank = study.artifacts["bank"]
    assert {(r["src"], r["dst"]) for r in study.tables["r2"]} == {(0, 3), (1, 3), (2, 3)}
    assert len(study.tables["fits"]) == len(bank) == 3
    assert all(law["holds"] for law in study.tables["laws"])
    assert any("all pairs of layers" in note for note in study.notes)  # why there are no schedules
    assert not study.failed


def test_without_another_text_there_is_no_transfer(llama, settings, texts, tmp_path):
    study = STUDY(llama, settings, other=None)
    assert said(study, "transfer") == []
    assert {row["read"] for row in study.tables["scores"]} == {texts[0]}
    assert {row["fit"] for row in study.tables["scores"]} == {"-", texts[0]}
    assert {row["read"] for row in study.tables["tuned_scores"]} == {texts[0]}
    assert [row["role"] for row in study.data] == ["fit", "read"]
    assert study.report(tmp_path).exists()


@pytest.mark.parametrize("options", [{"ridge": "auto"}, {"ridge": 0.01}, {"intercept": True}])
def test_kinds_of_fit_are_carried_out_and_noted(llama, settings, options):
    study = STUDY(llama, settings, other=None, **options)
    bank = study.artifacts["bank"]
    assert {key: study.settings[key] for key in options} == options
    assert (bank[0, LAST].bias is not None) == ("intercept" in options)
    if options.get("ridge") == 0.01:
        assert {fit["ridge"] for fit in study.tables["fits"]} == {0.01}
    assert all(law["holds"] for law in study.tables["laws"])


def test_few_rows_are_called_rank_deficient(llama, settings):
    study = STUDY(llama, settings, other=None, n_fit=10)
    bank = study.artifacts["bank"]
    warning, _ = said(study, "fit")
    assert "3 of 3 fits to the last layer are rank-deficient: 10 rows" in warning
    assert "rank-deficient" in bank.card()
    assert any("3 of 3 maps to the last layer" in note for note in study.notes)


def test_a_text_of_one_document_is_refused_with_the_reason(llama, tmp_path):
    reasons = set()
    (tmp_path / "one.txt").write_text("the cat sat on the mat and then it slept")
    for seed in range(8):  # by the seed the document falls to one side or the other
        settings = ShortcutSettings(text=str(tmp_path / "one.txt"), other=None, seed=seed)
        with pytest.raises(BadText, match=r"fell to the (fit|held-out) side") as caught:
            STUDY(llama, settings)
        assert "give more" in str(caught.value)
        assert "\n" not in str(caught.value)
        reasons.add("held-out" in str(caught.value))
    assert reasons == {True, False}


def test_another_text_without_held_out_documents_is_refused_with_the_reason(
    llama, settings, tmp_path
):
    for seed in range(8):
        (tmp_path / "other.txt").write_text("\n".join(sentences(1, seed)))
        with pytest.raises(BadText, match=r"other.txt' fell to the (fit|held-out) side"):
            STUDY(llama, settings, other=str(tmp_path / "other.txt"), sections=[], n_fit=50)


@pytest.mark.parametrize("side", ["fit", "held-out"])
def test_another_text_that_has_changed_is_fitted_and_read_again(llama, settings, tmp_path, side):
    other = tmp_path / "other.txt"
    documents = sentences(60, 8)
    other.write_text("\n".join(documents))
    changed = {"other": str(other), "sections": [], "n_fit": 100, "n_read": 20}
    STUDY(llama, settings, folder=tmp_path / "work", **changed)
    sides = {
        s: {e.document for e in iter_examples(llama, str(other), Sampling(), side=s)}
        for s in ("fit", "held-out")
    }
    number = min(sides[side])
    documents[number] = documents[number].replace(" .", " slept .", 1)
    other.write_text("\n".join(documents))
    again = STUDY(llama, settings, folder=tmp_path / "work", **changed)
    assert without_times(again) == without_times(STUDY(llama, settings, **changed))
    assert again.run["whole"]


def test_one_held_out_document_gives_values_without_intervals(llama, tmp_path):
    (tmp_path / "few.txt").write_text("\n".join(sentences(12)))
    study = STUDY(llama, text=str(tmp_path / "few.txt"), other=None, n_read=1, sections=[])
    for row in study.tables["scores"]:
        assert (row["documents"], row["low"], row["high"]) == (1, None, None)
    answers = {row["agrees"] for row in study.claims if row["section"] == "readings"}
    assert answers == {"cannot tell", "not tested"}  # point estimates alone decide nothing
    assert study.report(tmp_path / "report").exists()


def test_settings_without_meaning_are_refused(llama, settings):
    with pytest.raises(BadSettings, match="pairs is 'some'"):
        STUDY(llama, settings, pairs="some")
    with pytest.raises(BadSettings, match="expected two texts"):
        STUDY(llama, settings, other=settings.text)
    with pytest.raises(BadSettings, match="no setting 'poems'"):
        STUDY(llama, settings, poems=3)
    with pytest.raises(BadSettings, match="reads images"):
        ShortcutSettings().resolved(tiny("vit"))


def test_a_missing_text_is_refused(llama, settings):
    with pytest.raises(BadText, match="no file or folder"):
        STUDY(llama, settings, text="./no-such-file.txt")


def test_settings_are_flat_and_survive_json(settings, llama):
    flat = replace(settings, beside=("gpt2", llama)).to_dict()
    assert json.loads(json.dumps(flat)) == flat
    assert flat["unit"] == "sentence"
    assert flat["beside"][0] == "gpt2"
    assert flat["beside"][1].startswith("tiny-llama (")


def test_a_quick_study_is_small():
    assert ShortcutSettings().scaled_down().n_fit < ShortcutSettings().n_fit
    assert ShortcutSettings(n_fit=5, n_read=5).scaled_down().n_fit == 5


def test_a_full_study_reads_the_large_text_and_a_quick_one_the_small(llama):
    assert ShortcutSettings().resolved(llama).text == "enwik8"
    assert ShortcutSettings().scaled_down().resolved(llama).text == "wikipedia"
    assert ShortcutSettings(text="news").resolved(llama).text == "news"


def test_a_quick_study_reads_several_rows_of_each_text_unless_told_otherwise(llama):
    assert ShortcutSettings().scaled_down().resolved(llama).positions == "every:4"
    assert ShortcutSettings(positions="all").scaled_down().resolved(llama).positions == "all"
    assert ShortcutSettings().resolved(llama).positions == "one"
    masked = ShortcutSettings().scaled_down().resolved(tiny("bert"))
    assert masked.sampling.positions == f"every:{DENSEST_MASKS}"


def test_a_quick_study_leaves_out_the_slowest_sections_unless_they_are_named():
    def keys(**how):
        return [section.key for section in STUDY.chosen(settings=ShortcutSettings(), **how)]

    assert {"tuned", "parts"} < set(keys(wanted=None))
    assert keys(wanted=None, quick=True) == ["readings", "exits"]
    assert keys(wanted=["tuned"], quick=True) == ["readings", "tuned"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((None, "news"), ("enwik8", "news")),
        (("news", "news"), ("news", None)),
        (("generated", "news"), ("generated", None)),
        (("a", None), ("a", None)),
        (("generated", "a"), ("generated", "a")),  # asked for by name
    ],
)
def test_a_text_is_never_compared_with_itself(llama, given, wanted):
    settings = ShortcutSettings(text=given[0], other=given[1]).resolved(llama)
    assert (settings.text, settings.other) == wanted


def test_half_is_reached_where_it_lasts_and_not_at_a_passing_peak():
    assert lasting([0.1, 0.6, 0.4, 0.5, 0.9, 1.0], 0.5) == 3
    assert lasting([0.5, 0.6], 0.5) == 0
    assert lasting([0.6, None, 0.7], 0.5) == 2
    assert lasting([0.6, 0.4], 0.5) is None


@pytest.mark.parametrize("field", ["text", "other", "starts"])
def test_standard_input_is_refused_at_once(field):
    with pytest.raises(BadSettings, match=r"only once.*save it to a file first"):
        ShortcutSettings(**{"text": "generated", field: "-"})


def test_starts_without_generated_texts_are_refused():
    with pytest.raises(BadSettings, match="starts are for texts sampled from the model"):
        ShortcutSettings(text="wikipedia", starts="some.txt")
    assert ShortcutSettings(text="wikipedia", other="generated", starts="some.txt").starts


@pytest.fixture
def few_generated(monkeypatch, empty_cache):
    few = partial(TextGeneration, n_texts=200, max_tokens=12)
    monkeypatch.setattr("layerleap.stream.source.TextGeneration", few)


@pytest.mark.usefixtures("few_generated")
def test_texts_that_the_model_draws_are_studied_by_name():
    settings = ShortcutSettings(text="generated", n_fit=60, n_read=20, field="body")
    study = STUDY(tiny("llama", vocab_size=len(WORDS) + 5), settings)
    assert (study.settings["text"], study.settings["other"]) == ("generated", None)
    assert NOTE in study.notes
    assert study.artifacts["bank"].data["text"] == "generated"


@pytest.mark.usefixtures("few_generated")
def test_starts_are_what_a_masked_model_draws_from(tmp_path):
    starts = tmp_path / "starts.txt"
    starts.write_text("\n\n".join(t.lower().replace(" .", "") for t in sentences(20)))
    bert = tiny("bert", vocab_size=len(WORDS) + 5)
    settings = ShortcutSettings(starts=str(starts), n_fit=60, n_read=20)
    assert STUDY(bert, settings).settings["text"] == "generated"
    with pytest.raises(BadText, match="--starts"):
        STUDY(bert, settings, text="generated", starts=None)


def test_the_text_that_suits_the_model_is_taken_when_none_is_named(llama, texts, monkeypatch):
    monkeypatch.setattr("layerleap.study.texts.default_text", lambda *_: texts[0])
    study = STUDY(llama, other=None, n_fit=100, n_read=20, sections=[])
    assert study.settings["text"] == texts[0]


@pytest.mark.parametrize("n_read", [1, 2])
def test_two_held_out_rows_give_findings_and_json_without_nan(llama, settings, tmp_path, n_read):
    study = STUDY(llama, settings, other=None, n_read=n_read)
    json.dumps([study.to_dict(), study.artifacts["bank"].quality], allow_nan=False)
    assert len(study.headlines) == 3
    assert study.report(tmp_path).exists()


def test_pairs_without_r2_are_left_out_of_what_is_said(case):
    _, study = case
    tables = study.tables["r2"]
    none = [{**row, "r2": None, "weighted": None, "no_first": None} for row in tables]
    for rows, first in ((none, None), ([*none[:1], *tables[1:]], "of 5 pairs")):
        changed = STUDY.conclude(
            replace(study, tables={**study.tables, "r2": rows}, findings=[], claims=[])
        )
        texts = said(changed, "r2")
        assert texts == [] if first is None else first in texts[0]


def test_every_estimate_of_the_study_lies_inside_its_interval(case):
    require_inside(case[1].tables, 10)
