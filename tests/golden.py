"""Golden files: what the small study of each paper measures, as JSON beside the paper's tests.

In: the studies of tiny random models that the tests of each paper make. Out: `golden.json` in that
folder, with claims, findings and tables; `differences` says where a study departs from it.

    PYTHONPATH=src:papers:tests python tests/golden.py [NAME ...]     makes the files anew

Numbers may differ by one part in a thousand: processors and thread counts add floats in different
orders. Numbers inside sentences are rounded, so there they are masked. What depends on the machine
(times, memory) or on where files lie (paths) is left out.
"""

import importlib
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerleap_papers
from layerleap.study.result import StudyResult

PAPERS = Path(layerleap_papers.__file__).parent
MODULES = {  # whose `made()` is the study
    "topk_attention": "sparsity_studies",
    "icl_and_gradient_descent": "icl_studies",
    "jump_to_conclusions": "shortcut_studies",
    "beyond_the_top1": "saturation_studies",
    "embedding_space": "embedding_studies",
    "stitching": "stitching_studies",
}
RELATIVE = {  # of studies that carry rounding on
    "icl_and_gradient_descent": 1e-2,  # trains in float32
    "beyond_the_top1": 1e-2,  # fits probes step by step
}
USUAL = 1e-3
DIGITS = 6
SMALL = 1e-2  # numbers below this differ by rounding of numbers of the order of 1
LEFT_OUT = re.compile("seconds|speed|faster|fingerprint|peak|condition")
TIMED = {"live"}  # tables
NUMBER = re.compile(r"[+\-\u2212]?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
FILE = re.compile(r"[^\s'\"(]*/[^\s'\"]*/([^\s/'\",;:)]+)")


def file_of(paper: str) -> Path:
    """Where the golden file of a paper lies."""
    return PAPERS / paper / "tests" / "golden.json"


def content(result: StudyResult) -> dict[str, Any]:
    """What is kept of a study: verdicts and sentences, and tables by column."""
    tables = {}
    for name, rows in result.tables.items():
        if name in TIMED:
            continue
        columns = dict.fromkeys(key for row in rows for key in row if not LEFT_OUT.search(key))
        tables[name] = {key: [_kept(row.get(key)) for row in rows] for key in columns}
    keys = ("section", "claim", "agrees", "seen", "why")
    claims = [{key: _masked(row[key]) for key in keys} for row in result.claims]
    return {
        "claims": claims,
        "findings": [
            _masked(text)
            for text in (row["text"] for row in result.findings)
            if not text.startswith("Timed")
        ],
        "tables": tables,
    }


def _masked(text: str) -> str:
    return NUMBER.sub("#", FILE.sub(r"\1", text))


def _kept(value: Any) -> Any:
    if isinstance(value, list):
        return [_kept(item) for item in value]
    if isinstance(value, dict):
        return {key: _kept(item) for key, item in value.items() if not LEFT_OUT.search(key)}
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return FILE.sub(r"\1", value) if isinstance(value, str) else value


def differences(result: StudyResult, paper: str) -> list[str]:
    """Where a study departs from the golden file of its paper."""
    golden = json.loads(file_of(paper).read_text("utf8"))
    found = json.loads(json.dumps(content(result)))
    return list(_differences(golden, found, paper, RELATIVE.get(paper, USUAL)))


def _differences(wanted: Any, found: Any, place: str, relative: float) -> Iterator[str]:
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in dict.fromkeys((*wanted, *found)):
            if (key in wanted) != (key in found):
                yield f"{place}.{key}: {'missing' if key in wanted else 'new'}"
            else:
                yield from _differences(wanted[key], found[key], f"{place}.{key}", relative)
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for number, (a, b) in enumerate(zip(wanted, found, strict=True)):
            yield from _differences(a, b, f"{place}[{number}]", relative)
    elif isinstance(wanted, float) and isinstance(found, int | float):
        if not math.isclose(wanted, found, rel_tol=relative, abs_tol=relative * SMALL):
            yield f"{place}: {found} instead of {wanted}"
    elif wanted != found and not _are_near(wanted, found, relative):
        yield f"{place}: {found!r} instead of {wanted!r}"


def _are_near(wanted: Any, found: Any, relative: float) -> bool:
    """Whether two texts differ in the rounding of their numbers alone."""
    if not (isinstance(wanted, str) and isinstance(found, str)):
        return False
    pairs = zip(NUMBER.findall(wanted), NUMBER.findall(found), strict=False)
    return _masked(wanted) == _masked(found) and all(
        math.isclose(
            *(float(one.replace(",", "").replace("\u2212", "-")) for one in pair), rel_tol=relative
        )
        for pair in pairs
    )


def remake(paper: str) -> Path:
    """Make a paper's small study, and write its golden file: a line for each table."""
    sys.path.insert(0, str(PAPERS / paper / "tests"))
    kept = content(importlib.import_module(MODULES[paper]).made())
    tables = ",\n".join(
        f"{_json(name)}: {_json(columns)}" for name, columns in kept["tables"].items()
    )
    rest = "".join(f"{_json(name)}: {_json(kept[name])},\n" for name in ("claims", "findings"))
    file_of(paper).write_text(f'{{\n{rest}"tables": {{\n{tables}\n}}\n}}\n', "utf8")
    return file_of(paper)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    for each in sys.argv[1:] or MODULES:
        sys.stdout.write(f"{remake(each)}\n")
