"""A classifier without training: the last blocks of a fine-tuned classifier on another model.

In: a language model, a classifier fine-tuned from another one, and labelled held-out texts. Out:
the accuracy at every layer of the seam and with every kernel; and whether the classifier's
parameters, translated into the basis of the first model, say the same as the splice.

No label is used by any kernel. The fitted kernel has seen other reviews, without their labels. The
layer of each kernel is chosen on one half of the texts, and its accuracy is that on the other half.
"""

import random
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from layerleap import StudyResult, Transformer, study
from layerleap.act.stitch import Stitched, translate
from layerleap.errors import BadSettings, BadText, ModelRefused
from layerleap.lens import DIFFERENCE, SHARE, Bounds, mean_interval
from layerleap.models import padded, record
from layerleap.study import Claim, Each, in_words, percent, pick
from layerleap.zoo import is_held_out
from layerleap_papers.stitching.stitching_context import LINES, Kernels, StitchingContext

TEXTS_PER_BATCH = 8
TRANSLATED_TEXTS = 16  # on which the translated parameters run beside the splice


def tables(context: StitchingContext) -> study.Tables:
    """Accuracy by kernel and layer, of both halves, and the check of the translation."""
    classifier, kept = context.classifier, context.settings.kept_blocks
    layer = classifier.n_layers - kept
    pairs = [(i, layer) for i in context.grid(context.model)]
    kernels, _ = context.kernels(classifier, pairs, *context.review_batches())
    texts, labels = _held_out(context)
    right, alone = classify(context, kernels, texts, labels)
    places = [{"kernel": kernel, "layer": i} for kernel, (i, _) in kernels]
    itself, commonest = _estimates(alone)
    about = {"name": classifier.identity.name, "layer": layer, "kept_blocks": kept}
    about |= {"n_layers": classifier.n_layers, **itself, "chance": commonest["value"]}
    return {
        "accuracy": [{**p, **row} for p, row in zip(places, _estimates(right), strict=True)],
        "chosen": _chosen(places, right, alone),
        "classifier": [about],
        "translation": _translations(context, layer, kernels, texts),
    }


def _held_out(context: StitchingContext) -> tuple[list[str], Tensor]:
    """Labelled texts that neither the bundled classifier nor a kernel has seen, in random order."""
    s = context.settings
    held_out = [review for review in context.reviews() if is_held_out(review[0])]
    if len(held_out) < 2:
        raise BadText(f"{s.reviews} has {len(held_out)} held-out texts; expected at least two")
    random.Random(s.seed).shuffle(held_out)
    texts, labels = zip(*held_out[: s.n_reviews], strict=True)
    return list(texts), torch.tensor(labels)


def _inputs(context: StitchingContext, texts: list[str]) -> dict[str, Tensor]:
    tokenizer = context.model.need_tokenizer()
    limit = context.settings.max_tokens
    return padded(context.model, tokenizer(texts, truncation=True, max_length=limit)["input_ids"])


def classify(
    context: StitchingContext, kernels: Kernels, texts: list[str], labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Which texts each stitched classifier gets right, (text, kernel and layer), 1 or 0.

    And (text, 2) what needs no stitching: the classifier itself, and always the commonest class.
    """
    a, c, started = context.model, context.classifier, time.monotonic()
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    right = torch.zeros(len(texts), len(kernels), dtype=torch.float64)
    alone = torch.stack([torch.zeros(len(texts)), labels == labels.mode().values], 1).double()
    tokens = 0
    for start in range(0, len(order), TEXTS_PER_BATCH):
        rows = order[start : start + TEXTS_PER_BATCH]
        inputs, truth = _inputs(context, [texts[row] for row in rows]), labels[rows]
        tokens += int(inputs["attention_mask"].sum())
        states = a.capture(inputs, layers={i for _, (i, _) in kernels}).states
        recording = record(c, inputs, logits=True)
        assert recording.logits is not None
        alone[rows, 0] = (recording.logits.argmax(-1).cpu() == truth).double()
        for column, ((_, (i, j)), carry) in enumerate(kernels.items()):
            h = recording.run(carry(states[i]).to(c.device(j), c.model.dtype), j)
            logits = _logits(c, h, inputs["attention_mask"])
            right[rows, column] = (logits.argmax(-1).cpu() == truth).double()
        context.progress("classifying reviews", start + len(rows), len(texts))
    counts = {"texts": len(texts), "documents": len(texts), "rows": len(texts), "tokens": tokens}
    context.read("classify", context.settings.reviews, counts, started)
    return right, alone


@torch.no_grad()
def _logits(model: Transformer, h: Tensor, mask: Tensor) -> Tensor:
    return model.logits(model.rows(h, model.pooled(mask)))


def _estimates(values: Tensor, bounds: Bounds = SHARE) -> list[study.Row]:
    """Column means; every text is a document."""
    return [one.to_dict() for one in mean_interval(values, torch.arange(len(values)), bounds)]


def _chosen(places: list[study.Row], right: Tensor, alone: Tensor) -> list[study.Row]:
    """Accuracy by kernel on the second half, at the layer that the first half chose."""
    first, second = right[::2].mean(0).tolist(), right[1::2]
    estimates = _estimates(second)
    # Text by text: the commonest class is right on some of the same texts.
    leads = _estimates(second - alone[1::2, 1:2], DIFFERENCE)
    chosen = []
    for kernel in dict.fromkeys(place["kernel"] for place in places):
        columns = [n for n, place in enumerate(places) if place["kernel"] == kernel]
        best = max(columns, key=lambda column: first[column])
        lead = {f"lead_{key}": leads[best][key] for key in ("value", "low", "high")}
        chosen.append({**places[best], **estimates[best], **lead})
    return chosen


def _translations(
    context: StitchingContext, layer: int, kernels: Kernels, texts: list[str]
) -> list[study.Row]:
    """Logits of the translated parameters beside those of the splice."""
    layers = sorted({i for _, (i, _) in kernels})
    inputs = _inputs(context, texts[:TRANSLATED_TEXTS])
    rows: list[study.Row] = []
    for at in sorted({layers[0], layers[len(layers) // 2], layers[-1]}):
        kernel = kernels["embedding", (at, layer)]
        stitched = Stitched(context.model, at, context.classifier, layer, "embedding", kernel)
        try:
            translated = translate(stitched)(inputs).cpu().double()
        except (BadSettings, ModelRefused) as error:
            context.leave_out("Translated parameters", error)
            return rows
        spliced = stitched(inputs).cpu().double()
        gap, size = float((translated - spliced).abs().max()), float(spliced.abs().max())
        same = float((translated.argmax(-1) == spliced.argmax(-1)).double().mean())
        rows.append({"layer": at, "texts": len(spliced), "gap": gap, "size": size, "same": same})
    return rows


def findings(result: StudyResult) -> Iterator[study.Said]:
    """Whether it works, and what the translation says."""
    about = result.tables["classifier"][0]
    a, kept = result.tables["models"][0]["a"], about["kept_blocks"]
    blocks = {0: "Its head", 1: "Its last block"}.get(kept, f"Its last {kept} blocks")
    yield (
        f"{about['name']} itself is right on {percent(about['value'], 1)} of "
        f"{about['rows']:,} held-out reviews; always naming the commonest verdict is right on "
        f"{percent(about['chance'], 1)}."
    )
    for row in result.rows("chosen"):
        verb = {"yes": "better than chance", "no": "no better than chance"}.get(
            study.above(study.part_of(row, "lead")), "not clearly better than chance"
        )
        yield study.Finding(
            f"{blocks} after layer {row['layer']} of {a}, {LINES[row['kernel']].label}: "
            f"{in_words(row, '.1%')}, {verb}. The layer was chosen on the other half of the "
            "reviews.",
            under="accuracy",
            headline=row["kernel"] == "embedding",
        )
    if rows := result.rows("translation"):
        worst = max(rows, key=lambda row: row["gap"])
        agree = "agree" if _is_rounding(worst) else "do NOT agree"
        yield (
            f"Translated parameters and the splice {agree}: their logits differ by up to "
            f"{worst['gap']:.1e} (the largest logit is {worst['size']:.1f}), and the verdict is "
            f"the same on {percent(min(row['same'] for row in rows))} of the texts that were run "
            "both ways."
        )


def _is_rounding(row: study.Row) -> bool:
    """Whether rounding in float32 explains the gap: kernel and inverse are multiplied in."""
    return bool(row["gap"] <= 1e-3 * row["size"])


@study.claim("Translating its parameters and splicing the models are the same.")
def _translates(result: StudyResult) -> study.Verdict:
    rows = result.rows("translation")
    if not rows:
        return study.untested("its parameters could not be translated")
    gap = max(row["gap"] / row["size"] for row in rows)
    return study.Verdict(
        "yes" if all(map(_is_rounding, rows)) else "no",
        f"logits differ by up to {gap:.1e} of the largest",
        "yes if they differ by at most a thousandth of the largest logit",
    )


CHOSEN = pick("chosen", kernel="embedding")
NONE = "no classifier was stitched"


def _marks(result: StudyResult) -> Iterator[study.Mark]:
    about = result.tables["classifier"][0]
    yield study.Mark("y", about["value"], f"{about['name']} itself, {percent(about['value'])}")
    yield study.Mark("y", about["chance"], f"commonest verdict, {percent(about['chance'])}")


SECTION = study.Section(
    key="classifier",
    title="A classifier without training",
    run=tables,
    help="a fine-tuned classifier on the other model",
    lead="The last blocks and the head of a fine-tuned classifier go on where the first model "
    "ends. Nothing is trained: the kernel comes from the two vocabularies. The same is done with "
    "its parameters translated into the basis of the first model, which must say the same.",
    findings=findings,
    shows=(
        Claim(
            "A classifier's last blocks work on another model without training (more than 70 % "
            "right); in the paper, 3 of 11 runs did.",
            Each(
                CHOSEN,
                "{estimate:.1%} after layer {layer}",
                "yes if the interval is above 70 %, at a layer chosen on other reviews",
                lambda row: study.above(row, 0.7),
                missing=NONE,
            ),
        ),
        Claim(
            "They are right more often than always naming the commonest class.",
            Each(
                lambda result: [
                    {**row, "points": 100 * row["lead_value"]} for row in CHOSEN(result)
                ],
                "{points:+.1f} points after layer {layer}",
                "yes if the interval of the difference is above 0, at a layer chosen on other "
                "reviews",
                lambda row: study.above(study.part_of(row, "lead")),
                missing=NONE,
            ),
        ),
        _translates,
        study.Figure(
            "accuracy",
            "Accuracy over the layer of the seam",
            "The share of held-out reviews that the stitched classifier gets right, by the layer "
            "at which the first model ends. The classifier always goes on at the same layer.",
            study.points("accuracy", line="{kernel}", kernel=LINES),
            x=study.Axis("layer of the first model", "layer"),
            y=study.Axis("accuracy", "share"),
            lines=LINES,
            marks=_marks,
            size=(7.2, 4.0),
            unit="reviews",
            sample="bands: 95 %, over reviews",
        ),
        study.Table(
            "chosen-table",
            "Accuracy at the layer chosen on the other half of the reviews",
            pick("chosen"),
            (
                study.Column("kernel"),
                study.Column("layer", "after layer"),
                study.estimate("value", "accuracy (%)", "{:.1f}", 100),
                study.Column(
                    "lead_value", "above chance (points)", "{:+.1f}", 100, "lead_low", "lead_high"
                ),
                study.Column("rows", "reviews", "{:,.0f}"),
            ),
            terminal=True,
        ),
        study.Table(
            "translation-table",
            "Translated parameters beside the splice (embedding kernel)",
            pick("translation"),
            (
                study.Column("layer", "after layer"),
                study.Column("texts"),
                study.Column("gap", "largest difference of logits", "{:.1e}"),
                study.Column("size", "largest logit", "{:.2f}"),
                study.Column("same", "same verdict (%)", "{:.0f}", 100),
            ),
        ),
    ),
    when=lambda settings: settings.classifier is not None,
)
