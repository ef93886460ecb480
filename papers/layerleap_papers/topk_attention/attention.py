"""How many keys does attention need? Loss, KL and agreement against k, with no training.

In: held-out rows. Out: the table over k, and the section of the study that shows it.
"""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.act.edits import TopKAttention
from layerleap.errors import BadText
from layerleap.study import above, below, percent, pick, points, untested
from layerleap_papers.topk_attention.comparisons import (
    EIGHTH,
    NO_LOSS,
    PANELS,
    SAME_LOSS,
    SAME_TOP,
    cheapest,
    curves,
    kept_share,
    nats,
    nearest,
    shares,
)
from layerleap_papers.topk_attention.sparsity_context import SparsityContext

SHORT = "no k that was tried is near an eighth of the keys; give longer texts, or a smaller k"


def _run(context: SparsityContext) -> study.Tables:
    rows, visible = context.rows, context.rows.visible
    most = int(visible.max())
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
        about = {"k": k, "affected": float((visible > k).double().mean())}
        about["keys_kept"] = kept_share(visible, k)
        table += rows.table(rows.measure(TopKAttention(k=k)).columns(), about)
    sizes = {"mean_keys": float(visible.double().mean()), "most_keys": most, "rows": len(rows)}
    return {"attention": table, "attention_sizes": [sizes]}


def eighth(result: StudyResult, table: str = "attention", **where: object) -> list[study.Row]:
    """Rows of the k with which rows keep about an eighth of the keys that they see, on average.

    Rows near the beginning of a text see few keys and keep all of them, so this k is far smaller
    than an eighth of the longest text. Empty if no k comes near.
    """
    share = nearest(result, table, "keys_kept", EIGHTH)
    return [] if share is None else result.rows(table, keys_kept=share, **where)


@study.claim(
    "Top-k attention needs no corrective training: with an eighth of the keys, the loss "
    "hardly grows."
)
def _untrained(result: StudyResult) -> study.Verdict:
    rows = eighth(result, measure="loss")
    if not rows:
        return untested(NO_LOSS if eighth(result) else SHORT)
    return study.Verdict(
        below(rows[0], SAME_LOSS),
        f"with k = {rows[0]['k']}, which is {percent(rows[0]['keys_kept'])} of the keys of a row "
        f"on average, the loss changes by {nats(rows[0])}",
        f"yes if the interval is below {SAME_LOSS} nats",
    )


def _findings(result: StudyResult) -> Iterator[study.Said]:
    rows = result.rows("attention", measure="kl")
    if not rows:
        return
    kl = result.settings["kl"]
    if first := cheapest(rows, "k", kl):
        yield study.Headline(
            f"Attention with {first['k']} keys is within {kl:g} nats of the whole model: KL "
            f"{nats(first)}. {percent(first['affected'])} of the rows see more keys than that."
        )
    else:
        yield study.Headline(
            f"No k that was tried ({', '.join(str(row['k']) for row in rows)}) is clearly within "
            f"{kl:g} nats of the whole model."
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
        _untrained,
        study.Claim(
            "Zero-shot, the model's answers stay nearly identical with an eighth of the keys.",
            study.Each(
                lambda result: eighth(result, measure="agreement"),
                "with k = {k} the top output is the same in {estimate:%} of rows",
                f"yes if the interval is above {percent(SAME_TOP)}",
                lambda row: above(row, SAME_TOP),
                missing=SHORT,
            ),
        ),
        curves(
            "attention",
            "Attention with k keys",
            "Left: how far the output moves. Middle: how often the top output stays the same. "
            "Right: how much worse the text is predicted.",
            "keys kept (k)",
            rows=points(
                "attention", x="k", line="attention", panel="{measure}", words={"measure": PANELS}
            ),
            lines={"attention": study.Line("top-k attention", "blue")},
        ),
        study.Table(
            "attention-table",
            "Attention with k keys",
            pick("attention", words={"measure": PANELS}),
            (study.Column("k"), study.Column("affected", "rows that see more", "{:.0f} %", 100)),
            across="measure",
            cells=(study.estimate("value", "", "{:.3f}"),),
            terminal=True,
        ),
    ),
)
