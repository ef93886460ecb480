"""Section "alternation": blocks and jumps in turn, against a single jump at the end."""

from collections.abc import Iterator

import torch

from layerleap import ShortcutBank, StudyResult, study
from layerleap.act.edits import Schedule, ScheduleScores, best_schedules, round_robins, single_jump
from layerleap.errors import BadText
from layerleap.study import percent
from layerleap_papers.jump_to_conclusions.curves import PRECISIONS, estimates
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext

NAMES = {"round robin": "round-robins", "best R2": "schedules with the best R2"}
ALL_PAIRS = "schedules need maps between all pairs of layers (pairs 'all')"
SOME = 0.1  # share of schedules that must be ahead; about 1 in 40 is by chance


def run(context: ShortcutContext) -> study.Tables:
    """Score schedules of every kind on the same texts."""
    bank = context.bank
    if bank.is_final_only:
        context.note(f"{ALL_PAIRS[:1].upper()}{ALL_PAIRS[1:]}, so none were run.")
        return {}
    scores = ScheduleScores(context.model, bank, _schedules(bank))
    context.run_again(context.settings.schedule_texts, "running schedules", scores.add)
    if not scores.has_rows:
        raise BadText("no held-out text was drawn to run schedules on; raise schedule_texts")
    return {"schedules": scores.table(), **_compared(scores)}


def _schedules(bank: ShortcutBank) -> dict[str, list[Schedule]]:
    """Round-robins, and for each of their costs the best schedule and the single jump.

    The best is chosen by R2 on the rows fitted on, so that held-out text does not choose it.
    """
    last, turns = bank.n_layers, round_robins(bank.n_layers)
    budgets = sorted({schedule.blocks for schedule in turns}) or list(range(1, last))
    r2 = {pair: fit.train_r2 for pair, fit in bank.fits.items()}
    return {
        "single jump": [single_jump(last, blocks) for blocks in budgets],
        "round robin": turns,
        "best R2": best_schedules(r2, last, budgets),
    }


def _compared(scores: ScheduleScores) -> study.Tables:
    """The lead of each schedule over the single jump of as many blocks, paired by row."""
    documents, agrees = scores.agreement()
    kinds = [scores.kind[schedule] for schedule in scores.schedules]
    single = {s.blocks: n for n, s in enumerate(scores.schedules) if kinds[n] == "single jump"}
    leads, means, columns = [], [], {}
    for number, schedule in enumerate(scores.schedules):
        if kinds[number] != "single jump" and schedule.blocks in single:
            other = agrees[:, single[schedule.blocks]]
            columns[number] = agrees[:, number].double() - other.double()
            (row,) = estimates(documents, columns[number][:, None])
            about = {"schedule": str(schedule), "kind": kinds[number], "blocks": schedule.blocks}
            leads.append({**about, **row})
    half = scores.transformer.n_layers / 2
    for kind in NAMES:
        for part in ("few", "many"):
            chosen = [
                column
                for n, column in columns.items()
                if kinds[n] == kind and (scores.schedules[n].blocks <= half) == (part == "few")
            ]
            if chosen:
                (row,) = estimates(documents, torch.stack(chosen, 1).mean(1, keepdim=True))
                means.append({"kind": kind, "blocks": part, "schedules": len(chosen), **row})
    return {"schedule_leads": leads, "schedule_means": means}


def findings(result: StudyResult) -> Iterator[study.Said]:
    """How many schedules are ahead of a single jump."""
    rows = result.rows("schedules", metric="precision@1")
    value = {(row["kind"], row["schedule"]): row["value"] for row in rows}
    single = {row["blocks"]: row["value"] for row in rows if row["kind"] == "single jump"}
    for kind, name in NAMES.items():
        leads = result.rows("schedule_leads", kind=kind)
        if leads:
            best = max(leads, key=lambda row: row["value"])
            yield (
                f"{sum(row['value'] > 0 for row in leads)} of {len(leads)} {name} keep more "
                f"agreement than a single jump after as many blocks. The best, {best['schedule']}, "
                f"keeps {percent(value[kind, best['schedule']])} with {best['blocks']} blocks; the "
                f"single jump keeps {percent(single[best['blocks']])}."
            )


@study.claim(
    "Some schedules that alternate between blocks and jumps beat a single jump of the same cost."
)
def _some_are_ahead(result: StudyResult) -> study.Verdict:
    leads = result.rows("schedule_leads", kind="round robin")
    if not leads:
        has_any = result.rows("schedules")
        return study.untested("this number of layers has no round-robin" if has_any else ALL_PAIRS)
    answers = [study.above(row) for row in leads]
    return study.Verdict(
        study.share_of(answers, SOME),
        f"{sum(row['value'] > 0 for row in leads)} of {len(leads)} round-robins are ahead, "
        f"{answers.count('yes')} of them clearly",
        "yes if the interval of the lead is above 0 for a tenth of them or more, which chance "
        "alone would not give; paired by text",
    )


@study.claim("The schedule with the best product of R2 is good only where few blocks are run.")
def _best_r2(result: StudyResult) -> study.Verdict:
    few, many = (result.row("schedule_means", kind="best R2", blocks=p) for p in ("few", "many"))
    if few is None or many is None:
        reason = "schedules with few and with many blocks are needed to compare"
        return study.untested(reason if result.rows("schedules") else ALL_PAIRS)
    return study.Verdict(
        study.all_of([study.above(few), study.below(many)]),
        f"against single jumps {100 * few['value']:+.1f} points with up to half of the blocks, "
        f"{100 * many['value']:+.1f} with more",
        "yes if the interval of the mean lead is above 0 with few blocks and below 0 with many, "
        "partly if it is above or below 0 in both",
    )


CLAIMS = (_some_are_ahead, _best_r2)


FIGURES = (
    study.Figure(
        "alternation",
        "Blocks and jumps in turn",
        "Each dot is one schedule; those above each other run as many blocks. If dots lie above "
        "the line of single jumps, alternating is worth it.",
        study.points("schedules", x="blocks", line="{kind}", metric="precision@1"),
        x=study.Axis("blocks that are run; the rest is jumped over", "layer"),
        y=study.Axis("agreement", "share"),
        size=(7.6, 4.5),
        lines={
            "single jump": study.Line("single jump at the end", "blue", ""),
            "round robin": study.Line(
                "round robin: blocks and jumps in turn", "pink", "o", "points"
            ),
            "best R2": study.Line("jumps where R\u00b2 is highest", "olive", "D", band=0.16),
        },
    ),
)


TABLES = (
    study.Table(
        "schedules-table",
        "Schedules",
        study.pick("schedules", words={"metric": {m: f"{m} (%)" for m in PRECISIONS}}),
        (study.Column("schedule"), study.Column("kind"), study.Column("blocks", "blocks run")),
        across="metric",
        cells=(study.estimate("value"),),
        forms={f"{m} (%)": ("{:.1f}", 100.0) for m in PRECISIONS},
    ),
)

SECTION = study.Section(
    "alternation",
    "Jumps between blocks",
    run,
    lead="Instead of one jump at the end, jumps and blocks can alternate. A schedule is written as "
    "it runs: 0-3~6-9 runs the blocks from layer 0 to layer 3, jumps to layer 6, and runs the "
    "blocks up to layer 9.",
    help="blocks and jumps in turn",
    findings=findings,
    shows=(*CLAIMS, *FIGURES, *TABLES),
    needs=("readings",),
    quick=False,
)
