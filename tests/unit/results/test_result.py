"""What a result gets from the base once it has rows and columns, shown by a toy from outside."""

import io
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from rich.console import Console

from layerleap.errors import BadSettings
from layerleap.results.base import Result
from layerleap.results.cells import grid_of
from layerleap.results.columns import Column, Table, estimate
from layerleap.results.several import Several
from pages import HOSTILE, Page

CAT = {"id": 3, "text": " cat", "label": "\u2423cat", "kind": "text"}
DOG = {"id": 4, "text": HOSTILE, "label": HOSTILE, "kind": "text"}


@dataclass(frozen=True, repr=False)
class Toy(Result):
    """Scores by layer, and where they come from."""

    TABLES: ClassVar = (
        Table(
            "scores",
            "Scores by layer",
            lambda toy: toy.scores,
            (
                Column("layer"),
                estimate("value", "score, %", "{:.0f}", 100),
                Column("kl", "KL", "{:.2f}", best="min", wide="column"),
                Column("tokens", strong="matched"),
                Column("verdict", colours={"yes": "good"}),
            ),
            within="layer",
        ),
        Table("texts", "Texts", lambda toy: toy.texts, (Column("name"), Column("words"))),
    )
    scores: list = field(default_factory=list)
    texts: list = field(default_factory=list)
    notes: tuple = ()

    def facts(self):
        return {"model": "tiny"}

    def short(self):
        return f"Toy({len(self.scores)} rows)"


def row(layer, value, kl, **more):
    about = {"tokens": [CAT, DOG], "matched": [CAT], "verdict": "yes"}
    return {"layer": layer, "value": value, "low": 0.1, "high": 0.9, "kl": kl, **about, **more}


@pytest.fixture
def toy():
    return Toy([row(0, 0.25, 2.0), row(0, 0.5, 1.0), row(1, None, None)], [{"name": "n"}], ("why",))


def printed(result, width):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(result)
    return console.file.getvalue()


def test_json_holds_facts_every_table_and_the_notes(toy):
    assert toy.to_dict() == {
        "model": "tiny",
        "scores": toy.scores,
        "texts": [{"name": "n"}],
        "notes": ["why"],
    }


def test_a_frame_is_the_first_table_or_one_by_its_key(toy):
    frame = toy.to_pandas()
    assert list(frame["value"].dropna()) == [0.25, 0.5]
    assert frame["tokens"][0] == f"\u2423cat {HOSTILE}"
    assert list(toy.to_pandas("texts")["name"]) == ["n"]
    with pytest.raises(BadSettings, match="table is 'text'; expected one of 'scores', 'texts'"):
        toy.to_pandas("text")


def test_a_frame_without_rows_still_has_its_columns():
    assert list(Toy().to_pandas().columns) == ["layer", "value", "kl", "tokens", "verdict"]


def test_it_prints_title_notes_and_tables_at_80_columns(toy):
    text = str(toy)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("Toy(3 rows)\nnote: why\n")
    lines = [line.split() for line in text.splitlines()]
    head = ["layer", "score,", "%", "tokens", "verdict"]
    assert head in lines
    (first,) = (line for line in lines if line[:2] == ["0", "25"])
    assert first[2:6] == ["10", "to", "90", "\u2423cat"]
    assert next(line for line in lines if line[:1] == ["1"])[1] == "\u2013"


def test_a_wide_terminal_has_room_for_every_column(toy):
    assert "KL" in printed(toy, 130)
    assert "KL" not in printed(toy, 129)


def test_a_page_escapes_data_and_shows_the_best_and_what_matches(toy):
    html = toy._repr_html_()
    page = Page(html)
    assert page.all("script") == []
    assert HOSTILE not in html
    assert HOSTILE in page.text
    assert "<b>1.00</b>" in html
    assert "<b>2.00</b>" not in html
    assert "<b>\u2423cat</b>" in html
    assert '<span class="verdict good">yes</span>' in html
    assert "Scores by layer" in page.text
    assert "why" in page.text


@pytest.mark.parametrize(
    ("across", "heads"), [("lens", ["KL id", "KL mat"]), ("{lens} x", ["KL id x", "KL mat x"])]
)
def test_cells_are_repeated_across_the_values_of_a_key_or_of_a_text_with_fields(across, heads):
    rows = [
        {"layer": 0, "lens": "id", "kl": 2.0},
        {"layer": 0, "lens": "mat", "kl": 1000.5},
        {"layer": 1, "lens": "id", "kl": 3.0},
    ]
    cells = (Column("kl", "KL"),)
    forms = {"mat": ("{:,.0f}", 1.0), "mat x": ("{:,.0f}", 1.0)}
    table = Table("t", "", lambda _: rows, (Column("layer"),), across, cells, forms)
    grid = grid_of(table, None)
    assert grid.heads == ["layer", *heads]
    assert [[cell.text for cell in line] for line in grid.rows] == [
        ["0", "2", "1,000"],
        ["1", "3", "\u2013"],
    ]


def test_a_table_without_rows_says_none():
    assert "Scores by layer\nnone" in str(Toy())
    assert "Scores by layer: none" in Page(Toy()._repr_html_()).text


def test_results_of_several_prompts_are_shown_one_below_the_other(toy):
    several = Several([toy, toy])
    assert several.to_dict() == [toy.to_dict()] * 2
    assert str(several).count("Toy(3 rows)") == printed(several, 80).count("Toy(3 rows)") == 2
    assert list(several.to_pandas()["prompt"]) == [0, 0, 0, 1, 1, 1]
    assert several._repr_html_().count("<style>") == 2
