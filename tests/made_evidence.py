"""Synthetic evidence: readings that settle on the final token and get more confident with depth."""

from dataclasses import replace

import torch

from layerleap.act.exits.evidence import COLUMNS, Evidence


def made(
    rows: int = 200,
    n_layers: int = 6,
    *,
    seed: int = 0,
    documents: int | None = None,
    coarse: bool = False,
) -> Evidence:
    """Random evidence of layers 0 to n_layers; `coarse` rounds it so that ties are frequent."""
    g = torch.Generator().manual_seed(seed)
    shape = (rows, n_layers + 1)
    final = torch.randint(5, (rows,), generator=g)
    depth = torch.linspace(0, 1, n_layers + 1)
    settled = torch.rand(shape, generator=g) < depth
    top = torch.where(settled, final[:, None], torch.randint(5, shape, generator=g))
    top[:, -1] = final
    top_prob = (
        0.2 + 0.4 * depth * (top == final[:, None]) + 0.4 * torch.rand(shape, generator=g)
    ).clamp(max=1)
    second_prob = torch.minimum(top_prob, 1 - top_prob) * torch.rand(shape, generator=g)
    entropy = 3 * torch.rand(shape, generator=g)
    cosine = 2 * torch.rand(shape, generator=g) - 1
    if coarse:
        top_prob, second_prob, entropy, cosine = (
            (4 * x).round() / 4 for x in (top_prob, second_prob, entropy, cosine)
        )
        second_prob = torch.minimum(top_prob, second_prob)
    cosine[:, 0] = torch.nan
    document = torch.arange(rows) if documents is None else torch.arange(rows) % documents
    position = torch.randint(30, (rows,), generator=g)
    layers = tuple(range(n_layers + 1))
    return Evidence(top, top_prob, second_prob, entropy, cosine, position, document, layers, final)


def with_task(evidence: Evidence, *, seed: int = 0, coarse: bool = False) -> Evidence:
    """The same with the probabilities of a synthetic task probe, larger with depth."""
    g = torch.Generator().manual_seed(seed + 1)
    shape = evidence.top.shape
    task = 0.05 + 0.5 * torch.linspace(0, 1, shape[1]) + 0.4 * torch.rand(shape, generator=g)
    if coarse:
        task = (4 * task).ceil() / 4
    return replace(evidence, extra={**evidence.extra, "task": task})


def partial_evidence(layers, position, document, *, final=None, extra=None, **columns) -> Evidence:
    """Evidence with some of the columns; the others are unknown."""
    shape = (len(position), len(layers))
    blank = dict.fromkeys(COLUMNS, torch.full(shape, torch.nan)) | {"top": torch.full(shape, -1)}
    return Evidence(
        **{**blank, **columns},
        position=position,
        document=document,
        layers=tuple(layers),
        final=final,
        extra=extra or {},
    )


def upto(evidence: Evidence, column: int) -> Evidence:
    """The columns up to and including `column`: what a live run knows at that point."""
    cut = {name: getattr(evidence, name)[:, : column + 1] for name in COLUMNS}
    extra = {name: value[:, : column + 1] for name, value in evidence.extra.items()}
    return replace(evidence, **cut, layers=evidence.layers[: column + 1], extra=extra)
