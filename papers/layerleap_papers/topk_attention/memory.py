"""What training keeps in memory for attention and for FFNs, by implementation and length.

In: the shape of one layer. Out: bytes that the backward pass needs kept, counted exactly, how they
grow with length, and the section of the study that shows it.

Inputs and output are not counted: the layers around hold those with every implementation. What is
alive only while a chunk is computed is not counted either; `make bench` measures peaks.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from layerleap import StudyResult, study
from layerleap.act.topk import Visible, topk_attend
from layerleap.extras import learn_library
from layerleap.study import in_words
from layerleap_papers.topk_attention.relu_ffn import D_MODEL, FFN_NAMES, FFNS, NEURONS
from layerleap_papers.topk_attention.sparsity_context import SparsityContext

HEADS, WIDTH = 12, 64  # the layer that the paper measured
K, CHUNK = 64, 256
MIB = 2**20
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain causal attention, as transformers' eager implementation computes it."""
    scores = query @ key.mT * WIDTH**-0.5
    n = scores.shape[-1]
    mask = torch.full((n, n), torch.finfo(scores.dtype).min).triu(1)
    return (scores + mask).softmax(-1) @ value


def _chunked(query: Tensor, key: Tensor, value: Tensor, *, k: int | None, again: bool) -> Tensor:
    visible = Visible(is_causal=True)
    return topk_attend(query, key, value, visible, k, chunk=CHUNK, recompute=again)


IMPLEMENTATIONS: dict[str, Attend] = {
    "eager": eager,
    "sdpa": partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True),
    "chunked": partial(_chunked, k=None, again=False),
    "top-k": partial(_chunked, k=K, again=False),
    "top-k, recomputed": partial(_chunked, k=K, again=True),
}
NAMES = {
    "eager": "eager: whole score matrix",
    "sdpa": "sdpa: PyTorch's fused kernel",
    "chunked": "exact, in chunks",
    "top-k": f"top-{K}, selection kept",
    "top-k, recomputed": f"top-{K}, selected again",
}


def kept_bytes(attend: Attend, *shapes: tuple[int, ...]) -> int:
    """Bytes that are kept for the backward pass, without those of inputs and output.

    Args:
        attend: what is computed.
        shapes: of its three inputs.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    own = {value.untyped_storage().data_ptr() for value in inputs}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(value.detach())
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        output = attend(*inputs)
    kept.pop(output.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def growth(lengths: list[int], sizes: list[int]) -> study.Row | None:
    """The exponent p of size ~ length^p, by least squares, with its 95 % interval."""
    if min(sizes) == 0 or len(lengths) < 3:
        return None
    x, y = ([math.log(value) for value in values] for values in (lengths, sizes))
    stats = learn_library("scipy.stats")
    fit = stats.linregress(x, y)
    margin = float(stats.t.ppf(0.975, len(x) - 2) * fit.stderr)
    return {
        "value": float(fit.slope),
        "low": float(fit.slope) - margin,
        "high": float(fit.slope) + margin,
    }


def _run(context: SparsityContext) -> study.Tables:
    lengths = sorted(set(context.settings.lengths))
    rows: list[study.Row] = []
    ffns: list[study.Row] = []
    for number, length in enumerate(lengths):
        context.progress("memory of training", number, len(lengths), "lengths")
        for name, attend in IMPLEMENTATIONS.items():
            kept = kept_bytes(attend, *[(1, HEADS, length, WIDTH)] * 3)
            rows.append({"name": name, "length": length, "bytes": kept})
        for name, ffn in FFNS.items():
            kept = kept_bytes(ffn, (length, D_MODEL), (NEURONS, D_MODEL), (NEURONS, D_MODEL))
            ffns.append({"name": name, "length": length, "bytes": kept})
    grows = []
    for name in IMPLEMENTATIONS:
        sizes = [row["bytes"] for row in rows if row["name"] == name]
        if (found := growth(lengths, sizes)) is not None:
            grows.append({"name": name, **found, "lengths": len(lengths)})
    return {"memory": rows, "memory_growth": grows, "memory_ffn": ffns}


# --- claims and findings -----------------------------------------------------------------------


@study.claim("What top-k attention keeps for the backward pass is linear in the length.")
def _linear(result: StudyResult) -> study.Verdict:
    row = result.row("memory_growth", name="top-k")
    if row is None:
        return study.untested("nothing was measured")
    whole = result.row("memory_growth", name="eager")
    return study.Verdict(
        study.between(row, 0.9, 1.1),
        f"what is kept grows with length to the power {in_words(row)}; of eager attention "
        f"{in_words(whole)}",
        "yes if the interval of the exponent is within 0.9 to 1.1",
    )


def _leaner(result: StudyResult, table: str, name: str, other: str) -> study.Verdict:
    names = {"memory": NAMES, "memory_ffn": FFN_NAMES}[table]
    pairs = [
        (row["length"], row["bytes"], peer["bytes"])
        for row in result.rows(table, name=name)
        if (peer := result.row(table, name=other, length=row["length"])) is not None
    ]
    if not pairs:
        return study.untested("nothing was measured")
    # Counted, not sampled: both ends of the interval are the number itself.
    gaps = [{"low": theirs - ours, "high": theirs - ours} for _, ours, theirs in pairs]
    length, ours, theirs = pairs[-1]
    return study.Verdict(
        study.at_every(study.above(gap) for gap in gaps),
        f"at {length:,} positions: {names[name]} {ours / MIB:.2f} MiB, {names[other]} "
        f"{theirs / MIB:.2f} MiB",
        "yes if it keeps less at every length; bytes are counted, so there is no interval",
    )


CLAIMS = (
    _linear,
    study.Claim(
        "Training with top-k attention keeps less than with plain attention.",
        partial(_leaner, table="memory", name="top-k", other="eager"),
    ),
    study.Claim(
        "It keeps less than today's fused kernels (sdpa), too.",
        partial(_leaner, table="memory", name="top-k", other="sdpa"),
    ),
    study.Claim(
        "Training a ReLU FFN keeps less if each token keeps an eighth of its neurons.",
        partial(_leaner, table="memory_ffn", name="top-k", other="whole"),
    ),
    study.Claim(
        "(ours) So does the edit TopKNeurons, which works on any FFN.",
        partial(_leaner, table="memory_ffn", name="masked", other="whole"),
    ),
)


def _findings(result: StudyResult) -> Iterator[study.Said]:
    rows = {row["name"]: row for row in result.rows("memory")}  # the longest comes last
    if not rows:
        return
    length = rows["eager"]["length"]
    listed = ", ".join(f"{NAMES[name]} {row['bytes'] / MIB:.2f} MiB" for name, row in rows.items())
    yield study.Headline(
        f"One layer of {HEADS} heads of {WIDTH} keeps for its backward pass at {length:,} "
        f"positions, beside inputs and output: {listed}."
    )
    ffns = {row["name"]: row for row in result.rows("memory_ffn")}
    listed = ", ".join(f"{FFN_NAMES[n]} {row['bytes'] / MIB:.2f} MiB" for n, row in ffns.items())
    yield (
        f"A ReLU FFN of {NEURONS:,} neurons keeps at {length:,} positions, beside inputs and "
        f"output: {listed}."
    )
    grows = {row["name"]: row for row in result.rows("memory_growth")}
    sdpa = grows.get("sdpa")
    if sdpa is not None and study.below(sdpa, 1.2) == "yes":
        yield study.Headline(
            "PyTorch's fused kernel already needs linear memory "
            f"(exponent {in_words(sdpa)}) and computes exact attention, so memory alone is no "
            "reason for top-k attention where that kernel can be used. Top-k still helps where it "
            "cannot (weights have to be looked at, capped or biased), as a measure of how sparse "
            "attention is, and where few values are read from a long cache."
        )


def _points(result: StudyResult) -> Iterator[study.Row]:
    for row in result.rows("memory"):
        if row["bytes"]:
            yield {"x": row["length"], "y": row["bytes"] / MIB, "line": row["name"]}


SECTION = study.Section(
    "memory",
    "How much does training keep in memory?",
    _run,
    f"One causal attention layer of {HEADS} heads of {WIDTH}, batch of one, whatever the model: "
    "the bytes that autograd keeps for the backward pass beside inputs and output, counted. "
    f"Top-k attention has k = {K}. So, too, of one ReLU FFN of {NEURONS:,} neurons, of which an "
    "eighth is kept.",
    help="bytes kept by eager, chunked, sdpa and top-k attention, and by FFNs",
    findings=_findings,
    shows=(
        *CLAIMS,
        study.Figure(
            "memory",
            "Kept by attention for the backward pass",
            "On both axes, each step is a factor.",
            _points,
            x=study.Axis("positions", "log"),
            y=study.Axis("MiB", "log"),
            size=(5.6, 3.6),
            sample="bytes are counted, not sampled",
            lines={
                "eager": study.Line(NAMES["eager"], "orange", marker="s"),
                "sdpa": study.Line(NAMES["sdpa"], "green", marker="D"),
                "chunked": study.Line(NAMES["chunked"], "grey"),
                "top-k": study.Line(NAMES["top-k"], "blue"),
                "top-k, recomputed": study.Line(
                    NAMES["top-k, recomputed"], "amber", style="dashed"
                ),
            },
        ),
        study.Table(
            "memory-table",
            "Kept by attention for the backward pass, in MiB",
            study.pick("memory", words={"name": NAMES}),
            (study.Column("length", "positions"),),
            across="name",
            cells=(study.Column("bytes", "", "{:.2f}", 1 / MIB),),
        ),
        study.Table(
            "ffn-memory-table",
            "Kept by a ReLU FFN for the backward pass, in MiB",
            study.pick("memory_ffn", words={"name": FFN_NAMES}),
            (study.Column("length", "positions"),),
            across="name",
            cells=(study.Column("bytes", "", "{:.2f}", 1 / MIB),),
        ),
        study.Table(
            "growth-table",
            "Exponent of growth with length",
            study.pick("memory_growth", words={"name": NAMES}),
            (study.Column("name", ""), study.estimate("value", "exponent")),
        ),
    ),
)
