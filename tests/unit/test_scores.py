"""Scores over a text: the same however it is cut into batches, and never from fitted documents."""

import math
from types import SimpleNamespace

import pytest
import torch
from tiny_models import sentences, tiny

from layerleap.errors import BadText
from layerleap.read import lens as lens_module
from layerleap.read.lens import Lens
from layerleap.read.metrics import Answer
from layerleap.read.scores import PRECISIONS, Quality, Scores, score
from layerleap.recipes import collect, fit_bank
from layerleap.stream.examples import Sampling, iter_batches, iter_examples

DOCUMENTS = sentences(50)


@pytest.fixture(scope="module", params=["llama", "bert"])
def case(request):
    transformer = tiny(request.param)
    bank = fit_bank(transformer, DOCUMENTS, pairs="all")
    return transformer, bank, {"-": Lens(transformer), "mat": Lens(transformer, bank)}


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
    found = {}
    for size in (tokens, 10**6):
        quality = Quality(transformer, bank)
        batches = list(iter_batches(transformer, examples, tokens_per_batch=size))
        assert (len(batches) == 1) == (size == 10**6)
        found[size] = (score(transformer, lenses, batches, quality=quality), quality.table())
    (parts, part_table), (whole, whole_table) = found.values()
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
    monkeypatch.setattr(lens_module, "ENTRIES", transformer.d_vocab * 3)
    cut = score(transformer, lenses, batches)
    for name in lenses:
        assert torch.equal(cut.rank[name], whole.rank[name])
        torch.testing.assert_close(cut.kl[name], whole.kl[name], rtol=1e-4, atol=1e-5)


def test_every_row_has_every_measure_at_every_layer(case):
    transformer, _, lenses = case
    examples = examples_of(transformer)
    found = score(transformer, lenses, iter_batches(transformer, examples))
    shape = (len(examples), transformer.n_layers + 1)
    for kind in (found.rank, found.surprisal, found.kl):
        assert {name: tuple(value.shape) for name, value in kind.items()} == {
            "-": shape,
            "mat": shape,
        }
    assert sorted(found.documents.tolist()) == sorted(e.document for e in examples)
    assert (found.rank["-"] >= 0).all()
    assert (found.rank["-"] <= 10).all()


def test_scores_are_those_of_each_text_alone(case):
    transformer, _, lenses = case
    example = examples_of(transformer)[0]
    found = score(transformer, lenses, iter_batches(transformer, [example]))
    readings = lenses["mat"].read(list(example.ids), positions=list(example.keep))
    for name, track in (("-", readings.tracks["id"]), ("mat", readings.tracks["mat"])):
        assert torch.equal(found.rank[name][0] == 0, track.agrees[:, 0])
        torch.testing.assert_close(found.kl[name][0], track.kl[:, 0])
        torch.testing.assert_close(found.surprisal[name][0], track.surprisal[:, 0])


def test_a_table_has_one_row_per_lens_metric_and_layer(case):
    transformer, _, lenses = case
    found = score(transformer, lenses, iter_batches(transformer, examples_of(transformer)))
    table = found.table(read="here")
    metrics = [*(f"precision@{k}" for k in PRECISIONS), "surprisal", "kl"]
    keys = [(row["map"], row["metric"], row["layer"]) for row in table]
    assert keys == [(m, k, layer) for m in ("-", "mat") for k in metrics for layer in range(4)]
    documents = found.documents.unique()
    for row in table:
        assert row["read"] == "here"
        assert row["rows"] == len(found.documents)
        assert row["documents"] == len(documents)
        assert row["low"] <= row["value"] <= row["high"]
        assert math.isfinite(row["value"])


def test_values_of_a_table_are_means_of_rows():
    found = Scores(
        documents=torch.tensor([0, 0, 1, 2]),
        positions=torch.zeros(4),
        rank={"x": torch.tensor([[0], [4], [9], [10]], dtype=torch.int8)},
        surprisal={"x": torch.tensor([[1.0], [2.0], [3.0], [6.0]])},
        kl={"x": torch.tensor([[0.5], [0.5], [0.5], [0.5]])},
    )
    values = {row["metric"]: row for row in found.table()}
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
    quality = Quality(transformer, bank)
    found = score(transformer, lenses, iter_batches(transformer, examples), quality=quality)
    for row in [*found.table(), *quality.table()]:
        assert (row["low"], row["high"]) == (None, None)
        assert row["documents"] == 1


def test_nothing_to_read_is_a_clear_error(case):
    transformer, _, lenses = case
    with pytest.raises(BadText, match="held-out part of the text is empty"):
        score(transformer, lenses, [])


def test_progress_counts_texts(case):
    transformer, _, lenses = case
    told = []
    batches = list(iter_batches(transformer, examples_of(transformer), tokens_per_batch=50))
    score(
        transformer, lenses, batches, total=7, phase="looking",
        progress=lambda phase, done, total, unit="texts": told.append((phase, done, total)),
    )  # fmt: skip
    assert len(told) == len(batches)
    assert told[-1] == ("looking", sum(batch.n_texts for batch in batches), 7)


def test_documents_that_are_read_were_never_fitted_on(case):
    transformer, *_ = case
    for seed in range(3):
        fitted = {e.document for e in examples_of(transformer, "fit", seed=seed)}
        read = {e.document for e in examples_of(transformer, "held-out", seed=seed)}
        both = {e.document for e in examples_of(transformer, "both", seed=seed)}
        assert not fitted & read
        assert fitted | read == both == set(range(50))


def test_rows_that_choose_the_ridge_are_of_other_documents_than_those_fitted(case):
    transformer, *_ = case
    tally = collect(transformer, DOCUMENTS, choose_ridge=True)
    examples = list(iter_examples(transformer, DOCUMENTS, Sampling(), ridge_share=0.1))
    back = {e.document for e in examples if e.held_back}
    fitted = {e.document for e in examples if not e.held_back}
    assert back
    assert not back & fitted
    assert tally.held_back.n == sum(e.held_back for e in examples)
    assert tally.fit.n == sum(not e.held_back for e in examples)


def test_correlated_rows_of_one_text_count_as_one_document():
    transformer = tiny("llama")
    examples = list(
        iter_examples(transformer, DOCUMENTS, Sampling(positions="all"), side="held-out")
    )
    found = score(transformer, {"-": Lens(transformer)}, iter_batches(transformer, examples))
    row = found.table()[0]
    assert row["rows"] == sum(len(e.keep) for e in examples) > len(examples)
    assert row["documents"] == len({e.document for e in examples})


def test_the_models_own_answer_is_made_once_per_chunk(case, monkeypatch):
    transformer, _, lenses = case
    made = []

    def counted(logits):
        made.append(len(logits))
        return Answer(logits)

    monkeypatch.setattr("layerleap.read.scores.Answer", counted)
    batches = list(iter_batches(transformer, examples_of(transformer), tokens_per_batch=60))
    score(transformer, lenses, batches)
    assert made == [len(batch.documents) for batch in batches]


def test_quality_counts_only_the_pairs_of_its_bank(case):
    transformer, *_ = case
    final = fit_bank(transformer, DOCUMENTS, pairs="final")
    quality = Quality(transformer, final)
    score(
        transformer, {"-": Lens(transformer)},
        iter_batches(transformer, examples_of(transformer)), quality=quality,
    )  # fmt: skip
    pairs = [(row["map"], row["src"], row["dst"]) for row in quality.table()]
    assert pairs == [(name, src, 3) for name in ("mat", "id") for src in range(3)]


def test_quality_of_given_rows_is_reproducible(case):
    transformer, bank, _ = case
    states = {layer: torch.randn(12, transformer.d_model) for layer in range(4)}
    batch = SimpleNamespace(documents=torch.arange(12) // 3, positions=torch.arange(12) % 3)
    tables = []
    for _ in range(2):
        quality = Quality(transformer, bank)
        quality.add(states, batch)
        tables.append(quality.table())
    assert tables[0] == tables[1]
    assert tables[0] != quality.table(seed=1)
