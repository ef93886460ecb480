"""The table "which exit rule when": every rule is in it, with what the code and the results say."""

import csv
import re
from pathlib import Path

import pytest

from layerleap.act.exits.learned import Learned
from layerleap.act.exits.rules import RULES

ROOT = Path(__file__).resolve().parents[2]
DOCS, RESULTS = ROOT / "docs", ROOT / "papers/layerleap_papers/jump_to_conclusions/results"
KINDS = {**RULES, Learned.name: Learned}
COSTS = {"reading": "a map", "state": "product", "nothing": "free"}


def table() -> dict[str, dict[str, str]]:
    lines = [line for line in (DOCS / "exit-rules.md").read_text().splitlines() if line[:1] == "|"]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0].strip("`"): dict(zip(head, row, strict=True)) for row in rows}


def measured() -> dict[str, float]:
    """Thresholds that kept 95 % agreement through mat, by rule."""
    with (RESULTS / "smollm2/exits_saved.csv").open() as file:
        rows = [
            row for row in csv.DictReader(file) if (row["map"], row["target"]) == ("mat", "0.95")
        ]
    return {row["rule"].replace(" ", "-"): float(row["knob"]) for row in rows}


def test_every_rule_is_in_the_table_and_no_other():
    assert set(table()) == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_the_table_says_what_a_check_of_each_rule_needs(name):
    row = table()[name]
    assert row["a check needs"] == KINDS[name].needs
    assert COSTS[KINDS[name].needs] in row["cost per check"]
    assert row["when to use it"]


@pytest.mark.parametrize("name", measured())
def test_typical_thresholds_are_those_of_the_committed_results(name):
    (number,) = re.findall(r"\d+\.?\d*", table()[name]["typical threshold"])
    assert float(number) == pytest.approx(measured()[name], abs=0.0005)
