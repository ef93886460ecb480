"""What a model's configuration says about it, before the model is loaded.

In: a name, folder or GGUF file. Out: `ModelFacts`: how many blocks, heads and neurons, and what the
model reads; None where the configuration does not tell. No torch, no library of models, and nothing
is fetched: the file config.json is read as it is, by the names that its fields have in the hub.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from layerleap.errors import BadSettings
from layerleap.files import read_json
from layerleap.zoo.catalog import CATALOG, MODEL_NAMES

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")  # what is read of an encoder-decoder
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
NEURONS = ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim")
DECODER_NEURONS = ("decoder_ffn_dim", "d_ff")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
READS = ("ffn.key", "ffn.gate", "ffn.up", "attn.q", "attn.k", "attn.v")  # kinds of vectors that
KINDS = (*READS[:3], "ffn.value", *READS[3:], "attn.o")  # read the stream, and all kinds
Reads = Literal["text", "pairs", "images", "sound"]


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model without its weights; None where that is not known."""

    name: str
    n_layers: int | None = None
    d_model: int | None = None
    n_neurons: int | None = None
    n_heads: int | None = None
    reads: Reads = "text"

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> "ModelFacts":
        """The facts in the content of a config.json."""
        if not isinstance(inner := config.get("text_config"), Mapping):
            inner = config
        is_pair = bool(inner.get("is_encoder_decoder"))
        # Experts have other sizes, and a ratio makes a size that is written beside it void.
        is_moot = "mlp_ratio" in inner or any("expert" in key for key in inner)
        return cls(
            name,
            _number(inner, DECODER_LAYERS if is_pair else LAYERS),
            _number(inner, WIDTHS),
            None if is_moot else _number(inner, DECODER_NEURONS if is_pair else NEURONS),
            None if is_pair else _number(inner, HEADS),
            _reads(config, is_pair),
        )

    def check_layer(self, layer: int) -> None:
        """Refuse a layer that the model does not have, if that is known."""
        check_number("layer", layer, 0, self.n_layers)

    def check_block(self, block: int) -> None:
        """Refuse a block that the model does not have, if that is known."""
        check_number("block", block, 1, self.n_layers)

    def check_part(self, block: int, *, neuron: int | None = None, head: int | None = None) -> None:
        """Refuse a neuron or head that the model does not have, if that is known."""
        self.check_block(block)
        parts = (("neuron", neuron, self.n_neurons), ("head", head, self.n_heads))
        for noun, number, count in parts:
            if number is not None:
                last = None if count is None else count - 1
                check_number(noun, number, 0, last, f"block {block}")


def check_number(
    noun: str, number: Any, low: int, high: int | None, where: str = "this model"
) -> None:
    """Refuse a layer, block, neuron or head that does not exist; `high` is None if not known."""
    if not isinstance(number, int):
        raise BadSettings(f"{noun} {number!r} is not a whole number")
    if number < low or (high is not None and number > high):
        known = "" if high is None else f": {where} has {noun}s {low} to {high}"
        raise BadSettings(f"{noun} {number} does not exist{known or f'; they count from {low}'}")


def facts_of(source: str, revision: str | None = None) -> ModelFacts:
    """The facts of a model by its name, folder or file; a model that is not there is an error."""
    from layerleap.models.load import ask_hub, locate
    from layerleap.zoo.download import require_libraries

    if source in MODEL_NAMES and not Path(source).exists():
        entry = CATALOG[source]
        if not entry.is_cached:
            require_libraries(entry)
            return ModelFacts(source)
        return ModelFacts.of(source, read_json(entry.path / "config.json"))
    folder, name, options = locate(source)
    if options:  # a GGUF file has no config.json
        return ModelFacts(name)
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        if (cached := ask_hub(name, {"revision": revision})) is None:
            return ModelFacts(name)
        path = Path(cached)
    return ModelFacts.of(name, read_json(path))


def _number(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """The first of these fields that is a number; some families list one per block."""
    values = (config[name] for name in names if isinstance(config.get(name), int))
    return next(values, None)


def _reads(config: Mapping[str, Any], is_pair: bool) -> Reads:
    if "num_mel_bins" in config:
        return "sound"
    if "image_size" in config and "vocab_size" not in config and "text_config" not in config:
        return "images"
    return "pairs" if is_pair else "text"
