"""`DominantNeurons` as HTML: block by block, the predictions and the strongest sub-updates."""

import html

from layerleap.lens.vocabulary.neurons import BlockReading, DominantNeurons, Stage, SubUpdate
from layerleap.show.html.page import notes_html, styled

STAGES = {"before": "before the block", "attention": "after attention", "ffn": "after the FFN"}
HEAD = (
    "<thead><tr><th>neuron</th><th>coefficient</th><th>strength</th><th>share</th><th>promotes</th>"
    "<th>suppresses</th></tr></thead>"
)
LEGEND = (
    '<p class="legend">Neurons that add most to the residual stream at this position. Share: the '
    "part of the FFN's output that a neuron explains. A negative coefficient promotes the tokens "
    "that the vector suppresses.</p>"
)


def neurons_html(neurons: DominantNeurons) -> str:
    """One table per block, the last block first."""
    token = html.escape(neurons.tokens[neurons.position].label)
    title = f"<h3>Position {neurons.position}, <code>{token}</code></h3>"
    blocks = "".join(map(_block, reversed(neurons.blocks)))
    notes = notes_html(neurons.notes)
    return styled("neurons", f"{title}{LEGEND}{notes}{_strongest(neurons)}{blocks}")


def _strongest(neurons: DominantNeurons) -> str:
    """The strongest sub-updates of all blocks in one table; below it, blocks can be opened."""
    if not (rows := "".join(map(_update, neurons.strongest()))):
        return ""
    return f"<table><caption>Strongest of all blocks</caption>{HEAD}<tbody>{rows}</tbody></table>"


def _block(block: BlockReading) -> str:
    stages = "".join(map(_stage, block.stages))
    reasons = "".join(f"<p>{html.escape(reason)}</p>" for reason in block.missing.values())
    rows = "".join(map(_update, block.updates))
    if rows:
        rest = f"{block.rest_share:.0%} by the other neurons"
        bias = f", {block.bias_share:.0%} by the bias" if block.bias_share else ""
        rows = (
            f"<table>{HEAD}<tbody>{rows}</tbody></table>"
            f"<p>{block.shown_share:.0%} explained by these, {rest}{bias}.</p>"
        )
    return (
        f"<details><summary>Block {block.block}</summary><table>{stages}</table>{rows}{reasons}"
        "</details>"
    )


def _stage(stage: Stage) -> str:
    cells = "".join(
        f"<td>{html.escape(one.token.label)} {one.prob:.0%}{_climbed(one.climbed)}</td>"
        for one in stage.top[:6]
    )
    return f"<tr><th>{STAGES[stage.where]}</th>{cells}</tr>"


def _climbed(ranks: int | None) -> str:
    if not ranks:
        return ""
    return f" &#9650;{ranks}" if ranks > 0 else f" &#9660;{-ranks}"


def _update(update: SubUpdate) -> str:
    ends = (
        html.escape(" ".join(scored.token.label for scored in end))
        for end in (update.promotes, update.suppresses)
    )
    values = (
        update.name,
        f"{update.coefficient:+.3g}",
        f"{update.strength:.3g}",
        f"{update.share:.1%}",
        *ends,
    )
    return f"<tr>{''.join(f'<td>{value}</td>' for value in values)}</tr>"
