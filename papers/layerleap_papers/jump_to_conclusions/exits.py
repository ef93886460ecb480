"""Section "exits": how many layers early exit saves, through each lens."""

from collections.abc import Iterator, Mapping

from layerleap import StudyResult, study
from layerleap.act.exits import Cost, measure_cost
from layerleap.study import Page, above, difference, exits as replayed, percent, pick, words
from layerleap_papers.jump_to_conclusions.curves import LENSES, MAPS
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext

PAGE = Page(__file__)
TARGET = 0.95  # the paper's agreement, also that of the rules that generate texts
PROMPT = 12  # tokens that generated texts continue
TOKENS = 24  # that they are continued by: every one may read the head at every layer


def run(context: ShortcutContext) -> study.Tables:
    """Replay every rule through every lens; calibrate rules; generate a text with the best ones."""
    s, text = context.settings, context.text
    scores = {name: reading.scores for name, reading in context.readings.items()}
    labels = {"mat": text, "tuned": "tuned", "id": "-"}
    lenses = {
        name: replayed.lensed(scores, text, label, _cost(context, label), seed=s.seed)
        for name, label in labels.items()
        if label in scores[text].top
    }
    exits = replayed.exit_tables(lenses)
    if lenses["id"].train is None:
        context.note("No rule was learned: there are too few documents to train on some of them.")
    calibrated = context.attempt(
        "Calibrated exits", lambda: replayed.calibrated_rows(lenses, text, s.tolerance, s.delta)
    )
    texts = context.attempt("Generated texts", lambda: _texts(context, lenses, exits["saved"]))
    return {
        "exits": exits["curves"],
        "exits_saved": exits["saved"],
        "exits_cost": [exits["cost"]],
        "exits_lead": replayed.leads_over_fixed(lenses),
        "same_rows": replayed.same_rows(lenses, TARGET),
        "calibrated": calibrated or [],
        "texts": texts or [],
    }


def _cost(context: ShortcutContext, label: str) -> Cost:
    """What blocks, maps and the head cost at the mean length of the texts read."""
    read = context.counts("read", context.text)
    tokens = max(1, round(read["tokens"] / read["texts"]))
    cost = measure_cost(context.model, tokens=tokens, bank=context.banks.get(label))
    return cost if context.model.kind == "next-token" else cost.per_text()


def _texts(
    context: ShortcutContext, lenses: Mapping[str, study.Lensed], saved: list[study.Row]
) -> list[study.Row]:
    """A text by the rule that saves most through each lens."""
    rules = {}
    exiting = [row for row in saved if row["target"] == TARGET and row["knob"] is not None]
    for name in dict.fromkeys(row["map"] for row in exiting):
        best = _best([row for row in exiting if row["map"] == name])
        rules[name, best["rule"]] = lenses[name].families[best["rule"]].at(best["knob"])
    banks = {"id": None, "mat": context.bank, "tuned": context.banks.get("tuned")}
    beginning = context.beginning(PROMPT)
    return replayed.early_texts(context.model, banks, rules, beginning, tokens=TOKENS)


def _best(rows: list[study.Row], key: str = "saved") -> study.Row:
    return max(rows, key=lambda row: row[key])


def findings(result: StudyResult) -> Iterator[study.Said]:
    """What early exit saves, what it costs, and whether calibrated rules keep their promise."""
    (cost,) = result.rows("exits_cost")
    millions = {name: cost[name] / 1e6 for name in ("block", "map", "head")}
    yield PAGE.say("cost", **{**cost, **millions})
    yield from _saved_by_gap(result)
    yield from _on_same_rows(result)
    yield _flops(result, cost["head_in_blocks"])
    yield from _calibrated(result)


def _saved_by_gap(result: StudyResult) -> Iterator[study.Said]:
    rows = result.rows("exits_saved", rule="gap", target=TARGET)
    listed = []
    for row in rows:
        ends = "" if row["low"] is None else "; 95 % interval {row[low]:.1f} to {row[high]:.1f}"
        form = f"{{row[map]}} {{row[saved]:.1f}} ({{row[share]:1 %}}{ends})"
        listed.append(words(form, row=row))
    n_layers, maps = result.model["n_layers"], ", ".join(listed)
    yield PAGE.say("gap", target=TARGET, n_layers=n_layers, maps=maps, first=rows[0])
    for row in result.rows("exits", rule="oracle"):
        yield PAGE.say("oracle", row=row)


def _on_same_rows(result: StudyResult) -> Iterator[study.Said]:
    base, rows = result.row("same_rows", map="mat", rule="gap"), result.rows("same_rows")
    if base is None:
        return
    best = _best(rows)
    saved = {"gap": {**base, "value": base["saved"]}, "most": {**best, "value": best["saved"]}}
    times = f", {best['saved'] / base['saved']:.2f} times as many" if base["saved"] else ""
    yield PAGE.say("same_rows", target=TARGET, times=times, ends=study.ends_in_words(base), **saved)


def _flops(result: StudyResult, head: float) -> study.Said:
    rows = result.rows("exits_saved", target=TARGET, knob=study.KNOWN)
    if not rows:
        return PAGE.say("no_flops", target=TARGET)
    best, yes = _best(rows, "flops"), sum(row["flops"] > 0 for row in rows)
    change = (
        f"saves {percent(best['flops'], 1)} of the FLOPs"
        if best["flops"] > 0
        else f"costs {percent(-best['flops'])} more FLOPs than not exiting"
    )
    about = {"target": TARGET, "head": head}
    return PAGE.say("flops", yes=yes, n=len(rows), best=best, change=change, **about)


def _calibrated(result: StudyResult) -> Iterator[study.Said]:
    rows = result.rows("calibrated")
    if not rows:
        return
    promised = [row for row in rows if row["promised"]]
    fresh = [row for row in promised if row["knob"] is not None]
    never, tolerance = len(promised) - len(fresh), rows[0]["tolerance"]
    about = {"first": rows[0], "fresh": promised[0]["rows"], "sure": 1 - rows[0]["delta"]}
    yield PAGE.say("promise", **about)
    below = sum(row["disagreement"] <= tolerance for row in fresh)
    holds = sum(row["holds"] for row in fresh)
    rest = f" For {never} no threshold could be certified, so they never exit." if never else ""
    yield PAGE.say("promise_kept", below=below, n=len(fresh), holds=holds, rest=rest, **about)
    tested = [row for row in fresh if row["method"] == "learn-then-test"]
    if tested:
        yield PAGE.say("promise_best", n=len(tested), best=_best(tested), **about)
    away = [row for row in rows if not row["promised"] and row["knob"] is not None]
    if away:
        yield PAGE.say("not_promised", holds=sum(row["holds"] for row in away), n=len(away))


@PAGE.claim("saves_more")
def _saves_more(result: StudyResult) -> study.Tested:
    rows = result.rows("exits_saved", rule="gap", target=TARGET, map=("mat", "id"))
    mat, plain = ({**row, "value": row["saved"]} for row in rows)
    times = f", {mat['saved'] / plain['saved']:.1f} times as many" if plain["saved"] else ""
    about = {"mat": mat, "plain": plain, "times": times, "n_layers": result.model["n_layers"]}
    return above(difference(mat, plain)), about


ALL, CLOSE = "All thresholds", study.CLOSE_UP_PANEL.capitalize()


def _gap_points(panel: str) -> study.Pick:
    """The paper's rule, one colour per lens, beside fixed exits and oracles."""
    rules, line = {"gap", "fixed", "oracle"}, "{map}, {rule}"
    return study.points("exits", x="layers", y="agreement", line=line, panel=panel, rule=rules)


def _gap_lines() -> dict[str, study.Line]:
    lines = {}
    for name in MAPS:
        colour = LENSES[name].colour
        lines[f"{name}, gap"] = study.Line(f"{LENSES[name].label}, gap rule", colour, width=1.7)
        lines[f"{name}, fixed"] = study.Line(f"{name}, fixed layer", colour, "", "dashed", 0, 1.1)
        lines[f"{name}, oracle"] = study.Line(f"{name}, oracle", colour, "*", "star", 0)
    return lines


def _maps(result: StudyResult) -> list[str]:
    """Lenses for the figures of all rules: the fitted ones."""
    known = {row["map"] for row in result.rows("exits")}
    return [name for name in MAPS if name in known and name != "id"]


def _same_rows(result: StudyResult) -> Iterator[study.Row]:
    base = result.row("same_rows", map="mat", rule="gap") or {}
    for row in result.rows("same_rows"):
        yield {**row, "times": row["saved"] / base["saved"] if base.get("saved") else None}


SECTION = PAGE.section(
    "exits",
    run,
    findings=findings,
    shows=(
        _saves_more,
        PAGE.each("token_by_token", pick("exits_lead", rule="gap", map={"id", "mat"})),
        PAGE.figure(
            "exit",
            _gap_points(ALL) + _gap_points(CLOSE),
            lines=_gap_lines(),
            zoom={CLOSE: study.CLOSE_UP},
        ),
        PAGE.figure(
            "exit_rules",
            lambda r: study.exit_rows(r, "layers", maps=_maps(r), close_up=True),
            lines=study.RULE_LINES,
            zoom={f"Through {name}, {study.CLOSE_UP_PANEL}": study.CLOSE_UP for name in MAPS},
        ),
        PAGE.figure(
            "exit_flops",
            lambda r: study.exit_rows(r, "flops", maps=_maps(r)),
            lines=study.RULE_LINES,
            marks=lambda _: replayed.FLOPS_MARKS,
        ),
        replayed.calibrated_figure(),
        replayed.saved_table("saved-table"),
        PAGE.table("same-rows-table", _same_rows),
        replayed.calibrated_table(),
        study.Texts("texts"),
    ),
)
