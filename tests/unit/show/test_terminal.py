"""Progress where there is no terminal: a line now and then, with a rate that means something."""

import io

import pytest
from rich.console import Console

from layerleap import progress as module
from layerleap.progress import Bars, reporting, silent


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said, on a clock that moves ten seconds at every look."""
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    return []


def plain(lines: list[str]) -> Bars:
    return Bars(Console(file=io.StringIO()), lines.append)


def test_a_line_says_phase_count_rate_and_remaining_time(lines: list[str]) -> None:
    with plain(lines) as progress:
        for done in (0, 100, 200):
            progress("fitting", done, 1000)
    assert lines == ["fitting: 100 of 1000 texts, 10/s, about 90 s left"]


def test_work_begun_again_under_the_same_name_is_timed_anew(lines: list[str]) -> None:
    with plain(lines) as progress:
        for done in (0, 100, 0, 20, 40):
            progress("solving", done, 50, "layers")
    assert lines[-1] == "solving: 20 of 50 layers, 2.0/s, about 15 s left"


def test_only_the_first_process_of_many_speaks(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with plain(lines) as progress:
        for done in (0, 100, 200):
            progress("fitting", done, 1000)
    assert not lines


def test_python_shows_bars_only_where_they_can_be_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with reporting(True) as shown:
        assert shown is silent  # pytest captures the output: there is no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes that for a terminal
    with reporting(True) as shown, reporting(shown) as same:
        assert isinstance(shown, Bars)
        assert same is shown
    with reporting(False) as shown:
        assert shown is silent


def test_where_nothing_can_be_redrawn_the_first_estimate_comes_within_five_seconds(monkeypatch):
    now, lines = [100.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with Bars(Console(file=io.StringIO()), lines.append) as bars:
        for done in range(1, 12):
            now[0] += 0.5
            bars("fitting", done, 100)
    assert len(lines) == 1
    assert "s left" in lines[0]
    assert now[0] - 100 > 5 > module.FIRST_SECONDS
