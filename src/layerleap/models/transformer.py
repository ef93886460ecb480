"""Transformer: a frozen model whose residual stream can be read and edited at any depth.

In: a Hugging Face model, loaded and placed as its owner wants it.
Out: blocks, tail and sites under one contract, or `ModelRefused`; never a half-working object.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from layerleap.errors import (
    BadSettings,
    BadText,
    ModelRefused,
    UnknownModel,
    check_choice,
    first_line,
)
from layerleap.models.changes import Mark, mark
from layerleap.models.discovery.blocks import find_blocks
from layerleap.models.discovery.probe import probe, vocabulary_size
from layerleap.models.discovery.sites import Anatomy, Site, find_anatomy
from layerleap.models.discovery.tail import ACTIVATIONS, LAST, POOLS, Step, find_tail, pool
from layerleap.models.discovery.trace import trace
from layerleap.models.facts import check_number
from layerleap.models.hooks.capture import capture
from layerleap.models.hooks.edit import edit, unedited
from layerleap.models.hooks.foreign import Foreign, foreign_code, in_words, unhooked
from layerleap.models.hooks.forward import hooks_of, uncompiled
from layerleap.models.identity import ModelIdentity, caveats, identify
from layerleap.models.unwrap import unwrap

# What the logits predict: the next token, a masked token, the class of each token, or the class of
# a whole text or image.
Kind = Literal["next-token", "masked-token", "token-class", "text-class", "image-class"]
RowKind = Literal["position", "mean", "sequence"]
Laws = Literal["strict", "loose"]  # are laws about a row's neighbours enforced, or written down?


@dataclass(eq=False, repr=False)
class Transformer:
    """A model, and how to read and edit it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    identity: ModelIdentity
    blocks: tuple[str, ...]  # by layer l, the path of the block that turns h[l] into h[l + 1]
    tail: tuple[Step, ...]  # turns h[n_layers] into logits
    anatomy: tuple[Anatomy | str, ...]  # the parts of each block, or why they are not known
    kind: Kind
    d_model: int
    d_vocab: int
    processor: Any = None
    no_tokenizer: str = ""  # why it could not be loaded
    wrappers: tuple[str, ...] = ()  # what was left out around the model, a sentence each
    is_changed: bool = False  # the weights are no longer those that were wrapped
    _mark: Mark | None = None  # of the weights, if it was just made
    # The code of others with which the model was verified, and its tail last.
    _loaded_with: tuple[Foreign, ...] = field(default=(), init=False)
    _tail_with: tuple[Foreign, ...] = field(default=(), init=False)
    _was_just_marked: bool = field(default=False, init=False)
    _tail_in_doubt: bool = field(default=False, init=False)  # hooks may act only at times

    def __post_init__(self) -> None:
        """Remember the weights as they are now."""
        self._mark = self._mark or mark(self.model)

    @property
    def n_layers(self) -> int:
        """How many blocks there are; h[0] to h[n_layers] can be read."""
        return len(self.blocks)

    @classmethod
    def wrap(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        processor: Any = None,
        name: str | None = None,
        revision: str | None = None,
        blocks: str | None = None,
        tail: Sequence[str] | None = None,
        check: bool = True,
        laws: Laws = "strict",
    ) -> "Transformer":
        """Adapt a loaded model as it is: it is neither moved nor cast nor put into eval mode.

        The model may be quantised or placed by `device_map`. Its name and revision default to
        where it was loaded from. The other arguments are those of `load`. Hooks that somebody has
        put on the model take part in every later pass, but not in this check, unless it fails
        without them.
        """
        check_choice(laws, Laws, "laws")
        model, notes = unwrap(model)
        if not isinstance(model, PreTrainedModel):
            raise UnknownModel(not_a_model(model))
        identity = identify(model, name, revision)

        def verified() -> "Transformer":
            with _refusing(model, "layerleap cannot follow it:"):
                wrapped = cls(model, tokenizer, identity, **_discover(model, blocks, tail, laws))
                wrapped.processor, wrapped.wrappers = processor, notes
                if wrapped.kind == "text-class" and wrapped.row_kind == "sequence":
                    raise ModelRefused(
                        f"the head of {type(model).__name__} averages normed positions of texts of "
                        "any length; only images can be read that way, because they have a fixed "
                        "size"
                    )
                if check:
                    from layerleap.models.discovery.laws import require  # which check this class

                    require(wrapped, laws)
            wrapped._remember(check)
            return wrapped

        with unedited(model), uncompiled():
            try:
                with unhooked(model):
                    return verified()
            except ModelRefused as error:
                if not (code := foreign_code(model)):
                    raise
                try:  # hooks may be what makes it work, such as casts between dtypes
                    return verified()
                except ModelRefused:
                    raise ModelRefused(
                        f"{error}; the model has {in_words(code)}: remove it, and load again"
                    ) from error

    def _remember(self, is_checked: bool) -> None:
        """What others have put on the model now, and for `of` what was discovered."""
        hooks_of(self.model).remember(self.model)
        self._loaded_with = foreign_code(self.model)
        self._tail_with = foreign_code(self.model, self._outside_blocks())
        if is_checked and not self._loaded_with:
            facts = {name: getattr(self, name) for name in DISCOVERED}
            _VERIFIED[self.model] = _state(self.model), facts

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Transformer":
        """The model as it was wrapped and verified before, or wrapped now if it changed since.

        Like `wrap` without further arguments, so there is no tokenizer.
        """
        state, facts = _VERIFIED.get(model, (None, {}))
        if state is None or foreign_code(model) or state != _state(model):
            return cls.wrap(model)
        return cls(model, None, **facts, _mark=state[0])

    def notes(self) -> tuple[str, ...]:
        """What is out of the ordinary about the model, a sentence each."""
        notes = [*self.wrappers, *caveats(self.identity.to_dict())]
        if reasons := [reason for reason in self.anatomy if isinstance(reason, str)]:
            some = f"{len(reasons)} of {self.n_layers} blocks have no"
            notes.append(
                f"{'no block has' if len(reasons) == self.n_layers else some} known parts "
                f"({reasons[0]}): layers can be read and patched, but there are no sites, neurons "
                "or heads there"
            )
        return tuple(notes)

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"  note: {note}" for note in self.notes())])

    def __repr__(self) -> str:
        return (
            f"Transformer({self.identity.name}: {type(self.model).__name__}, {self.kind}, "
            f"{self.n_layers} layers, d_model {self.d_model}, {self.d_vocab} outputs)"
        )

    def refresh(self, *, thorough: bool = False) -> None:
        """Recompute the identity if the weights were changed since they were last looked at.

        Whatever was fitted on the old weights is then refused, and whatever was found out about
        them is found out again. A model that was only moved keeps its fingerprint.

        Args:
            thorough: look at every value, not only at a mark; as long as at loading.
        """
        self._tail_in_doubt = bool(self._tail_with)
        if self._was_just_marked and not thorough:
            return
        now = mark(self.model)
        if now == self._mark and not thorough:
            return
        identity = identify(self.model, self.identity.name, self.identity.revision)
        identity = replace(identity, loosened=self.identity.loosened)
        self.is_changed |= identity.fingerprint != self.identity.fingerprint
        self._mark = now
        if identity != self.identity:
            self.identity = identity

    @contextmanager
    def just_marked(self) -> Iterator[None]:
        """What runs inside does not look at the weights again: `of` has done so a moment ago."""
        self._was_just_marked = True
        try:
            yield
        finally:
            self._was_just_marked = False

    def _repr_html_(self) -> str:
        from layerleap.results.page import facts_html

        unknown = sum(isinstance(anatomy, str) for anatomy in self.anatomy)
        facts = {
            "class": type(self.model).__name__,
            "kind": self.kind,
            "layers": self.n_layers,
            "d_model": self.d_model,
            "outputs": self.d_vocab,
            "first block": self.blocks[0],
            "last block": self.blocks[-1],
            "tail": ", ".join(step.path or step.kind for step in self.tail),
            "sites of block 1": ", ".join(self.sites(1)) or "not known",
            "tokenizer": type(self.tokenizer).__name__ if self.tokenizer else "none",
            **({"blocks of unknown parts": unknown} if unknown else {}),
        }
        return facts_html(self.identity.name, facts)

    # Both are functions of `models.hooks`, used as methods.
    capture = capture
    edit = edit

    @contextmanager
    def itself(self) -> Iterator[None]:
        """Run the model as it was verified: without edits, and without hooks added by others."""
        with unedited(self.model), unhooked(self.model, self._loaded_with):
            yield

    def logits(self, h: Tensor) -> Tensor:
        """Read states of h[n_layers] with the model's own tail: (row, d_model) -> (row, d_vocab).

        The states are those before the final norm; the tail applies it. Where `row_kind` is
        "sequence", a row is (pos, d_model).
        """
        is_sequence = self.row_kind == "sequence"
        fits = isinstance(h, Tensor) and h.dim() == (3 if is_sequence else 2)
        if not fits or h.shape[-1] != self.d_model:
            expected = f"(row, {'pos, ' if is_sequence else ''}{self.d_model})"
            actual = tuple(h.shape) if isinstance(h, Tensor) else f"type {type(h).__name__}"
            raise BadSettings(f"got states of {actual}; expected a tensor of {expected}")
        self.require_tail()
        value = h if is_sequence else h[:, None]  # one-token texts, which every tail accepts
        for step in self.tail:
            value = self.apply(step, value)
        return value.reshape(len(h), self.d_vocab)

    def require_tail(self) -> None:
        """Verify the tail again if others have changed what happens outside the blocks.

        A hook on the final norm or the head acts when the tail is run. One on a module around them,
        or one that treats positions differently, does not act as it does in the model's own passes.
        """
        code = foreign_code(self.model, self._outside_blocks())
        if code == self._tail_with and not self._tail_in_doubt:
            return
        from layerleap.models.discovery.laws import tail_error  # laws check a wrapped model

        with hooks_of(self.model).lock, unedited(self.model):
            before, self._tail_with = self._tail_with, code  # the check runs the tail, too
            self._tail_in_doubt = False
            try:
                error = tail_error(self)
            except BaseException:
                self._tail_with, self._tail_in_doubt = before, True
                raise
            if error is None:
                return
            self._tail_with, self._tail_in_doubt = before, True
        if not code:
            raise ModelRefused(
                f"{self.identity.name} was verified with {in_words(before)}, and does not fit its "
                f"tail without ({error}); put it back, or load the model again"
            )
        raise ModelRefused(
            f"{self.identity.name} has {in_words(code)}, so its logits are no longer what its tail "
            f"makes of the last state ({error}); remove it, or change the states of a block "
            "instead, with a hook on the block or with ll.edits"
        )

    def _outside_blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules outside the blocks, with their paths."""
        blocks, rest = set(self.blocks), [("", self.model)]
        while rest:
            path, module = rest.pop()
            yield path, module
            for name, child in module.named_children():
                if (place := f"{path}.{name}".lstrip(".")) not in blocks:
                    rest.append((place, child))

    def apply(self, step: Step, value: Tensor) -> Tensor:
        """One step of the tail."""
        if step.kind == "module":
            module = self.model.get_submodule(step.path)
            return module(value.to(_device_of(module, value)))
        if step.kind == "scale":
            return value * step.number
        if step.kind == "cap":
            return step.number * torch.tanh(value / step.number)
        if step.kind in ACTIVATIONS:
            return ACTIVATIONS[step.kind](value)
        if step.kind == "pad":  # the head ignores the padding
            return nn.functional.pad(value, (0, int(step.number) - value.shape[-1]))
        # Where a row is one state, it was picked or averaged before.
        return pool(step, value) if self.row_kind == "sequence" else value.squeeze(1)

    @property
    def pooling(self) -> Step | None:
        """The step of the tail that makes one state of all positions; None if each has logits."""
        return next((step for step in self.tail if step.kind in POOLS), None)

    @property
    def row_kind(self) -> RowKind:
        """What the tail needs for one row of logits.

        "position"  the state of one position
        "mean"      the mean state of the pooled positions; maps are affine, so mapping the mean is
                    the same as averaging mapped states
        "sequence"  the states of all positions, because they are normed before they are averaged
        """
        step = self.pooling
        if step is None or step.kind == "pick":
            return "position"
        return "mean" if step.kind == "mean" and step is self.tail[0] else "sequence"

    def pooled(self, mask: Tensor) -> Tensor:
        """(batch, pos): True at the positions that reach the logits, by mask of real positions."""
        real, step = mask.bool(), self.pooling
        if step is None or step.kind == "join":
            return real
        places = real.cumsum(1) - 1  # counted from the first real position
        if step.kind == "mean":
            return real & (places >= step.number)
        return real & (places == (places[:, -1:] if step.number == LAST else step.number))

    def rows(self, value: Tensor, keep: Tensor) -> Tensor:
        """The rows behind kept positions: (batch, pos, width) -> (row, width).

        With `row_kind` "mean" or "sequence" each text with kept positions is one row.
        """
        keep = keep.to(value.device)
        if self.row_kind == "position":
            return value[keep]
        texts = keep.any(1)
        if self.row_kind == "sequence":
            return value[texts]
        weights = keep[texts].to(value.dtype)[..., None]
        return (value[texts] * weights).sum(1) / weights.sum(1)

    def any_row(self, h: Tensor) -> Tensor:
        """A row made of the states of one input, (1, pos, d_model), for measurements."""
        return h if self.row_kind == "sequence" else h[:, -1]

    def require_eval(self) -> None:
        """Refuse a model whose dropout is on: every pass would give other numbers."""
        for name, module in self.model.named_modules():
            if module.training and _drops(module):
                raise ModelRefused(
                    f"{self.identity.name} is in training mode, so its dropout ({name or 'model'}) "
                    "gives other values in every pass; call model.eval() on the model first"
                )

    def need_tokenizer(self) -> Any:
        """The tokenizer; `BadText` with the reason if there is none."""
        if self.tokenizer is None:
            reason = f" ({self.no_tokenizer})" if self.no_tokenizer else ""
            raise BadText(
                f"{self.identity.name} has no tokenizer{reason}; give token ids, or load it with "
                "tokenizer=..."
            )
        return self.tokenizer

    def output_name(self, index: int) -> str:
        """The token or class behind an output."""
        if self.kind.endswith("-class"):
            return str((getattr(self.model.config, "id2label", None) or {}).get(index, index))
        return str(index) if self.tokenizer is None else str(self.tokenizer.decode([index]))

    def device(self, layer: int) -> torch.device:
        """Where h[layer] lives: with the block that gives it, or for h[0] takes it."""
        return _device_of(self.block(max(1, layer)), torch.empty(0))

    def block(self, number: int) -> nn.Module:
        """The module that makes h[number], 1 to n_layers."""
        return self.model.get_submodule(self.blocks[number - 1])

    def block_modules(self) -> list[nn.Module]:
        """The blocks in order, each module once: a shared block (ALBERT) serves many layers."""
        return [self.model.get_submodule(path) for path in dict.fromkeys(self.blocks)]

    def sites(self, block: int) -> dict[str, Site]:
        """The sites of block `block` (1 to n_layers) by name; empty if they are not known."""
        check_number("block", block, 1, self.n_layers)
        anatomy = self.anatomy[block - 1]
        return {} if isinstance(anatomy, str) else anatomy.sites

    def known_anatomy(self, block: int, consequence: str) -> Anatomy:
        """The parts of block `block`, or `ModelRefused` with the reason and its consequence."""
        anatomy = self.anatomy[block - 1]
        if isinstance(anatomy, str):
            raise ModelRefused(
                f"the parts of block {block} of {self.identity.name} are not known ({anatomy}), "
                f"so {consequence}"
            )
        return anatomy

    def site_module(self, block: int, site: Site) -> nn.Module:
        """The module whose input or output is a site of block `block`."""
        return self.model.get_submodule(f"{self.blocks[block - 1]}.{site.path}")


# What wrapping discovers. Nothing in it refers to the model, so it does not keep the model alive.
DISCOVERED = ("identity", "blocks", "tail", "anatomy", "kind", "d_model", "d_vocab")
_VERIFIED: "WeakKeyDictionary[nn.Module, tuple[Any, dict[str, Any]]]" = WeakKeyDictionary()


def _state(model: PreTrainedModel) -> Any:
    """What differs if the model has to be verified again."""
    hooks = hooks_of(model)
    modules = [
        (type(module), module.training, hooks.instance_forward(module) is None)
        for module in model.modules()
    ]
    return mark(model), modules, getattr(model.config, "_attn_implementation", None)


def not_a_model(source: Any) -> str:
    """Why something cannot be wrapped; only a short text is shown, never a whole module."""
    is_short = isinstance(source, str | int | float | None)
    what = repr(source) if is_short else f"a {type(source).__name__}"
    hint = "; of a pipeline, give pipeline.model" if hasattr(source, "model") else ""
    return (
        f"a model cannot be loaded from {what:.80}; expected a bundled or hub name, a folder, a "
        f"GGUF file, or a model of transformers{hint}"
    )


def _drops(module: nn.Module) -> bool:
    """True for a dropout, and for a module that calls the function with a share of its own."""
    is_dropout = "Dropout" in type(module).__name__
    shares = [v for k, v in vars(module).items() if "drop" in k or (k == "p" and is_dropout)]
    return any(isinstance(share, float) and share > 0 for share in shares)


def _device_of(module: nn.Module, value: Tensor) -> torch.device:
    parameter = next(module.parameters(), None)
    on_meta = parameter is None or parameter.device.type == "meta"  # offloaded: its hook moves us
    return value.device if on_meta or parameter is None else parameter.device


@contextmanager
def _refusing(model: PreTrainedModel, what: str) -> Iterator[None]:
    """Turn whatever the model's own code raises on a probe into a refusal."""
    try:
        yield
    except ModelRefused:
        raise
    except Exception as error:
        raise ModelRefused(
            f"{type(model).__name__} is refused: {what} {type(error).__name__} on small random "
            f"inputs ({first_line(error)})"
        ) from error


def _discover(
    model: PreTrainedModel, blocks: str | None, tail: Sequence[str] | None, laws: Laws
) -> dict[str, Any]:
    """What one traced pass shows: the fields of a `Transformer` from `blocks` to `d_vocab`."""
    inputs = probe(model)
    with _refusing(model, "its own code raised"):
        calls, output = trace(model, inputs)
    logits = getattr(output, "logits", None)
    if logits is None:
        raise ModelRefused(
            f"{type(model).__name__} gives no logits; load it with its head, for example with "
            "AutoModelForCausalLM, AutoModelForMaskedLM or AutoModelForImageClassification"
        )
    if not torch.isfinite(logits).all():  # no two states would look alike, and every law fail
        raise ModelRefused(
            f"law 'finite' failed for {type(model).__name__}: NaN or infinite logits; check "
            "for broken weights, or a dtype that is too narrow for them"
        )
    if logits.dim() == 2 and logits.shape[-1] == 1:
        raise ModelRefused(
            f"{type(model).__name__} gives a single number, not a class; a lens compares the "
            "probabilities of at least two outputs"
        )
    chain = find_blocks(model, calls, blocks)
    first = chain[0].takes
    assert first is not None
    return {
        "blocks": tuple(call.path for call in chain),
        "tail": find_tail(model, calls, chain[-1], logits, tail),
        "anatomy": tuple(find_anatomy(call, calls) for call in chain),
        "kind": _kind(model, inputs, logits, loose=laws == "loose"),
        "d_model": first.shape[-1],
        "d_vocab": logits.shape[-1],
    }


@torch.inference_mode()
def _kind(model: PreTrainedModel, inputs: dict[str, Any], logits: Tensor, *, loose: bool) -> Kind:
    """Inferred from behaviour: does an earlier position's output depend on a later token?

    It may do so only because rows depend on their neighbours. If that is allowed (`loose`), the
    model's declaration counts: all its attention is marked as causal.
    """
    if logits.dim() == 2:
        return "image-class" if model.main_input_name == "pixel_values" else "text-class"
    # A language model's outputs are its tokens; any other outputs are classes of tokens.
    if model.get_output_embeddings() is None and logits.shape[-1] < vocabulary_size(model):
        return "token-class"
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    changed = inputs[name].clone()
    changed[:, -1] = torch.where(changed[:, -1] == changed[:, 0], changed[:, 1], changed[:, 0])
    if (changed[:, -1] == inputs[name][:, -1]).any():
        changed[:, -1] = (inputs[name][:, -1] + 1) % logits.shape[-1]
    other = model(**{**inputs, name: changed}).logits
    moved = (other.double() - logits.double()).norm(dim=-1)
    # Exactly 0 with causal attention; even an untrained bidirectional model moves by 1e-3.
    causal = [vars(part)["is_causal"] for part in model.modules() if "is_causal" in vars(part)]
    if moved[:, :-1].amax() < 1e-3 * moved[:, -1].amax() or (loose and causal and all(causal)):
        return "next-token"
    return "masked-token"
