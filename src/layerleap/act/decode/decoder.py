"""A decoder for `generate`: exact and several tokens to a pass, or leaving early by a rule.

In: a bank of shortcuts (or none), perhaps an exit rule. Out: a callable for

    model.generate(..., custom_generate=layerleap.decoder(bank))

which honours generation config, processors, criteria, streamers, masks and seeds. `accounts` then
says of each text of the last call what was done and how exact it is.
"""

import sys
from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from layerleap.act.decode.account import Account, Exactness
from layerleap.act.decode.batched import groups, share
from layerleap.act.decode.draft_table import DraftTable
from layerleap.act.decode.draft_tree import MOST, Drafter
from layerleap.act.decode.early import POLICIES, Policy, adapt, agreements
from layerleap.act.decode.live import LiveChecks
from layerleap.act.decode.pass_cost import PassCost, measure_passes
from layerleap.act.decode.request import (
    check,
    check_positions,
    check_rows,
    ends,
    is_placed,
    padding,
    result,
)
from layerleap.act.decode.sampling import TokenChooser
from layerleap.act.decode.shortlist import Shortlist
from layerleap.act.decode.speculative import begin, speculate, speculate_early
from layerleap.act.exits.rules import Rule
from layerleap.errors import BadSettings, BadText
from layerleap.maps.bank import ShortcutBank
from layerleap.models.cursor.batch import BatchCursor
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.cursor.packed import Packed
from layerleap.models.cursor.verify import find_axes
from layerleap.models.discovery.probe import vocabulary_size
from layerleap.models.hooks.edit import unedited
from layerleap.models.transformer import Transformer
from layerleap.read.lens import Lens
from layerleap.read.probes.task import TaskProbe
from layerleap.stream.examples import longest_input

Drafts = Literal["table", "lookup", "early"]
Head = Literal["whole", "shortlist"]
WIDE = (torch.float32, torch.float64)  # in which passes of several tokens round alike enough


class Decoder:
    """What `decoder` returns."""

    def __init__(
        self,
        bank: ShortcutBank | None = None,
        *,
        rule: Rule | None = None,
        checks: Collection[int] | None = None,
        policy: Policy = "recompute",
        shortlist: Collection[int] | None = None,
        head: Head = "whole",
        drafts: Sequence[Drafts] = ("table", "lookup"),
        draft_layer: int | None = None,
        most_nodes: int = MOST,
        strict: bool = False,
        packed: bool = True,
        compare: bool = False,
        transformer: Transformer | None = None,
        cost: PassCost | None = None,
        table: DraftTable | None = None,
    ) -> None:
        """Decode exactly, or by a rule if one is given.

        Args:
            bank: shortcuts of the model that will be decoded; None reads states as they are, and
                drafts then come from the text alone.
            rule: when a token has been carried far enough; None decodes exactly.
            checks: layers at which the rule is asked; all below the last when None.
            policy: what is done about layers that a token skips: recompute, propagate, shortcut.
            shortlist: tokens that a rule's readings are restricted to; all when None.
            head: what a token that leaves early is read with: the "whole" head, or the "shortlist"
                alone, which in a small model of many tokens saves more than the layers do. A
                token at full depth is always read with the whole head, and so is one that could
                be none of the list. The tokens that end a text are always on the list.
            drafts: where exact decoding takes its guesses from: "table" (what follows a token by
                itself, through the bank), "lookup" (what followed the same tokens earlier in the
                text), or "early" alone (what layer `draft_layer` reads, its work being shared).
            draft_layer: for "early".
            most_nodes: tokens that a pass may hold, those of several texts together.
            strict: in dtypes narrower than float32, where passes over several tokens round
                otherwise, take one token at a time: identical, and no faster.
            packed: where it is quicker, hold a second copy of the weights, laid out for passes
                over a few tokens (float32 on CPUs, if memory allows).
            compare: afterwards, hold every token against the full model (one more pass over the
                text), so that the account tells the agreement.
            transformer: the wrapped model, if there is one already; wrapping takes a second.
            cost: of passes; measured when None.
            table: of followers; made as tokens come when None.
        """
        self.bank, self.rule, self.policy = bank, rule, policy
        self.checks, self.shortlist_ids, self.head = checks, shortlist, head
        self.drafts, self.draft_layer, self.most_nodes = tuple(drafts), draft_layer, most_nodes
        self.strict, self.packed, self.compare = strict, packed, compare
        self.accounts: list[Account] = []
        self.writing: Account | None = None  # of the text under way
        self._cost, self._table = cost, table
        self._prepared: _Ready | None = None
        self._transformer = transformer
        self._check_settings()

    def _check_settings(self) -> None:
        if self.bank is not None and not isinstance(self.bank, ShortcutBank):
            raise BadSettings(
                f"the bank is of type {type(self.bank).__name__}; ShortcutBank.from_pretrained "
                "makes one of a folder or a name"
            )
        if self.policy not in POLICIES:
            raise BadSettings(
                f"policy {self.policy!r} is unknown; there are: {', '.join(POLICIES)}"
            )
        if unknown := set(self.drafts) - {"table", "lookup", "early"}:
            raise BadSettings(
                f"no drafts are called {sorted(unknown)[0]!r}; there are: table, lookup, early"
            )
        if "early" in self.drafts and (len(self.drafts) > 1 or self.draft_layer is None):
            raise BadSettings("drafts 'early' stand alone, and need a draft_layer")
        if self.policy == "shortcut" and (self.bank is None or self.bank.is_final_only):
            raise BadSettings(
                "policy 'shortcut' needs maps between all pairs of layers: fit the bank with "
                "pairs='all'"
            )
        if self.most_nodes < 1:
            raise BadSettings(f"most_nodes {self.most_nodes}; a pass holds at least one token")
        self._check_rule()

    def _check_rule(self) -> None:
        if self.rule is not None and not hasattr(self.rule, "stops"):
            raise BadSettings(
                f"the rule is of type {type(self.rule).__name__}; an exit rule "
                "was wanted, such as Similarity(0.98)"
            )
        if self.head not in ("whole", "shortlist"):
            raise BadSettings(f"head {self.head!r} is unknown; there are: whole, shortlist")
        if self.head == "shortlist" and (self.shortlist_ids is None or self.rule is None):
            raise BadSettings(
                "head 'shortlist' needs a shortlist (ids of likely tokens) and a rule: it is for "
                "tokens that leave early"
            )
        if self.rule is not None and self.rule.name == "oracle":
            raise BadSettings("the oracle knows the answer beforehand, so it can only be replayed")
        is_task = self.rule is not None and self.rule.name == "task"
        if is_task and not getattr(self.rule, "watches", None):
            raise BadSettings("rule 'task' asks a probe; TaskProbe.rule gives one that has it")

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Called by `generate`, once it has prepared everything."""
        ready = self._ready(model)  # first: it says best why a model cannot be decoded at all
        caller = sys._getframe(1)  # `generate` hands these two on to its own loops only
        dropped = caller.f_locals if caller.f_code.co_name == "generate" else {}
        streamer = streamer if streamer is not None else dropped.get("streamer")
        check(generation_config, model_kwargs, synced_gpus or bool(dropped.get("synced_gpus")))
        skips = padding(input_ids, generation_config, model_kwargs)
        check_rows(skips, generation_config, model_kwargs, streamer, logits_processor,
                   stopping_criteria)  # fmt: skip
        config, cache = generation_config, model_kwargs.get("past_key_values")
        self.accounts, choices, walk = [], [], None
        for ids, skip in zip(input_ids.split(1), skips, strict=True):
            choice = TokenChooser(
                # Copies, for some remember what they have seen, and a text is as if alone.
                ids, skip=skip, processor=deepcopy(logits_processor),
                criteria=stopping_criteria if len(skips) == 1 else deepcopy(stopping_criteria),
                sample=config.do_sample, streamer=streamer,
                keep_scores=bool(config.return_dict_in_generate and config.output_scores),
                keep_logits=bool(config.return_dict_in_generate and config.output_logits),
            )  # fmt: skip
            choices.append(choice)
        most = self.most_nodes if self._may_share(ready, cache) else 1
        first = 0  # number of the group's first text in the batch, by which edits know it
        for group in groups(choices, config.max_length, most=most):
            if len(group) > 1:
                self._write_all(ready, group, config.max_length, first)
            else:
                walk = self._write(
                    ready, group[0], config.max_length, cache, logits_processor, first
                )
            first += len(group)
        if streamer is not None:
            streamer.end()
        return result(input_ids, choices, walk, config, cache)

    def _ready(self, model: PreTrainedModel) -> "_Ready":
        if self._prepared is None or self._prepared.transformer.model is not model:
            with unedited(model):  # what a model can do is measured without edits
                self._prepared = _Ready(self, model)
        return self._prepared

    def _begin(self, ready: "_Ready", choice: TokenChooser, max_length: int) -> Account:
        """The account of a text; refuses one that is too long."""
        transformer, n_prompt = ready.transformer, len(choice.text)
        limit = longest_input(transformer)
        if n_prompt > limit:
            raise BadText(f"the prompt has {n_prompt} tokens; this model reads at most {limit}")
        check_positions(transformer.model.config, n_prompt, max_length)
        return Account(
            transformer.n_layers, self._exactness(transformer), max_length - choice.ids.shape[1],
            None if self.rule is None else self.policy,
        )  # fmt: skip

    def _may_share(self, ready: "_Ready", cache: Cache | None) -> bool:
        """True if texts can share their passes: exactly, and from their beginnings."""
        is_begun = cache is not None and bool(cache.get_seq_length())
        is_other = self.rule is not None or "early" in self.drafts
        if is_begun or is_other or self._one_by_one(ready.transformer):
            return False
        return ready.axes.batches and not is_placed(ready.transformer.model.config)

    def _write_all(
        self, ready: "_Ready", choices: Sequence[TokenChooser], max_length: int, first: int
    ) -> None:
        """Several texts, whose prompts are read one by one."""
        transformer = ready.transformer
        both = BatchCursor(transformer, ready.axes, packed=ready.packed)
        drafters, accounts = [ready.drafter.twin() for _ in choices], list[Account]()
        with torch.inference_mode():
            for n, (choice, drafter) in enumerate(zip(choices, drafters, strict=True)):
                accounts.append(self._begin(ready, choice, max_length))
                with Cursor(
                    transformer, ready.axes, packed=ready.packed, text=first + n,
                    prompt=len(choice.text),
                ) as walk:  # fmt: skip
                    begin(walk, choice, drafter, accounts[n])
                if not choice.is_finished:
                    both.join(n, walk)
            for account in accounts:
                account.share(len(choices))
            with both:
                share(both, choices, drafters, accounts, most_length=longest_input(transformer))
        self.accounts += accounts

    def _write(
        self,
        ready: "_Ready",
        choice: TokenChooser,
        max_length: int,
        cache: Cache | None,
        processor: Any,
        number: int,
    ) -> Cursor:
        transformer, n_prompt = ready.transformer, len(choice.text)
        self.writing = account = self._begin(ready, choice, max_length)
        walk = Cursor(
            transformer, ready.axes, packed=ready.packed, text=number, prompt=n_prompt
        )  # fmt: skip
        if cache is not None and (held := cache.get_seq_length()):
            walk.take(choice.text[:held], cache)
            if held >= n_prompt:
                walk.cut(n_prompt - 1)  # the last token is run again: its logits are wanted
        with walk, torch.inference_mode():  # a tenth faster than without gradients alone
            self._decode(ready, walk, choice, account, longest_input(transformer))
        if self.compare and self.rule is not None and not choice.sample:
            found = agreements(walk, choice, deepcopy(processor))
            account.compare(sum(found), len(found))
        self.accounts.append(account)
        return walk

    def _decode(
        self, ready: "_Ready", walk: Cursor, choice: TokenChooser, account: Account, limit: int
    ) -> None:
        if self.rule is not None:
            rule = self.rule
            looks = lambda position: LiveChecks(  # noqa: E731
                ready.lens, rule, position, shortlist=ready.shortlist,
                extra=getattr(rule, "watches", None),
            )  # fmt: skip
            adapt(
                walk, choice, looks, account, lens=ready.lens, checks=ready.checks,
                policy=self.policy, shortlist=ready.shortlist if self.head != "whole" else None,
            )  # fmt: skip
        elif "early" in self.drafts and not self._one_by_one(ready.transformer):
            assert self.draft_layer is not None
            speculate_early(
                walk, choice, ready.lens, self.draft_layer, account, most=self.most_nodes - 1,
                most_length=limit,
            )  # fmt: skip
        else:
            is_single = self._one_by_one(ready.transformer)
            drafter = _no_guesses() if is_single else ready.drafter
            speculate(walk, choice, drafter, account, most_length=limit)

    def _one_by_one(self, transformer: Transformer) -> bool:
        """Asked at every call: a model may be cast, and autocast be entered, in between."""
        return self.strict and not _is_wide(transformer)

    def _exactness(self, transformer: Transformer) -> Exactness:
        if self.rule is not None and self.rule.name != "never":
            return "approximate"
        exact = self.strict or self.rule is not None or _is_wide(transformer)
        return "exact" if exact else "rounded"


def _is_wide(transformer: Transformer) -> bool:
    """True if products are made so precisely that passes of any size choose the same tokens."""
    model = transformer.model
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return dtypes <= set(WIDE) and not torch.is_autocast_enabled(model.device.type)


def _no_guesses() -> Drafter:
    """One token to a pass."""
    return Drafter(PassCost((1,), (1.0,)), lookup=False, most=1)


class _Ready:
    """What is prepared once per model."""

    def __init__(self, decoder: Decoder, model: PreTrainedModel) -> None:
        known = decoder._transformer
        is_own = known is not None and known.model is model
        self.transformer = known if known is not None and is_own else Transformer.wrap(model)
        self.axes = find_axes(self.transformer)  # refuses what cannot be walked
        self.lens = Lens(self.transformer, decoder.bank)  # refuses a bank of another model
        probe = getattr(decoder.rule, "probe", None)
        if isinstance(probe, TaskProbe):
            probe.check_model(self.transformer)
        last = self.transformer.n_layers
        wanted = range(1, last) if decoder.checks is None else sorted(set(decoder.checks))
        if wanted and not 1 <= min(wanted) <= max(wanted) < last:
            raise BadSettings(f"layers {list(wanted)} cannot be checked; wanted 1 to {last - 1}")
        if decoder.draft_layer is not None and not 1 <= decoder.draft_layer < last:
            raise BadSettings(f"draft_layer {decoder.draft_layer} is not in 1 to {last - 1}")
        is_asked = decoder.rule is not None and decoder.rule.name != "never"
        self.checks = tuple(wanted) if is_asked else ()
        short = decoder.shortlist_ids
        if short is not None:
            short = {*short, *ends(model)}
        self.shortlist = None if short is None else Shortlist(self.transformer, short)
        self.packed = Packed.of(model) if decoder.packed else None
        self.drafter = self._drafter(decoder)

    def _drafter(self, decoder: Decoder) -> Drafter:
        is_single = decoder._one_by_one(self.transformer)
        if decoder.rule is not None or is_single or decoder.most_nodes == 1:
            return _no_guesses()
        table = None
        if "table" in decoder.drafts and decoder.bank is not None:
            table = decoder._table or DraftTable(self.lens)
        cost = decoder._cost or measure_passes(self.transformer, self.packed)
        return Drafter(
            cost, table,
            lookup="lookup" in decoder.drafts, branches=self.axes.branches,
            most=decoder.most_nodes, d_vocab=vocabulary_size(self.transformer.model),
        )  # fmt: skip


decoder = Decoder  # the name that reads well inside `generate(custom_generate=...)`
