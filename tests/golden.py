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
RELATIVE = 1e-3
DIGITS = 6
TINY = 1e-5  # below this, numbers of the order of 1 are rounding alone
LEFT_OUT = re.compile("seconds|speed|faster|fingerprint|peak|condition")
NUMBER = re.compile(r"[+\-\u2212]?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
FILE = re.compile(r"[^\s'\"(]*/[^\s'\"]*/([^\s/'\",;:)]+)")


def file_of(paper: str) -> Path:
    """Where the golden file of a paper lies."""
    return PAPERS / paper / "tests" / "golden.json"


def content(result: StudyResult) -> dict[str, Any]:
    """What is kept of a study: verdicts and sentences, and tables by column."""
    tables = {}
    for name, rows in result.tables.items():
        columns = dict.fromkeys(key for row in rows for key in row if not LEFT_OUT.search(key))
        tables[name] = {key: [_kept(row.get(key)) for row in rows] for key in columns}
    keys = ("section", "claim", "agrees", "seen", "why")
    claims = [{key: _masked(row[key]) for key in keys} for row in result.claims]
    return {
        "claims": claims,
        "findings": [_masked(row["text"]) for row in result.findings],
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
    return list(_differences(golden, json.loads(json.dumps(content(result))), paper))


def _differences(wanted: Any, found: Any, place: str) -> Iterator[str]:
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in dict.fromkeys((*wanted, *found)):
            if (key in wanted) != (key in found):
                yield f"{place}.{key}: {'missing' if key in wanted else 'new'}"
            else:
                yield from _differences(wanted[key], found[key], f"{place}.{key}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for number, (a, b) in enumerate(zip(wanted, found, strict=True)):
            yield from _differences(a, b, f"{place}[{number}]")
    elif isinstance(wanted, float) and isinstance(found, int | float):
        if not math.isclose(wanted, found, rel_tol=RELATIVE, abs_tol=TINY):
            yield f"{place}: {found} instead of {wanted}"
    elif wanted != found:
        yield f"{place}: {found!r} instead of {wanted!r}"


def remake(paper: str) -> Path:
    """Make a paper's small study, and write its golden file."""
    sys.path.insert(0, str(PAPERS / paper / "tests"))
    made = importlib.import_module(MODULES[paper]).made()
    parts = [
        f"{json.dumps(name)}: {json.dumps(part, ensure_ascii=False)}"
        for name, part in content(made).items()
        if name != "tables"
    ]
    tables = [
        f"{json.dumps(name)}: {json.dumps(columns, ensure_ascii=False)}"
        for name, columns in content(made)["tables"].items()
    ]
    lines = [*parts, '"tables": {\n' + ",\n".join(tables) + "\n}"]
    file_of(paper).write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf8")
    return file_of(paper)


if __name__ == "__main__":
    for each in sys.argv[1:] or MODULES:
        sys.stdout.write(f"{remake(each)}\n")
