"""The page of the paper: its example runs, and its numbers are those that come out."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "README.md"


def test_the_warning_example_gives_the_numbers_of_the_page():
    """Law E8: information-free states are at chance unless folds leak."""
    text = PAGE.read_text(encoding="utf8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    found: dict = {}
    exec(compile(block, str(PAGE), "exec"), found)
    rows = re.findall(r"^\| (cell|row|document|chance) \| ([\d.]+) \|$", text, re.MULTILINE)
    said = {by: float(value) for by, value in rows}
    assert list(said) == ["cell", "row", "document", "chance"]
    for by, accuracy in found["accuracy"].items():
        # Another build of the solver may end an example or two apart.
        assert said[by] == pytest.approx(accuracy, abs=0.01), by
    assert said["chance"] == 1 / 5
    assert said["cell"] > 2.5 * said["chance"]
    assert abs(said["document"] - said["chance"]) < 0.03
