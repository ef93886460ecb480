"""One sweep over the logits of all layers keeps what a grid shows."""

from contextlib import ExitStack

import pytest
import torch

from layerleap.lens import lens as sweep_module
from layerleap.lens.lens import Lens, Sweep
from layerleap.lens.metrics import Reference
from layerleap.maps.fit import fit
from layerleap.models.hooks.forward import Tap, tapped
from tiny_models import sentences, tiny


def swept(logits, k, *, parts=1):
    """A track of logits (layer, row, d_vocab), given to the sweep with the last layer first."""
    sweep = Sweep(logits.shape[1], k)
    for some in logits.roll(1, 0).chunk(parts):
        sweep.add(some.flatten(0, 1))
    return sweep.track()


@pytest.fixture
def head_rows():
    """Counts how many rows each call of a model's head gets, from when it is called on."""
    with ExitStack() as stack:

        def watch(model):
            given, head = [], model.model.lm_head
            see = Tap(see_input=lambda args, _: given.append(args[0][..., 0].numel()))
            stack.enter_context(tapped(model.model, {head: see}))
            return given

        yield watch


def test_equal_logits_are_listed_in_order_of_id():
    track = swept(torch.tensor([[[1.0, 2, 2, 1, 2]]]), 4)
    assert track.ids.tolist() == [[[1, 2, 4, 0]]]
    assert track.probs[0, 0, 0] == track.probs[0, 0, 2]


@pytest.mark.parametrize("k", [1, 2, 3, 6, 7])
def test_the_best_tokens_are_those_of_a_stable_sort_however_many_are_tied(k):
    torch.manual_seed(0)
    logits = torch.randint(0, 4, (2, 200, 7)).float()
    logits[:, :50] = torch.randn(2, 50, 7)
    track = swept(logits, k)
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    assert torch.equal(track.ids, expected)
    torch.testing.assert_close(track.probs, logits.softmax(-1).gather(-1, expected))
    assert torch.equal(track.agrees, expected[..., 0] == expected[-1:, :, 0])


@pytest.mark.parametrize("parts", [1, 3, 6])
def test_a_sweep_says_what_a_comparison_layer_by_layer_says(parts, monkeypatch):
    monkeypatch.setattr(sweep_module, "COLUMNS", 64)  # several products, and a rest
    logits = torch.randn(6, 3, 1000, generator=torch.Generator().manual_seed(1)) * 4
    track, reference = swept(logits, 5, parts=parts), Reference(logits[-1])
    for layer, reading in enumerate(logits):
        compared = reference.compare(reading)
        assert torch.equal(track.ids[layer, :, 0], compared.top)
        assert torch.equal(track.agrees[layer], compared.rank == 0)
        torch.testing.assert_close(track.kl[layer], compared.kl, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(track.surprisal[layer], compared.surprisal)
    assert track.kl[-1].eq(0).all()  # the model beside itself, exactly


def test_divergences_are_as_exact_as_float32_allows():
    """49,152 terms added one by one would lose a digit more."""
    logits = torch.randn(8, 2, 49_152, generator=torch.Generator().manual_seed(2)) * 3 + 30
    exact = logits.double().log_softmax(-1)
    kl = (exact[-1].exp() * (exact[-1] - exact)).sum(-1)
    assert (swept(logits, 1).kl - kl).abs().max() < 5e-5  # rounding of sums near 40


@pytest.mark.parametrize("budget", [61 * 4, 61 * 60, 2**23])
def test_reading_runs_the_tail_once_per_layer_and_row_in_as_few_products_as_the_budget_allows(
    budget, head_rows, monkeypatch
):
    model = tiny("llama")
    bank = fit(model, sentences(40), intercept=True)
    monkeypatch.setattr("layerleap.memory.LOGITS", budget)
    given = head_rows(model)
    readings = Lens(model, bank).read(list(range(5, 17)))
    rows, most = 12 * (model.n_layers + 1), budget // model.d_vocab
    assert sum(given) == len(readings.tracks) * rows
    assert max(given) <= most
    assert len(given) == 2 or most < rows


def test_nothing_is_read_again_when_a_reading_is_printed_or_shown(head_rows):
    model = tiny("llama")
    given = head_rows(model)
    readings = Lens(model).read(list(range(5, 17)))
    assert given
    given.clear()
    shown = f"{readings!r}{readings._repr_html_()}", readings.to_dict(), readings.to_pandas()
    assert all(len(one) for one in shown)
    assert not given
