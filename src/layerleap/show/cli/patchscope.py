"""`layerleap patchscope`: a state in words."""

from typing import Annotated

from typer import Option

from layerleap.errors import BadSettings
from layerleap.show.cli import preflight
from layerleap.show.cli.options import Bank, Html, Json, Loading, Model, Prompt
from layerleap.show.cli.preflight import Arguments, Check
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, show, write_html


@Check
def _layer(layer: int, arguments: Arguments) -> None:
    """The layer exists."""
    arguments.model.check_layer(layer)


@Check
def _mapped(kind: str, arguments: Arguments) -> None:
    """A linear map has a bank and a layer to go to."""
    if kind == "linear" and None in (arguments.values["bank"], arguments.values["target_layer"]):
        raise BadSettings("--map linear needs --bank and --target-layer")


def patchscope(
    model: Model,
    text: Prompt,
    position: Annotated[
        int, Option(help="The token whose state is read, negative from the end.")
    ] = -1,
    layer: Annotated[
        list[int] | None, Option(help="The layer of the state; repeat it. All by default."), _layer
    ] = None,
    target: Annotated[
        str | None,
        Option(
            help="The prompt that the state goes into, in place of {}. By default, one that "
            "repeats words."
        ),
    ] = None,
    target_layer: Annotated[
        int | None,
        Option(help="The layer at which the state goes in. By default, the one it comes from."),
        _layer,
    ] = None,
    map: Annotated[
        str,
        Option(help="'linear' takes the state to --target-layer by a map of --bank first."),
        preflight.choice("map", ("none", "linear")),
        _mapped,
    ] = "none",
    bank: Bank = None,
    tokens: Annotated[
        int,
        Option("--tokens", "-n", help="How many tokens to write."),
        preflight.at_least("tokens", 1),
    ] = 5,
    html: Html = None,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Put a state of MODEL into words: what it writes with the state in another prompt.

    The state of one token goes into a target prompt, layer by layer, and the model writes on. The
    default target repeats words, so the state is read as a token; another one may ask for a
    description.

    Examples:
      layerleap patchscope smollm2 "My favourite animal is the elephant"

      layerleap patchscope smollm2 "I saw the elephant" --target "Rome: a city; {}:"
    """
    with clean_errors():
        import layerleap

        transformer = loading.load(model)
        with TerminalProgress() as progress:
            scope = layerleap.patchscope(
                transformer,
                text,
                position,
                layer or None,
                target=target,
                target_layer=target_layer,
                map=map,  # type: ignore[arg-type]
                bank=bank,
                n_tokens=tokens,
                progress=progress,
            )
        write_html(html, lambda: scope.head(transformer.identity.name, text), scope)
        show(scope, json=json)
