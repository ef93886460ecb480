"""Tables for the terminal: nothing lost, nothing hidden, nothing wider than the terminal."""

import io
import re

import pytest
from layerleap.show.cli.exit_tables import claims_table, exits_table
from rich.cells import cell_len
from rich.console import Console
from studies import make_study

from layerleap.show.cli.tables import (
    inventory_table,
    laws_table,
    readings_table,
    study_table,
    visible,
)

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


def line_with(text, start):
    return next(line for line in text.splitlines() if line.split()[:1] == [start])


def reading(name, layer, *tokens, agrees=False, kl=1.0):
    top = [{"token": token, "prob": 0.5 / (place + 1)} for place, token in enumerate(tokens)]
    return {"map": name, "layer": layer, "top": top, "agrees": agrees, "kl": kl}


FRAME = [
    reading("mat", 0, " Paris", " the", kl=2.25),
    reading("id", 0, "\n", "\x1b[31m", "[bold]", kl=7.5),
    reading("id", 1, "\u65e5\u672c\u8a9e" * 9, "x", kl=5.0),
    reading("mat", 1, " Paris", " London", agrees=True, kl=0.125),
    reading("id", 2, " Paris", " Rome", agrees=True, kl=0.0),
    reading("mat", 2, " Paris", " Rome", agrees=True, kl=0.0),
]


@pytest.mark.parametrize(
    "renderable",
    [
        study_table(make_study(30, name="a/" + "long-" * 30)),
        study_table(make_study(30, full=True)),
        exits_table(make_study(30, full=True)),
        claims_table(make_study(30, full=True)),
        laws_table([{"law": "word " * 30, "status": "not applicable", "detail": "why " * 40}]),
        inventory_table([MODEL]),
        readings_table(FRAME),
    ],
    ids=["study", "full study", "exits", "claims", "laws", "inventory", "readings"],
)
@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(renderable, width):
    lines = printed(renderable, width).splitlines()
    assert max(cell_len(line) for line in lines) <= width


def test_the_study_table_has_both_maps_at_every_layer_and_its_n():
    study = make_study(4)
    text = printed(study_table(study))
    shown = {
        (row["map"], row["layer"]): f"{100 * row['value']:.1f} %"
        for row in study["scores"]
        if row["metric"] == "precision@1" and row["read"] == "wikipedia" and row["fit"] != "news"
    }
    for layer in range(5):
        line = line_with(text, str(layer))
        assert line.index(shown["id", layer]) < line.rindex(shown["mat", layer])
    assert "n = 3,000 states from 26 documents" in text


def test_a_longer_bar_means_more_agreement():
    text = printed(study_table(make_study(30)))
    lengths = [line_with(text, str(layer)).count("\u2501") for layer in (0, 20, 30)]
    assert lengths == sorted(set(lengths))


def test_markup_in_a_name_stays_a_name():
    assert "[red]x[/red]" in printed(study_table(make_study(name="[red]x[/red]")))


def test_the_laws_are_counted_by_verdict():
    rows = [
        {"law": name, "status": status, "detail": ""}
        for name, status in zip("abcd", ["holds", "fails", "holds", "not applicable"], strict=True)
    ]
    text = printed(laws_table(rows))
    assert "2 hold, 1 fail, 1 not applicable" in text
    assert line_with(text, "b").split() == ["b", "fails"]


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
    ("token", "shown"),
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
def test_nothing_in_a_token_is_invisible(token, shown):
    assert visible(token) == shown


def test_readings_stand_side_by_side_with_agreement_and_kl():
    text = printed(readings_table(FRAME))
    first, second = line_with(text, "0"), line_with(text, "1")
    assert first.index("\u23ce") < first.index("7.50") < first.index("Paris") < first.index("2.25")
    assert "\x1b" not in text
    assert "\u2713" not in first
    assert second.count("\u2713") == 1
    assert second.index("\u2713") > second.index("Paris")


def test_the_last_layer_is_the_models_own_answer():
    text = printed(readings_table(FRAME))
    assert "own answer: \u2423Paris 50%  \u2423Rome 25%" in line_with(text, "2")
    assert "own answer" not in printed(readings_table(FRAME, n_layers=3))


def test_each_layer_takes_one_line():
    lines = [line for line in printed(readings_table(FRAME)).splitlines() if line.strip()]
    assert len(lines) == 2 + 2 + 1 + 1  # head and rule, two layers, the answer, the legend


def test_layers_saved_are_shown_by_map_and_rule_with_the_interval_of_the_papers_target():
    study = make_study(30, full=True)
    text = printed(exits_table(study))
    row = next(
        row
        for row in study["exits"]["saved"]
        if (row["map"], row["rule"], row["target"]) == ("mat", "top probability", 0.95)
    )
    line = next(line for line in text.splitlines() if line.split()[:2] == ["mat", "top"])
    assert "top probability" in line
    assert f"{row['saved']:.1f} {row['low']:.1f}-{row['high']:.1f}" in line
    assert f"{100 * row['flops']:.0f} %" in line
    similar = next(line for line in text.splitlines() if "similarity" in line)
    assert similar.split()[-1] == "-"
    assert "n = 3,000 states from 26 documents" in text


def test_every_claim_is_shown_with_its_answer():
    text = printed(claims_table(make_study(full=True)), width=200)
    for row in make_study(full=True)["claims"]:
        assert re.search(rf"{re.escape(row['claim'])} +{row['agrees']} +", text)
        assert row["why"] in text


def test_a_study_without_exits_or_claims_has_no_such_tables():
    assert exits_table(make_study()) is None
    assert claims_table(make_study()) is None
    assert exits_table(make_study() | {"exits": None}) is None
