"""Which layers still say which token they stand for? Patchscopes, mapped and not, and two lenses.

The answer is known: the token itself. States of the last token of texts that end in a word are read
at every layer; a method is right if its first token is that word. In: news. Out:
build/patchscope.csv, with hits by method and layer, and a picture of it; and a row for the mean
over layers.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import BUILD, MODEL, Row

import layerleap as ll
from layerleap.act.patchscope import patchscope
from layerleap.lens.intervals import wilson
from layerleap.show.figures.canvas import drawing, new_figure, to_png

FIT_TEXTS, WORDS, TOKENS = 1500, 40, 24  # tokens of a text, before its word
TARGETS = (5, 10, 15, 20)  # layers that states are mapped to


def run(*, smoke: bool) -> list[Row]:
    """Write the table; the row is the mean share of layers at which the token is read."""
    model = ll.load(MODEL)
    last = model.n_layers
    texts, words = (20, 2) if smoke else (FIT_TEXTS, WORDS)
    bank = ll.fit(model, "wikipedia", n_texts=texts, pairs="all", evaluate=False)
    prompts = list(_prompts(model, words))
    hits: dict[tuple[str, int], list[bool]] = {}
    for ids in prompts:
        for method, layer, token in _answers(model, bank, ids, TARGETS[-1:] if smoke else TARGETS):
            hits.setdefault((method, layer), []).append(token == ids[-1])
    table = []
    for (method, layer), values in hits.items():
        low, high = wilson(sum(values), len(values))
        share = sum(values) / len(values)
        table.append(
            {
                "method": method,
                "layer": layer,
                "words": len(values),
                "share": round(share, 4),
                "low": round(low, 4),
                "high": round(high, 4),
            }
        )
    target = BUILD / ("patchscope-smoke.csv" if smoke else "patchscope.csv")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    _draw(table, target.with_suffix(".png"))
    # At the last layer a state cannot act on the target any more.
    means = {
        name: sum(row["share"] for row in table if row["method"] == name and row["layer"] < last)
        / last
        for name in ("patchscope", "logit lens")
    }
    note = f"mean share of layers 0 to {last - 1} at which the token is read"
    detail = {"note": note, "words": len(prompts)}
    return [
        Row(
            "patchscope_token",
            means["patchscope"],
            means["logit lens"],
            "share",
            at_least=1.0,
            detail=detail,
        )
    ]


def _draw(table: list[dict[str, Any]], file: Path) -> None:
    with drawing():
        figure = new_figure(7.2, 3.4)
        axes = figure.subplots()
        for method in dict.fromkeys(row["method"] for row in table):
            rows = [row for row in table if row["method"] == method]
            layers = [row["layer"] for row in rows]
            lines = axes.plot(layers, [row["share"] for row in rows], label=method)
            if method == "patchscope":
                ends = [row["low"] for row in rows], [row["high"] for row in rows]
                axes.fill_between(layers, *ends, color=lines[0].get_color(), alpha=0.15, lw=0)
        axes.set(xlabel="layer of the state", ylabel="share of tokens read", ylim=(-0.02, 1.02))
        axes.legend(fontsize=7, frameon=False)
        file.write_bytes(to_png(figure))


def _prompts(model: Any, words: int) -> Iterator[list[int]]:
    """Token ids of news up to a word of one token that begins with a space."""
    for document in ll.iter_documents("news"):
        ids = model.tokenizer(document.text)["input_ids"]
        for end in range(TOKENS, len(ids) - 1):
            word = model.tokenizer.decode(ids[end : end + 2])  # as text, with what follows it
            token = model.tokenizer.decode(ids[end])
            is_whole = word[len(token) :].startswith(" ")
            if token[:1] == " " and token[1:].isalpha() and len(token) > 4 and is_whole:
                yield ids[end - TOKENS : end + 1]
                words -= 1
                break
        if not words:
            return


def _answers(
    model: Any, bank: ll.ShortcutBank, ids: list[int], targets: tuple[int, ...]
) -> Iterator[tuple[str, int, int]]:
    """(method, layer, first token) of the last state of one text."""
    first = {"n_tokens": 1, "progress": False}
    for row in patchscope(model, ids, **first).lines:
        yield "patchscope", row["layer"], (row["ids"] or [-1])[0]
    for to in targets:
        how = {"map": "linear", "bank": bank, "target_layer": to, "layer": range(to + 1)}
        for row in patchscope(model, ids, **how, **first).lines:
            yield f"patchscope, mapped to layer {to}", row["layer"], (row["ids"] or [-1])[0]
    readings = ll.Lens(model, bank).read(ids, positions=[-1], top_k=1)
    for name, title in (("logit", "logit lens"), ("linear", "linear lens")):
        for layer in range(model.n_layers + 1):
            yield title, layer, int(readings.tracks[name].ids[layer, 0, 0])
