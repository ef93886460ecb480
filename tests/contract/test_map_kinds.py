"""A kind of map from outside the package is saved, loaded, read, evaluated, drawn and debugged."""

from dataclasses import dataclass

import pytest
import torch

import layerleap as ll
from layerleap.act.debug.debugger import Debugger
from layerleap.errors import BadArtifact, BadSettings
from layerleap.maps import IdentityMap, LinearMap, LowRankMap, Map, TunedMap, Tuning, register_kind
from layerleap.maps.kinds import KINDS, check_lens, kind_named, leading_kind, lens_title
from layerleap.stats.collect import collect
from tiny_models import sentences, tiny

TEXTS = sentences(60)
SHORT = Tuning(start="logit", max_rows=64, rows_per_step=32, check_every=1)


# --- the kind ------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False, repr=False)
class Scaling(Map):
    """Each coordinate of h[src] times a number."""

    kind = "scaling"
    title = "coordinates scaled"

    scale: torch.Tensor

    def apply(self, h, tensors):
        return h * tensors["scale"]


def fitted(moments, src):
    last = moments.n_layers
    scale = moments.xy(src, last).diagonal() / moments.squares(src)
    return Scaling(src, last, scale.float())


# -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def registered():
    register_kind(Scaling)
    yield
    KINDS.pop("scaling", None)


@pytest.fixture
def bank():
    model = tiny("llama")
    moments = collect(model, TEXTS).fit
    maps = [fitted(moments, src) for src in range(model.n_layers)]
    return ll.ShortcutBank(
        maps, model=model.identity.to_dict(), n_layers=model.n_layers, d_model=model.d_model
    )


def test_it_is_saved_and_loaded_bit_for_bit(bank, tmp_path):
    loaded = ll.ShortcutBank.from_pretrained(bank.save_pretrained(tmp_path / "bank"))
    assert {type(one) for one in loaded.maps.values()} == {Scaling}
    assert loaded.maps.keys() == bank.maps.keys()
    for pair, one in bank.maps.items():
        assert torch.equal(loaded.maps[pair].scale, one.scale)
    assert (loaded.kind, loaded.digest()) == ("scaling", bank.digest())
    assert "# Coordinates scaled for" in loaded.card()


def test_a_bank_of_a_kind_that_is_not_registered_is_refused(bank, tmp_path):
    folder = bank.save_pretrained(tmp_path / "bank")
    KINDS.pop("scaling")
    expected = "kind of map is 'scaling'; expected one of 'logit', 'linear', 'low-rank', 'tuned'"
    with pytest.raises(BadSettings, match=expected):
        ll.ShortcutBank.from_pretrained(folder)


def test_it_reads_and_is_called_by_its_name(bank):
    model, ids = tiny("llama"), [3, 4, 5]
    readings = ll.read(model, ids, bank=bank)
    assert list(readings.tracks) == ["logit", "scaling"]
    states = model.capture({"input_ids": torch.tensor([ids])}).states
    for layer in range(model.n_layers):
        scale = 1 if layer == model.n_layers else bank.maps[layer, model.n_layers].scale
        logits = model.logits(states[layer].reshape(3, -1) * scale)
        assert torch.equal(readings.tracks["scaling"].ids[layer, :, 0], logits.argmax(-1))
    assert "coordinates scaled" in readings._repr_html_()


def test_it_is_evaluated_and_has_its_title_on_the_page(bank):
    scores = ll.evaluate(tiny("llama"), bank, TEXTS, progress=False)
    assert scores.maps == ["logit", "scaling"]
    r2 = {
        (row["map"], row["layer"]): row["value"] for row in scores.scores if row["metric"] == "r2"
    }
    assert r2["scaling", 2] > r2["logit", 2]
    assert "coordinates scaled" in scores._repr_html_()


def test_the_debugger_lists_it_and_reads_through_it(bank):
    debugger = Debugger(tiny("llama"), bank=bank)
    assert debugger.describe()["lenses"] == [
        {"name": "logit", "title": "logit lens"},
        {"name": "scaling", "title": "coordinates scaled"},
    ]
    frames = list(debugger.trace([3, 4, 5], lens="scaling"))
    assert frames[0]["lens"] == "scaling"
    with pytest.raises(BadSettings, match="'linear'; expected one of 'logit', 'scaling'"):
        list(debugger.trace([3, 4, 5], lens="linear"))


def test_it_costs_and_is_refused_where_a_matrix_is_needed(bank):
    model = tiny("llama")
    assert bank[0, model.n_layers].flops == 0  # no matrix
    with pytest.raises(BadSettings, match="a map of the kind 'scaling' is not a matrix"):
        ll.tune(model, bank, TEXTS)
    tuned = ll.tune(model, bank, TEXTS, tuning=SHORT, evaluate=False, progress=False).bank
    assert {one.kind for one in tuned.maps.values()} == {"tuned"}


# --- the kinds of the package -------------------------------------------------------------------


@pytest.mark.parametrize(
    "one",
    [
        IdentityMap(0, 1),
        LinearMap(0, 1, torch.randn(5, 5)),
        LowRankMap(0, 1, torch.randn(5, 2), torch.randn(2, 5), torch.randn(5)),
        TunedMap(0, 1, torch.randn(5, 5), torch.randn(5)),
    ],
    ids=lambda one: one.kind,
)
def test_a_map_is_what_its_tensors_and_its_matrix_say(one):
    h = torch.randn(4, 5, dtype=torch.float64)
    again = type(one).from_tensors(0, 1, one.tensors())
    assert (type(again), again.src, again.dst) == (kind_named(one.kind), 0, 1)
    assert torch.equal(again(h), one(h))
    weight, bias = one.affine(5)
    torch.testing.assert_close(one(h), h @ weight + (0 if bias is None else bias))
    assert one.flops == 2 * sum(t.numel() for t in one.tensors().values() if t.dim() == 2)


def test_two_kinds_cannot_have_one_name():
    register_kind(Scaling)  # the same class twice is no conflict
    twice = type("Other", (Scaling,), {})
    with pytest.raises(BadSettings, match="a kind of map called 'scaling' already: Scaling"):
        register_kind(twice)


def test_names_of_the_paper_are_answered_with_ours():
    with pytest.raises(BadSettings, match="lens 'mat' does not exist; did you mean 'linear'"):
        check_lens("mat", ["logit", "linear"])
    with pytest.raises(BadSettings, match="did you mean 'logit'"):
        check_lens("id", ["logit"])
    with pytest.raises(BadSettings, match="lens is 'mat'; expected one of 'logit'"):
        check_lens("mat", ["logit"])


def test_a_bank_of_several_kinds_is_called_by_the_one_registered_last():
    assert leading_kind(["linear", "tuned", "low-rank"]) == "tuned"
    assert leading_kind([]) == "logit"
    assert (lens_title("tuned"), lens_title("my bank")) == ("tuned lens", "my bank")


def test_a_tensor_that_the_kind_does_not_know_is_refused(bank, tmp_path):
    from layerleap.maps.artifact import BANK

    config = bank._config()
    BANK.save(tmp_path / "bank", config, {**bank._tensors(), "0-3.bias": torch.ones(24)}, "")
    with pytest.raises(BadArtifact, match="does not describe a bank"):
        ll.ShortcutBank.from_pretrained(tmp_path / "bank")
