"""Shortcuts from moments against scikit-learn and NumPy, in float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score

from layerleap.errors import BadSettings, BadText
from layerleap.maps import linear
from layerleap.maps.linear import RIDGES, moments_r2, solve, squared_error
from layerleap.maps.map import IdentityMap
from layerleap.stats.collect import collect
from layerleap.stats.moments import Moments
from layerleap.stream.examples import Sampling
from tiny_models import sentences, tiny

CLOSE = 1e-8


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Maps as they are solved, before they are stored as float32."""
    monkeypatch.setattr(linear, "_f32", lambda value: value)


def rows(n=120, d=7, seed=0, *, offset=0.0):
    """Two layers of correlated rows; the second is a noisy linear function of the first."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + offset * rng.normal(size=d)
    y = x @ rng.normal(size=(d, d)) + rng.normal(size=(n, d)) + offset * rng.normal(size=d)
    return x, y


def moments_of(*layers, pairs="final"):
    actual = Moments(len(layers) - 1, layers[0].shape[1], pairs)
    actual.add([torch.as_tensor(layer) for layer in layers])
    return actual.flush()


def solved(x, y, **options):
    return next(solve(moments_of(x, y), 0, **options))


def applied(shortcut, x):
    return shortcut(torch.as_tensor(x)).numpy()


def assert_same(actual, expected, tolerance=CLOSE):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("seed", range(3))
def test_without_intercept_the_map_is_sklearns_least_squares(seed, offset):
    x, y = rows(seed=seed, offset=offset)
    expected = LinearRegression(fit_intercept=False).fit(x, y)
    shortcut, fit = solved(x, y)
    assert_same(shortcut.weight, expected.coef_.T)
    assert shortcut.bias is None
    assert (fit.src, fit.dst, fit.rows, fit.rank, fit.width) == (0, 1, 120, 7, 7)


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("seed", range(3))
def test_with_intercept_the_map_is_sklearns_least_squares(seed, offset):
    x, y = rows(seed=seed, offset=offset)
    expected = LinearRegression(fit_intercept=True).fit(x, y)
    shortcut, _ = solved(x, y, intercept=True)
    assert_same(shortcut.weight, expected.coef_.T)
    assert_same(shortcut.bias, expected.intercept_)
    assert_same(applied(shortcut, x), expected.predict(x))


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 0.3, 5.0])
def test_a_ridge_is_sklearns_with_the_penalty_in_units_of_the_mean_eigenvalue(ridge, intercept):
    x, y = rows(offset=3.0)
    centred = x - x.mean(0) if intercept else x
    alpha = ridge * np.linalg.eigvalsh(centred.T @ centred).mean()
    expected = Ridge(alpha=alpha, fit_intercept=intercept, solver="cholesky").fit(x, y)
    shortcut, fit = solved(x, y, intercept=intercept, ridge=ridge)
    assert_same(shortcut.weight, expected.coef_.T)
    assert_same(applied(shortcut, x), expected.predict(x))
    assert fit.ridge == ridge


@pytest.mark.parametrize("intercept", [False, True])
def test_every_later_layer_gets_its_own_map(intercept):
    x, y = rows()
    z = np.tanh(y)
    actual = dict(
        ((shortcut.src, shortcut.dst), shortcut)
        for src in range(3)
        for shortcut, _ in solve(moments_of(x, y, z, pairs="all"), src, intercept=intercept)
    )
    assert sorted(actual) == [(0, 1), (0, 2), (1, 2)]
    for (src, dst), shortcut in actual.items():
        expected = LinearRegression(fit_intercept=intercept).fit((x, y, z)[src], (x, y, z)[dst])
        assert_same(applied(shortcut, (x, y, z)[src]), expected.predict((x, y, z)[src]))


def test_chosen_targets_are_the_only_ones_solved():
    x, y = rows()
    moments = moments_of(x, y, y + x, pairs="all")
    assert [m.dst for m, _ in solve(moments, 0, targets=[2])] == [2]


@pytest.mark.parametrize("n", [1, 3, 6])
def test_fewer_rows_than_directions_give_the_minimum_norm_answer(n):
    x, y = rows(n=n)
    expected, _, rank, _ = np.linalg.lstsq(x, y, rcond=None)
    shortcut, fit = solved(x, y)
    assert_same(shortcut.weight, expected)
    assert fit.rank == rank == n
    assert fit.is_deficient
    assert_same(applied(shortcut, x), y)


@pytest.mark.parametrize("rank", [1, 4])
def test_rows_in_a_subspace_give_the_minimum_norm_answer_and_their_rank(rank):
    x, y = rows()
    rng = np.random.default_rng(5)
    x = rng.normal(size=(120, rank)) @ rng.normal(size=(rank, 7))
    expected, _, known, values = np.linalg.lstsq(x, y, rcond=None)
    shortcut, fit = solved(x, y)
    assert_same(shortcut.weight, expected)
    assert fit.rank == known == rank
    assert fit.condition == pytest.approx(values[0] / values[rank - 1])


@pytest.mark.parametrize("mean", [0.0, 100.0, 1000.0])
def test_centring_rows_of_a_subspace_far_from_zero_invents_no_direction(mean):
    rng = np.random.default_rng(6)
    d, rank = 24, 12
    x = rng.normal(size=(3000, rank)) @ rng.normal(size=(rank, d)) + mean * rng.normal(size=d)
    y = x @ rng.normal(size=(d, d)) + rng.normal(size=(3000, d))
    shortcut, fit = solved(x, y, intercept=True)
    assert fit.rank == np.linalg.matrix_rank(x - x.mean(0)) == rank
    expected = np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=1e-9)[0]
    assert_same(shortcut.weight, expected, 1e-6)


@pytest.mark.parametrize("intercept", [False, True])
def test_a_single_row_is_fitted_exactly_and_gives_finite_numbers(intercept):
    x, y = rows(n=1)
    shortcut, fit = solved(x, y, intercept=intercept)
    assert_same(applied(shortcut, x), y)
    assert fit.rank == (0 if intercept else 1)
    assert (fit.condition, fit.train_r2, fit.train_r2_logit) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("intercept", [False, True])
def test_the_condition_number_is_numpys_of_the_rows(intercept):
    x, y = rows(offset=2.0)
    _, fit = solved(x, y, intercept=intercept)
    expected = np.linalg.cond(x - x.mean(0) if intercept else x)
    assert fit.condition == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_the_normal_equations_hold(seed):
    x, y = rows(seed=seed)
    weight = solved(x, y)[0].weight.numpy()
    assert_same(x.T @ x @ weight, x.T @ y)
    biased, _ = solved(x, y, intercept=True)
    residual = applied(biased, x) - y
    assert np.abs(x.T @ residual).max() < CLOSE * np.abs(x.T @ y).max()
    assert np.abs(residual.sum(0)).max() < CLOSE * np.abs(y).sum()


@pytest.mark.parametrize("intercept", [False, True])
def test_huge_outlier_rows_are_fitted_as_well_as_sklearn_does(intercept):
    x, y = rows()
    x[:2] *= 1e4
    expected = LinearRegression(fit_intercept=intercept).fit(x, y)
    shortcut, _ = solved(x, y, intercept=intercept)
    assert_same(applied(shortcut, x), expected.predict(x), 1e-7)


def test_on_the_rows_fitted_on_no_coordinate_is_worse_than_with_the_identity():
    x, y = rows(seed=3)
    y = x + 0.1 * y  # the identity is a good map here
    moments = moments_of(x, y)
    shortcut, fit = next(solve(moments, 0))
    mat = squared_error(moments, 0, 1, shortcut.weight, None)
    plain = squared_error(moments, 0, 1, None, None)
    assert (mat <= plain).all()
    assert fit.train_r2 >= fit.train_r2_logit
    assert_same(mat, ((x @ shortcut.weight.numpy() - y) ** 2).sum(0))
    assert_same(plain, ((x - y) ** 2).sum(0))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_same_holds_for_every_pair_of_layers_of_a_model(name):
    moments = collect(tiny(name), sentences(60), pairs="all").fit
    pairs = 0
    for src in range(moments.n_layers):
        for shortcut, fit in solve(moments, src):
            mat = squared_error(moments, src, shortcut.dst, shortcut.weight, None)
            plain = squared_error(moments, src, shortcut.dst, None, None)
            assert (mat <= plain * (1 + 1e-12) + 1e-12).all()
            assert fit.train_r2 >= fit.train_r2_logit
            pairs += 1
    assert pairs == 6


@pytest.mark.parametrize("intercept", [False, True])
def test_squared_errors_and_train_r2_are_those_of_the_rows(intercept):
    x, y = rows(offset=4.0)
    moments = moments_of(x, y)
    shortcut, fit = next(solve(moments, 0, intercept=intercept))
    predicted = applied(shortcut, x)
    error = squared_error(moments, 0, 1, shortcut.weight, shortcut.bias)
    assert_same(error, ((predicted - y) ** 2).sum(0))
    assert fit.train_r2 == pytest.approx(r2_score(y, predicted, multioutput="uniform_average"))
    assert fit.train_r2_logit == pytest.approx(r2_score(y, x, multioutput="uniform_average"))


def test_a_coordinate_that_never_varies_is_left_out_of_r2():
    x, y = rows()
    y[:, 2] = 1234.5678  # its spread is 0 up to rounding: dividing by it would say -1e300
    others = [0, 1, 3, 4, 5, 6]
    moments = moments_of(x, y)
    shortcut, fit = next(solve(moments, 0))
    predicted = applied(shortcut, x)
    assert fit.train_r2 == pytest.approx(r2_score(y[:, others], predicted[:, others]))
    assert moments_r2(moments, 0, 1, None, None) == pytest.approx(
        r2_score(y[:, others], x[:, others])
    )


def best_of_rank(predicted, rank):
    left, values, right = np.linalg.svd(predicted, full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_a_reduced_rank_map_gives_the_best_predictions_of_that_rank(rank, intercept):
    x, y = rows(offset=1.0)
    shortcut, fit = solved(x, y, rank=rank, intercept=intercept)
    mean = y.mean(0) if intercept else 0.0
    fitted = LinearRegression(fit_intercept=intercept).fit(x, y).predict(x)
    expected = best_of_rank(fitted - mean, rank) + mean
    assert_same(applied(shortcut, x), expected, 1e-7)
    assert shortcut.rank == rank
    assert shortcut.left.shape == (7, rank)
    assert fit.train_r2 == pytest.approx(r2_score(y, expected))


def test_no_map_of_that_rank_has_a_smaller_error():
    x, y = rows()
    best = ((applied(solved(x, y, rank=2)[0], x) - y) ** 2).sum()
    rng = np.random.default_rng(1)
    full = np.linalg.lstsq(x, y, rcond=None)[0]
    for _ in range(200):
        basis = np.linalg.qr(rng.normal(size=(7, 2)))[0]
        assert ((x @ full @ basis @ basis.T - y) ** 2).sum() >= best


@pytest.mark.parametrize("intercept", [False, True])
def test_full_rank_is_the_full_map_and_the_error_falls_with_rank(intercept):
    x, y = rows()
    full, _ = solved(x, y, intercept=intercept)
    reduced = [solved(x, y, rank=rank, intercept=intercept)[0] for rank in range(1, 8)]
    assert_same(reduced[-1].left @ reduced[-1].right, full.weight)
    errors = [((applied(shortcut, x) - y) ** 2).sum() for shortcut in reduced]
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(errors))


def penalised(x, y, ridge, intercept):
    """Rows whose plain least squares is ridge regression: sqrt(penalty) I, with targets 0."""
    x, y = (x - x.mean(0), y - y.mean(0)) if intercept else (x, y)
    penalty = ridge * np.linalg.eigvalsh(x.T @ x).mean()
    return np.vstack([x, np.sqrt(penalty) * np.eye(7)]), np.vstack([y, np.zeros((7, 7))])


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("ridge", [0.05, 2.0])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_reduced_rank_map_with_a_ridge_has_the_least_penalised_error(rank, ridge, intercept):
    x, y = rows(offset=1.0)
    more_x, more_y = penalised(x, y, ridge, intercept)
    plain, _ = solved(more_x, more_y, rank=rank)
    actual, _ = solved(x, y, rank=rank, ridge=ridge, intercept=intercept)
    assert_same(actual.left @ actual.right, plain.left @ plain.right)
    if intercept:
        assert_same(applied(actual, x).mean(0), y.mean(0))


def test_no_map_of_that_rank_has_a_smaller_penalised_error():
    x, y = rows()
    more_x, more_y = penalised(x, y, 2.0, False)
    shortcut, _ = solved(x, y, rank=2, ridge=2.0)

    def error(weight):
        return ((more_x @ weight - more_y) ** 2).sum()

    best = error((shortcut.left @ shortcut.right).numpy())
    rng = np.random.default_rng(1)
    full = np.linalg.lstsq(more_x, more_y, rcond=None)[0]
    right = shortcut.right.numpy().T
    for size in (1.0, 0.3, 0.1, 0.03, 0.01):
        for _ in range(100):  # planes everywhere, and ever closer to the one found
            basis = np.linalg.qr(right + size * rng.normal(size=(7, 2)))[0]
            assert error(full @ basis @ basis.T) >= best * (1 - 1e-12)


def brute_force_ridge(x, y, x_back, y_back, intercept):
    """The candidate with the best R2 on rows held back, each fitted by sklearn."""
    centred = x - x.mean(0) if intercept else x
    unit = np.linalg.eigvalsh(centred.T @ centred).mean()
    scores = {}
    for ridge in RIDGES:
        model = (
            Ridge(alpha=ridge * unit, fit_intercept=intercept, solver="svd")
            if ridge
            else LinearRegression(fit_intercept=intercept)
        )
        scores[ridge] = r2_score(y_back, model.fit(x, y).predict(x_back))
    return max(scores, key=scores.__getitem__)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("noise", [0.0, 1.0, 8.0, 40.0])
def test_the_automatic_ridge_is_the_brute_force_choice(noise, intercept):
    chosen = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(60, 12)) * np.logspace(0, -3, 12) + 0.5
        matrix = rng.normal(size=(12, 12))
        y = (x @ matrix + noise * rng.normal(size=(60, 12))) * np.logspace(-2, 2, 12) + 3
        parts = (x[:35], y[:35], x[35:], y[35:])
        options = {"ridge": "auto", "ridge_rows": moments_of(*parts[2:]), "intercept": intercept}
        _, fit = solved(*parts[:2], **options)
        chosen.append(fit.ridge)
        if noise or not intercept:  # else candidates tie in all but rounding
            assert fit.ridge == brute_force_ridge(*parts, intercept)
    assert noise or not intercept or max(chosen) <= 1e-9


def test_a_constant_coordinate_does_not_choose_the_ridge():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(60, 5)), rng.normal(size=(60, 5))
    y[:, :4] += 5 * x[:, :4]
    y[:, 4] = 7.0
    parts = (x[:30], y[:30], x[30:], y[30:])
    _, fit = solved(*parts[:2], ridge="auto", ridge_rows=moments_of(*parts[2:]))
    others = (parts[0], parts[1][:, :4], parts[2], parts[3][:, :4])
    assert fit.ridge == brute_force_ridge(*others, intercept=False)


def test_one_held_back_row_is_enough_to_choose_a_ridge():
    x, y = rows()
    _, fit = solved(x[1:], y[1:], ridge="auto", ridge_rows=moments_of(x[:1], y[:1]))
    assert fit.ridge in RIDGES


@pytest.mark.parametrize("ridge_rows", [None, Moments(1, 7)])
def test_an_automatic_ridge_without_rows_held_back_is_refused(ridge_rows):
    with pytest.raises(BadSettings, match="held back"):
        solved(*rows(), ridge="auto", ridge_rows=ridge_rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ridge": -0.1}, "ridge"),
        ({"ridge": float("nan")}, "ridge"),
        ({"ridge": float("inf")}, "ridge"),
        ({"ridge": "strong"}, "strong"),
        ({"rank": 0}, "rank 0 is out of range; expected 1 to 7"),
        ({"rank": 8}, "rank 8 is out of range; expected 1 to 7"),
        ({"targets": [5]}, "no moments from layer 0 to layer 5"),
    ],
)
def test_settings_without_meaning_are_refused(options, message):
    with pytest.raises(BadSettings, match=message):
        solved(*rows(), **options)


@pytest.mark.parametrize("src", [-1, 2])
def test_a_source_layer_that_does_not_exist_is_refused(src):
    with pytest.raises(BadSettings, match="does not exist"):
        next(solve(moments_of(*rows()), src))


def test_moments_of_nothing_are_refused():
    with pytest.raises(BadText, match="no rows to fit on"):
        next(solve(Moments(1, 7), 0))


def test_the_last_layer_needs_no_map():
    assert list(solve(moments_of(*rows()), 1)) == []


def test_maps_are_stored_as_float32(monkeypatch):
    monkeypatch.undo()
    for options in ({}, {"intercept": True}, {"rank": 2, "intercept": True}):
        shortcut, _ = solved(*rows(), **options)
        assert {value.dtype for value in shortcut.tensors().values()} == {torch.float32}
        assert ("bias" in shortcut.tensors()) == ("intercept" in options)


def test_the_identity_gives_the_very_rows():
    h = torch.randn(3, 7)
    assert IdentityMap(0, 1)(h) is h


@pytest.mark.real
def test_the_laws_of_least_squares_hold_on_a_real_model(smollm2):
    texts = [f"The {a} and the {b} went to {c}." for a in "abcd" for b in "efgh" for c in "ijkl"]
    moments = collect(smollm2, texts, Sampling(positions="all", held_out=0.0)).fit
    last = moments.n_layers
    for src in (0, last // 2, last - 1):
        ((shortcut, fit),) = solve(moments, src)
        assert fit.rank == torch.linalg.matrix_rank(moments.xx(src), hermitian=True)
        mat = squared_error(moments, src, last, shortcut.weight, None)
        plain = squared_error(moments, src, last, None, None)
        assert (mat <= plain + 1e-9 * moments.xx(last).diagonal()).all()
        assert fit.train_r2 > fit.train_r2_logit
        normal = moments.xx(src) @ shortcut.weight
        assert_same(normal, moments.xy(src, last), 1e-6)
