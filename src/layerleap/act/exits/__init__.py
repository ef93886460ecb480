"""Early exit without running it: rules, evidence, replay, calibration and cost.

    evidence = ll.exits.evidence(model, bank, "wikipedia", n_texts=40)
    exits = ll.exits.replay(ll.exits.Gap(0.5, length=15), evidence)
    print(exits.saved, exits.agreement)

One pass over a text gives the evidence for every rule and every threshold. `sweep` replays a whole
`family` of thresholds, `calibrate` picks the most aggressive one that keeps disagreement below a
tolerance, and `verify` tests it on fresh rows. `measure_cost` counts FLOPs and `measure_timing`
seconds. The same rule objects drive `ll.generate(..., rule=...)`.
"""

import lazy_loader

# The public names are those of the stub beside this file, each loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
