"""Tables for the terminal: nothing lost, nothing hidden, nothing wider than the terminal."""

import io
import re

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from layerleap.lens.readings import LensReadings, Readings
from layerleap.lens.vocabulary.tokens import token_text
from layerleap.models.discovery.laws import LawResult, LawResults
from layerleap.show.cli.tables import claims_table, inventory_table, study_table
from layerleap_papers.jump_to_conclusions import STUDY
from studies import make_study

TABLES = {table.key: table for section in STUDY.sections for table in section.tables}

MODEL = {
    "name": "smollm2",
    "kind": "masked-token",
    "source": "a-package-with-quite-a-long-name-in-it",
    "licence": "Apache-2.0",
    "size": 270_000_000,
    "cached": True,
    "path": "/home/someone/.cache/layerleap/models/smollm2/" + "deep/" * 10,
    "note": "135 million parameters",
}


def printed(renderable, width=80):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def shown(key, result, width=80):
    return printed(study_table(TABLES[key], result), width)


def line_with(text, start):
    return next(line for line in text.splitlines() if line.split()[:1] == [start])


WORDS = [" Paris", " the", "\n", "\x1b[31m", "\u65e5\u672c\u8a9e" * 9, "[bold]", " London", " Rome"]


def lens_readings(tops, agrees, kl):
    """One position: by layer the ids of two tokens, the tick and the divergence."""
    ids = torch.tensor(tops)[:, None]
    probs = torch.tensor([0.5, 0.25]).expand(ids.shape)
    ticks, gaps = (torch.tensor(values)[:, None] for values in (agrees, kl))
    return LensReadings(ids, probs, ticks, gaps, gaps)


READINGS = Readings(
    [" is"],
    [0],
    2,
    {
        "logit": lens_readings([[2, 3], [4, 5], [0, 7]], [False, False, True], [7.5, 5.0, 0.0]),
        "linear": lens_readings([[0, 1], [0, 6], [0, 7]], [False, True, True], [2.25, 0.125, 0.0]),
    },
    WORDS.__getitem__,
)
LAWS = LawResults(
    LawResult(name, status, "")
    for name, status in zip("abcd", ["holds", "fails", "holds", "not applicable"], strict=True)
)


@pytest.mark.parametrize(
    "renderable",
    [
        *(
            study_table(table, make_study(30, full=True))
            for table in TABLES.values()
            if table.terminal
        ),
        claims_table(make_study(30, full=True)),
        LawResults([LawResult("word " * 30, "not applicable", "why " * 40)]),
        inventory_table([MODEL]),
        READINGS,
    ],
    ids=["agreement", "exits", "claims", "laws", "inventory", "readings"],
)
@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(renderable, width):
    lines = printed(renderable, width).splitlines()
    assert max(cell_len(line) for line in lines) <= width


def test_agreement_is_shown_for_every_lens_at_every_layer():
    result = make_study(4)
    text = shown("agreement-table", result)
    for layer in range(5):
        mat, plain = (
            result.row("scores", fit=fit, read="wikipedia", metric="precision@1", layer=layer)
            for fit in ("wikipedia", "-")
        )
        wanted = [str(layer)]
        for row in (mat, plain):
            value, low, high = (f"{100 * row[key]:.1f}" for key in ("value", "low", "high"))
            wanted += [value, low, "to", high]
        assert line_with(text, str(layer)).split() == wanted


def test_markup_in_a_text_stays_a_text():
    result = make_study(full=True)
    for row in result.tables["exits_saved"]:
        row["rule"] = "[red]x[/red]"
    assert "[red]x[/red]" in shown("saved-table", result, width=200)
    result.claims[0]["claim"] = "[bold]y"
    assert "[bold]y" in printed(claims_table(result))


def test_the_laws_are_counted_by_verdict():
    text = printed(LAWS)
    assert "2 hold, 1 fail, 1 not applicable" in text
    assert line_with(text, "b").split()[:2] == ["b", "fails"]


def test_the_inventory_keeps_names_whole_and_shows_path_and_note():
    text = printed(
        inventory_table([MODEL, MODEL | {"name": "bert", "cached": False, "size": None}])
    )
    assert line_with(text, "smollm2").split()[1:4] == ["masked-token", "270", "MB"]
    assert line_with(text, "smollm2").split()[-1] == "yes"
    assert line_with(text, "bert").split()[-1] == "no"
    assert "135 million parameters" in text
    assert MODEL["path"] in "".join(text.split())


@pytest.mark.parametrize(
    ("token", "label"),
    [
        (" the", "\u2423the"),
        ("\n", "\u23ce"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\u200b", "\\u200b"),
        ("\u202e", "\\u202e"),
        ("", "''"),
        ("\u00e9t\u00e9", "\u00e9t\u00e9"),
    ],
)
def test_nothing_in_a_token_is_invisible(token, label):
    assert token_text(token) == label


def test_readings_stand_side_by_side_with_agreement_and_kl():
    text = printed(READINGS)
    first, second = line_with(text, "0"), line_with(text, "1")
    assert first.index("\u23ce") < first.index("7.50") < first.index("Paris") < first.index("2.25")
    assert "\x1b" not in text
    assert "\u2713" not in first
    assert second.count("\u2713") == 1
    assert second.index("\u2713") > second.index("Paris")


def test_the_last_layer_is_the_models_own_answer():
    text = printed(READINGS)
    assert "own answer: \u2423Paris 50%  \u2423Rome 25%" in line_with(text, "2")
    assert "own answer" not in line_with(text, "1")


def test_each_layer_takes_one_line():
    lines = [line for line in printed(READINGS).splitlines() if line.strip()]
    assert len(lines) == 1 + 2 + 2 + 1 + 1  # headline, head and rule, two layers, answer, legend


def test_layers_saved_are_shown_by_map_and_rule():
    result = make_study(30, full=True)
    text = shown("saved-table", result, width=200)
    row = result.row("exits_saved", map="mat", rule="top probability", target=0.95)
    line = next(line for line in text.splitlines() if line.split()[:2] == ["mat", "top"])
    assert f" {row['saved']:.1f} " in line
    assert f"{100 * row['flops']:.0f} %".replace("-", "\u2212") in line
    similar = next(line for line in text.splitlines() if "similarity" in line)
    assert similar.split()[-1] == "\u2013"


def test_every_claim_is_shown_with_its_answer():
    result = make_study(full=True)
    words = " ".join(printed(claims_table(result), width=400).split())
    for row in (row for row in result.claims if row["agrees"] != "not tested"):
        assert re.search(
            rf"{re.escape(row['claim'])} {row['agrees']} {re.escape(row['seen'])}", words
        )


def test_claims_that_were_not_tested_are_counted_below_the_table():
    result = make_study(full=True)
    first, second, *_ = result.claims
    for row in (first, second):
        row |= {"agrees": "not tested", "seen": "section 'x' was not run"}
    n = sum(row["agrees"] == "not tested" for row in result.claims)
    words = " ".join(printed(claims_table(result), width=400).split())
    assert first["claim"] not in words
    assert f"{n} more could not be tested in this run" in words


def test_a_study_without_exits_has_no_such_table():
    assert study_table(TABLES["saved-table"], make_study()) is None


def test_names_of_rules_are_whole_in_a_terminal_of_80_columns():
    result = make_study(30, full=True)
    words = set(shown("saved-table", result).split())
    rules = {row["rule"] for row in result.rows("exits_saved")}
    assert len(rules) > 3
    assert {word for rule in rules for word in rule.split()} <= words
