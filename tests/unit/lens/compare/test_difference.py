"""`ll.diff`: what moved, by how much, and towards which tokens."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import layerleap as ll
from families import build
from layerleap.errors import BadSettings
from layerleap.lens.compare.diff import diff
from layerleap.lens.compare.difference import Difference
from layerleap.lens.compare.lists import ranges
from layerleap.models.load import load
from layerleap.models.transformer import Transformer
from layerleap.models.weights import unembedding, vectors
from tiny_models import tokenizer

Change = Callable[[nn.Module], None]


@cache
def wrapped(name: str = "llama", change: Change | None = None, **changes: object) -> Transformer:
    model = build(name, **changes)
    if change is not None:
        with torch.no_grad():
            change(model)
    return Transformer.wrap(model, tokenizer(), name="tuned" if change else "base")


def nudge(model: nn.Module) -> None:
    """Move neuron 7 and a head of block 2, and one neuron of block 3 by less."""
    torch.manual_seed(9)
    second, third = model.model.layers[1], model.model.layers[2]
    second.mlp.down_proj.weight[:, 7] += 0.5 * torch.randn(24)
    second.mlp.up_proj.weight[3] *= 0.5
    second.self_attn.o_proj.weight[:, 6:12] += 0.3 * torch.randn(24, 6)  # head 1
    second.self_attn.v_proj.weight[6:12] += 0.3 * torch.randn(6, 24)  # heads 2 and 3 share it
    third.mlp.down_proj.weight[:, 11] += 0.01 * torch.randn(24)


@pytest.fixture(scope="module")
def found() -> Difference:
    return diff(wrapped(), wrapped(change=nudge), top=4, tokens=6, progress=False)


def test_blocks_that_did_not_move_are_said_to_be_identical(found: Difference) -> None:
    assert [one.is_identical for one in found.blocks] == [True, False, False]
    assert found.unmoved == (1,)
    assert found.blocks[0].relative == 0
    assert found.blocks[1].relative > found.blocks[2].relative > 0
    assert "did not move (bit-identical): block 1" in found.notes
    assert all(one.is_identical for one in found.outside)


def test_how_far_a_matrix_moved_is_relative_to_its_size(found: Difference) -> None:
    for block in (1, 2, 3):
        for kind, relative in found.blocks[block - 1].kinds.items():
            base, tuned = (
                vectors(m, block, kind).double() for m in (wrapped(), wrapped(change=nudge))
            )
            expected = float((tuned - base).norm() / base.norm())
            assert relative == pytest.approx(expected, rel=1e-5, abs=1e-9)
    base, tuned = (
        torch.cat([p.detach().double().flatten() for p in m.block(2).parameters()])
        for m in (wrapped(), wrapped(change=nudge))
    )
    expected = float((tuned - base).norm() / base.norm())
    assert found.blocks[1].relative == pytest.approx(expected)


def test_neurons_that_moved_most_come_first_and_no_other_is_listed(found: Difference) -> None:
    values = [one for one in found.neurons if one.kind == "ffn.value"]
    assert [one.name for one in values] == ["L2.N7", "L3.N11"]
    ups = [one for one in found.neurons if one.kind == "ffn.up"]
    assert [one.name for one in ups] == ["L2.N3"]
    assert ups[0].relative == pytest.approx(0.5)
    assert ups[0].cosine == pytest.approx(-1.0)  # it shrank
    assert not [one for one in found.neurons if one.kind == "ffn.gate"]


def test_a_displacement_is_read_at_both_ends(found: Difference) -> None:
    base, tuned = wrapped(), wrapped(change=nudge)
    shift = (vectors(tuned, 2, "ffn.value") - vectors(base, 2, "ffn.value"))[7]
    scores = unembedding(base) @ (shift / shift.norm())
    neuron = next(one for one in found.neurons if one.name == "L2.N7")
    assert neuron.displacement == pytest.approx(float(shift.norm()), rel=1e-5)
    assert [s.token.id for s in neuron.promotes] == scores.topk(6).indices.tolist()
    assert [s.token.id for s in neuron.suppresses] == (-scores).topk(6).indices.tolist()
    assert neuron.promotes[0].score == pytest.approx(float(scores.max()), rel=1e-3)


def test_heads_are_named_and_read_along_their_main_direction(found: Difference) -> None:
    assert [(one.name, one.kind) for one in found.heads] == [
        ("L2.KV1", "attn.v"),
        ("L2.H1", "attn.o"),
    ]
    base, tuned = wrapped(), wrapped(change=nudge)
    shift = (vectors(tuned, 2, "attn.o") - vectors(base, 2, "attn.o"))[6:12].double()
    _, sizes, directions = torch.linalg.svd(shift, full_matrices=False)
    head = found.heads[1]
    assert head.share == pytest.approx(float(sizes[0] ** 2 / sizes.square().sum()), rel=1e-5)
    scores = unembedding(base).double() @ directions[0]
    scores = scores if scores.max() > -scores.min() else -scores
    assert [s.token.id for s in head.promotes] == scores.topk(6).indices.tolist()
    assert [s.token.id for s in head.suppresses] == (-scores).topk(6).indices.tolist()
    own = vectors(base, 2, "attn.o")[6:12].double()
    assert head.relative == pytest.approx(float(shift.norm() / own.norm()), rel=1e-5)


def test_the_same_model_twice_has_not_moved() -> None:
    found = diff(wrapped(), wrapped(), progress=False)
    assert found.unmoved == (1, 2, 3)
    assert "no block moved: all are bit-identical" in found.notes
    assert not found.heads
    assert not found.neurons
    assert found.short() == "Difference(base -> base: 0 of 3 blocks moved)"


def test_a_norm_that_moved_is_a_change_of_its_block_though_no_vector_moved() -> None:
    def shift(model: nn.Module) -> None:
        model.model.layers[0].input_layernorm.weight[3] += 1.0
        model.model.norm.weight[2] += 1.0

    found = diff(wrapped(), wrapped(change=shift), progress=False)
    assert found.unmoved == (2, 3)
    assert set(found.blocks[0].kinds.values()) == {0.0}
    outside = {one.name: one for one in found.outside}
    assert not outside["model.norm.weight"].is_identical
    assert outside["model.norm.weight"].relative > 0


FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "phi3", "bert")


@pytest.mark.parametrize("name", FAMILIES)
def test_files_read_block_by_block_say_the_same_as_models_in_memory(
    name: str, tmp_path: Path
) -> None:
    models = [build(name, seed) for seed in (0, 1)]
    folders = [tmp_path / "base", tmp_path / "tuned"]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    lazy = diff(*folders, top=3, progress=False)
    wrapped_models = [
        Transformer.wrap(model, tokenizer(), name=str(folder))
        for model, folder in zip(models, folders, strict=True)
    ]
    whole = diff(*wrapped_models, top=3, progress=False)
    assert lazy.how == "read from safetensors files, one block of each model at a time"
    ours, theirs = lazy.to_dict(), whole.to_dict()
    assert [each["notes"].pop(0) for each in (ours, theirs)] == [
        each.pop("how") for each in (ours, theirs)
    ]
    assert ours == theirs
    assert lazy.heads
    assert lazy.neurons


def test_models_that_cannot_be_read_block_by_block_are_loaded_and_that_is_said(
    tmp_path: Path,
) -> None:
    for seed in (0, 1):
        build("t5", seed).save_pretrained(tmp_path / str(seed))
    found = diff(tmp_path / "0", tmp_path / "1", top=1, progress=False)
    assert found.how.startswith("both models in memory, because")
    assert "is an encoder-decoder" in found.how
    assert len(found.blocks) == 3


def test_experts_are_refused_per_block_with_the_reason() -> None:
    one, other = (Transformer.wrap(build("mixtral", seed)) for seed in (0, 1))
    found = diff(one, other, top=1, progress=False)
    for block in found.blocks:
        assert block.relative > 0
        assert "attn.v" in block.kinds
        assert "experts" in block.missing["ffn.value"]
    assert not found.neurons


def test_new_tokens_are_compared_by_the_rows_that_both_have(tmp_path: Path) -> None:
    larger = wrapped(vocab_size=64)
    found = diff(wrapped(), larger, kinds=["ffn.value"], top=1, progress=False)
    table = next(one for one in found.outside if one.name == "model.embed_tokens.weight")
    assert table.remark == "only the 61 rows that both models have"
    assert not table.is_identical
    for name, model in (("base", wrapped()), ("tuned", larger)):
        model.model.save_pretrained(tmp_path / name)
    lazy = diff(tmp_path / "base", tmp_path / "tuned", kinds=["ffn.value"], top=1, progress=False)
    assert lazy.to_dict()["outside"] == found.to_dict()["outside"]


def test_a_classifier_made_of_a_language_model_can_be_its_tuned_copy(tmp_path: Path) -> None:
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    tuned = build("llama_text", 1)
    tuned.model.load_state_dict(base.model.state_dict())
    with torch.no_grad():
        tuned.model.layers[2].mlp.down_proj.weight[:, 5] += 0.1
    tuned.save_pretrained(tmp_path / "tuned")
    found = diff(tmp_path / "base", tmp_path / "tuned", progress=False)
    assert found.unmoved == (1, 2)
    assert [one.name for one in found.neurons] == ["L3.N5"]
    remarks = {one.name: one.remark for one in found.outside}
    assert "has no such tensor" in remarks["lm_head.weight"]
    assert "tuned has this tensor" in remarks["score.weight"]  # the head of classes
    loaded = [load(str(tmp_path / name)) for name in ("base", "tuned")]
    in_memory = {one.name: one.remark for one in diff(*loaded, progress=False).outside}
    assert in_memory.keys() == remarks.keys()
    assert "only" in in_memory["score.weight"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: diff(wrapped(), wrapped(num_hidden_layers=2)), "has 3 blocks of width 24 and"),
        (lambda: diff(wrapped(), wrapped(intermediate_size=48)), "has different shapes in"),
        (lambda: diff(wrapped(), wrapped(), kinds=["ffn"]), "kind is 'ffn'; expected one of"),
        (lambda: diff(wrapped(), wrapped(), top=-1), "top=-1, tokens=10; expected at least"),
        (lambda: diff(wrapped(), 3), "tuned is 3; expected a model from ll.load or a string or"),
    ],
)
def test_mistakes_are_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(BadSettings, match=message):
        call()


def test_the_result_becomes_json_tables_and_one_line(found: Difference) -> None:
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["neurons"][0]["name"] == "L2.N3"
    assert told["unmoved"] == [1]
    assert len(found.to_pandas()) == 3
    assert list(found.to_pandas("heads")["name"]) == ["L2.KV1", "L2.H1"]
    assert isinstance(found.to_pandas("neurons")["promotes"][0], str)
    with pytest.raises(BadSettings, match="table is 'layer'"):
        found.to_pandas("layer")
    assert repr(found).startswith("Difference(base -> tuned: 2 of 3 blocks moved, most block 2 (")


def test_only_the_kinds_that_were_asked_for_are_compared() -> None:
    found = ll.diff(wrapped(), wrapped(change=nudge), kinds=["ffn.value", "ffn.key"], top=1)
    assert found.kinds == ("ffn.value",)
    assert "ffn.key" in found.blocks[0].missing
    assert [one.name for one in found.neurons] == ["L2.N7"]


def test_the_pseudo_inverse_finds_the_tokens_that_a_displacement_was_made_of() -> None:
    def plant(model: nn.Module) -> None:
        rows = model.lm_head.weight
        model.model.layers[0].mlp.down_proj.weight[:, 5] += rows[17] - rows[40]

    found = diff(wrapped(), wrapped(change=plant), top=1, inverse="pseudo", progress=False)
    (neuron,) = found.neurons
    base, tuned = wrapped(), wrapped(change=plant)
    shift = (vectors(tuned, 1, "ffn.value") - vectors(base, 1, "ffn.value"))[5].double()
    matrix = unembedding(base).double()
    scores = matrix @ torch.linalg.solve(matrix.T @ matrix, shift)
    assert [s.token.id for s in neuron.promotes] == scores.topk(10).indices.tolist()
    assert (neuron.promotes[0].token.id, neuron.suppresses[0].token.id) == (17, 40)
    assert "pseudo-inverse" in " ".join(found.notes)


def test_ranges_of_blocks_are_short() -> None:
    assert ranges([1, 2, 3, 5, 8, 9]) == "1-3, 5, 8-9"
    assert ranges([]) == ""


def test_a_wrapped_model_can_be_compared_with_a_folder(tmp_path: Path) -> None:
    tuned = wrapped(change=nudge)
    tuned.model.save_pretrained(tmp_path)
    found = diff(wrapped(), tmp_path, kinds=["ffn.value"], top=1, progress=False)
    assert found.how == "both models in memory"
    assert found.tuned == str(tmp_path)
    assert [one.name for one in found.neurons] == ["L2.N7"]
