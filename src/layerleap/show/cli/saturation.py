"""`layerleap saturation`: the layer from which each top token of a prediction stays."""

from pathlib import Path
from typing import Annotated

import typer

from layerleap.show.cli.options import Json, Loading, Model, Prompt
from layerleap.show.cli.terminal import clean_errors, out, print_json, tell


def saturation(
    model: Model,
    text: Prompt,
    ranks: Annotated[int, typer.Option("--ranks", "-k", help="How many ranks.")] = 5,
    position: Annotated[
        list[int] | None,
        typer.Option(
            help="Which tokens to show, negative from the end; repeat it. All by default."
        ),
    ] = None,
    bank: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub name of a bank to read through as well as the logit lens."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the strip as a page.")] = None,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Show the layer from which each of MODEL's top tokens keeps its rank.

    One line per token of the text: the most likely next tokens, best first, each with its
    saturation layer. Darker is earlier; no colour means that only the last layer put it there.

    Example: layerleap saturation smollm2 "The capital of France is" --html strip.html
    """
    with clean_errors():
        from layerleap import Lens, ShortcutBank

        transformer = loading.load(model)
        lens = Lens(transformer, None if bank is None else ShortcutBank.from_pretrained(bank))
        strip = lens.saturation(text, positions=position or None, k=ranks)
        if html:
            from layerleap.show.html.strip import write_strip

            tell(f"the strip: {write_strip(strip, transformer.identity.name, text, html)}")
        if json:
            print_json(strip.to_dict())
            return
        from layerleap.show.cli.strips import strip_table

        out.print(strip_table(strip))
