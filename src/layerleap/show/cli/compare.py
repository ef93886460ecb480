"""`layerleap align` and `diff`: compare two models by what their weights say about tokens."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

import layerleap
from layerleap.show.cli.options import Json, Loading
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, out, print_json, tell

if TYPE_CHECKING:
    from layerleap.read.compare.alignment import Alignment
    from layerleap.read.compare.difference import Difference, Words
    from layerleap.read.compare.matching import Matching

Kind = Annotated[
    list[str] | None,
    typer.Option(
        help="Kind of vector: ffn.key, ffn.gate, ffn.up, ffn.value, attn.q, attn.k, attn.v or "
        "attn.o; repeat it for several. All by default."
    ),
]
Html = Annotated[Path | None, typer.Option(help="Also write the result as a page.")]


def align(
    a: Annotated[str, typer.Argument(help="Bundled name, hub name, folder or GGUF file.")],
    b: Annotated[str, typer.Argument(help="A model with the same vocabulary.")],
    kind: Kind = None,
    rows: Annotated[
        int | None,
        typer.Option(help="Compare only this many random vectors of A per block and kind."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which vectors --rows takes.")] = 0,
    fold: Annotated[
        bool, typer.Option("--fold", help="Multiply the vectors by the norms.")
    ] = False,
    no_control: Annotated[
        bool, typer.Option("--no-control", help="Leave out the control in raw coordinates.")
    ] = False,
    html: Html = None,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Match the blocks of A to those of B by what their vectors say about tokens.

    Each vector of an FFN or of attention is read as scores of all tokens. Blocks are compared by
    the correlations of these scores and matched one to one. The two models need one vocabulary, but
    not one width. The control compares raw coordinates.

    Example: layerleap align lm-seed-0 lm-seed-1 --kind ffn.value --html alignment.html
    """
    with clean_errors():
        models = [loading.load(name) for name in (a, b)]
        with TerminalProgress() as progress:
            found = layerleap.align(
                *models, kinds=kind, rows=rows, seed=seed, fold=fold, control=not no_control,
                progress=progress,
            )  # fmt: skip
        if html:
            from layerleap.show.html.compare import write_alignment

            tell(f"page: {write_alignment(found, html)}")
    if json:
        print_json(found.to_dict())
        return
    out.print(alignment_table(found))


def diff(
    base: Annotated[str, typer.Argument(help="The model that training started from.")],
    tuned: Annotated[str, typer.Argument(help="The model that training made of it.")],
    kind: Kind = None,
    top: Annotated[
        int, typer.Option("--top", "-k", help="Heads and neurons to list for each kind.")
    ] = 5,
    tokens: Annotated[int, typer.Option(help="Tokens at both ends of each displacement.")] = 8,
    inverse: Annotated[
        str,
        typer.Option(help="Read by the output matrix, 'transpose', or its inverse, 'pseudo'."),
    ] = "transpose",
    html: Html = None,
    json: Json = False,
) -> None:
    """Show what fine-tuning changed: blocks, heads and neurons of BASE that moved most in TUNED.

    Each displacement is read in the vocabulary: the tokens that it promotes (+) and suppresses (-).
    safetensors files are read one block at a time, so large models need little memory.

    Example: layerleap diff smollm2 ./my-tuned-smollm2 --kind ffn.value --top 10
    """
    with clean_errors():
        with TerminalProgress() as progress:
            found = layerleap.diff(
                base, tuned, kinds=kind, top=top, tokens=tokens, tell=tell, progress=progress,
                inverse=inverse,  # type: ignore[arg-type]  # checked there
            )  # fmt: skip
        if html:
            from layerleap.show.html.compare import write_difference

            tell(f"page: {write_difference(found, html)}")
    if json:
        print_json(found.to_dict())
        return
    out.print(difference_table(found))


def alignment_table(alignment: "Alignment") -> RenderableType:
    """How many blocks met their own number by each kind; every match if there is one kind."""
    from layerleap.show.cli.tables import new_table

    table = new_table(Text(f"{alignment.a} and {alignment.b}: blocks at their own number"))
    for head in ("kind", "compared", "by"):
        table.add_column(head, no_wrap=True)
    for head in ("own number", "by chance", "p", "least margin"):
        table.add_column(head, justify="right")
    for one in alignment.matchings:
        margin = "-" if one.smallest_margin is None else f"{one.smallest_margin:+.4f}"
        share = f"{one.chance:.2g}" if one.chance >= 1e-4 else "< 1e-4"
        hits = f"{one.hits} of {len(one.matches)}"
        table.add_row(
            one.kind, one.space, one.measure, hits, f"{one.expected_hits:.1f}", share, margin
        )  # fmt: skip
    parts: list[RenderableType] = [table]
    if len(alignment.kinds) == 1:
        parts += [_matches(one) for one in alignment.matchings if one.space == "vocabulary"]
    legend = (
        "best: mean over rows of the largest |correlation|; mean: over all pairs of rows; margin: "
        "similarity of a match minus that of the next best block"
    )
    return Group(*parts, *_notes(alignment.notes()), Text(legend, style="dim"))


def _matches(one: "Matching") -> RenderableType:
    from layerleap.show.cli.tables import new_table

    table = new_table(
        Text(f"{one.kind}, {one.measure}"), "block", "matched to", "similarity", "margin"
    )  # fmt: skip
    for match in one.matches:
        margin = "-" if match.margin is None else f"{match.margin:+.4f}"
        style = "" if match.is_own else "yellow"
        table.add_row(
            str(match.a), Text(str(match.b), style=style), f"{match.similarity:.4f}", margin
        )  # fmt: skip
    return table


def difference_table(difference: "Difference") -> RenderableType:
    """By block, by head and by neuron."""
    from layerleap.show.cli.tables import new_table

    blocks = new_table(
        Text("blocks that moved, in % of their size"), "block", "all", *difference.kinds
    )  # fmt: skip
    for one in difference.blocks:
        if not one.is_identical:
            cells = [_percent(one.kinds.get(kind)) for kind in difference.kinds]
            blocks.add_row(str(one.block), _percent(one.relative), *cells)
    outside = new_table(Text("outside the blocks, in % of its size"))
    outside.add_column("tensor", overflow="fold")
    outside.add_column("moved", justify="right", no_wrap=True)
    outside.add_column("", overflow="fold", ratio=1)
    for other in difference.outside:
        whole = Text("identical", style="dim") if other.is_identical else _percent(other.relative)
        outside.add_row(Text(other.name), whole, Text(other.remark))
    heads = _words_table("heads that moved most", "head", ("%", "share"))
    for head in difference.heads:
        moved = (f"{100 * head.relative:.3g}", f"{head.share:.2f}")
        _add(heads, head.name, head.kind, moved, head.promotes, head.suppresses)
    neurons = _words_table("neurons that moved most", "neuron", ("moved", "%", "cosine"))
    for neuron in difference.neurons:
        cosine = "-" if neuron.cosine is None else f"{neuron.cosine:+.2f}"
        relative = "-" if neuron.relative is None else f"{100 * neuron.relative:.3g}"
        numbers = (f"{neuron.displacement:.3g}", relative, cosine)
        _add(
            neurons, neuron.name, neuron.kind, numbers, neuron.promotes,
            neuron.suppresses,
        )  # fmt: skip
    legend = (
        "+ promoted, - suppressed by the displacement (for heads, + and - could be swapped); "
        "share: of a head's displacement in the direction that is shown; cosine: of the "
        "displacement to the base's vector"
    )
    tables = [table for table in (blocks, outside, heads, neurons) if table.row_count]
    return Group(*tables, *_notes(difference.notes()), Text(legend, style="dim"))


def _words_table(title: str, name: str, numbers: Iterable[str]) -> Any:
    from layerleap.show.cli.tables import new_table

    table = new_table(Text(title))
    table.add_column(name, no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for head in numbers:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("tokens", overflow="fold", ratio=1)
    return table


def _add(
    table: Any, name: str, kind: str, numbers: tuple[str, ...], high: "Words", low: "Words"
) -> None:
    """Two lines: the tokens that are promoted, and those that are suppressed."""
    table.add_row(name, kind, *numbers, "+", _tokens(high))
    table.add_row("", "", *("" for _ in numbers), "-", _tokens(low))


def _tokens(words: "Words") -> Text:
    return Text(" ".join(scored.token.label for scored in words))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g}"


def _notes(notes: Iterable[str]) -> list[Text]:
    return [Text(note, style="yellow") for note in notes]
