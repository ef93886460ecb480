"""Exiting by task beside other rules: replayed, calibrated, timed, and in generated texts.

In: the pass over the text, and costs. Out: curves with agreement and accuracy, layers saved at
wanted agreements, calibrated rules on fresh rows, speeds, texts; and the section that shows them.

A third of the documents trains the probe and the learned rule. All rules are then judged on the
rows of all other documents; for calibration these are divided at random into two halves.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerleap import ShortcutBank, StudyResult, study
from layerleap.act import exits
from layerleap.act.exits import Cost, Never, Rule
from layerleap.errors import TooFewRows
from layerleap.lens import SHARE, CellSampling, TaskProbe, finite, mean_interval
from layerleap.study import Page, above, all_of, difference, exits as replayed, in_words, untested
from layerleap_papers.beyond_the_top1.live_exits import live_exits, prompts_of
from layerleap_papers.beyond_the_top1.rows import SaturationData, SomeStates, numbers
from layerleap_papers.beyond_the_top1.saturation_context import SaturationContext

PAGE = Page(__file__)
MAPS = ("logit", "linear")
TARGET = 0.95  # the agreement at which rules are compared in words, and timed
RULES = ("task", "gap", "similarity", "patience", "learned")
PROMPT = 8  # tokens of a prompt
Rules = dict[tuple[str, str], Rule]  # by lens and name
Marks = Callable[[StudyResult], Iterable[study.Mark]]


@dataclass(frozen=True)
class Judged:
    """One lens: its rows, the right answers of those not trained on, and the probe."""

    rows: replayed.Lensed
    gold: Tensor
    probe: TaskProbe

    def accuracy(self, rules: list[Rule]) -> list[study.Row]:
        """How often rows exit with the right answer, over those whose answer is known."""
        evidence, known = self.rows.rest, self.gold >= 0
        if not known.any():
            return [{"accuracy": None, "accuracy_low": None, "accuracy_high": None}] * len(rules)
        right = []
        for rule in rules:
            column = exits.replay(rule, evidence).layer.long()[:, None]  # evidence has every layer
            right.append(evidence.top.gather(1, column)[:, 0].long() == self.gold.long())
        return [
            {
                "accuracy": one.value,
                "accuracy_low": finite(one.low),
                "accuracy_high": finite(one.high),
                "accuracy_rows": one.rows,
            }
            for one in mean_interval(torch.stack(right, 1)[known], evidence.document[known], SHARE)
        ]


def task_exits(
    data: SaturationData, costs: Mapping[str, Cost], *, cells: int = 3000, seed: int = 0
) -> tuple[study.Tables, dict[str, Judged], Rules]:
    """Tables of every rule through every lens that has a cost, and what they were made from.

    And, by lens and name, the rules that save most at an agreement of `TARGET`.
    """
    judged = {lens: _judged(data, lens, cost, cells, seed) for lens, cost in costs.items()}
    made = replayed.exit_tables({lens: one.rows for lens, one in judged.items()})
    rules: Rules = {}
    for lens, one in judged.items():
        curves = [row for row in made["curves"] if row["map"] == lens]
        members = [_member(row, one.rows.families) for row in curves]
        for row, accuracy in zip(curves, one.accuracy(members), strict=True):
            row |= accuracy
        for row in made["saved"]:
            if row["map"] == lens and row["target"] == TARGET and row["knob"] is not None:
                rules[lens, row["rule"]] = rule = one.rows.families[row["rule"]].at(row["knob"])
                row["accuracy"] = one.accuracy([rule])[0]["accuracy"]
    first = next(iter(judged.values()))
    tables = {
        "exits": made["curves"],
        "exits_saved": made["saved"],
        "exits_about": [{**made["cost"], **first.accuracy([Never()])[0]}],
        "exits_probes": [
            {"lens": lens, **one.probe.data, "layers": list(one.probe.layers)}
            for lens, one in judged.items()
        ],
    }
    return tables, judged, rules


def _judged(data: SaturationData, lens: str, cost: Cost, cells: int, seed: int) -> Judged:
    """The rows of one lens, divided, and what is trained on some of them."""
    whole = data.evidence[lens]
    train, _ = exits.split(whole, (1 / 3, 2 / 3), seed=seed)
    is_train = torch.isin(whole.document, train.document.unique())
    learning, others = numbers(is_train), numbers(~is_train)
    probe = TaskProbe.fit(
        data.saturation[lens].rows(learning),
        SomeStates(data.states, learning),
        sampling=CellSampling(tasks=2, limit=cells, seed=seed),
    )
    rest = whole.rows(others).with_probe(probe, SomeStates(data.states, others))
    if len(rest) < 2:
        raise TooFewRows(f"{len(rest)} rows are left to judge rules by; read more texts")
    families = {
        "task": exits.family(exits.Task, probe=probe),
        "gap": replayed.gap_family(whole),
        "similarity": exits.family(exits.Similarity),
        "patience": exits.family(exits.Patience),
        "learned": exits.Learned.train(train),
    }
    return Judged(
        replayed.Lensed(rest, cost, train, rest, families, seed=seed), data.gold[others], probe
    )


def _member(row: study.Row, families: Mapping[str, exits.Family]) -> Rule:
    if row["rule"] == "oracle":
        return exits.Oracle()
    if row["rule"] == "fixed":
        return exits.Fixed(int(row["knob"]))
    return families[row["rule"]].at(row["knob"])


def costs_of(data: SaturationData, bank: ShortcutBank | None, tokens: int) -> dict[str, Cost]:
    """By lens, what blocks, maps and heads cost in a text of so many tokens."""
    costs = {
        lens: exits.measure_cost(
            data.transformer, tokens=tokens, bank=bank if lens == "linear" else None
        )
        for lens in data.lenses
    }
    if data.transformer.kind == "next-token":
        return costs
    return {lens: cost.per_text() for lens, cost in costs.items()}


def _run(context: SaturationContext) -> study.Tables:
    s, data = context.settings, context.observed
    tables, judged, rules = task_exits(
        data, costs_of(data, context.bank, context.tokens), cells=s.cells, seed=s.seed
    )
    lenses = {lens: one.rows for lens, one in judged.items()}
    promises = context.attempt(
        "Calibrated exits",
        lambda: replayed.calibrated_rows(lenses, context.text, s.tolerance, s.delta, RULES),
    )
    tables |= {"calibrated": promises or [], "live": [], "texts": []}
    if not replayed.generates_text(context.model):
        name = context.model.identity.name
        context.note(f"Timed exits: left out. {name} does not generate text token by token.")
    elif not s.prompts:
        context.note("Timed exits: left out, because no prompts were asked for.")
    elif prompts := context.attempt("Timed exits", lambda: _prompts(context, judged)):
        progress = context.progress
        tables["live"] = live_exits(context.model, context.bank, rules, prompts, progress=progress)
        tables["texts"] = _texts(context, rules, prompts)
    return tables


def _prompts(context: SaturationContext, judged: Mapping[str, Judged]) -> list[Tensor]:
    """Beginnings of texts that nothing was trained on."""
    train = next(iter(judged.values())).rows.train
    assert train is not None
    s, known = context.settings, set(train.document.tolist())
    return prompts_of(context.observed.batches(), s.prompts, PROMPT, without=known, seed=s.seed)


def _texts(context: SaturationContext, rules: Rules, prompts: list[Tensor]) -> list[study.Row]:
    """What the rules write that look at states only."""
    shown = {key: rule for key, rule in rules.items() if key[1] in ("task", "similarity")}
    banks = {"logit": None, "linear": context.bank}
    return replayed.early_texts(context.model, banks, shown, prompts[0][0].tolist())


def saved_by_rule(result: StudyResult, lens: str) -> dict[str, study.Row]:
    """Layers saved at an agreement of `TARGET`, by rule, as estimates."""
    rows = result.rows("exits_saved", map=lens, target=TARGET)
    return {row["rule"]: {**row, "value": row["saved"]} for row in rows}


def flops_words(row: study.Row) -> str:
    """What the layers saved come to once checks are paid for."""
    share = row["flops"]
    if round(100 * share) == 0:
        return "as many FLOPs"
    return f"{abs(share):.0%} {'fewer' if share > 0 else 'more'} FLOPs"


def compared(task: study.Row, others: list[study.Row]) -> str:
    """How exiting by task compares with the best of the other rules, best first."""
    best = others[0]
    if best["value"] >= task["value"]:
        return f"{best['rule']} saves {best['value']:.1f}" if best["value"] else "no rule saves any"
    if above(difference(task, best)) == "yes":
        return "clearly more than any other rule tried"
    return f"more than any other rule tried, but not clearly ({best['rule']} {best['value']:.1f})"


def _findings(result: StudyResult) -> Iterator[study.Said]:
    n_layers = result.model["n_layers"]
    for lens in MAPS:
        saved = saved_by_rule(result, lens)
        if not saved:
            continue
        ranked = sorted(saved.values(), key=lambda row: -row["value"])
        listed = "; ".join(f"{row['rule']} {in_words(row)}, {flops_words(row)}" for row in ranked)
        yield PAGE.say("saved", target=TARGET, lens=lens, n_layers=n_layers, rules=listed)
        task = saved["task"]
        rest = compared(task, [row for row in ranked if row is not task])
        about = {"task": task, "n_layers": n_layers, "rest": rest}
        yield PAGE.say("task", target=TARGET, lens=lens, **about)
    (about,) = result.rows("exits_about")
    if about["accuracy"] is not None:
        yield PAGE.say("accuracy", about=about)
    if rows := result.rows("calibrated"):
        yield _promises(rows)
    if rows := [row for row in result.rows("live") if row["rule"] != "never"]:
        yield _speeds(rows)


def _promises(rows: list[study.Row]) -> study.Said:
    broken = [f"{row['rule']} through {row['map']}" for row in rows if not row["holds"]]
    never = sum(row["knob"] is None for row in rows)
    rest = f"; {never} keep it by never exiting" if never else ""
    rest += f"; broken by {', '.join(broken)}" if broken else ""
    return PAGE.say("promises", yes=len(rows) - never - len(broken), n=len(rows), rest=rest)


def _speeds(rows: list[study.Row]) -> study.Said:
    best = max(rows, key=lambda row: row["speed"])
    times = {**best, "value": best["speed"]}
    rest = "" if best["is_faster"] else ", which is not clearly faster"
    for row in (row for row in rows if row["rule"] == "task"):
        speed = in_words({**row, "value": row["speed"]})
        rest += f"; task through {row['map']} {speed} times"
    return PAGE.say("speeds", target=TARGET, n=len(rows), best=best, times=times, rest=rest)


@PAGE.claim("task_beats")
def _claim(result: StudyResult) -> study.Tested:
    saved = saved_by_rule(result, "logit")
    if not saved:
        return untested("early exit could not be studied; see the notes")
    rows = [saved[rule] for rule in ("task", "gap", "similarity")]
    listed = ", ".join(f"{row['rule']} {row['value']:.2f} ({flops_words(row)})" for row in rows)
    answer = all_of(above(difference(rows[0], row)) for row in rows[1:])
    return answer, {"target": TARGET, "rules": listed}


MEASURES = {"agreement": "agreement", "accuracy": "right answers"}


def _full_model(result: StudyResult) -> Iterator[study.Mark]:
    """The accuracy of the full model, in the panels that show accuracy."""
    for about in result.rows("exits_about"):
        if about["accuracy"] is not None:
            for lens in MAPS:
                panel = f"Through {lens}: {MEASURES['accuracy']}"
                yield study.Mark("y", about["accuracy"], "full model", panel=panel)


def _figure(key: str, column: str, marks: Marks) -> study.Figure:
    return PAGE.figure(
        key,
        lambda result: replayed.exit_rows(result, column, maps=MAPS, measures=MEASURES),
        # The gap rule is that of another paper.
        lines={**replayed.RULE_LINES, "gap": replace(replayed.RULE_LINES["gap"], label="gap")},
        marks=marks,
    )


def _live_rows(result: StudyResult) -> Iterator[study.Row]:
    """Generated texts have no right answers; those shown are the same rule's, replayed."""
    for row in result.rows("live"):
        if row["rule"] == "never":
            replayed = result.row("exits_about") or {}
        else:
            replayed = saved_by_rule(result, row["map"]).get(row["rule"], {})
        yield {**row, "accuracy": replayed.get("accuracy")}


SECTION = PAGE.section(
    "exits",
    _run,
    findings=_findings,
    shows=(
        _claim,
        _figure("exits", "layers", _full_model),
        _figure("flops", "flops", lambda r: [*replayed.FLOPS_MARKS, *_full_model(r)]),
        replayed.calibrated_figure(),
        replayed.saved_table("saved-table"),
        replayed.calibrated_table(),
        PAGE.table("live-table", _live_rows),
        study.Texts("texts"),
    ),
)
