"""How well can each layer predict later ones?

After "Jump to Conclusions" (arXiv 2303.09435).

Required: scores by layer and lens, R2 of all pairs of layers, transfer to a second text. Optional:
parts of blocks replaced, blocks and jumps in turn, trained maps, early exit, other models.
"""

from layerleap import StudyResult, study
from layerleap.study import untested
from layerleap_papers.jump_to_conclusions import (
    agreement,
    alternation,
    checks,
    exits,
    page,
    pairs,
    parts,
    sizes,
    transfer,
    tuned,
)
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext
from layerleap_papers.jump_to_conclusions.shortcut_settings import ShortcutSettings

IDEAS = (agreement, pairs, transfer, checks)


def _read(context: ShortcutContext) -> study.Tables:
    """Fit on every text, then read every held-out text through every lens."""
    tables: study.Tables = {}
    for idea in IDEAS:
        tables |= idea.tables(context)
    return {**tables, "laws": checks.laws(tables)}


READINGS = study.Section(
    "readings",
    "How well can each layer be read?",
    _read,
    lead="The state after every layer is carried to the last layer by a linear shortcut, or taken "
    "as it is, and read by the model's own output head.",
    required=True,
    findings=lambda result: [f for idea in IDEAS for f in idea.findings(result)],
    shows=(
        *agreement.CLAIMS,
        *pairs.CLAIMS,
        *transfer.CLAIMS,
        study.Claim(
            "To human readers, shortcuts' predictions are more plausible than the logit lens's.",
            lambda _: untested("plausibility needs human readers"),
        ),
        *agreement.FIGURES[:1],
        *pairs.FIGURES,
        *agreement.FIGURES[1:],
        *transfer.FIGURES,
        *checks.FIGURES,
        *agreement.TABLES,
        *transfer.TABLES,
        *checks.TABLES,
    ),
)

STUDY: study.Study[ShortcutSettings] = study.Study(
    name="shortcuts",
    method=2,
    title="Shortcuts through {model}, read on {text}",
    help="""How well can each layer predict later ones?

    Fits linear shortcuts between all pairs of layers and reads every layer through them and
    through the logit lens, on held-out documents: R2, Precision@k, surprisal and KL, and transfer
    to a second text. Then the optional sections, and the paper's claims beside what was measured.
    At full size it takes most of an hour for a model of 135 million weights on two cores, with
    --quick two minutes. If it is interrupted, the same command continues where it stopped.

    Several sizes: layerleap study shortcuts gpt2 --beside gpt2-medium,gpt2-large -o report""",
    settings=ShortcutSettings,
    context=ShortcutContext,
    sections=(
        READINGS,
        parts.SECTION,
        alternation.SECTION,
        tuned.SECTION,
        exits.SECTION,
        sizes.SECTION,
    ),
    paper="linear shortcuts after Yom Din, Karidi, Choshen and Geva, \u201cJump to "
    "Conclusions\u201d (LREC-COLING 2024).",
    about=page.about,
    boxes=page.BOXES,
    tiles=page.tiles,
    picture=page.PICTURE,
)

__all__ = ["STUDY", "ShortcutSettings", "StudyResult"]
