from .calibration import (
    Calibrated as Calibrated,
    Verified as Verified,
    calibrate as calibrate,
    rows_needed as rows_needed,
    verify as verify,
)
from .cost import Cost as Cost, measure_cost as measure_cost
from .evidence import Evidence as Evidence, evidence as evidence, split as split
from .learned import Learned as Learned
from .replay import Exits as Exits, Sweep as Sweep, curve as curve, replay as replay, sweep as sweep
from .rules import (
    Entropy as Entropy,
    ExitPlan as ExitPlan,
    Family as Family,
    Fixed as Fixed,
    Gap as Gap,
    Never as Never,
    Oracle as Oracle,
    Patience as Patience,
    Rule as Rule,
    Similarity as Similarity,
    Task as Task,
    TopProbability as TopProbability,
    family as family,
    rule_from_dict as rule_from_dict,
)
from .savings import Saving as Saving, saved_at as saved_at
from .timing import Timing as Timing, measure_timing as measure_timing
