"""When the top token is wrong, is a runner-up that saturated early right more often?

In: saturation layers of rows whose right answer is known. Out: for ranks 2 to 4 the share of right
answers among early and among late tokens, their difference with an interval, and a test; and the
section of the study that shows them.

After "Looking Beyond the Top-1" (arXiv 2410.20210): among the rows whose top token is wrong,
*early* tokens saturated at least `lead` layers before the end, *late* ones only with the last
block. The test is the pooled two-proportion z-test, two-sided. It treats rows as independent, which
those of one document are not, so intervals are over documents.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from layerleap import StudyResult, study
from layerleap.errors import BadSettings, BadText
from layerleap.extras import learn_library
from layerleap.lens import DIFFERENCE, SHARE, Documents, Saturation, finite, mean_interval
from layerleap.study import Page, above, all_of, bounded, confirmed, p_words, pick, untested
from layerleap_papers.beyond_the_top1.saturation_context import SaturationContext

PAGE = Page(__file__)
PAPER_LEAD = 7  # layers before the end that count as early, in the paper's models of 48 layers
NEEDED = 5.0  # expected right and wrong guesses in each group: the z-test's own rule


def guesses(
    saturation: Saturation, *, lead: int = PAPER_LEAD, ranks: Sequence[int] = (2, 3, 4)
) -> list[study.Row]:
    """Early against late runners-up among the rows whose top token is wrong, one row per rank."""
    _require(saturation, lead, ranks)
    known = saturation.rows(saturation.gold >= 0)  # -1: the right answer is unknown
    wrong = known.rows(known.tokens[:, 0] != known.gold)
    if not len(wrong):
        raise BadText(
            f"the top token is right in all {len(known)} rows with a known answer; rows in which "
            "it is wrong are needed: read more"
        )
    about = {
        "rows": len(known),
        "wrong": len(wrong),
        "documents": len(wrong.documents.unique()),
        "lead": lead,
        "early_until": saturation.n_layers - lead,
    }
    return [
        {"lens": saturation.lens, "rank": rank, **_test(wrong, rank, lead), **about}
        for rank in ranks
        if rank <= saturation.k
    ]


def _require(saturation: Saturation, lead: int, ranks: Sequence[int]) -> None:
    last = saturation.n_layers
    if not 1 <= lead <= last:
        raise BadSettings(
            f"early means {lead} layers before the end, but there are {last} layers; "
            f"choose a lead of 1 to {last}"
        )
    if not ranks or min(ranks) < 2 or min(ranks) > saturation.k:
        raise BadSettings(
            f"ranks {list(ranks)} cannot be tested, because ranks 1 to {saturation.k} are "
            "known; name ranks from 2 on, or read more ranks"
        )
    if not (saturation.gold >= 0).any():
        raise BadText(
            f"the right answer is unknown in all {len(saturation)} rows; give text in which "
            "something follows the positions read, or labels"
        )


def _test(wrong: Saturation, rank: int, lead: int) -> study.Row:
    layer = wrong.layer[:, rank - 1]
    right = wrong.tokens[:, rank - 1] == wrong.gold
    early, late = layer <= wrong.n_layers - lead, layer == wrong.n_layers
    row: study.Row = {
        **_share("early", right[early], wrong.documents[early]),
        **_share("late", right[late], wrong.documents[late]),
    }
    n = (row["early_rows"], row["late_rows"])
    row |= dict.fromkeys(("difference", "low", "high", "z", "p", "early_are", "needed"))
    pooled = float(right[early | late].double().mean()) if sum(n) else 0.0
    expected = min(n) * min(pooled, 1 - pooled)  # the smallest of the four cells
    if expected < NEEDED:
        more = math.ceil(len(wrong) * NEEDED / expected) if expected > 0 else None
        return row | {"needed": more}  # about how many rows would do; None: these cannot say
    difference = row["early_value"] - row["late_value"]
    counts = [[row[f"{group}_right"], row[f"{group}_wrong"]] for group in ("early", "late")]
    # Of a 2 x 2 table, chi squared is z squared, and the p-values are the same.
    test = learn_library("scipy.stats").chi2_contingency(counts, correction=False)
    columns = torch.stack([right & early, early, right & late, late], 1)
    _, *ends = Documents(wrong.documents).of(_gap, columns, DIFFERENCE)
    low, high = (finite(float(end)) for end in ends)
    return row | {
        "difference": difference,
        "low": low,
        "high": high,
        "p": bounded(float(test.pvalue)),
        "z": math.copysign(math.sqrt(test.statistic), difference),
        "early_are": _early_are(test.pvalue <= study.LEVEL, low, high),
    }


def _early_are(significant: bool, low: float | None, high: float | None) -> str | None:
    """Test and interval must both say so; None if a single document leaves no interval."""
    if low is None or high is None:
        return None
    if significant and low > 0:
        return "right more often"
    return "right less often" if significant and high < 0 else "not clearly different"


def _gap(sums: Tensor) -> Tensor:
    """The difference of two shares, from sums of hits and cases: (..., 4) -> (...)."""
    a, b, c, d = sums.unbind(-1)
    return a / b - c / d


def _share(group: str, right: Tensor, documents: Tensor) -> study.Row:
    """Share of right guesses with its interval."""
    n, hits = len(right), int(right.sum())
    values: study.Row = {"value": None, "low": None, "high": None}
    if n:
        interval = mean_interval(right[:, None], documents, SHARE)[0]
        values = {"value": hits / n, "low": interval.low, "high": interval.high}
    values |= {"right": hits, "wrong": n - hits, "rows": n}
    return {f"{group}_{key}": value for key, value in values.items()}


def words(row: study.Row) -> str:
    """One rank: counts, the test and its answer."""
    lead = "a layer" if row["lead"] == 1 else f"{row['lead']} layers"
    if row["p"] is None:
        more = "more rows" if row["needed"] is None else f"about {row['needed']:,} such rows"
        test = f"Too few are right to test this; {more} are needed."
    else:
        ends = "" if row["low"] is None else f" ({row['low']:+.1%} to {row['high']:+.1%})"
        test = f"The difference is {row['difference']:+.1%}{ends}, {p_words(row['p'])}: "
        answer = row["early_are"] and f"early tokens are {row['early_are']}."
        test += answer or "a single document cannot tell how documents differ."
    return str(PAGE.say("guesses", row=row, lead=lead, test=test))


@PAGE.claim("guesses")
def _claim(result: StudyResult) -> study.Tested:
    rows = result.rows("guesses", lens="logit", p=study.KNOWN)
    if not rows:
        return untested("too few rows to test; the findings say how many are needed")
    listed = "; ".join(
        f"rank {row['rank']}: {row['early_value']:.1%} early, {row['late_value']:.1%} late "
        f"({p_words(row['p'])})"
        for row in rows
    )
    answers = (confirmed(above(row), row["p"] <= study.LEVEL) for row in rows)
    return all_of(answers), {"shares": listed}


def _run(context: SaturationContext) -> study.Tables:
    n_layers = context.model.n_layers
    lead = PAPER_LEAD if n_layers > 2 * PAPER_LEAD else max(1, n_layers // 3)
    saturation = context.observed.saturation
    return context.through_each(
        "Guesses", lambda lens: {"guesses": guesses(saturation[lens], lead=lead)}
    )


SECTION = PAGE.section(
    "guesses",
    _run,
    findings=lambda result: [
        f"Through {row['lens']}: {words(row)}" for row in result.rows("guesses")
    ],
    shows=(_claim, PAGE.table("guesses-table", pick("guesses"))),
)
