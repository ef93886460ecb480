"""Generated text with every token on the colour of its exit layer, drafted ones underlined."""

from collections.abc import Mapping, Sequence
from typing import Any

from layerleap.results.colours import exit_colour


def coloured(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the template `generation`.

    Args:
        generation: what `Generation.to_dict` returns; studies store it in that form.
    """
    stats = generation["stats"]
    last, layers = stats["n_layers"], stats["layers"]
    tokens = zip(_marked(generation["tokens"]), layers, stats["drafted"], strict=True)
    # Without an early exit there are no colours to explain.
    is_early = min(layers, default=last) < last
    steps = dict.fromkeys(round(last * part / 6) for part in range(1, 7)) if is_early else ()
    return {
        "prompt": generation["prompt"],
        "tokens": [
            {"text": text, "layer": layer, "drafted": drafted, "colour": exit_colour(layer, last)}
            for text, layer, drafted in tokens
        ],
        "n_layers": last,
        "scale": [(step, exit_colour(step, last)) for step in steps],
        "summary": generation["summary"],
        "how": "; ".join(f"{key}: {value}" for key, value in generation.get("how", {}).items()),
    }


def coloured_html(generation: Mapping[str, Any]) -> str:
    """The coloured text as HTML."""
    from layerleap.results.page import boxed

    values = {"notes": (), "grids": (), "legend": "", "link": None}
    return boxed("generation", "generation", **values, **coloured(generation))


def _marked(tokens: Sequence[str]) -> list[str]:
    """The tokens with line ends made visible, so that their colour is.

    Only the last of several line ends in a row ends the line: a model that leaves too early may
    write nothing else.
    """
    text = "".join(tokens)
    marked, place = [], 0
    for token in tokens:
        shown = ""
        for character in token:
            place += 1
            is_last = text[place : place + 1] != "\n"
            shown += ("\u23ce\n" if is_last else "\u23ce") if character == "\n" else character
        marked.append(shown)
    return marked
