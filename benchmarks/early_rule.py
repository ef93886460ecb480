"""Which exit rule to decode with, and at which layers to ask it: from replay and measured costs.

In: a model, a bank, held-out text. Out: of the rules that look at states only, each at a few sets
of layers and at the boldest setting that agrees often enough on held-out text, the one that saves
most once its checks are paid for: the time of a check and of a block are measured. Rules that read
tokens pay the head at every check, which costs this model eight blocks, so they are not tried.
"""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from common import BUILD

from layerleap import Lens, ShortcutBank, Transformer
from layerleap.act.evidence import Evidence, split
from layerleap.act.families import Family, family
from layerleap.act.look import Looks
from layerleap.act.replay import Exits, sweep
from layerleap.act.rules import Rule, Similarity, Task
from layerleap.act.task_cells import Choice
from layerleap.act.task_probe import TaskProbe
from layerleap.recipes import resolve_text
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Sampling
from layerleap.study.saturated_rows import SomeStates, numbers, see

AGREEMENT = 0.95
CHECKS = ((24,), (20, 24, 28), tuple(range(16, 30, 2)), tuple(range(16, 30)))


def early_rule(
    transformer: Transformer, bank: ShortcutBank, texts: int, one_token: float
) -> tuple[Rule, tuple[int, ...], list[dict[str, Any]]]:
    """The rule, the layers to ask it at, and how all candidates did.

    Args:
        transformer: a decoder.
        bank: what states are read through.
        texts: held-out ones to replay.
        one_token: seconds of a pass over one token.
    """
    families, rest = _evidence(transformer, bank, texts)
    tried = []
    for name, rules in families.items():
        for checks in CHECKS:
            rule, exits = _boldest(rules, rest.at(checks))
            asked = sum(int((exits.layer >= layer).sum()) for layer in checks) / len(exits.layer)
            price = asked * _check_seconds(transformer, bank, rule, checks) * transformer.n_layers
            row = {
                "rule": name, "checks": list(checks), "layers_saved": exits.saved,
                "agreement": exits.agreement, "checks_in_layers": price / one_token,
            }  # fmt: skip
            tried.append((exits.saved - price / one_token, rule, checks, row))
    best = max(tried, key=lambda one: one[0])
    return best[1], best[2], [one[3] for one in tried]


def _check_seconds(
    transformer: Transformer, bank: ShortcutBank, rule: Rule, checks: tuple[int, ...]
) -> float:
    """Median seconds of asking the rule once."""
    look = Looks(Lens(transformer, bank), rule, 0, extra=getattr(rule, "watches", None))
    h, seconds = torch.randn(2, 1, transformer.d_model), []
    with torch.inference_mode():
        for _ in range(200):
            started = time.perf_counter()
            look(checks[0], h[0], h[1])
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _evidence(
    transformer: Transformer, bank: ShortcutBank, texts: int
) -> tuple[Mapping[str, Family], Evidence]:
    """Kinds of rules, and rows that none was trained on."""
    source, sampling = resolve_text(transformer, "wikipedia", Sampling(positions="every:4"))
    lens = Lens(transformer, bank)

    def batches() -> Any:
        return batches_of(transformer, source, sampling, side="held-out", n_texts=texts)

    seen = see(transformer, {"mat": lens}, batches, BUILD / "decoding.rows", k=3, walk_share=0.01)
    whole = seen.evidence["mat"]
    train, _ = split(whole, (1 / 3, 2 / 3), seed=0)
    is_train = torch.isin(whole.document, train.document.unique())
    learning, others = numbers(is_train), numbers(~is_train)
    probe = TaskProbe.fit(
        seen.saturation["mat"].rows(learning), SomeStates(seen.states, learning),
        choice=Choice(tasks=2, limit=3000, seed=0),
    )  # fmt: skip
    rest = probe.attach(whole.rows(others), SomeStates(seen.states, others))
    families = {"task": family(Task, probe=probe), "similarity": family(Similarity)}
    return families, rest


def _boldest(rules: Family, evidence: Evidence) -> tuple[Rule, Exits]:
    """The setting that saves most of those that agree often enough; 1 never exits."""
    swept = sweep(rules, evidence, n=400)
    found = [(swept.exits(n), knob) for n, knob in enumerate(swept.knobs)]
    enough = [one for one in found if one[0].agreement >= AGREEMENT]
    exits, knob = max(enough, key=lambda one: one[0].saved)
    return rules.at(knob), exits
