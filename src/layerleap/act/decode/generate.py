"""Generate text: the tokens, the layer each was read at, and statistics of the run.

In: a wrapped model and a prompt; optionally a bank, an exit rule or plan, or a decoder.
Out: `Generation`; a notebook shows it with every token coloured by its exit layer.
"""

import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, overload

import torch

from layerleap.act.decode.coloured import coloured
from layerleap.act.decode.decoder import Decoder
from layerleap.act.decode.decoding_stats import DecodingStats
from layerleap.act.decode.request import stop_criteria
from layerleap.act.edits.spec import Edits, as_edits
from layerleap.act.exits.rules import ExitPlan, Rule
from layerleap.act.spelling import Policy
from layerleap.arguments import checked
from layerleap.errors import BadSettings, BadText, first_line
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.kinds import kind_named
from layerleap.models.hooks.edit import Edit
from layerleap.models.hooks.foreign import foreign_code
from layerleap.models.hooks.forward import hooks_of
from layerleap.models.identity import caveats
from layerleap.models.prompts import OnePrompt, Prompts, encode, is_chat, numbered, several
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.results.base import Result
from layerleap.results.columns import Row, Table
from layerleap.results.head import PageHead
from layerleap.results.several import Several
from layerleap.short_repr import short_repr
from layerleap.stream.examples import longest_input, reads_pairs, require_text

Decode = Callable[[list[int]], str]
OnToken = Callable[[str, int], None]
OnId = Callable[[int, str], None]
PROMPT_TOKENS = 8  # decoded before the first piece; enough for any character and its space


@dataclass(frozen=True, eq=False, repr=False)
class Generation(Result):
    """A generated text."""

    KIND: ClassVar[str] = "generation"
    TEMPLATE: ClassVar[str] = "generation"
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table("tokens", "", lambda g: g.tokens, lines=lambda g: g._lines()),
    )

    prompt: str
    tokens: list[str]  # the new tokens
    ids: list[int]
    stats: DecodingStats
    prompt_ids: list[int] = field(default_factory=list)
    how: dict[str, str] = field(default_factory=dict)  # rule, layers checked and bank, in words
    full_token: str | None = None  # what the full model writes where the text departs from its own

    def short(self) -> str:
        """What it is, in one line."""
        return f"Generation({len(self.tokens)} tokens: {short_repr(self.continuation)})"

    @property
    def continuation(self) -> str:
        """The new text, without the prompt."""
        return "".join(self.tokens)

    @property
    def text(self) -> str:
        """The prompt and the new text."""
        return self.prompt + self.continuation

    @property
    def exit_layers(self) -> list[int]:
        """The layer at which each new token was read."""
        return self.stats.layers

    @property
    def departure(self) -> dict[str, Any] | None:
        """The first token that departs from the text that the full model would write, if known.

        `place` counts the new tokens from 0; `token` is what was written there, and `full_model`
        what the full model writes.
        """
        place = self.stats.departs_at
        if place is None:
            return None
        return {"place": place, "token": self.tokens[place], "full_model": self.full_token}

    def __str__(self) -> str:
        return self.text

    def facts(self) -> Row:
        """The prompt, what was generated, and how."""
        return {
            "prompt": self.prompt,
            "continuation": self.continuation,
            "ids": self.ids,
            "stats": self.stats.to_dict(),
            "summary": str(self.stats),
            "how": self.how,
            "departure": self.departure,
        }

    def _lines(self) -> Iterator[Row]:
        """One line per new token."""
        columns = self.tokens, self.ids, self.stats.layers, self.stats.drafted
        for row in zip(*columns, strict=True):
            yield dict(zip(("token", "id", "exit_layer", "drafted"), row, strict=True))

    def picture(self) -> Row:
        """The tokens with their colours."""
        return coloured(self.to_dict())

    def head(self, model: str) -> PageHead:
        """What a page says around it."""
        stats = self.stats
        is_early = min(stats.layers, default=stats.n_layers) < stats.n_layers
        lead = (
            "The warmer a token, the earlier it left the model; white ones ran through all layers. "
            "Hover over a token to see its layer."
            if is_early
            else "Every token ran through all layers."
        )
        drafted = " Underlined tokens were drafted, then verified." if any(stats.drafted) else ""
        return PageHead(
            kicker="generated text",
            title=("What", model, "wrote"),
            facts=(
                f"{stats.n_layers} layers",
                f"{stats.tokens} tokens",
                *(f"{key}: {value}" for key, value in self.how.items()),
            ),
            heading="Where each token was read" if is_early else "Continuation",
            lead=lead + drafted,
            text=self.prompt,
        )


class Pieces:
    """A streamer that keeps the text that each token adds, in whole characters.

    A character that is split over several tokens belongs to the last of them. Only the tokens since
    the last piece but one are decoded again, so the work per token does not grow with the text. The
    first piece is decoded after the end of the prompt: many tokenizers drop a first space.
    """

    def __init__(
        self,
        decode: Decode,
        report: Callable[[str], None] = lambda piece: None,
        on_id: OnId = lambda token, piece: None,
    ) -> None:
        self.decode, self.report, self.on_id = decode, report, on_id
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self._first, self._last = 0, 0  # where the last piece starts, and where it ends
        self._prompt: list[int] | None = None  # its last tokens

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt first, then tokens."""
        if self._prompt is None:
            self._prompt = value.flatten()[-PROMPT_TOKENS:].tolist()
            return
        for token in value.flatten().tolist():
            self.add(token)

    def add(self, token: int) -> None:
        """Append a token; its piece is empty while a character is incomplete."""
        self.ids.append(token)
        piece = self._rest()
        if piece.endswith("\ufffd"):
            piece = ""
        elif piece:
            # Decoded along with the next piece: tokenizers drop spaces at the start of a text.
            self._first, self._last = self._last, len(self.ids)
        self.pieces.append(piece)
        self.on_id(token, piece)
        self.report(piece)

    def _rest(self) -> str:
        before = (self._prompt or []) if self._first == 0 else []
        reported = self.decode(before + self.ids[self._first : self._last])
        return self.decode(before + self.ids[self._first :])[len(reported) :]

    def end(self) -> None:
        """Report an incomplete character as it is."""
        if self.pieces and (rest := self._rest()) and not self.pieces[-1]:
            self.pieces[-1] = rest
            self.report(rest)


@overload
def generate(
    transformer: Transformer,
    prompt: OnePrompt,
    *,
    bank: ShortcutBank | str | Path | None = "default",
    other_model: bool = False,
    edits: Edits = (),
    rule: Rule | None = None,
    checks: Collection[int] | None = None,
    plan: ExitPlan | str | Path | None = None,
    policy: Policy = "recompute",
    strict: bool | None = None,
    compare: bool = True,
    decoder: Decoder | Literal["transformers"] | None = None,
    max_new_tokens: int = 60,
    stop_strings: str | Sequence[str] | None = None,
    chat: bool = False,
    live: bool = False,
    on_token: OnToken | None = None,
    on_id: OnId = lambda token, piece: None,
    progress: Progress = silent,
    **options: Any,
) -> Generation: ...


@overload
def generate(transformer: Transformer, prompt: Prompts, **options: Any) -> Several[Generation]: ...


@checked
def generate(
    transformer: Transformer,
    prompt: Any,
    *,
    bank: ShortcutBank | str | Path | None = "default",
    other_model: bool = False,
    edits: Edits = (),
    rule: Rule | None = None,
    checks: Collection[int] | None = None,
    plan: ExitPlan | str | Path | None = None,
    policy: Policy = "recompute",
    strict: bool | None = None,
    compare: bool = True,
    decoder: Decoder | Literal["transformers"] | None = None,
    max_new_tokens: int = 60,
    stop_strings: str | Sequence[str] | None = None,
    chat: bool = False,
    live: bool = False,
    on_token: OnToken | None = None,
    on_id: OnId = lambda token, piece: None,
    progress: Progress = silent,
    **options: Any,
) -> Generation | Several[Generation]:
    """Continue `prompt`: exactly, with speculative decoding, or exiting early by a rule or a plan.

        ll.generate(model, "Once upon a time")  # what the full model writes, but faster
        ll.generate(model, "Once upon a time", rule=ll.exits.Similarity(0.98))  # early exit
        ll.generate(model, "Once upon a time", plan="report/plan.json")  # of `suitability`
        ll.generate(model, "Once upon a time", edits=["L3.N17=off"])  # edited
        ll.generate(model, [{"role": "user", "content": "Hello"}])  # a chat
        ll.generate(model, ["Once upon a time", "In the beginning"])[1]  # one after the other

    Args:
        transformer: a causal language model.
        prompt: the text to continue, chat messages, or token ids, which need no tokenizer. Several
            of them give as many generations, each as for its prompt alone; when sampling, random
            numbers go on from one to the next.
        bank: shortcuts of the model, or their folder or hub name. "default" is the bank in the
            cache, fitted on first use; None uses the logit lens and drafts from the text alone.
        other_model: allow a bank of another model of the same class and width, with a warning.
        edits: changes to the model that are in force while it generates: values of `ll.edits`, or
            strings such as "L12.N34=5@last".
        rule: when a token may exit; None decodes exactly.
        checks: layers at which the rule is checked; None is all layers below the last.
        plan: an exit plan or its file: rule, checks and bank in one.
        policy: how keys and values of skipped layers are made: recompute, propagate, shortcut.
        strict: in dtypes narrower than float32, compute every token to the bits of `generate`: None
            does so where several tokens per pass allow it, True always, False never (the fastest).
        compare: after an early exit run, measure the agreement with the full model, and where the
            text departs from the one that it would write.
        decoder: an `ll.decoder` with further settings, instead of all arguments from `bank` on;
            "transformers" is the library's own loop.
        max_new_tokens: maximum number of new tokens.
        stop_strings: stop after the token that completes one of these.
        chat: put a text into the tokenizer's chat template, as a user message.
        live: in a notebook, show the coloured text as it grows.
        on_token: called with each piece of new text and the layer it was read at. The piece is
            empty while a character is incomplete.
        on_id: called with each new token and its piece of text, once per token.
        progress: called while the default bank is fitted.
        **options: options of transformers' `generate`, such as do_sample and temperature.
    """
    if max_new_tokens < 1:
        raise BadSettings(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    if "streamer" in options:
        raise BadSettings("a streamer is not supported here; pass a function as on_token instead")
    if decoder is not None and (rule is not None or plan is not None):
        raise BadSettings("pass a rule or a plan to the decoder, or leave out the decoder")
    if stop_strings is not None:
        stops = stop_criteria(transformer.need_tokenizer(), stop_strings)
        options["stopping_criteria"] = [*options.get("stopping_criteria", ()), *stops]
    if decoder is None and rule is None and plan is None and transformer.identity.loosened:
        decoder = "transformers"  # a token's bits depend on what else is in its pass
    prompts = several(transformer, prompt)
    encoded = _encode_all(transformer, [prompt] if prompts is None else prompts, chat)
    if decoder is None:
        if bank == "default":
            from layerleap.maps.fit import default_bank

            # A plan brings its own bank; with hooks nothing is drafted.
            has_use = plan is None and not foreign_code(transformer.model)
            bank = default_bank(transformer, progress=progress) if has_use else None
        decoder = Decoder(
            bank,
            rule=rule,
            checks=checks,
            plan=plan,
            policy=policy,
            strict=strict,
            compare=compare,
            transformer=transformer,
            other_model=other_model,
        )
    custom = None if isinstance(decoder, str) else decoder
    call = options, max_new_tokens, live, on_token, on_id
    writer = _Writer(transformer, custom, as_edits(edits), *call)
    written = Several(writer.write(text, ids) for text, ids in encoded)
    return written[0] if prompts is None else written


@dataclass(frozen=True)
class _Writer:
    """How every prompt of one call is continued."""

    transformer: Transformer
    decoder: Decoder | None  # None is transformers' own loop
    edits: tuple[Edit, ...]
    options: dict[str, Any]
    max_new_tokens: int
    live: bool
    on_token: OnToken | None
    on_id: OnId

    def write(self, prompt: str, ids: list[int]) -> Generation:
        """Continue one prompt."""
        transformer, custom = self.transformer, self.decoder
        shown = _display(prompt) if self.live else None

        def report(piece: str) -> None:
            stats = None if custom is None else custom.current
            if self.on_token is not None:
                layer = None if stats is None else stats.current_layer
                self.on_token(piece, layer or transformer.n_layers)
            if shown is not None and stats is not None:
                n = min(len(written.ids), len(stats.layers))  # the last layer is recorded later
                stats = replace(stats, layers=stats.layers[:n], drafted=stats.drafted[:n])
                shown.update(Generation(prompt, written.pieces[:n], written.ids[:n], stats))

        decode: Decode = _numbers  # without a tokenizer
        if transformer.tokenizer is not None:
            decode = partial(transformer.tokenizer.decode, skip_special_tokens=True)
        written = Pieces(decode, report, self.on_id)
        # Threads that share a decoder take turns, so that each gets its own stats.
        turn = nullcontext() if custom is None else hooks_of(transformer.model).lock
        with turn, transformer.edit(*self.edits) if self.edits else nullcontext():
            try:
                new = self._run(ids, written)
            except ValueError as error:  # how transformers refuses an option
                raise BadSettings(f"generate refuses its options: {first_line(error)}") from error
            stats = None if custom is None else custom.stats[0]
        if stats is None:  # every token ran through all layers
            n, last = len(new), transformer.n_layers
            stats = DecodingStats(last, "exact", n, layers=[last] * n, drafted=[False] * n)
        full = None if stats.full_token is None else decode([stats.full_token])
        how = self._in_words(stats)
        generation = Generation(prompt, written.pieces, new, stats, ids, how, full)
        if shown is not None:
            shown.update(generation)
        return generation

    def _in_words(self, stats: DecodingStats) -> dict[str, str]:
        """How a text was decoded: the rule, the layers checked, the bank, and the edits."""
        transformer, bank = self.transformer, None if self.decoder is None else self.decoder.bank
        how = _decoding_in_words(self.decoder, stats)
        if notes := caveats(transformer.identity.to_dict() if bank is None else bank.model):
            how["note"] = " ".join(notes)
        remarks = [(edit, edit.remark(transformer)) for edit in self.edits]
        if texts := [f"{edit} ({remark})" if remark else str(edit) for edit, remark in remarks]:
            how["edits"] = "; ".join(texts)
        return how

    def _run(self, ids: list[int], written: Pieces) -> list[int]:
        """The new tokens."""
        model, custom = self.transformer.model, self.decoder
        entry = torch.tensor([ids], device="cpu" if model.device.type == "meta" else model.device)
        # The model's own settings for sampling only apply with do_sample=True.
        options = {"do_sample": False, **self.options}
        if not options["do_sample"]:
            options = {"temperature": None, "top_p": None, "top_k": None, **options}
        room = longest_input(self.transformer) - len(ids)
        output: Any = model.generate(
            entry,
            attention_mask=torch.ones_like(entry),
            custom_generate=custom,
            **({"streamer": written} if custom is None else {"stream_to": written}),
            max_new_tokens=min(self.max_new_tokens, room),
            **options,
        )
        return output[0, len(ids) :].tolist()


def _numbers(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _display(prompt: str) -> Any:
    """A notebook output that can be updated as the text grows, or None outside a notebook."""
    try:
        display = importlib.import_module("IPython.display").display
    except ImportError as error:
        raise BadSettings("live=True needs a notebook, and IPython is not installed") from error
    empty = DecodingStats(n_layers=1, exactness="exact", max_tokens=0)
    return display(Generation(prompt, [], [], empty), display_id=True)


def why_it_cannot_generate(transformer: Transformer) -> str | None:
    """Why a model cannot continue a text; None if it can."""
    name = transformer.identity.name
    if transformer.kind != "next-token" or reads_pairs(transformer):
        return f"{name} is not a causal language model; it cannot generate text"
    return None


def _encode_all(
    transformer: Transformer, prompts: Sequence[Any], chat: bool
) -> list[tuple[str, list[int]]]:
    """The text and the token ids of each prompt; refuses one that the model cannot continue."""
    require_text(transformer)
    if (reason := why_it_cannot_generate(transformer)) is not None:
        raise BadSettings(reason)
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        with numbered(number, len(prompts)):
            encoded.append(_encode(transformer, prompt, chat))
    return encoded


def _encode(transformer: Transformer, prompt: Any, chat: bool) -> tuple[str, list[int]]:
    is_text, message = isinstance(prompt, str), prompt
    if is_text and not prompt.strip():
        raise BadText("the prompt is empty; expected at least one word")
    if chat and is_text:
        message = [{"role": "user", "content": prompt}]
    elif chat and not is_chat(prompt):
        raise BadSettings("token ids cannot be put into a chat template; give a text")
    ids = encode(transformer, message)
    if len(ids) >= (limit := longest_input(transformer)):
        raise BadText(f"the prompt has {len(ids)} tokens; this model takes at most {limit}")
    if is_text:
        return prompt, ids
    tokenizer = transformer.tokenizer
    return (_numbers(ids) if tokenizer is None else str(tokenizer.decode(ids))), ids


def _decoding_in_words(decoder: Decoder | None, stats: DecodingStats) -> dict[str, str]:
    if decoder is None:
        return {"decoding": "transformers' own loop"}
    bank = "none (logit lens)"
    if decoder.bank is not None:
        text, lens = decoder.bank.data.get("text"), kind_named(decoder.bank.kind).title
        bank = f"{lens} fitted on {text}" if text else f"{lens} from {decoder.bank.source}"
    # Not `decoder.stats`: another thread may already be writing with the same decoder.
    if (reason := stats.fallback) is not None:
        return {"decoding": f"transformers' own loop, because of {reason}"}
    if decoder.rule is None:
        return {"decoding": "exact, without exits", "bank for drafts": bank}
    checks = "all" if decoder.checks is None else ", ".join(map(str, sorted(decoder.checks)))
    return {"rule": str(decoder.rule), "layers checked": checks, "bank": bank}
