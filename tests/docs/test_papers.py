"""What the pages of papers promise: tables are those of the files, and so are all numbers."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "papers" / "table.py"
FOLDERS = sorted(path.parent for path in (ROOT / "papers/layerleap_papers").glob("*/__init__.py"))
# Numbers that stand for themselves: 5, 1,870, 37 %, +0.3 and -2.3. Not those inside of names.
NUMBER = re.compile(r"(?<![\w.^-])[+-]?\d[\d,]*(?:\.\d+)?(?:e-\d+)?(?![\w-])")


def _run(script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _copy(folder: Path) -> Path:
    """The script and the pages of this project, in another folder."""
    shutil.copytree(
        ROOT / "papers", folder / "papers", ignore=shutil.ignore_patterns("tests", "*.py[co]")
    )
    shutil.copy(ROOT / "README.md", folder)
    return folder / "papers" / "table.py"


def _came_out(page: str) -> str:
    """The section on what came out, without the generated table and the targets of links."""
    (section,) = re.findall(
        r"^## What came out here\n(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE
    )
    prose = re.sub(r"<!-- results -->.*<!-- end of results -->", "", section, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)|!\[[^]]*\]", "]", prose)


def test_the_tables_are_those_of_the_results():
    checked = _run(TABLE, "--check")
    assert checked.returncode == 0, checked.stderr


def test_a_changed_result_makes_the_pages_stale_until_they_are_written_again(tmp_path: Path):
    table = _copy(tmp_path)
    claims = tmp_path / "papers/layerleap_papers/jump_to_conclusions/results/smollm2/claims.csv"
    claims.write_text(claims.read_text("utf8").replace(",yes,", ",no,", 1), "utf8")
    stale = _run(table, "--check")
    assert stale.returncode == 1
    assert stale.stderr.count("make results-table") == 3  # both overviews, and the paper's page
    assert _run(table).returncode == 0
    assert _run(table, "--check").returncode == 0
    page = claims.parents[2] / "README.md"
    assert page.read_text("utf8") != (
        FOLDERS[0].parent / "jump_to_conclusions/README.md"
    ).read_text("utf8")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_paper_has_a_page_that_says_how_to_run_it_and_what_came_out(folder: Path):
    page = (folder / "README.md").read_text("utf8")
    assert re.search(r"arxiv\.org/abs/\d{4}\.\d{5}", page)
    for heading in ("claims", "run it", "came out here"):
        assert re.search(rf"^## .*{heading}", page, re.MULTILINE), heading
    assert "layerleap study" in page
    assert "ll.studies." in page
    assert f"make {folder.name.replace('_', '-')}" in page
    assert "did not replicate" in page.lower()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_number_on_what_came_out_is_in_the_results(folder: Path):
    files = [path for path in folder.glob("results/*/*") if path.suffix in (".csv", ".txt")]
    results = "\n".join(path.read_text("utf8") for path in files if path.name != "scores.csv")
    known = {number.lstrip("+-") for number in NUMBER.findall(results)}
    written = NUMBER.findall(_came_out((folder / "README.md").read_text("utf8")))
    assert len(written) >= 10
    assert [number for number in written if number.lstrip("+-").rstrip(",") not in known] == []


def test_the_makefile_has_a_target_for_every_paper():
    made = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for folder in FOLDERS:
        assert f"make {folder.name.replace('_', '-')} " in made
