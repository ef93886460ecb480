"""How few keys and neurons does a model need?

In: a model and a text. Out: a `StudyResult` with loss, KL and agreement against k for attention and
FFNs, what heads look at, budgets by layer, training runs and memory, after "Memory-efficient
Transformers via Top-k Attention" (arXiv 2106.06899).
"""

from collections.abc import Iterator

from layerleap import StudyResult
from layerleap.study import Box, Study
from layerleap_papers.topk_attention import attention, budget, ffn, heads, memory, relu, training
from layerleap_papers.topk_attention.sparsity_context import SparsityContext, SparsitySettings

__all__ = ["STUDY", "SparsitySettings"]


def _about(result: StudyResult) -> Iterator[str]:
    yield (
        "Attention looks at all keys and an FFN uses all of its neurons, but most of them "
        "contribute next to nothing. Top-k attention keeps the k keys with the highest scores of "
        "each query; a top-k FFN keeps the k neurons that add most at each position. This study "
        "measures how small k can be, for this model and this text."
    )
    yield (
        "Everything is compared with the whole model on the same held-out rows. KL is that of the "
        "restricted model's output from the whole model's; the loss is compared where the right "
        "output is known. Intervals are over documents, and over seeds where models are trained."
    )
    if result.model["kind"] == "next-token" and result.model.get("architecture", "").endswith(
        "ConditionalGeneration"
    ):
        yield (
            "Of an encoder-decoder, the decoder's self-attention and FFNs are restricted. The "
            "encoder and the attention to it stay whole."
        )


BOXES = (
    Box(
        "linear",
        "Top-k attention",
        "The softmax over the k highest scores of each query. Scores are all computed, so time "
        "stays quadratic in length; only memory does not.",
    ),
    Box(
        "tuned",
        "Top-k neurons",
        "The k largest products of coefficient and length of the value vector. The rest of the "
        "coefficients become 0.",
    ),
)


STUDY = Study(
    name="sparsity",
    method=6,
    title="How sparse is {model}? Read on {text}",
    help="How few keys and neurons does a model need?\n\n"
    "Loss, KL and agreement against k for attention, and for FFNs by four rules. Attention mass in "
    "the top k by layer and head, and what heads that need many keys look at. The smallest k of "
    "each layer for a wanted KL, verified on held-out text. Training with top-k attention beside "
    "exact attention (slow: not with --quick, unless named). Memory, beside fused kernels.",
    settings=SparsitySettings,
    context=SparsityContext,
    sections=(
        attention.SECTION,
        heads.SECTION,
        ffn.SECTION,
        budget.SECTION,
        relu.SECTION,
        training.SECTION,
        memory.SECTION,
    ),
    paper="Gupta, Dar, Goodman, Ciprut and Berant, \u201cMemory-efficient Transformers via Top-k "
    "Attention\u201d (SustaiNLP 2021).",
    about=_about,
    boxes=BOXES,
)
