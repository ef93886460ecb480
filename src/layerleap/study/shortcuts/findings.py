"""What the numbers of a shortcut study say, in words; every sentence is computed.

In: the tables of a study. Out: findings by topic, the few numbers that several parts of a report
share, and laws with their verdicts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


class _Curves:
    """Score rows by (fit, read, metric), as lists over layers."""

    def __init__(self, study: Mapping[str, Any]) -> None:
        self.curves: dict[tuple[str, str, str], list[Row]] = {}
        for row in study["scores"]:
            self.curves.setdefault((row["fit"], row["read"], row["metric"]), []).append(row)
        for rows in self.curves.values():
            rows.sort(key=lambda row: row["layer"])

    def values(self, fit: str, read: str, metric: str) -> list[float]:
        return [row["value"] for row in self.curves.get((fit, read, metric), [])]


def findings(study: Mapping[str, Any]) -> list[dict[str, str]]:
    """Sentences for captions; the three with topic `headline` are the most telling."""
    curves, settings, model = _Curves(study), study["settings"], study["model"]
    text, other, last = settings["text"], settings["other"], model["n_layers"]
    token = "masked token" if model["kind"] == "masked-token" else "next token"
    mat = curves.values(text, text, "precision@1")
    plain = curves.values("-", text, "precision@1")
    found = [
        *_headlines(mat, plain, last, token, study["summary"]["half"], _sample(study, text)),
        *_precision(curves, text, last),
        *_surprisal(curves, text, last),
        *_r2(study["r2"], last),
        *_fits(study["fits"], last),
    ]
    if other is not None:
        found += _transfer(curves, study, text, other)
    return [{"topic": topic, "text": sentence} for topic, sentence in found]


def half_layers(study: Mapping[str, Any]) -> dict[str, int | None]:
    """By map: the layer from which on half of the model's answers, or more, are foretold."""
    curves, text = _Curves(study), study["settings"]["text"]
    return {
        name: lasting(curves.values(fit, text, "precision@1"), 0.5)
        for name, fit in (("mat", text), ("id", "-"))
    }


def lasting(values: Sequence[float | None], least: float) -> int | None:
    """The smallest layer from which on no value is below `least`; a passing peak does not count."""
    below = [layer for layer, value in enumerate(values) if value is None or value < least]
    first = below[-1] + 1 if below else 0
    return first if first < len(values) else None


def _sample(study: Mapping[str, Any], text: str) -> str:
    """What was read: "n = 3,000 texts of 27 documents"."""
    read = next(row for row in study["data"] if (row["role"], row["text"]) == ("read", text))
    states = "" if read["rows"] == read["texts"] else f"{read['rows']:,} states of "
    documents = "1 document" if read["documents"] == 1 else f"{read['documents']:,} documents"
    return f"n = {states}{read['texts']:,} texts of {documents}"


Found = Iterator[tuple[str, str]]


def _headlines(
    mat: Sequence[float],
    plain: Sequence[float],
    last: int,
    token: str,
    half: Mapping[str, int | None],
    sample: str,
) -> Found:
    middle = last // 2
    yield (
        "headline",
        f"After {middle} of {last} layers a linear shortcut already names the model's own {token} "
        f"in {mat[middle]:.0%} of cases; the logit lens does in {plain[middle]:.0%}. "
        f"(Held-out documents, {sample}.)",
    )
    wins = sum(a > b for a, b in zip(mat[:last], plain[:last], strict=True))
    gap = [a - b for a, b in zip(mat, plain, strict=True)]
    widest = max(range(last), key=gap.__getitem__)
    yield (
        "headline",
        f"The shortcut agrees with the model more often than the logit lens at {wins} of the "
        f"{last} layers below the last; the lead is largest at layer {widest}: "
        f"{100 * gap[widest]:.0f} points.",
    )
    yield (
        "headline",
        f"Half of the model's answers can be foretold from layer {half['mat']} on with shortcuts, "
        f"from layer {half['id']} on with the logit lens.",
    )


def _precision(curves: _Curves, text: str, last: int) -> Found:
    third = max(1, last // 3)
    for k in (1, 5, 10):
        mat = curves.values(text, text, f"precision@{k}")[:third]
        plain = curves.values("-", text, f"precision@{k}")[:third]
        yield (
            "precision",
            f"Over the first third of the layers Precision@{k} lies between {min(mat):.0%} and "
            f"{max(mat):.0%} with shortcuts, between {min(plain):.0%} and {max(plain):.0%} with "
            "the logit lens.",
        )


def _surprisal(curves: _Curves, text: str, last: int) -> Found:
    mat, plain = (curves.values(fit, text, "surprisal") for fit in (text, "-"))
    lower = sum(a < b for a, b in zip(mat[:last], plain[:last], strict=True))
    yield (
        "surprisal",
        f"The model is less surprised by the shortcut's token than by the logit lens's at {lower} "
        f"of {last} layers below the last; at layer {last // 2} by {mat[last // 2]:.1f} against "
        f"{plain[last // 2]:.1f} nats. The floor at the last layer is {mat[last]:.2f} nats.",
    )
    mat, plain = (curves.values(fit, text, "kl") for fit in (text, "-"))
    yield (
        "kl",
        f"At layer {last // 2} the shortcut's distribution is {mat[last // 2]:.1f} nats away from "
        f"the model's, the logit lens's {plain[last // 2]:.1f}.",
    )


def _r2(rows: Sequence[Row], last: int) -> Found:
    by = {(row["map"], row["src"], row["dst"]): row["r2"] for row in rows}
    # One row has no spread, so no R2: such pairs are left out.
    pairs = sorted(p for p in {k[1:] for k in by} if None not in (by["mat", *p], by["id", *p]))
    if not pairs:
        return
    wins = sum(by["mat", *pair] > by["id", *pair] for pair in pairs)
    yield (
        "r2",
        f"The shortcut explains more of the later state than the state itself does in {wins} of "
        f"{len(pairs)} pairs of layers (held-out R2, plain average over coordinates).",
    )
    short = [pair for pair in pairs if pair[1] - pair[0] == 1]
    steps = (
        [sum(by[name, *p] for p in short) / len(short) for name in ("mat", "id")] if short else []
    )
    whole = (0, last)
    if steps and whole in pairs:
        yield (
            "r2",
            f"Over one layer mean R2 is {steps[0]:.2f} with shortcuts and {steps[1]:.2f} without; "
            f"over the whole network {by['mat', *whole]:.2f} and {by['id', *whole]:.2f}.",
        )
    yield from _other_r2(rows, last)


def _other_r2(rows: Sequence[Row], last: int) -> Found:
    """The same with other weights: the paper's average lets every coordinate count alike."""
    finals = [row for row in rows if row["map"] == "mat" and row["dst"] == last]
    known = [row for row in finals if None not in (row["r2"], row["weighted"], row["no_first"])]
    if not known:
        return
    plain, weighted, later = (
        sum(row[key] for row in known) / len(known) for key in ("r2", "weighted", "no_first")
    )
    yield (
        "r2",
        f"To the last layer, the mean over sources is {plain:.2f}; {weighted:.2f} if coordinates "
        f"count by their variance, and {later:.2f} without first positions, whose states are often "
        "outliers.",
    )


def _fits(fits: Sequence[Row], last: int) -> Found:
    finals = [fit for fit in fits if fit["dst"] == last]
    deficient = [fit for fit in finals if fit["rank"] < fit["width"]]
    worst = max(finals, key=lambda fit: fit["condition"])
    if deficient:
        yield (
            "fit",
            f"{len(deficient)} of {len(finals)} fits to the last layer are rank-deficient: "
            f"{finals[0]['rows']} rows do not determine {finals[0]['width']} directions, and the "
            "minimum-norm map was taken. Fit on more text.",
        )
    yield (
        "fit",
        f"The worst-conditioned source is layer {worst['src']}: singular values of its rows "
        f"spread over a factor of {worst['condition']:.1e} ({worst['rows']} rows, width "
        f"{worst['width']}).",
    )


def _transfer(curves: _Curves, study: Mapping[str, Any], text: str, other: str) -> Found:
    """Fits of equal size are compared: a fit on more text reads better wherever it comes from."""
    last, fits = study["model"]["n_layers"], study["summary"]["equal_fits"]
    rows = {row["text"]: row["rows"] for row in study["data"] if row["role"] == "fit"}
    for read, away in ((text, other), (other, text)):
        home = curves.values(fits[read], read, "precision@1")[:last]
        guest = curves.values(fits[away], read, "precision@1")[:last]
        if not home or not guest:
            continue
        change = 100 * sum(b - a for a, b in zip(home, guest, strict=True)) / last
        verb = "loses" if change < 0 else "gains"
        yield (
            "transfer",
            f"Reading {read} with shortcuts fitted on {away} {verb} {abs(change):.1f} points of "
            f"agreement on average over layers, against shortcuts fitted on {read} itself "
            f"({rows[fits[away]]:,} rows of {away}, {rows[fits[read]]:,} of {read}).",
        )


def laws(study: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What must hold whatever the data, and whether it does."""
    curves, checks = _Curves(study), study["summary"]["tail"]
    ordered = all(
        a <= b <= c
        for fit, read, metric in curves.curves
        if metric == "precision@1"
        for a, b, c in zip(
            *(curves.values(fit, read, f"precision@{k}") for k in (1, 5, 10)), strict=True
        )
    )
    behind = [
        f for f in study["fits"] if f["train_r2"] < f["train_r2_id"] - 1e-9 and not f["ridge"]
    ]
    return [
        {
            "law": "the tail applied to the last state gives the model's own answer on real text",
            "holds": all(_holds(check) for check in checks),
            "detail": "; ".join(_checked(check) for check in checks),
        },
        {
            "law": "sanity: Precision@1 <= Precision@5 <= Precision@10",
            "holds": ordered,
            "detail": "at every layer, for every lens and text",
        },
        {
            "law": "sanity: on the rows fitted on, a shortcut is never worse than the identity",
            "holds": not behind,
            "detail": f"{len(study['fits']) - len(behind)} of {len(study['fits'])} fits",
        },
    ]


def _holds(check: Row) -> bool:
    return check["rows"] > 0 and check["agreement"] >= 0.99


def _checked(check: Row) -> str:
    if not check["rows"]:
        return f"{check['text']}: no row was checked"
    gap = "not finite" if check["gap"] is None else f"at most {check['gap']:.1e}"
    return (
        f"{check['text']}: the same top token in {check['agreement']:.1%} of {check['rows']:,} "
        f"rows, log-probabilities differ by {gap}"
    )
