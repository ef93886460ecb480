from .attention import ReplaceAttention as ReplaceAttention
from .delta import ApplyDelta as ApplyDelta
from .heads import (
    MeanHead as MeanHead,
    ScaleHead as ScaleHead,
    SetHead as SetHead,
    ZeroHead as ZeroHead,
)
from .neurons import (
    AddNeuron as AddNeuron,
    ScaleNeuron as ScaleNeuron,
    SetNeuron as SetNeuron,
    ZeroNeuron as ZeroNeuron,
)
from .patch import (
    PatchHead as PatchHead,
    PatchNeuron as PatchNeuron,
    PatchSite as PatchSite,
    PatchState as PatchState,
    run_patched as run_patched,
)
from .replace import ReplaceParts as ReplaceParts
from .schedule import (
    Schedule as Schedule,
    best_schedules as best_schedules,
    round_robins as round_robins,
    single_jump as single_jump,
)
from .scores import PartScores as PartScores, ScheduleScores as ScheduleScores
from .sites import ScaleSite as ScaleSite, ZeroSite as ZeroSite
from .spec import edit_sentence as edit_sentence, edit_spec as edit_spec, parse_edit as parse_edit
from .top_neurons import By as By, TopKNeurons as TopKNeurons, keep_highest as keep_highest
from .topk import Pages as Pages, TopKAttention as TopKAttention
from .vectors import AddVector as AddVector, ClampAlong as ClampAlong, ProjectOut as ProjectOut
