"""What a decoder prepares for one model: at first only what is free, the rest once it pays.

In: the settings of a decoder, and a model. Out: cursors, and a drafter that knows what passes cost.

Packing the weights, verifying them and measuring passes takes as long as some dozens of tokens. So
a text begins as `generate` would write it, and all that is done once enough tokens have come and
more may follow. What was found out about a model serves all decoders of the process, and the cost
of passes later processes too. When it happens depends on numbers of tokens, never on a clock.
"""

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from layerleap.act.decode import request
from layerleap.act.decode.decoding_stats import Exactness, Preparation
from layerleap.act.decode.draft_table import DraftTable
from layerleap.act.decode.draft_tree import Drafter
from layerleap.act.decode.pass_cost import PassCost, cost_of_passes
from layerleap.act.decode.shortlist import Shortlist
from layerleap.errors import BadSettings
from layerleap.lens.lens import Lens
from layerleap.lens.probes.task import TaskProbe
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.cursor.packed import Packed
from layerleap.models.cursor.verify import find_axes, keeps_bits
from layerleap.models.discovery.probe import vocabulary_size
from layerleap.models.hooks.edit import unedited
from layerleap.models.hooks.forward import hooks_of, once
from layerleap.models.transformer import Transformer

if TYPE_CHECKING:
    from layerleap.act.decode.decoder import Decoder

TIE_STEPS = 1.0  # two logits next to each other, or equal
WIDE = (torch.float32, torch.float64)  # passes of any size differ in the last digits only
SOON = 16  # tokens before anything is prepared: many texts end before
WORTH = 64  # tokens, written or allowed to follow, that are worth the preparation
# Passes over weights that are not packed, with one token as the unit: a cautious guess.
FIRST_COST = PassCost((1, 2, 3, 4, 8, 16, 32), (1.0, 1.15, 1.3, 1.6, 2.2, 2.8, 4.0))

# By model: tokens written in this process, and whether passes keep their bits.
_WRITTEN: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()
_BITS: "WeakKeyDictionary[nn.Module, dict[Any, bool]]" = WeakKeyDictionary()


class Prepared:
    """A decoder's settings, checked against a model, and what was prepared so far."""

    def __init__(self, decoder: "Decoder", model: PreTrainedModel) -> None:
        wrapped = decoder._transformer
        is_wrapped = wrapped is not None and wrapped.model is model
        self.transformer = wrapped if wrapped is not None and is_wrapped else Transformer.of(model)
        just_marked = nullcontext() if is_wrapped else self.transformer.just_marked()
        self.axes = find_axes(self.transformer)  # refuses models that cannot run over a cursor
        with just_marked:  # refuses a bank of another model, unless that was allowed
            self.lens = Lens(self.transformer, decoder.bank, other_model=decoder._other_model)
        decoder.bank = self.lens.bank if decoder._other_model else decoder.bank
        self._identity = self.transformer.identity
        probe = getattr(decoder.rule, "probe", None)
        if isinstance(probe, TaskProbe):
            probe.check_model(self.transformer)
        last = self.transformer.n_layers
        layers = range(1, last) if decoder.checks is None else decoder.checks
        if not all(isinstance(layer, int) and 1 <= layer < last for layer in layers):
            raise BadSettings(f"cannot check layers {list(layers)}; expected 1 to {last - 1}")
        if decoder.draft_layer is not None and not 1 <= decoder.draft_layer < last:
            raise BadSettings(
                f"draft_layer {decoder.draft_layer} is out of range; expected 1 to {last - 1}"
            )
        has_checks = decoder.rule is not None and decoder.rule.name != "never"
        self.checks = tuple(sorted(set(layers))) if has_checks else ()
        ids, ends = decoder.shortlist_ids, request.end_tokens(model)
        self.shortlist = None if ids is None else Shortlist(self.transformer, {*ids, *ends})
        self.decoder = decoder
        self.dtypes = self._dtypes()
        self.is_equipped = False
        self._cost = decoder._cost or FIRST_COST

    def is_outdated(self, model: PreTrainedModel) -> bool:
        """True for another model, or if its weights were changed since; checked at every call."""
        self.transformer.refresh()
        self.dtypes = self._dtypes()
        return self.transformer.model is not model or self.transformer.identity != self._identity

    def _dtypes(self) -> set[torch.dtype]:
        """Of the parameters; under autocast none, as products are computed in others."""
        model = self.transformer.model
        if torch.is_autocast_enabled(model.device.type):
            return {torch.bool}
        return {p.dtype for p in model.parameters() if p.is_floating_point()}

    def cursor(self, text: int, n_prompt: int) -> Cursor:
        """A new cursor over one text of a batch."""
        how: Any = {"packed": self.packed, "rowwise": self.keeps_bits}
        return Cursor(self.transformer, self.axes, text=text, prompt=n_prompt, **how)

    def is_due(self, tokens: int, room: int, soon: int = SOON) -> bool:
        """True if the rest should be prepared now, before up to `room` more tokens.

        `tokens` were written since the call began; `soon` tokens of this process come first.
        """
        if self.is_equipped or self.decoder._cost is not None:  # nothing has to be measured
            return not self.is_equipped
        written = _WRITTEN.get(self.transformer.model, 0) + tokens
        return written >= soon and written + room >= WORTH

    def count(self, tokens: int) -> None:
        """Tokens of a finished text: the next one may be prepared for at once."""
        model = self.transformer.model
        _WRITTEN[model] = _WRITTEN.get(model, 0) + tokens

    def equip(self, after: int = 0) -> Preparation:
        """Pack, verify and measure: each once per model and process; after this many tokens."""
        started, decoder, source = time.perf_counter(), self.decoder, None
        model = self.transformer.model
        # What a model can do is measured without edits, and serves later calls too.
        with hooks_of(model).lock, unedited(model), torch.inference_mode(False), torch.no_grad():
            self.is_equipped = True
            packed, rowwise = self.packed, self.keeps_bits
            if decoder._cost is not None:
                source = "given"
            elif self._draws and not self.is_one_by_one:
                self._cost, source = cost_of_passes(self.transformer, packed, rowwise=rowwise)
            if self._draws and "table" in decoder.drafts and decoder.bank is not None:
                self.drafter.table = DraftTable(self.lens)
            self.tune()
        layout = None if packed is None else packed.layout.name
        return Preparation(after, time.perf_counter() - started, layout, source)

    # Properties, since the model may be cast between two calls.

    @property
    def packed(self) -> Packed | None:
        """The packed weights, if the decoder uses them and they are prepared and faster."""
        # They round differently, and `strict` asks for what `generate` computes.
        if not self.is_equipped or not self.decoder.packed or self.is_one_by_one:
            return None
        return Packed.of(self.transformer.model)

    @property
    def keeps_bits(self) -> bool:
        """True if, in bfloat16, passes over several tokens have the bits of one-token ones."""
        if not self._wants_bits or not self.is_equipped:
            return False
        model = self.transformer.model
        packed = Packed.of(model) if self.decoder.packed else None
        known = _BITS.setdefault(model, {})
        key = self.transformer.identity, packed is not None and packed.layout.name
        if key not in known:
            known[key] = keeps_bits(self.transformer, self.axes, packed)
        return known[key]

    @property
    def _wants_bits(self) -> bool:
        is_bf16 = self.dtypes == {torch.bfloat16}
        return self.decoder.strict is not False and is_bf16 and self.decoder.verifies_drafts

    @property
    def is_wide(self) -> bool:
        """True if passes of any size choose the same tokens, but for ties in the last digits."""
        return self.dtypes <= set(WIDE)

    @property
    def is_one_by_one(self) -> bool:
        """True if no pass over several tokens is allowed, at least not yet."""
        if self.is_wide or self.keeps_bits:
            return False
        return bool(self.decoder.strict) or (self._wants_bits and not self.is_equipped)

    @property
    def tie_steps(self) -> float:
        """Logits this many rounding steps apart are decided by a pass of their own; 0 for none."""
        return 0.0 if self.is_wide or self.keeps_bits else TIE_STEPS

    @property
    def exactness(self) -> Exactness:
        """What holds for a text that is written now."""
        rule = self.decoder.rule
        if rule is not None and rule.name != "never":
            return "approximate"
        is_exact = rule is not None or self.is_wide or self.is_one_by_one
        return "exact" if is_exact or self.keeps_bits else "rounded"

    @property
    def _draws(self) -> bool:
        """True if drafts are drawn."""
        return self.decoder.verifies_drafts and self.decoder.max_nodes > 1

    @once
    def drafter(self) -> Drafter:
        """What proposes drafts; none if tokens are decoded one by one."""
        return Drafter(
            self._cost,
            lookup=self._draws and "lookup" in self.decoder.drafts,
            branches=self.axes.branches,
            most=self.decoder.max_nodes,
            d_vocab=vocabulary_size(self.transformer.model),
        )

    def tune(self) -> None:
        """Let the drafter draw what pays in passes as they are now."""
        most = self.decoder.max_nodes if self._draws and not self.is_one_by_one else 1
        if (self._cost, most) != (self.drafter.cost, self.drafter.most):
            self.drafter.use(self._cost, most)
