"""Colours for layers, the same on pages and in the terminal."""

from colorsys import hls_to_rgb

# From early to late, after ColorBrewer's Blues: one hue, so that it works without colour as well.
BLUES = ((8, 48, 107), (33, 113, 181), (107, 174, 214), (222, 235, 247))
HIGH, LOW = (42, 120, 214), (214, 96, 42)  # of positive and negative values


def exit_colour(layer: int, n_layers: int) -> str:
    """The colour of an exit layer, from warm (left early) to white (ran through all layers)."""
    depth = layer / n_layers
    rgb = hls_to_rgb((20 + 30 * depth) / 360, 0.62 + 0.38 * depth, 0.9)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def saturation_colour(layer: int, n_layers: int) -> tuple[int, int, int] | None:
    """Red, green and blue for a saturation layer, darker = earlier; None if it never saturated."""
    if layer >= n_layers:
        return None
    place = layer / max(1, n_layers - 1) * (len(BLUES) - 1)
    low = min(int(place), len(BLUES) - 2)
    weight = place - low
    red, green, blue = (
        round(a + weight * (b - a)) for a, b in zip(BLUES[low], BLUES[low + 1], strict=True)
    )
    return red, green, blue


def signed_colour(share: float) -> tuple[int, int, int]:
    """Red, green and blue for a share between -1 and 1: blue if positive, orange if negative."""
    red, green, blue = HIGH if share >= 0 else LOW
    depth = 0.75 * abs(share)  # of the colour on white
    return tuple(round(255 + depth * (part - 255)) for part in (red, green, blue))  # type: ignore[return-value]


def text_colour(background: tuple[int, int, int]) -> str:
    """White or black, whichever is readable on the background."""
    red, green, blue = background
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#111111"


def legend_layers(n_layers: int) -> list[int]:
    """A few evenly spaced layers below the last, for a legend."""
    steps = min(7, n_layers)
    return sorted({round(step * (n_layers - 1) / max(1, steps - 1)) for step in range(steps)})
