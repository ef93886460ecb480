"""How many neurons do FFNs need, and which ones? Loss, KL and agreement by rule and share kept.

In: held-out rows. Out: a table over shares for each rule, paired differences between rules, and the
section of the study that shows it.
"""

import math
from collections.abc import Iterator
from functools import partial

from layerleap import StudyResult, study
from layerleap.act.edits import By, TopKNeurons
from layerleap.errors import ModelRefused
from layerleap.lens import ANY
from layerleap.models.weights import FeedForward, feed_forwards, ffn_keys
from layerleap.progress import Progress
from layerleap.study import above, all_of, below, percent, pick, points, untested
from layerleap_papers.topk_attention.comparisons import (
    EIGHTH,
    NO_LOSS,
    PANELS,
    SAME_LOSS,
    SAME_TOP,
    Measured,
    Rows,
    cheapest,
    curves,
    nats,
    nearest,
    shares,
)
from layerleap_papers.topk_attention.sparsity_context import SparsityContext

LINES: dict[By, study.Line] = {
    "size": study.Line("by size: |coefficient| times the value's norm", "blue"),
    "magnitude": study.Line("by magnitude: |coefficient|", "green", marker="D"),
    "signed": study.Line("by the coefficient itself", "amber", marker="s", style="dashed"),
    "pre-activation": study.Line(
        "by the pre-activation (the paper's rule)", "orange", marker="^", style="dashed"
    ),
}
COLUMNS = {
    "size": "by size",
    "magnitude": "by magnitude",
    "signed": "by coefficient",
    "pre-activation": "by pre-activation",
}
HALF = 0.5
FAR = "no share of the neurons that was tried is near the one that the claim is about"


def sweep(
    rows: Rows, ffns: dict[int, FeedForward], to_keep: tuple[float, ...], progress: Progress
) -> tuple[list[study.Row], list[study.Row]]:
    """Every rule at every share: means, and paired differences of each rule from "size"."""
    rules = [rule for rule in LINES if rule != "pre-activation" or has_keys(rows, ffns)]
    table, paired = list[study.Row](), list[study.Row]()
    for number, share in enumerate(to_keep):
        k = {block: max(1, math.ceil(share * ffn.n_neurons)) for block, ffn in ffns.items()}
        measured: dict[By, Measured] = {}
        for place, rule in enumerate(rules):
            done = number * len(rules) + place
            progress(f"FFNs of {rows.model.identity.name}", done, len(to_keep) * len(rules), "runs")
            measured[rule] = rows.measure(TopKNeurons(k, rule))
            about = {"share": share, "neurons": min(k.values()), "rule": rule}
            table += rows.table(measured[rule].columns(), about)
        by_size = measured.pop("size").columns()
        for rule, one in measured.items():
            about = {"share": share, "rule": rule}
            paired += rows.table(one.columns() - by_size, about, (ANY,))
    return table, paired


def has_keys(rows: Rows, ffns: dict[int, FeedForward]) -> bool:
    """True if the pre-activations of every block are known."""
    try:
        return all(ffn_keys(rows.model, block) for block in ffns)
    except ModelRefused:
        return False


def kind_of(rows: Rows, ffns: dict[int, FeedForward]) -> str:
    """The kind of FFN in words: gated or plain, and its activation."""
    if not has_keys(rows, ffns):
        return "unknown"
    keys = [ffn_keys(rows.model, block) for block in ffns]
    kinds = {f"{'gated' if len(one.rows) == 2 else 'plain'}, {one.activation}" for one in keys}
    return " or ".join(sorted(kinds))


def _run(context: SparsityContext) -> study.Tables:
    ffns = context.ffns
    if not ffns:
        raise ModelRefused(str(next(iter(feed_forwards(context.model).values()))))
    if not has_keys(context.rows, ffns):
        context.note("The paper's rule is left out: the keys of some FFN are not known.")
    table, paired = sweep(context.rows, ffns, context.settings.shares, context.progress)
    kind = {"kind": kind_of(context.rows, ffns), "blocks": len(ffns)}
    return {"ffn": table, "ffn_paired": paired, "ffn_kind": [kind]}


@study.claim("An eighth of the neurons of each position is enough, with no training.")
def _enough(result: StudyResult) -> study.Verdict:
    share = nearest(result, "ffn", "share", EIGHTH)
    if share is None:
        return untested(FAR)
    loss, same = (
        result.row("ffn", share=share, rule="size", measure=measure)
        for measure in ("loss", "agreement")
    )
    if loss is None:
        return untested(NO_LOSS)
    # A loss alone may stay the same, or fall by chance, while outputs change.
    return study.Verdict(
        all_of([below(loss, SAME_LOSS), above(same, SAME_TOP)]),
        f"with {percent(share, 1)} of the neurons, by size, the loss changes by {nats(loss)} and "
        f"the top output is the same in {shares(same)} of rows",
        f"yes if the interval of the loss is below {SAME_LOSS} nats and that of agreement above "
        f"{percent(SAME_TOP)}",
    )


def papers_rule(result: StudyResult, table: str, share: float, **where: str) -> study.Verdict:
    """Does the paper's rule do as well as selecting by size?"""
    known = nearest(result, table, "share", share, **where)
    if known is None and result.rows(table, **where):
        return untested(FAR)
    row = result.row(table, share=known, rule="pre-activation", measure="kl", **where)
    if row is None or known is None:
        return untested("the pre-activations of this model's FFNs are not known")
    return study.Verdict(
        below(row, SAME_LOSS),
        f"with {percent(known, 1)} of the neurons its KL minus that by size is {nats(row)}",
        f"yes if the interval is below {SAME_LOSS} nats",
    )


def _findings(result: StudyResult) -> Iterator[study.Said]:
    yield f"The FFNs of this model are {result.tables['ffn_kind'][0]['kind']}."
    kl = result.settings["kl"]
    if first := cheapest(result.rows("ffn", rule="size", measure="kl"), "share", kl):
        yield study.Headline(
            f"With {percent(first['share'], 1)} of their neurons, chosen by size at each position, "
            f"FFNs are within {kl:g} nats of the whole model: KL {nats(first)}."
        )
    else:
        yield study.Headline(
            f"No share of neurons that was tried, chosen by size, is clearly within {kl:g} nats of "
            "the whole model."
        )
    half = nearest(result, "ffn", "share", HALF)
    for rule in ("signed", "pre-activation"):
        row = result.row("ffn_paired", rule=rule, share=half, measure="kl")
        agreement = result.row("ffn", rule=rule, share=half, measure="agreement")
        if row is not None and half is not None:
            verb, more = "changes KL by", "against size"
            if above(row) == "yes":
                verb, more = "costs", "more than choosing by size"
            yield study.Finding(
                f"Keeping {percent(half, 0)} of the neurons {LINES[rule].label} {verb} {nats(row)} "
                f"{more}; the top output is the same in {shares(agreement)} of rows.",
                under="ffn",
                headline=rule == "pre-activation",
            )


SECTION = study.Section(
    "ffn",
    "How many neurons do FFNs need, and which?",
    _run,
    "At each position every FFN keeps a share of its neurons and sets the coefficients of the "
    "others to 0. Four rules choose them. The paper chose the largest signed pre-activations, for "
    "ReLU FFNs, whose coefficients are never negative. In a gated FFN, large coefficients have "
    "both signs.",
    short="FFN",
    help="the same for neurons, by four rules",
    findings=_findings,
    shows=(
        _enough,
        study.Claim(
            "The paper's rule, the largest signed pre-activations, keeps what matters: half of the "
            "neurons chosen so are as good as half chosen by size.",
            partial(papers_rule, table="ffn_paired", share=HALF),
        ),
        curves(
            "ffn",
            "FFNs with a share of their neurons",
            "One line per rule that chooses neurons. Of KL and loss, lower is better.",
            "share of neurons kept",
            rows=points(
                "ffn", x="share", line="{rule}", panel="{measure}", words={"measure": PANELS}
            ),
            lines=LINES,
        ),
        study.Table(
            "ffn-table",
            "KL to the whole model in nats, by the rule that chooses neurons",
            pick("ffn", measure="kl", words={"rule": COLUMNS}),
            (
                study.Column("share", "neurons kept", "{:.1f} %", 100),
                study.Column("neurons", "k, at least"),
            ),
            across="rule",
            cells=(study.estimate("value", "", "{:.3f}"),),
            terminal=True,
        ),
    ),
)
