"""The two distributions as users get them: built, installed beside their dependencies, and used."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

import layerleap

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(pytest.__file__).parents[1]
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", ".venv", "build")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Built from a copy: setuptools writes into the folder that it builds from."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for folder in ("src", "papers"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=IGNORED)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    for source in (copy, copy / "papers"):
        build = "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", out, source
        subprocess.run([sys.executable, "-m", "pip", *map(str, build)], check=True)
    return {path.name.split("-")[0]: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that is installed here, but for this project."""
    folder = tmp_path_factory.mktemp("dependencies")
    for path in SITE.iterdir():
        if not path.name.startswith(("layerleap", "__editable__", "__pycache__")):
            (folder / path.name).symlink_to(path)
    return folder


def run(code: str, *wheels: Path, beside: Path, to: Path) -> str:
    """What a fresh process prints that has these wheels installed, and nothing of the checkout."""
    for wheel in wheels:
        with ZipFile(wheel) as archive:  # what `pip install` does with a wheel of plain Python
            archive.extractall(to)
    begin = f"import sys; sys.path += [{str(to)!r}, {str(beside)!r}]\n"
    command = [sys.executable, "-S", "-E", "-c", begin + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=to)
    assert done.returncode == 0, done.stderr
    return done.stdout


STUDIES = """
import layerleap as ll
from typer.testing import CliRunner
from layerleap.show.cli.app import app
print(ll.__file__)
print(sorted(ll.studies.names()))
for words in (["study", "--help"], ["study", "shortcuts", "smollm2", "--help"]):
    done = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    print(done.exit_code, " ".join(done.output.split()))
"""


def test_a_wheel_without_papers_works_and_says_what_to_install(wheels, dependencies, tmp_path):
    printed = run(STUDIES, wheels["layerleap"], beside=dependencies, to=tmp_path)
    place, names, listed, refused = printed.splitlines()
    assert place.startswith(str(tmp_path))
    assert "shortcuts" not in names
    assert listed.startswith("0 ")
    assert refused.startswith("2 ")
    for text in (listed, refused):
        assert "pip install 'layerleap[papers]'" in text


def test_both_wheels_together_have_the_studies(wheels, dependencies, tmp_path):
    printed = run(STUDIES, *wheels.values(), beside=dependencies, to=tmp_path)
    _, names, listed, helped = printed.splitlines()
    for name in ("shortcuts", "saturation", "embedding", "sparsity", "stitching", "icl"):
        assert name in names
        assert name in listed
    assert helped.startswith("0 ")
    assert "--fit-texts" in helped


def test_wheels_hold_stubs_and_data_but_no_tests_or_results(wheels):
    for name, wanted in {
        "layerleap": ("layerleap/py.typed", "layerleap/__init__.pyi", "layerleap/zoo/catalog.toml"),
        "layerleap_papers": ("layerleap_papers/py.typed",),
    }.items():
        held = ZipFile(wheels[name]).namelist()
        assert set(wanted) <= set(held)
        assert not [path for path in held if "/tests/" in path or path.endswith(".csv")]


def test_papers_need_exactly_this_version():
    import tomllib

    papers = tomllib.loads((ROOT / "papers/pyproject.toml").read_text())["project"]
    assert papers["version"] == layerleap.__version__
    assert papers["dependencies"][0].endswith(f"=={layerleap.__version__}")
