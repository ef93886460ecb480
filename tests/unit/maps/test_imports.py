"""Published maps are read for their numbers; nothing in them is run."""

import json
import os
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from families import build
from layerleap.errors import BadArtifact
from layerleap.maps.fit import fit
from layerleap.maps.imports import import_mat, import_tuned_lens
from layerleap.models.transformer import Transformer
from tiny_models import sentences, tiny

WIDTH = 24


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def dump(path, value, protocol=4):
    with path.open("wb") as stream:
        pickle.dump(value, stream, protocol=protocol)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["tensor", "array", "double"])
def test_matrices_of_the_papers_code_give_the_same_as_our_bank(llama, tmp_path, protocol, kind):
    bank = fit(llama, sentences(30), pairs="all")
    for (src, dst), shortcut in bank.maps.items():
        matrix = shortcut.weight.T.contiguous()  # the paper applies A from the left: h' = A h
        value = {"tensor": matrix, "array": matrix.numpy(), "double": matrix.double()}[kind]
        dump(tmp_path / f"{src}_{dst}.pickle", value, protocol)
    (tmp_path / "notes.txt").write_text("left alone")
    actual = import_mat(tmp_path, llama)
    assert actual.maps.keys() == bank.maps.keys()
    h = torch.randn(5, WIDTH)
    for pair, shortcut in bank.maps.items():
        assert torch.equal(actual[pair].weight, shortcut.weight)
        by_hand = torch.stack([shortcut.weight.T @ row for row in h])
        torch.testing.assert_close(actual[pair](h), by_hand, rtol=1e-4, atol=1e-4)
    actual.check_model(llama)
    assert actual.source == f"mat, {tmp_path}"


def test_a_transposed_view_and_an_array_in_column_order_are_read_right(llama, tmp_path):
    matrix = torch.randn(WIDTH, WIDTH)
    dump(tmp_path / "0_3.pickle", matrix.T)
    dump(tmp_path / "1_3.pickle", np.asfortranarray(matrix.numpy()))
    bank = import_mat(str(tmp_path), llama)
    assert torch.equal(bank[0, 3].weight, matrix)
    assert torch.equal(bank[1, 3].weight, matrix.T)


def test_names_of_numpy_1_are_understood(llama, tmp_path):
    matrix = np.random.default_rng(0).normal(size=(WIDTH, WIDTH))
    data = pickle.dumps(matrix, protocol=2)
    (tmp_path / "0_3.pickle").write_bytes(data.replace(b"numpy._core", b"numpy.core"))
    bank = import_mat(tmp_path, llama)
    np.testing.assert_allclose(bank[0, 3].weight, matrix.T.astype(np.float32))


def test_an_imported_bank_reads_like_any_other(llama, tmp_path):
    for src in range(3):
        dump(tmp_path / f"{src}_3.pickle", torch.eye(WIDTH))
    readings = import_mat(tmp_path, llama).lens(llama).read("the cat sat")
    assert torch.equal(readings.tracks["linear"].ids, readings.tracks["logit"].ids)


class Bomb:
    """Runs a command when a plain unpickler builds it."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch {self.witness}",)


class Writer:
    """Calls a function of the standard library when it is built."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return Path.touch, (self.witness,)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("bomb", [Bomb, Writer])
def test_a_malicious_pickle_is_refused_and_not_run(llama, tmp_path, protocol, wrapped, bomb):
    witness = tmp_path / "was-run"
    value = bomb(witness)
    dump(tmp_path / "0_3.pickle", [torch.eye(WIDTH), value] if wrapped else value, protocol)
    with pytest.raises(BadArtifact, match="which is not a tensor"):
        import_mat(tmp_path, llama)
    assert not witness.exists()


def test_the_bomb_of_these_tests_would_go_off(tmp_path):
    witness = tmp_path / "was-run"
    pickle.loads(pickle.dumps(Bomb(witness)))
    assert witness.exists()


def test_a_bomb_inside_a_tensors_storage_is_refused_and_not_run(llama, tmp_path):
    witness = tmp_path / "was-run"

    class Storage:
        def __reduce__(self):
            return torch.storage._load_from_bytes, (pickle.dumps(Bomb(witness)),)

    dump(tmp_path / "0_3.pickle", Storage())
    with pytest.raises(BadArtifact, match="cannot be read safely"):
        import_mat(tmp_path, llama)
    assert not witness.exists()


@pytest.mark.parametrize("name", ["builtins eval", "posix system", "numpy load", "torch load"])
def test_only_functions_that_build_tensors_are_looked_up(llama, tmp_path, name):
    module, function = name.split()
    (tmp_path / "0_3.pickle").write_bytes(f"c{module}\n{function}\n.".encode())
    with pytest.raises(BadArtifact, match=f"it refers to {module}.{function}"):
        import_mat(tmp_path, llama)


@pytest.mark.parametrize(
    "value",
    [
        "a string",
        None,
        {"weight": 1},
        OrderedDict(),
        [[1.0, 2.0]],
        3.5,
        np.array([object()], dtype=object),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_pickle_of_something_else_is_refused(llama, tmp_path, value):
    dump(tmp_path / "0_3.pickle", value)
    with pytest.raises(BadArtifact, match="0_3"):
        import_mat(tmp_path, llama)


@pytest.mark.parametrize("shape", [(WIDTH,), (WIDTH, WIDTH + 1), (1, WIDTH, WIDTH), (3, 3)])
def test_a_matrix_of_the_wrong_shape_is_refused(llama, tmp_path, shape):
    dump(tmp_path / "0_3.pickle", torch.zeros(shape))
    with pytest.raises(BadArtifact, match="expected 24 x 24"):
        import_mat(tmp_path, llama)


@pytest.mark.parametrize("name", ["0_4", "3_3", "2_1", "5_9"])
def test_layers_the_model_does_not_have_are_refused(llama, tmp_path, name):
    dump(tmp_path / f"{name}.pickle", torch.eye(WIDTH))
    with pytest.raises(BadArtifact, match="the model has layers 0 to 3"):
        import_mat(tmp_path, llama)


@pytest.mark.parametrize("cut", [0, 1, 20, 200, -1, -40])
def test_a_truncated_pickle_is_refused(llama, tmp_path, cut):
    data = pickle.dumps(torch.eye(WIDTH), protocol=4)
    (tmp_path / "0_3.pickle").write_bytes(data[:cut])
    with pytest.raises(BadArtifact, match="cannot be read safely"):
        import_mat(tmp_path, llama)


def test_garbage_never_raises_anything_else(llama, tmp_path):
    rng = np.random.default_rng(0)
    good = pickle.dumps(torch.eye(WIDTH), protocol=4)
    refused = 0
    for _ in range(150):
        data = bytearray(good)
        for place in rng.integers(0, 260, size=3):
            data[place] = rng.integers(0, 256)
        (tmp_path / "0_3.pickle").write_bytes(data)
        try:
            import_mat(tmp_path, llama)
        except BadArtifact:
            refused += 1
    assert refused > 100


def test_a_folder_without_matrices_is_refused(llama, tmp_path):
    (tmp_path / "x.pickle").write_bytes(b"")
    with pytest.raises(BadArtifact, match=r"no files like 0_24\.pickle"):
        import_mat(tmp_path, llama)


@pytest.mark.parametrize("make", [import_mat, import_tuned_lens])
def test_a_folder_that_does_not_exist_is_refused(llama, tmp_path, make):
    with pytest.raises(BadArtifact, match="nowhere"):
        make(tmp_path / "nowhere", llama)


def test_matrices_that_do_not_reach_the_last_layer_belong_to_another_model(llama, tmp_path):
    for src in range(2):
        dump(tmp_path / f"{src}_2.pickle", torch.eye(WIDTH))
    with pytest.raises(BadArtifact, match="reach layer 2, but the model's last layer is 3"):
        import_mat(tmp_path, llama)


def lens_of(model):
    """The configuration of a tuned lens made for `model`."""
    return {"num_hidden_layers": 3, "d_model": WIDTH, "base_model_name_or_path": model}


def tuned_lens(folder, *, layers=3, bias=True, config=None, **changes):
    """A tuned lens as its authors save one."""
    torch.manual_seed(0)
    translators = torch.nn.ModuleList(
        [torch.nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(layers)]
    )
    config = {"num_hidden_layers": layers, "d_model": WIDTH} if config is None else config
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({**translators.state_dict(), **changes}, folder / "params.pt")
    return translators


@pytest.mark.parametrize("bias", [False, True])
def test_a_tuned_lens_gives_h_plus_its_translation(llama, tmp_path, bias):
    translators = tuned_lens(tmp_path, bias=bias)
    assert "0.weight" in translators.state_dict()
    assert ("0.bias" in translators.state_dict()) == bias
    bank = import_tuned_lens(tmp_path, llama)
    assert sorted(bank.maps) == [(0, 3), (1, 3), (2, 3)]
    h = torch.randn(6, WIDTH)
    for layer, translator in enumerate(translators):
        with torch.no_grad():
            torch.testing.assert_close(bank[layer, 3](h), h + translator(h))
    bank.check_model(llama)
    assert bank.source == f"tuned-lens, {tmp_path}"


@pytest.mark.parametrize("base", ["tiny-llama", "somebody/tiny-llama", "somebody/Tiny-Llama"])
def test_a_tuned_lens_keeps_the_name_of_its_model(llama, tmp_path, base):
    tuned_lens(tmp_path, config=lens_of(base))
    bank = import_tuned_lens(tmp_path, llama)
    assert bank.data == {"base_model_name_or_path": base}
    assert f"- base_model_name_or_path: {base}" in bank.card()


@pytest.mark.parametrize("base", [None, "", 3])
def test_a_tuned_lens_need_not_name_its_model(llama, tmp_path, base):
    tuned_lens(tmp_path, config=lens_of(base))
    assert import_tuned_lens(tmp_path, llama).data == {}


def test_a_model_in_a_folder_or_without_a_name_has_none_to_compare(tmp_path):
    tuned_lens(tmp_path, config=lens_of("gpt2"))
    for name in (str(tmp_path), "LlamaForCausalLM"):
        model = Transformer.wrap(build("llama"), name=name)
        assert len(import_tuned_lens(tmp_path, model)) == 3


def test_half_precision_translators_are_widened(llama, tmp_path):
    weights = {f"{layer}.weight": torch.randn(WIDTH, WIDTH).half() for layer in range(3)}
    tuned_lens(tmp_path, bias=False, **weights)
    bank = import_tuned_lens(tmp_path, llama)
    assert torch.equal(bank[1, 3].weight, torch.eye(WIDTH) + weights["1.weight"].float().T)


def test_malicious_parameters_are_refused_and_not_run(llama, tmp_path):
    witness = tmp_path / "was-run"
    tuned_lens(tmp_path, bomb=Bomb(witness))
    with pytest.raises(BadArtifact, match="cannot be read safely") as caught:
        import_tuned_lens(tmp_path, llama)
    assert not witness.exists()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 2, "config": {"num_hidden_layers": 3}}, "no translator for layer 2"),
        ({"layers": 4}, "4 translators; the model has layers 0 to 3, so 3 are expected"),
        ({"layers": 2}, "2 translators; the model has layers 0 to 3, so 3 are expected"),
        ({"layers": 4, "config": {"num_hidden_layers": 3}}, "4 translators; the model has"),
        (
            {"config": lens_of("EleutherAI/pythia-70m")},
            "lens for EleutherAI/pythia-70m, but",
        ),
        ({"config": lens_of("gpt2")}, "lens for gpt2, but the model is tiny-llama"),
        ({"1.weight": torch.zeros(5, 5)}, "expected 24 x 24"),
        ({"1.bias": torch.zeros(5)}, "bias"),
        ({"1.weight": "text"}, "layer 1"),
        ({"config": []}, "config.json"),
        ({"config": {"num_hidden_layers": "many"}}, "config.json"),
    ],
)
def test_a_tuned_lens_that_does_not_fit_is_refused(llama, tmp_path, settings, message):
    tuned_lens(tmp_path, **settings)
    with pytest.raises(BadArtifact, match=message):
        import_tuned_lens(tmp_path, llama)


def test_parameters_that_are_not_a_dictionary_are_refused(llama, tmp_path):
    tuned_lens(tmp_path)
    torch.save(torch.zeros(3), tmp_path / "params.pt")
    with pytest.raises(BadArtifact, match=r"params\.pt"):
        import_tuned_lens(tmp_path, llama)


@pytest.mark.parametrize("name", ["config.json", "params.pt"])
def test_a_missing_file_is_named(llama, tmp_path, name):
    tuned_lens(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(BadArtifact, match=name):
        import_tuned_lens(tmp_path, llama)
