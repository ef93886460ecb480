"""Checkpoints read block by block: what is opened, what is kept, what cannot be read like this."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import build
from layerleap.errors import BadArtifact, BadSettings, ModelRefused, UnknownModel
from layerleap.lens.compare import model_pair
from layerleap.lens.compare.model_pair import Checkpoint, NoWindow, Window
from layerleap.models.weights import unembedding, vectors
from tiny_models import tokenizer

DEPTH = 5


def saved(folder: Path, name: str = "llama", seed: int = 0, **changes: object) -> str:
    shards = {"max_shard_size": changes.pop("shards")} if "shards" in changes else {}
    build(name, seed, **changes).save_pretrained(folder, **shards)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkpoints")
    saved(place / "base", num_hidden_layers=DEPTH)
    saved(place / "tuned", seed=1, num_hidden_layers=DEPTH, shards="20KB")
    return place


def test_a_window_shows_one_block_of_each_model(place: Path) -> None:
    assert len(list((place / "tuned").glob("*.safetensors"))) > 2
    window = Window.open(str(place / "base"), str(place / "tuned"))
    assert window.n_layers == DEPTH
    assert window.reader.n_layers == 2
    whole = [build("llama", seed, num_hidden_layers=DEPTH).model.layers for seed in (0, 1)]
    for block in (4, 1, 5):
        window.show(block)
        for slot, layers in enumerate(whole, 1):
            values = vectors(window.reader, slot, "ffn.value")
            assert torch.equal(values.T, layers[block - 1].mlp.down_proj.weight)
            expected = dict(layers[block - 1].named_parameters())
            for name, parameter in window.reader.block(slot).named_parameters():
                assert torch.equal(parameter, expected[name]), (block, name)


def test_the_window_reads_tokens_with_the_matrix_of_the_base(place: Path) -> None:
    window = Window.open(str(place / "base"), str(place / "tuned"))
    base = build("llama", 0, num_hidden_layers=DEPTH)
    assert torch.equal(unembedding(window.reader), base.lm_head.weight)
    names = {name for name, _, _ in window.outside()}
    assert names == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


def test_tensors_are_read_one_at_a_time_and_none_is_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = Window.open(str(place / "base"), str(place / "tuned"))
    alive: list[weakref.ref] = []
    names: list[str] = []
    own = Checkpoint.tensor

    def counted(self: Checkpoint, name: str) -> torch.Tensor:
        # The caller still holds the last one until this one replaces it.
        assert sum(ref() is not None for ref in alive) <= 1
        value = own(self, name)
        alive.append(weakref.ref(value))
        names.append(name)
        return value

    monkeypatch.setattr(Checkpoint, "tensor", counted)
    for block in range(1, DEPTH + 1):
        window.show(block)
    per_block = len(list(window.reader.block(1).parameters()))
    assert len(names) == 2 * DEPTH * per_block
    assert {name.split(".")[1] for name in names} == {"layers"}  # nothing outside the blocks


def test_pieces_of_a_large_tensor_add_up_to_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_pair, "PIECE_BYTES", 8 * 24 * 10)
    files = Checkpoint.open(str(place / "base"))
    pieces = list(files.pieces("lm_head.weight", 55))
    assert [len(piece) for piece in pieces] == [10, 10, 10, 10, 10, 5]
    assert torch.equal(torch.cat(pieces), files.tensor("lm_head.weight")[:55])


def test_two_types_meet_in_the_wider_one(place: Path, tmp_path: Path) -> None:
    build("llama", 1, num_hidden_layers=DEPTH).bfloat16().save_pretrained(tmp_path)
    window = Window.open(str(tmp_path), str(place / "base"))
    window.show(3)
    values = vectors(window.reader, 2, "ffn.up")
    assert values.dtype == torch.float32
    expected = build("llama", 0, num_hidden_layers=DEPTH).model.layers[2].mlp.up_proj.weight
    assert torch.equal(values, expected)


def test_a_checkpoint_without_its_head_has_other_names(place: Path, tmp_path: Path) -> None:
    model = build("llama", 3, num_hidden_layers=DEPTH).model
    model.save_pretrained(tmp_path)
    assert "layers.0.mlp.down_proj.weight" in load_file(tmp_path / "model.safetensors")
    window = Window.open(str(place / "base"), str(tmp_path))
    window.show(2)
    values = vectors(window.reader, 2, "ffn.value")
    assert torch.equal(values.T, model.layers[1].mlp.down_proj.weight)
    remarks = {name: remark for name, _, remark in window.outside()}
    assert remarks["lm_head.weight"].endswith("has no such tensor")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("t5", "is an encoder-decoder"), ("albert", "not a list"), ("mixtral", "has no tensor")],
)
def test_some_models_cannot_be_cut_to_two_blocks(tmp_path: Path, name: str, reason: str) -> None:
    source = saved(tmp_path, name)
    with pytest.raises(NoWindow, match=reason):
        Window.open(source, source)


def test_a_model_of_one_block_or_without_safetensors_has_no_window(tmp_path: Path) -> None:
    shallow = saved(tmp_path / "shallow", num_hidden_layers=1)
    with pytest.raises(NoWindow, match="has a single block"):
        Window.open(shallow, shallow)
    other = saved(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").unlink()
    with pytest.raises(NoWindow, match="has no safetensors files"):
        Window.open(other, other)


def test_models_of_different_depth_are_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match=r"has 5 blocks and .* has 3; a tuned model"):
        Window.open(str(place / "base"), saved(tmp_path))


def test_other_shapes_are_refused(place: Path, tmp_path: Path) -> None:
    wide = saved(tmp_path, num_hidden_layers=DEPTH, intermediate_size=48)
    with pytest.raises(BadSettings, match=r"has the shape \(48, 24\) in .*; expected \(40, 24\)"):
        Window.open(str(place / "base"), wide)


def test_quantised_weights_are_refused(place: Path, tmp_path: Path) -> None:
    quantised = Path(saved(tmp_path / "one", num_hidden_layers=DEPTH))
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match="are quantised, so its vectors cannot be compared"):
        Window.open(str(place / "base"), str(quantised))
    whole = Path(saved(tmp_path / "two", num_hidden_layers=DEPTH))
    tensors = load_file(whole / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    window = Window.open(str(place / "base"), str(whole))
    with pytest.raises(ModelRefused, match=f"{name} of .* is int8: quantised weights"):
        window.show(3)


def test_broken_and_missing_files_are_said(place: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="no file or folder"):
        Window.open(str(place / "base"), str(tmp_path / "nothing"))
    broken = Path(saved(tmp_path / "broken", num_hidden_layers=DEPTH))
    (broken / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(BadArtifact, match=r"model.safetensors cannot be read"):
        Window.open(str(place / "base"), str(broken))
