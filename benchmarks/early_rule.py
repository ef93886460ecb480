"""Which exit rule to decode with, and at which layers to ask it: chosen by replay and by the clock.

In: a model, a bank, held-out text. Out: of the rules that look at states only, each at a few sets
of layers and at the boldest setting that agrees often enough on held-out text, the one that writes
fastest on prompts of its own. Rules that read tokens pay the head at every check, which costs this
model eight blocks, so they are not tried.
"""

from collections.abc import Mapping
from typing import Any

import torch
from common import BUILD

from layerleap import Lens, ShortcutBank, Transformer, decoder
from layerleap.act.evidence import Evidence, split
from layerleap.act.families import Family, family
from layerleap.act.replay import sweep
from layerleap.act.rules import Never, Rule, Similarity, Task
from layerleap.act.task_cells import Choice
from layerleap.act.task_probe import TaskProbe
from layerleap.recipes import resolve_text
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Sampling
from layerleap.study.live_exits import prompts_of
from layerleap.study.saturated_rows import SomeStates, numbers, see

AGREEMENT = 0.95
CHECKS = {
    "one": (24,), "three": (20, 24, 28), "every other": tuple(range(16, 30, 2)),
    "from 16 on": tuple(range(16, 30)),
}  # fmt: skip
PROMPTS, TOKENS = 4, 32  # that candidates are timed on


def early_rule(
    transformer: Transformer, bank: ShortcutBank, texts: int
) -> tuple[Rule, tuple[int, ...], list[dict[str, Any]]]:
    """The rule, the layers to ask it at, and how all candidates did."""
    families, rest, prompts = _evidence(transformer, bank, texts)
    tried = []
    for name, rules in families.items():
        for checks in CHECKS.values():
            rule, saved, agreed = _boldest(rules, rest.at(checks))
            speed = _speed(transformer, bank, rule, checks, prompts) if saved else 0.0
            never = _speed(transformer, bank, Never(), (), prompts)  # anew, right after it
            row = {"rule": name, "checks": list(checks), "layers_saved": saved, "agreement": agreed}
            tried.append((speed / never, rule, checks, {**row, "speed": speed / never}))
    best = max(tried, key=lambda one: one[0])
    return best[1], best[2], [one[3] for one in tried]


def _evidence(
    transformer: Transformer, bank: ShortcutBank, texts: int
) -> tuple[Mapping[str, Family], Evidence, list[torch.Tensor]]:
    """Kinds of rules, rows that none was trained on, and beginnings of texts."""
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
    return families, rest, prompts_of(batches(), PROMPTS, 8)


def _boldest(rules: Family, evidence: Evidence) -> tuple[Rule, float, float]:
    swept = sweep(rules, evidence, n=400)
    found = [(swept.exits(n), knob) for n, knob in enumerate(swept.knobs)]
    exits, knob = max(
        (one for one in found if one[0].agreement >= AGREEMENT), key=lambda one: one[0].saved
    )
    return rules.at(knob), exits.saved, exits.agreement


def _speed(
    transformer: Transformer,
    bank: ShortcutBank,
    rule: Rule,
    checks: tuple[int, ...],
    prompts: list[torch.Tensor],
) -> float:
    """Tokens a second over all prompts."""
    asked = {"checks": checks} if checks else {}
    decoding = decoder(bank, transformer=transformer, rule=rule, **asked)
    model: Any = transformer.model
    accounts = []
    for ids in prompts:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, temperature=None,
            top_p=None, max_new_tokens=TOKENS, min_new_tokens=TOKENS, custom_generate=decoding,
        )  # fmt: skip
        accounts += decoding.accounts
    return sum(one.tokens - 1 for one in accounts) / sum(one.seconds for one in accounts)
