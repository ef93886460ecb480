"""Do the key and the value of a neuron name the same tokens?

In: the keys and values of every block. Out: their Jaccard overlap against shuffled pairs, by layer
and kind of key; and the section of the study that shows it.
"""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.models.weights import feed_forwards, vectors
from layerleap.study import Page, above, all_of, at_every, below, in_words, pick, points, untested
from layerleap_papers.embedding_space import overlaps
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext, Vectors
from layerleap_papers.embedding_space.overlaps import OWN, SHUFFLED
from layerleap_papers.embedding_space.tokens import READINGS, derangement

PAGE = Page(__file__)
VALUE = "ffn.value"
LEAD = overlaps.lead_over(SHUFFLED)
NAMES = {"ffn.key": "keys", "ffn.gate": "gates", "ffn.up": "ups"}


def tables_of(context: EmbeddingContext, read: Vectors) -> study.Tables:
    """Overlaps of keys and values in every block of a model that has both."""
    feed_forwards(read.model)  # verifies all in one pass
    blocks = overlaps.verified(
        context, read.model, {key: (key, VALUE) for key in NAMES}, "Keys and values", least=1
    )

    def pairs_of(block: int, key: str) -> overlaps.Pairs:
        generator = context.generator(2, block)  # the same neurons for every kind of key
        rows = overlaps.sample_of(len(vectors(read.model, block, VALUE)), read.limit, generator)
        partners = {OWN: rows, SHUFFLED: rows[derangement(len(rows), generator)]}
        return overlaps.Pairs(key, key, VALUE, rows, partners)

    return overlaps.overlap_tables(context, read, blocks, pairs_of, "neurons")


def keys_of(result: StudyResult) -> list[str]:
    """The kinds of keys that were compared."""
    return [key for key in NAMES if result.row("neurons", pair=key)]


def _leads(result: StudyResult, key: str) -> list[study.Answer]:
    return overlaps.answers(result, "neurons", pair=key, measure=LEAD)


def _depth(result: StudyResult, key: str, measure: str = LEAD, **where: str) -> study.Row | None:
    return overlaps.mean_of(result, "neurons_depth", pair=key, measure=measure, **where)


@PAGE.claim("grows")
def _grows(result: StudyResult) -> study.Tested:
    rises = {key: _depth(result, key, over="rise") for key in keys_of(result)}
    known = {key: row for key, row in rises.items() if row is not None}
    if not known:
        return untested("growth needs two layers or more")
    listed = "; ".join(f"{NAMES[key]}: {in_words(row, '+.4f')}" for key, row in known.items())
    return all_of(above(row) for row in known.values()), {"rises": listed}


@PAGE.claim(
    "one_is_better",
    # Neurons have two kinds of key.
    when=lambda result: (
        result.row("neurons", pair="both") is not None or "neurons" not in result.tables
    ),
)
def _one_is_better(result: StudyResult) -> study.Tested:
    mean = _depth(result, "both", overlaps.BETTER)
    if mean is None:
        return untested("no layer has both kinds")
    compare, better = (above, "gates") if mean["value"] > 0 else (below, "ups")
    rows = result.rows("neurons", pair="both", measure=overlaps.BETTER, reading="plain")
    by_layer = [compare(row) for row in rows]
    is_mixed = {"yes", "no"} <= set(by_layer)  # then neither is better in every layer
    answer = at_every(by_layer) if is_mixed or compare(mean) == "yes" else "cannot tell"
    yes, no = by_layer.count("yes"), by_layer.count("no")
    return answer, {"mean": mean, "better": better, "yes": yes, "no": no, "n": len(rows)}


def _findings(result: StudyResult) -> Iterator[study.Said]:
    k, keys = result.settings["k"], keys_of(result)
    for key in keys:
        own, shuffled = (_depth(result, key, measure) for measure in (OWN, SHUFFLED))
        leads = _leads(result, key)
        yes, n, kind = leads.count("yes"), len(leads), NAMES[key]
        yield PAGE.say("keys", k=k, kind=kind, own=own, shuffled=shuffled, yes=yes, n=n)
    for reading in ("signed", "folded"):
        means = {key: _depth(result, key, reading=reading) for key in keys}
        known = [f"{in_words(row, '.4f')} ({NAMES[key]})" for key, row in means.items() if row]
        if known:
            yield PAGE.say(f"keys_{reading}", leads=" and ".join(known))
    if (better := _depth(result, "both", overlaps.BETTER)) is not None:
        which = "gates" if above(better) == "yes" else "ups" if below(better) == "yes" else "open"
        yield PAGE.say(f"better_{which}", lead=better)


SECTION = PAGE.section(
    "neurons",
    lambda context: tables_of(context, context.own_vectors),
    findings=_findings,
    shows=(
        PAGE.groups(
            "above_shuffled",
            lambda result: {NAMES[key]: _leads(result, key) for key in keys_of(result)},
        ),
        _grows,
        _one_is_better,
        PAGE.figure(
            "neurons",
            points(
                "neurons",
                line="{measure}",
                panel="{pair} and values",
                words={"pair": {key: name.capitalize() for key, name in NAMES.items()}},
                pair=NAMES,
                reading="plain",
                measure=(OWN, SHUFFLED),
            ),
        ),
        PAGE.table(
            "neurons-table",
            pick("neurons", reading=READINGS, pair=NAMES, measure=LEAD, words={"pair": NAMES}),
        ),
    ),
)
