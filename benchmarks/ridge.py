"""Up to how many rows does a ridge help? Chosen by held-out KL, against none.

In: one pass over a text, stopped at growing numbers of rows. Out: build/ridge.csv, with KL on other
text at some layers; and a row for five rows per direction, about as many as a short fit has.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from common import BUILD, MODEL, Row, write_table

import layerleap as ll
from layerleap.maps.linear import RidgeSolver
from layerleap.maps.ridge import RidgeChooser
from layerleap.maps.translator import Answers
from layerleap.stats.moments import Moments
from layerleap.stream.batches import batches_of
from layerleap.stream.source import resolve_text

PER_DIRECTION = (2, 5, 9, 17)
LAYERS = (0, 5, 10, 15, 20, 24, 26, 28, 29)
RIDGE_ROWS, READ = 384, 150


def run(*, smoke: bool) -> list[Row]:
    """Write the table; the row is the mean KL over layers, chosen against none."""
    model = ll.load(MODEL)
    table = list(_table(model, (0.5, 1) if smoke else PER_DIRECTION))
    write_table(BUILD / ("ridge-smoke.csv" if smoke else "ridge.csv"), table)
    n_rows = sorted({row["rows"] for row in table})[1]
    some = [row for row in table if row["rows"] == n_rows]
    chosen, none = (sum(row[key] for row in some) / len(some) for key in ("kl_chosen", "kl_none"))
    detail = {
        "note": "KL of readings on news, mean over layers, with and without a chosen ridge, at "
        f"{n_rows} rows of width {model.d_model}",
        "seconds_to_choose": round(sum(row["seconds"] for row in some), 1),
        "layers": len(some),
    }
    return [Row("ridge_chosen", chosen, none, "nats", at_most=1.0, detail=detail)]


def _rows(model: Any, text: str, positions: str, **how: Any) -> Iterator[tuple[list[Any], Any]]:
    sampling = ll.Sampling(unit="paragraph", positions=positions)
    source, sampling = resolve_text(model, text, sampling, lambda *_, **__: None, None, None)
    for batch in batches_of(model, source, sampling, **how):
        states = model.capture(batch.inputs, keep=batch.keep).states
        yield [states[layer].float().cpu() for layer in range(model.n_layers + 1)], batch


@torch.no_grad()
def _table(model: Any, sizes: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    read: list[Any] = []
    for states, _ in _rows(model, "news", "one", side="both", n_texts=READ):
        read.append(torch.stack(states, 1))
    news = torch.cat(read)
    answers = Answers(model, news[:, -1])
    moments, ridge_rows = Moments(model.n_layers, model.d_model), torch.zeros(0)
    sizes_left = list(sizes)
    for states, batch in _rows(model, "wikipedia", "every:2", ridge_share=0.1):
        back = batch.ridge_rows
        rows = torch.stack([h[back] for h in states], 1)
        ridge_rows = torch.cat([ridge_rows, rows])[:RIDGE_ROWS] if len(ridge_rows) else rows
        moments.add([h[~back] for h in states])
        if moments.rows >= sizes_left[0] * model.d_model and len(ridge_rows):
            sizes_left.pop(0)
            yield from _compared(model, moments.flush(), ridge_rows, news, answers)
            if not sizes_left:
                return


def _compared(
    model: Any, moments: Moments, ridge_rows: Any, news: Any, answers: Answers
) -> Iterator[dict[str, Any]]:
    chooser = RidgeChooser(model, moments, ridge_rows, intercept=False)
    for layer in LAYERS:
        started = time.perf_counter()
        chosen = chooser.choose(layer)
        seconds = time.perf_counter() - started
        solver = RidgeSolver(moments, layer, False)
        kl = {
            ridge: answers.compare(news[:, layer] @ solver.solve(model.n_layers, ridge)[0].float())
            for ridge in {0.0, chosen}
        }
        mean = {ridge: round(float(rows.mean()), 4) for ridge, (rows, *_) in kl.items()}
        yield {
            "rows": moments.n,
            "per_direction": round(moments.n / model.d_model, 1),
            "layer": layer,
            "ridge": chosen,
            "kl_none": mean[0.0],
            "kl_chosen": mean[chosen],
            "seconds": round(seconds, 2),
        }
