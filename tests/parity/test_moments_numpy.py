"""Moments against numpy in float64, where float32 sums would long be wrong."""

import numpy as np
import pytest
import torch

from layerleap.stats.moments import Moments

LAYERS, WIDTH, ROWS = 2, 6, 3000


def rows(offset: float, seed: int = 0) -> list[np.ndarray]:
    """float32 states of unit variance around a mean of `offset`, correlated between layers."""
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((ROWS, WIDTH))
    actual = [first]
    for _ in range(LAYERS):
        actual.append(0.7 * actual[-1] + 0.7 * rng.standard_normal((ROWS, WIDTH)))
    return [(h + offset).astype(np.float32) for h in actual]


def moments_of(h: list[np.ndarray], batch: int) -> Moments:
    moments = Moments(LAYERS, WIDTH, "all")
    for start in range(0, ROWS, batch):
        moments.add([torch.from_numpy(layer[start : start + batch]) for layer in h])
    return moments.flush()


@pytest.mark.parametrize("batch", [7, 512, ROWS])
def test_sums_and_products_equal_numpy(batch):
    h = rows(0.5)
    moments = moments_of(h, batch)
    exact = [layer.astype(np.float64) for layer in h]
    assert moments.n == ROWS
    np.testing.assert_allclose(moments.sums, [layer.sum(0) for layer in exact], rtol=1e-12)
    for src in range(LAYERS + 1):
        np.testing.assert_allclose(moments.xx(src), exact[src].T @ exact[src], rtol=1e-12)
        for dst in range(src + 1, LAYERS + 1):
            np.testing.assert_allclose(moments.xy(src, dst), exact[src].T @ exact[dst], rtol=1e-12)


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_a_mean_far_from_zero_leaves_the_covariance_its_digits(offset):
    h = rows(offset)
    moments = moments_of(h, 100)
    mean = moments.sums / moments.n
    for src, dst in ((0, 0), (0, 1), (0, 2), (1, 2)):
        products = moments.xx(src) if src == dst else moments.xy(src, dst)
        ours = (products / moments.n - torch.outer(mean[src], mean[dst])).numpy()
        exact = [layer.astype(np.float64) - layer.astype(np.float64).mean(0) for layer in h]
        theirs = exact[src].T @ exact[dst] / ROWS
        # 1e4 standard deviations: 2^-53 * 1e8 leaves seven to eight digits of unit variance.
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_bfloat16_states_are_summed_without_a_second_rounding():
    h = [torch.from_numpy(layer).bfloat16() for layer in rows(3.0)]
    moments = Moments(LAYERS, WIDTH, "all")
    moments.add(h)
    exact = [layer.double().numpy() for layer in h]
    np.testing.assert_allclose(moments.xy(0, 2), exact[0].T @ exact[2], rtol=1e-12)
