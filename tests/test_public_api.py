"""The public names as a type checker, an editor and a user see them."""

import inspect
import re
from pathlib import Path

import pytest
from mypy import api

import layerleap as ll

ROOT = Path(__file__).resolve().parents[1]


def checked(tmp_path: Path, code: str) -> str:
    """What mypy says about code that a user could write."""
    file = tmp_path / "user_code.py"
    file.write_text(code)
    config, cache = ROOT / "pyproject.toml", ROOT / ".mypy_cache"
    out, err, _ = api.run(
        [str(file), f"--config-file={config}", f"--cache-dir={cache}", "--no-error-summary"]
    )
    assert not err, err
    return out


def test_a_type_checker_knows_every_public_name(tmp_path):
    lines = ["import layerleap as ll", *(f"reveal_type(ll.{name})" for name in ll.__all__)]
    said = checked(tmp_path, "\n".join(lines))
    revealed = re.findall(r'Revealed type is "(.*)"', said)
    assert len(revealed) == len(ll.__all__), said
    unknown = [n for n, kind in zip(ll.__all__, revealed, strict=True) if kind == "Any"]
    assert not unknown


def test_a_type_checker_follows_what_comes_back_and_finds_mistakes(tmp_path):
    right = """
import layerleap as ll
model: ll.Transformer = ll.load("smollm2")
bank: ll.ShortcutBank = ll.fit(model, "wikipedia", n_texts=10)
readings: ll.Readings = ll.read(model, "Hello", bank=bank)
scores: ll.Evaluation = ll.evaluate(model, bank, "news")
text: ll.Generation = ll.generate(model, "Hello", rule=ll.exits.Similarity(0.98))
chat = [{"role": "user", "content": "Hello"}]
texts: list[ll.Generation] = ll.generate(model, ["Hello", "Goodbye"], edits=["L24.N80=-14"])
layers: list[ll.Readings] = ll.read(model, [chat, chat])
text = ll.generate(model, chat, edits=[ll.edits.ZeroNeuron(1, 1)])
result: ll.StudyResult = ll.studies.saturation(model, quick=True)
answer: ll.StudyResult = ll.studies.suitability(model)
"""
    assert checked(tmp_path, right) == ""
    wrong = right + 'bank = ll.load("smollm2")\nll.read(model, "Hello", banks=bank)\nll.reed\n'
    said = checked(tmp_path, wrong)
    assert len({line.split(": ")[0] for line in said.splitlines() if ": error:" in line}) == 3, said
    assert "Incompatible types in assignment" in said
    assert 'Unexpected keyword argument "banks"' in said
    assert '"reed"' in said


@pytest.mark.parametrize(
    "name", ["load", "read", "fit", "evaluate", "generate", "decoder", "tune", "finetune"]
)
def test_verbs_show_how_they_are_used(name):
    text = getattr(ll, name).__doc__
    assert text is not None
    assert f"ll.{name}(" in text


def test_reading_is_a_plain_function_whatever_was_imported_before():
    import layerleap.lens.lens

    assert ll.read is layerleap.lens.lens.read
    assert "positions" in inspect.signature(ll.read).parameters
