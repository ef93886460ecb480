"""What the documents promise: versions agree, commands and links exist, examples run."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import layerleap
from layerleap.lens.evaluate import evaluate
from layerleap.maps.fit import worse_layers
from layerleap.show.cli.app import app
from layerleap.stream.examples import Sampling

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "layerleap"
README = ROOT / "README.md"
PAPERS = ROOT / "papers" / "layerleap_papers"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "papers") for page in (ROOT / folder).rglob("*.md")),
        ROOT / "tests/QUARANTINES.md",
    ]
)
LINK = re.compile(r"\]\(([^)\s]+)")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|tmp/w)\b")
# A wide terminal without colours: in a narrow one the help page breaks long options.
WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
CHEAP = (("--help",), ("models",), ("check",), ("read",))  # commands that are really run


def _text(path: Path) -> str:
    assert path.is_file(), f"{path.name} is missing"
    return path.read_text(encoding="utf8")


def _blocks(page: Path, *languages: str) -> Iterator[tuple[int, str, str]]:
    """(line, words after the language, body) of every fenced block in one of `languages`."""
    lines = _text(page).splitlines()
    start, tag = 0, None
    for number, line in enumerate(lines, 1):
        if not line.strip().startswith("```"):
            continue
        if tag is None:
            start, tag = number, line.strip().removeprefix("```").strip()
            continue
        language, _, more = tag.partition(" ")
        if language in languages:
            yield start, more, "\n".join(lines[start : number - 1])
        tag = None


def _commands(page: Path) -> list[list[str]]:
    """Every `layerleap ...` line of console and bash blocks, continued lines joined."""
    found = []
    for _, _, body in _blocks(page, "console", "bash"):
        for line in body.replace("\\\n", " ").splitlines():
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            if words[:1] == ["layerleap"]:
                found.append(words[1:])
    return found


def _layerleap(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **WIDE}
    return subprocess.run(
        [sys.executable, "-c", "from layerleap.show.cli.app import main; main()", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def _tracked() -> list[Path]:
    """Tracked text files; without git, everything that is not made by running things."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        made = {"build", "dist", "__pycache__"}
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(
                part in made or part.startswith(".") for part in path.relative_to(ROOT).parts
            )
        ]
    return [path for path in paths if path.is_file()]


def test_the_newest_changelog_entry_is_of_this_version():
    newest = re.search(r"^## \[?v?(\d[^\]\s]*)", _text(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == layerleap.__version__


def test_the_project_file_has_this_version():
    import tomllib

    project = tomllib.loads(_text(ROOT / "pyproject.toml"))["project"]
    assert project["version"] == layerleap.__version__


def test_pre_commit_formats_with_the_pinned_ruff():
    pinned = re.search(r"^ruff==(\S+)", _text(ROOT / "constraints.txt"), re.MULTILINE)
    hook = re.search(r"ruff-pre-commit\s+rev: v(\S+)", _text(ROOT / ".pre-commit-config.yaml"))
    assert pinned is not None
    assert hook is not None
    assert hook[1] == pinned[1]


def test_the_pinned_torch_is_the_build_without_a_local_label():
    assert "torch==2.13.0" in _text(ROOT / "constraints.txt").splitlines()


def test_the_benchmarked_demo_is_the_demo_of_the_makefile(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import common

    recipe = " ".join(_text(ROOT / "Makefile").replace("\\\n", " ").split())
    name, study, model, *options = common.DEMO
    assert " ".join(("layerleap", name, study, model, "--force", *options)) in recipe


def test_architecture_is_short_and_names_every_stage_and_room():
    page = _text(ROOT / "ARCHITECTURE.md")
    assert len(page.splitlines()) <= 120
    rooms = [path.parent.name for path in SOURCE.rglob("*/__init__.py")]
    assert [room for room in rooms if not re.search(rf"\b{room}\b", page)] == []


def test_the_readme_stays_short():
    assert len(_text(README).splitlines()) <= 120


def test_every_public_name_is_documented():
    pages = "\n".join(_text(page) for page in [README, *(ROOT / "docs").rglob("*.md")])
    missing = [
        name
        for name in layerleap.__all__
        if not name.startswith("__") and not re.search(rf"\b{name}\b", pages)
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path):
    dead = []
    for target in _links(page):
        path, _, heading = target.partition("#")
        linked = page.parent / path if path else page
        if not linked.exists() or (heading and heading not in _anchors(linked)):
            dead.append(target)
    assert not dead


def _links(page: Path) -> list[str]:
    """Targets of the links of a page that lead to files."""
    prose = re.sub(r"```.*?```", "", _text(page), flags=re.DOTALL)
    targets = LINK.findall(prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def _anchors(page: Path) -> set[str]:
    """What links to the headings of a page are called."""
    prose = re.sub(r"```.*?```", "", _text(page), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_linked_from_another_one():
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in _links(page)
        if not target.startswith("#")
    }
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in linked | {README}] == []


def test_no_tracked_file_names_a_path_of_someones_machine():
    found = []
    for path in _tracked():
        if path == Path(__file__).resolve():
            continue  # the pattern itself
        try:
            lines = path.read_text(encoding="utf8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        name = path.relative_to(ROOT)
        found += [f"{name}:{n}" for n, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]
    assert not found


def test_every_skipped_test_has_a_row_in_the_quarantines():
    rows = _text(ROOT / "tests" / "QUARANTINES.md")
    skips = re.compile(r"pytest\.(?:mark\.)?(?:skip|skipif|xfail)\b")
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path != Path(__file__).resolve() and skips.search(_text(path)):
            assert path.name in rows, f"{path.name} skips a test without a row"


def test_every_command_in_the_pages_exists_with_all_its_options():
    helps: dict[tuple[str, ...], str] = {}
    wrong = []
    for page in PAGES:
        for words in _commands(page):
            path = _subcommand(words)
            if path not in helps:
                done = CliRunner(env=WIDE).invoke(app, [*path, "--help"])
                assert done.exit_code == 0, f"layerleap {' '.join(path)}: {done.output[-300:]}"
                helps[path] = done.stdout
            options = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
            known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", helps[path]))
            wrong += [
                f"{page.name}: {' '.join(words)}: no {option}"
                for option in options
                if option not in {*known, "--help"}
            ]
    assert not wrong


def _subcommand(words: list[str]) -> tuple[str, ...]:
    """The words that name the command: one, or two below a group."""
    if not words or words[0].startswith("-"):
        return ()
    groups = ("study", "import")
    return tuple(words[:2]) if words[0] in groups else (words[0],)


@pytest.mark.real
def test_the_cheap_commands_of_the_readme_run(tmp_path: Path):
    ran = 0
    for words in _commands(README):
        if tuple(words[:1]) not in CHEAP:
            continue
        if any(mark in word for word in words for mark in ("|", ">", "my-", "...")):
            continue  # a pipeline, or a stand-in for the reader's own model
        if "--bank" in words:
            continue  # needs what a costlier command made
        done = _layerleap(*words, cwd=tmp_path)
        assert done.returncode == 0, f"layerleap {' '.join(words)}: {done.stderr[-500:]}"
        assert done.stdout.strip(), f"layerleap {' '.join(words)} printed nothing"
        ran += 1
    assert ran > 0, "README shows none of the cheap commands"


@pytest.mark.real
def test_the_readme_runs_in_order_and_its_first_bank_reads_no_worse_than_the_logit_lens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "readme"}
    ran = 0
    for line, more, body in _blocks(README, "python"):
        if "no-run" in more:
            continue
        # Blank lines in front make a traceback point at the line of the README.
        exec(compile("\n" * line + body, str(README), "exec"), namespace)
        ran += 1
    assert ran > 0, "README has no Python block to run"
    model, bank = namespace["model"], namespace["bank"]
    one_each = Sampling(unit="paragraph", positions="one")
    scores = evaluate(model, bank, "news", one_each, side="both", n_texts=100, progress=False)
    assert worse_layers(scores) == []
    value = {(row["map"], row["metric"], row["layer"]): row["value"] for row in scores.scores}
    for layer in range(model.n_layers):
        assert value["linear", "precision@1", layer] >= value["logit", "precision@1", layer], layer
        assert value["linear", "kl", layer] <= value["logit", "kl", layer], layer
