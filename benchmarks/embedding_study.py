"""How long the whole `embedding` study takes with the default settings.

In: `study.json` of a whole run; run if there is none. Out: one row.
"""

from common import Row, rows_by_role, study_row

from layerleap_papers.embedding_space import STUDY, EmbeddingSettings

ASKED = ("n_fit", "n_read", "k", "state_k", "active", "vectors", "fold", "kept_rows")
SMALL = ("--quick", "--fit-texts", "60", "--read-texts", "10")


def run(*, smoke: bool) -> list[Row]:
    """Minutes for the whole study."""
    wanted = EmbeddingSettings().to_dict()
    return [study_row(STUDY, wanted, ASKED, SMALL, 20.0, smoke=smoke, about=rows_by_role)]
