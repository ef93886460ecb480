"""The report of a study: one HTML page that needs nothing else, and its data beside it.

The folder gets `report.html`, `study.json`, a CSV file per table, `findings.txt`, `summary.png` if
the study has a summary picture, and fitted objects in folders of their own. All of the files are
written or none; other files of the folder are left alone.
"""

import base64
import csv
import hashlib
import io
import json
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from layerleap.act.decode.coloured import coloured_html
from layerleap.files import whole_file
from layerleap.results.cells import grid_of
from layerleap.results.page import style, tables_html, templates
from layerleap.show.figures.draw import draw, draw_picture, figure_rows, sample_of
from layerleap.show.report.tables import CLAIMS, DATA, UNTESTED
from layerleap.study import studies
from layerleap.study.engine import Section, Study
from layerleap.study.result import Row, StudyResult


def write_report(result: StudyResult, folder: Path) -> Path:
    """Write the page and the data into `folder`; returns the path of the page."""
    study = studies.find(result.study)
    numbers = json.dumps(result.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
    contents: dict[str, str | bytes] = {
        "study.json": f"{numbers}\n",
        **csv_files(result),
        "findings.txt": "".join(f"{row['text']}\n" for row in result.findings),
        "report.html": report_html(result, study),
    }
    if (picture := draw_picture(study, result)) is not None:
        contents["summary.png"] = picture
    # Every file is complete on the disk, under a temporary name, before the first is renamed.
    with ExitStack() as all_files:
        for name, content in contents.items():
            temporary = all_files.enter_context(whole_file(folder / name))
            temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
    for name, artifact in result.artifacts.items():
        artifact.save_pretrained(folder / name)
    return folder / "report.html"


def csv_files(result: StudyResult) -> dict[str, str]:
    """The text of every CSV file, by file name: one per table with rows, and the claims."""
    tables = {**result.tables, "claims": result.claims}
    return {f"{name}.csv": csv_text(rows) for name, rows in tables.items() if rows}


def csv_text(rows: list[Row]) -> str:
    """Rows as CSV with a head; None is an empty field, and numbers keep all their digits."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n", restval="")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()}
        )
    return stream.getvalue()


def report_html(result: StudyResult, study: Study[Any] | None = None) -> str:
    """The page alone, as text: style, script and figures are inside it."""
    study = study or studies.find(result.study)
    script = _asset("report.js")
    source = _asset("macros.html.j2") + _asset("page.html.j2")
    names = {"model": result.model["name"], "text": result.settings.get("text") or ""}
    template = templates().from_string(source)
    return template.render(
        study=study,
        result=result,
        model=result.model,
        title=study.title.format(**names),
        about=list(study.about(result)),
        boxes=[box for box in study.boxes if box.when(result)],
        tiles=list(study.tiles(result)),
        sections=[values for s in study.sections if (values := _section(s, result))],
        claims=grid_of(CLAIMS, result),
        untested=grid_of(UNTESTED, result),
        data=grid_of(DATA, result),
        files=list(csv_files(result)),
        # Style and script are our own files: trusted, not escaped.
        style=style("page.css"),
        script=Markup(script),
        markup=Markup,
        # The page's security policy knows our script by this; any other script is refused.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _section(section: Section, result: StudyResult) -> Mapping[str, Any] | None:
    """What the template lays out of one section; None if it was not run."""
    entry = next((row for row in result.sections if row["key"] == section.key), None)
    if entry is None:
        return None
    findings = [row for row in result.findings if row["section"] == section.key]
    figures: list[dict[str, Any]] = []
    for figure in section.figures:
        if (svg := draw(figure, result)) is not None:
            under = [row["text"] for row in findings if row["under"] == figure.key]
            sample = sample_of(figure, figure_rows(figure, result))
            figures.append({"figure": figure, "svg": svg, "findings": under, "sample": sample})
    keys = {drawn["figure"].key for drawn in figures}
    tables = [(table, grid_of(table, result)) for table in section.tables]
    return {
        "section": section,
        "failed": entry["reason"],
        "findings": [r["text"] for r in findings if r["under"] not in keys and not r["headline"]],
        "figures": figures,
        "tables": [(table, grid) for table, grid in tables if grid.rows],
        "texts": [
            {"title": f"{row['rule']}, read through {row['map']}", "html": coloured_html(row)}
            for table in section.texts
            for row in result.rows(table)
        ],
    }


def result_html(result: StudyResult) -> str:
    """A short summary for a notebook: headlines and verdicts."""
    return tables_html("study", repr(result), [grid_of(CLAIMS, result)], result.headlines)


def _asset(name: str) -> str:
    return resources.files("layerleap.show.report").joinpath(name).read_text(encoding="utf8")
