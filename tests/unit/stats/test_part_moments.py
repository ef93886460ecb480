"""Moments of parts, x0, y0, x1, y1, ...: each input has one target, no output a Gram matrix."""

from itertools import pairwise

import pytest
import torch

from layerleap.errors import BadArtifact, BadSettings, NotFinite, WrongModel
from layerleap.maps.linear import solve, squared_error
from layerleap.stats.moments import Moments, load_moments, save_moments

PARTS, WIDTH = 3, 4
LAST = 2 * PARTS - 1


def vectors(n: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, WIDTH, generator=generator).double() + v for v in range(LAST + 1)]


def moments_of(rows: list[torch.Tensor], cuts=()) -> Moments:
    moments = Moments(LAST, WIDTH, "parts")
    for start, stop in pairwise([0, *cuts, len(rows[0])]):
        moments.add([vector[start:stop] for vector in rows])
    return moments


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setattr("layerleap.stats.moments.BUFFER", 16)


def test_they_hold_the_products_of_each_input_and_the_squares_of_each_output():
    rows = vectors(50)
    moments = moments_of(rows, [7, 8, 31])
    for x in range(0, LAST, 2):
        torch.testing.assert_close(moments.xx(x), rows[x].T @ rows[x])
        torch.testing.assert_close(moments.xy(x, x + 1), rows[x].T @ rows[x + 1])
        assert moments.targets(x) == [x + 1]
        assert moments.targets(x + 1) == []
    for vector in range(LAST + 1):
        torch.testing.assert_close(moments.squares(vector), rows[vector].square().sum(0))
        torch.testing.assert_close(moments.sums[vector], rows[vector].sum(0))


def test_an_output_has_no_gram_matrix():
    moments = moments_of(vectors(5))
    assert [tuple(c.shape) for c in moments.cross] == [(WIDTH, 2 * WIDTH), (1, WIDTH)] * PARTS
    with pytest.raises(BadSettings, match="only its squares are kept"):
        moments.xx(1)
    with pytest.raises(BadSettings, match="the input of each part to its output"):
        moments.xy(0, 3)


@pytest.mark.parametrize("pairs", ["final", "all"])
def test_squares_of_layers_are_the_diagonal_of_their_products(pairs):
    moments = Moments(2, WIDTH, pairs)
    moments.add(vectors(9)[:3])
    assert all(torch.equal(moments.squares(v), moments.xx(v).diagonal()) for v in range(3))


def test_merging_shards_equals_seeing_the_whole():
    rows = vectors(60)
    shards = [moments_of([v[start::3] for v in rows]) for start in (2, 0, 1)]
    merged, whole = shards[0].merge(shards[1]).merge(shards[2]), moments_of(rows).flush()
    assert merged.n == whole.n == 60
    for ours, theirs in zip([merged.sums, *merged.cross], [whole.sums, *whole.cross], strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(WrongModel, match="cannot be added"):
        whole.merge(Moments(LAST, WIDTH, "all"))


def test_a_resumed_checkpoint_is_bit_identical(tmp_path):
    rows = vectors(45)
    whole, begun = moments_of(rows, [21]), moments_of([v[:21] for v in rows])
    save_moments(tmp_path / "m.safetensors", {"parts": begun}, {})
    resumed = load_moments(tmp_path / "m.safetensors")[0]["parts"]
    assert resumed.rows == 21
    assert resumed.n < 21, "the buffer is empty, so the test shows little"
    resumed.add([v[21:] for v in rows])
    ours, theirs = resumed.tensors(), whole.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_an_odd_number_of_vectors_is_refused():
    with pytest.raises(BadSettings, match="3 vectors cannot be inputs and outputs"):
        Moments(2, WIDTH, "parts")
    with pytest.raises(BadArtifact, match="3 vectors cannot be inputs and outputs"):
        Moments.from_tensors({}, (2, WIDTH, "parts"))


def test_bad_rows_are_named_by_their_site():
    names = [f"{site} of block {b}" for b in (1, 2, 3) for site in ("ffn.in", "ffn.out")]
    moments = Moments(LAST, WIDTH, "parts", names)
    rows = vectors(4)
    rows[3][2, 1] = torch.inf
    with pytest.raises(NotFinite, match=r"at ffn.out of block 2 after 0 good rows"):
        moments.add(rows)
    with pytest.raises(BadSettings, match=r"states of ffn.in of block 1 have shape"):
        moments.merge(moments).add([v[:, :2] for v in rows[:1]] + rows[1:])


@pytest.mark.parametrize("intercept", [False, True])
def test_they_solve_to_the_least_squares_of_the_rows(intercept):
    rows = vectors(50)
    moments = moments_of(rows)
    for x in range(0, LAST, 2):
        [(actual, fit)] = solve(moments, x, intercept=intercept)
        ones = torch.ones(50, 1).double()
        inputs = torch.cat([rows[x], ones], 1) if intercept else rows[x]
        expected = torch.linalg.lstsq(inputs, rows[x + 1]).solution
        torch.testing.assert_close(actual.weight.double(), expected[:WIDTH], rtol=1e-5, atol=1e-6)
        error = (inputs @ expected - rows[x + 1]).square().sum(0)
        ours = squared_error(
            moments, x, x + 1, expected[:WIDTH], expected[-1] if intercept else None
        )
        torch.testing.assert_close(ours, error)
        spread = (rows[x + 1] - rows[x + 1].mean(0)).square().sum(0)
        assert fit.train_r2 == pytest.approx((1 - error / spread).mean().item(), abs=1e-6)
        identity = (rows[x] - rows[x + 1]).square().sum(0)
        assert fit.train_r2_logit == pytest.approx((1 - identity / spread).mean().item())
