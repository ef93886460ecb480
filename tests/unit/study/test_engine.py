"""Which sections of a study run, what they may use, and when their results are taken up again."""

from dataclasses import dataclass

import pytest

from layerleap.errors import BadSettings, BadText, CannotFetch, CannotWrite
from layerleap.study.claims import Claim, Verdict, at_every, opposite
from layerleap.study.engine import Context, Section, Settings, Study, option
from layerleap.study.result import Finding
from tiny_models import tiny

RAN = []


@dataclass(frozen=True)
class ExtraSettings(Settings):
    more: bool = option(False, "Whether to do more.")


def section(key, **options):
    def run(context):
        RAN.append((key, sorted(context.sections)))
        return {key: [{"value": 1.0}]}

    return Section(key, f"Section {key}", run, **options)


STUDY = Study(
    name="pieces",
    title="Pieces",
    help="What runs?",
    settings=ExtraSettings,
    sections=(
        section(
            "base",
            required=True,
            shows=(
                Claim("Holds for every model.", lambda _: Verdict("yes", "")),
                Claim(
                    "Is about masked models.",
                    lambda _: Verdict("yes", ""),
                    when=lambda r: r.model["kind"] == "masked-token",
                ),
            ),
        ),
        section("first"),
        section("second", after=("first",)),
        section("extra", when=lambda settings: settings.more),
    ),
)


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.fixture(autouse=True)
def nothing_has_run():
    RAN.clear()


def keys():
    return [key for key, _ in RAN]


def test_a_section_knows_which_others_run(llama):
    STUDY(llama, sections=["second"])
    assert RAN == [("base", ["base", "second"]), ("second", ["base", "second"])]


def test_one_section_may_be_named_without_a_list(llama):
    STUDY(llama, sections="second")
    assert keys() == ["base", "second"]
    with pytest.raises(BadSettings, match="no section 'magic'; choose from base, first, second"):
        STUDY(llama, sections="magic")


def test_a_section_that_settings_ask_for_runs_with_them_or_by_name_only(llama):
    STUDY(llama)
    assert keys() == ["base", "first", "second"]
    RAN.clear()
    STUDY(llama, more=True, sections=[])
    assert keys() == ["base", "extra"]
    RAN.clear()
    STUDY(llama, sections=["extra"])
    assert keys() == ["base", "extra"]


def test_a_section_runs_again_if_one_that_it_uses_has_run_since(llama, tmp_path):
    STUDY(llama, sections=["second"], folder=tmp_path)
    STUDY(llama, sections=["second"], folder=tmp_path)
    assert keys() == ["base", "second"]
    STUDY(llama, folder=tmp_path)
    assert keys() == ["base", "second", "first", "second"]
    STUDY(llama, folder=tmp_path)
    assert len(RAN) == 4


def test_a_section_cannot_use_a_later_one():
    with pytest.raises(BadSettings, match="do not run before"):
        Study("wrong", "", "", Settings, (section("a", after=("b",)), section("b")))


def test_claims_about_another_kind_of_model_are_not_listed(llama):
    assert [row["claim"] for row in STUDY(llama).claims] == ["Holds for every model."]
    assert len(STUDY(tiny("bert")).claims) == 2


def test_too_little_text_becomes_a_note_and_any_other_error_does_not(llama, tmp_path):
    context = Context(llama, Settings(), tmp_path, lambda *_: None)

    def fails(error):
        raise error

    assert context.attempt("Some part", lambda: fails(BadText("there is no text"))) is None
    assert context.notes == ["Some part: left out. There is no text."]
    for error in (CannotWrite("no space"), CannotFetch("no library"), BadSettings("no rank 0")):
        with pytest.raises(type(error)):
            context.attempt("Some part", lambda error=error: fails(error))
    assert len(context.notes) == 1


def test_numbers_that_json_lacks_become_none(llama, tmp_path):
    rows = [{"value": float("inf"), "low": float("nan"), "list": [1.0, float("nan")]}]
    study = Study("odd", "", "", Settings, (Section("odd", "Odd", lambda _: {"odd": rows}),))
    result = study(llama, folder=tmp_path)
    assert result.rows("odd") == [{"value": None, "low": None, "list": [1.0, None]}]
    assert study(llama, folder=tmp_path).tables == result.tables
    assert result.save(tmp_path / "study.json").exists()


def test_findings_are_of_sections_that_have_run(llama):
    told = Section("told", "Told", lambda _: {}, findings=lambda _: [Finding("It ran.")])
    study = Study("telling", "", "", Settings, (told, section("other")))
    assert [row["text"] for row in study(llama).findings] == ["It ran."]
    assert study(llama, sections=["other"]).findings == []


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["yes"] * 3, "yes"),
        (["yes", "yes", "no"], "partly"),
        (["yes", "yes", "cannot tell"], "partly"),
        (["yes", "no", "no"], "no"),
        (["yes", "cannot tell", "no"], "cannot tell"),
        (["yes", "cannot tell"], "cannot tell"),
        (["yes", "no"], "no"),
        ([], "cannot tell"),
    ],
)
def test_a_claim_about_all_cases_holds_partly_if_it_holds_in_most(answers, expected):
    assert at_every(answers) == expected


def test_the_opposite_of_an_undecided_claim_is_undecided():
    assert [opposite(a) for a in ("yes", "no", "cannot tell")] == ["no", "yes", "cannot tell"]


@dataclass(frozen=True)
class BoundedSettings(Settings):
    rows: int = option(50, "Rows.", least=2, quick=10)
    limit: int | None = option(None, "Rows at most.", least=1, quick=5)
    share: float = option(0.5, "A share.", within=(0, 1))
    fold: bool = option(True, "Twice.", quick=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 1}, "rows is 1; expected 2 or more"),
        ({"limit": 0}, "limit is 0; expected 1 or more"),
        ({"share": 0.0}, "share is 0.0; expected a share between 0 and 1"),
        ({"share": 1.0}, "share is 1.0; expected a share between 0 and 1"),
    ],
)
def test_options_say_what_values_they_take(change, message):
    assert BoundedSettings(rows=2, limit=1).rows == 2
    with pytest.raises(BadSettings, match=message):
        BoundedSettings(**change)


def test_a_first_look_takes_the_sizes_that_options_name():
    assert BoundedSettings().scaled_down() == BoundedSettings(rows=10, limit=5, fold=False)
    small = BoundedSettings(rows=3, limit=4).scaled_down()
    assert (small.rows, small.limit) == (3, 4)
