"""Linear stand-ins for the parts of blocks, fitted to what enters and leaves them.

In: `Moments` of what enters and leaves each part.
Out: a `LinearMap` and a `FitReport` per part.

    y ~ x @ W + b      x: what enters a part of a block, y: what the part makes of it

Faithful to "Jump to Conclusions" (arXiv 2303.09435) with b = 0 and no penalty. For
attention that is a map of one position's input to its own output: what it reads from other
positions is left to the average.
"""

from collections.abc import Sequence
from dataclasses import replace

from layerleap.errors import BadSettings
from layerleap.maps.linear import FitReport, LinearMap, solve
from layerleap.models.discovery.parts import BlockPart
from layerleap.progress import Progress, silent
from layerleap.stats.moments import Moments


def solve_parts(
    moments: Moments,
    couples: Sequence[BlockPart],
    *,
    intercept: bool = False,
    ridge: float = 0.0,
    progress: Progress = silent,
) -> tuple[dict[tuple[int, str], LinearMap], list[FitReport]]:
    """The map of each couple by (block, part), and how each came about.

    Maps and fits say src = block - 1 and dst = block; `FitReport.part` says which part it is.
    """
    if moments.pairs != "couples" or moments.n_layers + 1 != 2 * len(couples):
        raise BadSettings(
            f"moments of {moments.n_layers + 1} vectors ({moments.pairs}); those of "
            f"{len(couples)} couples were wanted"
        )
    maps, fits = {}, []
    for place, couple in enumerate(couples):
        src, dst = couple.block - 1, couple.block
        for found, fit in solve(moments, 2 * place, intercept=intercept, ridge=ridge):
            maps[dst, couple.part] = replace(found, src=src, dst=dst)
            fits.append(replace(fit, src=src, dst=dst, part=couple.part))
        progress("solving parts", place + 1, len(couples), "parts")
    return maps, fits
