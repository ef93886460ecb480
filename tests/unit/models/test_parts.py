"""Maps of the parts of blocks: which there are, how they are fitted, how a bank keeps them."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from layerleap.errors import BadArtifact, BadSettings, ModelRefused, NotFinite, WrongModel
from layerleap.files import read_json
from layerleap.maps.bank import CONFIG, WEIGHTS, ShortcutBank
from layerleap.maps.fit import solve_bank
from layerleap.maps.linear import squared_error
from layerleap.models.discovery.parts import KINDS, BlockPart, block_parts, replaceable
from layerleap.models.discovery.sites import Site
from layerleap.models.transformer import Transformer
from layerleap.stats.collect import collect, merge
from layerleap.stats.fit_statistics import FitStatistics
from layerleap.stream.examples import Sampling, iter_batches, iter_examples
from tiny_models import sentences, tiny

TEXTS = sentences(60)
SAMPLING = Sampling(unit="document", held_out=0.0)
NORMS = {
    "gpt2": {"attn_norm", "ffn_norm"},
    "llama": {"attn_norm", "ffn_norm"},
    "gemma2": {"attn_norm", "attn_post", "ffn_norm", "ffn_post"},
    "olmo2": {"attn_post", "ffn_post"},
    "bert": {"attn_post", "ffn_post"},
    "gpt_neox": {"attn_norm", "ffn_norm"},
    "gptj": {"attn_norm"},  # one norm serves both parts
    "falcon": {"attn_norm"},
    "phi": {"attn_norm"},
    "cohere": {"attn_norm"},
    "mixtral": {"attn_norm", "ffn_norm"},
    "albert": {"attn_post", "ffn_post"},
}


@cache
def model(name: str = "llama") -> Transformer:
    return tiny(name)


@cache
def stats() -> FitStatistics:
    return run()


def run(**options) -> FitStatistics:
    return collect(model(), TEXTS, SAMPLING, **{"parts": True, "tokens_per_batch": 64, **options})


def with_anatomy(change) -> Transformer:
    """A model like the others, of which block 2 is said to be another."""
    changed = tiny("llama")
    anatomy = changed.anatomy
    changed.anatomy = (anatomy[0], change(anatomy[1]), anatomy[2])
    return changed


@pytest.mark.parametrize("name", NORMS)
def test_attention_ffn_and_every_norm_around_them_can_be_replaced(name):
    found = replaceable(model(name))
    assert list(found) == list(KINDS)
    blocks = range(1, model(name).n_layers + 1)
    assert found["attn"] == tuple(BlockPart(block, "attn") for block in blocks)
    assert found["ffn"] == tuple(BlockPart(block, "ffn") for block in blocks)
    assert sorted(found["norms"]) == sorted(BlockPart(b, p) for b in blocks for p in NORMS[name])


def test_parts_are_listed_block_after_block():
    listed = block_parts(model("gptj"), KINDS)
    assert listed == [[b, p] for b in (1, 2, 3) for p in ("attn", "attn_norm", "ffn")]
    assert block_parts(model(), ["ffn"]) == [[1, "ffn"], [2, "ffn"], [3, "ffn"]]


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(BadSettings, match="'heads'; expected one of 'attn', 'ffn', 'norms'"):
        replaceable(model(), ["heads"])
    with pytest.raises(BadSettings, match="the kind of parts is 'heads'; expected one of 'attn'"):
        run(parts=["heads"])


def test_unknown_parts_are_an_error_with_the_reason():
    unknown = with_anatomy(lambda _: "found 0 attention modules and 1 FFN matrices")
    with pytest.raises(ModelRefused, match=r"block 2 of .* not known \(found 0 attention modules"):
        replaceable(unknown)
    assert replaceable(unknown, []) == {}  # and nobody who asks for nothing is refused


def test_a_block_without_norms_has_no_norms_to_replace_but_has_the_rest():
    bare = with_anatomy(
        lambda a: replace(a, sites={k: v for k, v in a.sites.items() if "norm" not in k})
    )
    with pytest.raises(ModelRefused, match="block 2 of tiny-llama has no norms to replace"):
        replaceable(bare)
    assert len(replaceable(bare, ["attn", "ffn"])["attn"]) == 3


def test_a_part_of_another_width_is_refused():
    narrow = with_anatomy(
        lambda a: replace(a, sites={**a.sites, "ffn.in": Site("mlp.down_proj", "in")})
    )
    with pytest.raises(ModelRefused, match=r"ffn of block 2 .* takes 40 numbers and gives 24"):
        replaceable(narrow)
    assert len(replaceable(narrow, ["attn", "norms"])["attn"]) == 3


def test_parts_come_from_the_same_pass_and_leave_the_layers_as_they_were(monkeypatch):
    passes = []
    see = Transformer.capture
    monkeypatch.setattr(Transformer, "capture", lambda *a, **k: passes.append(k) or see(*a, **k))
    without = run(parts=False)
    alone = len(passes)
    found = run()
    assert len(passes) == 2 * alone + 1  # and one more over a probe, for the widths
    ours, theirs = found.fit.tensors(), without.fit.tensors()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert without.parts is None
    assert without.about["parts"] is None
    assert found.parts.n == found.fit.n
    assert found.about["parts"] == block_parts(model(), KINDS)


def rows_of(couple: BlockPart) -> tuple[torch.Tensor, torch.Tensor]:
    """What enters and what leaves a part, at the rows that were fitted on."""
    found = ([], [])
    for batch in iter_batches(
        model(), iter_examples(model(), TEXTS, SAMPLING), tokens_per_batch=64
    ):
        seen = model().capture(batch.inputs, layers=[], sites=couple.sites, keep=batch.keep)
        for side, site in zip(found, couple.sites, strict=True):
            side.append(seen.sites[site].double())
    return torch.cat(found[0]), torch.cat(found[1])


@pytest.mark.parametrize(
    "couple", [BlockPart(1, "attn"), BlockPart(2, "ffn_norm"), BlockPart(3, "ffn")]
)
def test_each_map_is_the_least_squares_of_what_enters_and_leaves_its_part(couple):
    bank, (x, y) = solve_bank(stats()), rows_of(couple)
    found = bank.parts[couple.block, couple.part]
    wanted = torch.linalg.lstsq(x, y).solution
    assert (found.src, found.dst) == (couple.block - 1, couple.block)
    torch.testing.assert_close(found.weight.double(), wanted, rtol=1e-4, atol=1e-5)
    fit = bank.part_fits[couple.block, couple.part]
    assert (fit.src, fit.dst, fit.part, fit.rows) == (found.src, found.dst, couple.part, len(x))


def test_no_map_of_a_part_is_worse_than_nothing_on_its_own_rows():
    moments, bank = stats().parts, solve_bank(stats())
    for place, couple in enumerate(stats().block_parts):
        weight = bank.parts[couple.block, couple.part].weight
        error = squared_error(moments, 2 * place, 2 * place + 1, weight, None)
        nothing = moments.squares(2 * place + 1)
        assert (error <= nothing * (1 + 1e-9)).all()
        assert error.sum() < nothing.sum()


def test_options_of_the_fit_hold_for_parts_too():
    bank = solve_bank(stats(), intercept=True, ridge=0.1, rank=3)
    assert all(m.bias is not None and m.rank == 24 for m in bank.parts.values())
    assert {fit.ridge for fit in bank.part_fits.values()} == {0.1}


def test_rows_held_back_do_not_enter_and_parts_then_have_no_penalty():
    found = run(choose_ridge=True)
    assert found.ridge_rows.n > 0
    assert found.parts.n == found.fit.n
    bank = solve_bank(found, ridge="auto")
    assert {fit.ridge for fit in bank.part_fits.values()} == {0.0}
    assert len(bank.part_fits) == len(bank.parts) == 12


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path):
    path, told = tmp_path / "run.safetensors", []

    def stop(*_):
        told.append(1)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=path, progress=stop)
    resumed, whole = run(checkpoint=path), stats()
    for name, moments in whole.sets.items():
        ours, theirs = resumed.sets[name].tensors(), moments.tensors()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert list(whole.sets) == ["fit", "parts"]
    with pytest.raises(WrongModel, match=r"different settings \(parts\)"):
        run(checkpoint=path, parts=["attn"])


def test_shards_add_up_to_the_whole(tmp_path):
    for which in (0, 1):
        run(shard=(which, 2)).save(tmp_path / f"{which}")
    merged, whole = merge([tmp_path / "0", tmp_path / "1"]).parts, stats().parts
    assert merged.n == whole.n
    for ours, theirs in zip(merged.cross, whole.cross, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert merged.names[:2] == ["attn.in of block 1", "attn.out of block 1"]


def test_statistics_that_do_not_say_which_parts_they_hold_are_refused(tmp_path):
    for said in (None, [[1, "attn"]], [[1]], "attn"):
        odd = FitStatistics(
            stats().fit, None, {**stats().about, "parts": said}, parts=stats().parts
        )
        odd.save(tmp_path / "odd")
        message = r"odd (holds moments of shape .* for \d+ parts|lists its parts)"
        with pytest.raises(BadArtifact, match=message):
            FitStatistics.load(tmp_path / "odd")


def test_a_broken_part_is_named():
    broken = tiny("llama")
    found = FitStatistics.empty(broken, "final", {"parts": block_parts(broken, KINDS)})
    rows = [torch.zeros(2, 24) for _ in range(24)]
    rows[5][1, 3] = torch.nan
    with pytest.raises(NotFinite, match=r"at ffn.out of block 1"):
        found.parts.add(rows)


def test_a_saved_bank_comes_back_with_its_parts(tmp_path):
    bank = solve_bank(stats(), intercept=True)
    bank.save_pretrained(tmp_path / "bank")
    found = ShortcutBank.from_pretrained(tmp_path / "bank")
    assert found.parts.keys() == bank.parts.keys()
    assert found.maps.keys() == bank.maps.keys()
    for key, part in bank.parts.items():
        assert (found.parts[key].src, found.parts[key].dst) == (part.src, part.dst)
        for name, value in part.tensors().items():
            assert torch.equal(found.parts[key].tensors()[name], value)
    assert (found.fits, found.part_fits) == (bank.fits, bank.part_fits)
    assert "part.3.ffn.weight" in load_file(tmp_path / "bank" / WEIGHTS)


def test_a_bank_without_parts_is_saved_as_before(tmp_path):
    solve_bank(run(parts=False)).save_pretrained(tmp_path / "bank")
    config = read_json(tmp_path / "bank" / CONFIG)
    assert not [fit for fit in config["fits"] if "part" in fit]
    assert ShortcutBank.from_pretrained(tmp_path / "bank").parts == {}


def test_the_card_says_in_one_line_which_parts_there_are():
    [line] = [line for line in solve_bank(stats()).card().splitlines() if "parts of blocks" in line]
    assert "12 maps" in line
    assert "(attn, attn_norm, ffn, ffn_norm)" in line
    few = solve_bank(collect(model(), TEXTS[:2], SAMPLING, parts=["ffn"]))
    assert "3 of their fits are rank-deficient" in few.card()
    assert "parts of blocks" not in solve_bank(run(parts=False)).card()


def test_parts_go_to_the_device_of_their_block():
    bank = solve_bank(stats())
    moved = bank.to({0: "cpu", 1: "cpu", 2: "meta", 3: "cpu"})
    devices = {key: m.weight.device.type for key, m in moved.parts.items()}
    assert {block for (block, _), device in devices.items() if device == "meta"} == {2}
    assert moved.part_fits == bank.part_fits
    assert bank.to(lambda _: "cpu") is bank
