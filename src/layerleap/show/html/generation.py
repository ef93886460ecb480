"""`Generation` as HTML: every token on the colour of its exit layer, drafted ones underlined."""

import html
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerleap.act.decode.generate import Generation
from layerleap.errors import BadSettings
from layerleap.show.html.colours import exit_colour
from layerleap.show.html.page import styled, write_page


def generation_html(generation: Mapping[str, Any]) -> str:
    """The coloured text.

    Args:
        generation: what `Generation.to_dict` returns; studies store it in that form.
    """
    stats = generation["stats"]
    n_layers = stats["n_layers"]
    spans = []
    for token, layer, drafted in zip(
        _marked(generation["tokens"]), stats["layers"], stats["drafted"], strict=True
    ):
        title = f"layer {layer} of {n_layers}" + (", drafted" if drafted else "")
        line = "border-bottom:2px solid #555;" if drafted else ""
        spans.append(
            f'<span title="{title}" style="background:{exit_colour(layer, n_layers)};{line}">'
            f"{html.escape(token)}</span>"
        )
    # Without an early exit there are no colours to explain.
    scale = _scale(n_layers) if min(stats["layers"], default=n_layers) < n_layers else ""
    how = "; ".join(f"{key}: {value}" for key, value in generation.get("how", {}).items())
    lines = [f"{scale} {html.escape(generation['summary'])}.", html.escape(how)]
    return styled(
        "generation",
        f'<div class="text"><span class="prompt">{html.escape(generation["prompt"])}</span>'
        f'{"".join(spans)}</div><p class="legend">{"<br>".join(filter(None, lines))}</p>',
    )


def write_generation(generation: Generation, model: str, path: Path) -> Path:
    """Write a generated text as a standalone page and return its path."""
    stats = generation.stats
    is_early = min(stats.layers, default=stats.n_layers) < stats.n_layers
    lead = (
        "The warmer a token, the earlier it left the model; white ones ran through all layers. "
        "Hover over a token to see its layer."
        if is_early
        else "Every token ran through all layers."
    )
    drafted = " Underlined tokens were drafted, then verified." if any(stats.drafted) else ""
    return write_page(
        generation_html(generation.to_dict()),
        path,
        kicker="generated text",
        title=("What", model, "wrote"),
        facts=(
            f"{stats.n_layers} layers",
            f"{stats.tokens} tokens",
            *(f"{key}: {value}" for key, value in generation.how.items()),
        ),
        text=generation.prompt,
        lead=lead + drafted,
        heading="Where each token was read" if is_early else "Continuation",
    )


def live_display(first: Generation) -> Any:
    """A notebook output that shows `first` and can be updated, or None outside a notebook."""
    try:
        display = importlib.import_module("IPython.display").display
    except ImportError as error:
        raise BadSettings("live=True needs a notebook, and IPython is not installed") from error
    return display(first, display_id=True)


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


def _scale(n_layers: int) -> str:
    steps = dict.fromkeys(round(n_layers * part / 6) for part in range(1, 7))
    boxes = "".join(
        f'<span style="background:{exit_colour(layer, n_layers)};padding:0 6px">{layer}</span>'
        for layer in steps
    )
    return f'<span class="scale">{boxes}</span> layers;'
