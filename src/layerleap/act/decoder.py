"""A decoder for `generate`: exact and several tokens to a pass, or leaving early by a rule.

In: a bank of shortcuts (or none), perhaps an exit rule. Out: a callable for

    model.generate(..., custom_generate=layerleap.decoder(bank))

which honours generation config, processors, criteria, streamers, masks and seeds. `accounts` then
says of each text of the last call what was done and how exact it is.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from layerleap.act.account import Account, Exactness
from layerleap.act.adaptive import POLICIES, Policy, adapt, agreements
from layerleap.act.choose import Choice
from layerleap.act.draft_table import DraftTable
from layerleap.act.draft_tree import MOST, Drafter
from layerleap.act.look import Looks
from layerleap.act.pass_cost import PassCost, measure_passes
from layerleap.act.rules import Rule
from layerleap.act.shortlist import Shortlist
from layerleap.act.speculate import speculate, speculate_early
from layerleap.errors import BadSettings, BadText
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from layerleap.models.walk import Walk
from layerleap.models.walkable import find_axes
from layerleap.read.lens import Lens
from layerleap.stream.examples import longest_input

Drafts = Literal["table", "lookup", "early"]
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
        drafts: Sequence[Drafts] = ("table", "lookup"),
        draft_layer: int | None = None,
        most_nodes: int = MOST,
        strict: bool = False,
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
            shortlist: tokens that a rule's readings are restricted to; all when None. The token
                itself is always read with the whole head.
            drafts: where exact decoding takes its guesses from: "table" (what follows a token by
                itself, through the bank), "lookup" (what followed the same tokens earlier in the
                text), or "early" alone (what layer `draft_layer` reads, its work being shared).
            draft_layer: for "early".
            most_nodes: tokens that a pass may hold.
            strict: in dtypes narrower than float32, where passes over several tokens round
                otherwise, take one token at a time: identical, and no faster.
            compare: afterwards, hold every token against the full model (one more pass over the
                text), so that the account tells the agreement.
            transformer: the wrapped model, if there is one already; wrapping takes a second.
            cost: of passes; measured when None.
            table: of followers; made as tokens come when None.
        """
        self.bank, self.rule, self.policy = bank, rule, policy
        self.checks, self.shortlist_ids = checks, shortlist
        self.drafts, self.draft_layer, self.most_nodes = tuple(drafts), draft_layer, most_nodes
        self.strict, self.compare = strict, compare
        self.accounts: list[Account] = []
        self.writing: Account | None = None  # of the text under way
        self._cost, self._table = cost, table
        self._known: WeakKeyDictionary[PreTrainedModel, _Ready] = WeakKeyDictionary()
        self._transformer = transformer
        self._check_settings()

    def _check_settings(self) -> None:
        if self.policy not in POLICIES:
            raise BadSettings(
                f"policy {self.policy!r} is unknown; use one of {', '.join(POLICIES)}"
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
        if self.rule is not None and self.rule.name == "oracle":
            raise BadSettings("the oracle knows the answer beforehand, so it can only be replayed")

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
        _refuse(generation_config, model_kwargs, synced_gpus)
        if streamer is None:  # `generate` hands its streamer on to its own loops only
            caller = sys._getframe(1)
            name, found = caller.f_code.co_name, caller.f_locals
            streamer = found.get("streamer") if name == "generate" else None
        if streamer is not None and len(input_ids) > 1:
            raise BadSettings(f"{len(input_ids)} texts cannot be streamed at once; give one")
        prepared = self._ready(model)
        config = generation_config
        skips, cache = _padding(input_ids, model_kwargs), model_kwargs.get("past_key_values")
        texts, self.accounts = [], []
        for ids, skip in zip(input_ids.split(1), skips, strict=True):
            choice = Choice(
                ids, skip=skip, processor=logits_processor, criteria=stopping_criteria,
                sample=config.do_sample, streamer=streamer,
                keep_scores=bool(config.return_dict_in_generate and config.output_scores),
                keep_logits=bool(config.return_dict_in_generate and config.output_logits),
            )  # fmt: skip
            walk = self._write(prepared, choice, config.max_length, cache)
            texts.append((choice, walk))
        if streamer is not None:
            streamer.end()
        return _result(input_ids, texts, config, cache)

    def _ready(self, model: PreTrainedModel) -> "_Ready":
        if model not in self._known:
            self._known[model] = _Ready(self, model)
        return self._known[model]

    def _write(self, ready: "_Ready", choice: Choice, max_length: int, cache: Cache | None) -> Walk:
        transformer, n_prompt = ready.transformer, len(choice.text)
        limit = longest_input(transformer)
        if n_prompt > limit:
            raise BadText(f"the prompt has {n_prompt} tokens; this model reads at most {limit}")
        account = Account(
            transformer.n_layers, self._exactness(transformer), max_length - choice.ids.shape[1],
            None if self.rule is None else self.policy,
        )  # fmt: skip
        self.writing = account
        walk = Walk(transformer, ready.axes, across=ready.drafter.cost.across)
        if cache is not None and (held := cache.get_seq_length()):
            walk.take(choice.text[:held], cache)
            if held >= n_prompt:
                walk.cut(n_prompt - 1)  # the last token is run again: its logits are wanted
        with walk, torch.inference_mode():  # a tenth faster than without gradients alone
            self._decode(ready, walk, choice, account, limit)
        if self.compare and self.rule is not None and not choice.sample:
            found = agreements(transformer, choice)
            account.compare(sum(found), len(found))
        self.accounts.append(account)
        return walk

    def _decode(
        self, ready: "_Ready", walk: Walk, choice: Choice, account: Account, limit: int
    ) -> None:
        if self.rule is not None:
            rule = self.rule
            looks = lambda position: Looks(  # noqa: E731
                ready.lens, rule, position, shortlist=ready.shortlist,
                extra=getattr(rule, "watches", None),
            )  # fmt: skip
            adapt(
                walk, choice, looks, account, lens=ready.lens, checks=ready.checks,
                policy=self.policy,
            )  # fmt: skip
        elif "early" in self.drafts and not self._one_by_one(ready.transformer):
            assert self.draft_layer is not None
            speculate_early(
                walk, choice, ready.lens, self.draft_layer, account, most=self.most_nodes - 1,
                most_length=limit,
            )  # fmt: skip
        else:
            speculate(walk, choice, ready.drafter, account, most_length=limit)

    def _one_by_one(self, transformer: Transformer) -> bool:
        return self.strict and transformer.model.dtype not in WIDE

    def _exactness(self, transformer: Transformer) -> Exactness:
        if self.rule is not None and self.rule.name != "never":
            return "approximate"
        exact = self.strict or self.rule is not None or transformer.model.dtype in WIDE
        return "exact" if exact else "rounded"


class _Ready:
    """What is prepared once per model."""

    def __init__(self, decoder: Decoder, model: PreTrainedModel) -> None:
        known = decoder._transformer
        is_own = known is not None and known.model is model
        self.transformer = known if known is not None and is_own else Transformer.wrap(model)
        self.axes = find_axes(self.transformer)  # refuses what cannot be walked
        self.lens = Lens(self.transformer, decoder.bank)  # refuses a bank of another model
        last = self.transformer.n_layers
        wanted = range(1, last) if decoder.checks is None else sorted(set(decoder.checks))
        if wanted and not 1 <= min(wanted) <= max(wanted) < last:
            raise BadSettings(f"layers {list(wanted)} cannot be checked; wanted 1 to {last - 1}")
        if decoder.draft_layer is not None and not 1 <= decoder.draft_layer < last:
            raise BadSettings(f"draft_layer {decoder.draft_layer} is not in 1 to {last - 1}")
        is_asked = decoder.rule is not None and decoder.rule.name != "never"
        self.checks = tuple(wanted) if is_asked else ()
        short = decoder.shortlist_ids
        self.shortlist = None if short is None else Shortlist(self.transformer, short)
        self.drafter = self._drafter(decoder)

    def _drafter(self, decoder: Decoder) -> Drafter:
        is_single = decoder._one_by_one(self.transformer)
        if decoder.rule is not None or is_single or decoder.most_nodes == 1:
            return Drafter(PassCost((1,), (1.0,)), lookup=False, most=1)
        table = None
        if "table" in decoder.drafts and decoder.bank is not None:
            table = decoder._table or DraftTable(self.lens)
        return Drafter(
            decoder._cost or measure_passes(self.transformer), table,
            lookup="lookup" in decoder.drafts, branches=self.axes.branches,
            most=decoder.most_nodes,
        )  # fmt: skip


decoder = Decoder  # the name that reads well inside `generate(custom_generate=...)`

HANDLED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep",
           "cache_position", "return_dict"}  # fmt: skip


def _refuse(config: Any, model_kwargs: Mapping[str, Any], synced_gpus: bool) -> None:
    """Say plainly what cannot be honoured, instead of ignoring it."""
    if config is None:
        raise BadSettings("a decoder is called by generate: give it as custom_generate")
    if config.num_beams > 1:
        raise BadSettings(
            f"beam search ({config.num_beams} beams) keeps several texts in step, and early exits "
            "and guesses take each at its own pace; use num_beams=1"
        )
    if synced_gpus:
        raise BadSettings("several processes in step (synced_gpus) cannot leave early or guess")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise BadSettings(
            "attentions and hidden states of passes over several tokens are not kept; leave out "
            "output_attentions and output_hidden_states"
        )
    if others := [k for k, v in model_kwargs.items() if v is not None and k not in HANDLED]:
        raise BadSettings(f"argument {sorted(others)[0]!r} cannot be passed on to the model here")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and type(cache) is not DynamicCache:
        raise BadSettings(
            f"a {type(cache).__name__} cannot be taken back token by token and layer by layer; "
            "leave out cache_implementation, or hand over a DynamicCache"
        )


def _padding(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[int]:
    """How many tokens at the beginning of each text are padding."""
    if input_ids.shape[1] == 0:
        raise BadText("the prompt is empty; at least one token was wanted")
    mask, places = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
    kept = torch.ones_like(input_ids) if mask is None else mask[:, -input_ids.shape[1] :]
    found = []
    for row, is_kept in enumerate(kept.bool()):
        n = int(is_kept.sum())
        if not n:
            raise BadText("a prompt is nothing but padding; at least one token was wanted")
        if not is_kept[-n:].all():
            raise BadSettings(
                "the attention mask has gaps, or padding on the right; pad on the left"
            )
        if places is not None:
            given = places[row if len(places) > 1 else 0][-n:]
            if not torch.equal(given.cpu(), torch.arange(n)[-len(given) :]):
                raise BadSettings("position_ids other than 0, 1, 2, ... cannot be honoured here")
        found.append(input_ids.shape[1] - n)
    return found


def _plain(kept: list[Tensor] | None) -> tuple[Tensor, ...] | None:
    """Out of inference mode, so that they can be used like any others."""
    return None if kept is None else tuple(value.clone() for value in kept)


def _result(
    input_ids: Tensor, texts: Sequence[tuple[Choice, Walk]], config: Any, cache: Cache | None
) -> Tensor | GenerateDecoderOnlyOutput:
    """What `generate` gives: all texts, padded on the right to the longest."""
    new = [choice.chosen for choice, _ in texts]
    longest = max(len(chosen) for chosen in new)
    pad = config._pad_token_tensor
    fill = int(pad) if pad is not None else 0
    tails = [chosen + [fill] * (longest - len(chosen)) for chosen in new]
    sequences = torch.cat([input_ids, torch.tensor(tails, device=input_ids.device)], 1)
    is_wanted = config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    if cache is not None and len(texts) == 1 and is_wanted:
        texts[0][1].cache.give(cache)
    if not config.return_dict_in_generate:
        return sequences
    if len(texts) > 1 and (config.output_scores or config.output_logits):
        raise BadSettings("scores of several texts at once are not kept; give one text")
    choice = texts[0][0]
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_plain(choice.scores),
        logits=_plain(choice.logits),
        past_key_values=cache if len(texts) == 1 else None,
    )
