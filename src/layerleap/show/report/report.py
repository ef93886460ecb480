"""The report of a study: one HTML page that needs nothing else, and its data beside it.

In: the plain-data result of a study and a folder. Out: `report.html`, `study.json`, its tables
as CSV files, `findings.txt` and `summary.png` in that folder, all of them or none; other files of
the folder are left alone.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

from layerleap.errors import BadArtifact
from layerleap.extras import report_library
from layerleap.files import whole_file
from layerleap.show.figures.hero import hero
from layerleap.show.figures.select import Study, home, without_nan
from layerleap.show.report import page, saturation_page
from layerleap.show.report.data_files import csv_files
from layerleap.show.report.sections import sections

FORMAT = 1
KINDS = ("shortcuts", "saturation")


def write_report(study: Study, folder: Path) -> Path:
    """Write the page and the data of `study` into `folder`; returns the path of the page.

    NaN and infinity, which JSON does not have, become null and are shown as a dash.
    """
    study = without_nan(study)
    is_saturation = study.get("kind") == "saturation"
    tables = saturation_page.csv_files(study) if is_saturation else csv_files(study)
    contents = {
        "study.json": json.dumps(study, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        **tables,
        "findings.txt": "".join(f"{row['text']}\n" for row in study["findings"]),
        "report.html": report_html(study),
    }
    pictured = None if is_saturation else hero(study)
    # Every file is complete on the disk, under a temporary name, before the first is renamed.
    with ExitStack() as all_files:
        for name, text in contents.items():
            temporary = all_files.enter_context(whole_file(Path(folder) / name))
            temporary.write_text(text, encoding="utf8", newline="")
        if pictured is not None:
            all_files.enter_context(whole_file(Path(folder) / "summary.png")).write_bytes(
                pictured.png
            )
    return Path(folder) / "report.html"


def report_html(study: Study) -> str:
    """The page alone, as text: style, script and figures are inside it."""
    if study.get("format") != FORMAT or study.get("kind") not in KINDS:
        found = f"{study.get('kind')}, format {study.get('format')}"
        wanted = " or ".join(KINDS)
        raise BadArtifact(f"the study is of kind {found}; wanted {wanted}, format {FORMAT}")
    study = without_nan(study)
    if study["kind"] == "saturation":
        return _render("saturation.html.j2", study, saturation_page.values(study))
    fit, read = home(study)
    figures, more = page.figures_of(study), sections(study)
    shown = {"headline", *(figure.key for figure in figures)}
    shown |= {topic for section in more for topic in section.topics}
    return _render(
        "report.html.j2",
        study,
        {
            "fit": fit,
            "read": read,
            "figures": figures,
            "sections": more,
            "also": page.unshown(study, shown),
            "claims": page.claim_table(study),
            "files": list(csv_files(study)),
            "tiles": page.tiles(study),
            "scores": page.score_table(study),
            "transfer": page.transfer_table(study),
            "fits": page.fit_table(study),
            "data": page.data_table(study),
        },
    )


def _render(template: str, study: Study, values: Mapping[str, Any]) -> str:
    """The template laid out; style and script are our own files: trusted, not escaped."""
    jinja2 = report_library("jinja2")
    markup = report_library("markupsafe").Markup
    script = _asset("report.js")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = _asset("macros.html.j2") + _asset(template)
    html: str = environment.from_string(text).render(
        study=study,
        model=study["model"],
        headlines=[row["text"] for row in study["findings"] if row["topic"] == "headline"],
        style=markup(_asset("report.css")),
        script=markup(script),
        script_hash=_hash(script),
        markup=markup,
        **values,
    )
    return html


def _asset(name: str) -> str:
    return resources.files("layerleap.show.report").joinpath(name).read_text(encoding="utf8")


def _hash(script: str) -> str:
    """What the page's security policy knows our script by; any other script is refused."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
