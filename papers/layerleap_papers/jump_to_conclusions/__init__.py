"""How well can each layer predict later ones?

After "Jump to Conclusions" (arXiv 2303.09435).

Required: scores by layer and lens, R2 of all pairs of layers, transfer to a second text. Optional:
parts of blocks replaced, blocks and jumps in turn, trained maps, early exit, other models.
"""

from layerleap import StudyResult, study
from layerleap.study import Page, untested
from layerleap_papers.jump_to_conclusions import (
    agreement,
    alternation,
    checks,
    exits,
    layer_pairs,
    page,
    parts,
    sizes,
    transfer,
    tuned,
)
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext
from layerleap_papers.jump_to_conclusions.shortcut_settings import ShortcutSettings

PAGE = Page(__file__)
IDEAS = (agreement, layer_pairs, transfer, checks)
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

STUDY: study.Study[ShortcutSettings] = PAGE.study(
    settings=ShortcutSettings,
    context=ShortcutContext,
    sections=(READINGS, *(part.SECTION for part in PARTS)),
    about=page.about,
    boxes=(
        PAGE.box("linear"),
        PAGE.box("logit"),
        PAGE.box("tuned", lambda result: bool(result.rows("tuned"))),
    ),
    tiles=page.tiles,
    picture=page.PICTURE,
)

__all__ = ["STUDY", "ShortcutSettings", "StudyResult"]
