"""Section "exits": how many layers early exit saves, through each lens."""

from collections.abc import Iterator, Mapping

from layerleap import StudyResult, study
from layerleap.act.exits import Cost, measure_cost
from layerleap.study import above, difference, estimate, exit_rows, exits as replayed, percent, pick
from layerleap_papers.jump_to_conclusions.curves import LENSES, MAPS
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext

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


# --- findings ----------------------------------------------------------------------------------


def findings(result: StudyResult) -> Iterator[study.Said]:
    """What early exit saves, what it costs, and whether calibrated rules keep their promise."""
    yield _cost_in_words(result)
    yield from _saved_by_gap(result)
    yield from _on_same_rows(result)
    yield _flops(result)
    yield from _calibrated(result)


def _cost_in_words(result: StudyResult) -> study.Finding:
    (cost,) = result.rows("exits_cost")
    return study.Finding(
        f"A rule has to check, and checks cost compute. With a context of {cost['tokens']:,.0f} "
        f"tokens, one block takes {cost['block'] / 1e6:,.1f} million FLOPs, one map "
        f"{cost['map'] / 1e6:,.1f} million, and the head, which turns a state into probabilities, "
        f"{cost['head'] / 1e6:,.1f} million: as much as {cost['head_in_blocks']:.1f} blocks. So "
        "layers saved are not compute saved, and both are shown."
    )


def _interval(row: study.Row, digits: int, before: str = "") -> str:
    if row["low"] is None:
        return ""
    return f"{before}{row['low']:.{digits}f} to {row['high']:.{digits}f}"


def _saved_by_gap(result: StudyResult) -> Iterator[study.Said]:
    rows = result.rows("exits_saved", rule="gap", target=TARGET)
    listed = ", ".join(
        f"{row['map']} {row['saved']:.1f} ({percent(row['share'], 1)}"
        f"{_interval(row, 1, '; 95 % interval ')})"
        for row in rows
    )
    yield (
        f"At {percent(TARGET)} agreement, the paper's rule saves, of {result.model['n_layers']} "
        f"layers: {listed} (n = {rows[0]['rows']:,} rows of {rows[0]['documents']:,} "
        "documents)."
    )
    for row in result.rows("exits", rule="oracle"):
        yield (
            f"An oracle that exits at the first layer whose top token through {row['map']} is the "
            f"final one runs {row['layers']:.1f} layers on average. No rule that always agrees can "
            "run fewer."
        )


def _on_same_rows(result: StudyResult) -> Iterator[study.Said]:
    base, rows = result.row("same_rows", map="mat", rule="gap"), result.rows("same_rows")
    if base is None:
        return
    best = _best(rows)
    ends, more = (f" ({ends})" if (ends := _interval(row, 2)) else "" for row in (base, best))
    times = f", {best['saved'] / base['saved']:.2f} times as many" if base["saved"] else ""
    yield study.Finding(
        f"On the same {base['rows']:,} rows, which no rule was trained on, at {percent(TARGET)} "
        f"agreement the paper's rule through mat saves {base['saved']:.2f} layers{ends}. The rule "
        f"{best['rule']!r} through {best['map']} saves most: {best['saved']:.2f}{more}{times}.",
        under="exit_rules",
    )


def _flops(result: StudyResult) -> study.Finding:
    (cost,) = result.rows("exits_cost")
    rows = result.rows("exits_saved", target=TARGET, knob=study.KNOWN)
    if not rows:
        text = f"At {percent(TARGET)} agreement no rule exits, so none saves FLOPs."
        return study.Finding(text, under="exit_flops")
    best = _best(rows, "flops")
    change = (
        f"saves {percent(best['flops'], 1)} of the FLOPs"
        if best["flops"] > 0
        else f"costs {percent(-best['flops'])} more FLOPs than not exiting"
    )
    return study.Finding(
        f"If a check at every layer is counted, {sum(row['flops'] > 0 for row in rows)} of the "
        f"{len(rows)} rules that exit at {percent(TARGET)} agreement save FLOPs. The cheapest, "
        f"{best['rule']} through {best['map']}, {change}. The head costs as much as "
        f"{cost['head_in_blocks']:.1f} blocks.",
        under="exit_flops",
    )


def _calibrated(result: StudyResult) -> Iterator[study.Said]:
    rows = result.rows("calibrated")
    if not rows:
        return
    first, tolerance = rows[0], rows[0]["tolerance"]
    promised = [row for row in rows if row["promised"]]
    fresh = [row for row in promised if row["knob"] is not None]
    never = len(promised) - len(fresh)
    yield study.Finding(
        "A threshold chosen on some rows can come with a promise for other rows like them: a "
        f"disagreement of at most {percent(tolerance)}. Learn-then-test keeps it with a "
        f"probability of {percent(1 - first['delta'])}, conformal risk control on average. "
        f"{first['trained_on']:,} states of separate documents trained the learned rule, "
        f"{first['calibrated_on']:,} chose the thresholds, and {promised[0]['rows']:,} other ones "
        "of the same documents show whether the promise was kept.",
        under="calibrated",
    )
    below = sum(row["disagreement"] <= tolerance for row in fresh)
    yield study.Finding(
        f"On {promised[0]['rows']:,} fresh rows of the same documents, {below} of {len(fresh)} "
        f"calibrated rules disagree in at most {percent(tolerance)} of rows; with those whose "
        f"excess may be chance, it is {sum(row['holds'] for row in fresh)}."
        + (f" For {never} no threshold could be certified, so they never exit." if never else ""),
        under="calibrated",
    )
    tested = [row for row in fresh if row["method"] == "learn-then-test"]
    if tested:
        best = _best(tested)
        yield study.Finding(
            f"Of {len(tested)} promises by learn-then-test, each with its own confidence of "
            f"{percent(1 - first['delta'])}, the rule {best['rule']!r} through {best['map']} saves "
            f"most on fresh rows: {best['saved']:.1f} layers, with "
            f"{percent(best['disagreement'], 1)} disagreement.",
            under="calibrated",
        )
    away = [row for row in rows if not row["promised"] and row["knob"] is not None]
    if away:
        yield study.Finding(
            f"On another text, for which nothing was promised, "
            f"{sum(row['holds'] for row in away)} of {len(away)} stayed within the tolerance.",
            under="calibrated",
        )


# --- claims ------------------------------------------------------------------------------------


@study.claim("At 95 % agreement, early exit saves more layers with shortcuts than without.")
def _saves_more(result: StudyResult) -> study.Verdict:
    saved = {row["map"]: row for row in result.rows("exits_saved", rule="gap", target=TARGET)}
    mat, plain = saved["mat"], saved["id"]
    times = f", {mat['saved'] / plain['saved']:.1f} times as many" if plain["saved"] else ""
    ends = [{"value": row["saved"], "low": row["low"], "high": row["high"]} for row in (mat, plain)]
    return study.Verdict(
        above(difference(*ends)),
        f"{mat['saved']:.1f} of {result.model['n_layers']} layers with shortcuts, "
        f"{plain['saved']:.1f} without{times} ({mat['rows']:,} rows)",
        "yes if the two 95 % intervals do not overlap; the paper's rule, with its boldest "
        "threshold that keeps 95 %",
    )


CLAIMS = (
    _saves_more,
    study.Claim(
        "Exiting token by token beats exiting at one fixed layer, at the same mean number of "
        "layers.",
        study.Each(
            pick("exits_lead", rule="gap", map={"id", "mat"}),
            "clearly at {yes} of {n} thresholds, through id and mat",
            "yes if the interval of the lead is above 0 at all thresholds, partly if at most; "
            "fixed exits are interpolated to the same mean number of layers",
            missing="no threshold of the paper's grid exits anywhere in between",
        ),
    ),
)

# --- figures -----------------------------------------------------------------------------------

ALL, CLOSE = "All thresholds", study.CLOSE_UP_PANEL.capitalize()


def _gap_points(panel: str) -> study.Pick:
    """The paper's rule, one colour per lens, beside fixed exits and oracles."""
    return study.points(
        "exits",
        x="layers",
        y="agreement",
        line="{map}, {rule}",
        panel=panel,
        rule={"gap", "fixed", "oracle"},
    )


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


LAYERS = study.Axis("mean layers run per token", "layer")
AGREEMENT = study.Axis("agreement with the full model", "share")
FIGURES = (
    study.Figure(
        "exit",
        "Agreement against layers run",
        "The gap rule stops where the best token is far enough ahead of the second. Each dot is "
        "one threshold; higher and further left is better. Dashed: every token exits at the same "
        "layer. Star: an oracle that exits at the first layer whose top token is the model's own; "
        "no rule can know this.",
        _gap_points(ALL) + _gap_points(CLOSE),
        x=LAYERS,
        y=AGREEMENT,
        lines=_gap_lines(),
        zoom={CLOSE: study.CLOSE_UP},
        columns=2,
        size=(5.0, 4.3),
    ),
    study.Figure(
        "exit_rules",
        "All rules",
        "The same axes, one line per rule. A rule is useful only above the dashed line of fixed "
        "exits.",
        lambda r: exit_rows(r, "layers", maps=_maps(r), close_up=True),
        x=LAYERS,
        y=AGREEMENT,
        lines=study.RULE_LINES,
        columns=2,
        size=(5.0, 4.0),
        zoom={f"Through {name}, {study.CLOSE_UP_PANEL}": study.CLOSE_UP for name in MAPS},
    ),
    study.Figure(
        "exit_flops",
        "Agreement against compute",
        "The lower axis counts everything that is computed, checks included, and doubles with each "
        "step. Right of the line, exiting early costs more than running the whole model.",
        lambda r: exit_rows(r, "flops", maps=_maps(r)),
        x=study.Axis("FLOPs, relative to the full model", "times"),
        y=AGREEMENT,
        lines=study.RULE_LINES,
        marks=lambda _: replayed.FLOPS_MARKS,
        columns=2,
        size=(5.0, 4.5),
    ),
    replayed.calibrated_figure(),
)


def _same_rows(result: StudyResult) -> Iterator[study.Row]:
    base = result.row("same_rows", map="mat", rule="gap") or {}
    for row in result.rows("same_rows"):
        yield {**row, "times": row["saved"] / base["saved"] if base.get("saved") else None}


SAME_ROWS = study.Table(
    "same-rows-table",
    f"Layers saved at {percent(TARGET)} agreement on the same rows, which no rule was trained on",
    _same_rows,
    (
        study.Column("map", "read through"),
        study.Column("rule"),
        estimate("saved", "layers saved"),
        study.Column("times", "times the paper's rule through mat", "{:.2f}"),
        study.Column("rows", form="{:,.0f}"),
    ),
)

SECTION = study.Section(
    "exits",
    "Early exit",
    run,
    lead="A token that is certain early can exit early. A rule decides this from the reading at "
    "each layer: when the best token is far enough ahead, when the entropy is low enough, when "
    "consecutive layers agree. Rules are replayed on the scores of the held-out text.",
    short="Early exit",
    help="early exit, replayed and calibrated",
    findings=findings,
    shows=(
        *CLAIMS,
        *FIGURES,
        replayed.saved_table("saved-table"),
        SAME_ROWS,
        replayed.calibrated_table(),
        study.Texts("texts"),
    ),
    needs=("readings",),
    after=("tuned",),
)
