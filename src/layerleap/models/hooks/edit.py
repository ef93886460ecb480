"""Edits: changes to a model's forward pass, in force inside a `with` block.

In: a wrapped model and edits, small frozen values that say where, at which positions and what.
Out: every pass on this thread runs with them: plain calls, captures, recorded passes run again,
transformers' `generate` and the decoders of this package. `EditReport` says what each edit did.

Edits are checked against the model before any of them is applied. They act in the order given,
and those of an inner `with` after those of the outer one. The kinds of edits are in `act/edits`.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.trace import (
    required_state,
    state_given,
    state_taken,
    with_output,
    with_state,
)
from layerleap.models.hooks.attention import AttentionFunction, attention_chosen_by
from layerleap.models.hooks.foreign import HOOK, foreign_code
from layerleap.models.hooks.forward import Args, Forward, Kwargs, Tap, hooks_of, tapped
from layerleap.models.hooks.rows import ModelPass, PassRows, Prompt

if TYPE_CHECKING:
    from layerleap.models.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Change:
    """One module at which an edit acts.

    in, out     `function(values, rows)` gets what the module takes or gives as (row, width), and
                a function that tells which `Rows` they are; it returns the new values and how many
                rows it changed
    last        like out, but after the forward hooks of others: what they would change is replaced
    instead     `function` is called instead of the module's forward
    compute     `function(forward, *args, **kwargs)` computes what the module's forward would, in
                another way; what it takes is changed by other edits as usual
    attention   `function` is called instead of the module's attention function
    weights     `function(parameters)` gets the parameters of the module itself, by name, and
                returns those that it computes with instead; the module keeps its own
    """

    block: int  # 1 to n_layers; tells apart the layers of a shared block
    module: nn.Module
    side: Literal["in", "out", "last", "instead", "compute", "attention", "weights"]
    function: Callable[..., Any]
    # Called with the cache, or None, before every pass of the model; may refuse it.
    begin: Callable[[Any], None] | None = None


class Edit(ABC):
    """What to change in a model, as a frozen value; `act/edits` has the kinds."""

    @property
    def skips_cache(self) -> bool:
        """True if some keys and values are not computed, so that no cache can be used."""
        return False

    @abstractmethod
    def changes(self, transformer: "Transformer") -> Iterable[Change]:
        """Where and how it acts in a model; raises if it does not fit the model."""

    def remark(self, transformer: "Transformer") -> str:
        """What a user should know about this edit of this model, in a sentence; "" if nothing."""
        return ""


@dataclass
class Applied:
    """What one edit did."""

    edit: Edit
    passes: int = 0  # forward passes that it changed
    positions: int = 0  # that it acted on, over all passes; rejected drafts included
    remark: str = ""  # what a user should know about it
    _last: int = -1

    def count(self, number: int, positions: int) -> None:
        """Add what was changed in pass `number`; a position counts once per pass."""
        if positions and number != self._last:
            self.passes, self.positions = self.passes + 1, self.positions + positions
            self._last = number

    def __str__(self) -> str:
        remark = f" ({self.remark})" if self.remark else ""
        if not self.passes:
            return f"{self.edit}: never applied{remark}"
        passes = "1 pass" if self.passes == 1 else f"{self.passes} passes"
        positions = "1 position" if self.positions == 1 else f"{self.positions} positions"
        return f"{self.edit}: {passes}, {positions}{remark}"


class EditReport(tuple[Applied, ...]):
    """What each edit of one `with` block did so far, in the order given."""

    @property
    def unused(self) -> tuple[Edit, ...]:
        """The edits that never applied: their block or positions did not occur in any pass."""
        return tuple(entry.edit for entry in self if not entry.passes)

    def __str__(self) -> str:
        return "\n".join(map(str, self))


@contextmanager
def edit(transformer: "Transformer", *edits: Edit | str) -> Iterator[EditReport]:
    """Run the model with `edits` in force, on this thread; everything ends with the `with` block.

        with model.edit(ll.edits.ZeroNeuron(block=3, neuron=17)) as report:
            text = ll.generate(model, "The capital of France is")
        print(report)

    Many edits may be strings: `model.edit("L12.N34=5@last")`; see `ll.edits.parse_edit`.
    Other threads run the model unedited. Threads that capture, edit or decode with it wait until
    the block ends, so do not wait for them inside it.
    """
    model = transformer.model
    if not edits:
        raise BadSettings("no edits given; expected at least one")
    from layerleap.act.edits.spec import as_edits  # strings are read in one place

    own = as_edits(edits)
    transformer.refresh()
    hooks, report = hooks_of(model), EditReport(Applied(one) for one in own)
    with ExitStack() as undo:
        undo.enter_context(hooks.lock)
        with unedited(model):  # what is looked up about a model must not depend on other edits
            changes = [list(one.changes(transformer)) for one in own]
        for applied in report:
            applied.remark = applied.edit.remark(transformer)
        if hooks.edits is None:
            undo.callback(setattr, hooks, "edits", None)
            hooks.edits = EditedModel(transformer)
            undo.enter_context(hooks.edits.watched())
        undo.enter_context(hooks.edits.applying(report, changes))
        yield report


@contextmanager
def unedited(model: nn.Module) -> Iterator[None]:
    """Suspend the edits that this thread has in force, for probes of the model itself."""
    edited = edits_in_force(model)
    before = edited is not None and edited.is_suspended
    try:
        if edited is not None:
            edited.is_suspended = True
        yield
    finally:
        if edited is not None:
            edited.is_suspended = before


def edits_in_force(model: nn.Module) -> "EditedModel | None":
    """The edits that this thread has in force on a model."""
    edited: EditedModel | None = hooks_of(model).edits
    return edited if edited is not None and edited.thread == get_ident() else None


class EditedModel:
    """The edits in force on one model, and the pass that is running."""

    def __init__(self, transformer: "Transformer") -> None:
        self.transformer, self.thread = transformer, get_ident()
        self.is_suspended = False
        self._applied: list[Applied] = []
        self._begin: list[Callable[[Any], None]] = []
        self._pass: PassRows | None = None
        self._number = 0  # of the pass
        self._prompt: Prompt | None = None
        blocks = [transformer.model.get_submodule(path) for path in transformer.blocks]
        self._first = blocks[0]
        self._shared = {
            module for block in set(blocks) if blocks.count(block) > 1 for module in block.modules()
        }

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keep track of passes, of shared blocks, and of calls of `generate`."""
        model = self.transformer.model
        names = list(inspect.signature(model.forward).parameters)
        taps = {
            model: Tap(around=partial(self._run_model, names)),
            self._first: Tap(change_input=self._enter_block),
        }
        own, generate = model.__dict__, getattr(model, "generate", None)
        with tapped(model, taps), ExitStack() as undo:
            if generate is not None:
                restore = own.__setitem__ if "generate" in own else own.pop
                undo.callback(restore, "generate", generate)
                own["generate"] = self._generating(generate)
            yield

    @contextmanager
    def applying(self, report: EditReport, changes: list[list[Change]]) -> Iterator[None]:
        """Apply the changes of some edits."""
        pairs = list(zip(report, changes, strict=True))
        taps = [
            (change.module, self._tap(applied, change))
            for applied, own in pairs
            for change in own
            if change.side != "attention"
        ]
        attention = [(a, c) for a, own in pairs for c in own if c.side == "attention"]
        with ExitStack() as undo:
            undo.callback(self._applied.__delitem__, slice(len(self._applied), None))
            self._applied += report
            undo.callback(self._begin.__delitem__, slice(len(self._begin), None))
            self._begin += [c.begin for own in changes for c in own if c.begin is not None]
            undo.enter_context(tapped(self.transformer.model, taps))
            if attention:
                undo.enter_context(attention_chosen_by(partial(self._attend, attention)))
            yield

    @property
    def in_force(self) -> tuple[Applied, ...]:
        """The edits that act now."""
        return () if self.is_suspended else tuple(self._applied)

    @contextmanager
    def running(self, current: PassRows) -> Iterator[None]:
        """Say which pass is running."""
        skipping = [one.edit for one in self._applied if one.edit.skips_cache]
        if current.is_cached and skipping:
            raise BadSettings(
                f"{skipping[0]} does not compute the keys and values of all blocks, so a pass with "
                "a cache would be wrong; run without one (use_cache=False)"
            )
        before, self._pass = self._pass, current
        self._number += 1
        try:
            yield
        finally:
            self._pass = before

    def _run_model(self, names: list[str], forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        if self.is_suspended:
            return forward(*args, **kwargs)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        # A cursor runs other rows than the arguments say, and knows which.
        cache = arguments.get("past_key_values")
        for begin in self._begin:
            begin(cache)
        current = getattr(cache, "cursor", None)
        if current is None:
            current = ModelPass.of(self.transformer.model, arguments, self._prompt)
        with self.running(current):
            return forward(*args, **kwargs)

    def _generating(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(generate)
        def generating(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self.thread:
                return generate(*args, **kwargs)
            before, self._prompt = self._prompt, self._prompt_of(args, kwargs)
            try:
                return generate(*args, **kwargs)
            finally:
                self._prompt = before

        return generating

    def _prompt_of(self, args: Args, kwargs: Kwargs) -> Prompt:
        """How many texts `generate` was given, and how many tokens of each."""
        model: Any = self.transformer.model
        inputs = args[0] if args else kwargs.get("inputs", kwargs.get(model.main_input_name))
        named = [kwargs.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask")]
        given = [value for value in (inputs, *named) if isinstance(value, Tensor)]
        texts = len(given[0]) if given else 1
        if not model.config.is_encoder_decoder:
            # With a cache it may be given new tokens only, but then the mask has all of them.
            return Prompt(texts, max((value.shape[1] for value in given), default=1))
        edits = [one.edit for one in self._applied]
        if after := [e for e in edits if getattr(e, "positions", None) == "generated"]:
            raise BadSettings(
                f"{after[0]} cannot be used with {type(model).__name__}: the decoder of an "
                "encoder-decoder has no prompt of known length; name the positions by number"
            )
        return Prompt(texts, None)

    def _enter_block(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Note the shape of the states; count the runs of a shared block."""
        if isinstance(self._pass, ModelPass) and not self.is_suspended:
            self._pass.block += 1
            if not self._pass.shape and (state := state_taken(args, kwargs)) is not None:
                self._pass.shape = tuple(state.shape[:2])
        return args, kwargs

    def _acts(self, change: Change) -> bool:
        """True if the module is running for the block of this change."""
        if self.is_suspended:
            return False
        if self._pass is None:
            raise BadSettings(
                f"block {change.block} ran outside a pass of the wrapped model, so positions of "
                "edits are unknown; call the model itself"
            )
        return change.module not in self._shared or self._pass.block == change.block

    def _tap(self, applied: Applied, change: Change) -> Tap:
        if change.side == "in":
            return Tap(change_input=partial(self._change_input, applied, change))
        if change.side == "out":
            return Tap(change_output=partial(self._change_output, applied, change))
        if change.side == "last":
            # Without hooks of others, edits of one module act in the order given.
            code = foreign_code(self.transformer.model, [("", change.module)])
            is_hooked = any(one.kind == HOOK for one in code)
            change_output = partial(self._change_output, applied, change)
            return Tap(**{"change_last" if is_hooked else "change_output": change_output})
        if change.side == "compute":
            own = hooks_of(self.transformer.model).original(change.module)
            return Tap(forward=partial(self._compute, change, own))
        if change.side == "weights":
            see = partial(self._note_weights, applied)
            return Tap(parameters=change.function, is_on=self._is_on, see_input=see)
        forward = partial(self._run_instead, applied, change)
        return Tap(replace=lambda: forward if self._acts(change) else None)

    def _is_on(self) -> bool:
        return not self.is_suspended

    def _note_weights(self, applied: Applied, args: Args, kwargs: Kwargs) -> None:
        """Count a module that runs with other weights; outside a pass nothing is counted."""
        if self._pass is not None and not self.is_suspended:
            state = state_taken(args, kwargs)
            if state is not None:  # an embedding takes ids, one number per position
                width = state.shape[-1] if state.is_floating_point() else 1
                applied.count(self._number, state.numel() // width)

    def _change_input(
        self, applied: Applied, change: Change, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        if not self._acts(change) or (change.module is self._first and self._has_it(applied)):
            return args, kwargs
        place, value = required_state(args, kwargs)
        return with_state(args, kwargs, place, self._changed(applied, change, value))

    def _has_it(self, applied: Applied) -> bool:
        """True if the state that enters block 1 was recorded with this edit."""
        return isinstance(self._pass, ModelPass) and any(
            one is applied for one in self._pass.in_force
        )

    def _change_output(self, applied: Applied, change: Change, output: Any) -> Any:
        if not self._acts(change):
            return output
        state = state_given(output)
        if state is None:
            raise ModelRefused(f"{type(change.module).__name__} returned no state to edit")
        return with_output(output, state, self._changed(applied, change, state))

    def _changed(self, applied: Applied, change: Change, value: Tensor) -> Tensor:
        assert self._pass is not None
        rows = value.reshape(-1, value.shape[-1])
        changed, n = change.function(rows, partial(self._pass.rows, len(rows)))
        applied.count(self._number, n)
        return value if not n else changed.reshape(value.shape)

    def _compute(self, change: Change, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if get_ident() != self.thread or not self._acts(change):
            return forward(*args, **kwargs)
        return change.function(forward, *args, **kwargs)

    def _run_instead(self, applied: Applied, change: Change, *args: Any, **kwargs: Any) -> Any:
        state = state_taken(args, kwargs)
        applied.count(self._number, 0 if state is None else state[..., 0].numel())
        return change.function(*args, **kwargs)

    def _attend(
        self, changes: list[tuple[Applied, Change]], module: nn.Module
    ) -> AttentionFunction | None:
        for applied, change in reversed(changes):
            if change.module is module and self._attends(change):
                return partial(self._attend_instead, applied, change.function)
        return None

    def _attends(self, change: Change) -> bool:
        """True if an attention function takes part, also when a block runs again for gradients.

        Gradient checkpointing runs blocks again in the backward pass, outside a pass of the model.
        Attention functions need no positions, so they may act there.
        """
        if self._pass is None and change.module not in self._shared:
            return not self.is_suspended
        return self._acts(change)

    def _attend_instead(
        self,
        applied: Applied,
        function: AttentionFunction,
        module: nn.Module,
        query: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        if self._pass is not None:
            applied.count(self._number, query.shape[0] * query.shape[2])
        return function(module, query, *args, **kwargs)
