"""The top of the page: what the study is about, its few numbers, and the summary picture."""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.study import Page, percent
from layerleap_papers.jump_to_conclusions.curves import LENSES, both, half_layers, token_of

PAGE = Page(__file__)
COMPARED = ("mat", "id")


def about(result: StudyResult) -> Iterator[str]:
    """What is measured, and how to read the figures."""
    return PAGE.about(result, token=token_of(result))


def tiles(result: StudyResult) -> Iterator[study.Tile]:
    """Agreement and R2 half-way, and from where on half of the predictions agree."""
    last = result.model["n_layers"]
    middle = last // 2
    shares = [own[middle] for own in both(result, "precision@1")]
    yield study.Tile(
        f"Agreement after {middle} of {last} layers",
        tuple((name, percent(s, 1), s) for name, s in zip(COMPARED, shares, strict=True)),
    )
    half = {name: layer for name, layer in half_layers(result).items() if layer is not None}
    if len(half) == len(COMPARED):
        yield study.Tile(
            "Agreement of at least half from",
            tuple((name, f"layer {layer}", layer / last) for name, layer in half.items()),
        )
    r2 = {row["map"]: row["r2"] for row in result.rows("r2", src=middle, dst=last)}
    if all(r2.get(name) is not None for name in COMPARED):
        yield study.Tile(
            f"R\u00b2 from layer {middle} to layer {last}",
            tuple(
                (name, f"{r2[name]:.2f}".replace("-", "\u2212"), min(max(r2[name], 0.0), 1.0))
                for name in COMPARED
            ),
        )


def _title(result: StudyResult) -> str:
    name, last = result.model["name"], result.model["n_layers"]
    name = name if len(name) <= 40 else f"{name[:39]}\u2026"
    mat, plain = (own[last // 2] for own in both(result, "precision@1"))
    return (
        f"After {last // 2} of {last} layers, a linear shortcut predicts {name}'s "
        f"{token_of(result)}\n{percent(mat)} of the time, the logit lens {percent(plain)} of the "
        "time"
    )


def _arrow(result: StudyResult) -> tuple[float, float, float, str] | None:
    """From where the logit lens reaches one half back to where shortcuts do."""
    half, last = half_layers(result), result.model["n_layers"]
    early, late = half["mat"], half["id"]
    if early is None or late is None or late - early < max(2, last / 10):
        return None  # never reached, or too short to draw
    return late, early, 0.5, f"half, {late - early} layers earlier"


PICTURE = study.Picture(
    _title,
    ("precision", "r2"),
    panels=("Precision@1", LENSES["mat"].label),
    lines=COMPARED,
    arrow=_arrow,
)
