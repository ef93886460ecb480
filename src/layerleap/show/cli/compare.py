"""`layerleap align` and `diff`: compare two models by what their weights say about tokens."""

from typing import Annotated, Any

from typer import Argument, Option

import layerleap
from layerleap.lens.vocabulary.index_settings import Inverse
from layerleap.models.facts import KINDS
from layerleap.show.cli import options, preflight
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, show, tell, write_html

Kind = Annotated[
    list[str] | None,
    Option(
        help="Kind of vector: ffn.key, ffn.gate, ffn.up, ffn.value, attn.q, attn.k, attn.v or "
        "attn.o; repeat it for several. All by default."
    ),
    preflight.choice("kind", KINDS),
]


def align(
    a: options.Model,
    b: Annotated[str, Argument(help="A model with the same vocabulary."), preflight.model],
    kind: Kind = None,
    rows: Annotated[
        int | None, Option(help="Compare only this many random vectors of A per block and kind.")
    ] = None,
    seed: Annotated[int, Option(help="Decides which vectors --rows takes.")] = 0,
    fold: Annotated[bool, Option("--fold", help="Multiply the vectors by the norms.")] = False,
    no_control: Annotated[
        bool, Option("--no-control", help="Leave out the control in raw coordinates.")
    ] = False,
    html: options.Html = None,
    loading: options.Loading = options.Loading(),
    json: options.Json = False,
) -> None:
    """Match the blocks of A to those of B by what their vectors say about tokens.

    Each vector of an FFN or of attention is read as scores of all tokens. Blocks are compared by
    the correlations of these scores and matched one to one. The two models need one vocabulary, but
    not one width. The control compares raw coordinates.

    Example: layerleap align small-lm small-lm-2 --kind ffn.value --html alignment.html
    """
    with clean_errors():
        tell(f"compares every block of {a} with every block of {b}, for each kind of vector")
        models = [loading.load(name) for name in (a, b)]
        with TerminalProgress() as progress:
            how: dict[str, Any] = {
                "kinds": kind,
                "rows": rows,
                "seed": seed,
                "fold": fold,
                "progress": progress,
            }
            alignment = layerleap.align(*models, control=not no_control, **how)
        write_html(html, alignment.head, alignment)
    show(alignment, json=json)


def diff(
    base: Annotated[str, Argument(help="The model that training started from."), preflight.model],
    tuned: Annotated[str, Argument(help="The model that training made of it."), preflight.model],
    kind: Kind = None,
    top: Annotated[int, Option("--top", "-k", help="Heads and neurons to list for each kind.")] = 5,
    tokens: Annotated[int, Option(help="Tokens at both ends of each displacement.")] = 8,
    inverse: Annotated[
        str,
        Option(help="Read by the output matrix, 'transpose', or its inverse, 'pseudo'."),
        preflight.choice("inverse", Inverse),
    ] = "transpose",
    html: options.Html = None,
    json: options.Json = False,
) -> None:
    """Show what fine-tuning changed: blocks, heads and neurons of BASE that moved most in TUNED.

    Each displacement is read in the vocabulary: the tokens that it promotes (+) and suppresses (-).
    safetensors files are read one block at a time, so large models need little memory.

    Example: layerleap diff smollm2 smollm2-reviews --kind ffn.value --top 10
    """
    with clean_errors():
        tell(f"reads the weights of {base} and {tuned}, one block after the other")
        with TerminalProgress() as progress:
            how: dict[str, Any] = {"kinds": kind, "top": top, "tokens": tokens, "inverse": inverse}
            difference = layerleap.diff(base, tuned, progress=progress, **how)
        write_html(html, difference.head, difference)
    show(difference, json=json)
