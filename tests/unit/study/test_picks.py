"""Rows chosen and named by data, and the sentences and verdicts that are made of them."""

import pytest

from layerleap.results.cells import grid_of
from layerleap.show.figures.draw import figure_rows
from layerleap.study.claims import Claim, Each, above, below, share_of
from layerleap.study.engine import Section, Texts
from layerleap.study.figures import Axis, Figure
from layerleap.study.picks import KNOWN, pick, points
from layerleap.study.result import Finding, Headline, StudyResult
from layerleap.study.tables import Column, Table, estimate, in_words, part_of

ROWS = [
    {"map": name, "layer": layer, "value": value, "low": value - 1, "high": value + 1}
    for layer, by_map in ((0, (1.0, 4.0)), (1, (2.0, 5.0)), (None, (3.0, -6.0)))
    for name, value in zip(("id", "mat"), by_map, strict=True)
]


@pytest.fixture
def result():
    model = {"name": "m", "n_layers": 2, "kind": "next-token"}
    tables = {"scores": ROWS, "more": [{"map": "id", "layer": 7, "value": None}]}
    return StudyResult("norms", "0", "", model, {"last": 1}, tables)


def values(rows):
    return [row["value"] for row in rows]


def test_without_conditions_all_rows_are_picked_as_they_are(result):
    assert pick("scores")(result) == ROWS
    assert pick("none")(result) == []


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"map": "mat"}, [4, 5, -6]),
        ({"layer": None}, [3, -6]),
        ({"layer": KNOWN}, [1, 4, 2, 5]),
        ({"layer": 0, "map": "id"}, [1]),
        ({"map": ("mat", "id"), "layer": KNOWN}, [4, 5, 1, 2]),
        ({"map": ["mat"]}, [4, 5, -6]),
        ({"layer": (1, 0), "map": {"mat": "x", "id": "y"}}, [5, 2, 4, 1]),
        ({"map": {"mat", "id"}, "layer": KNOWN}, [1, 4, 2, 5]),
        ({"layer": lambda result: result.settings["last"]}, [2, 5]),
        ({"missing": None, "layer": 0}, [1, 4]),
        ({"missing": KNOWN}, []),
    ],
)
def test_rows_are_picked_and_ordered_by_values(result, where, expected):
    assert values(pick("scores", **where)(result)) == expected
    if not any(map(callable, where.values())):
        assert values(result.rows("scores", **where)) == expected


def test_rows_of_several_tables_follow_each_other(result):
    assert values(pick("scores", "more", map="id")(result)) == [1, 2, 3, None]
    both = pick("scores", layer=0) + pick("more")
    assert values(both(result)) == [1, 4, None]


def test_words_replace_values_and_leave_the_others(result):
    found = pick("scores", words={"map": {"mat": "shortcut"}}, layer=0)(result)
    assert [row["map"] for row in found] == ["id", "shortcut"]
    by_model = pick("scores", words={"map": lambda r: {"id": r.model["name"]}}, layer=0)(result)
    assert [row["map"] for row in by_model] == ["m", "mat"]
    assert ROWS[0]["map"] == "id"


def test_points_are_drawn_from_columns_and_unknown_ones_left_out(result):
    rows = points("scores", "more", line="{map}", panel="Through {map}", note="{layer}!")
    drawn = figure_rows(Figure("f", "t", "h", rows, y=Axis("y")), result)
    assert [(row["x"], row["y"], row["line"]) for row in drawn] == [
        (0, 1, "id"),
        (0, 4, "mat"),
        (1, 2, "id"),
        (1, 5, "mat"),
    ]
    assert drawn[0]["panel"] == "Through id"
    assert (drawn[0]["low"], drawn[0]["note"]) == (0, "0!")


def test_points_take_the_interval_that_belongs_to_their_column():
    row = {"k": 3, "lead_value": 1.0, "lead_low": 0.5, "lead_high": 2.0, "low": -9, "high": 9}
    made = StudyResult("norms", "0", "", {}, {}, {"t": [row]})
    (point,) = points("t", x="k", y="lead_value")(made)
    assert [point[key] for key in ("x", "y", "low", "high")] == [3, 1, 0.5, 2]
    assert part_of(row, "lead") == {"value": 1, "low": 0.5, "high": 2}
    (cell,) = points("t", x="k", y="low", value="high")(made)
    assert (cell["y"], cell["value"]) == (-9, 9)


def test_a_text_with_fields_goes_across_a_table(result):
    rows = pick("scores", layer=KNOWN, words={"map": {"mat": "shortcut"}})
    table = Table("t", "", rows, (Column("layer"),), "P {map}", (estimate("value"),))
    grid = grid_of(table, result)
    assert [one.replace("value ", "") for one in grid.heads] == ["layer", "P id", "P shortcut"]
    assert [[cell.text for cell in line] for line in grid.rows] == [
        ["0", "1.00", "4.00"],
        ["1", "2.00", "5.00"],
    ]


@pytest.mark.parametrize(
    ("row", "form", "expected"),
    [
        ({"value": 0.5, "low": 0.25, "high": 0.75}, ".2f", "0.50 (0.25 to 0.75)"),
        ({"value": 0.5, "low": None, "high": None}, "+.1f", "+0.5"),
        ({"value": 0.5, "low": 0.004, "high": 0.75}, "%", "50 % (0.4 % to 75 %)"),
        ({"value": 0.5, "low": 0.004, "high": 0.75}, ".1%", "50.0 % (0.4 % to 75.0 %)"),
        ({"value": None, "low": None, "high": None}, ".2f", "unknown"),
        (None, ".2f", "unknown"),
    ],
)
def test_estimates_are_written_with_their_intervals(row, form, expected):
    assert in_words(row, form) == expected


def test_a_unit_stands_behind_the_value():
    assert in_words({"value": 1.0, "low": 0.0, "high": 2.0}, ".0f", "nats") == "1 nats (0 to 2)"


def test_each_asks_the_same_of_every_row(result):
    ask = Each(pick("scores", layer=KNOWN), "{yes} of {n}, {no} not; {estimate:.1f} {map}", "why")
    verdict = ask(result)
    assert (verdict.agrees, verdict.seen) == ("partly", "3 of 4, 0 not; 1.0 (0.0 to 2.0) id")
    assert verdict.why == "why"
    half = Each(pick("scores"), "{no}", "", lambda row: above(row, 2.5), lambda a: share_of(a, 0.3))
    assert (half(result).agrees, half(result).seen) == ("yes", "2")
    none = Each(pick("none"), "{yes}", "", below, missing="too few rows")(result)
    assert (none.agrees, none.seen) == ("not tested", "too few rows")


def test_a_section_sorts_what_it_shows_by_kind():
    claim, figure = Claim("c", Each(pick("t"), "", "")), Figure("f", "t", "h", points("t"))
    table = Table("t", "", pick("t"), (Column("layer"),))
    section = Section("key", "Title", lambda _: {}, shows=(Texts("said"), table, claim, figure))
    assert (section.claims, section.figures, section.tables) == ((claim,), (figure,), (table,))
    assert section.texts == ("said",)
    assert (section.name, Section("key", "T", lambda _: {}, short="Other").name) == ("Key", "Other")


def test_plain_findings_stand_under_the_first_figure():
    figures = (Figure("first", "t", "h", points("t")), Figure("second", "t", "h", points("t")))
    section = Section("key", "Title", lambda _: {}, shows=figures)
    assert section.finding("a") == Finding("a", "first")
    assert section.finding(Headline("a")) == Finding("a", "first", headline=True)
    assert section.finding(Finding("a", "second")) == Finding("a", "second")
    assert section.finding(Finding("a")) == Finding("a")
    bare = Section("key", "Title", lambda _: {})
    assert bare.finding("a") == Finding("a")
