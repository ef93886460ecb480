"""Why early exit is worth it here, or why not: sentences, the most important first.

In: a finished study. Out: sentences that say what its tables say.
"""

from collections.abc import Iterator
from functools import partial

from layerleap.lens.metrics import lasting
from layerleap.study.result import Row, StudyResult
from layerleap.study.tables import percent

_percent = partial(percent, digits=1)


def reasons(result: StudyResult) -> list[str]:
    """Why the answer is what it is."""
    chosen = result.row("rules", chosen=True)
    if chosen is None or not chosen["exits"]:
        return [*_never(result, chosen), *ceilings(result), _head(result)]
    return [
        _time(chosen),
        *_broken(chosen),
        _layers(chosen, result),
        _head(result),
        *_break_even(chosen, result),
        *_left_out(result),
    ]


def _never(result: StudyResult, chosen: Row | None) -> Iterator[str]:
    tolerance, delta = result.settings["tolerance"], result.settings["delta"]
    limit = f"disagreement with the full model at {_percent(tolerance)} or less"
    part = result.row("splits", part="choose" if chosen is None else "calibrate") or {}
    if chosen is None:
        yield (
            f"None of {len(result.rows('plans'))} plans lets any row exit and is expected to keep "
            f"{limit} ({_size(part)} to choose with): never exit."
        )
    else:
        yield (
            f"The fastest plan, {chosen['words']}, could not be shown to keep {limit} with "
            f"confidence {1 - delta:g} ({_size(part)} to calibrate on): never exit."
        )
    yield "More held-out text or a larger tolerance may let a rule pass."


def _time(chosen: Row) -> str:
    time, low, high = (chosen[key] for key in ("time", "time_low", "time_high"))
    if low is None or high is None:
        return (
            f"With {chosen['words']}, an answer takes an estimated {time:.2f} of the full model's "
            f"time; {_size(chosen)} are too few for an interval."
        )
    if high < 1:
        meaning = "the whole interval is below 1, so time is saved"
    elif low >= 1:
        meaning = "none of the interval is below 1, so no time is saved"
    else:
        meaning = "the interval includes 1, so this is not settled"
    return (
        f"With the fastest plan, {chosen['words']}, an answer takes an estimated {time:.2f} of the "
        f"full model's time (95 % interval {low:.2f} to {high:.2f}, {_size(chosen)}); {meaning}."
    )


def _broken(chosen: Row) -> Iterator[str]:
    if chosen["low"] > chosen["tolerance"]:
        yield (
            f"Its guarantee did not hold: {_percent(chosen['disagreement'])} of "
            f"{chosen['rows']:,} fresh rows disagree, at least {_percent(chosen['low'])} with 95 % "
            f"confidence, and {_percent(chosen['tolerance'])} were allowed."
        )


def _layers(chosen: Row, result: StudyResult) -> str:
    return (
        f"It saves {chosen['saved']:.1f} of {result.model['n_layers']} layers and disagrees with "
        f"the full model in {_percent(chosen['disagreement'])} of rows (95 % interval "
        f"{_percent(chosen['low'])} to {_percent(chosen['high'])}; {_percent(chosen['tolerance'])} "
        f"allowed; {_size(chosen)})."
    )


def _head(result: StudyResult) -> str:
    (timing,), cost = result.rows("timing"), result.rows("costs", map="linear")[0]
    block = sum(timing["blocks"]) / len(timing["blocks"])
    return (
        f"Reading the head once takes as long as {_blocks(timing['head_in_blocks'])} blocks "
        f"({_ms(timing['head'])}; a block takes {_ms(block)}) and as many FLOPs as "
        f"{_blocks(cost['head_in_blocks'])} blocks, and every check reads it."
    )


def _break_even(chosen: Row, result: StudyResult) -> Iterator[str]:
    even = chosen["break_even"]
    if even is None:
        return
    if even["head_in_blocks"] is None:
        head = "the cost of the head does not matter"
    elif even["head_in_blocks"] <= 0:
        head = "no head is cheap enough: maps and checks alone cost more than it saves"
    else:
        head = (
            f"it breaks even with a head of {_blocks(even['head_in_blocks'])} blocks (this one: "
            f"{_blocks(result.rows('timing')[0]['head_in_blocks'])})"
        )
    yield (
        f"It reads the head {even['heads']:.2f} times per answer, where the full model reads it "
        f"once; with these exits {head}. With this head it breaks even by saving the time of "
        f"{even['saved_needed']:.1f} blocks per answer (it saves {even['saved']:.1f})."
    )


def _left_out(result: StudyResult) -> Iterator[str]:
    answer = result.rows("verdict")[0]["answer"]
    if result.rows("timing")[0]["mode"] == "cached" and answer != "not worth it":
        yield (
            "Not counted: later tokens need keys and values from the skipped layers, and computing "
            "them costs a part of what is saved."
        )


def ceilings(result: StudyResult) -> Iterator[str]:
    """What no rule can beat."""
    for row in result.rows("ceilings"):
        yield (
            f"No rule through {row['map']} can save more than {row['saved']:.1f} of "
            f"{result.model['n_layers']} layers{_interval(row, 1, 'saved_')} without disagreeing, "
            f"or take less than {row['time']:.2f} of the time{_interval(row, 2, 'time_')}: that is "
            f"what an oracle with free checks reaches ({_size(row)})."
        )


def how_timed(result: StudyResult) -> str:
    """What the times are of, and how much they vary."""
    (timing,) = result.rows("timing")
    answer = (
        f"one new token after {timing['context'] - 1} cached ones"
        if timing["mode"] == "cached"
        else f"one answer from a text of {timing['context']} tokens without a cache"
    )
    return (
        f"Times are medians of {timing['repeats']} passes at batch size 1, {answer}, on "
        f"{timing['device']} with {_many(timing['threads'], 'thread')} in {timing['dtype']}; the "
        f"middle half of them spreads over {_percent(timing['spread'])} of the median, which the "
        "interval leaves out."
    )


def agreement(result: StudyResult) -> Iterator[str]:
    """How early the answer can be read, through each map."""
    target, n_layers = 1 - result.settings["tolerance"], result.model["n_layers"]
    for name in dict.fromkeys(row["map"] for row in result.rows("agreement")):
        rows = result.rows("agreement", map=name)
        middle, first = rows[n_layers // 2], lasting([row["value"] for row in rows], target)
        is_early = first is not None and first < n_layers
        where = f"from layer {first} on" if is_early else "only at the last layer"
        ends = middle["low"], middle["high"]
        interval = "" if None in ends else f" (95 % interval {' to '.join(map(_percent, ends))})"
        yield (
            f"Through {name}, {_percent(middle['value'])} of answers can be read at layer "
            f"{middle['layer']} of {n_layers}{interval}; at least {_percent(target)} {where} "
            f"({_size(middle)})."
        )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _interval(row: Row, digits: int, before: str) -> str:
    low, high = row[f"{before}low"], row[f"{before}high"]
    return "" if low is None or high is None else f" ({low:.{digits}f} to {high:.{digits}f})"


def _size(row: Row) -> str:
    """The sample size of something measured."""
    return f"n = {_many(row['rows'], 'row')} of {_many(row['documents'], 'document')}"


def _many(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _blocks(n: float) -> str:
    return f"{n:.1f}" if n >= 0.1 else f"{n:.2g}"
