"""What "Looking Beyond the Top-1" (arXiv 2410.20210) says, beside what was seen here.

In: the result of a study of saturation. Out: one row per claim: what was seen, whether it agrees
("yes", "partly", "no", "cannot tell" or "not tested"), and how that was decided. The paper's
models are larger.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from layerleap.study.saturation.findings import TARGET, flops_of, reads_tasks, saved
from layerleap.study.shortcuts.claims import Study, Verdict, answered, untested

Row = dict[str, Any]


def claims(study: Study) -> list[dict[str, str]]:
    """One row per claim that a study of one model can put to a test."""
    # Beside each the section that it is made from; some need only what every study has.
    tested: list[tuple[str, str | None, Callable[[Study], Verdict]]] = [
        ("The five best tokens settle in the order of their ranks, beyond chance.", None, _order),
        ("The mean saturation rank grows with every rank from 1 to 5.", None, _places),
        ("In untrained models, only the first three ranks settle in order.", "twin", _untrained),
        ("Which rank is being decided can be told from a single state.", "probe", _probe),
        ("A state put into another text makes it settle there, from the donor's saturation layer "
         "on and not before.", "intervention", _step),
        ("What makes it stay is that the donor's state is settled.", "intervention", _settled),
        ("Exiting where the probe says that rank 2 is being decided beats softmax response and "
         "state similarity.", "exits", _exit),
        ("Where the top token is wrong, a runner-up that settled early is right more often.",
         "guesses", _guesses),
        ("In speech, only the first three ranks settle in order.", None, _speech),
    ]  # fmt: skip
    asked = {None, *study["settings"]["sections"]}
    return answered(
        (
            (claim, test if section in asked else partial(_not_asked, section))
            for claim, section, test in tested
        ),
        study,
    )


def _not_asked(section: str | None, _: Study) -> Verdict:
    return untested(f"section {section!r} was not asked for")


def _order(study: Study) -> Verdict:
    found = study["order"].get("id")
    if found is None or found["tau"][0]["value"] is None:
        return untested("too few positions have a rank settled; see the notes")
    tau = found["tau"][0]
    seen = f"strict tau {tau['value']:+.3f}"
    if tau["exchangeable"]:
        seen += f"; exchangeable ranks {tau['exchangeable']['mean']:+.3f}"
    if tau["walk"] and tau["walk"]["mean"] is not None:
        seen += f"; random walks {tau['walk']['mean']:+.3f}"
    if found["in_order"] is None:
        return seen, "cannot tell", "too few documents, or too few random walks settle"
    partly = "partly" if tau["beats_exchangeable"] else "no"
    why = "yes if it beats both nulls, partly if only exchangeable ranks; the paper has the latter"
    return seen, "yes" if found["in_order"] else partly, why


def clear_ranks(order: Row) -> int:
    """Up to which rank each one settles clearly later than the one before; 1 if none does."""
    clear = 1
    for step in (row for row in order["steps"] if not row["filtered"]):
        if step["low"] is None or step["low"] <= 0:
            break
        clear = step["ranks"][1]
    return clear


def _places(study: Study) -> Verdict:
    found = study["order"].get("id")
    if found is None:
        return untested("too few positions have a rank settled; see the notes")
    places = [row for row in found["places"] if not row["filtered"] and row["value"] is not None]
    seen = "mean places " + ", ".join(f"{row['value']:.2f}" for row in places)
    clear = clear_ranks(found)
    agrees = "yes" if clear == found["k"] else "partly" if clear > 1 else "no"
    return seen, agrees, f"each later than the one before up to rank {clear}, intervals clear of 0"


def _first_three(order: Row) -> Verdict:
    clear = clear_ranks(order)
    seen = f"ranks up to {clear} settle each later than the one before"
    if clear == 1:
        seen = "rank 2 does not clearly settle after rank 1"
    return seen, "yes" if clear == 3 else "no", "yes if up to rank 3 and no further"


def _untrained(study: Study) -> Verdict:
    twin = study["twin"]
    if twin is None or twin["order"] is None:
        return untested("there is no untrained twin here, or too few of its ranks settle")
    return _first_three(twin["order"])


def _speech(study: Study) -> Verdict:
    if study["model"]["reads"] != "sound" or "id" not in study["order"]:
        return untested("this model does not hear")
    return _first_three(study["order"]["id"])


def _probe(study: Study) -> Verdict:
    if not study["probe"]:
        return untested("too few rows for a probe; see the notes")
    name, found = next(iter(study["probe"].items()))
    row = found["rows"][0]
    if row["permutations"] < 19:
        return untested(f"{row['permutations']} exchanges cannot give p <= 0.05; 19 or more can")
    return (
        f"balanced accuracy {row['value']:.3f} of {found['tasks']} tasks through {name}, exchanged "
        f"labels {row['null']:.3f}, states that know nothing {row['control']:.3f}",
        "yes" if reads_tasks(found) else "no",
        "yes if p <= 0.05 against exchanged labels, the interval over documents lies above chance, "
        "and the control is at chance; folds by document",
    )


def _shares(found: Row) -> dict[tuple[str, int], Row]:
    return {(row["kind"], row["offset"]): row for row in found["rows"]}


def _step(study: Study) -> Verdict:
    found = study["intervention"]
    if found is None:
        return untested("too few pairs of rows for an intervention; see the notes")
    shares = _shares(found)
    before, at = shares.get(("donor", -1)), shares.get(("donor", 0))
    if before is None or at is None:
        return untested("no pair has both offsets")
    return (
        f"{before['share']:.0%} one layer before, {at['share']:.0%} at it, {found['pairs']} pairs",
        "yes" if at["low"] > before["high"] else "no",
        "true by definition for the most part: see the next claim",
    )


def _settled(study: Study) -> Verdict:
    found = study["intervention"]
    at = next((row for row in (found or {}).get("contrasts", []) if row["offset"] == 0), None)
    if at is None or at["low"] is None:
        return untested("no states to compare donors with, or too few documents")
    seen = (
        f"stays in {at['donor']:.0%} of {at['pairs']} pairs, in {at['control']:.0%} with a state "
        f"that reads as the same token as surely and is not settled (p = {at['p']:.2g})"
    )
    twin = (study["twin"] or {}).get("intervention")
    other = next((row for row in (twin or {}).get("contrasts", []) if row["offset"] == 0), None)
    if other is not None:
        seen += f"; in the untrained twin {other['donor']:.0%} and {other['control']:.0%}"
    agrees = "yes" if at["low"] > 0 else "no"
    if agrees == "yes" and other is not None and other["difference"] >= at["difference"]:
        agrees = "partly"
    return seen, agrees, "yes if the difference is clear of 0; partly if the twin's is as large"


def _exit(study: Study) -> Verdict:
    found = saved(study, "id")
    if not found:
        return untested("early exit could not be studied; see the notes")
    task, others = found["task"], [found[rule] for rule in ("gap", "similarity")]
    seen = f"layers saved at {TARGET:.0%} agreement through id: " + ", ".join(
        f"{row['rule']} {row['saved']:.2f} ({flops_of(row)})" for row in (task, *others)
    )
    clearly = all(
        None not in (task["low"], row["high"]) and task["low"] > row["high"] for row in others
    )
    more = all(task["saved"] > row["saved"] for row in others)
    why = "yes if clear of both others' intervals, partly if only on average"
    return seen, "yes" if clearly else "partly" if more else "no", why


def _guesses(study: Study) -> Verdict:
    found = study["guesses"].get("id")
    if found is None:
        return untested("no rows with a known answer that the model gets wrong")
    made = [row for row in found["tests"] if row["p"] is not None]
    if not made:
        return untested("too few rows to test; the findings say how many are needed")
    better = [row["rank"] for row in made if row["early_are"] == "right more often"]
    seen = "; ".join(
        f"rank {row['rank']}: {row['early']['value']:.1%} early, {row['late']['value']:.1%} late "
        f"(p = {row['p']:.2g})"
        for row in made
    )
    agrees = "yes" if len(better) == len(made) else "partly" if better else "no"
    return seen, agrees, "yes if test and interval say so for every rank tested"
