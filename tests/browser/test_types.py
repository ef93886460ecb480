"""The page's modules against their JSDoc types, by TypeScript's checker from npm; their style."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[2] / "src" / "layerleap" / "show" / "web" / "static"
OPTIONS = {
    "allowJs": True,
    "checkJs": True,
    "noEmit": True,
    "strict": True,
    "target": "es2022",
    "module": "esnext",
    "moduleResolution": "bundler",
    "types": [],
    "noUnusedLocals": True,
    "noUnusedParameters": True,
    "lib": ["es2022", "dom", "dom.iterable", "dom.asynciterable"],
}


def checker():
    """The command of TypeScript's checker: installed, or fetched by npm where it may."""
    if installed := shutil.which("tsc"):
        return [installed]
    if not shutil.which("npm"):
        pytest.skip("neither tsc nor npm on this machine")
    command = [
        "npm",
        "exec",
        "--yes",
        "--prefer-offline",
        "--fetch-retries=0",
        "--fetch-timeout=20000",
        "--package=typescript",
        "--",
        "tsc",
    ]
    try:
        tried = subprocess.run([*command, "--version"], capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("npm cannot fetch TypeScript here")
    if tried.returncode:
        pytest.skip("npm cannot fetch TypeScript here")
    return command


def test_the_modules_agree_with_their_types(tmp_path):
    config = {"compilerOptions": OPTIONS, "include": [f"{STATIC.resolve()}/*.js"]}
    (tmp_path / "tsconfig.json").write_text(json.dumps(config))
    ran = subprocess.run(
        [*checker(), "-p", str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stdout) == (0, "")


@pytest.mark.parametrize("path", sorted(STATIC.glob("*.js")), ids=lambda path: path.name)
def test_a_module_is_checked_and_writes_text_as_text(path):
    code = path.read_text()
    assert code.startswith("// @ts-check\n")
    for forbidden in (
        "innerHTML",
        "outerHTML =",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        'setAttribute("style"',
        "http://",
        "https://",
    ):
        assert forbidden not in code.replace("http://www.w3.org/2000/svg", ""), forbidden


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere():
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|https?://", page)
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="app.js">']
