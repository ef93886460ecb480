"""Seconds: measured where they claim to be, and added up as rows run."""

import json
import math

import pytest
import torch

from families import build
from layerleap.act.exits import timing as clock_module
from layerleap.act.exits.timing import Timing, measure_timing
from layerleap.errors import BadSettings, WrongModel
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import LinearMap
from layerleap.models.transformer import Transformer
from tiny_models import tiny

CLOCK = Timing((10.0, 20.0, 30.0), 100.0, 5.0, (1.0, 2.0, 3.0, 0.0), context=8)


def bank_of(transformer: Transformer) -> ShortcutBank:
    d, last = transformer.d_model, transformer.n_layers
    maps = [LinearMap(src, last, weight=torch.eye(d)) for src in range(last)]
    return ShortcutBank(maps, model=transformer.identity.to_dict(), n_layers=last, d_model=d)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("llama", "cached"),
        ("gemma2", "cached"),
        ("bloom", "cached"),
        ("bert", "whole"),
        ("albert", "whole"),
    ],
)
def test_every_median_is_a_positive_time(name, mode):
    transformer = tiny(name)
    found = measure_timing(transformer, tokens=8, bank=bank_of(transformer), repeats=3)
    times = [*found.blocks, found.head, found.check, *found.maps[:-1]]
    assert all(0 < t < 60 and math.isfinite(t) for t in times)
    assert len(found.blocks) == transformer.n_layers
    assert found.maps[-1] == 0
    assert (found.mode, found.context, found.repeats) == (mode, 8, 3)
    assert json.loads(json.dumps(found.to_dict()))["head_in_blocks"] == found.head_in_blocks


def test_a_model_that_keeps_no_cache_runs_its_text_whole():
    """Each pass then sees all tokens, and with a cache a single one."""
    lengths = {}
    for name in ("llama", "bert"):
        transformer = tiny(name)
        seen = []
        block = transformer.model.get_submodule(transformer.blocks[0])
        block.register_forward_hook(lambda *call, seen=seen: seen.append(call[1][0].shape[1]))
        measure_timing(transformer, tokens=8, repeats=2, warm_up=1)
        lengths[name] = seen
    assert lengths == {"llama": [7, 1, 1, 1], "bert": [8, 8, 8]}


def test_the_median_of_the_repeats_is_taken_and_the_warm_up_left_out(monkeypatch):
    ticks = iter([100.0, 100.0, 3.0, 1.0, 2.0])  # two warm-up passes, then three that count
    per_call, now = {"step": 0.0, "calls": 0}, [0.0]
    real = clock_module._one_pass

    def one_pass(*args):
        per_call["step"] = next(ticks)
        return real(*args)

    def fake(_):
        now[0] += per_call["step"]
        per_call["calls"] += 1
        return now[0]

    monkeypatch.setattr(clock_module, "_one_pass", one_pass)
    monkeypatch.setattr(clock_module, "_now", fake)
    transformer = tiny("llama")
    found = measure_timing(transformer, tokens=4, bank=bank_of(transformer), repeats=3, warm_up=2)
    assert found.blocks == (2.0,) * 3
    assert (found.head, found.check, found.maps) == (2.0, 2.0, (2.0, 2.0, 2.0, 0.0))
    assert per_call["calls"] == 5 * 2 * (3 + 1 + 1 + 3)  # begin and end of each thing, once a pass
    assert found.spread == pytest.approx(0.5)  # quartiles 1.5 and 2.5 ticks around 2


def test_the_identity_takes_no_time():
    assert measure_timing(tiny("gpt2"), tokens=4, repeats=1).maps == (0.0,) * 4


def test_timing_leaves_no_hook_behind():
    transformer = tiny("llama")
    measure_timing(transformer, tokens=4, repeats=1)
    modules = transformer.model.modules()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def test_rows_pay_their_blocks_their_checks_and_one_answer():
    carried = CLOCK.by_layer((1, 2), carried=True).tolist()
    assert carried[1:] == [10 + 107, 30 + 107 + 108, 60 + 107 + 108 + 100]
    plain = CLOCK.by_layer((2,), carried=False).tolist()
    assert plain[2:] == [30 + 105, 60 + 105 + 100]
    assert CLOCK.by_layer((), carried=True)[-1] == CLOCK.full == 160


def test_a_rule_that_knows_pays_one_reading_at_the_exit():
    free = CLOCK.by_layer((1, 2), carried=True, reads=False).tolist()
    assert free[1:] == [10 + 107, 30 + 108, CLOCK.full]


def test_another_head_can_be_asked_about():
    assert CLOCK.by_layer((1,), carried=False, head=0.0).tolist()[1:] == [15, 35, 65]
    assert CLOCK.head_in_blocks == 5


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokens": 1}, "expected 2 to 64"),
        ({"tokens": 65}, "expected 2 to 64"),
        ({"repeats": 0}, "repeats"),
        ({"warm_up": -1}, "warm_up"),
    ],
)
def test_settings_without_meaning_are_refused(change, match):
    with pytest.raises(BadSettings, match=match):
        measure_timing(tiny("llama"), **change)


def test_speech_and_foreign_banks_are_refused():
    with pytest.raises(BadSettings, match="images"):
        measure_timing(Transformer.wrap(build("whisper"), name="whisper"))
    with pytest.raises(WrongModel):
        measure_timing(tiny("llama"), tokens=4, bank=bank_of(tiny("gpt2")))
    with pytest.raises(BadSettings, match="map costs"):
        Timing((1.0,), 1.0, 1.0, (0.0,), context=2)
