"""Early exit without running it: rules, evidence, replay, calibration and cost.

    evidence = ll.exits.evidence(model, bank, "wikipedia", n_texts=40)
    exits = ll.exits.replay(ll.exits.Gap(0.5, length=15), evidence)
    print(exits.saved, exits.agreement)

One pass over a text gives the evidence for every rule and every threshold. `sweep` replays a whole
`family` of thresholds, `calibrate` picks the boldest one that keeps disagreement below a tolerance,
and `verify` tests it on fresh rows. `measure_cost` counts FLOPs and `measure_timing` seconds. The
same rule objects drive `ll.generate(..., rule=...)`.
"""

from layerleap.act.exits.calibration import Calibrated, Verified, calibrate, rows_needed, verify
from layerleap.act.exits.cost import Cost
from layerleap.act.exits.cost import measure as measure_cost
from layerleap.act.exits.evidence import Evidence, evidence, split
from layerleap.act.exits.families import Family, family
from layerleap.act.exits.learned import Learned
from layerleap.act.exits.plan import ExitPlan
from layerleap.act.exits.replay import Exits, Sweep, curve, replay, sweep
from layerleap.act.exits.rules import (
    Entropy,
    Fixed,
    Gap,
    Never,
    Oracle,
    Patience,
    Rule,
    Similarity,
    Task,
    TopProbability,
    rule_from_dict,
)
from layerleap.act.exits.savings import Saving, saved_at
from layerleap.act.exits.timing import Timing, measure_timing

__all__ = [
    "Calibrated", "Cost", "Entropy", "Evidence", "ExitPlan", "Exits", "Family", "Fixed", "Gap",
    "Learned", "Never", "Oracle", "Patience", "Rule", "Saving", "Similarity", "Sweep", "Task",
    "Timing", "TopProbability", "Verified", "calibrate", "curve", "evidence", "family",
    "measure_cost", "measure_timing", "replay", "rows_needed", "rule_from_dict", "saved_at",
    "split", "sweep", "verify",
]  # fmt: skip
