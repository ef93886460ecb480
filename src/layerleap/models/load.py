"""From a name to a trusted model.

In: a bundled name, a hub name, a folder, a GGUF file, or a model that is already loaded.
Out: a `Transformer` that passed its self-check, with its tokenizer or processor if there is one.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerleap.errors import BadSettings, ModelRefused, UnknownModel
from layerleap.quiet import quiet_transformers
from layerleap.zoo.catalog import MODEL_NAMES
from layerleap.zoo.download import fetch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from layerleap.models.transformer import Transformer

Tell = Callable[[str], None]


def load(
    source: Any,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    blocks: str | None = None,
    tail: Sequence[str] | None = None,
    check: bool = True,
    tell: Tell | None = None,
    **options: Any,
) -> "Transformer":
    """Load and wrap a model; `options` go to `from_pretrained` untouched.

    Args:
        source: name, folder, GGUF file or `PreTrainedModel`.
        tokenizer: for a model that is already loaded, or to replace the one found.
        processor: the same, of a model that reads images or sound.
        blocks: path of the list of blocks, when discovery fails.
        tail: paths of the modules after the last block, when discovery fails.
        check: False skips the laws; for `layerleap check`, which wants to show them.
        tell: called with one line before anything slow.
        options: `dtype`, `device_map`, `revision`, `trust_remote_code`, `quantization_config` ...
    """
    from transformers import PreTrainedModel

    from layerleap.models.transformer import Transformer

    names: dict[str, Any] = {"blocks": blocks, "tail": tail, "check": check}
    if isinstance(source, PreTrainedModel):
        if options:
            raise BadSettings(
                f"{', '.join(options)}: a model that is already loaded is never moved or cast; "
                "give these to from_pretrained"
            )
        return Transformer.wrap(source, tokenizer, processor=processor, **names)
    folder, name, more = _locate(str(source), tell)
    options = {**more, **options}
    model = _load_model(folder, name, options)
    if processor is None:
        processor = _load_processor(folder, model.main_input_name, options, tell)
    if tokenizer is None and model.main_input_name != "pixel_values":
        tokenizer = getattr(processor, "tokenizer", None) or _load_tokenizer(folder, options, tell)
    revision = options.get("revision")
    return Transformer.wrap(
        model, tokenizer, processor=processor, name=name, revision=revision, **names
    )


def load_bare(source: str, *, tell: Tell | None = None, **options: Any) -> "PreTrainedModel":
    """Just the model of a name, folder or GGUF file, unchecked; for `layerleap check`."""
    folder, name, more = _locate(source, tell)
    chosen = {key: value for key, value in options.items() if value is not None}
    return _load_model(folder, name, {**more, **chosen})


def _locate(source: str, tell: Tell | None) -> tuple[str, str, dict[str, Any]]:
    """What to hand to `from_pretrained`, what to call it, and what else it needs."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UnknownModel(
                f"{source} is a folder without config.json; what save_pretrained writes was wanted"
            )
        return str(path), source, {}
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnknownModel(
                f"{source} is a file but not .gguf; a folder or a GGUF file was wanted"
            )
        return str(path.parent), path.stem, {"gguf_file": path.name}
    if source in MODEL_NAMES:
        return str(fetch(source, tell=tell)), source, {}
    if path.suffix == ".gguf" or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UnknownModel(f"no file or folder {source}; check the spelling")
    return source, source, {}


def _ask_hub(name: str, options: dict[str, Any]) -> None:
    """Fail at once and in one line where transformers would try again for half a minute."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    where = {key: options[key] for key in ("revision", "cache_dir") if options.get(key)}
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json", **where), str):
            api = HfApi(token=options.get("token"))
            api.model_info(name, revision=options.get("revision"), timeout=20)
    except Exception as error:  # no network, no such model, no right to it, no valid name
        raise UnknownModel(_why_not(name, name, error)) from error


def _load_model(folder: str, name: str, options: dict[str, Any]) -> "PreTrainedModel":
    """The model with the head it was saved with; a head made up at random is refused."""
    from safetensors import SafetensorError
    from transformers import AutoConfig

    if not Path(folder).is_dir():
        _ask_hub(name, options)
    with warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")
        try:
            passed = {k: v for k, v in options.items() if k in CONFIG_OPTIONS}
            config = AutoConfig.from_pretrained(folder, **passed)
            model, info = _model_class(config).from_pretrained(
                folder, output_loading_info=True, **options
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            raise UnknownModel(_why_not(name, folder, error)) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelRefused(
            f"{name} lacks {len(missing)} weights that {type(model).__name__} needs, such as "
            f"{missing[0]}; they would be random, so load a checkpoint saved with its head"
        )
    return model.eval()


CONFIG_OPTIONS = (
    "revision", "token", "trust_remote_code", "cache_dir", "local_files_only", "gguf_file",
    "subfolder",
)  # fmt: skip


def _why_not(name: str, folder: str, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if Path(folder).is_dir():
        return f"cannot load a model from {folder}: {first}"
    bundled = ", ".join(MODEL_NAMES)
    return (
        f"no model {name!r}: neither bundled ({bundled}), nor a folder, nor to be had from the hub "
        f"({first[:160]}); check the spelling and the network"
    )


def _model_class(config: Any) -> Any:
    """The class named in the configuration, or the auto class that knows this configuration."""
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None and not name.endswith("Model"):
            return found
    for name in AUTO_CLASSES:
        auto = getattr(transformers, name, None)
        if auto is not None and (
            type(config) in auto._model_mapping or name in (getattr(config, "auto_map", None) or {})
        ):
            return auto
    raise ValueError(f"no class with logits is known for {type(config).__name__}")


# Masked before causal: encoders are in both lists, decoders only in the second.
AUTO_CLASSES = (
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageClassification",
)


def _load_tokenizer(folder: str, options: dict[str, Any], tell: Tell | None) -> Any:
    """The tokenizer beside the model, or None: a bare model can still be read by token ids."""
    from transformers import AutoTokenizer

    passed = {k: v for k, v in options.items() if k in CONFIG_OPTIONS}
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **passed)
        except Exception as error:  # whatever goes wrong, the answer is the same: there is none
            if tell:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                tell(f"the tokenizer of {folder} cannot be loaded: {reason}")
            return None
    # Many classes are built without any file, and then know nothing but their special tokens.
    words = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
    return tokenizer if len(words) > 1 else None


PROCESSORS = {"pixel_values": "AutoImageProcessor", "input_features": "AutoProcessor"}


def _load_processor(
    folder: str, main_input: str, options: dict[str, Any], tell: Tell | None
) -> Any:
    """What turns images or sound into inputs, or None: a model is then read by tensors."""
    import transformers

    if main_input not in PROCESSORS:
        return None
    passed = {k: v for k, v in options.items() if k in CONFIG_OPTIONS}
    with quiet_transformers():
        try:
            return getattr(transformers, PROCESSORS[main_input]).from_pretrained(folder, **passed)
        except Exception as error:  # no file, no PIL, no such class: there is none
            if tell:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                tell(f"the processor of {folder} cannot be loaded: {reason}")
            return None
