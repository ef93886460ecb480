"""Natural ranges, against all coefficients of all texts at once."""

import pytest
import torch
from torch import Tensor

from concepts import indexed
from layerleap.act.edits import SetNeuron
from layerleap.errors import BadText, NotFinite
from layerleap.lens.vocabulary.ranges import BlockRanges, natural_ranges
from layerleap.models.discovery.trace import state_taken
from layerleap.models.hooks.forward import Tap, tapped
from layerleap.models.weights import feed_forward
from layerleap.stream.examples import Sampling, iter_examples
from tiny_models import sentences, tiny


def coefficients(model, texts, block: int, call: int = 0) -> Tensor:
    """The coefficients of one block, text by text, without the first position of each."""
    policy = "one" if model.kind == "masked-token" else "all"
    rows = []
    for example in iter_examples(model, texts, Sampling(positions=policy), side="both"):
        seen: list[Tensor] = []
        tap = Tap(see_input=lambda *at, to=seen: to.append(state_taken(*at)))
        with tapped(model.model, {feed_forward(model, block).module(model): tap}):
            model.capture(torch.tensor([example.ids]), layers=[model.n_layers])
        rows.append(seen[call].reshape(len(example.ids), -1)[1:])
    return torch.cat(rows)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "opt", "gpt_neox"])
def test_ranges_are_those_of_all_coefficients(name):
    model, texts = tiny(name), sentences(25)
    ffns = [feed_forward(model, block) for block in (1, 3)]
    found = natural_ranges(model, ffns, texts, n_texts=1000)
    assert found.keys() == {1, 3}
    for block, ranges in found.items():
        every = coefficients(model, texts, block).double()
        assert ranges.n == len(every) > 100
        table = torch.tensor(ranges.table(), dtype=torch.float64)
        expected = torch.stack(
            [
                every.amin(0),
                every.mean(0),
                every.amax(0),
                every.std(0, correction=0),
                (every > 0).double().mean(0),
            ],
            dim=1,
        )
        torch.testing.assert_close(table, expected, atol=1e-5, rtol=1e-5)


def test_a_shared_block_has_ranges_of_its_own_in_every_layer():
    model, texts = tiny("albert"), sentences(10)
    ffns = [feed_forward(model, block) for block in (1, 2, 3)]
    found = natural_ranges(model, ffns, texts, n_texts=1000)
    for block in (1, 2, 3):
        every = coefficients(model, texts, block, call=block - 1)
        highs = [row[2] for row in found[block].table()]
        assert highs == pytest.approx(every.amax(0).tolist(), abs=1e-5)
    assert found[1].table() != found[2].table()


def test_rows_may_come_in_any_portions():
    torch.manual_seed(0)
    rows = torch.randn(500, 7) * torch.logspace(-3, 3, 7) + 1000
    whole, parts = BlockRanges(7), BlockRanges(7)
    whole.add(rows)
    for part in rows.split([0, 1, 99, 400]):
        parts.add(part)
    torch.testing.assert_close(torch.tensor(parts.table()), torch.tensor(whole.table()))
    assert parts.n == 500


def test_the_first_texts_are_enough_and_progress_says_how_many():
    model, told = tiny("llama"), []
    found = natural_ranges(
        model,
        [feed_forward(model, 1)],
        sentences(50),
        n_texts=9,
        progress=lambda phase, done, total, unit="texts": told.append((phase, done, total)),
    )
    assert told[-1] == ("natural ranges", 9, 9)
    assert 9 < found[1].n < 9 * 128


def test_edits_in_force_are_left_out():
    model, texts = tiny("llama"), sentences(8)
    ffns = [feed_forward(model, 2)]
    plain = natural_ranges(model, ffns, texts, n_texts=20)[2].table()
    with model.edit(SetNeuron(2, 3, 77.0)):
        assert natural_ranges(model, ffns, texts, n_texts=20)[2].table() == plain
    with model.edit(SetNeuron(1, 3, 77.0)):
        assert natural_ranges(model, ffns, texts, n_texts=20)[2].table() == plain


def test_no_tap_stays_on_the_model():
    model = tiny("llama")
    natural_ranges(model, [feed_forward(model, 1)], sentences(3), n_texts=5)
    module = feed_forward(model, 1).module(model)
    assert "forward" not in vars(module)
    assert not module._forward_hooks


def test_text_without_two_tokens_is_refused():
    model = tiny("llama")
    with pytest.raises(BadText):
        natural_ranges(model, [feed_forward(model, 1)], ["cat"], n_texts=5)


def test_coefficients_that_are_not_finite_are_refused():
    model = tiny("llama")
    ffn = feed_forward(model, 2)
    with torch.no_grad():
        model.block(2).mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(NotFinite, match="coefficient of block 2"):
        natural_ranges(model, [ffn], sentences(3), n_texts=5)


def test_the_index_keeps_the_ranges(tmp_path):
    index = indexed(tmp_path / "index")
    model, texts = index.transformer, sentences(12)
    every = coefficients(model, texts, 2)[:, 7]
    natural = index.vector(2, 7).range
    assert natural.high == pytest.approx(every.max().item(), abs=1e-5)
    assert natural.low == pytest.approx(every.min().item(), abs=1e-5)
    assert natural.mean == pytest.approx(every.mean().item(), abs=1e-5)
    assert natural.std == pytest.approx(every.std(correction=0).item(), abs=1e-5)
    assert natural.positive == pytest.approx((every > 0).float().mean().item(), abs=1e-6)
    assert index.range(2, 7) == natural.to_dict()
    assert index.to_dict()["ranges"]["positions"] == len(every)
    assert indexed(tmp_path / "other", n_texts=0).range(2, 7) is None
