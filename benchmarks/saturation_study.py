"""How long the whole `saturation` study takes with the default settings.

In: `study.json` of a whole run; run if there is none. Out: one row.
"""

from common import Row, rows_by_role, study_row

from layerleap_papers.beyond_the_top1 import STUDY, SaturationSettings
from layerleap_papers.beyond_the_top1.saturation_settings import SIZES

ASKED = ("n_fit", "n_read", "k", "draws", "walk_share", "permutations", "cells", "pairs", "prompts")
SMALL = ("--quick", "--fit-texts", "60", "--read-texts", "40")


def run(*, smoke: bool) -> list[Row]:
    """Minutes for the whole study."""
    n_fit, n_read = SIZES["text"]
    wanted = {**SaturationSettings().to_dict(), "n_fit": n_fit, "n_read": n_read}
    return [study_row(STUDY, wanted, ASKED, SMALL, 30.0, smoke=smoke, about=rows_by_role)]
