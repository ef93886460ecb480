"""Run the benchmarks: all of them, or those named.

    python benchmarks/run.py                    everything, into build/bench.json
    python benchmarks/run.py fit_cost pairs     only these
    python benchmarks/run.py --smoke            tiny sizes, into build/bench-smoke.json

Out: the file, a table with both sides, and exit code 1 if a bar does not hold. A smoke run only
shows that everything works: its numbers mean nothing, so no bar is judged.
"""

import argparse
import importlib
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from common import BUILD, Row, record, table

BARS = (
    "fit_cost", "pairs", "memory", "demo_time", "load_time", "shape", "released", "paper",
    "decoding", "batches", "saturation_time", "saturation_study",
)  # fmt: skip


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description="Run the benchmarks of layerleap.")
    parser.add_argument("bars", nargs="*", metavar="BAR", help=f"any of: {', '.join(BARS)}")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; numbers mean nothing")
    options = parser.parse_args()
    if unknown := sorted(set(options.bars) - set(BARS)):
        parser.error(f"no bar {unknown[0]!r}; there are: {', '.join(BARS)}")
    target = BUILD / ("bench-smoke.json" if options.smoke else "bench.json")
    rows: list[Row] = []
    for name in options.bars or BARS:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        found = importlib.import_module(name).run(smoke=options.smoke)
        record(target, found)  # bar by bar: an interrupted run keeps what it has
        rows += found
    print(table(rows, judged=not options.smoke))
    return 0 if options.smoke or all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
