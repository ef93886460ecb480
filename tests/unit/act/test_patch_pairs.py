"""`ll.patch`: pairs, checkpoints, what is refused, and two cases of the bundled model."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import layerleap as ll
from layerleap.act.patching.result import mean_grid
from layerleap.errors import BadSettings, BadText, ModelRefused, NotFinite, WrongModel
from layerleap.models.transformer import Transformer
from pages import Page
from tiny_models import tiny

CLEAN, CORRUPT = "the cat sat on the mat", "the dog sat on a mat"
METRIC = ll.metrics.logit_difference("moon", "river")


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def grid(model, clean=CLEAN, corrupt=CORRUPT, **options):
    return ll.patch(model, clean, corrupt, **{"metric": METRIC, "progress": False, **options})


def test_a_grid_names_its_cells_and_tokens(model):
    cells = grid(model)
    assert cells.tokens[1] == ("␣cat", "␣dog")
    assert cells.columns == ["0", "1", "2", "3", "4", "5"]
    assert list(cells.layers) == [0, 1, 2, 3]
    line = cells.to_dict()["cells"][1]
    assert line == {"layer": 0, "position": 1, "token": "␣cat / ␣dog", "share": line["share"]}
    assert len(cells.to_pandas()) == 24
    json.dumps(cells.to_dict(), allow_nan=False)
    assert "Where the prompts of 6 tokens differ" in str(cells)


def test_chosen_positions_and_layers_are_part_of_the_whole_grid(model):
    whole, some = grid(model), grid(model, positions=[1, -1], layers=[0, 2])
    assert some.columns == ["1", "-1"]
    torch.testing.assert_close(some.shares, whole.shares[[0, 2]][:, [1, 5]])


def test_many_pairs_are_one_ratio_with_intervals(model, tmp_path):
    pairs = [(CLEAN, CORRUPT), ("the cat ran on the mat", "the dog ran on a mat")]
    alone = [grid(model, *pair, at="head") for pair in pairs]
    both = ll.patch(model, pairs=pairs, metric=METRIC, at="head", progress=False)
    sizes = [one.clean - one.corrupt for one in alone]
    changes = sum(size * one.shares for size, one in zip(sizes, alone, strict=True))
    torch.testing.assert_close(both.shares, changes / sum(sizes))
    assert (both.low <= both.shares).all()
    assert (both.high >= both.shares).all()
    assert both.pairs == 2
    file = tmp_path / "pairs.jsonl"
    records = [{"clean": a, "corrupt": b, "answer": "moon", "other": "river"} for a, b in pairs]
    file.write_text("\n".join(map(json.dumps, records)))
    assert torch.equal(ll.patch(model, pairs=file, at="head", progress=False).shares, both.shares)
    assert "95 % intervals over pairs" in both.legend()


@pytest.mark.parametrize("at", ["state", "attn", "ffn", "head"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_a_prompt_is_no_position(model, at, side):
    def padded(text):
        row = model.tokenizer(text)["input_ids"]
        rows = [[0, 0, *row] if side == "left" else [*row, 0, 0]]
        mask = [[0, 0, *[1] * len(row)] if side == "left" else [*[1] * len(row), 0, 0]]
        return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}

    for method in ("exact", "gradient"):
        one = grid(model, padded(CLEAN), padded(CORRUPT), at=at, method=method)
        assert torch.equal(one.shares, grid(model, at=at, method=method).shares)
        assert len(one.tokens) == 6


def test_pairs_whose_runs_have_equal_metrics_keep_their_own_cells(model):
    """A metric of few values, such as accuracy, has the same ends in many pairs."""
    pairs = [("the cat sat on", "the dog sat on"), ("a man ran under", "a woman ran under")]
    top = [model.capture(clean, logits=True).logits[0, -1].argmax() for clean, _ in pairs]

    def right(logits):
        return torch.isin(logits.argmax(-1), torch.stack(top)).float()

    options = {"metric": right, "progress": False}
    alone = [ll.patch(model, *pair, **options) for pair in pairs]
    assert {(one.clean, one.corrupt) for one in alone} == {(1.0, 0.0)}
    assert not torch.equal(alone[0].shares, alone[1].shares)
    both = ll.patch(model, pairs=pairs, **options)
    assert torch.equal(both.shares, (alone[0].shares + alone[1].shares) / 2)


def test_a_pair_with_a_small_difference_does_not_rule_the_mean(model):
    strong = grid(model)
    other = grid(model, "the cat ran on the mat", "the dog ran on a mat")
    weak = replace(other, clean=0.0, corrupt=0.01 * (strong.clean - strong.corrupt))
    both = mean_grid([strong, weak], ())
    torch.testing.assert_close(both.shares, (strong.shares + 0.01 * weak.shares) / 1.01)
    assert "1 of 2 pairs differ by less than 10% of the mean and hardly count: 2" in both.notes[0]


def test_half_precision_needs_a_larger_difference(model):
    half = Transformer.wrap(deepcopy(model.model).bfloat16(), model.tokenizer)

    def metric(logits):
        return 200 + (logits[:, 20] - logits[:, 21])

    assert grid(model, metric=metric).shares.any()
    with pytest.raises(BadSettings, match="no difference to explain"):
        grid(half, metric=metric)


def test_a_metric_that_is_flat_at_the_patched_run_has_no_gradient(model):
    options = {"metric": ll.metrics.kl(), "method": "gradient"}
    with pytest.raises(BadSettings, match=r"kl\(\) is flat at the clean run"):
        grid(model, how="noise", **options)
    assert grid(model, how="denoise", **options).shares.any()


def test_cells_that_are_the_same_in_both_runs_are_zero_without_running(model):
    for method in ("exact", "gradient"):
        assert not grid(model, positions=[0], method=method).shares.any()


def test_positions_that_are_given_twice_are_one_column(model):
    whole, some = grid(model), grid(model, positions=[1, -1, 1, 5])
    assert some.columns == ["1", "-1"]
    torch.testing.assert_close(some.shares, whole.shares[:, [1, 5]], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("check", "n"), [(0, 0), (1, 1), (3, 3), (24, 11)])
def test_as_many_cells_are_checked_as_asked_and_their_passes_count(model, check, n):
    cells = grid(model, method="gradient", check=check, positions=[1, 3, 4])
    assert cells.checked_cells == n
    assert (cells.passes > 4) == bool(n)


def test_the_gradient_sees_logits_as_wide_as_exact_cells_do(model):
    half = Transformer.wrap(deepcopy(model.model).bfloat16(), model.tokenizer)
    dtypes = set()

    def metric(logits):
        dtypes.add(logits.dtype)
        return logits[:, 20]

    half.capture(CLEAN, gradients=metric)
    assert dtypes == {torch.float32}


def test_prompts_longer_than_the_model_reads_are_refused_in_one_sentence():
    short = tiny("gpt2")
    long = " ".join(["cat"] * 2000)
    with pytest.raises(BadText, match=r"have 2000 tokens; this model reads at most \d+"):
        grid(short, long, f"{long[:-3]}dog")


def test_pairs_of_other_lengths_share_columns_only_without_positions(model):
    pairs = [(CLEAN, CORRUPT), ("a cat", "a dog")]
    ran = []
    for positions in (None, [1, -1], [5]):
        with pytest.raises(BadSettings, match=r"pair 2 of 2: (it has \d columns|positions \[5\])"):
            ll.patch(
                model,
                pairs=pairs,
                metric=METRIC,
                positions=positions,
                progress=lambda *step: ran.append(step),
            )
    assert not ran  # refused before any pair runs
    for options in ({"at": "head"}, {"positions": "all"}, {"positions": [-1]}):
        assert ll.patch(model, pairs=pairs, metric=METRIC, progress=False, **options).pairs == 2


def test_a_run_that_was_stopped_keeps_every_cell_and_goes_on_there(model, tmp_path):
    file, told = tmp_path / "cells.json", []

    def stop(phase, done, total, unit="texts"):
        told.append(done)
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grid(model, checkpoint=file, progress=stop)
    assert file.is_file()
    with pytest.raises(WrongModel, match="different settings"):
        grid(model, checkpoint=file, how="noise")
    with pytest.raises(WrongModel, match=r"different settings \(metrics\)"):
        grid(model, checkpoint=file, metric=ll.metrics.logit("moon"))
    told.clear()
    resumed = grid(model, checkpoint=file, progress=lambda *step: told.append(step[1]))
    assert told[0] > 8
    assert torch.equal(resumed.shares, grid(model).shares)
    assert not file.exists()


def test_an_answer_of_several_tokens_continues_both_prompts(model):
    metric = ll.metrics.log_probability("moon and star")
    cells = grid(model, metric=metric)
    assert len(cells.tokens) == 6
    with torch.no_grad():
        ids = model.tokenizer(f"{CLEAN} moon and star", return_tensors="pt")["input_ids"]
        logs = model.model(ids).logits[0].log_softmax(-1)
    right = sum(float(logs[5 + n, ids[0, 6 + n]]) for n in range(3))
    assert cells.clean == pytest.approx(right, rel=1e-4)
    loss = grid(model, metric=ll.metrics.loss("moon and star"))
    assert loss.clean == pytest.approx(-cells.clean)
    torch.testing.assert_close(loss.shares, cells.shares)


def test_tokens_of_an_answer_are_no_positions(model):
    metric = ll.metrics.log_probability("moon and star")
    whole, last = grid(model, metric=metric), grid(model, metric=metric, positions=[-1])
    assert whole.columns == ["0", "1", "2", "3", "4", "5"]
    assert "Where the prompts of 6 tokens differ" in str(whole)
    torch.testing.assert_close(last.shares[:, 0], whole.shares[:, 5], rtol=0, atol=1e-5)
    assert last.shares.any()
    with pytest.raises(BadSettings, match="expected some of 0 to 5"):
        grid(model, metric=metric, positions=[6])
    with pytest.raises(BadText, match="have 6 and 3 tokens"):
        grid(model, corrupt="the dog sat", metric=metric)


def test_pairs_with_answers_of_other_lengths_share_their_columns(model):
    prompts = {"clean": CLEAN, "corrupt": CORRUPT}
    pairs = [{**prompts, "answer": "moon"}, {**prompts, "answer": "river and star"}]
    both = ll.patch(model, pairs=pairs, progress=False)
    assert both.columns == ["0", "1", "2", "3", "4", "5"]
    assert len(both.tokens) == 6


def test_a_metric_does_not_replace_the_answers_of_records(model):
    record = {"clean": CLEAN, "corrupt": CORRUPT, "answer": "moon"}
    with pytest.raises(BadSettings, match="pair 1 has an answer of its own, which the metric"):
        ll.patch(model, pairs=[record], metric=METRIC, progress=False)
    del record["answer"]
    assert ll.patch(model, pairs=[record], metric=METRIC, progress=False).shares.any()


def test_metrics_are_what_they_say(model):
    with torch.no_grad():
        ids = model.tokenizer(CLEAN, return_tensors="pt")["input_ids"]
        other = model.tokenizer(CORRUPT, return_tensors="pt")["input_ids"]
        logits, corrupt = (model.model(one).logits[0, -1] for one in (ids, other))
    moon, river = (model.tokenizer.convert_tokens_to_ids(one) for one in ("moon", "river"))
    divergence = (logits.softmax(-1) * (logits.log_softmax(-1) - corrupt.log_softmax(-1))).sum()
    for metric, value in (
        (METRIC, logits[moon] - logits[river]),
        (ll.metrics.logit("moon"), logits[moon]),
        (ll.metrics.logit(moon), logits[moon]),
        (ll.metrics.probability("moon"), logits.softmax(-1)[moon]),
        (lambda rows: rows[:, moon] ** 2, logits[moon] ** 2),
    ):
        assert grid(model, metric=metric, layers=[3]).clean == pytest.approx(float(value), rel=1e-4)
    kl = grid(model, metric=ll.metrics.kl(), layers=[3])
    assert kl.clean == pytest.approx(0, abs=1e-6)
    assert kl.corrupt == pytest.approx(float(divergence), rel=1e-4)


def test_prompts_of_unequal_length_are_shown_side_by_side(model):
    with pytest.raises(BadText, match="6 and 3 tokens") as error:
        grid(model, corrupt="the dog sat")
    assert "␣the | ␣cat | ␣sat | ␣on | ␣the | ␣mat" in str(error.value)


def test_what_is_wrong_is_said_in_one_sentence(model):
    for options, message in (
        ({"corrupt": CLEAN}, "there is no difference to explain"),
        ({"metric": None}, "there is no metric"),
        ({"metric": 3}, "3 is not a metric"),
        ({"metric": lambda rows: rows}, "expected a number per text"),
        ({"metric": ll.metrics.logit("moon star")}, "is 2 tokens of this model"),
        ({"metric": ll.metrics.logit(999)}, "output 999 does not exist"),
        ({"metric": ll.metrics.log_probability("")}, "'' has no tokens"),
        ({"metric": ll.metrics.logit_difference("moon", "moon")}, "a token with itself"),
        ({"positions": [6]}, "expected some of 0 to 5"),
        ({"check": -1}, "check is -1; expected 0 or more"),
        ({"layers": []}, "layers is empty; expected some of 0 to 3"),
        ({"layers": [4]}, "layer 4 does not exist"),
        ({"at": "head", "layers": [0]}, "block 0 does not exist"),
        ({"pairs": []}, "give a clean and a corrupt prompt, or pairs"),
    ):
        with pytest.raises(BadSettings, match=message):
            grid(model, **options)
    with pytest.raises(NotFinite, match="not finite"):
        grid(model, metric=lambda rows: rows[:, 0] / 0)
    with pytest.raises(BadText, match="pair 2 of 2: the prompts have 6 and 2 tokens"):
        ll.patch(model, pairs=[(CLEAN, CORRUPT), (CLEAN, "a dog")], metric=METRIC)
    with pytest.raises(BadSettings, match=r"pair 1 of 2: .* no difference to explain"):
        ll.patch(model, pairs=[(CLEAN, CLEAN), (CLEAN, CORRUPT)], metric=METRIC)
    with pytest.raises(BadText, match="there are no pairs"):
        ll.patch(model, pairs=[], metric=METRIC)
    with pytest.raises(BadText, match="pair 1 is not a pair"):
        ll.patch(model, pairs=["the cat"], metric=METRIC)
    with pytest.raises(BadSettings, match="pair 1 has no metric"):
        ll.patch(model, pairs=[(CLEAN, CORRUPT)])
    with pytest.raises(ModelRefused, match="mixture of experts"):
        ll.patch(tiny("mixtral"), CLEAN, CORRUPT, metric=METRIC, at="neuron")


def test_the_heat_map_has_a_rectangle_per_cell_and_no_script(model, tmp_path):
    for at, n in (("state", 24), ("head", 12)):
        cells = grid(model, at=at)
        html = cells._repr_html_()
        assert html.count("<title>") == n
        assert "<script" not in html
        Page(html)
    from layerleap.results.page import write_page

    page = write_page(tmp_path / "page.html", cells.head(), cells).read_text()
    assert "What carries the difference" in page


def test_a_page_says_whether_cells_ran_or_were_estimated(model):
    assert grid(model).head().lead.startswith("Each cell is patched alone")
    estimated = grid(model, method="gradient").head().lead
    assert "linear estimate from the gradient" in estimated


def test_edits_in_force_take_part_in_both_runs(model):
    with model.edit("L2.N3=4"):
        edited = grid(model)
    plain = grid(model)
    assert edited.clean != plain.clean
    assert not torch.equal(edited.shares, plain.shares)


IOI = (
    "When Mary and John went to the store, John gave a drink to",
    "When Mary and John went to the store, Mary gave a drink to",
)


@pytest.mark.real
def test_in_the_bundled_model_the_second_name_decides_until_heads_carry_it_to_the_end(smollm2):
    metric = ll.metrics.logit_difference(" Mary", " John")
    states = ll.patch(smollm2, *IOI, metric=metric, layers=[0, 5, 27, 30], progress=False)
    names, end = states.shares[:, 9], states.shares[:, -1]
    assert (names[:2] > 0.95).all()
    assert (names[2:].abs() < 0.2).all()
    assert (end[:2].abs() < 0.05).all()
    assert (end[2:] > 0.9).all()
    heads = ll.patch(smollm2, *IOI, metric=metric, at="head", method="gradient", progress=False)
    assert heads.correlation > 0.7


@pytest.mark.real
def test_an_answer_without_its_space_is_noted_as_in_an_attribution(smollm2):
    prompts = "The capital of France is", "The capital of Italy is"
    metrics = ll.metrics
    for metric in (metrics.logit_difference("Paris", " Rome"), metrics.log_probability("Paris")):
        cells = ll.patch(smollm2, *prompts, metric=metric, layers=[30], progress=False)
        assert list(cells.notes) == [
            "'Paris' has no space in front; ' Paris' is another token, and likelier here"
        ]
    pairs = [prompts, ("The capital of Spain is", "The capital of Italy is")]
    both = ll.patch(smollm2, pairs=pairs, metric=metric, layers=[30], progress=False)
    assert len([note for note in both.notes if "no space in front" in note]) == 1


@pytest.mark.real
def test_the_example_of_a_patch_by_hand_runs(smollm2, capsys):
    page = (Path(__file__).parents[3] / "docs" / "patching.md").read_text(encoding="utf8")
    example = page.partition("## By hand")[2].split("```")[1].removeprefix("python\n")
    exec(example, {"ll": ll, "model": smollm2})
    assert "Italy is" in capsys.readouterr().out


@pytest.mark.real
def test_in_the_bundled_model_a_capital_follows_its_country(smollm2):
    metric = ll.metrics.logit_difference(" Paris", " Rome")
    prompts = "The capital of France is", "The capital of Italy is"
    cells = ll.patch(smollm2, *prompts, metric=metric, layers=[0, 12, 30], progress=False)
    assert cells.tokens[3] == ("␣France", "␣Italy")
    assert cells.shares[:2, 3].min() > 0.95
    assert cells.shares[2, 4] == pytest.approx(1)
