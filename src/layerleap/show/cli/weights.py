"""`layerleap weights`: parameters as tokens, from the weights alone."""

from typing import Annotated, Any

from typer import Argument, Option

import layerleap
from layerleap.errors import BadSettings, ModelRefused
from layerleap.lens.vocabulary.index_settings import Inverse, Largest, Norms
from layerleap.show.cli import preflight
from layerleap.show.cli.options import Html, Json, Loading, Model, Text
from layerleap.show.cli.terminal import (
    TerminalProgress,
    clean_errors,
    out,
    print_json,
    tell,
    write_html,
)


def weights(
    model: Model,
    name: Annotated[
        str | None,
        Argument(
            help="L12.H3 (a head), L12.N34 (a neuron) or L12.H3.Q5 (a column of a head; Q, K, V or "
            "O). Without it, all heads."
        ),
        preflight.address,
    ] = None,
    form: Annotated[
        str,
        Option(help="For a head: 'vo' (what it writes), 'qk' (who looks), or 'both'."),
        preflight.choice("form", ("vo", "qk", "both")),
    ] = "both",
    top: Annotated[
        int | None,
        Option("--top", "-k", help="Pairs (50), or tokens per end (20)."),
        preflight.at_least("top", 1),
    ] = None,
    offset: Annotated[
        int, Option(help="For qk with rotary positions: how far the key lies behind.")
    ] = 0,
    norms: Annotated[
        str,
        Option(help="'skip' norms, or 'fold' their gains into the vectors."),
        preflight.choice("norms", Norms),
    ] = "skip",
    inverse: Annotated[
        str,
        Option(help="Read tokens through E 'transpose' or its 'pseudo' inverse."),
        preflight.choice("inverse", Inverse),
    ] = "transpose",
    tokens: Annotated[
        int | None, Option(help="Only the N most frequent tokens of --text.", min=1)
    ] = None,
    text: Text = None,
    largest: Annotated[
        str,
        Option(help="Pairs with the largest 'value', 'magnitude', or most 'negative'."),
        preflight.choice("largest", Largest),
    ] = "value",
    different: Annotated[
        bool, Option("--different", help="Leave out pairs of a token with itself.")
    ] = False,
    raw: Annotated[bool, Option("--raw", help="Do not subtract the mean embedding.")] = False,
    sample: Annotated[int, Option(help="For all heads: how many tokens to test.")] = 500,
    html: Html = None,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Read parameters of MODEL as tokens, without running it.

    Without NAME: which heads copy, suppress or map the tokens they attend to. For a head: its
    strongest token pairs, of W_VO (source token, written token) and of W_QK (query token, key
    token). For a neuron or a column of a head: the tokens at both ends of each vector.

    Examples:
      layerleap weights smollm2

      layerleap weights smollm2 L12.H3 --tokens 10000 --html pairs.html

      layerleap weights smollm2 L12.H3 --form qk --offset 1

      layerleap weights smollm2 L12.N34

      layerleap weights smollm2 L12.H3.Q5 --inverse pseudo
    """
    with clean_errors():
        from layerleap.lens.vocabulary.addresses import parse_address

        is_head = name is not None and parse_address(name).is_head
        if not is_head and (form != "both" or offset or different or largest != "value"):
            raise BadSettings(
                "--form, --offset, --different and --largest choose the pairs of a head; name one, "
                "such as L12.H3"
            )
        if name is None and top is not None:
            raise BadSettings("--top is for a named head, neuron or column; --sample for all heads")
        how: dict[str, Any] = {"norms": norms, "inverse": inverse}
        parameters = layerleap.weights(loading.load(model), **how)
        with TerminalProgress() as progress:
            shared: dict[str, Any] = {"centred": not raw, "progress": progress}
            if tokens is not None:
                shared["tokens"] = parameters.frequent(tokens, text, progress=progress)
            if name is None:
                results: list[Any] = [parameters.heads(sample=sample, **shared)]
            elif is_head:
                shared |= {"identical": not different, "largest": largest, "top": top or 50}
                results = _pairs(parameters, name, form, offset, shared)
            else:
                results = [parameters.read(name, top=top or 20)]
        from layerleap.lens.vocabulary.weights import weights_head

        write_html(html, lambda: weights_head(results, name or "all heads"), *results)
        if json:
            written = [result.to_dict() for result in results]
            print_json(written if is_head else written[0])
            return
        for result in results:
            out.print(result)


def _pairs(
    parameters: Any, name: str, form: str, offset: int, options: dict[str, Any]
) -> list[Any]:
    """One result per form; with both, W_QK is only mentioned where it is not known."""
    results = []
    for matrix in ("vo", "qk") if form == "both" else (form,):
        try:
            where = {"offset": offset} if matrix == "qk" or form == "vo" else {}
            results.append(parameters.pairs(name, form=matrix, **where, **options))
        except ModelRefused as error:
            if form != "both" or matrix == "vo":
                raise
            tell(f"W_QK left out: {error}")
    return results
