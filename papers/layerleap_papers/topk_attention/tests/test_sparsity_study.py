"""The study of sparsity: its measures against plain computations, and every section."""

import json
import math
import random
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from sparsity_studies import SMALL, made, settings, small_study, text

from edit_cases import inputs as family_inputs, wrapped
from families import build
from golden import differences
from intervals import require_inside
from layerleap.act.edits import TopKAttention, TopKNeurons
from layerleap.errors import BadSettings
from layerleap.models.hooks.attention import attention_wrapped_by
from layerleap.models.transformer import Transformer
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Sampling
from layerleap.study.studies import find
from layerleap_papers.topk_attention import STUDY, budget, ffn, heads, memory, relu, runs, training
from layerleap_papers.topk_attention.allocation import finer, furthest, guessed, steps
from layerleap_papers.topk_attention.comparisons import Rows, kept_share
from layerleap_papers.topk_attention.heads import attention_weights, observe, statistics
from layerleap_papers.topk_attention.sparsity_context import SparsitySettings, numbers, shares
from layerleap_papers.topk_attention.tasks import Rows as TaskRows, Task
from tiny_models import tiny

SAMPLING = Sampling(unit="document", held_out=0.4)


def rows_of(name="llama", n=6, positions="every:3"):
    model = tiny(name)
    sampling = replace(SAMPLING, positions=positions)
    batches = batches_of(model, text(), sampling, side="held-out", n_texts=n)
    return Rows.of(model, batches, lambda _: None)


@cache
def pair_text():
    path = Path(mkdtemp()) / "pairs.tsv"
    words = ["the cat sat", "a dog ran", "old fish ate", "new bird sang"]
    lines = [f"{a} {n}\t{b} and {a} on {b}" for n in range(6) for a in words for b in words]
    path.write_text("\n".join(lines), "utf8")
    return str(path)


def pair_model(name):
    return Transformer.wrap(build(name), tiny("llama").tokenizer, name=f"tiny-{name}")


# --- passes ------------------------------------------------------------------------------------


def test_a_model_with_all_keys_and_neurons_is_the_model_itself():
    rows = rows_of()
    found = rows.measure(TopKAttention(k=rows.longest), TopKNeurons(40))
    assert float(found.kl.max()) < 1e-6
    assert found.agreement.all()
    assert float(found.loss.nan_to_num(0).abs().max()) < 1e-5


def test_measures_are_those_of_the_two_outputs():
    rows, edit = rows_of(), TopKAttention(k=2)
    found, start = rows.measure(edit), 0
    for batch in rows.batches:
        with torch.no_grad():
            plain = rows.model.model(**batch.inputs).logits[batch.keep]
            with rows.model.edit(edit):
                edited = rows.model.model(**batch.inputs).logits[batch.keep]
        p, q = plain.log_softmax(-1), edited.log_softmax(-1)
        own = slice(start, start + len(p))
        start += len(p)
        torch.testing.assert_close(found.kl[own], (p.exp() * (p - q)).sum(-1), rtol=1e-3, atol=1e-6)
        assert torch.equal(found.agreement[own].bool(), p.argmax(-1) == q.argmax(-1))
        at = torch.arange(len(p))
        known = batch.gold >= 0
        gap = (p - q)[at, batch.gold.clamp_min(0)]
        torch.testing.assert_close(found.loss[own][known], gap[known], rtol=1e-3, atol=1e-5)
        assert found.loss[own][~known].isnan().all()
    assert start == len(rows)


def test_rows_that_see_at_most_k_keys_do_not_change():
    rows = rows_of()
    found = rows.measure(TopKAttention(k=5))
    few = rows.visible <= 5
    assert few.any()
    assert (~few).any()
    assert float(found.kl[few].max()) < 1e-6
    assert float(found.kl[~few].max()) > 1e-4


# --- heads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral", "gpt_oss", "bert", "t5"])
@torch.no_grad()
def test_weights_are_those_of_eager_attention(name):
    model = wrapped(name).model
    before = model.config._attn_implementation
    ours, eager = [], []

    def around(function, *args, **kwargs):
        ours.append(attention_weights(function, *args, **kwargs))
        return function(*args, **kwargs)

    def around_eager(function, *args, **kwargs):
        output, weights = function(*args, **kwargs)
        eager.append(weights)
        return output, weights

    for implementation, watch in ((before, around), ("eager", around_eager)):
        model.set_attn_implementation(implementation)
        with attention_wrapped_by(watch):
            model(**family_inputs(name))
    model.set_attn_implementation(before)
    assert len(ours) == len(eager) >= 3
    for weights, expected in zip(ours, eager, strict=True):
        torch.testing.assert_close(weights.double(), expected.double(), rtol=1e-4, atol=1e-5)


def test_statistics_of_attention_are_right_for_a_row_by_hand():
    weights = torch.tensor([[[0.5, 0.05, 0.1, 0.15, 0.2, 0.0]]])  # one head, the row at 4
    found = statistics(weights, torch.tensor([4]), (1, 3, 99), 2)
    values = {name: round(float(value), 4) for name, value in found.items()}
    entropy = -sum(p * math.log(p) for p in (0.5, 0.05, 0.1, 0.15, 0.2))
    assert values == {
        "top 1": 0.5,
        "top 3": 0.85,
        "top 99": 1.0,
        "needed": 4,
        "first": 0.5,
        "self": 0.2,
        "previous": 0.15,
        "near": 0.25,
        "effective": round(math.exp(entropy), 4),
    }


def test_observed_rows_are_in_the_order_of_the_batches():
    rows = rows_of()
    observed = observe(rows, (1, 4), 3, lambda _: None)
    assert observed["needed"].shape == (len(rows), 3, 4)
    alone = rows.visible == 1  # a first position attends to itself
    assert alone.any()
    assert (observed["needed"][alone] == 1).all()
    torch.testing.assert_close(observed["first"][alone], torch.ones(int(alone.sum()), 3, 4))
    assert (observed["top 4"] >= observed["top 1"]).all()


def test_a_block_that_layers_share_is_observed_once_per_layer():
    rows = rows_of("albert", 3, "every:7")
    observed = observe(rows, (1,), 3, lambda _: None)
    needed = observed["effective"]
    assert needed.shape[1] == 3
    assert not torch.allclose(needed[:, 0], needed[:, 1])


# --- budgets -----------------------------------------------------------------------------------


def test_steps_take_the_cheapest_saving_first_and_end_at_the_last_level():
    costs = {1: [0, 0.1, 0.5], 2: [0, 0.01, 0.02], 3: [0, 0.0, 9.0]}
    plans = steps(costs, [1.0, 0.5, 0.25])
    assert plans[0] == {1: 0, 2: 0, 3: 0}
    assert plans[1] == {1: 0, 2: 0, 3: 1}  # costs nothing
    assert plans[2] == {1: 0, 2: 1, 3: 1}
    assert plans[-1] == {1: 2, 2: 2, 3: 2}
    for before, after in pairwise(plans):
        (moved,) = [block for block in before if before[block] != after[block]]
        assert after[moved] > before[moved]


def test_a_level_that_seems_cheaper_than_a_milder_one_counts_as_costing_the_same():
    plans = steps({1: [0, 0.3, 0.1], 2: [0, 0.2, 0.5]}, [1.0, 0.5, 0.25])
    assert plans[1] == {1: 2, 2: 0} or plans[1] == {1: 0, 2: 1}
    assert {1: 1, 2: 0} not in plans  # two levels for the price of one


def test_guessed_costs_meet_the_measured_ones_and_rise_between_them():
    levels, costs = [64.0, 16.0, 4.0], [0.0, 0.01, 0.5]
    fine = finer(levels, 4)
    assert len(fine) == 9
    assert fine[::4] == pytest.approx(levels)
    found = guessed(levels, costs, fine)
    assert found[::4] == pytest.approx(costs)
    assert found == sorted(found)
    assert found[6] == pytest.approx((0.01 * 0.5) ** 0.5)  # half way, at equal ratios


@pytest.mark.parametrize("limit", [-1, 0, 3, 6.5, 99])
def test_bisection_finds_the_last_number_within_the_limit(limit):
    asked = []

    def cost(number):
        asked.append(number)
        return float(number)

    found = furthest(9, cost, limit)
    assert found == min(8, max(0, math.floor(limit)))
    assert len(asked) <= 4


def test_a_budget_restricts_layers_and_costs_alone_are_measured():
    result = STUDY(tiny("llama"), settings(kl=0.05), sections=["budget"])
    assert not result.failed
    context = result.settings
    assert context["kl"] == 0.05
    for kind in budget.NOUNS:
        rows = result.rows("budget", kind=kind)
        assert [row["layer"] for row in rows] == [1, 2, 3]
        assert any(not row["whole"] for row in rows)
        assert {row["layer"] for row in result.rows("budget_costs", kind=kind)} == {1, 2, 3}
        saved = result.row("budget_checks", kind=kind, what="budget", measure="kl")
        assert saved["kept"] < 1
        assert saved["uniform_kept"] >= saved["kept"] - 1e-9


def test_budgets_are_chosen_by_the_upper_end_of_the_kl_on_the_texts_they_are_chosen_on(monkeypatch):
    estimated, chosen = [], []
    plain = Rows.estimates

    def estimates(self, columns, *bounds):
        estimated.append(plain(self, columns, *bounds))
        return estimated[-1]

    def watched(n, cost, limit):
        number = furthest(n, cost, limit)
        value = cost(number)
        (row,) = estimated[-1]
        chosen.append((value, row["value"], row["high"], limit))
        return number

    monkeypatch.setattr(Rows, "estimates", estimates)
    monkeypatch.setattr(budget, "furthest", watched)
    STUDY(tiny("llama"), settings(kl=0.05), sections=["budget"])
    assert len(chosen) == len(budget.NOUNS)
    for value, mean, high, limit in chosen:
        assert mean < high == value <= limit == 0.05


def test_a_block_restricted_alone_is_the_whole_model_with_that_edit():
    rows = rows_of(n=3)
    part = budget.Part(budget.ATTENTION, [2], [99.0, 2.0], {})
    alone = budget._alone(rows, part, lambda *_: None)
    whole = rows.measure(TopKAttention(k={2: 2}))
    torch.testing.assert_close(alone[2, 2.0].kl, whole.kl, rtol=1e-4, atol=1e-7)


# --- memory ------------------------------------------------------------------------------------


def test_bytes_kept_are_those_of_the_formulas():
    heads, k, length = memory.HEADS, memory.K, 512
    shape = (1, heads, length, memory.WIDTH)
    kept = {
        name: memory.kept_bytes(attend, shape, shape, shape)
        for name, attend in memory.IMPLEMENTATIONS.items()
    }
    assert kept["eager"] == 4 * heads * length**2
    assert kept["chunked"] == kept["top-k, recomputed"] == 0
    assert 0.8 < kept["top-k"] / (4 * heads * length * k) <= 1  # first rows see fewer than k
    assert kept["sdpa"] < kept["top-k"]


def test_an_ffn_that_keeps_few_neurons_keeps_few_numbers_and_masking_saves_nothing():
    length, wide = 96, (memory.NEURONS, memory.D_MODEL)
    kept = {
        name: memory.kept_bytes(ffn, (length, memory.D_MODEL), wide, wide)
        for name, ffn in memory.FFNS.items()
    }
    assert kept["whole"] == 4 * length * memory.NEURONS
    assert kept["top-k"] == (4 + 4) * length * memory.FFN_K
    assert kept["masked"] > kept["whole"]


def test_gradients_of_the_lean_ffn_are_those_of_autograd():
    generator = torch.Generator().manual_seed(0)
    x, keys, values = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((5, 4), (9, 4), (9, 4))
    )
    few = partial(memory.topk_relu_ffn, k=3)
    assert torch.autograd.gradcheck(few, (x, keys, values))
    whole = (x @ keys.mT).relu() @ values
    torch.testing.assert_close(memory.topk_relu_ffn(x, keys, values, 9), whole)


def test_heads_are_named_by_intervals():
    near = {place: {"low": 0.0, "high": 0.1} for place in ("first", "previous", "self", "near")}

    def does(low, high, **places):
        return heads._does({**near, "spread": {"low": low, "high": high}, **places})

    assert does(0.3, 0.4) == "spread"
    assert does(0.1, 0.2) == "distant"
    assert does(0.2, 0.3) == "mixed"  # it may be spread out
    assert does(0.1, 0.2, first={"low": 0.6, "high": 0.7}) == "first"
    assert does(0.1, 0.2, first={"low": 0.2, "high": 0.45}) == "mixed"
    assert does(0.1, 0.2, first={"low": None, "high": None}) == "mixed"


def test_a_loss_that_falls_while_outputs_change_does_not_make_few_neurons_enough():
    def row(measure, value):
        ends = {"value": value, "low": value - 0.01, "high": value + 0.01}
        return {"share": 0.125, "rule": "size", "measure": measure, **ends}

    def verdict(loss, agreement):
        tables = {"ffn": [row("loss", loss), row("agreement", agreement)]}
        return ffn._enough(replace(small_study("llama"), tables=tables)).agrees

    assert verdict(-0.1, 0.99) == "yes"
    assert verdict(-0.1, 0.8) == "partly"
    assert verdict(0.5, 0.8) == "no"


def test_growth_is_the_exponent():
    found = memory.growth([64, 128, 256, 512], [3 * n**2 for n in (64, 128, 256, 512)])
    assert found["value"] == pytest.approx(2)
    assert memory.growth([64, 128, 256], [0, 0, 0]) is None


# --- training ----------------------------------------------------------------------------------


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    path = tmp_path / "reviews.jsonl"
    lines = [
        json.dumps({"text": f"the cat sat on the mat {n} " * 4, "label": n % 2}) for n in range(80)
    ]
    path.write_text("\n".join(lines), "utf8")
    monkeypatch.setattr(training, "fetch", lambda name: path)
    return path


def test_training_runs_are_paired_and_each_is_kept_as_soon_as_it_ends(
    reviews, tmp_path, monkeypatch
):
    calls, limit = [], [5]
    for name in ("from_scratch", "fine_tuned"):
        own = getattr(runs, name)

        def counted(*args, own=own, name=name):
            calls.append(name)
            if len(calls) > limit[0]:
                raise KeyboardInterrupt
            return own(*args)

        monkeypatch.setattr(runs, name, counted)
    arguments = {"sections": ["training"], "folder": tmp_path / "work"}
    with pytest.raises(KeyboardInterrupt):
        STUDY(tiny("llama"), settings(), **arguments)
    assert len(calls) == 6
    limit[0] = 99
    result = STUDY(tiny("llama"), settings(), **arguments)
    assert len(calls) == 6 + 12 - 5  # five had ended
    assert not result.failed
    assert [row["task"] for row in result.rows("training_tasks")] == list(training.TASKS)
    for task in training.TASKS:
        measure = "loss" if task == training.TUNING else "accuracy"
        gap = result.row("training_gaps", task=task, attention=runs.TOP, measure=measure)
        ends = [
            result.row("training_ends", task=task, attention=kind, measure=measure)["value"]
            for kind in (runs.TOP, runs.EXACT)
        ]
        assert gap["value"] == pytest.approx(ends[0] - ends[1])
        assert gap["low"] <= gap["value"] <= gap["high"]
    verdicts = [row for row in result.claims if row["section"] == "training"]
    assert len(verdicts) == 3
    assert all("nothing to compare" in row["seen"] for row in verdicts[:2])  # four steps


def made_training(accuracy, gap, chance=0.1, counts=0.2):
    """A finished study with one task: ends and difference given as (value, low, high)."""

    def row(values, **about):
        names = ("value", "low", "high")
        return {**dict(zip(names, values, strict=True)), "seeds": 4, "measure": "accuracy", **about}

    task = training.LISTOPS
    tables = {
        "training": [row(accuracy, task=task, attention=runs.EXACT, step=9)],
        "training_tasks": [
            {"task": task, "k": 8, "kept": 0.13, "length": 64, "chance": chance, "counts": counts}
        ],
        "training_ends": [
            row(accuracy, task=task, attention=kind) for kind in (runs.EXACT, runs.TOP)
        ],
        "training_gaps": [row(gap, task=task, attention=runs.TOP)],
    }
    result = replace(
        small_study("llama"),
        tables=tables,
        findings=[],
        claims=[],
        sections=[{"key": "training", "status": "done", "reason": ""}],
    )
    (first, *_) = [c for c in STUDY.conclude(result).claims if c["section"] == "training"]
    return first["agrees"]


def test_equal_accuracy_counts_only_if_something_was_learned():
    assert made_training((0.4, 0.35, 0.45), (0.0, -0.01, 0.01)) == "yes"
    assert made_training((0.4, 0.35, 0.45), (-0.1, -0.12, -0.08)) == "no"
    assert made_training((0.4, 0.35, 0.45), (0.0, -0.1, 0.1)) == "cannot tell"
    assert made_training((0.4, 0.35, 0.45), (0.0, -0.01, 0.01), counts=0.36) == "not tested"
    # Two points less are a lot if exact attention gains four over counting symbols.
    assert made_training((0.4, 0.39, 0.41), (-0.02, -0.021, -0.019), counts=0.35) == "no"
    assert made_training((0.4, 0.39, 0.41), (-0.02, -0.021, -0.019), counts=0.2) == "yes"
    assert made_training((0.1, 0.05, 0.15), (0.0, 0.0, 0.0)) == "not tested"
    assert made_training((0.4, 0.35, 0.45), (0.05, 0.04, 0.06)) == "yes"  # better is not worse


def test_k_keeps_an_eighth_of_the_keys_on_average_not_of_the_longest_row():
    assert runs.keys_of(torch.full((5,), 64)) == 8
    mostly_short = torch.tensor([64] + [20] * 40)
    assert runs.keys_of(mostly_short) in (2, 3)
    causal = torch.arange(1, 129)
    k = runs.keys_of(causal)
    assert k < 8
    assert kept_share(causal, k) == pytest.approx(sum(min(1, k / n) for n in range(1, 129)) / 128)


def test_a_budget_with_one_k_for_all_layers_is_not_said_to_be_shared_out():
    result = STUDY(tiny("llama"), settings(kl=50.0), sections=["budget"])
    assert len({row["k"] for row in result.rows("budget", kind="attention")}) == 1
    (claim,) = [c for c in result.claims if "numbers of keys: sharing them out" in c["claim"]]
    assert (claim["agrees"], claim["seen"][:27]) == ("not tested", "every layer got the same k,")
    words = " ".join(row["text"] for row in result.findings)
    assert "no layer got more than another" in words
    assert "Attention: layer" not in words


def test_budgets_of_texts_whose_rows_all_see_few_keys():
    short = settings(keys=(4, 16), budget_tokens=20, positions="every:4")
    result = STUDY(tiny("llama"), short, sections=["budget"])
    assert {row["kind"] for row in result.rows("budget")} == set(budget.NOUNS)


def test_the_rule_for_relu_is_judged_where_fewer_neurons_are_kept_than_are_active():
    result = replace(
        small_study("llama"),
        tables={
            "relu_active": [{"ffn": "ReLU", "value": 0.3, "low": 0.29, "high": 0.31}],
            "relu_paired": [
                {
                    "ffn": "ReLU",
                    "share": share,
                    "rule": "pre-activation",
                    "measure": "kl",
                    "value": gap,
                    "low": gap,
                    "high": gap,
                }
                for share, gap in ((0.125, 0.3), (0.25, 0.2), (0.5, 0.0))
            ],
        },
    )
    verdict = relu._rule(result, "ReLU")
    assert verdict.agrees == "no"  # at a quarter; at a half the rules cannot differ
    assert "25" in verdict.seen


def test_fine_tuning_leaves_the_model_alone_and_lowers_the_loss(reviews):
    model = tiny("llama")
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    tuning = runs.TuneSettings(steps=6, window=16, rate=1e-2, tested=4, points=2)
    windows = runs.review_windows(model, reviews, tuning)
    assert windows.fitted.shape == (6, 16)
    exact, again, top = (
        runs.fine_tuned(model, windows, kind, tuning, 0, lambda _: None)
        for kind in (runs.EXACT, runs.EXACT, runs.TOP)
    )
    assert exact == again
    assert [(p["step"], p["swapped"]) for p in exact] == [(0, 0), (3, 0), (6, 0), (6, 1)]
    assert exact[2]["loss"] < exact[0]["loss"]
    assert top[-1]["loss"] != exact[2]["loss"]
    assert top[0]["loss"] != exact[0]["loss"]  # read with its own attention from the start
    after = model.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(("by_order", "low", "high"), [(True, 0.3, 0.7), (False, 0.95, 1.0)])
def test_counting_symbols_tells_what_is_in_a_sequence_but_not_in_which_order(by_order, low, high):
    """The class is whether 5 comes before 6, or whether there are two of them."""
    rng = random.Random(0)
    rows = []
    for _ in range(400):
        label = rng.randrange(2)
        special = [5, 6][:: 1 if label else -1] if by_order else [5, 5 if label else 4]
        rows.append(([special[0], *rng.choices(range(4), k=4), special[1]], label))
    sides = [TaskRows.of(*zip(*part, strict=True)) for part in (rows[:300], rows[300:])]
    found = training.counted(Task("made", 9, 2, *sides))
    assert low <= found <= high
    wide = torch.nn.functional.pad(sides[1].ids, (0, 30))  # padding is no symbol
    assert training.counted(Task("made", 9, 2, sides[0], TaskRows(wide, sides[1].labels))) == found


def test_a_quick_run_keeps_the_shares_that_claims_are_about():
    assert SparsitySettings().scaled_down().shares == (0.125, 0.5)
    assert SparsitySettings(shares=(0.3,)).scaled_down().shares == (0.3,)


def test_the_interval_over_seeds_is_students():
    found = training.over_seeds([1.0, 2.0, 3.0])
    assert found["value"] == 2
    assert found["high"] - 2 == pytest.approx(4.302653 / 3**0.5, rel=1e-5)


def test_models_that_read_no_plain_text_are_not_fine_tuned(reviews):
    result = STUDY(tiny("bert"), settings(seeds=2), sections=["training"])
    assert [row["task"] for row in result.rows("training_tasks")] == ["ListOps", training.REVIEWS]
    assert any("fine-tuning: left out" in note for note in result.notes)


# --- ReLU against gates ------------------------------------------------------------------------


def test_with_relu_all_rules_agree_and_with_gates_they_do_not(monkeypatch):
    twins = {"small-lm-relu": tiny("opt"), "small-lm": tiny("llama")}
    monkeypatch.setattr(relu, "load", twins.__getitem__)
    result = STUDY(tiny("gpt2"), settings(shares=(0.5, 0.75)), sections=["relu"])
    assert not result.failed
    for row in result.rows("relu_paired", ffn="ReLU", rule="pre-activation", measure="kl"):
        assert abs(row["value"]) < 1e-3 or row["share"] == 0.5
    gap = {
        kind: result.row("relu_paired", ffn=kind, rule="pre-activation", measure="kl", share=0.75)[
            "value"
        ]
        for kind in relu.MODELS
    }
    assert gap["gated"] > 10 * abs(gap["ReLU"])
    active = {row["ffn"]: row["value"] for row in result.rows("relu_active")}
    assert active["gated"] == 1
    assert 0.2 < active["ReLU"] < 0.8


def test_models_of_another_language_are_not_compared_with_the_small_ones():
    result = STUDY(pair_model("t5"), settings(text=pair_text()), sections=["relu"])
    assert "read English" in result.failed["relu"]


# --- the whole study ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "bert", "gemma2"])
def test_every_section_runs_and_every_claim_is_judged(name):
    result = small_study(name)
    assert not result.failed
    judged = [row for row in result.claims if row["section"] not in ("relu", "training")]
    assert len(judged) == 14
    open_ones = [row["claim"] for row in judged if row["agrees"] == "not tested"]
    assert not [
        claim for claim in open_ones if not any(word in claim for word in ("budget", "Layers"))
    ]
    assert result.headlines
    ks = {row["k"] for row in result.rows("attention")}
    assert ks == {1, 2, 4, 8}
    assert any("Keeping 64 keys is left out" in note for note in result.notes)


def test_kl_falls_as_more_keys_and_neurons_are_kept():
    result = small_study("llama")
    by_k = [row["value"] for row in result.rows("attention", measure="kl")]
    assert by_k == sorted(by_k, reverse=True)
    for rule in ("size", "magnitude"):
        by_share = [row["value"] for row in result.rows("ffn", measure="kl", rule=rule)]
        assert by_share == sorted(by_share, reverse=True)


def test_attention_that_is_a_models_own_fails_its_sections_with_the_reason():
    result = STUDY(tiny("gptj"), settings(), sections=["attention", "heads", "ffn"])
    assert set(result.failed) == {"attention", "heads"}
    assert all("AttentionInterface" in reason for reason in result.failed.values())
    assert result.rows("ffn")


def test_an_encoder_decoder_reads_pairs():
    for name in ("t5", "bart"):
        wanted = ["attention", "heads", "ffn"]
        result = STUDY(pair_model(name), settings(text=pair_text()), sections=wanted)
        assert not result.failed
        assert result.rows("attention", measure="loss")


def test_the_report_has_every_figure_and_table(tmp_path):
    page = small_study("llama").report(tmp_path).read_text("utf8")
    for section in STUDY.sections:
        if section.key not in ("relu", "training"):
            for figure in section.figures:
                assert f'id="figure-{figure.key}"' in page
            for table in section.tables:
                assert table.caption in page
    assert (tmp_path / "claims.csv").is_file()


def test_slow_sections_run_only_when_named_or_in_full():
    full = SparsitySettings(**SMALL, text="wikipedia")
    quick = [section.key for section in STUDY.chosen(None, full, quick=True)]
    assert quick == ["attention", "heads", "ffn", "budget", "memory"]
    named = [section.key for section in STUDY.chosen(["training"], full, quick=True)]
    assert named == ["training"]
    assert len(STUDY.chosen(None, full)) == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": (0, 2)}, "keys are"),
        ({"keys": ()}, "keys are"),
        ({"shares": (0.0,)}, "shares are"),
        ({"shares": (1.5,)}, "shares are"),
        ({"kl": 0.0}, "kl is 0"),
        ({"seeds": 1}, "seeds is 1; expected 2"),
        ({"tune_seeds": 1}, "tune_seeds is 1; expected 2"),
        ({"lengths": (64, 128)}, "three or more"),
        ({"budget_tokens": 1}, "budget_tokens is 1"),
        ({"keys": 8}, "keys is 8; expected a list of whole numbers"),
        ({"keys": ("a",)}, "keys is"),
        ({"kl": math.inf}, "kl is inf"),
        ({"kl": "x"}, "kl is 'x'; expected a number"),
        ({"lengths": (16, 32, 64)}, "each at least 128"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(BadSettings, match=message):
        replace(settings(), **change)


def test_numbers_are_read_from_text():
    assert numbers("8, 16") == (8, 16)
    assert shares("0.5,.25") == (0.5, 0.25)
    with pytest.raises(BadSettings, match="expected whole numbers"):
        numbers("8,few")
    assert find("sparsity") is STUDY


def test_every_estimate_of_the_study_lies_inside_its_interval():
    require_inside(small_study("llama").tables, 10)


def test_a_small_study_measures_what_it_did_before():
    assert not differences(made(), "topk_attention")
