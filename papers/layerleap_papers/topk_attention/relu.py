"""ReLU against gated FFNs: two small models, trained on the same text in the same way.

In: the bundled `small-lm-relu` (GPT-NeoX: LayerNorm, biases) and `small-lm` (Llama: RMSNorm, none),
about equally large, one seed each, so that a difference may have other reasons; and the study's
text. Out: the sweep over shares and rules for both, and the section that shows it.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from layerleap import StudyResult, load, study
from layerleap.errors import BadSettings
from layerleap.lens import SHARE
from layerleap.models.weights import FeedForward, feed_forwards
from layerleap.study import above, difference, percent, pick, points, untested
from layerleap_papers.topk_attention.comparisons import (
    EIGHTH,
    PANELS,
    Rows,
    curves,
    nats,
    nearest,
    shares,
)
from layerleap_papers.topk_attention.ffn import COLUMNS, HALF, LINES, papers_rule, sweep
from layerleap_papers.topk_attention.sparsity_context import SparsityContext

RELU, GATED = "ReLU", "gated"
MODELS = {RELU: "small-lm-relu", GATED: "small-lm"}


def _run(context: SparsityContext) -> study.Tables:
    if not context.reads_plain_text or context.text == "generated":
        raise BadSettings(
            f"the two small language models read English, and {context.model.identity.name} is "
            "read on something else; run this section with an English model"
        )
    tables: study.Tables = {"relu": [], "relu_paired": [], "relu_active": []}
    for kind, name in MODELS.items():
        context.progress(f"loading {name}", 0, None, "models")
        rows = context.rows_of(load(name))
        known = feed_forwards(rows.model)
        ffns = {block: ffn for block, ffn in known.items() if isinstance(ffn, FeedForward)}
        table, paired = sweep(rows, ffns, context.settings.shares, context.progress)
        tables["relu"] += [{"ffn": kind, **row} for row in table]
        tables["relu_paired"] += [{"ffn": kind, **row} for row in paired]
        active = rows.estimates(_active(rows, ffns)[:, None], SHARE)[0]
        tables["relu_active"].append({"ffn": kind, "model": name, **active})
    return tables


@torch.no_grad()
def _active(rows: Rows, ffns: dict[int, FeedForward]) -> Tensor:
    """The share of neurons whose coefficient is not 0, as a mean over blocks: (row,)."""
    sites, parts = [(block, ffn.site) for block, ffn in ffns.items()], []
    for batch in rows.batches:
        captured = rows.model.capture(batch.inputs, layers=(), sites=sites, keep=batch.keep)
        active = [(value != 0).double().mean(-1).cpu() for value in captured.sites.values()]
        parts.append(torch.stack(active).mean(0))
    return torch.cat(parts)


def _open_share(result: StudyResult, kind: str) -> float | None:
    """The largest share, up to half, at which rules can differ: fewer neurons than are active."""
    active = result.row("relu_active", ffn=kind)
    most = 1.0 if active is None else active["value"]
    known = {row["share"] for row in result.rows("relu_paired", ffn=kind)}
    return max((share for share in known if share <= HALF and share < most), default=None)


def _rule(result: StudyResult, kind: str) -> study.Verdict:
    share = _open_share(result, kind)
    if share is None:
        return untested("no share that was tried is smaller than that of the active neurons")
    return papers_rule(result, "relu_paired", share, ffn=kind)


@study.claim(
    "(ours) small-lm-relu needs a smaller share of its neurons than small-lm: an eighth of "
    "them costs less."
)
def _sparser(result: StudyResult) -> study.Verdict:
    share = nearest(result, "relu", "share", EIGHTH)
    relu, gated = (
        result.row("relu", ffn=kind, share=share, rule="size", measure="kl") for kind in MODELS
    )
    if relu is None or gated is None or share is None:
        return untested("nothing was measured")
    return study.Verdict(
        above(difference(gated, relu)),
        f"with {percent(share, 1)} of the neurons, KL is {nats(relu)} with ReLU and {nats(gated)} "
        "with gates",
        "yes if the interval of the difference is above 0",
    )


def _findings(result: StudyResult) -> Iterator[study.Said]:
    for row in result.rows("relu_active"):
        yield f"{row['model']}: {shares(row)} of the coefficients of a position are not 0."
    for kind, name in MODELS.items():
        share = _open_share(result, kind)
        by_rule, by_size = (
            result.row("relu", ffn=kind, share=share, rule=rule, measure="kl")
            for rule in ("pre-activation", "size")
        )
        if share is not None and by_rule is not None and by_size is not None:
            yield study.Headline(
                f"{name}, with {percent(share, 1)} of the neurons, fewer than are active: KL "
                f"{nats(by_rule)} if the paper's rule chooses them, {nats(by_size)} by size."
            )
    verdict = _sparser(result)
    if verdict.agrees != "not tested":
        yield study.Headline(f"ReLU against gates: {verdict.seen}.")


SECTION = study.Section(
    "relu",
    "Is the paper's rule right for ReLU and wrong for gates?",
    _run,
    "No large ReLU model can be bundled, so two small language models are trained on this machine "
    "on first use, on the same text and in the same way: one with plain ReLU FFNs, one with gated "
    "FFNs. Both are read on the same held-out texts. They are weak models; only the difference "
    "between their FFNs is of interest.",
    short="ReLU",
    help="the rules on a small ReLU model and its gated counterpart",
    quick=False,
    findings=_findings,
    shows=(
        study.Claim(
            "With ReLU, the paper's rule is right: neurons chosen by pre-activation, fewer than "
            "are active, are as good as those chosen by size (small-lm-relu).",
            partial(_rule, kind=RELU),
        ),
        study.Claim(
            "With gates, the paper's rule is right as well (small-lm).", partial(_rule, kind=GATED)
        ),
        _sparser,
        curves(
            "relu",
            "KL by share of neurons and rule",
            "With ReLU all rules coincide as soon as all positive coefficients are kept.",
            "share of neurons kept",
            rows=points(
                "relu",
                x="share",
                line="{rule}",
                panel="{ffn}",
                measure="kl",
                words={"ffn": {kind: f"{kind} ({name})" for kind, name in MODELS.items()}},
            ),
            y=study.Axis(PANELS["kl"]),
            share_y=True,
            size=(4.4, 3.4),
            lines=LINES,
        ),
        study.Table(
            "relu-table",
            "KL to the whole model in nats",
            pick("relu", measure="kl", words={"rule": COLUMNS}),
            (study.Column("ffn", "FFN"), study.Column("share", "neurons kept", "{:.1f} %", 100)),
            across="rule",
            cells=(study.estimate("value", "", "{:.3f}"),),
        ),
    ),
)
