"""The smallest k of each layer that keeps a wanted KL: a budget shared out greedily, and verified.

In: texts to choose on, and held-out texts. Out: k by layer for attention and for FFNs, what each
layer costs alone, and whether the budget holds on text that it was not chosen on.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from layerleap import LayerleapError, StudyResult, study
from layerleap.act.edits import TopKAttention, TopKNeurons
from layerleap.errors import BadText, ModelRefused
from layerleap.lens import ANY, POSITIVE
from layerleap.models import Edit, Recording, record
from layerleap.progress import Progress
from layerleap.study import above, below, estimate, percent, pick, points, untested
from layerleap_papers.topk_attention.allocation import Plan, finer, furthest, guessed, steps
from layerleap_papers.topk_attention.curves import PANELS, nats
from layerleap_papers.topk_attention.passes import MEASURES, POSSIBLE, Measured, Rows
from layerleap_papers.topk_attention.sparsity_context import SparsityContext

ATTENTION, FFN = "attention", "FFN"
KINDS = (ATTENTION, FFN)
FINER = 4  # levels that plans may use for one that is measured
TITLES = {ATTENTION: "Attention", FFN: "FFN"}
GAIN = "same everywhere minus budget"
NOUNS = {ATTENTION: "keys", FFN: "neurons"}


class _Part:
    """What is restricted: attention by numbers of keys, or FFNs by shares of neurons."""

    def __init__(self, kind: str, blocks: list[int], levels: list[float], rows: Rows) -> None:
        self.kind, self.blocks, self.levels = kind, blocks, levels  # level 0 is the whole block
        self.rows, self.seen = rows, rows.visible.double()

    def finer(self) -> "_Part":
        """The same with more levels; numbers of keys are whole."""
        levels = finer(self.levels, FINER)
        if self.kind == ATTENTION:
            levels = [float(k) for k in sorted({round(level) for level in levels}, reverse=True)]
        return _Part(self.kind, self.blocks, levels, self.rows)

    def kept(self, level: float) -> float:
        """The part of keys or neurons that a level keeps."""
        if self.kind == FFN:
            return level
        return float((self.seen.clamp_max(level) / self.seen).mean())

    def edit(self, by_block: dict[int, float], sizes: dict[int, int]) -> Edit:
        """The edit that restricts some blocks."""
        if self.kind == FFN:
            return TopKNeurons({b: max(1, math.ceil(v * sizes[b])) for b, v in by_block.items()})
        return TopKAttention(k={block: int(value) for block, value in by_block.items()})

    def plan(self, plan: Plan) -> dict[int, float]:
        """By block, the level of those that are restricted."""
        return {block: self.levels[number] for block, number in plan.items() if number}


def _run(context: SparsityContext) -> study.Tables:
    tables: study.Tables = {"budget": [], "budget_costs": [], "budget_checks": []}
    errors: list[str] = []
    for kind in KINDS:
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


def _part(context: SparsityContext, kind: str) -> _Part:
    rows, every = context.chosen_on, list(range(1, context.model.n_layers + 1))
    if kind == FFN:
        if not context.ffns:
            raise ModelRefused("no FFN of this model has verified neurons")
        levels = [1.0, *sorted((s for s in context.settings.shares if s < 1), reverse=True)]
        return _Part(kind, list(context.ffns), levels, rows)
    list(TopKAttention(k=1).changes(context.model))  # refuses models whose attention is their own
    most = int(rows.visible.max())  # more keys keep nothing more
    known = sorted((k for k in context.settings.keys if k < most), reverse=True)
    if not known:
        raise BadText("no row sees more keys than the smallest number of keys asked for")
    return _Part(kind, every, [float(most), *map(float, known)], rows)


def _share_out(context: SparsityContext, part: _Part, tables: study.Tables) -> None:
    rows, wanted = context.chosen_on, context.settings.kl
    sizes = {block: ffn.n_neurons for block, ffn in context.ffns.items()}
    edit = partial(part.edit, sizes=sizes)
    alone = _alone(rows, part, edit, context.progress)
    costs = {
        block: [0.0, *(float(alone[block, level].kl.mean()) for level in part.levels[1:])]
        for block in part.blocks
    }
    measured, part = part, part.finer()
    costs = {block: guessed(measured.levels, own, part.levels) for block, own in costs.items()}
    plans = steps(costs, [part.kept(level) for level in part.levels])

    def cost(number: int) -> float:
        context.progress(f"budget for {part.kind}", number, len(plans), "steps")
        found = rows.estimates(
            rows.measure(edit(part.plan(plans[number]))).kl[:, None], [POSITIVE]
        )[0]
        # The upper end: the plan that looks cheapest on these texts costs more on others.
        return float(found["value"] if found["high"] is None else found["high"])

    chosen = plans[furthest(len(plans), cost, wanted)]
    tables["budget"] += [_plan_row(part, block, chosen, costs, sizes) for block in part.blocks]
    for (block, level), one in alone.items():
        found = rows.estimates(one.kl[:, None], [POSITIVE])[0]
        about = {"kind": part.kind, "layer": block, "level": level}
        tables["budget_costs"].append({**about, **found})
    tables["budget_checks"] += _checked(context.verified_on, part, chosen, edit)


def _alone(
    rows: Rows, part: _Part, edit: Callable[[dict[int, float]], Edit], progress: Progress
) -> dict[tuple[int, float], Measured]:
    """Every block restricted alone, at every level: blocks below it need not run again."""
    recordings: list[Recording] = [record(rows.model, batch.inputs) for batch in rows.batches]
    found = {}
    for number, block in enumerate(part.blocks):
        progress(f"{part.kind} of single layers", number, len(part.blocks), "layers")
        for level in part.levels[1:]:
            with rows.model.edit(edit({block: level})):
                ends = [
                    rows.model.rows(
                        recording.run(recording.states[block - 1], block - 1), batch.keep
                    )
                    for recording, batch in zip(recordings, rows.batches, strict=True)
                ]
            found[block, level] = rows.compared(ends)
    return found


def _plan_row(
    part: _Part, block: int, plan: Plan, costs: dict[int, list[float]], sizes: dict[int, int]
) -> study.Row:
    level = part.levels[plan[block]]
    is_whole = not plan[block]
    k = math.ceil(level * sizes[block]) if part.kind == FFN else int(level)
    return {
        "kind": part.kind,
        "layer": block,
        "level": level,
        "k": k,
        "whole": is_whole,
        "kept": 1.0 if is_whole else part.kept(level),
        "guess": costs[block][plan[block]],
    }


def _checked(
    rows: Rows, part: _Part, plan: Plan, edit: Callable[[dict[int, float]], Edit]
) -> list[study.Row]:
    """The budget on held-out rows, and the same k everywhere that keeps at least as much."""
    held = _Part(part.kind, part.blocks, part.levels, rows)
    kept = [1.0 if not n else held.kept(part.levels[n]) for n in plan.values()]
    mean = sum(kept) / len(kept)
    by_block = part.plan(plan)
    same = _uniform(held, mean, rows.longest)
    uniform = dict.fromkeys(part.blocks, same)
    own = rows.measure(edit(by_block)) if by_block else _nothing(rows)
    other = rows.measure(edit(uniform))
    found = []
    about = {"kind": part.kind, "kept": mean, "uniform": same, "uniform_kept": held.kept(same)}
    for what, columns, possible in (
        ("budget", own.columns(), POSSIBLE),
        ("same everywhere", other.columns(), POSSIBLE),
        (GAIN, other.columns() - own.columns(), [ANY]),
    ):
        for name, row in zip(MEASURES, rows.estimates(columns, possible), strict=True):
            found.append({**about, "what": what, "measure": name, **row})
    return found


def _uniform(part: _Part, mean: float, longest: int) -> float:
    """The smallest k for all blocks that keeps at least this part; of FFNs, the share itself."""
    if part.kind == FFN:
        return mean
    return next((float(k) for k in range(1, longest) if part.kept(k) >= mean), float(longest))


def _nothing(rows: Rows) -> Measured:
    zeros: Tensor = torch.zeros(len(rows))
    return Measured(zeros, torch.ones(len(rows)), zeros.masked_fill(rows.gold < 0, torch.nan))


# --- claims and findings -----------------------------------------------------------------------


def _check(result: StudyResult, kind: str, what: str, measure: str = "kl") -> study.Row | None:
    return result.row("budget_checks", kind=kind, what=what, measure=measure)


def _missing(result: StudyResult, kind: str) -> study.Verdict | None:
    """Why there is nothing to judge, if so."""
    rows = result.rows("budget", kind=kind)
    if not rows:
        return untested(f"there is no budget for {kind}; see the notes")
    if all(row["whole"] for row in rows):
        return untested("no layer can be restricted within the wanted KL, at the levels tried")
    return None


def _is_same(rows: list[study.Row]) -> bool:
    return len({row["k"] for row in rows}) == 1


def _holds(result: StudyResult, kind: str) -> study.Verdict:
    row = _check(result, kind, "budget")
    if (missing := _missing(result, kind)) is not None or row is None:
        return missing or untested("nothing was measured")
    wanted = result.settings["kl"]
    return study.Verdict(
        below(row, wanted),
        f"KL {nats(row)} with {percent(row['kept'])} of the {NOUNS[kind]}",
        f"yes if the interval is below {wanted:g} nats",
    )


def _better(result: StudyResult, kind: str) -> study.Verdict:
    row = _check(result, kind, GAIN)
    if (missing := _missing(result, kind)) is not None or row is None:
        return missing or untested("nothing was measured")
    if _is_same(result.rows("budget", kind=kind)):
        return untested("every layer got the same k, at the levels tried")
    return study.Verdict(
        above(row),
        f"the same k everywhere, with at least as many {NOUNS[kind]}, has a KL higher "
        f"by {nats(row)}",
        "yes if the interval of the paired difference is above 0",
    )


CLAIMS = tuple(
    claim
    for kind in KINDS
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
    for kind in KINDS:
        rows, check = result.rows("budget", kind=kind), _check(result, kind, "budget")
        if not rows or check is None:
            continue
        part, noun = TITLES[kind], NOUNS[kind]
        if all(row["whole"] for row in rows):
            yield study.Finding(
                f"{part}: no layer can be restricted within {result.settings['kl']:g} nats, at the "
                "levels tried.",
                under=f"budget-{kind}",
                headline=True,
            )
            continue
        if _is_same(rows):
            yield study.Finding(
                f"{part}: with {_amount(rows[0])} in every layer, KL on held-out text is "
                f"{nats(check)}. At the levels tried, no layer got more than another.",
                under=f"budget-{kind}",
                headline=True,
            )
            continue
        same = _check(result, kind, "same everywhere")
        most = max(rows, key=lambda row: row["kept"])
        least = min(rows, key=lambda row: row["kept"])
        yield study.Finding(
            f"{part}: with {percent(check['kept'])} of the {noun}, shared out by layer, KL on "
            f"held-out text is {nats(check)}; as many {noun} in every layer give {nats(same)}.",
            under=f"budget-{kind}",
            headline=True,
        )
        yield study.Finding(
            f"{part}: layer {most['layer']} needs most ({_amount(most)}), layer {least['layer']} "
            f"least ({_amount(least)}).",
            under=f"budget-{kind}",
        )


def _amount(row: study.Row) -> str:
    noun = NOUNS[row["kind"]]
    return f"all {noun}" if row["whole"] else f"{row['k']} {noun}"


def _figures(kind: str) -> tuple[study.Figure, ...]:
    return (
        study.Figure(
            f"budget-{kind}",
            f"{TITLES[kind]}: the budget by layer",
            f"The part of the {NOUNS[kind]} that each layer keeps.",
            points("budget", y="kept", line="kept", kind=kind),
            y=study.Axis(f"{NOUNS[kind]} kept", "share"),
            size=(5.2, 3.2),
            narrow=True,
            lines={"kept": study.Line("kept", "blue")},
            sample="chosen on the fitting side",
        ),
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
        *_figures(ATTENTION),
        *_figures(FFN),
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
            cells=(estimate("value", "", "{:.3f}"),),
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
