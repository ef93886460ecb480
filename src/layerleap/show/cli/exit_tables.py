"""Tables for the terminal about exits and claims, readable at 80 columns.

In: the plain-data result of a study. Out: rich renderables, or None when the study has nothing.
"""

from rich.console import Group, RenderableType
from rich.text import Text

from layerleap.show.cli.tables import new_table
from layerleap.show.figures.select import Row, Study, finite, map_rank, sample

ANSWERS = {"yes": "green", "no": "bold red", "partly": "yellow"}


def exits_table(study: Study) -> RenderableType | None:
    """Layers saved at each agreement, by map and rule; with interval and FLOPs at 95 %."""
    rows = (study.get("exits") or {}).get("saved") or []
    if not rows:
        return None
    targets = sorted({row["target"] for row in rows})
    by = {(row["map"], row["rule"], row["target"]): row for row in rows}
    main = 0.95 if 0.95 in targets else targets[0]  # the paper's; for all, 80 columns are too few
    table = new_table(Text("layers saved by early exit, at an agreement with the full model of"))
    table.add_column("map", no_wrap=True)
    table.add_column("rule", no_wrap=True, overflow="ellipsis", ratio=1)
    for target in targets:
        table.add_column(f"{100 * target:g} %", justify="right", no_wrap=True)
        if target == main:
            table.add_column("FLOPs", justify="right", no_wrap=True)
    pairs = dict.fromkeys((row["map"], row["rule"]) for row in rows)
    for name, rule in sorted(pairs, key=lambda pair: map_rank(pair[0])):
        cells = []
        for target in targets:
            row = by.get((name, rule, target), {})
            cells += [_saved(row, True), _flops(row)] if target == main else [_saved(row, False)]
        table.add_row(Text(name), Text(rule), *cells)
    note = (
        f"At {100 * main:g} % with the 95 % interval and the share of FLOPs saved; below 0, "
        "exiting costs more than it saves. A dash: not reached."
    )
    return Group(table, Text(f"{sample(rows)}. {note}", style="dim"))


def _saved(row: Row, interval: bool) -> Text:
    value, low, high = (finite(row.get(key)) for key in ("saved", "low", "high"))
    if value is None:
        return Text("-", style="dim")
    text = Text(f"{value:.1f}")
    if interval and low is not None and high is not None:
        text.append(f" {low:.1f}-{high:.1f}", style="dim")
    return text


def _flops(row: Row) -> Text:
    share = finite(row.get("flops"))
    if share is None:
        return Text("-", style="dim")
    return Text(f"{100 * share:.0f} %", style="red" if share < 0 else "green")


def claims_table(study: Study) -> RenderableType | None:
    """What the paper says, whether it was seen here, and what was seen."""
    rows = study.get("claims") or []
    if not rows:
        return None
    table = new_table(Text("what the paper says, and what was seen here"))
    table.add_column("the paper says", ratio=3, overflow="fold")
    table.add_column("agrees?", no_wrap=True)
    table.add_column("seen here", ratio=4, overflow="fold")
    for row in rows:
        answer = Text(row["agrees"], style=ANSWERS.get(row["agrees"], "dim"))
        seen = Text(row["seen"])
        if row.get("why"):
            seen.append(f"\n{row['why']}", style="dim")
        table.add_row(Text(row["claim"]), answer, seen)
    return table
