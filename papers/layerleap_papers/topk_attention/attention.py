"""How many keys does attention need? Loss, KL and agreement against k, with no training.

In: held-out rows. Out: the table over k, and the section of the study that shows it.
"""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.act.edits import TopKAttention
from layerleap.errors import BadText
from layerleap.study import above, below, estimate, percent, pick, points, untested
from layerleap_papers.topk_attention.curves import (
    EIGHTH,
    PANELS,
    SAME_LOSS,
    SAME_TOP,
    kept_share,
    nats,
    nearest,
    shares,
)
from layerleap_papers.topk_attention.sparsity_context import SparsityContext


def _run(context: SparsityContext) -> study.Tables:
    rows = context.rows
    seen = rows.visible
    most = int(seen.max())
    known = [k for k in context.settings.keys if k < most]
    if not known:
        raise BadText(
            f"no row sees more than {most} keys, and the fewest keys asked for are "
            f"{context.settings.keys[0]}; give longer texts or a smaller k"
        )
    if left := [k for k in context.settings.keys if k not in known]:
        context.note(
            f"Keeping {', '.join(map(str, left))} keys is left out: no row sees more than {most}, "
            "so attention would be exact."
        )
    table: list[study.Row] = []
    for number, k in enumerate(known):
        context.progress("attention with k keys", number, len(known), "runs")
        reached = float((seen > k).double().mean())
        share = kept_share(seen, k)
        measured = rows.measure(TopKAttention(k=k))
        table += rows.table(measured, k=k, affected=reached, keys_kept=share)
    sizes = {"mean_keys": float(seen.double().mean()), "most_keys": most}
    return {"attention": table, "attention_sizes": [{**sizes, "rows": len(rows)}]}


# --- claims and findings -----------------------------------------------------------------------


def eighth(result: StudyResult, table: str = "attention") -> study.Row | None:
    """The row of the k with which rows keep about an eighth of the keys that they see, on average.

    Rows near the beginning of a text see few keys and keep all of them, so this k is far smaller
    than an eighth of the longest text. None if no k comes near.
    """
    share = nearest(result, table, "keys_kept", EIGHTH)
    return None if share is None else result.rows(table, keys_kept=share)[0]


SHORT = "no k that was tried is near an eighth of the keys; give longer texts, or a smaller k"


@study.claim(
    "Top-k attention needs no corrective training: with an eighth of the keys, the loss "
    "hardly grows."
)
def _untrained(result: StudyResult) -> study.Verdict:
    own = eighth(result)
    if own is None:
        return untested(SHORT)
    row = result.row("attention", k=own["k"], measure="loss")
    if row is None:
        return untested("the right outputs of this text are not known, so there is no loss")
    return study.Verdict(
        below(row, SAME_LOSS),
        f"with k = {own['k']}, which is {percent(own['keys_kept'])} of the keys of a row on "
        f"average, the loss changes by {nats(row)}",
        f"yes if the interval is below {SAME_LOSS} nats",
    )


@study.claim("Zero-shot, the model's answers stay nearly identical with an eighth of the keys.")
def _same_output(result: StudyResult) -> study.Verdict:
    own = eighth(result)
    if own is None:
        return untested(SHORT)
    row = result.row("attention", k=own["k"], measure="agreement")
    if row is None:
        return untested("nothing was measured")
    return study.Verdict(
        above(row, SAME_TOP),
        f"with k = {own['k']} the top output is the same in {shares(row)} of rows",
        f"yes if the interval is above {percent(SAME_TOP)}",
    )


CLAIMS = (_untrained, _same_output)


def _findings(result: StudyResult) -> Iterator[study.Said]:
    rows = result.rows("attention", measure="kl")
    if not rows:
        return
    wanted = result.settings["kl"]
    enough = [row for row in rows if below(row, wanted) == "yes"]
    if enough:
        first = min(enough, key=lambda row: row["k"])
        yield study.Headline(
            f"Attention with {first['k']} keys is within {wanted:g} nats of the whole model: KL "
            f"{nats(first)}. {percent(first['affected'])} of the rows see more keys than that."
        )
    else:
        yield study.Headline(
            f"No k that was tried ({', '.join(str(row['k']) for row in rows)}) is clearly within "
            f"{wanted:g} nats of the whole model."
        )
    fewest = min(rows, key=lambda row: row["k"])
    agreement = result.row("attention", k=fewest["k"], measure="agreement")
    yield (
        f"With k = {fewest['k']}, KL is {nats(fewest)} and the top output is the same in "
        f"{shares(agreement)} of rows."
    )


SECTION = study.Section(
    "attention",
    "How many keys does attention need?",
    _run,
    "Every self-attention of the model keeps only the k keys with the highest scores of each query "
    "and computes the softmax over those, without any training. Where a position sees at most k "
    "keys, nothing changes. Everything is compared with the whole model on the same rows.",
    help="loss, KL and agreement against k",
    findings=_findings,
    shows=(
        *CLAIMS,
        study.Figure(
            "attention",
            "Attention with k keys",
            "Left: how far the output moves. Middle: how often the top output stays the same. "
            "Right: how much worse the text is predicted.",
            points(
                "attention", x="k", line="attention", panel="{measure}", words={"measure": PANELS}
            ),
            x=study.Axis("keys kept (k)", "log"),
            y=study.Axis(""),
            share_y=False,
            unit="rows",
            size=(3.7, 3.3),
            lines={"attention": study.Line("top-k attention", "blue")},
        ),
        study.Table(
            "attention-table",
            "Attention with k keys",
            pick("attention", words={"measure": PANELS}),
            (study.Column("k"), study.Column("affected", "rows that see more", "{:.0f} %", 100)),
            across="measure",
            cells=(estimate("value", "", "{:.3f}"),),
            terminal=True,
        ),
    ),
)
