"""Do the key and the value of a neuron name the same tokens?

In: the keys and values of every block. Out: their Jaccard overlap against shuffled pairs, by layer
and kind of key; and the section of the study that shows it.
"""

from collections.abc import Iterator

from torch import Tensor

from layerleap import StudyResult, Transformer, study
from layerleap.errors import ModelRefused
from layerleap.models.weights import feed_forwards, kinds, refusals, vectors
from layerleap.study import above, all_of, at_every, below, estimate, pick, points, untested
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext
from layerleap_papers.embedding_space.pairs import (
    OWN,
    READINGS,
    Depth,
    Pairs,
    answers,
    interval,
    lead_over,
    mean_of,
    overlaps,
    sample_of,
    with_leads,
)
from layerleap_papers.embedding_space.tokens import derangement

KEYS = ("ffn.key", "ffn.gate", "ffn.up")
VALUE = "ffn.value"
SHUFFLED = "shuffled"
LEAD = lead_over(SHUFFLED)
BETTER = "gate over up"  # lead of gates minus lead of ups
NAMES = {"ffn.key": "keys", "ffn.gate": "gates", "ffn.up": "ups"}


def tables_of(
    context: EmbeddingContext,
    model: Transformer,
    matrix: Tensor,
    limit: int | None,
    readings: tuple[str, ...],
) -> study.Tables:
    """Overlaps of keys and values in every block of a model that has both."""
    depth = Depth()
    blocks = key_blocks(context, model)
    for number, (block, keys) in enumerate(blocks.items()):
        context.progress("keys and values", number, len(blocks), "layers")
        generator = context.generator(2, block)
        rows = sample_of(len(vectors(model, block, VALUE)), limit, generator)
        partners = {OWN: rows, SHUFFLED: rows[derangement(len(rows), generator)]}
        pairs = [Pairs(key, key, VALUE, rows, partners) for key in keys]
        made = overlaps(model, matrix, block, pairs, readings, context.settings.k)
        for reading, found in made:
            columns = {
                (key, measure): values
                for key, by_partner in found.items()
                for measure, values in with_leads(by_partner).items()
            }
            if {"ffn.gate", "ffn.up"} <= set(keys):
                gates, ups = (columns[key, LEAD] for key in ("ffn.gate", "ffn.up"))
                columns["both", BETTER] = gates - ups
            depth.add(block, reading, columns)
    return {"neurons": depth.rows, "neurons_depth": depth.over_all()}


def key_blocks(context: EmbeddingContext, model: Transformer) -> dict[int, list[str]]:
    """By block, its kinds of keys; a block without keys is left out with a note."""
    found: dict[int, list[str]] = {}
    missing: list[int] = []
    feed_forwards(model)  # verifies all in one pass
    for block in range(1, model.n_layers + 1):
        known = kinds(model, block)
        if keys := [key for key in KEYS if key in known and VALUE in known]:
            found[block] = keys
        else:
            missing.append(block)
    if missing:
        reason = "; ".join(refusals(model, missing[0]))
        if not found:
            raise ModelRefused(reason)
        numbers = ", ".join(map(str, missing))
        context.note(f"Keys and values of layers {numbers} are left out: {reason}.")
    return found


def _run(context: EmbeddingContext) -> study.Tables:
    readings = tuple(READINGS) if context.settings.fold else ("plain", "signed")
    return tables_of(context, context.model, context.matrix, context.settings.vectors, readings)


def keys_of(result: StudyResult, table: str = "neurons") -> list[str]:
    """The kinds of keys that were compared."""
    return [key for key in KEYS if result.row(table, pair=key)]


# --- claims ------------------------------------------------------------------------------------


@study.claim(
    "The key and the value of a neuron share more top tokens than shuffled pairs do, in "
    "every layer."
)
def _above_shuffled(result: StudyResult) -> study.Verdict:
    given = {key: answers(result, "neurons", pair=key, measure=LEAD) for key in keys_of(result)}
    counts = "; ".join(
        f"{NAMES[key]}: clearly above at {own.count('yes')} of {len(own)} layers"
        for key, own in given.items()
    )
    return study.Verdict(
        at_every(answer for own in given.values() for answer in own),
        counts,
        "yes if the interval of the lead over shuffled pairs is above 0 at every layer, for every "
        "kind of key; partly if at most of them",
    )


@study.claim("The overlap of keys and values grows with depth.")
def _grows(result: StudyResult) -> study.Verdict:
    rows = {
        key: result.row("neurons_depth", pair=key, reading="plain", measure=LEAD, over="rise")
        for key in keys_of(result)
    }
    known = {key: row for key, row in rows.items() if row is not None}
    if not known:
        return untested("growth needs two layers or more")
    seen = "; ".join(f"{NAMES[key]}: {interval(row, '{:+.4f}')}" for key, row in known.items())
    return study.Verdict(
        all_of(above(row) for row in known.values()),
        f"rise of the lead from the first to the last layer, along a straight line: {seen}",
        "yes if the intervals of all kinds of key are above 0, partly if those of some",
    )


def _one_is_better(result: StudyResult) -> study.Verdict:
    mean = mean_of(result, "neurons_depth", pair="both", measure=BETTER)
    rows = result.rows("neurons", pair="both", measure=BETTER, reading="plain")
    if mean is None:
        return untested("no layer has both kinds")
    compare, better = (above, "gates") if mean["value"] > 0 else (below, "ups")
    given = [compare(row) for row in rows]
    is_mixed = {"yes", "no"} <= set(given)  # then neither is better in every layer
    answer = at_every(given) if is_mixed or compare(mean) == "yes" else "cannot tell"
    return study.Verdict(
        answer,
        f"gates minus ups, mean over layers: {interval(mean, '{:+.4f}')}; {better} clearly better "
        f"at {given.count('yes')} of {len(given)} layers, the others at {given.count('no')}",
        "yes if the interval of the mean excludes 0 and those of all layers are on the same side, "
        "partly if those of most layers are",
    )


def is_gated(result: StudyResult) -> bool:
    """Whether neurons have two kinds of key."""
    return result.row("neurons", pair="both") is not None or "neurons" not in result.tables


CLAIMS = (
    _above_shuffled,
    _grows,
    study.Claim(
        "In a gated FFN, one kind of key pairs better with the values than the other, in every "
        "layer.",
        _one_is_better,
        is_gated,
    ),
)


# --- findings, figures and tables --------------------------------------------------------------


def _findings(result: StudyResult) -> Iterator[study.Said]:
    k, keys = result.settings["k"], keys_of(result)
    for key in keys:
        own, shuffled = (
            mean_of(result, "neurons_depth", pair=key, measure=m) for m in (OWN, SHUFFLED)
        )
        given = answers(result, "neurons", pair=key, measure=LEAD)
        assert own is not None
        assert shuffled is not None
        yield study.Headline(
            f"The top {k} tokens of {NAMES[key]} and values of the same neuron have a Jaccard "
            f"index of {interval(own, '{:.4f}')} on average over layers, shuffled pairs "
            f"{interval(shuffled, '{:.4f}')}. The lead is clearly above 0 at "
            f"{given.count('yes')} of {len(given)} layers."
        )
    for reading, words in (
        ("signed", "With the highest tokens instead of those of largest magnitude"),
        ("folded", "With norms folded in"),
    ):
        leads = {
            key: mean_of(result, "neurons_depth", pair=key, measure=LEAD, reading=reading)
            for key in keys
        }
        known = [f"{interval(row, '{:.4f}')} ({NAMES[key]})" for key, row in leads.items() if row]
        if known:
            yield (f"{words}, the mean lead is {' and '.join(known)}.")
    if (better := mean_of(result, "neurons_depth", pair="both", measure=BETTER)) is not None:
        words = "Neither kind of key clearly pairs better with values"
        if above(better) == "yes":
            words = "Gates pair better with values than ups"
        elif below(better) == "yes":
            words = "Ups pair better with values than gates"
        yield study.Finding(
            f"{words}: the difference of their leads is "
            f"{interval(better, '{:+.4f}')} on average over layers.",
            headline=True,
        )


LINES = {
    OWN: study.Line("same neuron", "blue"),
    SHUFFLED: study.Line("shuffled pairs", "grey", marker="s", style="dashed"),
}
SAMPLE = "bands: 95 %, over neurons of a layer"


SECTION = study.Section(
    "neurons",
    "Do key and value of a neuron name the same tokens?",
    _run,
    "A neuron reads the stream with its key and writes its value. Both are read in the vocabulary "
    "with the transposed output matrix, and their tokens of largest magnitude are compared. The "
    "control pairs every key with the value of another neuron of the same layer.",
    help="keys and values",
    findings=_findings,
    shows=(
        *CLAIMS,
        study.Figure(
            "neurons",
            "Overlap of keys and values",
            "Jaccard index of the top tokens of both vectors, by magnitude: 0 if they share none.",
            points(
                "neurons",
                line="{measure}",
                panel="{pair} and values",
                words={"pair": {key: name.capitalize() for key, name in NAMES.items()}},
                pair=KEYS,
                reading="plain",
                measure=(OWN, SHUFFLED),
            ),
            y=study.Axis("Jaccard index", low=0),
            lines=LINES,
            size=(4.6, 3.6),
            unit="neurons",
            sample=SAMPLE,
        ),
        study.Table(
            "neurons-table",
            "Lead of own pairs over shuffled ones, times 1,000, by layer; plain: tokens of largest "
            "magnitude; signed: highest tokens; folded: norms folded in",
            pick("neurons", reading=READINGS, pair=KEYS, measure=LEAD, words={"pair": NAMES}),
            (study.Column("layer"),),
            across="{pair}, {reading}",
            cells=(estimate("value", "", "{:.1f}", 1000),),
            dense=True,
        ),
    ),
)
