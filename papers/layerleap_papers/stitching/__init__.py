"""Can two models be joined by their vocabulary?

In: two language models with one vocabulary, and a classifier with it. Out: a `StudyResult` with the
cost of every seam and the accuracy of a classifier without training, after "Analyzing Transformers
in Embedding Space" (arXiv 2209.02535).

Kernels are fitted on one side of the text, and everything is measured on the other.
"""

from collections.abc import Iterator

from layerleap import StudyResult
from layerleap.study import Box, Study
from layerleap_papers.stitching import classifier, pairs
from layerleap_papers.stitching.stitching_context import StitchingContext, StitchingSettings

__all__ = ["STUDY", "StitchingSettings"]


def _about(result: StudyResult) -> Iterator[str]:
    models = result.tables["models"][0]
    yield (
        f"Two models that were trained apart store what they know in different coordinates. But "
        f"they have one vocabulary, and each coordinate can be read as scores of tokens. So "
        f"states of {models['a']} ({models['layers_a']} layers, width {models['d_a']}) can be "
        f"carried into {models['b']} ({models['layers_b']} layers, width {models['d_b']}): to the "
        "state that gives every token nearly the same score. That needs no data and no training."
    )
    yield (
        "Whether the last blocks of the second model can use such states is another question. "
        "Controls say what a score is worth: a random kernel with the same singular values, the "
        "states left as they are, a kernel fitted on a text, and guessing by token frequency."
    )


BOXES = (
    Box("linear", "embedding kernel", "From the two output matrices alone; no data is used."),
    Box("logit", "folded kernel", "The same with final norms folded in, and means left out."),
    Box("tuned", "fitted kernel", "Least squares on the states of both models over a text."),
)


STUDY = Study(
    name="stitching",
    title="{model} stitched to another model, read on {text}",
    help="Stitch the first blocks of MODEL to the last blocks of another model.\n\n"
    "What does a seam cost in loss, for every pair of layers, with a kernel made of the two "
    "vocabularies, a fitted one, a random one, and none? Does a fine-tuned classifier work on "
    "another model without training?\n\n"
    "Bundled models: layerleap study stitching small-lm --other small-lm-2 -o report",
    method=3,
    settings=StitchingSettings,
    context=StitchingContext,
    sections=(pairs.SECTION, classifier.SECTION),
    paper="Dar, Geva, Gupta and Berant, \u201cAnalyzing Transformers in Embedding Space\u201d "
    "(ACL 2023).",
    about=_about,
    boxes=BOXES,
)
