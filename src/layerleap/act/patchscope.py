"""Patchscopes: a state in words, by letting the model go on writing from it in another prompt.

In: a wrapped model, a prompt, and the layers and position to read. Out: `Patchscope`, with what the
model writes when the state at each of those layers is patched into a target prompt.

The target shows the model what to do with the state: by default it repeats words, so that the state
is read as a token. A bank can map the state to the target's layer first.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig

from layerleap.act.decode.request import end_tokens
from layerleap.act.edits.patch import PatchState
from layerleap.arguments import checked
from layerleap.errors import BadSettings, BadText, ModelRefused, check_choice
from layerleap.lens.vocabulary.tokens import token_label, visible
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import find_bank
from layerleap.models.hooks.capture import capture, check_layer
from layerleap.models.prompts import OnePrompt, encode
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, reporting
from layerleap.results.base import Result
from layerleap.results.columns import Column, Row, Table
from layerleap.results.head import PageHead
from layerleap.stream.examples import require_length

# Repeats words, so that a state is read as a word. Five examples: with three, small models repeat
# the last example instead.
IDENTITY = "cat -> cat; dog -> dog; blue -> blue; house -> house; river -> river; {} ->"
PLACE, PLACEHOLDER = "{}", "?"
ROWS = 16  # layers that are read side by side
Mapped = Literal["none", "linear"]


@dataclass(frozen=True, eq=False, repr=False)
class Patchscope(Result):
    """What the states of one position say, layer by layer.

    tokens     the prompt, token by token
    position   whose states were read, from the start of the prompt
    target     the target prompt, token by token, and where in it the states went
    lines      a row per layer: where its state went, what the model wrote, as text and as token
               ids, the first token and its probability, and the logit lens's token
    """

    KIND: ClassVar[str] = "patchscope"
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "layers",
            "",
            lambda scope: scope.lines,
            (
                Column("layer"),
                Column("target_layer", "patched into", wide="column"),
                Column("text", "what the model writes"),
                Column("token", "first token"),
                Column("prob", "probability", "{:.0f} %", 100.0),
                Column("lens", "logit lens"),
            ),
            lines=lambda scope: [
                {k: v for k, v in row.items() if k != "ids"} for row in scope.lines
            ],
        ),
    )

    tokens: list[str]
    position: int
    target: list[str]
    target_position: int
    map: str
    lines: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def facts(self) -> Row:
        """Which state was read, and in which target."""
        return {
            "tokens": self.tokens,
            "position": self.position,
            "target": self.target,
            "target_position": self.target_position,
            "map": self.map,
        }

    def short(self) -> str:
        """What it is, in one line."""
        layers = "1 layer" if len(self.lines) == 1 else f"{len(self.lines)} layers"
        return f"Patchscope({self.tokens[self.position]!r} at position {self.position}, {layers})"

    def headline(self) -> str:
        """Which state was read, and where it went."""
        where = self.target[self.target_position]
        return (
            f"{self.tokens[self.position]!r} at position {self.position}, read in place of "
            f"{where!r} in {''.join(self.target)!r}"
        )

    def head(self, model: str, text: str) -> PageHead:
        """What a page says around it."""
        return PageHead(
            kicker="patchscope",
            title=("What the states of", model, "say"),
            facts=(f"{len(self.lines)} layers", f"position {self.position}"),
            heading="Layer by layer",
            lead="The state of one token is put into another prompt, and the model writes on.",
            text=text,
        )


@checked
def patchscope(
    transformer: Transformer,
    prompt: OnePrompt,
    position: int = -1,
    layer: int | Sequence[int] | None = None,
    *,
    target: str | None = None,
    target_layer: int | None = None,
    map: Mapped = "none",
    bank: ShortcutBank | str | Path | None = None,
    n_tokens: int = 5,
    progress: Progress | bool = True,
) -> Patchscope:
    """The state at a position in words: what the model writes when it is put into another prompt.

        ll.patchscope(model, "The Eiffel Tower is in", position=4)
        ll.patchscope(model, text, layer=[10, 20], target="Syria: a country; {}:")

    Args:
        prompt: a text, chat messages or token ids.
        position: the token whose state is read; negative ones count from the end.
        layer: the layer of that state, or several; all when None. A state that goes in at the last
            layer can only change what is written if its place is the target's last token, so that
            layer is left out, or refused if it is named.
        target: the prompt that the state goes into, in place of {}; at its last token if it has no
            {}. By default, a prompt that repeats words: the state is read as a token.
        target_layer: the layer at which the state goes in; the one it comes from when None.
        map: "linear" takes the state to the target layer by the bank's linear map first.
        bank: for map="linear": a bank with maps between all layers (`ll.fit(model, pairs="all")`),
            or its folder or hub name.
        n_tokens: how many tokens the model writes.
    """
    check_choice(map, ("none", "linear"), "map")
    if n_tokens < 1:
        raise BadSettings(f"n_tokens is {n_tokens}; expected at least 1")
    if not transformer.model.can_generate() or transformer.kind != "next-token":
        raise ModelRefused(
            f"{transformer.identity.name} does not write text, so it cannot put a state into "
            "words; ll.read shows its states through a lens"
        )
    if transformer.model.config.is_encoder_decoder:
        raise ModelRefused(
            f"{transformer.identity.name} is an encoder-decoder, which has no patchscope here: its "
            "decoder writes after a source, not after a prompt; ll.read shows its states through "
            "a lens"
        )
    transformer.require_eval()
    target_ids, target_place = _target(transformer, IDENTITY if target is None else target)
    n_read = len(target_ids) + n_tokens - 1  # it does not read the last token that it writes
    require_length(transformer, n_read, "target and written text have")
    layers = _layers(transformer, layer)
    goes_to = {one: one if target_layer is None else target_layer for one in layers}
    if target_place < len(target_ids) - 1:
        layers = _acting(transformer, layers, goes_to, is_all=layer is None)
    shortcuts = _bank(transformer, bank, target_layer, layers, progress) if map != "none" else None
    ids = encode(transformer, prompt)
    require_length(transformer, len(ids))
    place = position if position >= 0 else position + len(ids)
    if not 0 <= place < len(ids):
        raise BadText(
            f"position {position} is outside the prompt of {len(ids)} tokens; expected "
            f"{-len(ids)} to {len(ids) - 1}"
        )
    keep = torch.zeros(1, len(ids), dtype=torch.bool)
    keep[0, place] = True
    states = capture(transformer, [ids], layers=layers, keep=keep).states
    patched = {
        one: states[one][0] if shortcuts is None else shortcuts[one, goes_to[one]](states[one])[0]
        for one in layers
    }
    lines: list[Row] = []
    with reporting(progress) as report:
        for start in range(0, len(layers), ROWS):
            some = layers[start : start + ROWS]
            written = _write(
                transformer, target_ids, target_place, some, goes_to, patched, n_tokens
            )
            for one, row in zip(some, written, strict=True):
                top = int(transformer.logits(states[one]).argmax())
                lens = token_label(transformer, top).label
                lines.append({"layer": one, "target_layer": goes_to[one], **row, "lens": lens})
            report("reading states", len(lines), len(layers), "layers")
    return Patchscope(
        [token_label(transformer, one).label for one in ids],
        place,
        [token_label(transformer, one).label for one in target_ids],
        target_place,
        map,
        lines,
    )


def _layers(transformer: Transformer, layer: int | Sequence[int] | None) -> list[int]:
    if layer is None:
        return list(range(transformer.n_layers + 1))
    layers = [layer] if isinstance(layer, int) else list(layer)
    if not layers:
        raise BadSettings("no layers given; expected at least one")
    for one in layers:
        check_layer(transformer, one)
    return layers


def _acting(
    transformer: Transformer, layers: list[int], goes_to: Mapping[int, int], *, is_all: bool
) -> list[int]:
    """The layers whose state can act: a block is needed to carry it to the target's last token."""
    last = transformer.n_layers
    acting = [one for one in layers if goes_to[one] != last]
    if len(acting) == len(layers) or (acting and is_all):
        return acting
    raise BadSettings(
        f"a state that goes in at layer {last}, the last, changes nothing here, as no block is "
        f"left to carry it to the target's last token; choose a layer (or target_layer) up to "
        f"{last - 1}, or a target that ends in {{}}"
    )


def _bank(
    transformer: Transformer,
    bank: ShortcutBank | str | Path | None,
    target_layer: int | None,
    layers: Sequence[int],
    progress: Progress | bool,
) -> ShortcutBank:
    """The bank, if it has all the maps that are needed."""
    if bank is None or target_layer is None:
        raise BadSettings("map='linear' takes a bank and a target_layer; give both")
    if early := [one for one in layers if one > target_layer]:
        raise BadSettings(
            f"a map leads to a later layer, so the states of layers {early} cannot be mapped to "
            f"layer {target_layer}; choose layers up to it"
        )
    shortcuts = find_bank(transformer, bank, progress=progress)
    assert shortcuts is not None
    shortcuts = shortcuts.to(transformer.device)
    for one in layers:
        shortcuts[one, target_layer]  # refuses a missing map before anything runs
    return shortcuts


def _target(transformer: Transformer, target: str) -> tuple[list[int], int]:
    """The token ids of the target prompt, and the position that the states go to."""
    before, has_place, after = target.partition(PLACE)
    if PLACE in after:
        raise BadText(f"the target {target!r} has {{}} more than once; a state goes to one place")
    if not has_place:
        ids = encode(transformer, target)
        return ids, len(ids) - 1
    text = before + PLACEHOLDER + after
    ids, end = encode(transformer, text), len(before) + len(PLACEHOLDER)
    tokenizer = transformer.need_tokenizer()
    if getattr(tokenizer, "is_fast", False):
        offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        for place, (first, behind) in enumerate(offsets):
            if first < end == behind:
                return ids, place
    # No token ends with the placeholder, or it is not known: let it end a text of its own.
    ids = encode(transformer, before + PLACEHOLDER)
    rest = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
    return ids + rest, len(ids) - 1


@contextmanager
def _greedy(model: Any) -> Iterator[None]:
    """Without the model's own settings, such as a repetition penalty, but for its special tokens.

    Arguments of `generate` cannot do this: what they leave open is taken from the model. Inside
    `transformer.edit`, other threads that decode with the model wait.
    """
    before = model.generation_config
    names = ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(before, name) for name in names})
    try:
        yield
    finally:
        model.generation_config = before


def _write(
    transformer: Transformer,
    target: list[int],
    place: int,
    layers: Sequence[int],
    goes_to: Mapping[int, int],
    states: Mapping[int, Tensor],
    n_tokens: int,
) -> Iterator[Row]:
    """What the model writes after the target, with the state of each layer in a row of its own."""
    by_target: dict[int, list[int]] = {}
    for row, layer in enumerate(layers):
        by_target.setdefault(goes_to[layer], []).append(row)
    edits = [
        PatchState(
            to,
            torch.stack([states[layers[row]] for row in rows]),
            positions=[place] * len(rows),
            texts=rows,
        )
        for to, rows in by_target.items()
    ]
    model = transformer.model
    ids = torch.tensor([target] * len(layers), device=model.device)
    with transformer.edit(*edits), _greedy(model):
        written: Any = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n_tokens,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
        )
    probs = written.logits[0].float().softmax(-1)
    ends = end_tokens(model)
    for row, line in enumerate(written.sequences[:, len(target) :].tolist()):
        stop = next((i for i, token in enumerate(line) if token in ends), len(line))
        yield {
            "text": _text(transformer, line[:stop]),
            "ids": line[:stop],
            "token": token_label(transformer, line[0]).label,
            "prob": float(probs[row, line[0]]),
        }


def _text(transformer: Transformer, ids: list[int]) -> str:
    if transformer.tokenizer is None:
        return " ".join(token_label(transformer, one).label for one in ids)
    return visible(transformer.tokenizer.decode(ids))
