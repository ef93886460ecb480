"""Patch grids: laws over every family that reads text, and references by plain hooks."""

import itertools

import pytest
import torch

from edit_cases import EXPERTS, wrapped
from families import ALL, MASKED_TOKEN, NEXT_TOKEN
from layerleap.act.patching.grid import patch
from layerleap.act.patching.places import Places
from layerleap.act.patching.result import rank_correlation
from layerleap.errors import ModelRefused

CLEAN, CORRUPT = [5, 9, 7, 12, 8, 6], [5, 9, 30, 12, 41, 6]
AT = ("state", "attn", "ffn", "head", "neuron")
READS_IDS = [name for name in ALL if name not in ("whisper", "vit", "deit", "dinov2")]


def difference(logits):
    return logits[:, 4] - logits[:, 1]


def prompts(name: str) -> tuple:
    if name in ("bart", "t5", "flan_t5"):
        return ([3, 4, 5], [*CLEAN, 2]), ([3, 4, 5], [*CORRUPT, 2])
    return CLEAN, CORRUPT


def grid(name: str, at: str = "state", **options):
    model = wrapped(name)
    clean, corrupt = prompts(name)
    if name in MASKED_TOKEN:
        with masked_at_the_end(model):
            return patch(model, clean, corrupt, metric=difference, at=at, progress=False, **options)
    return patch(model, clean, corrupt, metric=difference, at=at, progress=False, **options)


class masked_at_the_end:
    """A tokenizer whose mask token is the last token of both prompts."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.model.tokenizer = type(
            "Masked",
            (),
            {
                "mask_token_id": 6,
                "all_special_ids": [],
                "unk_token_id": 3,
                "__call__": lambda self, text, **_: {"input_ids": [20]},
                "decode": lambda self, ids: str(list(ids)),
            },
        )()

    def __exit__(self, *_):
        self.model.tokenizer = None


@pytest.mark.parametrize("name", READS_IDS)
def test_all_positions_of_the_first_layer_are_the_other_run_bit_for_bit(name):
    for how in ("denoise", "noise"):
        whole = grid(name, positions="all", how=how)
        assert whole.shares[0, 0] == 1.0
        assert whole.shares[-1, 0] == 1.0 or name in MASKED_TOKEN
        assert whole.columns == ["all positions"]


@pytest.mark.parametrize("name", NEXT_TOKEN)
def test_cells_outside_the_causal_cone_are_exactly_zero(name):
    cells = grid(name)
    n_layers = wrapped(name).n_layers
    assert cells.shares.shape == (n_layers + 1, 6)
    assert not cells.shares[:, :2].any()  # the prompts are the same up to there
    assert not cells.shares[n_layers, :5].any()  # nothing attends to them any more
    torch.testing.assert_close(cells.shares[n_layers, 5], torch.tensor(1.0).double())
    for at in ("attn", "ffn"):
        assert not grid(name, at).shares[-1, :5].any()


def reference(name: str, module, on_input: bool, change) -> float:
    """The metric of the corrupt prompt with a plain hook on one module."""
    model = wrapped(name)

    def before(_, args):
        return (change(args[0]), *args[1:])

    def after(_, args, output):
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    handle = (
        module.register_forward_pre_hook(before)
        if on_input
        else module.register_forward_hook(after)
    )
    try:
        with torch.no_grad():
            logits = model.model(input_ids=torch.tensor([CORRUPT])).logits[:, -1]
    finally:
        handle.remove()
    return float(difference(logits.double()))


@pytest.mark.parametrize("name", [name for name in NEXT_TOKEN if name not in EXPERTS])
def test_every_cell_is_what_a_plain_hook_gives(name):
    """One cell of each kind, in the middle of the model."""
    model = wrapped(name)
    for at in AT:
        try:
            places = Places.of(model, at, [2])
        except ModelRefused:
            continue
        cells = grid(name, at, layers=[2])
        values = places.values(model.capture([CLEAN], **places.what()))[2]
        if at == "state":
            module, side = model.block(2), "out"
        elif at == "head":
            from layerleap.models.weights.heads import heads

            own = heads(model, 2)
            module, side = model.model.get_submodule(own.outputs.path), "in"
        else:
            module, side = model.site_module(2, places.sites[2]), places.sites[2].side
        for column in (1, 2):
            by_unit = at in ("head", "neuron")
            unit, width = (column, values.shape[2]) if by_unit else (0, values.shape[2])
            rows = range(6) if by_unit else [column]

            def put(h, rows=rows, unit=unit, width=width, values=values):
                own = h.reshape(1, 6, -1).clone()
                for row in rows:
                    own[0, row, unit * width : (unit + 1) * width] = values[row, unit]
                return own.view_as(h)

            patched = reference(name, module, side == "in", put)
            share = (patched - cells.corrupt) / (cells.clean - cells.corrupt)
            # The grid computes its metric in float32.
            assert float(cells.shares[0, column]) == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bert", "albert", "opt_350m", "t5"])
def test_the_gradient_is_exact_in_the_limit_of_small_differences(name):
    """Between two nearly equal runs the metric is linear, so both methods agree."""
    model = wrapped(name)
    embedding = model.model.get_input_embeddings().weight
    before = embedding.detach().clone()
    with torch.no_grad():
        for a, b in ((7, 30), (8, 41)):  # the tokens that differ become alike
            embedding[b] = embedding[a] + 1e-3 * (embedding[b] - embedding[a])
    try:
        for at in ("state", "attn", "ffn", "head"):
            exact = grid(name, at, layers=[2, 3])
            linear = grid(name, at, layers=[2, 3], method="gradient", check=6)
            most = exact.shares.abs().max()
            assert (exact.shares - linear.shares).abs().max() < 0.05 * max(1, most)
            assert linear.passes > 4  # those of the exact cells count
            assert linear.checked_cells > 0
            assert "rank correlation" in linear.notes[0]
    finally:
        with torch.no_grad():
            embedding.copy_(before)
        model.refresh()


@pytest.mark.parametrize("name", MASKED_TOKEN)
def test_post_norm_encoders_can_be_patched(name):
    for at in ("state", "attn", "ffn", "head"):
        cells = grid(name, at)
        assert torch.isfinite(cells.shares).all()
        assert cells.shares.any()


def test_noise_and_denoise_are_each_others_runs_the_other_way_round():
    model = wrapped("llama")
    options = {"metric": difference, "progress": False}
    one = patch(model, CLEAN, CORRUPT, how="noise", **options)
    other = patch(model, CORRUPT, CLEAN, how="denoise", **options)
    assert torch.equal(one.shares, other.shares)


def test_results_do_not_depend_on_how_many_cells_run_at_once(monkeypatch):
    whole = grid("llama", "head")
    monkeypatch.setattr("layerleap.act.patching.grid.TOKENS", 1)
    alone = grid("llama", "head")
    torch.testing.assert_close(whole.shares, alone.shares, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "b", "rank"), [([1, 2, 3], [2, 4, 9], 1), ([1, 2, 3], [3, 2, 1], -1)]
)
def test_rank_correlations_of_orders(a, b, rank):
    assert rank_correlation(a, b) == pytest.approx(rank)
    assert rank_correlation(a, [1, 1, 1]) is None


def test_rank_correlation_is_that_of_scipy():
    from scipy import stats

    draw = torch.Generator().manual_seed(1)
    for _ in itertools.repeat(None, 5):
        a, b = torch.randint(0, 6, (2, 12), generator=draw).tolist()
        assert rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
