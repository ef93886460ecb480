"""Better guesses: is a runner-up that settled early right more often when the top token is wrong?

In: saturation layers of rows whose right answer is known. Out: one plain dictionary: for ranks 2
to 4 the share of right answers among early and among unsettled tokens, their difference with an
interval, a test; and what they say, in words.

After "Looking Beyond the Top-1" (arXiv 2410.20210): among the rows whose top token is wrong,
*early* tokens settled at least `lead` layers before the end, *late* ones only with the last block.
The test is the pooled two-proportion z-test, two-sided; it takes rows as independent, which those
of one document are not, so the interval of the difference resamples documents.
"""

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.read.metrics import finite, resample
from layerleap.read.saturation import Saturation

Row = dict[str, Any]
Z95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class GuessSettings:
    """Which tokens count as early, and when a test is made."""

    lead: int = 7  # an early token settled at least so many layers before the end
    ranks: tuple[int, ...] = (2, 3, 4)
    level: float = 0.05
    needed: float = 5.0  # expected right and wrong guesses in each group: the z-test's own rule
    resamples: int = 1000
    seed: int = 0


def guesses(saturation: Saturation, settings: GuessSettings | None = None) -> dict[str, Any]:
    """Early against late runners-up among the rows whose top token is wrong.

    Args:
        saturation: through one lens; rows whose right answer is unknown are left out.
        settings: which tokens count as early, and when a test is made.
    """
    settings = settings or GuessSettings()
    _require(saturation, settings)
    known = saturation.rows(saturation.gold >= 0)
    wrong = known.rows(known.tokens[:, 0] != known.gold)
    if not len(wrong):
        raise BadText(
            f"the top token is right in all {len(known)} rows with a known answer; rows in which "
            "it is wrong are needed: read more"
        )
    tests = [_test(wrong, rank, settings) for rank in settings.ranks if rank <= saturation.k]
    return {
        "lens": saturation.lens, "rows": len(known), "wrong": len(wrong),
        "documents": len(wrong.documents.unique()),
        "early_until": saturation.n_layers - settings.lead,
        "settings": {**asdict(settings), "ranks": list(settings.ranks)}, "tests": tests,
        "verdict": [_words(row, settings) for row in tests],
    }  # fmt: skip


def _require(saturation: Saturation, settings: GuessSettings) -> None:
    last = saturation.n_layers
    if not 1 <= settings.lead <= last:
        raise BadSettings(
            f"early means {settings.lead} layers before the end, and there are {last} layers; "
            f"choose a lead of 1 to {last}"
        )
    if not settings.ranks or min(settings.ranks) < 2 or min(settings.ranks) > saturation.k:
        raise BadSettings(
            f"runners-up of ranks {list(settings.ranks)}, and ranks 1 to {saturation.k} are known; "
            "name ranks from 2 on, or read more ranks"
        )
    if not (saturation.gold >= 0).any():
        raise BadText(
            f"the right answer is unknown in all {len(saturation)} rows; give text in which "
            "something follows the positions read, or labels"
        )


def _test(wrong: Saturation, rank: int, settings: GuessSettings) -> Row:
    layer = wrong.layer[:, rank - 1]
    right = wrong.tokens[:, rank - 1] == wrong.gold
    early, late = layer <= wrong.n_layers - settings.lead, layer == wrong.n_layers
    groups = {"early": _share(right[early]), "late": _share(right[late])}
    n = (groups["early"]["rows"], groups["late"]["rows"])
    found: Row = {
        "rank": rank, **groups, "difference": None, "low": None, "high": None, "z": None, "p": None,
        "early_are": None, "needed": None,
    }  # fmt: skip
    pooled = float(right[early | late].double().mean()) if sum(n) else 0.0
    expected = min(n) * min(pooled, 1 - pooled)  # the smallest of the four cells
    if expected < settings.needed:
        return found | {"needed": _needed(pooled, n, len(wrong), settings.needed)}
    difference = groups["early"]["value"] - groups["late"]["value"]
    z = difference / math.sqrt(pooled * (1 - pooled) * (1 / n[0] + 1 / n[1]))
    p = 2 * (1 - NormalDist().cdf(abs(z)))
    low, high = _interval(right, early, late, wrong.documents, settings)
    return found | {
        "difference": difference, "low": low, "high": high, "z": z, "p": p,
        "early_are": _answer(p <= settings.level, low, high),
    }  # fmt: skip


def _answer(significant: bool, low: float | None, high: float | None) -> str | None:
    """Test and interval must both say so; None if a single document leaves no interval."""
    if low is None or high is None:
        return None
    if significant and low > 0:
        return "right more often"
    return "right less often" if significant and high < 0 else "not clearly different"


def _share(right: Tensor) -> Row:
    """Share of right guesses with Wilson's 95 % interval."""
    n, hits = len(right), int(right.sum())
    if not n:
        return {"value": None, "low": None, "high": None, "right": 0, "rows": 0}
    p, z = hits / n, Z95
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return {"value": p, "low": low, "high": high, "right": hits, "rows": n}


def _interval(
    right: Tensor, early: Tensor, late: Tensor, documents: Tensor, settings: GuessSettings
) -> tuple[float | None, float | None]:
    """Of the difference of shares, from resampled documents; nothing from a single one."""
    names, group = documents.unique(return_inverse=True)
    if len(names) < 2:
        return None, None
    columns = torch.stack([right & early, early, right & late, late], dim=1).double()
    sums = torch.zeros(len(names), 4, dtype=torch.float64).index_add_(0, group, columns)
    drawn = resample(len(names), settings.resamples, settings.seed) @ sums
    differences = drawn[:, 0] / drawn[:, 1] - drawn[:, 2] / drawn[:, 3]
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = differences.nanquantile(ends).tolist()
    return finite(low), finite(high)


def _needed(pooled: float, n: tuple[int, int], rows: int, needed: float) -> int | None:
    """About how many rows with a wrong top token would do; None if these say nothing about it."""
    smallest = min(n) * min(pooled, 1 - pooled)
    return math.ceil(rows * needed / smallest) if smallest > 0 else None


def _words(row: Row, settings: GuessSettings) -> str:
    early, late = row["early"], row["late"]
    what = f"Rank {row['rank']}, where the top token is wrong"
    lead = "a layer" if settings.lead == 1 else f"{settings.lead} layers"
    counts = (
        f"{early['right']:,} of {early['rows']:,} tokens that settled {lead} or more before the "
        f"end are right, {late['right']:,} of {late['rows']:,} that only the last block put there"
    )
    if row["p"] is None:
        more = "more rows" if row["needed"] is None else f"about {row['needed']:,} such rows"
        return f"{what}: {counts}: too few right ones to test, {more} are needed."
    interval = "" if row["low"] is None else f" ({row['low']:+.1%} to {row['high']:+.1%})"
    numbers = f"a difference of {row['difference']:+.1%}{interval}, p = {row['p']:.2g}"
    if row["early_are"] is None:
        return f"{what}: {counts}: {numbers}; one document cannot tell how documents differ."
    return f"{what}: {counts}: {numbers}: early tokens are {row['early_are']}."
