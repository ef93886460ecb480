"""`layerleap attribute`, `attention` and `heads`: which parts and heads make an answer."""

from pathlib import Path
from typing import Annotated, Any

import typer

import layerleap
from layerleap.errors import BadSettings
from layerleap.models.facts import check_number
from layerleap.show.cli import preflight
from layerleap.show.cli.options import Html, Json, Loading, Model, Prompt, Text
from layerleap.show.cli.preflight import Arguments, Check
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, show, tell

LEADS = {
    "attribution": "Hover over a bar for its value.",
    "attention": "The darker a cell, the larger its value.",
    "heads": "The darker a cell, the more of its attention a head pays to the pattern.",
}
Position = Annotated[int | None, typer.Option(help="Which token; negative from the end.")]
Target = Annotated[
    str | None, typer.Option(help="What an encoder-decoder writes for TEXT; this is what is read.")
]

LAYER = Check(lambda number, typed: typed.model.check_layer(number))
BLOCK = Check(lambda number, typed: typed.model.check_block(number))


def _check_head(head: int, typed: Arguments) -> None:
    """The head exists in the block that is named, if one is."""
    block, count = typed.values["block"], typed.model.n_heads
    where = "this model" if block is None else f"block {block}"
    check_number("head", head, 0, None if count is None else count - 1, where)


HEAD = Check(_check_head)


def attribute(
    model: Model,
    text: Prompt,
    token: Annotated[
        str | None, typer.Option(help="Attribute this token; by default the model's answer.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Subtract the logit of this token, or the mean of several; repeat it. "
            "'vocabulary' is the mean of all logits."
        ),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            help="part (attention and FFN), head, neuron, or source (head by source position)."
        ),
        preflight.choice("by", ("part", "head", "neuron", "source")),
    ] = "part",
    position: Position = None,
    layer: Annotated[
        int | None,
        typer.Option(help="Attribute what a lens reads at this layer."),
        LAYER,
    ] = None,
    bank: Annotated[
        str | None,
        typer.Option(help="Bank to read that layer through; the logit lens without it."),
        Check(preflight.bank),
    ] = None,
    top: Annotated[
        int, typer.Option(help="How many neurons have rows."), preflight.at_least("top", 0)
    ] = 20,
    total: Annotated[
        bool, typer.Option("--total", help="Also remove each component and run on.")
    ] = False,
    reference: Text = None,
    target: Target = None,
    html: Html = None,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Show what each part of MODEL adds to the logit of a token, directly.

    All rows add up to the logit. With --total also what is lost if a component's mean over --text
    is put in its place: later components may make up for it.

    Examples:
      layerleap attribute smollm2 "The capital of France is"

      layerleap attribute smollm2 "Rome is in" --token " Italy" --by head
    """
    with clean_errors():
        transformer = loading.load(model)
        given = _given(transformer, text, target)
        others: Any = against[0] if against and len(against) == 1 else against or None
        with TerminalProgress() as progress:
            result = layerleap.attribute(
                transformer,
                given,
                token,
                others,
                position,
                by,  # type: ignore[arg-type]  # checked there
                layer=layer,
                bank=bank,
                top=top,
                total=total,
                text=reference,
                progress=progress,
            )
        _show(result, transformer, "attribution", text, html, json)


def attention(
    model: Model,
    text: Prompt,
    block: Annotated[int | None, typer.Option(help="Only this block, from 1."), BLOCK] = None,
    head: Annotated[int | None, typer.Option(help="Only this head, from 0."), HEAD] = None,
    position: Position = None,
    target: Target = None,
    html: Html = None,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Show which tokens the heads of MODEL attend to, with any attention implementation.

    For each head: entropy, distance, and the share of the first token, plain and weighted by the
    size of what the head would write. Patterns themselves are on the page (--html).

    Example: layerleap attention smollm2 "The capital of France is" --block 24 --html heads.html
    """
    with clean_errors():
        transformer = loading.load(model)
        given = _given(transformer, text, target)
        result = layerleap.attention(transformer, given, block, head, position=position)
        _show(result, transformer, "attention", text, html, json)


def heads(
    model: Model, html: Html = None, loading: Loading = Loading(), json: Json = False
) -> None:
    """Score all heads of MODEL on named patterns: previous, first, duplicate, induction.

    The probe is random tokens, written twice: only looking back can tell what follows.

    Example: layerleap heads smollm2
    """
    with clean_errors():
        transformer = loading.load(model)
        _show(layerleap.heads(transformer), transformer, "heads", "", html, json)


def _given(transformer: Any, text: str, target: str | None) -> Any:
    """What the model reads: a text, or a pair if it is an encoder-decoder."""
    is_pair = transformer.model.config.is_encoder_decoder
    name = transformer.identity.name
    if is_pair and target is None:
        raise BadSettings(f"{name} is an encoder-decoder; say what it writes for TEXT by --target")
    if target is not None and not is_pair:
        raise BadSettings(f"{name} is not an encoder-decoder; leave out --target")
    return (text, target) if is_pair else text


def _show(
    result: Any, transformer: Any, kicker: str, text: str, html: Path | None, json: bool
) -> None:
    if html is not None:
        from layerleap.results.head import PageHead
        from layerleap.results.page import write_page

        title, lead = ("Inside", transformer.identity.name, ""), LEADS[kicker]
        head = PageHead(kicker, title, (result.headline(),), kicker.capitalize(), lead, text)
        tell(f"as a page: {write_page(html, head, result)}")
    show(result, json=json)
