"""The first token waits for nothing that can come later, and nothing is prepared twice."""

import gc
import json
import weakref
from collections import Counter

import pytest
import torch

from contract_bank import bank_of
from families import build
from layerleap.act.decode import draft_table, pass_cost, prepared
from layerleap.act.decode.decoder import decoder
from layerleap.act.decode.pass_cost import PassCost, cost_of_passes
from layerleap.act.exits.rules import Fixed
from layerleap.models.cursor import packed as packing, verify
from layerleap.models.cursor.packed import Packed
from layerleap.models.discovery import laws
from layerleap.models.transformer import Transformer

PROMPT = torch.tensor([[5, 9, 7, 5, 9, 7, 8, 5, 9]])
LONG, SHORT = 55, 12  # new tokens; this tiny model takes 64 in all
MEASURED = PassCost((1, 2, 32), (0.1, 0.11, 0.2), (), 8, 3)


def fresh(dtype=torch.float32, **changes):
    model = build("llama", **changes).to(dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return Transformer.wrap(model)


def write(transformer, custom, n=LONG, ids=PROMPT, **options):
    options = {"max_new_tokens": n, "do_sample": False, **options}
    return transformer.model.generate(ids, custom_generate=custom, **options)


@pytest.fixture
def calls(empty_cache, monkeypatch):
    """How often something slow was done, in a process that just began, with an empty cache."""
    counted = Counter()

    def count(owner, name, instead=None):
        real = instead or getattr(owner, name)

        def counting(*args, **kwargs):
            counted[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    monkeypatch.setattr(pass_cost, "_KNOWN", {})
    monkeypatch.setattr(pass_cost, "WORTH_A_FILE", 0.0)
    monkeypatch.setattr(Packed, "_seconds", lambda self, n, *, plain=False: 2.0 if plain else 1.0)
    count(Packed, "_fastest")
    count(pass_cost, "measure_passes", lambda *_, **__: MEASURED)
    count(verify, "_find_axes")
    count(laws, "require")
    count(prepared, "keeps_bits")
    count(draft_table, "_narrowed")
    return counted


class Order:
    """A streamer that notes what had been done when each token came."""

    def __init__(self, counted):
        self.counted, self.seen = counted, []

    def put(self, _):
        self.seen.append(Counter(self.counted))

    def end(self):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", [None, Fixed(2)], ids=str)
def test_the_first_token_waits_for_no_packing_and_no_measurement(calls, dtype, rule):
    transformer = fresh(dtype)
    custom = decoder(bank_of(transformer), rule=rule, transformer=transformer)
    for _ in range(2):
        order = Order(calls)
        write(transformer, custom, stream_to=order)
        assert order.seen[1] == {"require": 1, "_find_axes": 1}  # with the first token
    assert order.seen[-1]["_fastest"] == 1  # by now it was worth it
    assert order.seen[-1]["measure_passes"] == (rule is None)
    assert custom.stats[0].preparation.after == 1


def test_a_short_text_is_written_without_copies_and_without_measurements(calls):
    transformer = fresh()
    custom = decoder(bank_of(transformer), transformer=transformer)
    write(transformer, custom, SHORT)
    assert calls == {"require": 1, "_find_axes": 1}
    assert transformer.model not in packing._PACKED
    assert custom.stats[0].preparation is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_second_decoder_neither_packs_nor_measures_nor_verifies_again(calls, dtype):
    transformer = fresh(dtype)
    bank = bank_of(transformer)
    made = [decoder(bank) for _ in range(3)]  # not told how the model is wrapped
    for custom in made:
        write(transformer, custom)
    assert calls["require"] == 1  # when it was loaded
    assert calls["_find_axes"] == calls["_fastest"] == calls["measure_passes"] == 1
    assert calls["keeps_bits"] == (dtype == torch.bfloat16)
    assert calls["_narrowed"] == (dtype == torch.float32)
    assert [custom.stats[0].preparation is None for custom in made] == [True, False, False]
    assert [one.stats[0].preparation.cost for one in made[1:]] == ["measured", "this process"]
    assert made[2].stats[0].to_dict()["preparation"]["after"] == 1
    assert "the cost of passes measured" in str(made[1].stats[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.lm_head.weight.data.mul_(2),
        lambda model: model.bfloat16(),
        lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(torch.randn(61, 24))),
        lambda model: model.set_attn_implementation("eager"),
    ],
    ids=["weights", "cast", "head", "attention"],
)
def test_a_model_that_changed_is_verified_again(calls, change):
    transformer = fresh()
    before = calls["require"]
    assert Transformer.of(transformer.model).blocks == transformer.blocks
    assert calls["require"] == before
    change(transformer.model)
    Transformer.of(transformer.model)
    assert calls["require"] == before + 1


def test_what_is_remembered_of_a_model_does_not_keep_it_alive(calls):
    transformer = fresh()
    for _ in range(2):
        write(transformer, decoder(bank_of(transformer)))
    model = weakref.ref(transformer.model)
    del transformer
    gc.collect()
    assert model() is None


def test_a_later_process_measures_nothing(calls, monkeypatch):
    transformer = fresh()
    assert cost_of_passes(transformer) == (MEASURED, "measured")
    assert cost_of_passes(transformer) == (MEASURED, "this process")
    monkeypatch.setattr(pass_cost, "_KNOWN", {})
    assert cost_of_passes(fresh()) == (MEASURED, "cache")
    assert calls["measure_passes"] == 1


def other_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    return fresh(), {}


def other_machine(monkeypatch):
    known = pass_cost.machine()
    monkeypatch.setattr(pass_cost, "machine", lambda: {**known, "processor": "another one"})
    return fresh(), {}


def other_torch(monkeypatch):
    known = pass_cost.machine()
    monkeypatch.setattr(pass_cost, "machine", lambda: {**known, "torch": "99.0"})
    return fresh(), {}


OTHERS = {
    "threads": other_threads,
    "machine": other_machine,
    "torch": other_torch,
    "model": lambda _: (fresh(num_hidden_layers=4), {}),
    "dtype": lambda _: (fresh(torch.bfloat16), {}),
    "attention": lambda _: (fresh(), {"rowwise": True}),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_costs_measured_under_other_circumstances_are_not_used(calls, monkeypatch, other):
    cost_of_passes(fresh())
    transformer, options = other(monkeypatch)
    assert cost_of_passes(transformer, **options)[1] == "measured"
    assert calls["measure_passes"] == 2


def test_packed_weights_have_costs_of_their_own(calls):
    transformer = fresh()
    cost_of_passes(transformer)
    assert cost_of_passes(transformer, Packed.of(transformer.model))[1] == "measured"


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "",
        lambda _: '{"about": {}',
        lambda _: "[1, 2]",
        lambda found: json.dumps({"cost": found["cost"]}),
        lambda found: json.dumps({**found, "about": {**found["about"], "threads": 99}}),
        lambda found: json.dumps({**found, "cost": {**found["cost"], "seconds": [1, -1, 2]}}),
        lambda found: json.dumps({**found, "cost": {**found["cost"], "seconds": ["x", 1, 2]}}),
        lambda found: json.dumps({**found, "cost": {**found["cost"], "seconds": [1, 2]}}),
        lambda found: json.dumps({**found, "cost": {**found["cost"], "seconds": [1, 2, 1e999]}}),
        lambda found: json.dumps({**found, "cost": None}),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_and_written_anew(
    calls, empty_cache, monkeypatch, damage
):
    transformer = fresh()
    cost_of_passes(transformer)
    [file] = (empty_cache / "costs").iterdir()
    whole = file.read_text()
    file.write_text(damage(json.loads(whole)))
    monkeypatch.setattr(pass_cost, "_KNOWN", {})
    assert cost_of_passes(transformer) == (MEASURED, "measured")
    assert file.read_text() == whole


def test_a_cache_that_cannot_be_written_is_no_error(calls, empty_cache):
    empty_cache.write_text("a file where a folder should be")
    assert cost_of_passes(fresh()) == (MEASURED, "measured")


ABSURD = {
    "free": PassCost((1, 32), (1.0, 1e-9)),
    "never": PassCost((1, 2), (1e-9, 1e9)),
    "falling": PassCost((1, 2, 4, 32), (100.0, 3.0, 1e-6, 1e-12)),
    "jagged": PassCost((1, 2, 3, 5, 7, 32), (1.0, 90.0, 0.1, 50.0, 0.01, 7.0)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cost", ABSURD.values(), ids=ABSURD)
def test_absurd_costs_in_the_cache_never_change_the_text(calls, monkeypatch, cost, dtype):
    """They decide how many drafts are tried. Greedy and sampled texts stay those of `generate`."""
    transformer = fresh(dtype)
    monkeypatch.setattr(pass_cost, "_read", lambda *_: cost)
    monkeypatch.setattr(prepared, "SOON", 0)
    monkeypatch.setattr(prepared, "WORTH", 0)
    for options in ({}, {"do_sample": True, "temperature": 0.7}):
        texts = []
        for custom in (None, decoder(bank_of(transformer), transformer=transformer)):
            torch.manual_seed(3)
            texts.append(write(transformer, custom, 24, **options))
        assert torch.equal(*texts)
        assert custom.stats[0].preparation.cost in ("cache", "this process")
        assert custom.stats[0].exactness == "exact"
    assert calls["measure_passes"] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("texts", [1, 3])
def test_a_text_goes_on_as_it_began_when_weights_are_packed_on_the_way(
    calls, monkeypatch, dtype, texts
):
    monkeypatch.setattr(prepared, "WORTH", 40)
    transformer = fresh(dtype)
    ids = torch.cat([PROMPT, PROMPT.flip(1), PROMPT + 20])[:texts]
    custom = decoder(bank_of(transformer), transformer=transformer)
    assert torch.equal(write(transformer, custom, ids=ids), write(transformer, None, ids=ids))
    after = custom.stats[0].preparation.after  # whole passes; a batch is prepared for at once
    assert after == 0 if texts > 1 else prepared.SOON <= after < 2 * prepared.SOON
    assert all(one.exactness == "exact" for one in custom.stats)
    assert sum(one.drafts for one in custom.stats) > 0
    assert torch.is_grad_enabled()  # as before the call


def test_a_text_is_called_rounded_once_bits_turn_out_not_to_be_kept(calls, monkeypatch):
    monkeypatch.setattr(prepared, "keeps_bits", lambda *_: False)
    monkeypatch.setattr(prepared, "WORTH", 40)
    transformer = fresh(torch.bfloat16)
    custom = decoder(bank_of(transformer), transformer=transformer)
    write(transformer, custom, SHORT)
    assert (custom.stats[0].exactness, custom.stats[0].drafts) == ("exact", 0)  # one by one
    write(transformer, custom)
    assert custom.stats[0].exactness == "rounded"
    assert custom.stats[0].preparation.cost == "measured"


def test_given_costs_are_used_from_the_second_token_on(calls):
    transformer = fresh()
    custom = decoder(bank_of(transformer), transformer=transformer, cost=MEASURED)
    write(transformer, custom, SHORT)
    assert (custom.stats[0].preparation.after, custom.stats[0].preparation.cost) == (1, "given")
    assert calls["measure_passes"] == 0
