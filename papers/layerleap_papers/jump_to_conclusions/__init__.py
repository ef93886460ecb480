"""How well can each layer predict later ones?

After "Jump to Conclusions" (arXiv 2303.09435).

Required: scores by layer and lens, R2 of all pairs of layers, transfer to a second text. Optional:
parts of blocks replaced, blocks and jumps in turn, trained maps, early exit, other models.
"""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.study import Page, percent, untested
from layerleap_papers.jump_to_conclusions import (
    agreement,
    alternation,
    checks,
    exits,
    layer_pairs,
    parts,
    sizes,
    transfer,
    tuned,
)
from layerleap_papers.jump_to_conclusions.curves import LENSES, both, half_layers, token_of
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext
from layerleap_papers.jump_to_conclusions.shortcut_settings import ShortcutSettings

PAGE = Page(__file__)
IDEAS = (agreement, layer_pairs, transfer, checks)
COMPARED = ("mat", "id")
PARTS = (parts, alternation, tuned, exits, sizes)


def _read(context: ShortcutContext) -> study.Tables:
    """Fit on every text, then read every held-out text through every lens."""
    tables: study.Tables = {}
    for idea in IDEAS:
        tables |= idea.tables(context)
    return {**tables, "laws": checks.laws(tables)}


@PAGE.claim("plausible")
def _plausible(_: StudyResult) -> study.Tested:
    return untested("plausibility needs human readers")


READINGS = PAGE.section(
    "readings",
    _read,
    findings=lambda result: [said for idea in IDEAS for said in idea.findings(result)],
    shows=(
        *agreement.SHOWS,
        *layer_pairs.SHOWS,
        *agreement.SHOWS_AFTER_PAIRS,
        *transfer.SHOWS,
        *checks.SHOWS,
        _plausible,
    ),
)


def _tiles(result: StudyResult) -> Iterator[study.Tile]:
    """Agreement and R2 half-way, and from where on half of the predictions agree."""
    last = result.model["n_layers"]
    middle = last // 2
    shares = [curve[middle] for curve in both(result, "precision@1")]
    yield study.Tile(
        f"Agreement after {middle} of {last} layers",
        tuple((name, percent(s, 1), s) for name, s in zip(COMPARED, shares, strict=True)),
    )
    half = {name: layer for name, layer in half_layers(result).items() if layer is not None}
    if len(half) == len(COMPARED):
        yield study.Tile(
            "Agreement of at least half from",
            tuple((name, f"layer {layer}", layer / last) for name, layer in half.items()),
        )
    r2 = {row["map"]: row["r2"] for row in result.rows("r2", src=middle, dst=last)}
    if all(r2.get(name) is not None for name in COMPARED):
        yield study.Tile(
            f"R\u00b2 from layer {middle} to layer {last}",
            tuple(
                (name, f"{r2[name]:.2f}".replace("-", "\u2212"), min(max(r2[name], 0.0), 1.0))
                for name in COMPARED
            ),
        )


def _title(result: StudyResult) -> str:
    name, last = result.model["name"], result.model["n_layers"]
    name = name if len(name) <= 40 else f"{name[:39]}\u2026"
    mat, plain = (curve[last // 2] for curve in both(result, "precision@1"))
    return (
        f"After {last // 2} of {last} layers, a linear shortcut predicts {name}'s "
        f"{token_of(result)}\n{percent(mat)} of the time, the logit lens {percent(plain)} of the "
        "time"
    )


def _arrow(result: StudyResult) -> tuple[float, float, float, str] | None:
    """From where the logit lens reaches one half back to where shortcuts do."""
    half, last = half_layers(result), result.model["n_layers"]
    early, late = half["mat"], half["id"]
    if early is None or late is None or late - early < max(2, last / 10):
        return None  # never reached, or too short to draw
    return late, early, 0.5, f"half, {late - early} layers earlier"


PICTURE = study.Picture(
    _title,
    ("precision", "r2"),
    panels=("Precision@1", LENSES["mat"].label),
    lines=COMPARED,
    arrow=_arrow,
)

STUDY: study.Study[ShortcutSettings] = PAGE.study(
    settings=ShortcutSettings,
    context=ShortcutContext,
    sections=(READINGS, *(part.SECTION for part in PARTS)),
    about=lambda result: PAGE.about(result, token=token_of(result)),
    boxes=(
        PAGE.box("linear"),
        PAGE.box("logit"),
        PAGE.box("tuned", lambda result: bool(result.rows("tuned"))),
    ),
    tiles=_tiles,
    picture=PICTURE,
)

__all__ = ["STUDY", "ShortcutSettings", "StudyResult"]
