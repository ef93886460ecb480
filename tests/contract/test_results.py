"""Laws that every result obeys: uniform JSON, frames of all tables, 80 columns, escaped HTML."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from rich.cells import cell_len

import layerleap as ll
from layerleap.lens.vocabulary.search import Match, Matches
from layerleap.lens.vocabulary.tokens import TokenLabel
from layerleap.results.base import Result
from pages import HOSTILE, Page
from tiny_models import WORDS, sentences, tiny

TEXT = "the cat sat on the mat"
SAMPLING = ll.Sampling(unit="document", positions="all")


@cache
def model():
    wrapped = tiny("llama")
    wrapped.identity = replace(wrapped.identity, name=HOSTILE)
    return wrapped


@cache
def bank():
    return ll.fit(model(), sentences(40), SAMPLING, progress=False)


@cache
def other():
    tuned = tiny("llama")
    with torch.no_grad():
        tuned.model.model.layers[2].mlp.down_proj.weight[:, 4] += 0.1
        tuned.model.model.layers[1].self_attn.v_proj.weight[:8] += 0.1
    return tuned


@cache
def direction():
    words = [f"the {word}" for word in WORDS[:8]]
    return ll.direction(model(), words, sentences(8), progress=False)


def matches():
    bad = TokenLabel(3, HOSTILE, HOSTILE, "text")
    found = Match(1, 2, 0.5, "promoted", (bad,), (bad,) * 5, (bad,) * 5, partial=True)
    return Matches(HOSTILE, [found, found], ["xylophone"], {}, {})


MAKE = {
    "Readings": lambda: ll.read(model(), TEXT, bank=bank()),
    "SaturationLayers": lambda: ll.read(model(), TEXT, bank=bank()).saturation(),
    "Evaluation": lambda: ll.evaluate(model(), bank(), sentences(20, 1), progress=False),
    "DominantNeurons": lambda: ll.neurons(model()).dominant(TEXT),
    "Matches": matches,
    "ParameterReading": lambda: ll.weights(model()).read("L2.N3"),
    "Pairs": lambda: ll.weights(model()).pairs("L2.H1", top=9, progress=False),
    "HeadTable": lambda: ll.weights(model()).heads(sample=30, k=20, progress=False),
    "Alignment": lambda: ll.align(model(), other(), kinds=["ffn.value"], progress=False),
    "Difference": lambda: ll.diff(model(), other(), progress=False),
    "Attribution": lambda: ll.attribute(model(), TEXT, by="head"),
    "Attention": lambda: ll.attention(model(), TEXT),
    "HeadPatterns": lambda: ll.heads(model(), n_texts=2, n_tokens=5),
    "StrongestHeads": lambda: ll.heads(model(), n_texts=2, n_tokens=5).of("induction"),
    "Patchscope": lambda: ll.patchscope(model(), TEXT, progress=False),
    "PatchGrid": lambda: ll.patch(
        model(),
        TEXT,
        "the dog sat on the mat",
        metric=ll.metrics.logit_difference("moon", "river"),
        progress=False,
    ),
    "Direction": lambda: direction(),
    "SteeringCost": lambda: ll.steering_cost(
        model(), direction(), text=sentences(8), n_texts=6, progress=False
    ),
    "Effect": lambda: ll.effect(model(), TEXT, ["L2.N3=5"]),
    "Generation": lambda: ll.generate(model(), TEXT, max_new_tokens=5),
    "LawResults": lambda: ll.check(model()),
    "FineTuned": lambda: ll.finetune(
        model(), sentences(30), steps=2, max_tokens=16, progress=False
    ),
    "InContext": lambda: ll.learning.in_context(
        model(),
        [(f"the {word}", "big" if n % 2 else "small") for n, word in enumerate(WORDS[:16])],
        shots=(0, 1),
        seeds=(0,),
        queries=4,
    ),
    "Tuned": lambda: ll.tune(
        model(), bank(), sentences(60), SAMPLING, evaluate=False, max_states=200, progress=False
    ),
}


@cache
def made(name):
    return MAKE[name]()


def test_every_kind_of_result_is_here():
    kinds, open_kinds = set(), [Result]
    for name in MAKE:
        made(name)
    while open_kinds:
        below = open_kinds.pop().__subclasses__()
        open_kinds += below
        kinds |= {kind.__name__ for kind in below if kind.__module__.startswith("layerleap.")}
    assert kinds == set(MAKE)


@pytest.mark.parametrize("name", MAKE)
def test_json_holds_every_table_and_the_notes(name):
    result = made(name)
    assert type(result).__name__ == name
    written = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert {table.key for table in result.TABLES} | {"notes"} <= set(written)
    assert written["notes"] == list(result.notes)
    for table in result.TABLES:
        assert len(written[table.key]) == len(list(table.rows(result)))


@pytest.mark.parametrize("name", MAKE)
def test_every_table_becomes_a_data_frame_of_plain_values(name):
    result = made(name)
    for table in result.TABLES:
        frame = result.to_pandas(table.key)
        assert len(frame) == len(list((table.lines or table.rows)(result)))
    first = result.to_pandas()
    assert len(first) > 0
    assert not any(isinstance(value, dict | list) for value in first.to_numpy().flatten())


@pytest.mark.parametrize("name", [name for name in MAKE if name != "Generation"])
def test_what_is_printed_fits_80_columns_and_has_the_notes(name):
    text = str(made(name))
    assert max(map(cell_len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert all(" ".join(note.split()) in words for note in made(name).notes)
    assert len(text.splitlines()) > 4


@pytest.mark.parametrize("name", MAKE)
def test_its_short_form_is_one_line_and_what_limits_it(name):
    first, *notes = repr(made(name)).splitlines()
    assert first.startswith(f"{name}(")
    if name not in ("FineTuned", "Tuned"):  # which have tensors to summarise
        assert first == made(name).short()
        assert notes == [f"  note: {note}" for note in made(name).notes]


@pytest.mark.parametrize("name", MAKE)
def test_its_html_is_well_formed_escaped_and_needs_nothing_else(name):
    html = made(name)._repr_html_()
    page = Page(html)
    assert HOSTILE not in html
    assert page.all("script") == page.all("img") == page.all("link") == []
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert all(note in page.text for note in made(name).notes)
