"""What the benchmarks share: an interleaved timer, and rows with both sides of a comparison.

In: functions to time. Out: `Row`s, merged by name into one JSON file, and a table.
"""

import csv
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from layerleap.files import read_json, write_json
from layerleap.memory import peak_memory

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
MODEL = "smollm2"
SOME_SECTIONS_FAILED = 3  # exit code of a study; one with little text leaves sections out
_DEMO = f"study shortcuts {MODEL} --text wikipedia --other news --fit-texts 3500 --read-texts 700"
DEMO = (*_DEMO.split(), "--sections", "exits")


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
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        names = list(sides)
        for name in names if number % 2 == 0 else reversed(names):
            seconds[name].append(timed(partial(sides[name], number)))
    return seconds


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


def child(
    file: str,
    *words: object,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Any:
    """What a script prints last, as JSON; a peak of memory is that of a process of its own."""
    command = [python, file, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{Path(file).name} {' '.join(map(str, words))} failed: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def child_peaks(file: str, texts: int, times: int, rounds: int) -> dict[int, list[float]]:
    """Peaks that a script prints for so many texts, and for `times` as many, in turn."""
    samples: dict[int, list[float]] = {texts: [], texts * times: []}
    for number in range(rounds):
        for size in sorted(samples, reverse=bool(number % 2)):
            samples[size].append(child(file, size))
    return samples


def fresh_peak() -> float:
    """MiB in use, where the system lets the peak of this process start anew; else the old peak."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory() or 0.0


def tiny(name: str = "tiny", *, vocabulary: int, layers: int = 2, tokenizer: Any = None) -> Any:
    """A small random model, for smoke runs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from layerleap import Transformer

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=vocabulary, num_attention_heads=4, **sizes)
    return Transformer.wrap(LlamaForCausalLM(config).eval(), tokenizer, name=name)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


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
