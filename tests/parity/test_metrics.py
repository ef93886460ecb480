"""Measures against naive versions of themselves, SciPy and scikit-learn."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.special import log_softmax, rel_entr
from sklearn.metrics import r2_score

from layerleap.lens.intervals import mean_interval, resample_in_parts
from layerleap.lens.lens import Lens
from layerleap.lens.map_errors import GROUPS, MapErrors
from layerleap.lens.metrics import DEPTH, Distribution, Reference
from layerleap.lens.scores import score
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import fit
from layerleap.maps.linear import LinearMap
from layerleap.stream.examples import Sampling, iter_batches, iter_examples
from tiny_models import sentences, tiny


def naive(model, reading):
    """Top token, its rank, surprisal and KL of one row, the slow way and in float64."""
    order = sorted(range(len(model)), key=lambda token: (-model[token], token))
    top = min(range(len(reading)), key=lambda token: (-reading[token], token))
    log_p = log_softmax(np.asarray(model, dtype=np.float64))
    log_q = log_softmax(np.asarray(reading, dtype=np.float64))
    kl = float((np.exp(log_p) * (log_p - log_q)).sum())
    return top, min(order.index(top), DEPTH), -log_p[top], kl


def assert_as_naive(model, reading, tolerance=1e-4):
    actual = Reference(model).compare(reading)
    for row in range(len(model)):
        top, rank, surprisal, kl = naive(model[row].tolist(), reading[row].tolist())
        assert int(actual.top[row]) == top
        assert int(actual.rank[row]) == rank
        assert float(actual.surprisal[row]) == pytest.approx(surprisal, rel=1e-4, abs=tolerance)
        assert float(actual.kl[row]) == pytest.approx(kl, rel=1e-4, abs=tolerance)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 10, 11, 12, 200])
def test_a_comparison_is_the_naive_one(vocabulary):
    torch.manual_seed(vocabulary)
    model, reading = torch.randn(2, 20, vocabulary) * 3
    assert_as_naive(model, (model + reading) / 2)


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 25).flatmap(
        lambda width: st.tuples(
            *[st.lists(st.integers(-3, 3), min_size=width, max_size=width) for _ in range(2)]
        )
    )
)
def test_equal_logits_are_ordered_by_id(pair):
    model, reading = (torch.tensor([row], dtype=torch.float32) for row in pair)
    assert_as_naive(model, reading)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(2, 30).flatmap(
        lambda width: st.tuples(
            *[
                st.lists(st.floats(-40, 40, width=32), min_size=width, max_size=width)
                for _ in range(2)
            ]
        )
    )
)
def test_any_logits_give_the_naive_numbers(pair):
    model, reading = (torch.tensor([row]) for row in pair)
    assert_as_naive(model, reading, tolerance=1e-3)


def test_all_logits_equal_put_token_k_at_rank_k():
    reading = torch.full((14, 14), -1.0).fill_diagonal_(1.0)
    actual = Reference(torch.zeros(14, 14)).compare(reading)
    assert actual.top.tolist() == list(range(14))
    assert actual.rank.tolist() == [*range(10), 10, 10, 10, 10]


def test_the_top_token_is_the_lowest_of_the_best():
    logits = torch.tensor([[1.0, 3, 3, 2], [5, 5, 5, 5], [0, 0, 0, 9]])
    assert Distribution(logits).top.tolist() == [*(1, 0, 3)]


@pytest.mark.parametrize("size", [1e4, 1e6])
def test_huge_logits_give_finite_numbers(size):
    torch.manual_seed(1)
    model, reading = torch.randn(2, 9, 50) * size
    actual = Reference(model).compare(reading)
    for values in (actual.surprisal, actual.kl):
        assert torch.isfinite(values).all()
        assert (values >= 0).all()
    assert_as_naive(model, reading, tolerance=size * 1e-6)


def test_a_reading_equal_to_the_output_has_zero_kl_and_the_least_surprisal():
    torch.manual_seed(0)
    model = torch.randn(300, 40) * 5
    actual = Reference(model).compare(model)
    assert (actual.rank == 0).all()
    assert actual.kl.max() < 1e-5
    assert (actual.kl >= 0).all()  # rounding would put some just below
    floor = -torch.log_softmax(model.double(), -1).amax(-1)
    torch.testing.assert_close(actual.surprisal.double(), floor, rtol=1e-4, atol=1e-5)


def test_kl_is_scipys_and_torchs():
    model, reading = torch.randn(2, 5, 30)
    actual = Reference(model).compare(reading).kl
    p, q = (torch.softmax(value.double(), -1).numpy() for value in (model, reading))
    np.testing.assert_allclose(actual, rel_entr(p, q).sum(-1), rtol=1e-4)
    by_torch = torch.nn.functional.kl_div(
        torch.log_softmax(reading, -1), torch.softmax(model, -1), reduction="none"
    ).sum(-1)
    torch.testing.assert_close(actual, by_torch, rtol=1e-4, atol=1e-6)


def test_half_precision_logits_are_compared_in_float32():
    model, reading = (torch.randn(2, 8, 40) * 4).bfloat16()
    actual = Reference(model).compare(reading)
    assert actual.kl.dtype == actual.surprisal.dtype == torch.float32
    assert_as_naive(model.float(), reading.float())


@pytest.fixture(scope="module", params=["llama", "bert"])
def measured(request):
    """Scores and quality of a bank on the held-out side, and the rows behind them."""
    transformer = tiny(request.param)
    texts = sentences(60)
    bank = fit(transformer, texts, pairs="all", intercept=True)
    examples = list(iter_examples(transformer, texts, Sampling(), side="held-out"))
    batches = list(iter_batches(transformer, examples, tokens_per_batch=100))
    quality = MapErrors(bank)
    lenses = {"-": Lens(transformer), "all": Lens(transformer, bank)}
    scores = score(transformer, lenses, batches, on_states=quality.add)
    seen = [transformer.capture(batch.inputs, keep=batch.keep).states for batch in batches]
    states = {at: torch.cat([h[at] for h in seen]) for at in range(transformer.n_layers + 1)}
    return SimpleNamespace(
        transformer=transformer, bank=bank, quality=quality, scores=scores, states=states
    )


def test_precision_grows_with_k_and_is_one_at_the_last_layer(measured):
    values = {
        (row["map"], row["layer"], row["metric"]): row["value"] for row in measured.scores.table()
    }
    last = measured.transformer.n_layers
    for name in ("-", "all"):
        for layer in range(last + 1):
            one, five, ten = (values[name, layer, f"precision@{k}"] for k in (1, 5, 10))
            assert 0 <= one <= five <= ten <= 1
        assert [values[name, last, f"precision@{k}"] for k in (1, 5, 10)] == [1, 1, 1]
        assert values[name, last, "kl"] == pytest.approx(0, abs=1e-5)


def test_the_floor_of_surprisal_is_the_mean_of_the_models_own(measured):
    last = measured.transformer.n_layers
    with torch.inference_mode():
        logits = measured.transformer.logits(measured.states[last])
    floor = -torch.log_softmax(logits.double(), -1).amax(-1).mean().item()
    assert floor > 0
    at_last = [
        row["value"]
        for row in measured.scores.table()
        if row["metric"] == "surprisal" and row["layer"] == last
    ]
    assert at_last == pytest.approx([floor, floor], rel=1e-5)
    lowest = min(r["value"] for r in measured.scores.table() if r["metric"] == "surprisal")
    assert lowest == pytest.approx(floor, rel=1e-5)  # no layer can be below the floor


def simulate(rng, documents=30, size=8, inside=1.0, between=1.0):
    """Rows of one draw: a mean of zero, and documents that differ from each other."""
    effect = rng.normal(size=documents) * between
    values = np.repeat(effect, size) + rng.normal(size=documents * size) * inside
    return torch.tensor(values)[:, None], torch.arange(documents).repeat_interleave(size)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(400):
        (actual,) = mean_interval(*simulate(rng))
        covered.append(actual.low <= 0 <= actual.high)
    assert 0.88 <= np.mean(covered) <= 0.99


def test_intervals_over_rows_instead_of_documents_would_cover_far_too_rarely():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(200):
        values, _ = simulate(rng)
        (actual,) = mean_interval(values, torch.arange(len(values)))
        covered.append(actual.low <= 0 <= actual.high)
    assert np.mean(covered) < 0.75


def test_intervals_are_wider_than_those_over_rows_when_documents_differ():
    rng = np.random.default_rng(1)
    values, documents = simulate(rng, between=2.0)
    (whole,) = mean_interval(values, documents)
    (rows,) = mean_interval(values, torch.arange(len(values)))
    assert whole.high - whole.low > 1.5 * (rows.high - rows.low)
    assert whole.value == rows.value == pytest.approx(values.mean().item())


def test_documents_of_unequal_size_are_weighted_by_their_rows():
    values = torch.tensor([[1.0], [1.0], [1.0], [5.0]])
    (actual,) = mean_interval(values, torch.tensor([4, 4, 4, 9]))
    assert actual.value == 2.0
    assert (actual.rows, actual.documents) == (4, 2)
    assert actual.low < actual.value < actual.high


def test_one_document_has_no_interval():
    (actual,) = mean_interval(torch.tensor([[1.0], [3.0]]), torch.tensor([7, 7]))
    assert actual.value == 2.0
    assert actual.low is None
    assert actual.high is None


def test_intervals_do_not_depend_on_the_order_of_rows():
    values, documents = simulate(np.random.default_rng(2))
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    (whole,), (mixed,) = (
        mean_interval(values[o], documents[o]) for o in (torch.arange(len(order)), order)
    )
    assert (mixed.low, mixed.high) == pytest.approx((whole.low, whole.high), abs=1e-12)


def test_columns_are_independent_of_each_other():
    values, documents = simulate(np.random.default_rng(3))
    both = mean_interval(torch.cat([values, values * 2], 1), documents)
    (alone,) = mean_interval(values, documents)
    assert (both[0].low, both[0].high) == pytest.approx((alone.low, alone.high))
    assert both[1].high == pytest.approx(2 * both[0].high)


def test_a_lower_level_gives_a_narrower_interval():
    values, documents = simulate(np.random.default_rng(4))
    (wide,) = mean_interval(values, documents, level=0.95)
    (narrow,) = mean_interval(values, documents, level=0.5)
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


def test_each_resample_draws_as_many_documents_as_there_are():
    drawn = torch.cat(list(resample_in_parts(9, 50, seed=0)))
    assert drawn.shape == (50, 9)
    assert (drawn.sum(1) == 9).all()
    assert len(drawn.unique(dim=0)) > 40


def test_samples_drawn_in_parts_are_the_samples_drawn_at_once(monkeypatch):
    whole = torch.cat(list(resample_in_parts(9, 50, seed=0)))
    monkeypatch.setattr("layerleap.lens.intervals.ENTRIES", 40)
    parts = list(resample_in_parts(9, 50, seed=0))
    assert [len(part) for part in parts] == [4] * 12 + [2]
    assert torch.equal(torch.cat(parts), whole)


def predictions(measured, row):
    source = measured.states[row["src"]]
    carried = source if row["map"] == "logit" else measured.bank[row["src"], row["dst"]](source)
    return measured.states[row["dst"]].double().numpy(), carried.double().numpy()


def test_r2_is_sklearns_on_the_same_rows(measured):
    table = measured.quality.table()
    assert len(table) == 2 * 6
    for row in table:
        expected, actual = predictions(measured, row)
        assert row["r2"] == pytest.approx(
            r2_score(expected, actual, multioutput="uniform_average"), rel=1e-5, abs=1e-5
        )
        assert row["weighted"] == pytest.approx(
            r2_score(expected, actual, multioutput="variance_weighted"), rel=1e-5, abs=1e-5
        )


def test_r2_without_first_positions_drops_exactly_them(measured):
    later = (measured.scores.positions > 0).numpy()
    if measured.transformer.kind == "next-token":
        assert 0 < later.sum() < len(later)
    for row in measured.quality.table():
        expected, actual = predictions(measured, row)
        assert row["no_first"] == pytest.approx(
            r2_score(expected[later], actual[later]), rel=1e-5, abs=1e-5
        )


def test_the_interval_of_r2_brackets_it(measured):
    for row in measured.quality.table():
        assert row["low"] < row["r2"] < row["high"]
        assert row["rows"] == len(measured.scores.documents)
        assert row["documents"] == len(measured.scores.documents.unique())


def fake_errors(n_documents, rows_each=4, width=3, constant=False):
    """Errors of one map between two made-up layers."""
    torch.manual_seed(0)
    bank = ShortcutBank(
        [LinearMap(0, 1, weight=torch.randn(width, width))],
        model={"name": "made up"},
        n_layers=1,
        d_model=width,
    )
    quality = MapErrors(bank)
    documents = torch.arange(n_documents).repeat_interleave(rows_each)
    states = {0: torch.randn(len(documents), width), 1: torch.randn(len(documents), width)}
    if constant:
        states[1][:, 0] = 3.0
    quality.add(
        states,
        SimpleNamespace(documents=documents, positions=torch.arange(len(documents)) % rows_each),
    )
    return quality.table()[0], states[1], bank[0, 1](states[0])


def test_more_documents_than_groups_are_all_counted():
    row, expected, actual = fake_errors(2 * GROUPS + 3)
    assert row["documents"] == 2 * GROUPS + 3
    assert row["r2"] == pytest.approx(r2_score(expected, actual), rel=1e-5)
    assert row["low"] < row["r2"] < row["high"]


def test_a_coordinate_that_never_varies_is_left_out_of_r2():
    row, expected, actual = fake_errors(5, constant=True)
    assert row["r2"] == pytest.approx(r2_score(expected[:, 1:], actual[:, 1:]), rel=1e-5)


def test_r2_of_one_document_has_no_interval():
    row, expected, actual = fake_errors(1)
    assert row["r2"] == pytest.approx(r2_score(expected, actual), rel=1e-5)
    assert row["low"] is None
    assert row["high"] is None


def test_r2_of_a_single_row_is_unknown():
    row, _, __ = fake_errors(1, rows_each=1)
    assert row["no_first"] is None
    assert row["r2"] is None or math.isnan(row["r2"])


def test_how_sure_a_reading_is_equals_softmax_and_entropy_in_float64():
    generator = torch.Generator().manual_seed(4)
    model, reading = torch.randn(2, 50, 300, generator=generator) * 5
    actual = Reference(model).compare(reading)
    p = reading.double().softmax(-1)
    best = p.sort(-1, descending=True).values
    entropy = -(p * p.log()).sum(-1)
    for ours, theirs in (
        (actual.top_prob, best[:, 0]),
        (actual.second_prob, best[:, 1]),
        (actual.entropy, entropy),
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_two_equal_best_tokens_have_the_same_probability():
    actual = Reference(torch.zeros(1, 3)).compare(torch.tensor([[2.0, 5, 5]]))
    assert actual.top.item() == 1
    assert actual.top_prob.item() == actual.second_prob.item()


def test_comparing_a_reading_leaves_the_answer_and_the_reading_as_they_were():
    model, reading = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))
    answer, before = Reference(model), reading.clone()
    first = answer.compare(reading)
    assert torch.equal(reading, before)
    assert torch.equal(answer.compare(reading).kl, first.kl)
