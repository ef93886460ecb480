"""Loading a model and wrapping it.

In: a bundled name, a hub name, a folder, a GGUF file, or a model that is already loaded.
Out: a `Transformer` that passed its self-check, with its tokenizer or processor if it has one.
"""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerleap.errors import BadSettings, ModelRefused, UnknownModel, did_you_mean, first_line
from layerleap.quiet import quiet_transformers
from layerleap.zoo.catalog import MODEL_NAMES
from layerleap.zoo.download import fetch

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from layerleap.models.transformer import Transformer


def load(
    source: Any,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    blocks: str | None = None,
    tail: Sequence[str] | None = None,
    check: bool = True,
    laws: Literal["strict", "loose"] = "strict",
    **options: Any,
) -> "Transformer":
    """The wrapped model, loaded and verified; `options` go to `from_pretrained` unchanged.

        model = ll.load("smollm2")  # bundled, a hub name, a folder or a GGUF file
        model = ll.load(my_model, tokenizer=my_tokenizer)  # loaded by you, used as it is

    Args:
        source: a bundled or hub name, a folder, a GGUF file, or a `PreTrainedModel`.
        tokenizer: for a model that is already loaded, or to replace its own.
        processor: the same for a model that reads images or sound.
        blocks: path of the list of blocks, if discovery fails.
        tail: paths of the modules after the last block, if discovery fails.
        check: False skips the self-check.
        laws: "loose" loads a model whose rows depend on their neighbours in a batch, such as one
            with activations quantised per batch; how much is written on every result.
        options: `dtype`, `device_map`, `revision`, `trust_remote_code`, `quantization_config` ...
    """
    from torch import nn

    from layerleap.models.transformer import Transformer, not_a_model

    if isinstance(tokenizer, str | Path):
        raise BadSettings(
            f"tokenizer is {str(tokenizer)!r}; expected a tokenizer: "
            "AutoTokenizer.from_pretrained(name) loads one"
        )
    how: dict[str, Any] = {"blocks": blocks, "tail": tail, "check": check, "laws": laws}
    if isinstance(source, nn.Module):
        if options:
            raise BadSettings(
                f"{', '.join(options)}: a model that is already loaded is never moved or cast; "
                "pass these options to from_pretrained"
            )
        return Transformer.wrap(source, tokenizer, processor=processor, **how)
    if not isinstance(source, str | Path) or not str(source):
        raise UnknownModel(not_a_model(source))
    folder, name, extra = locate(str(source))
    options = {**extra, **options}
    model = _load_model(folder, name, options)
    main_input, reason = model.main_input_name, ""
    if processor is None and main_input != "input_ids" and main_input in READERS:
        processor, _ = _load_reader(folder, main_input, options)
    if tokenizer is None and main_input != "pixel_values":
        tokenizer = getattr(processor, "tokenizer", None)
        if tokenizer is None:
            tokenizer, reason = _load_reader(folder, "input_ids", options)
    how |= {"processor": processor, "name": name, "revision": options.get("revision")}
    wrapped = Transformer.wrap(model, tokenizer, **how)
    wrapped.no_tokenizer = reason
    return wrapped


def load_bare(source: str, **options: Any) -> "PreTrainedModel":
    """The model itself from a name, folder or GGUF file, neither wrapped nor checked."""
    folder, name, extra = locate(source)
    chosen = {key: value for key, value in options.items() if value is not None}
    return _load_model(folder, name, {**extra, **chosen})


def locate(source: str) -> tuple[str, str, dict[str, Any]]:
    """The first argument of `from_pretrained`, the model's name, and further options."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UnknownModel(
                f"{source} is a folder without config.json; expected one from save_pretrained"
            )
        return str(path), source, {}
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnknownModel(
                f"{source} is a file but not .gguf; expected a folder or a GGUF file"
            )
        return str(path.parent), path.stem, {"gguf_file": path.name}
    if source in MODEL_NAMES:
        return str(fetch(source)), source, {}
    if path.suffix == ".gguf" or source.startswith((".", "/", "~")) or source.count("/") > 1:
        hint = did_you_mean(path.name, MODEL_NAMES)
        raise UnknownModel(f"there is no file or folder {source}; check the spelling{hint}")
    return source, source, {}


def ask_hub(name: str, options: dict[str, Any]) -> str | None:
    """Fail at once and with one line if the hub has no such model; its config.json, if cached.

    Without a network, transformers would retry for half a minute.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    where = {key: options[key] for key in ("revision", "cache_dir") if options.get(key)}
    try:
        if isinstance(cached := try_to_load_from_cache(name, "config.json", **where), str):
            return cached
        api = HfApi(token=options.get("token"))
        api.model_info(name, revision=options.get("revision"), timeout=20)
        return None
    except Exception as error:  # no network, no such model, no access, or an invalid name
        raise UnknownModel(_why_not(name, name, error)) from error


def _load_model(folder: str, name: str, options: dict[str, Any]) -> "PreTrainedModel":
    """The model with the head it was saved with; a randomly initialised head is refused."""
    from safetensors import SafetensorError
    from transformers import AutoConfig

    if not Path(folder).is_dir():
        ask_hub(name, options)
    with warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")
        try:
            config = AutoConfig.from_pretrained(folder, **_config_options(options))
            model, info = _model_class(config).from_pretrained(
                folder, output_loading_info=True, **options
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            raise UnknownModel(_why_not(name, folder, error)) from error
        except (TypeError, AssertionError) as error:  # an option or a device that does not exist
            raise BadSettings(
                f"{name} cannot be loaded with {', '.join(options)}: {first_line(error)}"
            ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelRefused(
            f"{name} lacks {len(missing)} weights that {type(model).__name__} needs, such as "
            f"{missing[0]}; they would be random: load a checkpoint that was saved with its head"
        )
    return model.eval()


CONFIG_OPTIONS = (
    *("revision", "token", "trust_remote_code", "cache_dir"),
    *("local_files_only", "gguf_file", "subfolder"),
)


def _config_options(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key in CONFIG_OPTIONS}


def _why_not(name: str, folder: str, error: Exception) -> str:
    if Path(folder).is_dir():
        return f"cannot load a model from {folder}: {first_line(error)}"
    bundled = ", ".join(MODEL_NAMES)
    return (
        f"no model {name!r}: it is not bundled ({bundled}), not a folder, and could not be loaded "
        f"from the hub ({first_line(error)[:160]}); check the spelling and the network"
        f"{did_you_mean(name, MODEL_NAMES)}"
    )


def _model_class(config: Any) -> Any:
    """The class named in the configuration, or an auto class that supports the configuration."""
    import transformers

    for name in config.architectures or ():
        model_class = getattr(transformers, name, None)
        if model_class is not None and not name.endswith("Model"):
            return model_class
    remote = getattr(config, "auto_map", None) or {}
    for name in AUTO_CLASSES:
        auto = getattr(transformers, name, None)
        if auto is not None and (type(config) in auto._model_mapping or name in remote):
            return auto
    raise ValueError(f"transformers has no class with logits for {type(config).__name__}")


# Masked before causal: encoders support both, decoders only the second.
AUTO_CLASSES = (
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageClassification",
)


# What turns files into inputs, by the model's main input; a model can be read by tensors without.
READERS = {
    "input_ids": "AutoTokenizer",
    "pixel_values": "AutoImageProcessor",
    "input_features": "AutoProcessor",
}


def _load_reader(folder: str, main_input: str, options: dict[str, Any]) -> tuple[Any, str]:
    """The tokenizer or processor saved with the model, or None and the reason."""
    import transformers

    with quiet_transformers():
        try:
            auto = getattr(transformers, READERS[main_input])
            reader = auto.from_pretrained(folder, **_config_options(options))
        except Exception as error:  # no file, a missing library, an unknown class ...
            noun = "tokenizer" if main_input == "input_ids" else "processor"
            logger.info(f"the {noun} of {folder} cannot be loaded: {first_line(error)}")
            return None, f"{type(error).__name__}: {first_line(error)}"
    # Many tokenizers can be built without files and then have only their special tokens.
    if main_input == "input_ids":
        words = set(reader.get_vocab().values()) - set(reader.all_special_ids)
        if len(words) <= 1:
            return None, f"{folder} has no vocabulary"
    return reader, ""
