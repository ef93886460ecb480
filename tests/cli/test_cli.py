"""The command line through its runner: what people type, and what they mistype."""

import errno
import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from layerleap.show.cli.app import app
from layerleap.stats.collect import collect
from tiny_models import sentences, tiny

COLLECT = sys.modules[collect.__module__]  # `layerleap.stats.collect` itself is the function


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def said(result: Result) -> str:
    """Everything printed, without the line breaks of the terminal."""
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer."""
    place = tmp_path_factory.mktemp("model")
    model = tiny("llama")
    model.model.save_pretrained(place)
    model.tokenizer.save_pretrained(place)  # type: ignore[union-attr]
    return place


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    rows = [json.dumps({"text": t}) for t in sentences(80)]
    path.write_text("\n".join(rows), encoding="utf8")
    return path


@pytest.fixture(scope="module")
def bank(folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("banks") / "bank"
    result = run("fit", folder, "--text", text, "-o", out, "--positions", "all")
    assert result.exit_code == 0, result.output
    return out


def test_help_teaches_with_examples() -> None:
    for words in (
        [],
        ["check"],
        ["fit"],
        ["read"],
        ["merge"],
        ["study", "shortcuts"],
        ["import", "mat"],
    ):
        result = run(*words, "--help")
        assert result.exit_code == 0
        assert "layerleap" in result.output


def test_version_is_the_packages() -> None:
    import layerleap

    assert layerleap.__version__ in run("--version").output


def test_models_lists_what_is_bundled_and_whether_it_is_cached(empty_cache: Path) -> None:
    rows = json.loads(run("models", "--json").stdout)
    assert {"smollm2", "rxnfp", "rxnmapper", "mgm", "wikipedia", "news"} <= {
        r["name"] for r in rows
    }
    assert not any(row["cached"] for row in rows)


def test_check_prints_every_law_and_succeeds_on_a_sound_model(folder: Path) -> None:
    result = run("check", folder)
    assert result.exit_code == 0
    for law in ("blocks", "deterministic", "finite", "tail", "parts", "padding", "clean"):
        assert law in result.output


def test_check_needs_no_tokenizer(tmp_path: Path) -> None:
    tiny("gpt2").model.save_pretrained(tmp_path / "bare")
    assert run("check", tmp_path / "bare", "--json").exit_code == 0


def test_check_fails_with_code_one_and_names_the_law_on_broken_weights(tmp_path: Path) -> None:
    model = tiny("llama").model
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "broken")
    result = run("check", tmp_path / "broken")
    assert result.exit_code == 1
    assert "fails" in result.output


def test_check_accepts_paths_by_hand_and_refuses_wrong_ones(folder: Path) -> None:
    good = run("check", folder, "--blocks", "model.layers", "--tail", "model.norm,lm_head")
    assert good.exit_code == 0
    bad = run("check", folder, "--blocks", "model.nothing")
    assert bad.exit_code == 1
    assert "model.nothing" in said(bad)


def test_fit_writes_a_bank_that_read_uses(folder: Path, bank: Path) -> None:
    result = run("read", folder, "the cat sat on", "--bank", bank, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {row["map"] for row in found["readings"]} == {"logit", "linear"}
    last = [r for r in found["readings"] if r["layer"] == found["n_layers"]]
    assert all(row["agrees"] for row in last)


def test_read_shows_one_line_per_layer(folder: Path, bank: Path) -> None:
    result = run("read", folder, "the cat sat", "--bank", bank)
    assert result.exit_code == 0
    assert "the model's own answer" in said(result)


def test_read_computes_only_the_position_it_shows(
    folder: Path, bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layerleap.lens import lens

    rows, track = [], lens.track

    def counted(by: lens.Lens, states: dict[int, torch.Tensor], top_k: int) -> object:
        rows.append(len(states[0]))
        return track(by, states, top_k)

    monkeypatch.setattr(lens, "track", counted)
    shown = run("read", folder, "the cat sat", "--bank", bank)
    assert rows == [1, 1]
    rows.clear()
    last = run("read", folder, "the cat sat", "--bank", bank, "--position", 2)
    assert shown.output == last.output
    run("read", folder, "the cat sat", "--bank", bank, "--json")
    assert rows == [1, 1, 3, 3]


def test_read_writes_a_page_of_all_positions(folder: Path, bank: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("read", folder, "the cat sat", "--bank", bank, "--html", page).exit_code == 0
    content = page.read_text(encoding="utf8")
    assert content.count("<table") == 2
    assert "http:" not in content
    assert "https:" not in content


def test_card_prints_how_the_bank_was_made(bank: Path) -> None:
    result = run("card", bank)
    assert result.exit_code == 0
    assert "Fits to the last layer" in result.output


def test_shards_are_merged_into_the_bank_of_one_run(
    folder: Path, text: Path, bank: Path, tmp_path: Path
) -> None:
    from layerleap import ShortcutBank

    parts = []
    for which in range(3):
        parts.append(tmp_path / f"part-{which}")
        options = ("--positions", "all", "--shard", f"{which}/3", "-o", parts[-1])
        assert run("fit", folder, "--text", text, *options).exit_code == 0
    assert run("merge", *parts, "-o", tmp_path / "merged").exit_code == 0
    merged, whole = (ShortcutBank.from_pretrained(p) for p in (tmp_path / "merged", bank))
    for pair in whole.maps:
        torch.testing.assert_close(merged.maps[pair].weight, whole.maps[pair].weight)
    missing = run("merge", *parts[:2], "-o", tmp_path / "never")
    assert missing.exit_code == 2
    assert "[2] of 3 are missing" in said(missing)


def test_shards_keep_how_they_are_to_be_solved(folder: Path, text: Path, tmp_path: Path) -> None:
    from layerleap import ShortcutBank

    fit = ("fit", folder, "--text", text, "--positions", "all")
    options = ("--intercept", "--rank", 3, "--ridge", "auto")
    parts = [tmp_path / f"part-{which}" for which in range(2)]
    for which, part in enumerate(parts):
        result = run(*fit, *options, "--shard", f"{which}/2", "-o", part)
        assert result.exit_code == 0, result.output
    assert run(*fit, *options, "-o", tmp_path / "whole").exit_code == 0
    assert run("merge", *parts, "-o", tmp_path / "merged").exit_code == 0
    merged, whole = (ShortcutBank.from_pretrained(tmp_path / p) for p in ("merged", "whole"))
    assert merged.settings == whole.settings
    assert (merged.settings["intercept"], merged.settings["rank"]) == (True, 3)
    assert merged.settings["ridge"] == "auto"
    for pair, fitted in whole.fits.items():
        assert merged.fits[pair].ridge == fitted.ridge
        assert merged[pair].bias is not None  # type: ignore[union-attr]
        assert merged[pair].rank == 3  # type: ignore[union-attr]
    anew = ("--no-intercept", "--ridge", 0.5, "--rank", 4)
    assert run("merge", *parts, "-o", tmp_path / "other", *anew).exit_code == 0
    other = ShortcutBank.from_pretrained(tmp_path / "other")
    assert [other.settings[key] for key in ("intercept", "ridge", "rank")] == [False, 0.5, 4]
    assert other.data["rows_fitted"] > merged.data["rows_fitted"]  # none is held back any more
    assert {path.name for path in tmp_path.iterdir()} == {
        *("part-0", "part-1", "whole", "merged", "other")
    }


def test_shards_without_rows_held_back_cannot_choose_a_ridge(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    part = tmp_path / "part"
    assert run("fit", folder, "--text", text, "--shard", "0/1", "-o", part).exit_code == 0
    result = run("merge", part, "--ridge", "auto", "-o", tmp_path / "bank")
    refused(result, "these statistics have none", "--ridge auto", "a ridge as a number")


def test_study_writes_report_data_and_bank_and_leaves_no_work_behind(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    result = run(
        "study", "shortcuts", folder, "--text", text, "--other", "none", "-o", out, "--quick"
    )
    assert result.exit_code == 0, result.output
    names = {path.name for path in out.iterdir()}
    assert {"report.html", "study.json", "r2.csv", "scores.csv", "fits.csv", "bank"} <= names
    assert ".work" not in names
    assert "report.html" in said(result)
    study = json.loads((out / "study.json").read_text(encoding="utf8"))
    headlines = [f["text"] for f in study["findings"] if f["headline"]]
    assert len(headlines) == 3
    for line in headlines:
        assert line in said(result)


def test_study_reads_the_field_that_is_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    rows = [json.dumps({"body": t}) for t in sentences(80)]
    path.write_text("\n".join(rows), encoding="utf8")
    words = ("study", "shortcuts", folder, "--text", path, "--other", "none", "--quick", "-o")
    refused(run(*words, tmp_path / "report"), "no field 'text'; it has body", "--field")
    result = run(*words, tmp_path / "report", "--field", "body", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["settings"]["field"] == "body"


def test_study_of_two_held_out_rows_prints_json(folder: Path, text: Path, tmp_path: Path) -> None:
    words = ("--text", text, "--other", "none", "--read-texts", 2, "--json", "-o", tmp_path / "r")
    result = run("study", "shortcuts", folder, *words, "--sections", "parts,alternation")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tables"]["r2"][0]["low"] is None


def test_a_study_of_which_a_section_cannot_run_says_so_and_its_exit_code_shows_it(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    words = ("--text", text, "--other", "none", "--read-texts", 1, "-o", tmp_path / "r")
    result = run("study", "shortcuts", folder, *words, "--sections", "sizes")  # without --beside
    assert result.exit_code == 3, result.output
    assert "section sizes could not run" in said(result)
    assert (tmp_path / "r" / "report.html").exists()


def test_a_study_compares_models_that_are_named_beside(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    words = (
        "--text",
        text,
        "--other",
        "none",
        "--sections",
        "none",
        "--quick",
        "-o",
        tmp_path / "r",
    )
    result = run("study", "shortcuts", folder, *words, "--beside", "no-such-model")
    assert result.exit_code == 3, result.output
    assert "no-such-model" in said(result)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    result = run("study", "shortcuts", folder, *words, "--beside", other, "--json", "--force")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["tables"]["sizes"]
    assert {row["model"] for row in rows} == {str(folder), str(other)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ridge", "some"), "ridge 'some'"),
        (("--pairs", "some"), "pairs is 'some'"),
        (("--sections", "poetry"), "no section 'poetry'"),
    ],
)
def test_a_study_with_settings_without_meaning_is_refused(
    folder: Path, text: Path, tmp_path: Path, words: tuple[str, str], message: str
) -> None:
    refused(
        run("study", "shortcuts", folder, "--text", text, *words, "-o", tmp_path / "r"), message
    )


def test_a_bank_that_cannot_be_saved_does_not_cost_the_report(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layerleap import ShortcutBank
    from layerleap.errors import CannotWrite

    save = ShortcutBank.save_pretrained

    def full(self: ShortcutBank, folder: Path) -> Path:
        if Path(folder).name == "bank":
            raise CannotWrite("cannot write the bank: no space")
        return save(self, folder)

    monkeypatch.setattr(ShortcutBank, "save_pretrained", full)
    out = tmp_path / "report"
    words = ("--text", text, "--other", "none", "--quick", "-o", out)
    refused(run("study", "shortcuts", folder, *words), "no space")
    assert (out / "report.html").exists()


# What people mistype: one clear line, exit code not zero, nothing half-written.


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert "error: " in said(result)  # after what the command said it would do
    for word in words:
        assert word in said(result)


def test_unknown_model(tmp_path: Path) -> None:
    refused(run("check", "no-such-model"), "no-such-model", "smollm2")
    refused(run("check", tmp_path / "nowhere"), "no file or folder")


def test_unknown_text(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "bank"
    refused(run("fit", folder, "--text", tmp_path / "none.txt", "-o", out), "none.txt")
    assert not out.exists()


def test_empty_text(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    refused(run("fit", folder, "--text", tmp_path / "empty.txt", "-o", tmp_path / "bank"), "empty")
    refused(run("read", folder, "", "--no-bank"), "empty")
    assert [p.name for p in tmp_path.iterdir()] == ["empty.txt"]


@pytest.mark.parametrize("option", ["--text", "--other"])
def test_a_study_of_standard_input(folder: Path, tmp_path: Path, option: str) -> None:
    result = run("study", "shortcuts", folder, option, "-", "-o", tmp_path / "report")
    refused(result, "standard input", "save it to a file first")  # before any model is loaded


def test_starts_that_would_not_be_used(folder: Path, text: Path, tmp_path: Path) -> None:
    words = ("--text", text, "--starts", text, "-o", tmp_path / "report")
    message = "starts are for texts sampled from the model"
    refused(run("study", "shortcuts", folder, *words), message)


def test_text_shorter_than_one_position(folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("the")  # one word is no sentence
    refused(run("fit", folder, "--text", short, "-o", tmp_path / "bank"), "no position")


def test_position_that_does_not_exist(folder: Path) -> None:
    refused(run("read", folder, "the cat", "--no-bank", "--position", 9), "position 9", "2 tokens")


def test_bank_of_another_model(bank: Path, tmp_path: Path) -> None:
    other = tiny("llama", seed=1)
    other.model.save_pretrained(tmp_path / "other")
    other.tokenizer.save_pretrained(tmp_path / "other")  # type: ignore[union-attr]
    refused(run("read", tmp_path / "other", "the cat", "--bank", bank), "this bank belongs to")


def test_tampered_and_truncated_bank(folder: Path, bank: Path, tmp_path: Path) -> None:
    import shutil

    for name, harm in (("tampered", lambda b: b[:-1] + b"x"), ("cut", lambda b: b[: len(b) // 2])):
        copy = shutil.copytree(bank, tmp_path / name)
        weights = copy / "maps.safetensors"
        weights.write_bytes(harm(weights.read_bytes()))
        refused(run("read", folder, "the cat", "--bank", copy), "changed or truncated")


def test_missing_bank(folder: Path, tmp_path: Path) -> None:
    refused(
        run("read", folder, "the cat", "--bank", tmp_path / "none"),
        "is neither a folder nor a valid name",
    )


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--ridge", "lots", "expected a number or 'auto'"),
        ("--ridge", "-1", "at least 0"),
        ("--rank", "99", "rank 99"),
        ("--positions", "some", "'some'"),
        ("--unit", "word", "'word'"),
        ("--shard", "4", "0/4"),
        ("--shard", "4/4", "shard 4 of 4"),
        ("--held-out", "1.5", "1.5"),
        ("--pairs", "most", "'most'"),
        ("--max-tokens", "0", "max_tokens 0"),
        ("--texts", "0", "n_texts is 0"),
    ],
)
def test_settings_outside_their_meaning(
    folder: Path, text: Path, tmp_path: Path, option: str, value: str, words: str
) -> None:
    refused(run("fit", folder, "--text", text, "-o", tmp_path / "bank", option, value), words)
    assert not list(tmp_path.iterdir())


def test_no_space_left_on_the_disk(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fit = ("fit", folder, "--text", text, "-o", tmp_path / "bank")
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        refused(run(*fit), "No space left on device")
    # The pass over the text is not lost: the same command goes on from its end.
    assert [path.name for path in tmp_path.iterdir()] == [".bank.fitting.safetensors"]
    monkeypatch.setattr("layerleap.stats.fit_statistics._add", lambda *_: pytest.fail("ran again"))
    assert run(*fit).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["bank"]


def no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused must be refused before a model is even loaded."""
    monkeypatch.setattr("layerleap.models.load.load", lambda *_, **__: pytest.fail("too late"))
    monkeypatch.setattr(COLLECT, "merge", lambda *_, **__: pytest.fail("too late"))


@pytest.mark.parametrize("command", ["fit", "merge", "import"])
def test_a_folder_of_other_things_is_refused_before_the_pass(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    no_pass(monkeypatch)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    words = {
        "fit": ("fit", folder, "--text", text),
        "merge": ("merge", text),
        "import": ("import", "mat", folder, "--model", folder),
    }[command]
    refused(run(*words, "-o", tmp_path / "thesis"), "other files than a bank", "another folder")
    monkeypatch.chdir(tmp_path)
    refused(run(*words, "-o", "."), "the current folder")
    refused(run(*words, "-o", text), "is a file")
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "precious"


def test_statistics_of_a_shard_do_not_go_into_a_folder(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pass(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path, "."):
        refused(run("fit", folder, "--text", text, "--shard", "0/2", "-o", place), "is a folder")


def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LAYERLEAP_CACHE", str(tmp_path / "file" / "cache"))
    refused(run("check", "rxnmapper"), "cannot write")


def test_interruption_keeps_the_checkpoint_and_the_next_run_ends_the_same(
    folder: Path, text: Path, bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layerleap import ShortcutBank
    from layerleap.stats import fit_statistics

    monkeypatch.setattr(COLLECT, "TOKENS_PER_BATCH", 64)
    fit = ("fit", folder, "--text", text, "--positions", "all", "-o")
    assert run(*fit, tmp_path / "whole").exit_code == 0
    add, seen = fit_statistics._add, []

    def interrupted(*args: object) -> None:
        seen.append(1)
        if len(seen) == 4:
            raise KeyboardInterrupt
        add(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(fit_statistics, "_add", interrupted)
    out = tmp_path / "bank"
    result = run(*fit, out)
    assert result.exit_code == 130
    assert "stopped" in result.output
    assert not out.exists()
    assert run(*fit, out).exit_code == 0
    resumed, whole = (ShortcutBank.from_pretrained(p) for p in (out, tmp_path / "whole"))
    for pair in whole.maps:
        assert torch.equal(resumed.maps[pair].weight, whole.maps[pair].weight)  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} == {"bank", "whole"}


def test_states_that_are_not_numbers_are_refused(tmp_path: Path, text: Path) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.lm_head.weight.fill_(float("inf"))
    model.model.save_pretrained(tmp_path / "broken")
    model.tokenizer.save_pretrained(tmp_path / "broken")  # type: ignore[union-attr]
    result = run("fit", tmp_path / "broken", "--text", text, "-o", tmp_path / "bank")
    refused(result, "NaN or infinite")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("fit",),
        ("tune",),
        ("evaluate",),
        ("read",),
        ("saturation",),
        ("study", "suitability"),
        ("merge",),
        ("models",),
        ("study", "shortcuts"),
        ("study", "saturation"),
        ("import", "mat"),
        ("study", "embedding"),
    ],
    ids=" ".join,
)
def test_help_is_filled_to_the_width_of_the_terminal(words, monkeypatch):
    """Line breaks of the code used to stay, so that every second line of a paragraph was short."""
    monkeypatch.setattr("rich.console.Console.width", 80)
    text = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).output
    before = text.split("\u256d")[0].splitlines()
    assert len(before) > 4
    for line, following in itertools.pairwise(map(str.rstrip, before)):
        if line and following and not following.startswith("  "):
            assert len(f"{line} {following.split()[0]}") > 78, (line, following)


def test_evaluate_compares_banks_and_writes_a_report(folder: Path, text: Path, tmp_path: Path):
    how = ("--text", text, "--unit", "document", "--positions", "all")
    for name in ("one", "two"):
        fitted = run("fit", folder, *how, "-o", tmp_path / name, "--seed", len(name))
        assert fitted.exit_code == 0, fitted.output
    both = ("--bank", tmp_path / "one", "--bank", tmp_path / "two", *how)
    result = run("evaluate", folder, *both, "-o", tmp_path / "scores")
    assert result.exit_code == 0, result.output
    for word in ("P@1", "KL", "logit", "one", "two", "documents"):
        assert word in result.output
    written = {path.name for path in (tmp_path / "scores").iterdir()}
    assert written == {f"evaluation.{kind}" for kind in ("html", "svg", "csv", "json")}
    printed = json.loads(run("evaluate", folder, *both, "--json").stdout)
    assert {row["map"] for row in printed["scores"]} == {"logit", "one", "two"}
    refused(run("evaluate", folder, *both, "--side", "heldout"), "side is 'heldout'")


def test_a_fit_on_few_rows_says_so_in_one_line(folder: Path, text: Path, tmp_path: Path):
    result = run("fit", folder, "--text", text, "-o", tmp_path / "bank", "--texts", 9)
    assert result.exit_code == 0, result.output
    assert "warning: rows are few: 9 for maps of width" in " ".join(result.output.split())
