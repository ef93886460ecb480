"""A text's strip of saturation layers: rows, frame, JSON, notebook and page."""

import json

import pytest
import torch
from rich.console import Console

from layerleap.errors import BadSettings, BadText
from layerleap.lens.lens import Lens
from layerleap.lens.readings import LensReadings, Readings
from layerleap.maps.fit import fit
from layerleap.results.colours import legend_layers, saturation_colour, text_colour
from layerleap.results.page import write_page
from pages import HOSTILE, Page
from tiny_models import sentences, tiny

TEXT = "the cat sat on the mat"


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def test_a_strip_has_a_row_per_position_and_rank(llama):
    strip = Lens(llama).saturation(TEXT)
    assert repr(strip) == "SaturationLayers(6 positions, ranks 1 to 5, layers 0 to 3, logit)"
    rows = strip.rows()
    assert [row["token"] for row in rows] == TEXT.split()
    assert [row["next"] for row in rows] == [*TEXT.split()[1:], None]
    for row in rows:
        assert [one["rank"] for one in row["ranks"]] == [1, 2, 3, 4, 5]
        for one in row["ranks"]:
            assert one["saturates"] == (one["layer"] < 3)
            assert one["is_next"] == (None if row["next"] is None else one["token"] == row["next"])
    found = json.loads(json.dumps(strip.to_dict(), allow_nan=False))
    assert found["saturation"] == rows
    assert (found["k"], found["n_layers"]) == (5, 3)


def test_its_top_tokens_are_those_that_the_lens_reads_at_the_last_layer(llama):
    readings = Lens(llama).read(TEXT)
    for row in Lens(llama).saturation(TEXT).rows():
        last = readings.at(row["position"])[-1]
        assert [one["id"] for one in row["ranks"]] == [one["id"] for one in last["top"]]
        for one in row["ranks"][:1]:  # the layer below, if there is one, says something else
            if one["layer"]:
                below = readings.at(row["position"])[one["layer"] - 1]
                assert below["top"][0]["id"] != one["id"]


def test_a_bank_adds_a_track_and_positions_can_be_chosen(llama):
    bank = fit(llama, sentences(40))
    strip = Lens(llama, bank).saturation(TEXT, positions=[-1, 0], k=2)
    assert list(strip.readings.tracks) == ["logit", "linear"]
    assert strip.readings.positions == [0, 5]
    frame = strip.to_pandas()
    assert len(frame) == 2 * 2 * 2
    assert list(frame.columns) == [
        "map",
        "position",
        "token",
        "rank",
        "rank_token",
        "layer",
        "saturates",
        "is_next",
    ]


def test_a_masked_model_is_read_at_its_masks():
    strip = Lens(tiny("bert")).saturation("the cat <mask> on the mat", k=3)
    assert len(strip.readings.positions) == 1
    assert strip.rows()[0]["next"] is None  # what it hides is not known


def test_what_cannot_be_read_is_refused(llama):
    with pytest.raises(BadText, match="empty"):
        Lens(llama).saturation("")
    with pytest.raises(BadSettings, match="62 ranks"):
        Lens(llama).saturation(TEXT, k=62)


def test_the_earlier_the_darker_and_never_has_no_colour():
    shades = [saturation_colour(layer, 30) for layer in range(30)]
    light = [sum(colours) for colours in shades]
    assert light == sorted(light)
    assert len(set(light)) == 30
    assert saturation_colour(30, 30) is None
    assert (text_colour(shades[0]), text_colour(shades[-1])) == ("#ffffff", "#111111")
    assert saturation_colour(0, 1) == shades[0]
    assert legend_layers(30)[0] == 0
    assert legend_layers(30)[-1] == 29
    assert legend_layers(2) == [0, 1]


def hostile():
    """Three ranks at two positions; tokens that are markup, and one that never settles."""
    words = [HOSTILE, "[red]x", "\n"]
    settled = torch.tensor([[0, 2, 4], [1, 4, 4]])
    final = torch.tensor([[0, 1, 2], [2, 1, 0]])
    layers = torch.arange(5)[:, None, None]
    # Below the layer where a rank settles, another token has it.
    ids = torch.where(layers >= settled, final, (final + 1) % 3)
    one = torch.zeros(5, 2)
    read = LensReadings(ids, torch.full(ids.shape, 0.3), one > 0, one, one)
    readings = Readings(words[:2], [0, 1], 4, {"logit": read}, words.__getitem__, following=[1, -1])
    return readings.saturation()


def test_a_page_is_self_contained_and_escapes_what_it_shows(tmp_path):
    strip = hostile()
    path = write_page(tmp_path / "strip.html", strip.head(HOSTILE, HOSTILE), strip)
    text = path.read_text(encoding="utf8")
    page = Page(text)
    assert page.all("script") == []
    assert "http://" not in text
    assert "https://" not in text
    assert HOSTILE in page.text
    assert page.text.count("4") >= 3  # the layers of those that never settle
    cells = [cell for cell in page.all("li") if "background" in cell.get("style", "")]
    assert len(cells) == 6
    assert [cell["style"] for cell in cells].count("background:transparent") == 3
    assert [cell.get("class") for cell in cells].count("next") == 1
    assert "only at the last layer" in cells[2]["title"]


def test_a_notebook_shows_the_same_strip():
    strip = hostile()
    assert strip._repr_html_().count("<li") == 2 + 6
    assert Page(strip._repr_html_()).all("script") == []


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_terminal_shows_layers_and_tokens_as_they_are(width):
    console = Console(width=width, record=True, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(hostile())
    assert all(len(line) <= width for line in console.export_text(clear=False).splitlines())
    said = capture.get()
    red, green, blue = saturation_colour(0, 4)
    assert f"48;2;{red};{green};{blue}m 0 " in said
    if width > 40:
        assert "[red]x" in said
    assert "keeps its rank from layer" in " ".join(said.split())
