"""Debugger: readings of a model and a prompt, for the routes of the page.

In: a wrapped model, and optionally a bank and a concept index. Out: plain JSON types, and token
labels. Threads may share one debugger: whatever hooks the model takes its lock.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from layerleap.act.debug.cells import CellReader
from layerleap.act.debug.concepts import Concepts, Json
from layerleap.act.debug.trace import EXIT, Frame, Prompt, Rerun, Trace, rerun
from layerleap.act.decode.generate import generate, why_it_cannot_generate
from layerleap.act.edits.spec import Edits, as_edits, describe
from layerleap.errors import BadSettings
from layerleap.lens.lens import Lens
from layerleap.lens.vocabulary.neurons import BlockReading, Neurons
from layerleap.lens.vocabulary.tokens import TokenLabel, output_label, token_label
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.kinds import check_lens
from layerleap.maps.map import IdentityMap
from layerleap.models.hooks.capture import check_block
from layerleap.models.hooks.edit import Edit, unedited
from layerleap.models.hooks.foreign import Foreign, foreign_code
from layerleap.models.hooks.forward import hooks_of
from layerleap.models.hooks.recording import record
from layerleap.models.inputs import padded
from layerleap.models.prompts import OnePrompt as Text
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import longest_input, require_text
from layerleap.stream.generated import bundled_reactions
from layerleap.stream.source import NOT_ENGLISH

KEPT_BYTES = 2**28  # recorded prompts kept for the next request: 256 MB

EXAMPLES = {
    "next-token": (
        ("A fact", "The capital of France is"),
        ("A pattern", "one two three four five six"),
        ("A choice", "The doctor asked the nurse to help because"),
    ),
    "masked-token": (
        ("A fact", "The capital of France is {mask}."),
        ("A choice", "The {mask} barked at the mailman."),
        ("Two gaps", "She {mask} the {mask} in the garden."),
    ),
}
CLASS_EXAMPLES = (
    ("Praise", "A wonderful film with a great cast."),
    ("Blame", "A dull and predictable plot."),
    ("Both", "The acting was good, but the story was boring."),
)


class Stopped(Exception):
    """The client no longer waits for the answer."""


class Debugger(Concepts):
    """Readings of prompts, in addition to those of the weights."""

    def __init__(
        self,
        transformer: Transformer,
        *,
        bank: ShortcutBank | None = None,
        bank_name: str | None = None,
        index: Any = None,
        no_index: str | None = None,
        find_index: Callable[[], Any] | None = None,
    ) -> None:
        """Debug `transformer`; see `Concepts` for what concerns the index.

        Args:
            bank: shortcuts to read through as well as the logit lens.
            bank_name: where they came from.
        """
        require_text(transformer)
        if transformer.row_kind != "position":
            raise BadSettings(
                f"{transformer.identity.name} classifies the average of all positions, so single "
                "positions have no reading; the debugger needs a model that reads one position"
            )
        super().__init__(transformer, index, no_index=no_index, find_index=find_index)
        self.bank_name = bank_name
        self.plain = Lens(transformer)
        lenses = [self.plain] if bank is None else [self.plain, Lens(transformer, bank)]
        self.lenses = {lens.name: lens for lens in lenses}
        self._lock = hooks_of(transformer.model).lock
        self._prompts: OrderedDict[tuple[int, ...], Prompt] = OrderedDict()
        self._recorded_with: tuple[Foreign, ...] = ()  # the code of others on the model

    def refresh(self) -> None:
        """Look at the weights again; what was recorded with others is forgotten, a bank refused."""
        before = self.transformer.identity
        self.transformer.refresh()
        if self.transformer.identity != before:
            with self._lock:
                self._prompts.clear()
                self.__dict__.pop("blocks", None)
        for lens in self.lenses.values():
            lens.check_model()
        if self.index is not None:
            self.index.check_model()

    def describe(self) -> Json:
        """The model, its blocks, lenses and index, and example prompts; never waits for it."""
        return {**self._description, "index": self.index_state()}

    @cached_property
    def _description(self) -> Json:
        transformer, tokenizer = self.transformer, self.transformer.tokenizer
        is_masked = transformer.kind == "masked-token"
        reason = why_it_cannot_generate(transformer)
        if reason is None and tokenizer is None:  # a page has no way to give token ids
            reason = f"{transformer.identity.name} has no tokenizer to read a prompt with"
        return {
            "name": transformer.identity.name,
            "class": type(transformer.model).__name__,
            "fingerprint": transformer.identity.fingerprint,
            "kind": transformer.kind,
            "n_layers": transformer.n_layers,
            "d_model": transformer.d_model,
            "d_vocab": transformer.d_vocab,
            "blocks": self.blocks,
            "lenses": [{"name": name, "title": one.title} for name, one in self.lenses.items()],
            "bank": self.bank_name,
            "mask_token": getattr(tokenizer, "mask_token", None) if is_masked else None,
            "can_generate": reason is None,
            "generate_reason": reason,
            "examples": self._examples(),
            "longest": longest_input(transformer),
            "exit_rule": str(EXIT),
        }

    def _examples(self) -> list[Json]:
        kind, tokenizer = self.transformer.kind, self.transformer.tokenizer
        mask = getattr(tokenizer, "mask_token", None) or ""
        texts: tuple[tuple[str, str], ...] = EXAMPLES.get(kind, CLASS_EXAMPLES)
        if (name := self.transformer.identity.name) in NOT_ENGLISH:
            reactions = bundled_reactions()[:3] if name.startswith("rxn") else []
            texts = tuple(("A reaction", f"{one[:-1]}{{mask}}") for one in reactions)
        return [
            {"title": title, "text": text.format(mask=mask), "watch": None} for title, text in texts
        ]

    def encode(self, text: Text) -> list[int]:
        """Token ids of a text; raises if the model cannot read it."""
        return self.plain.encode(text)

    def tokens(self, text: Text) -> list[TokenLabel]:
        """The text, token by token."""
        return [token_label(self.transformer, token) for token in self.encode(text)]

    def outputs(self, text: str) -> list[TokenLabel]:
        """Single output tokens that spell a text, with a leading space first; or classes."""
        transformer = self.transformer
        if transformer.kind.endswith("-class"):
            labels = [output_label(transformer, index) for index in range(transformer.d_vocab)]
            return [label for label in labels if text.strip().lower() in label.text.lower()]
        tokenizer, matches = transformer.need_tokenizer(), []
        for variant in dict.fromkeys((f" {text.lstrip()}", text)):
            ids = tokenizer(variant, add_special_tokens=False)["input_ids"]
            if len(ids) == 1 and ids[0] < transformer.d_vocab and ids[0] not in matches:
                matches.append(ids[0])
        return [output_label(transformer, index) for index in matches]

    def trace(
        self,
        text: Text,
        *,
        lens: str = IdentityMap.kind,
        watch: int | None = None,
        follow: Sequence[int] = (),
        edits: Edits = (),
        top: int = 5,
        selected: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Frame]:
        """Frames of every cell of the prompt; see `act.debug.trace`.

        Every cell has the probability and rank of the `watch` token and of those to `follow`.
        """
        self.refresh()
        followed = tuple(dict.fromkeys(follow))
        self._check(top, watch, *followed)
        reader = CellReader(self._lens(lens), top, watch, followed)
        parsed = self._edits(edits)
        prompt = self._prompt(self.encode(text))
        place = self.plain.positions(list(prompt.ids))[-1] if selected is None else selected
        if place not in prompt.positions:
            place = min(prompt.positions, key=lambda position: abs(position - place))
        edited = self._rerun(prompt, parsed) if parsed else None
        yield from Trace(prompt, reader, place, edited, should_stop).frames()

    def cell(
        self,
        text: Text,
        *,
        block: int,
        position: int,
        lens: str = IdentityMap.kind,
        watch: int | None = None,
        edits: Edits = (),
        top: int = 10,
    ) -> Json:
        """One block at one position: its stages and its strongest sub-updates; see `Neurons`.

        With edits, "after" has the same of the edited run.
        """
        self.refresh()
        ids, parsed = self.encode(text), self._edits(edits)
        if not 0 <= position < len(ids):
            raise BadSettings(
                f"position {position} does not exist: the prompt has {len(ids)} tokens"
            )
        neurons = Neurons(self.transformer, self._lens(lens).bank)
        check_block(self.transformer, block)
        prompt = self._prompt(ids)
        self._check(top, watch)
        options: Json = {"top": top, "watch": watch}
        with unedited(self.transformer.model):
            reading = neurons.recorded(prompt.recording, block, position, **options)
        answer = {
            "block": block,
            "position": position,
            "after": None,
            "token": token_label(self.transformer, ids[position]).to_dict(),
            **self._reading(reading),
        }
        if parsed:
            h = self._rerun(prompt, parsed).states.get(block - 1)  # None below the lowest edit
            with self.transformer.edit(*parsed):
                edited = neurons.recorded(prompt.recording, block, position, h=h, **options)
            answer["after"] = self._reading(edited)
        return answer

    def _reading(self, reading: BlockReading) -> Json:
        answer = reading.to_dict()
        for update in answer["updates"]:
            update["range"] = self.range(reading.block, update["neuron"])
        return answer

    def generate(
        self,
        text: Text,
        *,
        edits: Edits = (),
        max_new_tokens: int = 20,
        on_token: Callable[[TokenLabel, str], None] = lambda token, piece: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Json:
        """Continue a prompt greedily with the edits in force.

        `on_token` gets each new token and the text that it adds. Raises `Stopped` once
        `should_stop` returns True.
        """
        ids, parsed = self.encode(text), self._edits(edits)

        def report(token: int, piece: str) -> None:
            if should_stop():
                raise Stopped
            on_token(output_label(self.transformer, token), piece)

        how: Any = {"decoder": "transformers", "max_new_tokens": max_new_tokens}
        result = generate(self.transformer, ids, edits=parsed, on_id=report, **how)
        edited = [describe(edit) for edit in parsed]
        return {"ids": result.ids, "text": result.continuation, "edits": edited}

    def check_edits(self, edits: Edits) -> None:
        """Raise an error if an edit cannot be read or does not fit the model."""
        self._edits(edits)

    def _lens(self, name: str) -> Lens:
        check_lens(name, self.lenses)
        return self.lenses[name]

    def _edits(self, edits: Edits) -> tuple[Edit, ...]:
        parsed = as_edits(edits)
        for edit in parsed:
            list(edit.changes(self.transformer))  # raises if it does not fit the model
        return parsed

    def _check(self, top: int, *outputs: int | None) -> None:
        for index in outputs:
            if index is not None and not 0 <= index < self.transformer.d_vocab:
                raise BadSettings(
                    f"output {index} does not exist; expected 0 to {self.transformer.d_vocab - 1}"
                )
        if top < 1:
            raise BadSettings(f"top is {top}; expected at least 1")

    def _prompt(self, ids: Sequence[int]) -> Prompt:
        key, model = tuple(ids), self.transformer.model
        with self._lock:
            if (code := foreign_code(model)) != self._recorded_with:
                self._prompts.clear()
                self._recorded_with = code
            if key not in self._prompts:
                with unedited(model):  # it is kept for other requests
                    recording = record(self.transformer, padded(self.transformer, [key]))
                is_pooled = self.transformer.pooling is not None
                positions = self.plain.positions(list(key)) if is_pooled else range(len(key))
                self._prompts[key] = Prompt(key, tuple(positions), recording)
            self._prompts.move_to_end(key)
            prompts = self._prompts  # those not requested for longest are dropped
            while len(prompts) > 1 and sum(map(_n_bytes, prompts.values())) > KEPT_BYTES:
                prompts.popitem(last=False)
            return prompts[key]

    def _rerun(self, prompt: Prompt, edits: tuple[Edit, ...]) -> Rerun:
        with self._lock:
            return rerun(prompt.recording, edits)


def _n_bytes(prompt: Prompt) -> int:
    return sum(state.numel() * state.element_size() for state in prompt.recording.states)
