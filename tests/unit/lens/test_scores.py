"""Scores over a text: the same however it is cut into batches, and never from fitted documents."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from layerleap.errors import BadText, ModelRefused, NotFinite
from layerleap.lens.intervals import POSITIVE, Documents, mean_interval
from layerleap.lens.lens import Lens
from layerleap.lens.map_errors import MapErrors
from layerleap.lens.metrics import Reference
from layerleap.lens.reader import MEASURES, PRECISIONS
from layerleap.lens.scores import (
    CHECK_EVERY,
    Scores,
    TailCheck,
    check_tail,
    score,
)
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import fit
from layerleap.maps.linear import LinearMap
from layerleap.models.discovery.tail import Step
from layerleap.models.transformer import Transformer
from layerleap.stats.collect import collect
from layerleap.stream.examples import Sampling, iter_batches, iter_examples
from tiny_models import sentences, tiny

DOCUMENTS = sentences(50)


@pytest.fixture(scope="module", params=["llama", "bert"])
def case(request):
    transformer = tiny(request.param)
    bank = fit(transformer, DOCUMENTS, pairs="all")
    return transformer, bank, {"-": Lens(transformer), "linear": Lens(transformer, bank)}


def examples_of(transformer, side="held-out", **options):
    return list(iter_examples(transformer, DOCUMENTS, Sampling(**options), side=side))


def in_order(scores):
    """Columns by (document, position, ...): batches of other sizes have another order."""
    columns = [scores.documents, scores.positions]
    columns += [value for kind in (scores.surprisal, scores.kl) for value in kind.values()]
    table = torch.cat([column.reshape(len(scores.documents), -1) for column in columns], 1).double()
    ranks = torch.cat(list(scores.rank.values()), 1)
    order = sorted(range(len(table)), key=lambda row: table[row].tolist())
    return table[order], ranks[order]


@pytest.mark.parametrize("tokens", [1, 30, 200])
def test_streaming_in_batches_gives_what_one_batch_gives(case, tokens):
    transformer, bank, lenses = case
    examples = examples_of(transformer)
    actual = {}
    for size in (tokens, 10**6):
        errors = MapErrors(bank)
        batches = list(iter_batches(transformer, examples, tokens_per_batch=size))
        assert (len(batches) == 1) == (size == 10**6)
        actual[size] = (
            score(transformer, lenses, batches, on_states=errors.add),
            errors.table(),
        )
    (parts, part_table), (whole, whole_table) = actual.values()
    for part, one in zip(in_order(parts), in_order(whole), strict=True):
        torch.testing.assert_close(part, one, rtol=1e-4, atol=1e-4)
    for part, one in zip(part_table, whole_table, strict=True):
        assert {k: part[k] for k in ("map", "src", "dst", "rows", "documents")} == {
            k: one[k] for k in ("map", "src", "dst", "rows", "documents")
        }
        for column in ("r2", "weighted", "no_first"):
            assert part[column] == pytest.approx(one[column], rel=1e-4, abs=1e-5)


def test_scores_do_not_depend_on_how_rows_are_cut(case, monkeypatch):
    transformer, _, lenses = case
    batches = list(iter_batches(transformer, examples_of(transformer)))
    whole = score(transformer, lenses, batches)
    monkeypatch.setattr("layerleap.memory.LOGITS", transformer.d_vocab * 3)
    cut = score(transformer, lenses, batches)
    for name in lenses:
        assert torch.equal(cut.rank[name], whole.rank[name])
        torch.testing.assert_close(cut.kl[name], whole.kl[name], rtol=1e-4, atol=1e-5)


def test_every_row_has_every_measure_at_every_layer(case):
    transformer, _, lenses = case
    examples = examples_of(transformer)
    actual = score(transformer, lenses, iter_batches(transformer, examples))
    shape = (len(examples), transformer.n_layers + 1)
    for kind in (getattr(actual, measure) for measure in MEASURES):
        assert {name: tuple(value.shape) for name, value in kind.items()} == {
            "-": shape,
            "linear": shape,
        }
    assert sorted(actual.documents.tolist()) == sorted(e.document for e in examples)
    assert tuple(actual.cosine.shape) == shape
    assert (actual.rank["-"] >= 0).all()
    assert (actual.rank["-"] <= 10).all()


def test_scores_are_those_of_each_text_alone(case):
    transformer, _, lenses = case
    example = examples_of(transformer)[0]
    actual = score(transformer, lenses, iter_batches(transformer, [example]))
    readings = lenses["linear"].read(list(example.ids), positions=list(example.keep))
    for name, track in (("-", readings.tracks["logit"]), ("linear", readings.tracks["linear"])):
        assert torch.equal(actual.rank[name][0] == 0, track.agrees[:, 0])
        torch.testing.assert_close(actual.kl[name][0], track.kl[:, 0])
        torch.testing.assert_close(actual.surprisal[name][0], track.surprisal[:, 0])
        torch.testing.assert_close(actual.top_prob[name][0], track.probs[:, 0, 0])
        torch.testing.assert_close(actual.second_prob[name][0], track.probs[:, 0, 1])
        assert torch.equal(actual.top[name][0].long(), track.ids[:, 0, 0])


def test_the_size_is_the_length_of_what_the_tail_is_given(case):
    transformer, bank, lenses = case
    batch = next(iter_batches(transformer, examples_of(transformer)))
    actual = score(transformer, lenses, [batch]).size
    h, last = transformer.capture(batch.inputs, keep=batch.keep).states, transformer.n_layers
    for layer in range(last):
        torch.testing.assert_close(actual["-"][:, layer], h[layer].norm(dim=1))
        torch.testing.assert_close(
            actual["linear"][:, layer], bank[layer, last](h[layer]).norm(dim=1)
        )
    torch.testing.assert_close(actual["linear"][:, last], h[last].norm(dim=1))


def test_the_cosine_compares_each_state_with_the_one_below(case):
    transformer, _, lenses = case
    batch = next(iter_batches(transformer, examples_of(transformer)))
    actual = score(transformer, lenses, [batch]).cosine
    h = transformer.capture(batch.inputs, keep=batch.keep).states
    assert actual[:, 0].isnan().all()
    for layer in range(1, transformer.n_layers + 1):
        below, here = h[layer - 1].double(), h[layer].double()
        expected = (below * here).sum(1) / (below.norm(dim=1) * here.norm(dim=1))
        torch.testing.assert_close(actual[:, layer].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_table_has_one_row_per_lens_metric_and_layer(case):
    transformer, _, lenses = case
    actual = score(transformer, lenses, iter_batches(transformer, examples_of(transformer)))
    table = actual.table(read="here")
    metrics = [*(f"precision@{k}" for k in PRECISIONS), "surprisal", "kl"]
    keys = [(row["map"], row["metric"], row["layer"]) for row in table]
    assert keys == [(m, k, layer) for m in ("-", "linear") for k in metrics for layer in range(4)]
    documents = actual.documents.unique()
    for row in table:
        assert row["read"] == "here"
        assert row["rows"] == len(actual.documents)
        assert row["documents"] == len(documents)
        assert row["low"] <= row["value"] <= row["high"]
        assert math.isfinite(row["value"])


def test_values_of_a_table_are_means_of_rows():
    columns = {key: {"x": torch.tensor([[0.5], [0.5], [0.5], [0.5]])} for key in MEASURES}
    columns["rank"] = {"x": torch.tensor([[0], [4], [9], [10]], dtype=torch.int8)}
    columns["surprisal"] = {"x": torch.tensor([[1.0], [2.0], [3.0], [6.0]])}
    actual = Scores(
        documents=torch.tensor([0, 0, 1, 2]),
        positions=torch.zeros(4),
        **columns,
        cosine=torch.zeros(4, 1),
    )
    values = {row["metric"]: row for row in actual.table()}
    assert values["precision@1"]["value"] == 0.25
    assert values["precision@5"]["value"] == 0.5
    assert values["precision@10"]["value"] == 0.75
    assert values["surprisal"]["value"] == 3.0
    assert (values["kl"]["low"], values["kl"]["high"]) == (0.5, 0.5)
    assert (values["kl"]["rows"], values["kl"]["documents"]) == (4, 3)


def test_one_document_gives_values_without_intervals(case):
    transformer, bank, lenses = case
    first = examples_of(transformer)[0].document
    examples = [e for e in examples_of(transformer) if e.document == first]
    errors = MapErrors(bank)
    actual = score(transformer, lenses, iter_batches(transformer, examples), on_states=errors.add)
    for row in [*actual.table(), *errors.table()]:
        assert (row["low"], row["high"]) == (None, None)
        assert row["documents"] == 1


def test_nothing_to_read_is_a_clear_error(case):
    transformer, _, lenses = case
    with pytest.raises(BadText, match="the text is empty, or none of it is held out"):
        score(transformer, lenses, [])


def test_progress_counts_texts(case):
    transformer, _, lenses = case
    reported = []
    batches = list(iter_batches(transformer, examples_of(transformer), tokens_per_batch=50))
    score(
        transformer,
        lenses,
        batches,
        total=7,
        phase="looking",
        progress=lambda phase, done, total, unit="texts": reported.append((phase, done, total)),
    )
    assert len(reported) == len(batches)
    assert reported[-1] == ("looking", sum(batch.n_texts for batch in batches), 7)


def test_documents_that_are_read_were_never_fitted_on(case):
    transformer, *_ = case
    for seed in range(3):
        fitted = {e.document for e in examples_of(transformer, "fit", seed=seed)}
        read = {e.document for e in examples_of(transformer, "held-out", seed=seed)}
        both = {e.document for e in examples_of(transformer, "both", seed=seed)}
        assert not fitted & read
        assert fitted | read == both == set(range(50))


def test_rows_that_choose_the_ridge_come_from_other_documents_than_those_fitted(case):
    transformer, *_ = case
    stats = collect(transformer, DOCUMENTS, choose_ridge=True)
    examples = list(iter_examples(transformer, DOCUMENTS, Sampling(), ridge_share=0.1))
    back = {e.document for e in examples if e.ridge_rows}
    fitted = {e.document for e in examples if not e.ridge_rows}
    assert back
    assert not back & fitted
    assert stats.ridge_rows.n == sum(e.ridge_rows for e in examples)
    assert stats.fit.n == sum(not e.ridge_rows for e in examples)


def test_correlated_rows_of_one_text_count_as_one_document():
    transformer = tiny("llama")
    examples = list(
        iter_examples(transformer, DOCUMENTS, Sampling(positions="all"), side="held-out")
    )
    actual = score(transformer, {"-": Lens(transformer)}, iter_batches(transformer, examples))
    row = actual.table()[0]
    assert row["rows"] == sum(len(e.keep) for e in examples) > len(examples)
    assert row["documents"] == len({e.document for e in examples})


def test_rows_of_several_batches_are_read_together_within_the_budget(case, monkeypatch):
    transformer, _, lenses = case
    made = []

    def counted(logits):
        made.append(len(logits))
        return Reference(logits)

    monkeypatch.setattr("layerleap.lens.reader.Reference", counted)
    batches = list(iter_batches(transformer, examples_of(transformer), tokens_per_batch=60))
    score(transformer, lenses, batches)
    sizes = [len(batch.documents) for batch in batches]
    assert len(sizes) > 2
    assert made == [sum(sizes)]  # the head is read once, not once per batch
    made.clear()
    monkeypatch.setattr("layerleap.memory.LOGITS", transformer.d_vocab * 10)
    score(transformer, lenses, batches)
    assert sum(made) == sum(sizes)
    assert max(made) <= 10


def test_the_last_layer_is_read_once_for_all_lenses(case, monkeypatch):
    transformer, _, lenses = case
    read = []
    logits = type(transformer).logits
    monkeypatch.setattr("layerleap.lens.scores.CHECK_EVERY", 10**9)
    monkeypatch.setattr(
        type(transformer), "logits", lambda self, h: (read.append(len(h)), logits(self, h))[1]
    )
    score(transformer, lenses, iter_batches(transformer, examples_of(transformer)))
    # The first batch is checked; then the answer, and below it each layer of each lens.
    assert len(read) == 1 + 1 + len(lenses) * transformer.n_layers


def with_tail(transformer, *steps):
    names = ("model", "tokenizer", "identity", "blocks", "anatomy", "kind", "d_model", "d_vocab")
    parts = {name: getattr(transformer, name) for name in names}
    return Transformer(**parts, tail=(*steps, *transformer.tail))


def test_the_tail_is_checked_against_the_models_own_logits_on_the_text_itself(case):
    transformer, _, lenses = case
    batches = list(iter_batches(transformer, examples_of(transformer), tokens_per_batch=1))
    assert len(batches) > CHECK_EVERY
    check = score(transformer, lenses, batches).check
    assert check.rows == sum(len(batch.documents) for batch in batches[::CHECK_EVERY])
    assert check.agreement == 1
    assert 0 < check.gap < 1e-3


def test_what_is_checked_fits_into_one_chunk_of_logits_however_large_the_batch(case, monkeypatch):
    transformer, *_ = case
    (batch,) = iter_batches(transformer, examples_of(transformer), tokens_per_batch=10**6)
    seen = []
    see = transformer.capture
    monkeypatch.setattr(
        type(transformer), "capture", lambda _, inputs, **k: seen.append(inputs) or see(inputs, **k)
    )
    monkeypatch.setattr("layerleap.memory.LOGITS", 2 * transformer.d_vocab * batch.keep.shape[1])
    check = TailCheck()
    check_tail(transformer, batch, check)
    assert [len(inputs["input_ids"]) for inputs in seen] == [2]
    assert check.rows == int(batch.keep[batch.keep.any(1)][:2].sum()) > 0
    assert check.agreement == 1
    batch.keep[:] = False
    check_tail(transformer, batch, check)
    assert len(seen) == 1  # nothing is read, so there is nothing to check


def test_a_tail_that_is_not_the_models_is_refused(case):
    transformer, *_ = case
    wrong = with_tail(transformer, Step("scale", number=-1.0))
    batches = list(iter_batches(wrong, examples_of(wrong)))
    with pytest.raises(ModelRefused, match="law 'tail' failed on real text"):
        score(wrong, {"-": Lens(wrong)}, batches)


def test_a_few_rows_of_another_top_token_are_let_through_and_counted():
    check = TailCheck()
    own = torch.eye(200, 7)
    made = own.clone()
    made[0] = torch.tensor([0.0, 9, 0, 0, 0, 0, 0])
    check.add(own, made)
    check.require()
    assert (check.rows, check.wrong) == (200, 1)
    made[1:3] = torch.tensor([0.0, 0, 0, 9, 0, 0, 0])
    check.add(own[:4], made[:4])
    with pytest.raises(ModelRefused, match="4 of 204 rows"):
        check.require()


def test_tokens_that_are_equal_up_to_rounding_do_not_speak_against_the_tail():
    check = TailCheck()
    own = torch.tensor([[5.0, 5.0, 1.0]] * 50, dtype=torch.bfloat16)
    check.add(own, own + torch.tensor([0.0, 0.03125, 0.0], dtype=torch.bfloat16))
    check.require()
    assert check.wrong == 0


@pytest.mark.parametrize("layer", [0, 2])
def test_readings_that_are_not_numbers_name_the_lens_and_the_layer(case, layer):
    transformer, bank, _ = case
    maps = {pair: m for pair, m in bank.maps.items() if pair[1] == transformer.n_layers}
    broken = torch.full((24, 24), float("nan"))
    maps[layer, 3] = LinearMap(layer, 3, weight=broken)
    bad = ShortcutBank(maps.values(), model=bank.model, n_layers=3, d_model=24)
    batches = iter_batches(transformer, examples_of(transformer))
    with pytest.raises(NotFinite, match=rf"lens 'here' \(linear\) at layer {layer} in 36 of 36"):
        score(transformer, {"-": Lens(transformer), "here": Lens(transformer, bad)}, batches)
    with pytest.raises(NotFinite, match=f"lens 'linear' at layer {layer}"):
        Lens(transformer, bad).read("the cat")


def test_scores_can_be_used_where_gradients_are_taken(case):
    transformer, _, lenses = case
    actual = score(transformer, lenses, iter_batches(transformer, examples_of(transformer)))
    for kind in (actual.rank, actual.surprisal, actual.kl):
        assert not any(values.is_inference() for values in kind.values())


def test_tables_hold_only_numbers_that_json_has(case):
    transformer, bank, lenses = case
    first = examples_of(transformer)
    two = [first[0], next(e for e in first if e.document != first[0].document)]
    errors = MapErrors(bank)
    actual = score(transformer, lenses, iter_batches(transformer, two), on_states=errors.add)
    table = errors.table()
    json.dumps([actual.table(), table], allow_nan=False)
    assert all(row["r2"] is not None for row in table)
    assert all(row["low"] is None for row in table)  # some resamples hold one row twice
    infinite = {"x": torch.tensor([[1.0], [math.inf]])}
    columns = dict.fromkeys(MEASURES, infinite)
    one = Scores(torch.tensor([0, 1]), torch.zeros(2), **columns, cosine=torch.zeros(2, 1))
    assert one.table()[-1]["value"] is None


def test_the_weighted_r2_leaves_out_coordinates_that_never_vary(case):
    transformer, bank, _ = case
    states = {layer: torch.randn(12, transformer.d_model) for layer in range(4)}
    states[3][:, :5] = 7.0
    batch = SimpleNamespace(documents=torch.arange(12) // 3, positions=torch.arange(12) % 3)
    errors = MapErrors(bank)
    errors.add(states, batch)
    (row,) = (r for r in errors.table() if (r["map"], r["src"], r["dst"]) == ("logit", 0, 3))
    expected, actual = states[3][:, 5:].double(), states[0][:, 5:].double()
    spread = (expected - expected.mean(0)).square().sum()
    assert row["weighted"] == pytest.approx(float(1 - (expected - actual).square().sum() / spread))


def test_resamples_are_drawn_once_per_table(case, monkeypatch):
    transformer, _, lenses = case
    actual = score(transformer, lenses, iter_batches(transformer, examples_of(transformer)))
    drawn = []
    monkeypatch.setattr(
        "layerleap.lens.reader.Documents", lambda *a: (drawn.append(a), Documents(*a))[1]
    )
    table = actual.table()
    assert len(drawn) == 1
    (row,) = (r for r in table if (r["map"], r["metric"], r["layer"]) == ("linear", "kl", 1))
    expected = mean_interval(actual.kl["linear"], actual.documents, POSITIVE)[1]
    assert (row["value"], row["low"], row["high"]) == (expected.value, expected.low, expected.high)


def test_map_errors_count_only_the_pairs_of_its_bank(case):
    transformer, *_ = case
    final = fit(transformer, DOCUMENTS, pairs="final")
    errors = MapErrors(final)
    score(
        transformer,
        {"-": Lens(transformer)},
        iter_batches(transformer, examples_of(transformer)),
        on_states=errors.add,
    )
    pairs = [(row["map"], row["src"], row["dst"]) for row in errors.table()]
    assert pairs == [(name, src, 3) for name in ("linear", "logit") for src in range(3)]


def test_map_errors_of_given_rows_are_reproducible(case):
    transformer, bank, _ = case
    states = {layer: torch.randn(12, transformer.d_model) for layer in range(4)}
    batch = SimpleNamespace(documents=torch.arange(12) // 3, positions=torch.arange(12) % 3)
    tables = []
    for _ in range(2):
        errors = MapErrors(bank)
        errors.add(states, batch)
        tables.append(errors.table())
    assert tables[0] == tables[1]
