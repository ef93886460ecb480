"""`layerleap finetune` on a tiny model."""

import json

from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from families import build
from layerleap.show.cli.app import app
from tiny_models import sentences, tokenizer


def run(*arguments: str):
    return CliRunner().invoke(app, ["finetune", *arguments])


def saved(tmp_path) -> tuple[str, str]:
    build("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n\n".join(sentences(40)))
    return str(tmp_path / "model"), str(tmp_path / "text.txt")


QUICK = ["--steps", "4", "--batch", "2", "--max-tokens", "12", "--check-every", "2"]


def test_finetune_writes_a_model_and_prints_its_losses(tmp_path):
    model, text = saved(tmp_path)
    folder = tmp_path / "tuned"
    result = run(model, "--text", text, "-o", str(folder), *QUICK, "--parameters", "keys,*.mlp.*")
    assert result.exit_code == 0, result.output
    assert "held out" in result.output
    assert AutoModelForCausalLM.from_pretrained(folder) is not None
    again = run(
        model, "--text", text, "-o", str(folder), *QUICK, "--how", "full", "--json", "--force"
    )
    assert again.exit_code == 0, again.output
    written = json.loads(again.stdout)
    assert written["settings"]["how"] == "full"
    assert [row["step"] for row in written["record"]] == [0, 2, 4]


def test_a_mistake_is_one_line(tmp_path):
    model, text = saved(tmp_path)
    result = run(model, "--text", text, "-o", str(tmp_path / "x"), "--learning-rate", "-1")
    assert result.exit_code == 2
    assert "learning_rate is -1.0; expected a number above 0" in " ".join(result.stderr.split())
