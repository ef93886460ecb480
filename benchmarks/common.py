"""What the benchmarks share: an interleaved timer, and rows with both sides of a comparison.

In: functions to time. Out: `Row`s, merged by name into one JSON file, and a table.
"""

import gc
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from layerleap.files import read_json, write_json

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
MODEL = "smollm2"
SOME_SECTIONS_FAILED = 3  # exit code of a study; one with little text leaves sections out
DEMO = (
    "study",
    "shortcuts",
    MODEL,
    "--text",
    "wikipedia",
    "--other",
    "news",
    "--fit-texts",
    "3500",
    "--read-texts",
    "700",
    "--sections",
    "exits",
)


@dataclass(frozen=True)
class Row:
    """What was measured on both sides, and a threshold for their ratio, or for ours alone."""

    name: str
    ours: float
    peer: float | None  # None: the threshold is for ours
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    over: Literal["ours/peer", "peer/ours"] = "ours/peer"
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """The two sides as one number; None where there is no other side."""
        if self.peer is None:
            return None
        top, bottom = (self.ours, self.peer) if self.over == "ours/peer" else (self.peer, self.ours)
        return top / bottom

    @property
    def bar(self) -> float:
        """The threshold."""
        [bar] = (bar for bar in (self.at_most, self.at_least) if bar is not None)
        return bar

    @property
    def sense(self) -> str:
        """How the number must lie to the threshold."""
        return ">=" if self.at_most is None else "<="

    @property
    def holds(self) -> bool:
        """Whether the threshold is met."""
        value = self.ours if self.ratio is None else self.ratio
        return value >= self.bar if self.at_most is None else value <= self.bar

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; the detail says how the numbers came about, and where."""
        row = {
            "name": self.name,
            "ours": self.ours,
            "peer": self.peer,
            "unit": self.unit,
            "ratio": self.ratio,
            "bar": self.bar,
            "holds": self.holds,
            "sense": self.sense,
            "judged": "ours" if self.peer is None else "ratio",
            "over": self.over,
            "machine": machine(),
        }
        if both := row.keys() & self.detail.keys():
            raise ValueError(f"the detail of {self.name} would replace {', '.join(sorted(both))}")
        return {**row, **self.detail}


def machine() -> dict[str, Any]:
    """What a reader must know to compare these numbers with others."""
    import torch

    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": "float32",
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def generate(
    transformer: Any, prompts: Sequence[Any], tokens: int, options: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """What the library's `generate` writes on from prompts of shape (1, token): the new tokens.

    Args:
        transformer: a decoder.
        prompts: padded on the left where there are several.
        tokens: that each text gets.
        options: more for `generate`.
    """
    import torch

    longest = max(ids.shape[1] for ids in prompts)
    pads = [longest - ids.shape[1] for ids in prompts]
    padded = [torch.nn.functional.pad(one, (n, 0)) for one, n in zip(prompts, pads, strict=True)]
    mask = torch.stack([torch.arange(longest) >= n for n in pads]).long()
    out = transformer.model.generate(
        torch.cat(padded),
        attention_mask=mask,
        do_sample=False,
        temperature=None,
        top_p=None,
        max_new_tokens=tokens,
        pad_token_id=0,
        **(options or {}),
    )
    return [row.tolist() for row in out[:, longest:]]


def timed(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes, with the garbage of what ran before already collected."""
    gc.collect()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interleave(sides: Mapping[str, Callable[[int], Any]], rounds: int) -> dict[str, list[float]]:
    """Time every side in every round; who comes first changes from round to round.

    A machine that slows down or warms up then does so for all sides alike.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        names = list(sides)
        for name in names if number % 2 == 0 else reversed(names):
            found[name].append(timed(partial(sides[name], number)))
    return found


def median(samples: Iterable[float]) -> float:
    """The middle one: unlike the mean it does not mind a disturbance."""
    return statistics.median(samples)


def layerleap(
    *arguments: str, fine: Collection[int] = (0,), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would; an exit code that is not fine is an error."""
    command = [str(Path(sys.executable).with_name("layerleap")), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    if done.returncode not in fine:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"layerleap {' '.join(arguments)} failed ({done.returncode}): {last}")
    return done


def demo_arguments(out: Path, smoke: bool) -> tuple[str, ...]:
    """The arguments of `make demo`, or a much smaller run of the same."""
    small = {"3500": "60", "700": "30"} if smoke else {}
    return (*(small.get(word, word) for word in DEMO), "--out", str(out))


def study(folder: Path, command: Sequence[str], is_wanted: Callable[[Any], bool]) -> Any:
    """`study.json` of a folder, if one run made all of it; else `command` makes it anew.

    Args:
        folder: where the report is, or will be.
        command: what makes it.
        is_wanted: whether the settings that it was made with are those asked for; among them
            `quick`, the `method` of the study, and `sections`, those that could run.
    """
    path = folder / "study.json"
    if path.is_file():
        found = read_json(path)
        run, sections = found.get("run", {}), found.get("sections", [])
        ran = [section["key"] for section in sections if section["status"] == "done"]
        settings = {**found["settings"], "quick": run.get("quick"), "sections": ran}
        settings["method"] = run.get("method")
        if run.get("whole", False) and is_wanted(settings):
            return found
    # What an interrupted run has finished would be taken over, and its time not counted.
    shutil.rmtree(folder / ".work", ignore_errors=True)
    layerleap(*command, "--out", str(folder), fine=(0, SOME_SECTIONS_FAILED))
    return read_json(path)


def study_row(
    made: Any,
    wanted: Mapping[str, Any],
    asked: Sequence[str],
    small: Sequence[str],
    bar: float,
    *,
    smoke: bool,
    about: Callable[[Any], Mapping[str, Any]],
) -> Row:
    """Minutes that a study takes with its defaults, from `study.json` of a whole run.

    Args:
        made: the study.
        wanted: its default settings, resolved for the bundled model.
        asked: names of those that must be the same; they are listed in the row.
        small: options of a smoke run.
        bar: minutes, at most.
        about: what else the row says, from `study.json`.
    """
    name = made.name
    whole = {key: wanted[key] for key in asked}
    whole |= {"quick": False, "sections": [section.key for section in made.sections]}
    whole["method"] = made.method
    found = study(
        BUILD / (f"bench-smoke-{name}" if smoke else name) / MODEL,
        ("study", name, MODEL, *(small if smoke else ())),
        lambda settings: smoke or all(settings[key] == value for key, value in whole.items()),
    )
    took, settings = found["run"], found["settings"]
    detail = {
        "note": f"layerleap study {name} with its defaults, model and data already cached",
        "settings": {key: settings[key] for key in asked},
        **about(found),
        "peak_mib": took["peak_mib"],
    }
    minutes = took["seconds"] / 60
    return Row(f"{name}_study", minutes, None, "minutes", at_most=bar, detail=detail)


def rows_by_role(found: Any) -> dict[str, Any]:
    """How many rows a study fitted on and read."""
    return {"rows": {row["role"]: row["rows"] for row in found["data"]}}


def record(path: Path, rows: Iterable[Row]) -> None:
    """Merge rows into the file by name, in one step, so that bars can be run one by one."""
    known = {row["name"]: row for row in read_json(path)} if path.exists() else {}
    known |= {row.name: row.to_dict() for row in rows}
    write_json(path, list(known.values()))


def table(rows: Iterable[Row], *, judged: bool = True) -> str:
    """Both sides, their ratio and the bar, as text."""
    lines = [f"{'bar':<20}{'ours':>12}{'peer':>12}  {'unit':<10}{'ratio':>9}  {'wanted':<10} holds"]
    for row in rows:
        peer = "-" if row.peer is None else f"{row.peer:.4g}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        verdict = ("yes" if row.holds else "NO") if judged else "(smoke)"
        lines.append(
            f"{row.name:<20}{row.ours:>12.4g}{peer:>12}  {row.unit:<10}{ratio:>9}  "
            f"{f'{row.sense} {row.bar:g}':<10} {verdict}"
        )
    return "\n".join(lines)
