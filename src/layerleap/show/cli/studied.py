"""What the commands of studies share: sections by name, and what is said once a study is done.

In: the words of an option, or a finished study. Out: names; tables, headlines and places printed.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from layerleap.show.cli.terminal import out, print_json


def words(text: str) -> list[str]:
    """Words with commas between them; 'none' is none."""
    return [] if text == "none" else [word.strip() for word in text.split(",")]


def clear(folder: Path) -> None:
    """Remove the checkpoints of a study that has finished."""
    shutil.rmtree(folder, ignore_errors=True)


def show(
    result: Mapping[str, Any], tables: Iterable[Any], places: Mapping[str, Path], *, json: bool
) -> None:
    """Tables, headlines and where files are; or the whole result for programs."""
    if json:
        print_json(result)
        return
    for table in tables:
        if table is not None:
            out.print(table)
    for finding in result["findings"]:
        if finding["topic"] == "headline":
            out.print(f"- {finding['text']}", highlight=False)
    out.print()
    for name, place in places.items():
        out.print(f"{name + ':':7} {place}", highlight=False, soft_wrap=True)
