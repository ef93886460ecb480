"""Building an index: against brute force, interrupted, refused, and never taken half-built."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import layerleap as ll
from concepts import indexed
from layerleap.errors import (
    BadArtifact,
    BadSettings,
    BadText,
    CannotFetch,
    CannotWrite,
    ModelRefused,
    WrongModel,
)
from layerleap.lens.vocabulary import build
from layerleap.lens.vocabulary.build import index as build_index, search as search_index
from layerleap.lens.vocabulary.index import ConceptIndex
from layerleap.lens.vocabulary.index_settings import IndexSettings, default_path
from layerleap.models.weights import feed_forward
from tiny_models import sentences, tiny

FAMILIES = ("gpt2", "llama", "bert", "gpt_neox", "gemma", "opt", "t5", "falcon")
TOP = 6


def dump(path: Path) -> dict[str, list[Any]]:
    """Every row of the file."""
    tables = ("about", "blocks", "vectors", "ranges", "tokens", "postings", "clusters", "members")
    with closing(sqlite3.connect(path)) as connection:
        return {
            table: sorted(connection.execute(f"SELECT * FROM {table}").fetchall(), key=repr)
            for table in tables
        }


@pytest.mark.parametrize("name", FAMILIES)
def test_both_ends_are_those_of_every_value_vector_times_the_output_matrix(name, tmp_path):
    model = tiny(name)
    index = build_index(model, tmp_path / "index", top=TOP, n_texts=0, clusters=0, progress=False)
    head = model.model.get_output_embeddings().weight.detach()
    if name == "bert":  # whose head has a matrix before that
        head = head @ model.model.cls.predictions.transform.dense.weight.detach()
    n = 0
    for block in range(1, model.n_layers + 1):
        values = feed_forward(model, block).values(model)
        scores = values @ head.T
        for neuron in (0, 7, len(values) - 1):
            vector = index.vector(block, neuron)
            order = scores[neuron].sort(descending=True, stable=True).indices.tolist()
            assert [one.token.id for one in vector.promotes] == order[:TOP]
            assert [one.token.id for one in vector.suppresses] == order[::-1][:TOP]
            for end, sign in ((vector.promotes, 1), (vector.suppresses, -1)):
                exact = (sign * scores[neuron]).sort(descending=True).values[:TOP] * sign
                assert [one.score for one in end] == pytest.approx(exact.tolist(), rel=2e-3)
            assert vector.norm == pytest.approx(values[neuron].norm().item(), rel=1e-5)
            assert vector.range is None
            assert vector.cluster is None
        n += len(values)
    assert index.n_vectors == n


def test_tied_and_untied_output_matrices_are_the_ones_that_make_logits(tmp_path):
    for tied in (True, False):
        model = tiny("llama", tie_word_embeddings=tied)
        index = build_index(
            model, tmp_path / f"{tied}", top=3, n_texts=0, clusters=0, progress=False
        )
        embedding = model.model.get_input_embeddings().weight
        head = model.model.get_output_embeddings().weight
        assert torch.equal(head, embedding) == tied
        best = (feed_forward(model, 2).values(model)[4] @ head.T).argmax().item()
        assert index.vector(2, 4).promotes[0].token.id == best


def test_a_norm_after_the_ffn_is_part_of_the_vector(tmp_path):
    model = tiny("gemma2")
    index = build_index(model, tmp_path / "index", top=TOP, n_texts=0, clusters=0, progress=False)
    block = model.block(2)
    gain = 1 + block.post_feedforward_layernorm.weight.detach()
    written = feed_forward(model, 2).values(model) * gain
    scores = written @ model.model.get_output_embeddings().weight.detach().T
    for neuron in (0, 11, 39):
        order = scores[neuron].argsort(descending=True).tolist()
        vector = index.vector(2, neuron)
        assert [one.token.id for one in vector.promotes] == order[:TOP]
        assert vector.norm == pytest.approx(written[neuron].norm().item(), rel=1e-4)


def test_a_projection_before_the_head_is_part_of_the_matrix(tmp_path):
    model = tiny("opt_350m")
    index = build_index(model, tmp_path / "index", top=TOP, n_texts=0, clusters=0, progress=False)
    decoder = model.model.model.decoder
    head = model.model.lm_head.weight @ decoder.project_out.weight
    order = (feed_forward(model, 1).values(model)[3] @ head.T).argsort(descending=True).tolist()
    assert [one.token.id for one in index.vector(1, 3).promotes] == order[:TOP]


def test_a_mixture_of_experts_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(ModelRefused, match=r"no neurons to index.*mixture of experts"):
        build_index(tiny("mixtral"), tmp_path / "index", progress=False)
    assert not list(tmp_path.iterdir())


def test_a_head_of_another_width_is_read_through_its_projection(tmp_path):
    model = tiny("albert")
    index = build_index(model, tmp_path / "index", top=3, n_texts=0, clusters=0, progress=False)
    head = model.model.predictions.decoder.weight @ model.model.predictions.dense.weight
    scores = feed_forward(model, 1).values(model)[4] @ head.detach().T
    assert [one.token.id for one in index.vector(1, 4).promotes] == scores.topk(3).indices.tolist()


def test_a_head_that_is_not_in_memory_is_refused(tmp_path):
    model = tiny("llama")
    model.model.lm_head.to("meta")
    with pytest.raises(ModelRefused, match="cannot be read in its vocabulary"):
        build_index(model, tmp_path / "index", progress=False)
    assert not list(tmp_path.iterdir())


def test_blocks_with_experts_are_left_out_with_the_reason(tmp_path):
    model = tiny("qwen2_moe", mlp_only_layers=[1])
    index = build_index(
        model, tmp_path / "index", top=4, text=sentences(4), clusters=3, progress=False
    )
    first, second, third = index.blocks
    assert "mixture of experts" in first.reason
    assert "mixture of experts" in third.reason
    assert second.reason is None
    assert index.n_vectors == second.n_neurons > 0
    assert index.vector(2, 0).range is not None
    assert {match.block for match in index.search("cat dog sat")} == {2}
    assert {one.block for one in index.neighbours(2, 0)} == {2}
    with pytest.raises(BadSettings, match=r"block 1 is not in the index: .*experts"):
        index.vector(1, 0)


class Stop(BaseException):
    """As Ctrl-C."""


@pytest.mark.parametrize(
    "phase", ["reading neurons", "naming tokens", "natural ranges", "clusters"]
)
def test_an_interrupted_build_goes_on_and_ends_with_the_same_rows(phase, tmp_path, monkeypatch):
    whole = indexed(tmp_path / "whole")
    read: list[int] = []
    own = build.both_ends
    monkeypatch.setattr(build, "both_ends", lambda v, *rest: read.append(len(v)) or own(v, *rest))

    def stop(at: str, done: int, total: int | None, unit: str = "texts") -> None:
        if at == phase and (at != "reading neurons" or done == 2):
            raise Stop

    with pytest.raises(Stop):
        indexed(tmp_path / "part", progress=stop)
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == [".part.building"]
    before = len(read)
    assert before == (2 if phase == "reading neurons" else 3)
    with pytest.raises(BadArtifact, match="no concept index"):
        ConceptIndex.open(tiny("llama"), tmp_path / "part")
    with pytest.raises(BadArtifact, match="not a finished concept index"):
        ConceptIndex.open(tiny("llama"), tmp_path / ".part.building")
    part = indexed(tmp_path / "part")
    assert len(read) == 3  # no block is read twice
    assert dump(part.path) == dump(whole.path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part", "whole"]


KILLED = """
import os, signal, sys
from pathlib import Path
from concepts import indexed
def kill(phase, done, total, unit="texts"):
    if done == 2:
        os.kill(os.getpid(), signal.SIGKILL)
indexed(Path(sys.argv[1]), progress=kill)
"""


def test_a_killed_build_goes_on_and_ends_with_the_same_rows(tmp_path):
    tests = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "part")], env=environment, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / ".part.building").is_file()
    assert dump(indexed(tmp_path / "part").path) == dump(indexed(tmp_path / "whole").path)


def test_a_finished_file_is_opened_not_built_again(tmp_path):
    first = indexed(tmp_path / "index")
    stamp = first.path.stat().st_mtime_ns
    assert dump(indexed(tmp_path / "index").path) == dump(first.path)
    assert first.path.stat().st_mtime_ns == stamp
    with pytest.raises(BadSettings, match=r"built with other settings \(top\)"):
        indexed(tmp_path / "index", top=9)


def test_a_part_built_with_other_settings_is_begun_anew(tmp_path):
    def stop(*_: Any) -> None:
        raise Stop

    with pytest.raises(Stop):
        indexed(tmp_path / "index", top=9, progress=stop)
    index = indexed(tmp_path / "index", top=4)
    assert len(index.vector(1, 0).promotes) == 4
    assert dump(index.path) == dump(indexed(tmp_path / "other", top=4).path)


def test_an_index_of_other_weights_is_refused(tmp_path):
    index = indexed(tmp_path / "index")
    other = tiny("llama", seed=1)
    for attempt in (
        lambda: ConceptIndex.open(other, index.path),
        lambda: build_index(other, index.path, progress=False),
        lambda: search_index(other, "cat", path=index.path),
    ):
        with pytest.raises(WrongModel, match=r"index of other weights.*layerleap index tiny-llama"):
            attempt()
    assert ConceptIndex.open(tiny("llama"), index.path).n_vectors == 120


def test_files_that_are_no_index_are_refused(tmp_path):
    model = tiny("llama")
    (tmp_path / "text").write_text("not a database, but long enough to look at " * 100)
    with closing(sqlite3.connect(tmp_path / "other")) as connection:
        connection.execute("CREATE TABLE x (y)")
    (tmp_path / "empty").touch()
    for name in ("text", "other", "empty"):
        with pytest.raises(BadArtifact, match=r"not a concept index|not a finished"):
            ConceptIndex.open(model, tmp_path / name)
        with pytest.raises(BadArtifact, match=r"not a concept index|not a finished"):
            build_index(model, tmp_path / name, progress=False)
    with pytest.raises(CannotWrite, match="is a folder"):
        build_index(model, tmp_path, progress=False)


def test_a_damaged_part_is_begun_anew(tmp_path):
    (tmp_path / ".index.building").write_text("rubbish" * 1000)
    assert indexed(tmp_path / "index").n_vectors == 120


def test_two_builders_of_one_file_do_not_meet(tmp_path):
    def other(phase: str, done: int, total: int | None, unit: str = "texts") -> None:
        if phase == "reading neurons" and done == 1:
            with pytest.raises(CannotWrite, match="another process is building"):
                indexed(tmp_path / "index")

    assert indexed(tmp_path / "index", progress=other).n_vectors == 120


def test_the_cache_is_keyed_by_weights_and_settings(empty_cache, monkeypatch):
    monkeypatch.setattr(build, "reference_text", lambda _: (None, "no text here"))
    model, plain = tiny("llama"), IndexSettings()
    with pytest.raises(BadArtifact, match="no index of tiny-llama yet; run: layerleap index"):
        ConceptIndex.open(model)
    matches = ll.search(model, "cat", top=3, progress=False)
    assert len(matches) == 3
    path = default_path(model, plain)
    assert path.is_relative_to(empty_cache)
    assert ConceptIndex.open(model).path == path == ll.index(model, progress=False).path
    assert ConceptIndex.open(model).to_dict()["no_ranges"] == "no text here"
    assert default_path(tiny("llama", seed=1), plain) != path
    assert default_path(model, IndexSettings(top=9)) != path
    path.write_text("damaged" * 1000)  # in the cache it is simply built again
    assert ll.index(model, progress=False).n_vectors == 120


def test_a_default_text_that_cannot_be_fetched_only_leaves_the_ranges_out(tmp_path, monkeypatch):
    def offline(*_: Any, **__: Any) -> None:
        raise CannotFetch("no network")

    monkeypatch.setattr(build, "natural_ranges", offline)
    index = build_index(tiny("llama"), tmp_path / "index", clusters=0, progress=False)
    assert index.to_dict()["no_ranges"] == "no network"
    assert index.vector(1, 1).range is None
    with pytest.raises(CannotFetch, match="no network"):  # but one that was asked for does not
        build_index(tiny("llama"), tmp_path / "other", text="news", clusters=0, progress=False)


def test_without_scikit_learn_there_are_no_clusters_and_the_index_says_why(tmp_path, monkeypatch):
    def missing(*_: Any) -> None:
        raise CannotFetch("sklearn is not installed and clusters of neurons need it")

    monkeypatch.setattr(build, "library", missing)
    index = build_index(tiny("llama"), tmp_path / "index", n_texts=0, progress=False)
    for ask in (index.clusters, lambda: index.cluster(0)):
        with pytest.raises(CannotFetch, match="has no clusters: sklearn is not installed"):
            ask()
    assert index.vector(1, 0).cluster is None
    with pytest.raises(CannotFetch, match="not installed"):
        build_index(tiny("llama"), tmp_path / "other", n_texts=0, clusters=3, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top": 0}, "top is 0; expected 1 to 250"),
        ({"top": 251}, "top is 251"),
        ({"top": "many"}, "top"),
        ({"n_texts": -1}, "n_texts is -1"),
        ({"clusters": -2}, "clusters is -2"),
        ({"clusters": 121}, "only 120 vectors"),
        ({"text": ["the"]}, "no text with two tokens"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(given, message, tmp_path):
    with pytest.raises((BadSettings, BadText), match=message):
        build_index(tiny("llama"), tmp_path / "index", progress=False, **given)
