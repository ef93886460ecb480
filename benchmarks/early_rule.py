"""Choose an exit rule for decoding, and the layers to check: by replay, by timing, then live.

In: a model, a bank, the first words of documents. Out: `Chosen`: of a few rules at a few sets of
layers, the one that saves most time in a replay, net of its checks. Its threshold is as bold as
live decoding allows at the required agreement.

The replay uses texts that the model generated, because that is what the rule will be applied to.
Checks are timed inside the decoding loop, where caches are cold. A text decoded with exits drifts
away from the replayed one, so the threshold is chosen live, on separate documents of every set.
Tokens that exit early are chosen from the most common ones only: in this model, the whole head
costs as much as several blocks.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from common import BUILD, generate, median

from layerleap import Lens, ShortcutBank, Transformer, decoder
from layerleap.act.decode.shortlist import Shortlist
from layerleap.act.exits.evidence import Evidence, split
from layerleap.act.exits.replay import Exits, sweep
from layerleap.act.exits.rules import Family, Gap, Never, Rule, Similarity, Task, family
from layerleap.lens.probes.cells import CellSampling
from layerleap.lens.probes.task import TaskProbe
from layerleap.models.cursor.packed import Packed
from layerleap.stream.examples import Batch, Example, collate
from layerleap_papers.beyond_the_top1.rows import SomeStates, numbers, observe

AGREEMENT = 0.95
# Agreements in replay, tried live until one is high enough: the mean over as many other texts as
# will be measured must then be above AGREEMENT in 19 of 20 cases.
BOLDNESS = (0.95, 0.965, 0.975, 0.985)
SURE = 1.645  # standard errors
CHECKS = ((20,), (22,), (24,), (26,), (28,), (20, 24), (22, 26), (20, 24, 28))
NO_CHANCE = -1e4  # a logit; with minus infinity the entropy would be NaN
TOKENS, PER_BATCH, COMMON, LIVE = 96, 16, 2048, 6


@dataclass(frozen=True)
class Chosen:
    """A rule, the layers to check, the shortlist of tokens, and how they were chosen."""

    rule: Rule
    checks: tuple[int, ...]
    shortlist: list[int]
    seconds: dict[str, float]
    tried: list[dict[str, Any]]
    live: list[dict[str, Any]]


def early_rule(
    transformer: Transformer,
    bank: ShortcutBank,
    documents: Mapping[str, list[torch.Tensor]],
    one: float,
    measured: int,
) -> Chosen:
    """The rule that saves most time, with the boldest threshold that agrees often enough.

    Args:
        transformer: a decoder.
        bank: maps to read states through.
        documents: prompts of (1, token) by set; the first few of each are for live decoding.
        one: seconds of a pass over one token.
        measured: how many texts will be decoded with the rule.
    """
    aside = [ids for some in documents.values() for ids in some[:LIVE]]
    written = _written(transformer, [ids for some in documents.values() for ids in some[LIVE:]])
    common = Shortlist.common(transformer, [list(text.ids) for text in written], COMMON)
    short = common.ids.tolist()
    families, known = _evidence(transformer, bank, written, common)
    seconds = _seconds(transformer, common, aside[0], one)
    tried, best = [], (-float("inf"), "", CHECKS[0])
    for name, rules in families.items():
        check = _check_seconds(transformer, bank, rules, known[name], short, aside[0])
        for checks in CHECKS:
            rule, exits = _boldest(rules, known[name].at(checks), AGREEMENT)
            per_row = sum(int((exits.layer >= layer).sum()) for layer in checks) / len(exits.layer)
            left = (exits.layer < transformer.n_layers).double().mean().item()
            # A rule that needs a reading has read the shortlist already, in its check.
            again = 0.0 if rule.needs == "reading" else seconds["few"]
            gain = exits.saved * seconds["block"] + left * (seconds["head"] - again)
            tried.append(
                {
                    "rule": name,
                    "checks": list(checks),
                    "layers_saved": exits.saved,
                    "left_early": left,
                    "agreement": exits.agreement,
                    "seconds_saved": gain,
                    "seconds_of_checks": per_row * check,
                }
            )
            best = max(best, (gain - per_row * check, name, checks))
    _, name, checks = best
    live: list[dict[str, Any]] = []
    for least in BOLDNESS:
        rule, exits = _boldest(families[name], known[name].at(checks), least)
        how = {"rule": rule, "checks": checks, "shortlist": short, "head": "shortlist"}
        exiting = decoder(bank, transformer=transformer, compare=True, **how)
        agreed = torch.tensor([_write(transformer, exiting, ids).agreement for ids in aside])
        error = agreed.std().item() * (1 / len(agreed) + 1 / measured) ** 0.5
        replayed = {"replay": exits.agreement, "layers_saved": exits.saved}
        live.append({**replayed, "live": agreed.mean().item(), "error": error})
        if agreed.mean().item() - SURE * error >= AGREEMENT:
            break
    else:
        rule = Never()
    return Chosen(rule, checks, short, seconds, tried, live)


def _written(transformer: Transformer, documents: list[torch.Tensor]) -> list[Example]:
    """Greedy continuations by the model, to be read where it chose a token."""
    examples: list[Example] = []
    for start in range(0, len(documents), PER_BATCH):
        some = documents[start : start + PER_BATCH]
        for ids, new in zip(some, generate(transformer, some, TOKENS), strict=True):
            text = [*ids[0].tolist(), *new[:-1]]
            read = range(ids.shape[1] - 1, len(text), 2)
            examples.append(Example(len(examples), tuple(text), tuple(read)))
    return examples


def _evidence(
    transformer: Transformer, bank: ShortcutBank, written: list[Example], common: Shortlist
) -> tuple[dict[str, Family], dict[str, Evidence]]:
    """Families of rules, and for each the evidence of rows that no rule was trained on."""
    lenses = {"mat": Lens(transformer, bank), "short": _Short(transformer, bank, common)}

    def batches() -> Iterator[Batch]:
        for number, start in enumerate(range(0, len(written), 8)):
            yield collate(transformer, written[start : start + 8], number)

    observed = observe(transformer, lenses, batches, BUILD / "decoding.rows", k=3, walk_share=0.01)
    whole = observed.evidence["mat"]
    train, _ = split(whole, (1 / 3, 2 / 3), seed=0)
    is_train = torch.isin(whole.document, train.document.unique())
    learning, others = numbers(is_train), numbers(~is_train)
    probe = TaskProbe.fit(
        observed.saturation["mat"].rows(learning),
        SomeStates(observed.states, learning),
        sampling=CellSampling(tasks=2, limit=3000, seed=0),
    )
    short = observed.evidence["short"].rows(others)
    rest = short.with_probe(probe, SomeStates(observed.states, others))
    length = 1 + whole.position.double().mean().item()
    families = {"task": family(Task, probe=probe), "similarity": family(Similarity)}
    families["gap"] = family(Gap, length=length)
    return families, {"task": rest, "similarity": short, "gap": short}


class _Short(Lens):
    """A lens that gives all but the common tokens no chance, like a reading of a shortlist."""

    def __init__(self, transformer: Transformer, bank: ShortcutBank, common: Shortlist) -> None:
        super().__init__(transformer, bank)
        self._common = common

    def logits(self, h: torch.Tensor, layer: int) -> torch.Tensor:
        """(row, d_model) -> (row, d_vocab); the last layer gives the model's own logits."""
        if layer == self.transformer.n_layers:
            return super().logits(h, layer)
        made = torch.full((len(h), self.transformer.d_vocab), NO_CHANCE)
        made[:, self._common.ids] = self._common.logits(self.map(layer)(h))
        return made


def _seconds(
    transformer: Transformer, common: Shortlist, ids: torch.Tensor, one: float
) -> dict[str, float]:
    """Seconds of a block, the head and the shortlist head, for one row with cold caches."""
    ways = {"head": transformer.logits, "few": common.logits}
    times: dict[str, list[float]] = {name: [] for name in ways}
    h = torch.randn(1, transformer.d_model, generator=torch.Generator().manual_seed(0))
    model = transformer.model
    packed = Packed.of(model)
    with torch.inference_mode(), nullcontext() if packed is None else packed.in_use(model):
        for _ in range(20):
            for name, head in ways.items():
                transformer.capture({"input_ids": ids[:, :1]}, layers=[transformer.n_layers])
                started = time.perf_counter()
                head(h)
                times[name].append(time.perf_counter() - started)
    made = {name: median(values) for name, values in times.items()}
    return {"block": (one - made["head"]) / transformer.n_layers, **made}


def _check_seconds(
    transformer: Transformer,
    bank: ShortcutBank,
    rules: Family,
    rest: Evidence,
    short: list[int],
    ids: torch.Tensor,
) -> float:
    """Seconds of a check, from a loop with a rule that is checked often and never exits."""
    swept = sweep(rules, rest, n=400)
    never = next(k for n, k in enumerate(swept.knobs) if swept.exits(n).saved == 0)
    checks = range(transformer.n_layers // 2, transformer.n_layers)
    checking = decoder(
        bank, transformer=transformer, rule=rules.at(never), checks=checks, shortlist=short
    )
    plain = decoder(bank, transformer=transformer, rule=Never())
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(12):
        account = _write(transformer, checking if turn % 2 else plain, ids, 24)
        times[bool(turn % 2)].append(account.seconds / 23)
    return max(0.0, median(times[True]) - median(times[False])) / len(checks)


def _write(transformer: Transformer, made: Any, ids: torch.Tensor, tokens: int = TOKENS) -> Any:
    generate(transformer, [ids], tokens, {"custom_generate": made})
    return made.stats[0]


def _boldest(rules: Family, evidence: Evidence, agreement: float) -> tuple[Rule, Exits]:
    """The rule that saves most layers among those that agree often enough."""
    swept = sweep(rules, evidence, n=400)
    every = [(swept.exits(n), knob) for n, knob in enumerate(swept.knobs)]
    enough = [pair for pair in every if pair[0].agreement >= agreement]  # some never exit
    exits, knob = max(enough, key=lambda pair: pair[0].saved)
    return rules.at(knob), exits
