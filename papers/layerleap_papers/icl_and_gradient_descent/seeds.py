"""No claim is decided by a single seed.

In: claims. Out: the same claims; with one seed each is "cannot tell". An interval is then over
queries alone, and other demonstrations may give another answer.
"""

from dataclasses import replace
from functools import partial

from layerleap import StudyResult
from layerleap.study import Claim, Verdict

ONE_SEED = "one seed says nothing about other demonstrations; run with more (--seeds 3)"


def over_seeds(*claims: Claim) -> tuple[Claim, ...]:
    """The claims, none of which is decided by one seed."""
    return tuple(replace(claim, test=partial(_test, claim)) for claim in claims)


def _test(claim: Claim, result: StudyResult) -> Verdict:
    verdict = claim.test(result)
    if result.settings["seeds"] > 1 or verdict.agrees == "not tested":
        return verdict
    return Verdict("cannot tell", verdict.seen, ONE_SEED)
