"""Calibration: the most aggressive threshold that keeps disagreement below a tolerance.

In: a family, `Evidence` set aside for calibration, a tolerance. Out: `Calibrated`: a rule with its
guarantee, or no rule, which means "never exit". `verify` then tests it on fresh rows.

"ltt"   Learn-then-test (Angelopoulos et al., arXiv 2110.01052): with probability 1 - delta over
        the calibration rows, the fraction of rows that disagree is at most the tolerance. Knobs
        are tested from the safest on by exact binomial tests, each at level delta, up to the first
        that fails. The fixed order makes a correction for multiple tests unnecessary.
"crc"   Conformal risk control (arXiv 2208.02814): the expected fraction is at most the tolerance,
        on average over calibration sets, not for each of them.

Both assume that calibration rows and later rows are exchangeable. Rows of one document are not
independent, and other text may be harder: with several rows per document, or on other text, the
guarantee is only as good as that assumption. The knobs must not come from the calibration rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.replay import replay, sweep
from layerleap.act.exits.rules import Family, Never, Rule, rule_from_dict
from layerleap.errors import BadSettings, TooFewRows, check_choice
from layerleap.extras import learn_library
from layerleap.lens.intervals import SHARE, mean_interval

Method = Literal["ltt", "crc"]


@dataclass(frozen=True)
class Calibrated:
    """A rule with its guarantee."""

    rule: Rule | None  # None: never exit
    tolerance: float  # largest fraction of rows that may exit with another top token
    delta: float | None  # how often the guarantee may fail; None for an expectation ("crc")
    method: Method
    n: int  # calibration rows
    observed: float  # their disagreement under the rule
    bound: float  # upper bound of the disagreement, at most the tolerance
    note: str  # the guarantee in words

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**vars(self), "rule": None if self.rule is None else self.rule.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Calibrated":
        """The object that `to_dict` described."""
        try:
            rule = None if data["rule"] is None else rule_from_dict(data["rule"])
            return cls(**{**data, "rule": rule})
        except (KeyError, TypeError, AttributeError) as error:
            raise BadSettings(
                f"not a calibrated rule: {error}; expected what Calibrated.to_dict returns"
            ) from error


@dataclass(frozen=True)
class Verified:
    """How a calibrated rule does on fresh rows."""

    disagreement: float
    low: float  # 95 % interval, the wider of exact binomial and over documents
    high: float
    layers: float  # mean blocks run
    saved: float
    tolerance: float
    within: bool  # the observed disagreement is at most the tolerance
    rows: int
    documents: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dict(vars(self))


def rows_needed(tolerance: float, delta: float | None, method: Method = "ltt") -> int:
    """The smallest number of calibration rows that can pass, if none of them disagrees."""
    check_choice(method, Method, "method")
    if not 0 < tolerance < 1:
        raise BadSettings(f"tolerance {tolerance} is out of range; expected between 0 and 1")
    if method == "ltt" and (delta is None or not 0 < delta < 1):
        raise BadSettings(f"delta {delta} is out of range; expected between 0 and 1")
    if delta is None or method == "crc":
        rows = 1 / tolerance - 1
    else:
        rows = math.log(delta) / math.log1p(-tolerance)
    return math.ceil(rows - 1e-9)  # rounding must not add a row


def calibrate(
    family: Family,
    evidence: Evidence,
    tolerance: float,
    *,
    delta: float = 0.05,
    method: Method = "ltt",
    knobs: Sequence[float] | None = None,
    n: int = 100,
) -> Calibrated:
    """The rule with the most aggressive threshold that keeps disagreement below the tolerance.

    Args:
        family: the rules to choose from.
        evidence: rows that neither the maps nor the rule were fitted on.
        tolerance: largest fraction of rows that may exit with a top token other than the model's.
        delta: how often, over calibration sets, the "ltt" guarantee may fail.
        method: "ltt" for a guarantee that holds with confidence, "crc" for one on average.
        knobs: the values to choose from, fixed without looking at these rows; None takes the
            family's grid of `n` values.
        n: size of that grid.
    """
    level = delta if method == "ltt" else None
    needed = rows_needed(tolerance, level, method)  # refuses a wrong choice before evidence is read
    rows = len(evidence)
    if rows < needed:
        raise TooFewRows(
            f"{rows} calibration rows are too few to prove a disagreement of at most "
            f"{tolerance:g}; at least {needed} are needed: use more text, or a larger tolerance"
        )
    order = family.grid(n, evidence.layers[-1]) if knobs is None else list(knobs)
    order.sort(reverse=family.direction == "later")  # the safest first
    swept = sweep(family, evidence, order)
    wrong = ~swept.agrees
    # Wrong at a knob or at a safer one, so monotone, as risk control requires: the plain loss is
    # not, as a row may be wrong at one layer and right at an earlier one.
    ever_wrong = wrong.int().cummax(1).values.sum(0)
    if method == "ltt":
        index = int(fixed_sequence(wrong.sum(0), rows, tolerance, delta))
    else:
        index = int(risk_control(ever_wrong, rows, tolerance))
    if index < 0 or swept.exits(index).saved == 0:
        note = f"no rule that exits keeps disagreement at most {tolerance:g} on {rows} rows"
        return Calibrated(None, tolerance, level, method, rows, 0.0, 0.0, f"{note}: never exit")
    exits, errors = swept.exits(index), int(wrong[:, index].sum())
    if method == "ltt":
        bound = upper_bound(errors, rows, delta)
    else:
        bound = (int(ever_wrong[index]) + 1) / (rows + 1)
    rule = family.at(order[index])
    guarantee = _guarantee(tolerance, level, evidence)
    note = f"{rule}: saves {exits.saved:.3g} of {exits.n_layers} layers here; {guarantee}"
    return Calibrated(rule, tolerance, level, method, rows, errors / rows, bound, note)


def _guarantee(tolerance: float, delta: float | None, evidence: Evidence) -> str:
    documents = len(evidence.document.unique())
    confidence = "on average" if delta is None else f"with confidence {1 - delta:g}"
    text = f"disagreement at most {tolerance:g} {confidence}, for rows exchangeable with these"
    if documents == len(evidence):
        return text
    return (
        f"{text}; these {len(evidence)} rows come from {documents} documents and are not "
        "independent, so the guarantee is weaker than it looks"
    )


def fixed_sequence(errors: Tensor, n: int, tolerance: float, delta: float) -> Tensor:
    """The last knob before the first failing test, or -1: (..., knob) -> (...).

    The test of a knob rejects "its risk is above the tolerance" if this few errors among n have a
    probability of at most delta when the risk equals the tolerance.
    """
    binom = learn_library("scipy.stats").binom
    p = torch.from_numpy(binom.cdf(errors.numpy(), n, tolerance))
    return (p <= delta).int().cumprod(-1).sum(-1) - 1


def risk_control(errors: Tensor, n: int, tolerance: float) -> Tensor:
    """The last knob with (errors + 1) / (n + 1) <= tolerance, or -1: (..., knob) -> (...).

    Errors must not decrease from one knob to the next, more aggressive one.
    """
    return ((errors + 1) / (n + 1) <= tolerance).int().cumprod(-1).sum(-1) - 1


def upper_bound(errors: int, n: int, delta: float) -> float:
    """The exact (Clopper-Pearson) upper bound of a proportion, with confidence 1 - delta."""
    beta = learn_library("scipy.stats").beta
    return 1.0 if errors >= n else float(beta.ppf(1 - delta, errors + 1, n - errors))


def verify(calibrated: Calibrated, evidence: Evidence) -> Verified:
    """Test the calibrated rule on fresh rows."""
    exits = replay(calibrated.rule or Never(), evidence)
    wrong = ~exits.agrees
    rows, errors = len(evidence), int(wrong.sum())
    over_documents = mean_interval(wrong[:, None], evidence.document, SHARE)[0]
    low = 1 - upper_bound(rows - errors, rows, 0.025)
    high = upper_bound(errors, rows, 0.025)
    return Verified(
        errors / rows,
        low if over_documents.low is None else min(low, over_documents.low),
        high if over_documents.high is None else max(high, over_documents.high),
        exits.mean_layer,
        exits.saved,
        calibrated.tolerance,
        errors / rows <= calibrated.tolerance,
        rows,
        over_documents.documents,
    )
