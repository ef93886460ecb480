"""Section "alternation": blocks and jumps in turn, against a single jump at the end."""

from collections.abc import Iterator

import torch

from layerleap import ShortcutBank, StudyResult, study
from layerleap.act.edits import Schedule, ScheduleScores, best_schedules, round_robins, single_jump
from layerleap.errors import BadText
from layerleap.study import Page
from layerleap_papers.jump_to_conclusions.curves import IN_PERCENT, PRECISIONS, estimates
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext

PAGE = Page(__file__)
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
    shares = {(row["kind"], row["schedule"]): row["value"] for row in rows}
    single = {row["blocks"]: row["value"] for row in rows if row["kind"] == "single jump"}
    for kind, name in NAMES.items():
        leads = result.rows("schedule_leads", kind=kind)
        if leads:
            best = max(leads, key=lambda row: row["value"])
            kept = {"kept": shares[kind, best["schedule"]], "single": single[best["blocks"]]}
            ahead = sum(row["value"] > 0 for row in leads)
            yield PAGE.say("schedules", ahead=ahead, n=len(leads), name=name, best=best, **kept)


@PAGE.claim("some_are_ahead")
def _some_are_ahead(result: StudyResult) -> study.Tested:
    leads = result.rows("schedule_leads", kind="round robin")
    if not leads:
        has_any = result.rows("schedules")
        return study.untested("this number of layers has no round-robin" if has_any else ALL_PAIRS)
    answers = [study.above(row) for row in leads]
    counts = {"ahead": sum(row["value"] > 0 for row in leads), "clearly": answers.count("yes")}
    return study.share_of(answers, SOME), {"n": len(leads), **counts}


@PAGE.claim("best_r2")
def _best_r2(result: StudyResult) -> study.Tested:
    few, many = (result.row("schedule_means", kind="best R2", blocks=p) for p in ("few", "many"))
    if few is None or many is None:
        reason = "schedules with few and with many blocks are needed to compare"
        return study.untested(reason if result.rows("schedules") else ALL_PAIRS)
    points = {"few": 100 * few["value"], "many": 100 * many["value"]}
    return study.all_of([study.above(few), study.below(many)]), points


SECTION = PAGE.section(
    "alternation",
    run,
    findings=findings,
    shows=(
        _some_are_ahead,
        _best_r2,
        PAGE.figure(
            "alternation",
            study.points("schedules", x="blocks", line="{kind}", metric="precision@1"),
        ),
        PAGE.table(
            "schedules-table",
            study.pick("schedules", words={"metric": {m: f"{m} (%)" for m in PRECISIONS}}),
            forms={f"{m} (%)": IN_PERCENT for m in PRECISIONS},
        ),
    ),
)
