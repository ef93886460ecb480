"""What training keeps in memory for attention and for FFNs, by implementation and length.

In: the shape of one layer. Out: bytes that the backward pass needs kept, counted exactly, how they
grow with length, and the section of the study that shows it.

Inputs and output are not counted: the layers around hold those with every implementation. What is
alive only while a chunk is computed is not counted either; `make bench` measures peaks.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerleap import StudyResult, study
from layerleap.act.edits import keep_highest
from layerleap.act.topk import Visible, topk_attend
from layerleap.extras import learn_library
from layerleap.study import Column, in_words
from layerleap_papers.topk_attention.sparsity_context import SparsityContext

HEADS, WIDTH = 12, 64  # the layer that the paper measured
K, CHUNK = 64, 256
D_MODEL = HEADS * WIDTH
NEURONS = 4 * D_MODEL
FFN_K = NEURONS // 8
MIB = 2**20
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain causal attention, as transformers' eager implementation computes it."""
    scores = query @ key.mT * WIDTH**-0.5
    n = scores.shape[-1]
    mask = torch.full((n, n), torch.finfo(scores.dtype).min).triu(1)
    return (scores + mask).softmax(-1) @ value


def _chunked(query: Tensor, key: Tensor, value: Tensor, *, k: int | None, again: bool) -> Tensor:
    visible = Visible(is_causal=True)
    return topk_attend(query, key, value, visible, k, chunk=CHUNK, recompute=again)


def topk_relu_ffn(x: Tensor, keys: Tensor, values: Tensor, k: int = FFN_K) -> Tensor:
    """The paper's ReLU FFN: of each token the k largest pre-activations, and only these are kept.

    Tokens are (n, width), keys and values (neuron, width).
    """
    output: Tensor = _TopKReluFFN.apply(x, keys, values, k)
    return output


class _TopKReluFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, values: Tensor, k: int) -> Tensor:
        top, index = (x @ keys.mT).topk(k, -1, sorted=False)
        ctx.save_for_backward(x, keys, values, top, index.int())
        return _scattered(top.relu(), index, len(keys)) @ values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, keys, values, top, index = ctx.saved_tensors
        index, grad, n = index.long(), grads[0], len(keys)
        on_values = _scattered(top.relu(), index, n).mT @ grad
        change = _scattered((grad @ values.mT).gather(-1, index) * (top > 0), index, n)
        return change @ keys, change.mT @ x, on_values, None


def _scattered(kept: Tensor, index: Tensor, n: int) -> Tensor:
    return kept.new_zeros(len(kept), n).scatter(-1, index, kept)


def _masked(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """As `TopKNeurons` does it: coefficients of whole tensors are set to 0."""
    coefficients = (x @ keys.mT).relu()
    return keep_highest(FFN_K, torch.abs, coefficients) @ values


IMPLEMENTATIONS: dict[str, Layer] = {
    "eager": eager,
    "sdpa": partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True),
    "chunked": partial(_chunked, k=None, again=False),
    "top-k": partial(_chunked, k=K, again=False),
    "top-k, recomputed": partial(_chunked, k=K, again=True),
}
LINES = {
    "eager": study.Line("eager: whole score matrix", "orange", marker="s"),
    "sdpa": study.Line("sdpa: PyTorch's fused kernel", "green", marker="D"),
    "chunked": study.Line("exact, in chunks", "grey"),
    "top-k": study.Line(f"top-{K}, selection kept", "blue"),
    "top-k, recomputed": study.Line(f"top-{K}, selected again", "amber", style="dashed"),
}
FFNS: dict[str, Layer] = {
    "whole": lambda x, keys, values: (x @ keys.mT).relu() @ values,
    "top-k": topk_relu_ffn,
    "masked": _masked,
}
NAMES = {
    "memory": {name: line.label for name, line in LINES.items()},
    "memory_ffn": {
        "whole": "whole FFN",
        "top-k": f"top {FFN_K}, as in the paper",
        "masked": f"top {FFN_K} by TopKNeurons",
    },
}


def kept_bytes(layer: Layer, *shapes: tuple[int, ...]) -> int:
    """Bytes kept for the backward pass, without inputs (of these shapes) and output."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    of_inputs = {value.untyped_storage().data_ptr() for value in inputs}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in of_inputs:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(value.detach())
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        output = layer(*inputs)
    kept.pop(output.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def growth(lengths: list[int], sizes: list[int]) -> study.Row | None:
    """The exponent p of size ~ length^p, by least squares, with its 95 % interval."""
    if min(sizes) == 0 or len(lengths) < 3:
        return None
    stats = learn_library("scipy.stats")
    fit = stats.linregress([math.log(n) for n in lengths], [math.log(size) for size in sizes])
    value, margin = float(fit.slope), float(stats.t.ppf(0.975, len(lengths) - 2) * fit.stderr)
    return {"value": value, "low": value - margin, "high": value + margin}


def _run(context: SparsityContext) -> study.Tables:
    lengths = sorted(set(context.settings.lengths))
    tables: study.Tables = {"memory": [], "memory_growth": [], "memory_ffn": []}
    for number, length in enumerate(lengths):
        context.progress("memory of training", number, len(lengths), "lengths")
        neurons = (NEURONS, D_MODEL)
        for table, layers, shapes in (
            ("memory", IMPLEMENTATIONS, [(1, HEADS, length, WIDTH)] * 3),
            ("memory_ffn", FFNS, [(length, D_MODEL), neurons, neurons]),
        ):
            for name, layer in layers.items():
                kept = kept_bytes(layer, *shapes)
                tables[table].append({"name": name, "length": length, "bytes": kept})
    for name in IMPLEMENTATIONS:
        sizes = [row["bytes"] for row in tables["memory"] if row["name"] == name]
        if exponent := growth(lengths, sizes):
            row = {"name": name, **exponent, "lengths": len(lengths)}
            tables["memory_growth"].append(row)
    return tables


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


def _leaner(text: str, table: str, name: str, other: str) -> study.Claim:
    def gaps(result: StudyResult) -> Iterator[study.Row]:
        """Longest first. Bytes are counted: both ends of the interval are the number itself."""
        for row in reversed(result.rows(table, name=name)):
            if peer := result.row(table, name=other, length=row["length"]):
                gap = peer["bytes"] - row["bytes"]
                sizes = {"ours": row["bytes"] / MIB, "theirs": peer["bytes"] / MIB}
                yield {"length": row["length"], **sizes, "low": gap, "high": gap}

    seen = (
        f"at {{length:,}} positions: {NAMES[table][name]} {{ours:.2f}} MiB, "
        f"{NAMES[table][other]} {{theirs:.2f}} MiB"
    )
    why = "yes if it keeps less at every length; bytes are counted, so there is no interval"
    return study.Claim(text, study.Each(gaps, seen, why))


def _sizes(result: StudyResult, table: str) -> tuple[int, str]:
    """The greatest length, and what every implementation keeps there, in words."""
    rows = {row["name"]: row for row in result.rows(table)}  # the longest comes last
    words = [f"{NAMES[table][n]} {row['bytes'] / MIB:.2f} MiB" for n, row in rows.items()]
    return max(row["length"] for row in rows.values()), ", ".join(words)


def _findings(result: StudyResult) -> Iterator[study.Said]:
    length, sizes = _sizes(result, "memory")
    yield study.Headline(
        f"One layer of {HEADS} heads of {WIDTH} keeps for its backward pass at {length:,} "
        f"positions, beside inputs and output: {sizes}."
    )
    length, sizes = _sizes(result, "memory_ffn")
    yield (
        f"A ReLU FFN of {NEURONS:,} neurons keeps at {length:,} positions, beside inputs and "
        f"output: {sizes}."
    )
    sdpa = result.row("memory_growth", name="sdpa")
    if study.below(sdpa, 1.2) == "yes":
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


def _table(key: str, caption: str, table: str) -> study.Table:
    return study.Table(
        key,
        caption,
        study.pick(table, words={"name": NAMES[table]}),
        (Column("length", "positions"),),
        across="name",
        cells=(Column("bytes", "", "{:.2f}", 1 / MIB),),
    )


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
        _linear,
        _leaner(
            "Training with top-k attention keeps less than with plain attention.",
            "memory",
            "top-k",
            "eager",
        ),
        _leaner("It keeps less than today's fused kernels (sdpa), too.", "memory", "top-k", "sdpa"),
        _leaner(
            "Training a ReLU FFN keeps less if each token keeps an eighth of its neurons.",
            "memory_ffn",
            "top-k",
            "whole",
        ),
        _leaner(
            "(ours) So does the edit TopKNeurons, which works on any FFN.",
            "memory_ffn",
            "masked",
            "whole",
        ),
        study.Figure(
            "memory",
            "Kept by attention for the backward pass",
            "On both axes, each step is a factor.",
            _points,
            x=study.Axis("positions", "log"),
            y=study.Axis("MiB", "log"),
            size=(5.6, 3.6),
            sample="bytes are counted, not sampled",
            lines=LINES,
        ),
        _table("memory-table", "Kept by attention for the backward pass, in MiB", "memory"),
        _table(
            "ffn-memory-table", "Kept by a ReLU FFN for the backward pass, in MiB", "memory_ffn"
        ),
        study.Table(
            "growth-table",
            "Exponent of growth with length",
            study.pick("memory_growth", words={"name": NAMES["memory"]}),
            (Column("name", ""), study.estimate("value", "exponent")),
        ),
    ),
)
