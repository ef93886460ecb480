"""All 465 maps between 31 layers, compared with scikit-learn, pair by pair, on the same rows.

Ours is measured in full: moments of all pairs, then every map. scikit-learn is measured on a
sample of pairs, spread over the run, and extrapolated linearly to all of them.
"""

import random
from functools import partial
from itertools import combinations

import numpy as np
import torch
from common import MODEL, Row, median, timed
from sklearn.linear_model import LinearRegression
from torch import Tensor

from layerleap import Sampling, Transformer, load
from layerleap.maps.linear import LinearMap, solve
from layerleap.stats import Moments
from layerleap.stream.examples import iter_batches, iter_examples

CHUNK = 1024  # rows per call of `Moments.add`
AGREEMENT = 1e-4  # relative Frobenius distance between our map and scikit-learn's


def run(*, smoke: bool) -> list[Row]:
    """One row for speed on real states, one for agreement on well-conditioned data."""
    return [_speed(smoke), _agreement(smoke)]


def _speed(smoke: bool) -> Row:
    states = _real_states(load(MODEL), 700 if smoke else 9000)
    if smoke:
        states = states[:4]
    every = list(combinations(range(len(states)), 2))
    sample = random.Random(0).sample(every, min(12, len(every)))
    _fit_all([h[:64] for h in states[:3]])
    _peer(states, every[0])  # warm-up of both sides
    ours, peer = [], []
    shares = [sample[0::3], sample[1::3], sample[2::3]]
    for number, share in enumerate(shares):
        peer += [timed(partial(_peer, states, pair)) for pair in share]
        if number < 2:  # in between, so that timing drift affects both sides
            ours.append(timed(lambda: _fit_all(states)))
    maps = _fit_all(states)
    gaps = [_gap(maps[pair], _peer(states, pair)) for pair in sample[:3]]
    detail = {
        "note": "peer extrapolated linearly from the median of the sampled pairs; ours in full",
        "samples": {"ours": ours, "peer_per_pair": peer},
        "sampled_pairs": sample,
        "maps": len(every),
        "n": len(states[0]),
        "width": states[0].shape[1],
        "real_states_gap": gaps,  # for information: these rows do not determine all directions
    }
    sides = median(ours), median(peer) * len(every)
    return Row("pairs", *sides, "seconds", at_least=5.0, over="peer/ours", detail=detail)


def _agreement(smoke: bool) -> Row:
    n, width, layers = (400, 24, 3) if smoke else (9000, 576, 4)
    states = _mixed_states(n, width, layers)
    conditions = [np.linalg.cond(h.double().numpy()) for h in states]
    if max(conditions) >= 100:
        raise RuntimeError(
            f"the made-up rows have condition number {max(conditions):.0f}; expected below 100"
        )
    maps = _fit_all(states)
    gaps = {pair: _gap(ours, _peer(states, pair)) for pair, ours in maps.items()}
    detail = {
        "note": "largest relative Frobenius distance to scikit-learn; all pairs, made-up rows",
        "samples": [[*pair, gap] for pair, gap in gaps.items()],
        "conditions": [float(c) for c in conditions],
        "n": n,
        "width": width,
    }
    return Row(
        "pairs_agreement", max(gaps.values()), None, "relative", at_most=AGREEMENT, detail=detail
    )


def _fit_all(states: list[Tensor]) -> dict[tuple[int, int], LinearMap]:
    """All maps between the layers, solved from moments."""
    moments = Moments(len(states) - 1, states[0].shape[1], "all")
    for start in range(0, len(states[0]), CHUNK):
        moments.add([h[start : start + CHUNK] for h in states])
    maps = (m for src in range(len(states) - 1) for m, _ in solve(moments, src))
    return {(m.src, m.dst): m for m in maps}


def _peer(states: list[Tensor], pair: tuple[int, int]) -> np.ndarray:
    src, dst = pair
    fitted = LinearRegression(fit_intercept=False).fit(states[src].numpy(), states[dst].numpy())
    return fitted.coef_.T


def _gap(ours: LinearMap, theirs: np.ndarray) -> float:
    assert ours.weight is not None
    return float(np.linalg.norm(ours.weight.numpy() - theirs) / np.linalg.norm(theirs))


def _real_states(transformer: Transformer, rows: int) -> list[Tensor]:
    """h[0] .. h[n_layers] at `rows` positions of Wikipedia."""
    examples = iter_examples(transformer, "wikipedia", Sampling(positions="all"))
    parts: list[list[Tensor]] = []
    for batch in iter_batches(transformer, examples):
        states = transformer.capture(batch.inputs, keep=batch.keep).states
        parts.append([states[layer].float() for layer in range(transformer.n_layers + 1)])
        if sum(len(part[0]) for part in parts) >= rows:
            break
    return [torch.cat(layer)[:rows].clone() for layer in zip(*parts, strict=True)]


def _mixed_states(n: int, width: int, layers: int) -> list[Tensor]:
    """Rows with one random cause, mixed with noise at every layer; condition number below 100."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    cause, scales = normal(n, width), torch.linspace(1, 1 / 30, width, dtype=torch.float64)
    mixed = []
    for _ in range(layers):
        left, right = (torch.linalg.qr(normal(width, width)).Q for _ in range(2))
        mixed.append(cause @ (left * scales) @ right + 0.01 * normal(n, width))
    return mixed
