"""Run every command of the README once, as a newcomer would, and note how long each took.

    python benchmarks/readme_times.py                  all of them, into build/readme-times.csv
    python benchmarks/readme_times.py "layerleap fit"  only those that begin so; other rows stay

In: the console blocks of README.md, in their order, in one working folder, so that later commands
find what earlier ones wrote. Out: a CSV file with one row per command: how long it took, when it
first said something, its peak memory, and its exit code. `debug` serves until Ctrl-C: its time is
the one until it prints the address of its page.

Models and texts are fetched before: downloads depend on the network, not on this project. What
commands fit and index is not there yet: each finds only what those before it left in the cache.
"""

import argparse
import csv
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from common import BUILD, ROOT, SOME_SECTIONS_FAILED

from layerleap.files import cache_root, whole_file

OUT = BUILD / "readme-times.csv"
WORK = BUILD / "readme-times"
KEPT = ("models", "texts", "images", "sounds")  # of the cache; the rest is made by the commands
FETCHED = ("smollm2", "smollm2-reviews", "bert-reviews", "wikipedia", "news", "enwik8", "reviews")
ADDRESS = re.compile(rb"http://\S+")
FINE = (0, SOME_SECTIONS_FAILED, 130)  # the last one: ended by Ctrl-C, as servers are


@dataclass(frozen=True)
class Timing:
    """One command of the README; times in seconds."""

    command: str
    seconds: float
    first_output: float
    peak_mib: int
    exit_code: int


def readme_commands(page: Path) -> list[str]:
    """Every `layerleap ...` line of the console blocks, without its comment."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text("utf8"), re.DOTALL | re.MULTILINE)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [shlex.join(words) for words in lines if words[:1] == ["layerleap"]]


def measure(command: str, folder: Path) -> Timing:
    """Run a command to its end; a server is interrupted as soon as it prints its address."""
    program, *words = shlex.split(command)
    is_server = words[0] == "debug"
    started = time.perf_counter()
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name(program)), *words, *["--no-browser"] * is_server],
        cwd=folder,
        env={**os.environ, "LAYERLEAP_CACHE": str(folder / "cache")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    first = ready = 0.0
    text = b""
    while piece := os.read(process.stdout.fileno(), 1 << 16):  # until it ends
        now = time.perf_counter() - started
        first, text = first or now, text + piece
        if is_server and not ready and ADDRESS.search(text):
            ready = now
            process.send_signal(signal.SIGINT)
    _, status, usage = os.wait4(process.pid, 0)  # unlike `wait`, it tells this child's memory
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = ready or time.perf_counter() - started
    peak = usage.ru_maxrss >> (20 if sys.platform == "darwin" else 10)  # bytes there, KiB elsewhere
    if process.returncode not in FINE:
        print(text.decode(errors="replace")[-2000:], file=sys.stderr)
    return Timing(command, round(seconds, 1), round(first, 1), peak, process.returncode)


def read_timings(path: Path) -> dict[str, Timing]:
    """Timings of an earlier run, by command."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf8") as file:
        rows = list(csv.DictReader(file))
    types = {"seconds": float, "first_output": float, "peak_mib": int, "exit_code": int}
    read = [{name: types.get(name, str)(value) for name, value in row.items()} for row in rows]
    return {row["command"]: Timing(**row) for row in read}


def write_timings(path: Path, timings: Iterable[Timing]) -> None:
    """All rows in one step, so that an interrupted run keeps those it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as fresh, fresh.open("w", newline="", encoding="utf8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Timing)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(timing) for timing in timings)


def main() -> int:
    """Time the commands that were asked for; exit code 1 if one of them failed."""
    parser = argparse.ArgumentParser(description="Time the commands of the README.")
    parser.add_argument(
        "begins", nargs="?", default="layerleap", help="only commands that begin so"
    )
    begins = parser.parse_args().begins
    commands = readme_commands(ROOT / "README.md")
    timings = read_timings(OUT)
    # In a process of its own: a child's peak memory counts that of the process it was started from.
    fetch = f"from layerleap import zoo; [zoo.fetch(name) for name in {FETCHED}]"
    subprocess.run([sys.executable, "-c", fetch], check=True)
    if begins == "layerleap":
        shutil.rmtree(WORK, ignore_errors=True)  # nothing that an earlier run wrote is taken over
        timings = {}
    for name in KEPT:
        (WORK / "cache").mkdir(parents=True, exist_ok=True)
        if not (place := WORK / "cache" / name).exists():
            place.symlink_to(cache_root() / name)
    chosen = [command for command in commands if command.startswith(begins)]
    if not chosen:
        parser.error(f"no command of the README begins with {begins!r}")
    for command in chosen:
        print(command, file=sys.stderr, flush=True)
        timings[command] = timing = measure(command, WORK)
        print(f"  {timing.seconds} s, first output after {timing.first_output} s", file=sys.stderr)
        write_timings(OUT, [timings[known] for known in commands if known in timings])
    return 0 if all(timings[command].exit_code in FINE for command in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
