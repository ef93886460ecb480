"""A decoder for `generate`: exact speculative decoding, or early exit by a rule.

In: a bank of shortcuts (or none), and optionally an exit rule or plan. Out: a callable for

    model.generate(..., custom_generate=layerleap.decoder(bank))

which supports generation config, processors, criteria, streamers, masks and seeds. Afterwards
`stats` has one `DecodingStats` for each text of the last call.
"""

import sys
import warnings
from collections.abc import Collection, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList

from layerleap.act.decode import request
from layerleap.act.decode.decoding_stats import DecodingStats
from layerleap.act.decode.draft_tree import MOST
from layerleap.act.decode.early import decode_early, full_choices
from layerleap.act.decode.pass_cost import PassCost
from layerleap.act.decode.prepared import Prepared
from layerleap.act.decode.sampling import TokenChooser
from layerleap.act.decode.speculative import (
    begin,
    groups,
    speculate,
    speculate_batch,
    speculate_early,
)
from layerleap.act.exits.rules import ExitPlan, Rule
from layerleap.act.spelling import Policy
from layerleap.errors import BadSettings, BadText, HookedModelWarning, check_choice
from layerleap.maps.bank import ShortcutBank
from layerleap.models.cursor.batch import BatchCursor
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.hooks.edit import unedited
from layerleap.models.hooks.foreign import Foreign, foreign_code, in_words
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import longest_input

Drafts = Literal["table", "lookup", "early"]
Head = Literal["whole", "shortlist"]


class Decoder:
    """A way of decoding, to pass to transformers' `generate` as `custom_generate`.

        exact = ll.decoder(bank)
        model.model.generate(ids, max_new_tokens=20, custom_generate=exact)
        print(exact.stats[0])

    Without a rule decoding is exact and speculative; with one it exits early. If somebody has put
    hooks on the model, transformers' own loop decodes, with a warning.
    """

    def __init__(
        self,
        bank: ShortcutBank | str | Path | None = None,
        *,
        rule: Rule | None = None,
        checks: Collection[int] | None = None,
        plan: ExitPlan | str | Path | None = None,
        policy: Policy = "recompute",
        shortlist: Collection[int] | None = None,
        head: Head = "whole",
        drafts: Sequence[Drafts] = ("table", "lookup"),
        draft_layer: int | None = None,
        max_nodes: int = MOST,
        strict: bool | None = None,
        packed: bool = True,
        compare: bool = False,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        transformer: Transformer | None = None,
        cost: PassCost | None = None,
        other_model: bool = False,
    ) -> None:
        """Decode exactly, or exit early if there is a rule or a plan.

        Args:
            bank: shortcuts of the model that will be decoded, or their folder or hub name. Without
                a bank, states are read with the logit lens and drafts come from the text alone.
            rule: when a token may exit; None decodes exactly.
            checks: layers at which the rule is checked; None is all layers below the last.
            plan: an exit plan or its file: rule, checks and bank in one. A `bank` passed as well
                replaces the plan's own, for instance if that has moved.
            policy: how keys and values of skipped layers are made: recompute, propagate, shortcut.
            shortlist: tokens that the rule's readings are restricted to; None is all tokens.
            head: what reads a token that exits early: the "whole" head, or the "shortlist" alone,
                which in a small model with a large vocabulary saves more than the layers do. A
                token at full depth is always read with the whole head, and so is one for which
                processors rule out the whole list. The end-of-text tokens are always on the list.
            drafts: where exact decoding takes its drafts from: "table" (what follows a token,
                through the bank), "lookup" (what followed the same tokens earlier in the text), or
                "early" alone (what `draft_layer` predicts; its computation is reused).
            draft_layer: the layer for "early" drafts.
            max_nodes: maximum number of tokens per pass, for all texts together.
            strict: in dtypes narrower than float32, passes over several tokens round differently
                from those of `generate`, unless they are made to keep its bits, which costs some
                speed and has to be verified (bfloat16 on a CPU). None keeps the bits where that
                works, True decodes one token per pass elsewhere, and False does not keep them.
            packed: hold a second copy of the weights, packed for passes over a few tokens, where
                that is faster (float32 on CPUs, if memory allows).
            compare: after an early-exit run, compare every token with the full model (one more
                pass over the text), so that the stats include the agreement, and the first token
                that departs from the text that the full model would write.
            stop_strings: stop after the token that completes one of these; `generate` cannot pass
                on its own option of this name, because it keeps the tokenizer to itself.
            tokenizer: reads the stop strings; by default that of `transformer`.
            transformer: the wrapped model, if there already is one; wrapping takes a second.
            cost: cost of passes; measured when None.
            other_model: allow a bank of another model of the same class and width, with a warning.
                Exact decoding stays exact: drafts are verified by the model itself.
        """
        if plan is not None:
            plan = plan if isinstance(plan, ExitPlan) else ExitPlan.load(plan)
            if rule is not None:
                raise BadSettings("a rule and a plan were passed; a plan has its own rule")
            if plan.rule is None:
                raise BadSettings(
                    "this plan is to never exit, as no rule passed; decode exactly, without a plan"
                )
            rule, checks = plan.rule, plan.layers if checks is None else checks
            bank = None if plan.bank is None else plan.bank if bank is None else bank
        self.bank = ShortcutBank.from_pretrained(bank) if isinstance(bank, str | Path) else bank
        self.rule, self.policy = rule, policy
        self.checks, self.shortlist_ids, self.head = checks, shortlist, head
        self.drafts, self.draft_layer, self.max_nodes = tuple(drafts), draft_layer, max_nodes
        self.strict, self.packed, self.compare = strict, packed, compare
        self.stats: list[DecodingStats] = []
        self.current: DecodingStats | None = None  # of the text that is being generated
        self._cost, self._other_model = cost, other_model
        self._has_warned = False
        self._prepared: Prepared | None = None
        self._transformer = transformer
        self._stops: Sequence[Any] = ()
        if stop_strings is not None:
            if tokenizer is None:
                tokenizer = getattr(transformer, "tokenizer", None)
            self._stops = request.stop_criteria(tokenizer, stop_strings)
        self._check_settings()
        self._check_rule()

    @property
    def verifies_drafts(self) -> bool:
        """True if drafts come from the table or the text, and one pass verifies several."""
        return self.rule is None and "early" not in self.drafts

    def _check_settings(self) -> None:
        if self.bank is not None and not isinstance(self.bank, ShortcutBank):
            raise BadSettings(
                f"the bank has type {type(self.bank).__name__}; expected a ShortcutBank, or "
                "the folder or hub name of one"
            )
        check_choice(self.policy, Policy, "policy")
        for source in self.drafts:
            check_choice(source, Drafts, "a source of drafts")
        if "early" in self.drafts and (len(self.drafts) > 1 or self.draft_layer is None):
            raise BadSettings(
                "drafts 'early' need a draft_layer, and cannot be combined with others"
            )
        if self.policy == "shortcut" and (self.bank is None or self.bank.is_final_only):
            raise BadSettings(
                "policy 'shortcut' needs maps between all pairs of layers; fit the bank with "
                "pairs='all'"
            )
        if self.max_nodes < 1:
            raise BadSettings(f"max_nodes {self.max_nodes} is too small; expected at least 1")

    def _check_rule(self) -> None:
        check_choice(self.head, Head, "head")
        if self.head == "shortlist" and (self.shortlist_ids is None or self.rule is None):
            raise BadSettings(
                "head 'shortlist' reads tokens that exit early; pass a rule and a shortlist too"
            )
        if self.rule is None:
            return
        if not hasattr(self.rule, "stops"):
            raise BadSettings(
                f"the rule has type {type(self.rule).__name__}; expected an exit rule, such as "
                "ll.exits.Similarity(0.98)"
            )
        if self.rule.name == "oracle":
            raise BadSettings(
                "the oracle has to know the answer, so it cannot run live; replay it instead"
            )
        if self.rule.name == "task" and not getattr(self.rule, "live_extra", None):
            raise BadSettings("rule 'task' needs its probe to run live; get it from TaskProbe.rule")

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        stream_to: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode; `generate` calls this once it has prepared everything.

        `generate` keeps its argument `streamer` to itself when the decoding loop is not its own, so
        a streamer is passed as `generate(..., stream_to=streamer)`.
        """
        hooked = foreign_code(model)  # before a pass is made, which hooks might count
        # Then: it has the best error if a model is not supported.
        ready = None if hooked else self._prepare(model)
        request.refuse_dropped(sys._getframe(1))
        request.check_options(generation_config, model_kwargs)
        skips = request.padding(input_ids, generation_config, model_kwargs)
        request.check_batch(
            skips, generation_config, model_kwargs, stream_to, logits_processor, stopping_criteria
        )
        stopping_criteria = StoppingCriteriaList([*(stopping_criteria or ()), *self._stops])
        if stream_to is not None:
            stream_to.put(input_ids.cpu())
        if ready is None:
            return self._leave_to_transformers(
                model,
                input_ids,
                hooked,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=stream_to,
                **model_kwargs,
            )
        config, cache = generation_config, model_kwargs.get("past_key_values")
        self.stats, cursor = [], None
        returns_dict = bool(config.return_dict_in_generate)
        choosers = [
            TokenChooser(
                ids,
                # Copies: some have a memory, and each text is decoded as if it were alone.
                deepcopy(logits_processor),
                stopping_criteria if len(skips) == 1 else deepcopy(stopping_criteria),
                skip,
                config.do_sample,
                stream_to,
                [] if returns_dict and config.output_scores else None,
                [] if returns_dict and config.output_logits else None,
            )
            for ids, skip in zip(input_ids.split(1), skips, strict=True)
        ]
        preparation = None
        if len(choosers) > 1:  # how texts are decoded together depends on it
            all_stats = [self._new_stats(ready, one, config.max_length) for one in choosers]
            if ready.is_due(0, sum(stats.max_tokens for stats in all_stats), soon=0):
                preparation = ready.equip()
        most = self.max_nodes if self._can_share_passes(ready, cache) else 1
        first = 0  # number of the group's first text in the batch, by which edits know it
        for group in groups(choosers, config.max_length, most=most):
            if len(group) > 1:
                self._write_batch(ready, group, config.max_length, first)
            else:
                cursor = self._write(
                    ready, group[0], config.max_length, cache, logits_processor, first
                )
            first += len(group)
        self.stats[0].preparation = preparation or self.stats[0].preparation
        if stream_to is not None:
            stream_to.end()
        return request.result(input_ids, choosers, cursor, config, cache)

    def _leave_to_transformers(
        self, model: PreTrainedModel, input_ids: Tensor, hooked: Sequence[Foreign], **prepared: Any
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode with transformers' own loop, which runs hooks of others as they are meant.

        A hook may look at positions, at shapes or at what it saw before. In passes over several
        tokens, or over a few layers, it would not do what it does in `generate`.
        """
        texts, reason = len(input_ids), in_words(hooked)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the model has {reason}, which only passes over one token at a time run as "
                "`generate` does; so transformers' own loop decodes, without drafts or early "
                "exits. To decode at full speed, remove it, or make the same change with "
                "`ll.edits`",
                HookedModelWarning,
                stacklevel=2,
            )
        n_layers = int(model.config.get_text_config().num_hidden_layers)
        n_new = prepared["generation_config"].max_length - input_ids.shape[1]
        self.stats = [
            DecodingStats(n_layers, "exact", n_new, texts_per_pass=texts, fallback=reason)
            for _ in range(texts)
        ]
        self.current = self.stats[-1]
        recorder = _Recorder(prepared.pop("stopping_criteria"))
        recorder.unfinished = dict(enumerate(self.stats))
        written: Tensor | GenerateDecoderOnlyOutput = type(model)._sample(
            model, input_ids, stopping_criteria=recorder, **prepared
        )
        return written

    def _prepare(self, model: PreTrainedModel) -> Prepared:
        if self._prepared is None or self._prepared.is_outdated(model):
            with unedited(model):
                self._prepared = Prepared(self, model)
        return self._prepared

    def _new_stats(self, ready: Prepared, chooser: TokenChooser, max_length: int) -> DecodingStats:
        """Empty stats for a text; refuses a text that is too long."""
        transformer, n_prompt = ready.transformer, len(chooser.text)
        limit = longest_input(transformer)
        if n_prompt > limit:
            raise BadText(f"the prompt has {n_prompt} tokens; this model takes at most {limit}")
        request.check_positions(transformer.model.config, n_prompt, max_length)
        room = min(max_length - chooser.ids.shape[1], limit + 1 - n_prompt)
        policy = None if self.rule is None else self.policy
        return DecodingStats(transformer.n_layers, ready.exactness, room, policy)

    def _can_share_passes(self, ready: Prepared, cache: Cache | None) -> bool:
        """True if texts can share passes: exact decoding of new texts only."""
        has_begun = cache is not None and bool(cache.get_seq_length())
        if has_begun or not self.verifies_drafts or ready.is_one_by_one:
            return False
        return ready.axes.batches and not request.depends_on_place(ready.transformer.model.config)

    def _write_batch(
        self, ready: Prepared, choosers: Sequence[TokenChooser], max_length: int, first: int
    ) -> None:
        """Generate several texts in shared passes; their prompts are read one by one."""
        stats = [self._new_stats(ready, chooser, max_length) for chooser in choosers]
        ready.tune()
        drafters = [ready.drafter.for_batch() for _ in choosers]
        batch = BatchCursor(
            ready.transformer, ready.axes, packed=ready.packed, rowwise=ready.keeps_bits
        )
        with torch.inference_mode():
            for n, (chooser, drafter) in enumerate(zip(choosers, drafters, strict=True)):
                with ready.cursor(first + n, len(chooser.text)) as cursor:
                    begin(cursor, chooser, drafter, stats[n])
                if not chooser.is_finished:
                    batch.join(n, cursor)
            for text_stats in stats:
                text_stats.start_sharing(len(choosers))
            with batch:
                speculate_batch(batch, choosers, drafters, stats, ready.tie_steps)
        self.stats += stats
        ready.count(sum(one.tokens for one in stats))

    def _write(
        self,
        ready: Prepared,
        chooser: TokenChooser,
        max_length: int,
        cache: Cache | None,
        processor: Any,
        number: int,
    ) -> Cursor:
        """Generate one text."""
        n_prompt = len(chooser.text)
        self.current = stats = self._new_stats(ready, chooser, max_length)
        cursor = ready.cursor(number, n_prompt)
        if cache is not None and (n_cached := cache.get_seq_length()):
            cursor.take(chooser.text[:n_cached], cache)
            if n_cached >= n_prompt:
                cursor.cut(n_prompt - 1)  # the last token runs again: its logits are needed
        with cursor, torch.inference_mode():  # a tenth faster than no_grad
            ready.tune()
            begin(cursor, chooser, ready.drafter, stats)
            self._continue(ready, cursor, chooser, stats)
            if not chooser.is_finished:
                stats.record_preparation(ready.equip(stats.tokens), ready.exactness)
                cursor.use(ready.packed, rowwise=ready.keeps_bits)
                self._continue(ready, cursor, chooser, stats)
        if self.compare and self.rule is not None and not chooser.sample:
            full = full_choices(cursor, chooser, deepcopy(processor))
            stats.record_comparison(chooser.chosen, full)
        self.stats.append(stats)
        ready.count(stats.tokens)
        return cursor

    def _continue(
        self, ready: Prepared, cursor: Cursor, chooser: TokenChooser, stats: DecodingStats
    ) -> None:
        """Generate until the text is finished, or more should be prepared."""
        until = lambda: ready.is_due(stats.tokens, stats.draft_room)  # noqa: E731
        if self.rule is not None:
            decode_early(
                cursor,
                chooser,
                stats,
                ready.lens,
                self.rule,
                checks=ready.checks,
                policy=self.policy,
                shortlist=ready.shortlist,
                reads_shortlist=self.head == "shortlist",
                until=until,
            )
        elif "early" in self.drafts and not ready.is_one_by_one:
            assert self.draft_layer is not None
            most = self.max_nodes - 1
            speculate_early(
                cursor, chooser, ready.lens, self.draft_layer, stats, most=most, until=until
            )
        else:
            speculate(cursor, chooser, ready.drafter, stats, ready.tie_steps, until)


class _Recorder(StoppingCriteriaList):
    """Stopping criteria, which transformers' loop calls after every token; they record it."""

    unfinished: dict[int, DecodingStats]

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        """Which texts are finished."""
        finished = super().__call__(input_ids, scores, **options)
        for n, stats in list(self.unfinished.items()):
            stats.record_pass(tokens=1, layer=stats.n_layers, is_prompt=not stats.tokens)
            if finished[n]:
                del self.unfinished[n]
        return finished


decoder = Decoder  # the name that reads well inside `generate(custom_generate=...)`
