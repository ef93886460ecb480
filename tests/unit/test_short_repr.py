"""Objects that hold tensors print a line, not their numbers."""

from dataclasses import dataclass

import torch

from layerleap.maps.linear import LinearMap
from layerleap.short_repr import ShortRepr, short_repr


def test_a_map_prints_its_shapes():
    linear = LinearMap(2, 5, weight=torch.zeros(64, 64), bias=torch.zeros(64))
    assert repr(linear) == "LinearMap(src=2, dst=5, weight=<64 x 64 float32>, bias=<64 float32>)"


def test_tables_print_their_size_and_few_entries_are_listed():
    @dataclass(repr=False)
    class Result(ShortRepr):
        rows: list[int]
        by_lens: dict[str, torch.Tensor]
        note: str

    actual = repr(Result(list(range(1000)), {"id": torch.ones(3)}, "x" * 1000))
    assert (
        actual == f"Result(rows=<1000 items>, by_lens={{'id': <3 float32>}}, note='{'x' * 56}...)"
    )
    assert short_repr({key: 1 for key in range(9)}) == "<9 entries>"
    assert short_repr((1, "a")) == "[1, 'a']"


def test_what_a_pass_captured_prints_its_shapes():
    from tiny_models import tiny

    model = tiny("llama")
    captured = model.capture(model.tokenizer("the cat", return_tensors="pt"))
    assert repr(captured).startswith("Capture(states={0: <1 x 2 x 24 float32>, 1: ")
    assert len(repr(captured)) < 200
