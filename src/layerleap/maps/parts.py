"""Linear replacements for the parts of blocks (attention, FFN, norms), in closed form.

In: `Moments` of the input and output of each part.
Out: a `LinearMap` and a `FitReport` per part.

    y ~ x @ W + b      x: the input of a part of a block, y: its output

"Jump to Conclusions" (arXiv 2303.09435) fits the same with b = 0 and no penalty. For attention
this maps the input of one position to the output at that position; what attention reads from
other positions enters only on average.
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
    parts: Sequence[BlockPart],
    *,
    intercept: bool = False,
    ridge: float = 0.0,
    progress: Progress = silent,
) -> tuple[dict[tuple[int, str], LinearMap], list[FitReport]]:
    """The map of each part by (block, part), and a report per fit.

    Maps and reports have src = block - 1 and dst = block; `FitReport.part` names the part.
    """
    if moments.pairs != "parts" or moments.n_layers + 1 != 2 * len(parts):
        raise BadSettings(
            f"got moments of {moments.n_layers + 1} vectors ({moments.pairs!r}); expected the "
            f"inputs and outputs of {len(parts)} parts"
        )
    maps, fits = {}, []
    for index, part in enumerate(parts):
        src, dst = part.block - 1, part.block
        for linear, fit in solve(moments, 2 * index, intercept=intercept, ridge=ridge):
            maps[dst, part.part] = replace(linear, src=src, dst=dst)
            fits.append(replace(fit, src=src, dst=dst, part=part.part))
        progress("solving parts", index + 1, len(parts), "parts")
    return maps, fits
