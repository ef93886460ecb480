from . import tasks as tasks
from .batches import Modality as Modality, batches_of as batches_of, modality as modality
from .examples import (
    DENSEST_MASKS as DENSEST_MASKS,
    Batch as Batch,
    Sampling as Sampling,
    TextCounts as TextCounts,
    iter_examples as iter_examples,
    reads_pairs as reads_pairs,
    require_text as require_text,
)
from .split import Side as Side
