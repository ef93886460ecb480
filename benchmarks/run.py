"""Run all benchmarks, or those named.

    python benchmarks/run.py                    everything, into build/bench.json
    python benchmarks/run.py fit_cost pairs     only these
    python benchmarks/run.py --smoke            tiny sizes, into build/bench-smoke.json

Out: the file, a table with both sides, and exit code 1 if a threshold is not met. A smoke run only
shows that everything works. Its numbers mean nothing, so no threshold is checked.
"""

import argparse
import importlib
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from common import BUILD, Row, record, table

FITTING = ("fit_cost", "pairs", "memory", "ridge", "coverage")
WAITING = ("waiting_times", "load_time", "read_time", "first_token", "study_times")
DECODING = ("decoding", "batches", "topk_attention", "sparse_ffn")
READING = (
    "attribution",
    "patch_grid",
    "verbs",
    "shape",
    "released",
    "saturation_time",
    "concept_index",
    "head_pairs",
    "alignment",
    "patchscope",
)
BENCHMARKS = (*FITTING, *WAITING, *DECODING, *READING, "debugger", "layer_causal")


def main() -> int:
    """Run the benchmarks named on the command line."""
    parser = argparse.ArgumentParser(description="Run the benchmarks of layerleap.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"any of: {', '.join(BENCHMARKS)}; default all"
    )
    parser.add_argument("--smoke", action="store_true", help="use tiny sizes; numbers mean nothing")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(BENCHMARKS)):
        parser.error(f"no benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}")
    target = BUILD / ("bench-smoke.json" if options.smoke else "bench.json")
    rows: list[Row] = []
    for name in options.names or BENCHMARKS:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        for row in importlib.import_module(name).run(smoke=options.smoke):
            record(target, [row])  # one by one: an interrupted run keeps its results
            rows.append(row)
    print(table(rows, judged=not options.smoke))
    return 0 if options.smoke or all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
