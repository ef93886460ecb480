"""The study of embedding space: its measures against plain loops, and every section."""

import json
from dataclasses import replace

import pytest
import torch
from embedding_studies import made, settings, text

from families import build
from golden import differences
from intervals import require_inside
from layerleap.errors import BadSettings, ModelRefused
from layerleap.lens.intervals import resample_in_parts
from layerleap.models.transformer import Transformer
from layerleap.models.weights import dual, ffn_keys, unembedding, vectors
from layerleap.stream.batches import batches_of
from layerleap.study.result import StudyResult
from layerleap.study.studies import find
from layerleap_papers.embedding_space import (
    STUDY,
    columns,
    inner_products,
    neurons,
    overlaps,
    tokens,
)
from layerleap_papers.embedding_space.matches import OTHERS, OWN, match
from layerleap_papers.embedding_space.passes import BY_COEFFICIENT, BY_SIZE, observe
from tiny_models import tiny


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# --- tokens ------------------------------------------------------------------------------------


def test_top_tokens_are_those_of_the_whole_product_whatever_the_blocks(monkeypatch):
    rows, matrix = torch.randn(7, 5, generator=seeded()), torch.randn(40, 5, generator=seeded(1))
    scores = rows @ matrix.T
    for entries in (2**24, 80, 1):
        monkeypatch.setattr(tokens, "ENTRIES", entries)
        found = tokens.top_ids(rows, matrix, 4, "magnitude", "high", "low")
        expected = {"magnitude": scores.abs(), "high": scores, "low": -scores}
        for order, whole in expected.items():
            best = whole.argsort(dim=1, descending=True)[:, :4]
            assert torch.equal(found[order].long(), best), (order, entries)


def test_jaccard_is_that_of_sets():
    generator = seeded()
    a, b = (
        torch.stack([torch.randperm(20, generator=generator)[:6] for _ in range(50)])
        for _ in range(2)
    )
    sets = [(set(x), set(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    expected = [len(x & y) / len(x | y) for x, y in sets]
    assert tokens.jaccard(a, b).tolist() == pytest.approx(expected)
    assert tokens.jaccard(a, a.flip(1)).tolist() == [1.0] * 50


def test_found_among_counts_each_wanted_token_once():
    wanted, given = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 2, 4, 9, 2]])
    assert tokens.found_among(wanted, given).tolist() == [0.5]


@pytest.mark.parametrize("n", [2, 3, 64, 501])
def test_a_derangement_moves_everything(n):
    partner = tokens.derangement(n, seeded(n))
    assert partner.sort().values.tolist() == list(range(n))
    assert not (partner == torch.arange(n)).any()


def test_others_are_rows_of_another_document_and_any_of_them():
    documents = torch.tensor([5, 5, 2, 9, 9, 9, 2, 5])
    drawn = torch.stack([tokens.others(documents, seeded(n)) for n in range(300)])
    assert (documents[drawn] != documents).all()
    for row in range(len(documents)):
        expected = {i for i in range(len(documents)) if documents[i] != documents[row]}
        assert set(drawn[:, row].tolist()) == expected


# --- pairs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_heads", "n_kv"), [(6, 2), (4, 4), (3, 1)])
def test_partners_of_grouped_heads_are_those_of_an_explicit_loop(n_heads, n_kv):
    width = 5
    partners = columns.partners_of(n_heads, n_kv, width, seeded())
    own = [(head // (n_heads // n_kv)) * width + i for head in range(n_heads) for i in range(width)]
    assert partners[overlaps.OWN].tolist() == own
    for control in columns.CONTROLS:
        assert not (partners[control] == partners[overlaps.OWN]).any()
    # Within a head, the control stays there and uses every column once.
    for head, chosen in enumerate(partners[columns.HEAD].split(width)):
        first = own[head * width]
        assert chosen.sort().values.tolist() == list(range(first, first + width))
    # Over the layer, it reaches columns of all heads, not only of the first.
    assert set(partners[columns.LAYER].tolist()) == set(range(n_kv * width))


def test_rise_is_that_of_a_straight_line_and_means_are_plain():
    depth = overlaps.Depth()
    for block in (1, 2, 3, 4):
        depth.add(block, "plain", {("keys", "own"): torch.full((10,), 0.1 * block)})
    mean, rise = depth.over_all()
    assert (mean["over"], rise["over"]) == ("mean", "rise")
    assert mean["value"] == pytest.approx(0.25)
    assert rise["value"] == pytest.approx(0.3)
    assert rise["low"] == pytest.approx(0.3)
    assert "documents" not in depth.rows[0]


def test_vectors_of_one_group_are_drawn_together():
    values = {("columns", "own"): torch.arange(12.0)}
    single, pairs_of_two, one = (overlaps.Depth() for _ in range(3))
    # Two copies of the same vectors are no more evidence than one.
    single.add(1, "plain", {place: v[::2] for place, v in values.items()})
    doubled = {place: v[::2].repeat_interleave(2) for place, v in values.items()}
    pairs_of_two.add(1, "plain", doubled, torch.arange(6).repeat_interleave(2))
    ends = [(d.rows[0]["low"], d.rows[0]["high"]) for d in (single, pairs_of_two)]
    assert ends[0] == pytest.approx(ends[1])
    alone = overlaps.Depth()
    alone.add(1, "plain", doubled)
    assert alone.rows[0]["high"] - alone.rows[0]["low"] < ends[0][1] - ends[0][0]
    one.add(1, "plain", values, torch.zeros(12, dtype=torch.long))
    assert one.rows[0]["low"] is None


def planted(**changes):
    """A tiny llama whose ups of block 2 are its values, and whose gates are not."""
    model = build("llama", seed=3, **changes)
    layer = model.model.layers[1].mlp
    with torch.no_grad():
        layer.up_proj.weight.copy_(layer.down_proj.weight.T)
    return Transformer.wrap(model, tiny("llama").tokenizer, name="planted")


def test_a_planted_overlap_is_found_and_only_there():
    result = STUDY(planted(intermediate_size=60), settings(), sections="neurons")
    lead = {
        (row["layer"], row["pair"]): row
        for row in result.rows("neurons", reading="plain", measure=neurons.LEAD)
    }
    own = result.row("neurons", layer=2, pair="ffn.up", reading="plain", measure="own")
    assert own["value"] == pytest.approx(1)
    assert lead[2, "ffn.up"]["low"] > 0.5
    assert all(row["high"] < 0.1 for place, row in lead.items() if place != (2, "ffn.up"))
    better = result.row("neurons", layer=2, pair="both", reading="plain")
    assert better["high"] < -0.5
    assert {row["reading"] for row in result.rows("neurons")} == set(overlaps.READINGS)


def test_overlaps_are_those_of_the_whole_projection():
    model = tiny("gpt2")
    matrix = unembedding(model).float()
    rows = torch.tensor([3, 8, 20])
    chosen = overlaps.Pairs(
        "keys", "ffn.key", "ffn.value", rows, {"own": rows, "other": rows.flip(0)}
    )
    ((reading, found),) = overlaps.overlaps(model, matrix, 2, [chosen], ["plain"], 6)
    assert reading == "plain"
    tops = [
        [set(row.abs().topk(6).indices.tolist()) for row in vectors(model, 2, kind) @ matrix.T]
        for kind in ("ffn.key", "ffn.value")
    ]
    for name, partner in chosen.partners.items():
        for place, (row, other) in enumerate(zip(rows.tolist(), partner.tolist(), strict=True)):
            a, b = tops[0][row], tops[1][other]
            assert float(found["keys"][name][place]) == pytest.approx(len(a & b) / len(a | b))


# --- active parameters -------------------------------------------------------------------------


def observed(model, **changes):
    few = settings(**changes).resolved(model)
    batches = list(batches_of(model, text(), few.sampling, side="both", n_texts=12))
    seen = observe(model, batches, None, few, generator=seeded(), progress=lambda *_: None)
    return seen, batches


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_active_vectors_and_their_tokens_are_those_of_a_plain_loop(name):
    model = tiny(name)
    seen, batches = observed(model, active=2, state_k=4)
    matrix = unembedding(model).float()
    matches = match(model, matrix, seen, 4, generator=seeded(), progress=lambda *_: None)
    row = 0
    for batch in batches:
        captured = model.capture(batch.inputs, sites=[(2, "ffn.in")], keep=batch.keep)
        used = batch.positions > 0 if model.kind == "next-token" else batch.positions >= 0
        for at in used.nonzero()[:, 0].tolist():
            given = ffn_keys(model, 2).coefficients(model, captured.sites[2, "ffn.in"][at])
            values = vectors(model, 2, "ffn.value")
            best = (given.abs() * values.norm(dim=1)).topk(2).indices.tolist()
            assert seen.active[BY_SIZE, 2].rows[row].tolist() == best
            alone = given.abs().topk(2).indices.tolist()
            assert seen.active[BY_COEFFICIENT, 2].rows[row].tolist() == alone
            tops = [
                set((given[n].sign() * values[n] @ matrix.T).topk(4).indices.tolist()) for n in best
            ]
            state = model.logits(captured.states[2][at][None])[0].topk(4).indices.tolist()
            expected = sum(token in set.union(*tops) for token in state) / 4
            assert float(matches.shares[BY_SIZE, 2, "raw", OWN][row]) == pytest.approx(expected)
            row += 1
    assert row == len(seen.documents) > 10


def test_the_first_position_of_a_text_is_left_out_but_not_of_a_masked_one():
    seen, batches = observed(tiny("llama"))
    assert len(seen.documents) == sum(int((batch.positions > 0).sum()) for batch in batches)
    assert any((batch.positions == 0).any() for batch in batches)
    seen, batches = observed(tiny("bert"))
    assert len(seen.documents) == sum(len(batch.positions) for batch in batches)


def test_every_kind_of_vector_is_looked_among():
    seen, _ = observed(tiny("llama"))
    ways = {way for way, _ in seen.active}
    assert ways == {BY_SIZE, BY_COEFFICIENT, "gates", "ups", "W_V columns", "W_O rows"}
    seen, _ = observed(tiny("gpt2"))
    assert "keys" in {way for way, _ in seen.active}


def test_controls_take_vectors_of_another_document():
    model = tiny("llama")
    seen, _ = observed(model)
    matrix = unembedding(model).float()
    matches = match(model, matrix, seen, 5, generator=seeded(), progress=lambda *_: None)
    own, other = (matches.shares["gates", 1, "raw", source] for source in (OWN, OTHERS))
    assert not torch.equal(own, other)
    assert torch.equal(matches.lead("gates", 1, "raw"), own - other)


# --- inner products ----------------------------------------------------------------------------


def made_up(n=6, d=5, v=33):
    rows, matrix = torch.randn(n, d, generator=seeded()), torch.randn(v, d, generator=seeded(1))
    return torch.nn.functional.normalize(rows, dim=1), matrix


def keep(scores, k):
    kept = torch.zeros_like(scores)
    places = scores.abs().topk(k, dim=1).indices
    return kept.scatter(1, places, scores.gather(1, places))


def test_products_of_kept_readings_are_those_of_whole_matrices(monkeypatch):
    rows, matrix = made_up()
    duals, ks = dual(rows, matrix), [2, 7, 33]
    expected = [
        [keep(rows @ matrix.T, k) @ keep(x @ matrix.T, k).T for k in ks] for x in (rows, duals)
    ]
    for block, entries in ((4096, 2**24), (5, 40)):
        monkeypatch.setattr(inner_products, "COLUMNS", block)
        monkeypatch.setattr(inner_products, "ENTRIES", entries)
        found = inner_products.products(rows, duals, matrix, ks)
        for by_k, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(by_k, torch.stack(wanted), rtol=1e-4, atol=1e-4)


def test_the_pseudo_inverse_is_exact_with_all_tokens():
    rows, matrix = made_up()
    kept = inner_products.keep_best(rows, matrix, [4, 33])
    assert float(kept.value[1, -1]) == pytest.approx(1, abs=1e-6)
    assert kept.left_out[:, 1, -1].tolist() == pytest.approx([1] * len(rows), abs=1e-6)
    assert float(kept.value[0, -1]) < 1 - 1e-3


def test_resampled_cosines_are_those_of_the_drawn_rows_each_paired_with_the_others():
    a, b = (torch.randn(5, 5, generator=seeded(n), dtype=torch.float64) for n in (2, 3))
    weights = torch.cat(list(resample_in_parts(5, 4, seed=1)))
    found = inner_products._cosine(a, b, weights)
    for sample, counts in zip(found, weights.int().tolist(), strict=True):
        drawn = [row for row, times in enumerate(counts) for _ in range(times)]
        places = [
            (i, j) for m, i in enumerate(drawn) for n, j in enumerate(drawn) if m == n or i != j
        ]
        x, y = (torch.stack([each[place] for place in places]) for each in (a, b))
        assert float(sample) == pytest.approx(float(x @ y / (x.norm() * y.norm())))


def test_rows_of_one_document_are_left_out_together():
    rows, matrix = torch.randn(6, 5, generator=seeded()), torch.randn(40, 5, generator=seeded(1))
    groups = torch.tensor([4, 4, 9, 9, 9, 1])
    kept = inner_products.keep_best(rows, matrix, [4, 40], groups=groups)
    assert kept.sizes.tolist() == [1, 2, 3]
    assert kept.n_rows == 6
    for place, left_out in enumerate([1, 4, 9]):
        weights = (groups != left_out).double()[None]
        unit = torch.nn.functional.normalize(rows, dim=1).double()
        exact = unit @ unit.T
        made = inner_products.products(
            unit.float(), dual(unit.float(), matrix).float(), matrix, [4, 40]
        )
        expected = inner_products._cosine(exact, made[0][1].double(), weights)
        assert kept.left_out[place, 0, 1] == pytest.approx(float(expected[0]), abs=1e-5)
    alone = inner_products.keep_best(rows, matrix, [4, 40], groups=torch.zeros(6, dtype=torch.long))
    assert {row["low"] for row in alone.rows()} == {None}


def test_curves_cross_where_a_straight_line_in_log_k_does():
    ks = [10, 100, 1000]
    leads = torch.tensor([[1.0, 0.5, -0.5], [0.5, -0.5, 1.0], [-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])
    found = inner_products.crossings(ks, leads.double())
    assert found[:2].tolist() == pytest.approx([10**2.5, 10**1.5])
    assert found[2:].isnan().all()


@pytest.mark.parametrize(
    ("d_vocab", "ks"),
    [(61, [4, 8, 16, 32, 61]), (591, [16, 32, 64, 128, 256, 512, 591]), (5, [1, 2, 4, 5])],
)
def test_tokens_kept_grow_up_to_the_vocabulary(d_vocab, ks):
    assert inner_products.sizes(d_vocab) == ks


# --- the whole study ---------------------------------------------------------------------------


def test_every_section_is_there_and_plain_data(tmp_path):
    result = made()
    assert find("embedding") is STUDY
    assert not result.failed
    assert [row["key"] for row in result.sections] == [s.key for s in STUDY.sections]
    assert StudyResult.load(result.save(tmp_path / "study.json")).tables == result.tables
    for name, rows in result.tables.items():
        assert rows, name
        for row in rows:
            assert not any(isinstance(value, dict | list) for value in row.values()), name
    assert json.loads(json.dumps(result.tables)) == result.tables
    assert {row["role"] for row in result.data} == {"fit", "read"}


def test_every_value_with_an_interval_is_inside_it():
    for name, rows in made().tables.items():
        for row in rows:
            if row.get("low") is not None and row.get("value") is not None:
                assert row["low"] - 1e-9 <= row["value"] <= row["high"] + 1e-9, (name, row)


def test_claims_are_each_answered_or_said_to_be_untested():
    rows = made().claims
    assert len(rows) == sum(len(section.claims) for section in STUDY.sections)
    assert {row["agrees"] for row in rows} <= {"yes", "partly", "no", "cannot tell"}
    assert all(row["seen"] and row["why"] for row in rows)


def test_no_claim_is_decided_by_a_value_without_an_interval():
    """Every interval set to straddle its threshold: nothing can be told, whatever the values."""
    ends = {"low": -1e9, "high": 1e9}
    tables = {
        name: [{**row, **{key: ends[key] for key in ends if key in row}} for row in rows]
        for name, rows in made().tables.items()
    }
    result = replace(made(), tables=tables)
    for section in STUDY.sections:
        for claim in section.claims:
            assert claim.test(result).agrees == "cannot tell", claim.text


def test_a_random_model_overlaps_no_more_than_chance():
    result = made()
    for table, measure in (("neurons", neurons.LEAD), ("columns", "lead over " + columns.LAYER)):
        for prefix in ("", "twin_"):
            rows = result.rows(f"{prefix}{table}_depth", measure=measure, over="mean")
            assert rows
            assert all(abs(row["value"]) < 0.1 for row in rows)


def test_findings_say_something_under_every_figure():
    result = made()
    figures = {figure.key for section in STUDY.sections for figure in section.figures}
    assert {row["under"] for row in result.findings} >= figures
    assert result.headlines


def test_a_masked_model_runs_and_a_plain_ffn_has_one_kind_of_key():
    result = STUDY(tiny("bert", seed=1), settings(), quick=True)
    assert not result.failed
    assert {row["pair"] for row in result.rows("neurons")} == {"ffn.key"}
    assert not any("gated" in row["claim"] for row in result.claims)
    assert not result.rows("twin_neurons")  # too slow for a first look
    assert "folded" not in {row["reading"] for row in result.rows("neurons")}


def test_a_model_without_a_vocabulary_is_refused():
    model = Transformer.wrap(build("bert_text"), tiny("bert").tokenizer, name="tiny-classifier")
    with pytest.raises(ModelRefused, match="gives classes, not tokens, so it has no vocabulary"):
        STUDY(model, settings())


def test_a_vocabulary_smaller_than_the_width_has_no_right_inverse():
    model = tiny("llama", hidden_size=64)
    result = STUDY(model, settings(), sections=["kept", "carried"])
    assert set(result.failed) == {"kept"}
    assert "smaller than the width of the stream" in result.failed["kept"]
    assert any("Inner products of carried states: left out" in note for note in result.notes)
    answers = {row["claim"]: row["agrees"] for row in result.claims if row["section"] == "kept"}
    assert set(answers.values()) == {"not tested"}


def test_experts_have_no_neurons_but_their_heads_are_compared():
    result = STUDY(tiny("mixtral"), settings(), sections=["neurons", "columns", "active"])
    assert set(result.failed) == {"neurons"}
    assert "mixture of experts" in result.failed["neurons"]
    assert result.rows("columns")
    assert {row["way"] for row in result.rows("active")} == {"W_V columns", "W_O rows"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": 0}, "k is 0; expected 1 or more"),
        ({"active": 0}, "active is 0"),
        ({"vectors": 1}, "vectors is 1; expected 2 or more, to shuffle pairs"),
        ({"kept_rows": 3}, "kept_rows is 3; expected 8 or more"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, words):
    with pytest.raises(BadSettings, match=words):
        settings(**changes)


def test_top_tokens_are_fewer_of_a_small_vocabulary():
    few = settings().resolved(tiny("llama"))
    assert (few.k, few.state_k) == (15, 7)
    assert few.positions == "every:4"
    assert settings().resolved(tiny("bert")).positions == "every:7"


def test_the_same_settings_give_the_same_numbers():
    model = tiny("llama", seed=1)
    again = STUDY(model, settings(), sections=["neurons", "active"])
    assert again.tables["neurons"] == made().tables["neurons"]
    # Without carried states the pass is the same, and so are active parameters.
    assert again.tables["active"] == made().tables["active"]


def test_every_estimate_of_the_study_lies_inside_its_interval():
    require_inside(made().tables, 10)


def test_a_small_study_measures_what_it_did_before():
    assert not differences(made(), "embedding_space")
