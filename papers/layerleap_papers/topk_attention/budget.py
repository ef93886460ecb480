"""The smallest k of each layer that keeps a wanted KL: a budget shared out greedily, and verified.

In: texts to choose on, and held-out texts. Out: k by layer for attention and for FFNs, what each
layer costs alone, and whether the budget holds on text that it was not chosen on.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from layerleap import LayerleapError, StudyResult, study
from layerleap.act.edits import TopKAttention, TopKNeurons
from layerleap.errors import BadText, ModelRefused
from layerleap.lens import ANY, POSITIVE
from layerleap.models import Edit, record
from layerleap.progress import Progress
from layerleap.study import above, below, percent, pick, points, untested
from layerleap_papers.topk_attention.allocation import Plan, finer, furthest, guessed, steps
from layerleap_papers.topk_attention.comparisons import PANELS, Measured, Rows, kept_share, nats
from layerleap_papers.topk_attention.sparsity_context import SparsityContext

ATTENTION, FFN = "attention", "FFN"
NOUNS = {ATTENTION: "keys", FFN: "neurons"}
TITLES = {ATTENTION: "Attention", FFN: "FFN"}
FINER = 4  # levels that plans may use for one that is measured
GAIN = "same everywhere minus budget"


@dataclass(frozen=True)
class Part:
    """What is restricted: attention by numbers of keys, or FFNs by shares of neurons."""

    kind: str
    blocks: list[int]
    levels: list[float]  # the first is the whole block
    sizes: dict[int, int]  # neurons of each block

    def finer(self) -> "Part":
        """The same with more levels; numbers of keys are whole."""
        levels = finer(self.levels, FINER)
        if self.kind == ATTENTION:
            levels = [float(k) for k in sorted({round(level) for level in levels}, reverse=True)]
        return replace(self, levels=levels)

    def kept(self, level: float, rows: Rows) -> float:
        """The part of keys or neurons that a level keeps."""
        return level if self.kind == FFN else kept_share(rows.visible, level)

    def k(self, block: int, level: float) -> int:
        """How many keys or neurons that is."""
        return max(1, math.ceil(level * self.sizes[block])) if self.kind == FFN else int(level)

    def edit(self, by_block: dict[int, float]) -> Edit:
        """The edit that restricts some blocks."""
        k = {block: self.k(block, level) for block, level in by_block.items()}
        return TopKNeurons(k) if self.kind == FFN else TopKAttention(k=k)

    def restricted(self, plan: Plan) -> dict[int, float]:
        """By block, the level of those that are restricted."""
        return {block: self.levels[number] for block, number in plan.items() if number}


def _run(context: SparsityContext) -> study.Tables:
    tables: study.Tables = {"budget": [], "budget_costs": [], "budget_checks": []}
    errors: list[str] = []
    for kind in NOUNS:
        try:
            part = _part(context, kind)
        except LayerleapError as error:
            errors.append(str(error))
            context.leave_out(f"A budget for {kind}", error)
            continue
        _share_out(context, part, tables)
    if not tables["budget"]:
        raise ModelRefused("; ".join(dict.fromkeys(errors)))
    return tables


def _part(context: SparsityContext, kind: str) -> Part:
    s, rows, every = context.settings, context.chosen_on, range(1, context.model.n_layers + 1)
    if kind == FFN:
        if not context.ffns:
            raise ModelRefused("no FFN of this model has verified neurons")
        levels = [1.0, *sorted((share for share in s.shares if share < 1), reverse=True)]
        sizes = {block: ffn.n_neurons for block, ffn in context.ffns.items()}
        return Part(kind, list(sizes), levels, sizes)
    list(TopKAttention(k=1).changes(context.model))  # refuses models whose attention is their own
    most = int(rows.visible.max())  # more keys keep nothing more
    known = sorted((k for k in s.keys if k < most), reverse=True)
    if not known:
        raise BadText("no row sees more keys than the smallest number of keys asked for")
    return Part(kind, list(every), [float(most), *map(float, known)], {})


def _share_out(context: SparsityContext, part: Part, tables: study.Tables) -> None:
    rows, fine = context.chosen_on, part.finer()
    alone, costs = _alone(rows, part, context.progress), {}
    for block in part.blocks:
        measured = [0.0, *(float(alone[block, level].kl.mean()) for level in part.levels[1:])]
        costs[block] = guessed(part.levels, measured, fine.levels)
    plans = steps(costs, [fine.kept(level, rows) for level in fine.levels])

    def cost(number: int) -> float:
        context.progress(f"budget for {part.kind}", number, len(plans), "steps")
        kl = rows.measure(fine.edit(fine.restricted(plans[number]))).kl
        mean = rows.estimates(kl[:, None], POSITIVE)[0]
        # The upper end: the plan that looks cheapest on these texts costs more on others.
        return float(mean["value"] if mean["high"] is None else mean["high"])

    plan = plans[furthest(len(plans), cost, context.settings.kl)]
    for block, number in plan.items():
        level, kept = fine.levels[number], 1.0
        if number:
            kept = fine.kept(level, rows)
        about = {"kind": part.kind, "layer": block, "level": level, "k": fine.k(block, level)}
        about |= {"whole": not number, "kept": kept, "guess": costs[block][number]}
        tables["budget"].append(about)
    for (block, level), one in alone.items():
        mean = rows.estimates(one.kl[:, None], POSITIVE)[0]
        about = {"kind": part.kind, "layer": block, "level": level}
        tables["budget_costs"].append({**about, **mean})
    tables["budget_checks"] += _checked(context.verified_on, fine, plan)


def _alone(rows: Rows, part: Part, progress: Progress) -> dict[tuple[int, float], Measured]:
    """Every block restricted alone, at every level: blocks below it need not run again."""
    model, measured = rows.model, {}
    recordings = [(record(model, batch.inputs), batch.keep) for batch in rows.batches]
    for number, block in enumerate(part.blocks):
        progress(f"{part.kind} of single layers", number, len(part.blocks), "layers")
        for level in part.levels[1:]:
            with model.edit(part.edit({block: level})):
                ends = [
                    model.rows(recording.run(recording.states[block - 1], block - 1), keep)
                    for recording, keep in recordings
                ]
            measured[block, level] = rows.compared(ends)
    return measured


def _checked(rows: Rows, part: Part, plan: Plan) -> Iterator[study.Row]:
    """The budget on held-out rows, and the same k everywhere that keeps at least as much."""
    kept = [part.kept(part.levels[n], rows) if n else 1.0 for n in plan.values()]
    mean = sum(kept) / len(kept)
    same = _uniform(rows, part, mean)
    if by_block := part.restricted(plan):
        budget = rows.measure(part.edit(by_block)).columns()
    else:
        unchanged = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
        budget = unchanged.repeat(len(rows), 1)
        budget[rows.gold < 0, 2] = torch.nan
    everywhere = rows.measure(part.edit(dict.fromkeys(part.blocks, same))).columns()
    about = {"kind": part.kind, "kept": mean, "uniform": same}
    about["uniform_kept"] = part.kept(same, rows)
    yield from rows.table(budget, {**about, "what": "budget"})
    yield from rows.table(everywhere, {**about, "what": "same everywhere"})
    yield from rows.table(everywhere - budget, {**about, "what": GAIN}, (ANY,))


def _uniform(rows: Rows, part: Part, mean: float) -> float:
    """The smallest k for all blocks that keeps at least this part; of FFNs, the share itself."""
    if part.kind == FFN:
        return mean
    longest = rows.longest
    return next((float(k) for k in range(1, longest) if part.kept(k, rows) >= mean), float(longest))


def _check(result: StudyResult, kind: str, what: str) -> study.Row | None:
    return result.row("budget_checks", kind=kind, what=what, measure="kl")


def _judged(
    result: StudyResult, kind: str, what: str, ask: Callable[[study.Row], study.Verdict]
) -> study.Verdict:
    """A verdict on a row of the checks, if there is a budget to judge."""
    rows, row = result.rows("budget", kind=kind), _check(result, kind, what)
    if not rows or row is None:
        return untested(f"there is no budget for {kind}; see the notes")
    if all(row["whole"] for row in rows):
        return untested("no layer can be restricted within the wanted KL, at the levels tried")
    return ask(row)


def _is_same(rows: list[study.Row]) -> bool:
    return len({row["k"] for row in rows}) == 1


def _holds(result: StudyResult, kind: str) -> study.Verdict:
    kl = result.settings["kl"]
    return _judged(
        result,
        kind,
        "budget",
        lambda row: study.Verdict(
            below(row, kl),
            f"KL {nats(row)} with {percent(row['kept'])} of the {NOUNS[kind]}",
            f"yes if the interval is below {kl:g} nats",
        ),
    )


def _better(result: StudyResult, kind: str) -> study.Verdict:
    def ask(row: study.Row) -> study.Verdict:
        if _is_same(result.rows("budget", kind=kind)):
            return untested("every layer got the same k, at the levels tried")
        return study.Verdict(
            above(row),
            f"the same k everywhere, with at least as many {NOUNS[kind]}, has a KL higher "
            f"by {nats(row)}",
            "yes if the interval of the paired difference is above 0",
        )

    return _judged(result, kind, GAIN, ask)


CLAIMS = tuple(
    claim
    for kind in NOUNS
    for claim in (
        study.Claim(
            f"(ours) A budget of {NOUNS[kind]} chosen on other text keeps the wanted KL on "
            f"held-out text ({kind}).",
            partial(_holds, kind=kind),
        ),
        study.Claim(
            f"(ours) Layers need different numbers of {NOUNS[kind]}: sharing them out is better "
            f"than the same k everywhere ({kind}).",
            partial(_better, kind=kind),
        ),
    )
)


def _findings(result: StudyResult) -> Iterator[study.Finding]:
    for kind in NOUNS:
        rows, check = result.rows("budget", kind=kind), _check(result, kind, "budget")
        if rows and check is not None:
            first, *more = _sentences(result, rows, check)
            under = f"budget-{kind}"
            yield study.Finding(f"{TITLES[kind]}: {first}", under=under, headline=True)
            yield from (study.Finding(f"{TITLES[kind]}: {text}", under=under) for text in more)


def _sentences(result: StudyResult, rows: list[study.Row], check: study.Row) -> Iterator[str]:
    kind, noun = check["kind"], NOUNS[check["kind"]]
    if all(row["whole"] for row in rows):
        yield (
            f"no layer can be restricted within {result.settings['kl']:g} nats, at the levels "
            "tried."
        )
    elif _is_same(rows):
        yield (
            f"with {_amount(rows[0])} in every layer, KL on held-out text is {nats(check)}. At the "
            "levels tried, no layer got more than another."
        )
    else:
        most, least = (pick(rows, key=lambda row: row["kept"]) for pick in (max, min))
        yield (
            f"with {percent(check['kept'])} of the {noun}, shared out by layer, KL on held-out "
            f"text is {nats(check)}; as many {noun} in every layer give "
            f"{nats(_check(result, kind, 'same everywhere'))}."
        )
        yield (
            f"layer {most['layer']} needs most ({_amount(most)}), layer {least['layer']} least "
            f"({_amount(least)})."
        )


def _amount(row: study.Row) -> str:
    noun = NOUNS[row["kind"]]
    return f"all {noun}" if row["whole"] else f"{row['k']} {noun}"


def _figure(kind: str) -> study.Figure:
    return study.Figure(
        f"budget-{kind}",
        f"{TITLES[kind]}: the budget by layer",
        f"The part of the {NOUNS[kind]} that each layer keeps.",
        points("budget", y="kept", line="kept", kind=kind),
        y=study.Axis(f"{NOUNS[kind]} kept", "share"),
        size=(5.2, 3.2),
        narrow=True,
        lines={"kept": study.Line("kept", "blue")},
        sample="chosen on the fitting side",
    )


SECTION = study.Section(
    "budget",
    "How small can k be in each layer?",
    _run,
    "Every layer is restricted alone, at several levels, on texts of the fitting side. Then layers "
    "are restricted together, step by step, the cheapest first by what they cost alone, as long as "
    "the interval of the KL measured together stays within the wanted one. The result is verified "
    "on held-out texts of the same length, beside the same k in all layers.",
    help="the smallest k of each layer for a wanted KL",
    findings=_findings,
    shows=(
        *CLAIMS,
        *map(_figure, NOUNS),
        study.Table(
            "budget-checks",
            "Budgets on held-out text",
            pick("budget_checks", words={"measure": PANELS}),
            (
                study.Column("kind", "part"),
                study.Column("what", "how shared"),
                study.Column("kept", "kept", "{:.0f} %", 100),
            ),
            across="measure",
            cells=(study.estimate("value", "", "{:.3f}"),),
            terminal=True,
        ),
        study.Table(
            "budget-table",
            "k by layer",
            pick("budget"),
            (study.Column("layer"),),
            across="kind",
            cells=(
                study.Column("k", "k"),
                study.Column("kept", "kept", "{:.0f} %", 100),
                study.Column("guess", "KL alone, about", "{:.4f}"),
            ),
            dense=True,
        ),
    ),
)
