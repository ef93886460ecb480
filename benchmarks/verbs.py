"""Attribution, a grid of patches, and attention patterns beside TransformerLens and nnterp.

Each side runs in processes of its own, with one thread; sides alternate. The peers are looked for
in the Python interpreters that the variable PEERS names, separated by colons: they need versions of
libraries that layerleap does not. Out: a row per task against the fastest peer, and in its details
how far the sides' results are apart and how many lines each side's code has.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

from common import MODEL, Row, child, median

from layerleap import zoo

SIDE = Path(__file__).with_name("verbs_side.py")
MODULES = {"transformer_lens": "transformer_lens", "nnterp": "nnterp"}
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TASKS = ("attribution", "patching", "attention")


def run(*, smoke: bool) -> list[Row]:
    """A row per task; nothing without a peer."""
    folder, rounds = zoo.fetch(MODEL), 1 if smoke else 3
    pythons = {"layerleap": sys.executable, **_peers()}
    samples: dict[str, list[dict[str, dict[str, float]]]] = {side: [] for side in pythons}
    for number in range(rounds):
        for side in list(pythons) if number % 2 == 0 else reversed(list(pythons)):
            samples[side].append(child(str(SIDE), side, folder, "1", env=ENV, python=pythons[side]))
    lines = _lines()
    rows = []
    for task in TASKS:
        seconds = {
            side: median(sample[task]["seconds"] for sample in own)
            for side, own in samples.items()
            if task in own[0]
        }
        values = {side: own[0][task]["value"] for side, own in samples.items() if task in own[0]}
        peers = {side: value for side, value in seconds.items() if side != "layerleap"}
        peer = min(peers, key=peers.__getitem__, default=None)
        detail = {
            "note": f"{task} with layerleap (ours) and {peer}, the fastest peer here; one thread",
            "seconds": seconds,
            "values": values,
            "lines": {side: lines[side][task] for side in seconds},
            "left_out": sorted({"layerleap", *MODULES} - set(seconds)),
            "n": rounds,
        }
        ours = seconds["layerleap"]
        other = None if peer is None else peers[peer]
        rows.append(Row(f"verbs_{task}", ours, other, "seconds", at_most=1.0, detail=detail))
    return rows


def _peers() -> dict[str, str]:
    """By peer, an interpreter that has it."""
    found = {}
    for python in filter(None, os.environ.get("PEERS", "").split(":")):
        for side, module in MODULES.items():
            look = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
            if subprocess.run([python, "-c", look], check=False).returncode == 0:
                found[side] = python
    return found


def _lines() -> dict[str, dict[str, int]]:
    """By side and task, the lines of code of the function that does it."""
    tree = ast.parse(SIDE.read_text(encoding="utf8"))
    return {
        side.name: {
            task.name: (task.end_lineno or 0) - task.lineno
            for task in ast.walk(side)
            if isinstance(task, ast.FunctionDef) and task.name in TASKS
        }
        for side in tree.body
        if isinstance(side, ast.FunctionDef)
    }
