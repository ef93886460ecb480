from . import measures as measures
from .accuracy import (
    BASELINES as BASELINES,
    InContext as InContext,
    answered as answered,
    in_context as in_context,
)
from .delta import Delta as Delta
from .descent import Learned as Learned, learn as learn
from .lessons import Demonstration as Demonstration, Tokens as Tokens
from .measures import (
    Ratio as Ratio,
    change_jaccard as change_jaccard,
    recall_by_chance as recall_by_chance,
    recall_to_fine_tuned as recall_to_fine_tuned,
    saturation_layer as saturation_layer,
    shuffled as shuffled,
)
from .observe import Observation as Observation, Prompt as Prompt, observe as observe
from .parameters import Chosen as Chosen, choose as choose
from .reading import Direction as Direction, read_delta as read_delta
from .trainer import FineTuned as FineTuned, finetune as finetune
