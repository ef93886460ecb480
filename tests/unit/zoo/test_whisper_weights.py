import struct

import numpy as np
import pytest
import torch

from families import build
from layerleap.zoo.whisper_weights import n_layers, read_ct2, whisper_state

CODES = {"float32": 0, "int8": 1, "int16": 2, "float16": 4}


def text(word):
    return struct.pack("<H", len(word) + 1) + word.encode() + b"\0"


def ct2(arrays, aliases=None, version=6):
    data = struct.pack("<I", version) + text("WhisperSpec") + struct.pack("<I", 3)
    data += struct.pack("<I", len(arrays))
    for name, array in arrays.items():
        data += text(name) + struct.pack("<B", array.ndim)
        data += struct.pack(f"<{array.ndim}I", *array.shape)
        data += struct.pack("<BI", CODES[str(array.dtype)], array.nbytes) + array.tobytes()
    if version >= 3:
        data += struct.pack("<I", len(aliases or {}))
        data += b"".join(text(a) + text(b) for a, b in (aliases or {}).items())
    return data


ARRAYS = {
    "decoder/weight": np.arange(6, dtype=np.float16).reshape(2, 3),
    "decoder/num_heads": np.array(6, dtype=np.int16),
}


@pytest.mark.parametrize("version", [2, 3, 6])
def test_arrays_are_read_as_they_were_written(tmp_path, version):
    aliases = {"decoder/projection": "decoder/weight"} if version >= 3 else {}
    (tmp_path / "model.bin").write_bytes(ct2(ARRAYS, aliases, version))
    arrays = read_ct2(tmp_path / "model.bin")
    assert sorted(arrays) == sorted([*ARRAYS, *aliases])
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert np.array_equal(arrays[name], array)
    for alias, name in aliases.items():
        assert arrays[alias] is arrays[name]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x06",
        ct2(ARRAYS)[:-12],
        ct2(ARRAYS)[:40],
        ct2(ARRAYS, version=1),
        b"\x06\0\0\0abcdef",
    ],
)
def test_other_or_truncated_files_are_refused(tmp_path, data):
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.bin is not a readable CTranslate2 file"):
        read_ct2(tmp_path / "model.bin")


def in_their_names(state, sides):
    """The reverse of our key map, written down independently: what CTranslate2 would store."""
    arrays = {}

    def put(name, *keys):
        arrays[name] = np.concatenate([state[key].numpy() for key in keys])

    def linear(name, *keys):
        put(f"{name}/weight", *(f"{key}.weight" for key in keys))
        # CTranslate2 knows no projection without a bias; that of keys is zeros.
        zeros = torch.zeros(len(state[f"{keys[0]}.weight"]))
        biases = [state.get(f"{key}.bias", zeros).numpy() for key in keys]
        arrays[f"{name}/bias"] = np.concatenate(biases)

    def norm(name, key):
        put(f"{name}/gamma", f"{key}.weight")
        put(f"{name}/beta", f"{key}.bias")

    for conv in ("conv1", "conv2"):
        linear(f"encoder/{conv}", f"model.encoder.{conv}")
    put("decoder/embeddings/weight", "model.decoder.embed_tokens.weight")
    for side, layers in sides.items():
        put(f"{side}/position_encodings/encodings", f"model.{side}.embed_positions.weight")
        norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for number in range(layers):
            to, of = f"{side}/layer_{number}", f"model.{side}.layers.{number}"
            norm(f"{to}/self_attention/layer_norm", f"{of}.self_attn_layer_norm")
            linear(f"{to}/self_attention/linear_0", *(f"{of}.self_attn.{p}_proj" for p in "qkv"))
            linear(f"{to}/self_attention/linear_1", f"{of}.self_attn.out_proj")
            if side == "decoder":
                norm(f"{to}/attention/layer_norm", f"{of}.encoder_attn_layer_norm")
                linear(f"{to}/attention/linear_0", f"{of}.encoder_attn.q_proj")
                linear(f"{to}/attention/linear_1", *(f"{of}.encoder_attn.{p}_proj" for p in "kv"))
                linear(f"{to}/attention/linear_2", f"{of}.encoder_attn.out_proj")
            norm(f"{to}/ffn/layer_norm", f"{of}.final_layer_norm")
            linear(f"{to}/ffn/linear_0", f"{of}.fc1")
            linear(f"{to}/ffn/linear_1", f"{of}.fc2")
    return arrays


@pytest.fixture
def whisper():
    model = build("whisper")
    return model, in_their_names(model.state_dict(), {"encoder": 2, "decoder": 3})


def test_the_key_map_of_whisper_puts_every_weight_in_its_place(whisper):
    model, arrays = whisper
    assert (n_layers(arrays, "encoder"), n_layers(arrays, "decoder")) == (2, 3)
    other = build("whisper", seed=1)
    other.load_state_dict(whisper_state(arrays))  # strict: nothing missing, nothing left over
    for name, weight in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight), name


def test_a_bias_for_keys_is_refused(whisper):
    _, arrays = whisper
    arrays["decoder/layer_1/attention/linear_1/bias"][3] = 0.5
    with pytest.raises(ValueError, match="bias for keys"):
        whisper_state(arrays)
