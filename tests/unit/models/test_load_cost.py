"""Loading a model runs few passes over it, looks at each weight once, and keeps no second copy."""

import functools
import gc
import subprocess
import sys

import pytest
import torch

import layerleap as ll
from families import build
from layerleap.models import identity
from layerleap.models.transformer import Transformer
from tiny_models import tiny, tokenizer

SPARE = ("pandas", "scipy", "sklearn", "matplotlib", "datasets", "fastapi")


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_model_is_wrapped_and_checked_in_eight_passes(name, monkeypatch):
    # Two find out what it is. The laws need a plain pass before and one after they read, one whose
    # states are read, one of another length, and a text alone and beside a longer one.
    model, calls = build(name), []
    forward = type(model).forward

    @functools.wraps(forward)  # not a hook: the model is wrapped without those of its user
    def counted(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counted)
    Transformer.wrap(model, tokenizer())
    assert 0 < len(calls) <= 8


def test_a_model_that_repeats_itself_is_told_from_a_random_one():
    model = build("llama")
    norm = model.model.norm
    forward = norm.forward
    norm.forward = lambda h: forward(h) * (1 + 1e-3 * torch.rand(()))
    verdicts = {verdict.law: verdict for verdict in ll.check(model)}
    assert verdicts["deterministic"].status == "fails"
    assert "two passes differ by" in verdicts["deterministic"].detail
    assert verdicts["clean"].status == "holds"  # what is random is not the fault of reading


def test_a_model_that_reading_changes_is_not_clean():
    model = build("llama")
    count = []

    def changes_after_the_first_call(module, args, output):
        count.append(1)
        return output + (1e-2 if len(count) > 1 else 0)

    model.lm_head.register_forward_hook(changes_after_the_first_call)
    wrapped = Transformer.wrap(build("llama"), check=False)
    wrapped.model = model
    verdicts = {verdict.law: verdict for verdict in ll.check(wrapped)}
    assert verdicts["deterministic"].status == "holds"
    assert verdicts["clean"].status == "fails"


def test_every_weight_is_looked_at_once_when_a_model_is_loaded(tmp_path, monkeypatch):
    tiny("llama").model.save_pretrained(tmp_path)
    looked, sample = [], identity._sample
    monkeypatch.setattr(identity, "_sample", lambda weight: looked.append(1) or sample(weight))
    model = ll.load(tmp_path)
    assert len(looked) == len(model.model.state_dict())
    ll.Lens(model).read([5, 6, 7])
    assert len(looked) == len(model.model.state_dict())


def test_a_loaded_model_holds_its_weights_once_and_little_else(tmp_path):
    """In tensors that are alive; `benchmarks/load_time.py` measures memory."""
    build("llama", hidden_size=64, intermediate_size=256, num_hidden_layers=6).save_pretrained(
        tmp_path
    )
    gc.collect()
    before = storages()
    model = ll.load(tmp_path)
    gc.collect()
    new = {place: size for place, size in storages().items() if place not in before}
    weights = sum(p.numel() * p.element_size() for p in model.model.parameters())
    assert weights <= sum(new.values()) < 1.1 * weights


def storages():
    """Bytes of every tensor alive, by place; views and tied weights count once."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    kept = [one.untyped_storage() for one in tensors if one.device.type == "cpu"]
    return {one.data_ptr(): one.nbytes() for one in kept}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_a_weight_of_many_parts_has_the_sum_of_all_its_values(dtype, monkeypatch):
    monkeypatch.setattr(identity, "PART", 100)
    weight = (torch.randn(50, 21, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    bits = weight.to(torch.bfloat16).view(torch.int16) if weight.is_floating_point() else weight
    total = torch.frombuffer(bytearray(identity._sample(weight)[-8:]), dtype=torch.int64)
    assert int(total) == int(bits.flatten().to(torch.int64).sum())


@pytest.mark.parametrize(
    ("verbs", "theirs"),
    [("ll.load", ()), ("ll.load; ll.read", ("scipy",))],  # a class of transformers loads scipy
)
def test_importing_layerleap_and_its_verbs_loads_no_library_that_they_do_not_need(verbs, theirs):
    code = (
        f"import layerleap as ll; {verbs}; import sys; "
        f"print(*[name for name in {SPARE!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= set(theirs)
