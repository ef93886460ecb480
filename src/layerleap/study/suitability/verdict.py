"""Is early exit worth it? The answer, its reasons and what was found, in computed words.

In: the tables of a suitability study. Out: sentences, each with its numbers and sample size.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

Row = Mapping[str, Any]
Answer = Literal["worth it", "not worth it", "cannot tell"]
NAMES = {"gap": "the paper's gap rule", "entropy": "the entropy rule", "learned": "a learned rule"}


def answer_of(chosen: Row | None) -> Answer:
    """Worth it only if the time's whole interval lies below the full model's.

    Args:
        chosen: the outcome of the chosen plan; None if under no plan any row may leave.
    """
    if chosen is None or not chosen["exits"]:
        return "not worth it"
    time, seen = chosen["time"], chosen["verified"]
    if time["low"] is None or time["high"] is None or seen["low"] > seen["tolerance"]:
        return "cannot tell"
    if time["high"] < 1:
        return "worth it"
    return "not worth it" if time["low"] >= 1 else "cannot tell"


def verdict(result: Mapping[str, Any]) -> dict[str, Any]:
    """The answer and its reasons, the most telling first."""
    chosen = result["chosen"]
    answer = answer_of(chosen)
    if chosen is None or not chosen["exits"]:
        reasons = [*_nowhere(result), *_ceiling(result), *_heads(result)]
    else:
        reasons = [
            *_time(chosen, answer), *_broken(chosen), *_layers(chosen, result),
            *_heads(result), *_break_even(chosen, result), *_ceiling(result),
        ]  # fmt: skip
    return {"answer": answer, "reasons": [*reasons, *_left_out(result, answer)]}


def _nowhere(result: Mapping[str, Any]) -> Iterator[str]:
    settings, used, chosen = result["settings"], result["rows"], result["chosen"]
    allowed = f"disagree with the full model in at most {_percent(settings['tolerance'])} of rows"
    if chosen is None:
        n = used["judge"]
        yield (
            f"None of {len(result['plans'])} plans let any row leave and could be expected to "
            f"{allowed} ({_sample(n)} to choose with): exit nowhere."
        )
    else:
        n = used["calibrate"]
        yield (
            f"The quickest plan, {_plan(chosen)}, could not be shown to {allowed} with confidence "
            f"{1 - settings['delta']:g} ({_sample(n)} to calibrate on): exit nowhere."
        )
    yield "More held-out texts or a larger tolerance may let a rule pass."


def _time(chosen: Row, answer: Answer) -> Iterator[str]:
    time = chosen["time"]
    low, high = time["low"], time["high"]
    if low is None:
        yield (
            f"With {_plan(chosen)}, an answer is expected to take {time['value']:.2f} of the full "
            f"model's time; {_sample(time)} cannot say how far that holds for others."
        )
        return
    means = {
        "worth it": "all of the interval is below 1: time is saved",
        "not worth it": "none of the interval is below 1: time is not saved",
        "cannot tell": "the interval does not settle it",
    }
    if high < 1 or low >= 1:  # whatever else forbids a verdict, the time is as it is
        said = means["worth it" if high < 1 else "not worth it"]
    else:
        said = means[answer]
    yield (
        f"With the quickest plan, {_plan(chosen)}, an answer is expected to take "
        f"{time['value']:.2f} of the full model's time (95 % interval {low:.2f} to {high:.2f}, "
        f"{_sample(time)}); {said}."
    )


def _broken(chosen: Row) -> Iterator[str]:
    seen = chosen["verified"]
    if seen["low"] > seen["tolerance"]:
        yield (
            f"Its promise did not hold: {_percent(seen['disagreement'])} of {seen['rows']:,} fresh "
            f"rows disagree, at least {_percent(seen['low'])} at 95 %, and "
            f"{_percent(seen['tolerance'])} were allowed."
        )


def _layers(chosen: Row, result: Mapping[str, Any]) -> Iterator[str]:
    seen, last = chosen["verified"], result["model"]["n_layers"]
    yield (
        f"It saves {seen['saved']:.1f} of {last} layers and disagrees with the full model in "
        f"{_percent(seen['disagreement'])} of rows (95 % interval {_percent(seen['low'])} to "
        f"{_percent(seen['high'])}; {_percent(seen['tolerance'])} allowed; {_sample(seen)})."
    )


def _heads(result: Mapping[str, Any]) -> Iterator[str]:
    clock, flops = result["clock"], result["flops"]["mat"]
    block = sum(clock["blocks"]) / clock["n_layers"]
    yield (
        f"One reading of the head costs {_blocks(clock['head_in_blocks'])} blocks in measured time "
        f"({_ms(clock['head'])}; a block takes {_ms(block)}) and "
        f"{_blocks(flops['head_in_blocks'])} in FLOPs, and every check pays one."
    )


def _break_even(chosen: Row, result: Mapping[str, Any]) -> Iterator[str]:
    found = chosen["break_even"]
    most, present = found["head_in_blocks"], result["clock"]["head_in_blocks"]
    if most is None:
        head = "the head's price does not decide"
    elif most <= 0:
        head = "no head is cheap enough: maps and looks alone take what it saves"
    else:
        head = (
            f"it breaks even with a head of {_blocks(most)} blocks (this one: {_blocks(present)})"
        )
    yield (
        f"It runs {found['heads']:.2f} heads per answer where the full model runs 1; with these "
        f"exits {head}. With this head it breaks even by saving {found['saved_needed']:.1f} "
        f"blocks' worth of time per answer (it saves {found['saved']:.1f})."
    )


def _ceiling(result: Mapping[str, Any]) -> Iterator[str]:
    last = result["model"]["n_layers"]
    for row in result["ceiling"]:
        saved, time = row["saved"], row["time"]
        yield (
            f"No rule through {row['map']} can save more than {saved['value']:.1f} of {last} "
            f"layers{_interval(saved, 1)} without disagreeing, nor take less than "
            f"{time['value']:.2f} of the time{_interval(time, 2)}: what one would take that knew "
            f"the answer for free ({_sample(saved)})."
        )


def _left_out(result: Mapping[str, Any], answer: Answer) -> Iterator[str]:
    clock = result["clock"]
    one = (
        f"one new token after {clock['context'] - 1} cached ones"
        if clock["mode"] == "cached"
        else f"one answer from a text of {clock['context']} tokens, run whole"
    )
    yield (
        f"Times are medians of {clock['repeats']} passes at batch 1, {one}, on {clock['device']} "
        f"with {_many(clock['threads'], 'thread')} in {clock['dtype']}; the middle half of them "
        f"spreads over {_percent(clock['spread'])} of the median, which the interval leaves out."
    )
    if clock["mode"] == "cached" and answer != "not worth it":
        yield (
            "Not counted: later tokens need the keys and values of the layers skipped, and making "
            "them takes back a part of what is saved."
        )


def findings(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """What was seen on the way: agreement by layer, and each rule checked at every layer."""
    found = [("agreement", line) for line in _agreement(result)]
    found += [("rules", _rule(row, result["model"]["n_layers"])) for row in result["rules"]]
    return [{"topic": topic, "text": text} for topic, text in found]


def _agreement(result: Mapping[str, Any]) -> Iterator[str]:
    last = result["model"]["n_layers"]
    for name in ("id", "mat"):
        rows = sorted((r for r in result["agreement"] if r["map"] == name), key=_layer)
        reach = _lasting(rows, 1 - result["settings"]["tolerance"])
        middle = rows[last // 2]
        where = f"from layer {reach} on" if reach < last else "only at the last layer"
        yield (
            f"Through {name}, {_percent(middle['value'])} of answers can be read at layer "
            f"{middle['layer']} of {last}{_interval(middle, 2)}; at least "
            f"{_percent(1 - result['settings']['tolerance'])} {where} ({_sample(middle)})."
        )


def _layer(row: Row) -> int:
    return int(row["layer"])


def _lasting(rows: Sequence[Row], least: float) -> int:
    """The first layer from which on no value is below; the last layer reads as the model."""
    below = [_layer(row) for row in rows if row["value"] < least]
    return min(below[-1] + 1 if below else 0, _layer(rows[-1]))


def _rule(row: Row, last: int) -> str:
    if not row["exits"]:
        said = f"{_plan(row)}: no threshold keeps the promise; exit nowhere."
        return said[0].upper() + said[1:]
    time, seen = row["time"], row["verified"]
    said = (
        f"{_plan(row)}: saves {seen['saved']:.1f} of {last} layers at "
        f"{_percent(seen['disagreement'])} disagreement, and takes {time['value']:.2f} of the time"
        f"{_interval(time, 2)} and {row['flops']:.2f} of the FLOPs ({_sample(seen)})."
    )
    return said[0].upper() + said[1:]


def _plan(row: Row) -> str:
    return f"{NAMES[row['rule']]} through {row['map']}, checked at {row['name']}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _interval(row: Row, digits: int) -> str:
    low, high = row["low"], row["high"]
    return "" if low is None or high is None else f" ({low:.{digits}f} to {high:.{digits}f})"


def _sample(row: Row) -> str:
    return f"n = {_many(row['rows'], 'row')} of {_many(row['documents'], 'document')}"


def _many(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _blocks(n: float) -> str:
    return f"{n:.1f}" if n >= 0.1 else f"{n:.2g}"
