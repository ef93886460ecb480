"""Scores of replaced parts: those of the model run that way, in the tables that lenses use."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from layerleap.act.edits.replace import PartMaps
from layerleap.act.edits.scores import PartScores
from layerleap.errors import BadSettings, BadText, NotFinite
from layerleap.lens.intervals import POSITIVE, SHARE, mean_interval
from layerleap.lens.lens import Lens
from layerleap.lens.metrics import Reference
from layerleap.lens.reader import MEASURES
from layerleap.lens.scores import CHECK_EVERY, score
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import solve_bank
from layerleap.maps.linear import LinearMap
from layerleap.models.discovery.parts import KINDS
from layerleap.models.hooks.forward import Tap, tapped
from layerleap.models.hooks.recording import record
from layerleap.models.transformer import Transformer
from layerleap.stats.collect import collect
from layerleap.stream.examples import Batch, Sampling, iter_batches, iter_examples
from tiny_models import sentences, tiny

FIT, READ = sentences(80), sentences(14, seed=9)
SAMPLING = Sampling(unit="document", positions="every:7", held_out=0.0)
families = pytest.mark.parametrize("name", ["llama", "bert", "gptj", "albert"])


@cache
def case(name: str = "llama") -> tuple[Transformer, ShortcutBank]:
    model = tiny(name)
    return model, solve_bank(collect(model, FIT, SAMPLING, parts=True))


def batches(model: Transformer, tokens: int = 60) -> list[Batch]:
    return list(iter_batches(model, iter_examples(model, READ, SAMPLING), tokens_per_batch=tokens))


def scored(name: str = "llama", tokens: int = 60, kinds=None) -> PartScores:
    model, bank = case(name)
    found = PartScores(model, bank, kinds)
    for batch in batches(model, tokens):
        found.add(record(model, batch.inputs), batch)
    return found


def by(table) -> dict:
    return {(row["map"], row["layer"], row["metric"]): row for row in table}


@torch.no_grad()
def brute_force(name: str, kind: str, start: int) -> dict[str, torch.Tensor]:
    """The whole model run with one kind replaced, batch by batch, and its logits compared."""
    model, bank = case(name)
    maps, columns, documents = PartMaps(model, bank), {}, []
    for batch in batches(model):
        own = model.capture(batch.inputs, keep=batch.keep, logits=True)
        with model.edit(maps.replacing([kind], start)):
            seen = model.capture(batch.inputs, keep=batch.keep, logits=True)
        compared = Reference(own.logits[batch.keep]).compare(seen.logits[batch.keep])
        for measure in ("rank", "surprisal", "kl"):
            columns.setdefault(measure, []).append(getattr(compared, measure))
        documents.append(batch.documents)
    columns = {measure: torch.cat(values).double() for measure, values in columns.items()}
    return {**columns, "documents": torch.cat(documents)}


@families
def test_scores_are_those_of_the_whole_model_run_with_parts_replaced(name):
    table = by(scored(name).table())
    for kind in KINDS:
        for start in range(3):
            wanted = brute_force(name, kind, start)
            documents = wanted.pop("documents")
            means = {f"precision@{k}": (wanted["rank"] < k).double() for k in (1, 5, 10)}
            for metric, values in {**means, "surprisal": wanted["surprisal"]}.items():
                possible = POSITIVE if metric == "surprisal" else SHARE
                [estimate] = mean_interval(values[:, None], documents, possible)
                row = table[kind, start, metric]
                assert row["value"] == pytest.approx(estimate.value, abs=1e-4)
                assert row["low"] == pytest.approx(estimate.low, abs=1e-4)
                assert (row["rows"], row["documents"]) == (len(values), len(documents.unique()))
            kl = table[kind, start, "kl"]["value"]
            assert kl == pytest.approx(wanted["kl"].mean().item(), rel=1e-3, abs=1e-4)


@families
def test_the_last_layer_is_the_full_model(name):
    table = by(scored(name).table())
    for kind in KINDS:
        assert all(table[kind, 3, f"precision@{k}"]["value"] == 1 for k in (1, 5, 10))
        assert table[kind, 3, "kl"]["value"] == pytest.approx(0, abs=1e-6)
        assert table[kind, 3, "surprisal"]["value"] > 0
        for layer in range(4):
            values = [table[kind, layer, f"precision@{k}"]["value"] for k in (1, 5, 10)]
            assert values == sorted(values)


def test_tables_have_the_rows_of_lenses():
    model, bank = case()
    theirs = score(model, {"linear": Lens(model, bank)}, batches(model)).table(read="text")
    ours = scored().table(read="text")
    assert list(dict.fromkeys(row["map"] for row in ours)) == list(KINDS)
    for kind in KINDS:
        own = [row for row in ours if row["map"] == kind and row["metric"] != "answered"]
        assert [list(row) for row in own] == [list(row) for row in theirs]
        for key in ("read", "layer", "metric", "rows", "documents"):
            assert [row[key] for row in own] == [row[key] for row in theirs]


def test_it_shares_the_passes_that_score_lenses():
    model, bank = case()
    lenses, wanted = {"linear": Lens(model, bank)}, scored().table()
    plain = score(model, lenses, batches(model))
    riding, passes = PartScores(model, bank), []
    with tapped(model.model, {model.model: Tap(see_input=lambda *_: passes.append(1))}):
        found = score(model, lenses, batches(model), on_recording=riding.add)
    few = math.ceil(len(batches(model)) / CHECK_EVERY)  # passes that only check the tail
    assert len(passes) == len(batches(model)) + few
    assert riding.table() == wanted
    for measure in MEASURES:
        assert torch.equal(getattr(found, measure)["linear"], getattr(plain, measure)["linear"])
    assert torch.equal(found.cosine[:, 1:], plain.cosine[:, 1:])
    assert found.check.rows == plain.check.rows > 0


@families
def test_the_cut_into_batches_does_not_matter(name):
    whole, cut = scored(name, tokens=2000).table(), scored(name, tokens=40).table()
    for a, b in zip(by(whole).items(), by(cut).items(), strict=True):
        assert a[0] == b[0]
        assert a[1]["value"] == pytest.approx(b[1]["value"], rel=1e-3, abs=1e-4)


def test_some_kinds_may_be_asked_for():
    assert {row["map"] for row in scored(kinds=["ffn"]).table()} == {"ffn"}
    model, bank = case()
    only = bank.changed(parts={key: m for key, m in bank.parts.items() if key[1] == "ffn"})
    assert PartScores(model, only).kinds == ("ffn",)
    with pytest.raises(BadSettings, match="no maps of attn, only of ffn"):
        PartScores(model, only, ["attn"])
    with pytest.raises(BadSettings, match="the kind of parts is 'heads'; expected one of 'attn'"):
        PartScores(model, bank, ["heads"])


def test_some_layers_may_be_asked_for():
    model, bank = case()
    found, batch = PartScores(model, bank, starts=[2, 0]), batches(model, 2000)[0]
    found.add(record(model, batch.inputs), batch)
    table = by(found.table())
    assert {layer for _, layer, _ in table} == {0, 2, 3}
    every = by(scored(tokens=2000).table())
    for key, row in table.items():
        assert row["value"] == pytest.approx(every[key]["value"], rel=1e-3, abs=1e-4)
    for starts in ([], [3], [-1, 0]):
        with pytest.raises(BadSettings, match="expected layers in 0 to 2"):
            PartScores(model, bank, starts=starts)


def test_without_a_row_there_is_no_table():
    with pytest.raises(BadText, match="add a recorded batch first"):
        PartScores(*case()).table()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_rows_that_overflow_are_wrong_answers_and_counted(value):
    """As norms that are matrices do to gated FFNs: 1e30 is a number, its products are not."""
    model, bank = case()
    broken = LinearMap(1, 2, weight=torch.full((24, 24), value))
    found = PartScores(model, bank.changed(parts={**bank.parts, (2, "ffn_norm"): broken}))
    batch = batches(model)[0]
    found.add(record(model, batch.inputs), batch)
    table = by(found.table())
    for start, lost in ((0, True), (1, True), (2, False), (3, False)):
        assert table["norms", start, "answered"]["value"] == (0 if lost else 1)
        assert (table["norms", start, "kl"]["value"] is None) == lost
        assert (table["norms", start, "surprisal"]["value"] is None) == lost
        if lost:
            row = table["norms", start, "precision@10"]
            assert (row["value"], row["rows"]) == (0, len(batch.documents))
    assert all(table["ffn", start, "answered"]["value"] == 1 for start in range(4))
    json.dumps(found.table(), allow_nan=False)


def test_a_model_that_overflows_is_an_error():
    model, bank = case()
    found, batch = PartScores(model, bank, ["ffn"]), batches(model)[0]
    clean = record(model, batch.inputs)
    last = torch.full_like(clean.states[3], torch.nan)
    found.add(replace(clean, states=(*clean.states[:3], last)), batch)
    with pytest.raises(NotFinite, match="the model itself at layer 3"):
        found.table()
