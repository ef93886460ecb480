"""`layerleap patch`, `direction` and `patchscope`: what carries a difference, steers, is said."""

from pathlib import Path
from typing import Annotated, Any

import typer

import layerleap
from layerleap.errors import BadSettings
from layerleap.files import cache_root, check_writable, content_hash
from layerleap.show.cli import preflight
from layerleap.show.cli.options import Bank, Html, Json, Loading, Model, Prompt
from layerleap.show.cli.preflight import Arguments, Check
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, show, tell, write_html

AT = ("state", "attn", "ffn", "head", "neuron")


def _source_file(file: Path, arguments: Arguments) -> None:
    """The file is there."""
    if not file.is_file():
        raise BadSettings(f"there is no file {file}")


def _direction_target(file: Path, arguments: Arguments) -> None:
    """The file can be written; one that is there makes way only for --force."""
    check_writable(file)
    if file.exists() and not arguments.values["force"]:
        raise BadSettings(f"{file} exists; --force replaces it, or choose another name")


def patch(
    model: Model,
    clean: Annotated[str | None, typer.Argument(help="A prompt.")] = None,
    corrupt: Annotated[
        str | None, typer.Argument(help="Another one, of as many tokens, with another answer.")
    ] = None,
    answer: Annotated[
        str | None, typer.Option(help="The answer to CLEAN, with the space in front of it.")
    ] = None,
    other: Annotated[
        str | None,
        typer.Option(
            help="The answer to CORRUPT: the metric is the difference of both logits. Without it, "
            "the log-probability of --answer, which may then have several tokens."
        ),
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="Many pairs instead: a .jsonl file of records with clean, corrupt, answer, other."
        ),
        Check(_source_file),
    ] = None,
    at: Annotated[
        str,
        typer.Option(
            help="What to patch: 'state' of a layer, what 'attn' or 'ffn' adds, 'head' or 'neuron'."
        ),
        preflight.choice("at", AT),
    ] = "state",
    how: Annotated[
        str,
        typer.Option(
            help="'denoise' puts the clean run into the corrupt one (what is enough), 'noise' the "
            "other way round (what is needed)."
        ),
        preflight.choice("how", ("denoise", "noise")),
    ] = "denoise",
    method: Annotated[
        str,
        typer.Option(help="'exact', or 'gradient': an estimate of all cells from four passes."),
        preflight.choice("method", ("exact", "gradient")),
    ] = "exact",
    positions: Annotated[
        str | None,
        typer.Option(help="'each', 'all', or numbers such as 9,-1. By default each; heads: all."),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers (of states) or blocks, separated by commas.")
    ] = None,
    html: Html = None,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Show which part of MODEL carries the difference between two prompts.

    Activation patching: each layer and position, or each head, is put from one run into the other,
    alone. Its share is 0 if that changes nothing, and 1 if it turns one answer into the other.

    Examples:
      layerleap patch smollm2 "Rome is in" "Paris is in" --answer " Italy"

      layerleap patch smollm2 --pairs pairs.jsonl --at head --html heads.html

      layerleap patch smollm2 --pairs pairs.jsonl --at neuron --method gradient
    """
    with clean_errors():
        from layerleap.act.spelling import read_layers

        if (pairs is None) == (clean is None or corrupt is None):
            raise BadSettings("give CLEAN and CORRUPT, or --pairs")
        if "" in (answer, other):
            raise BadSettings("--answer or --other is empty; expected words such as ' Paris'")
        if other is not None and answer is None:
            raise BadSettings(f"--other {other!r} needs --answer, which it is compared with")
        if pairs is None and answer is None:
            raise BadSettings(
                "give --answer, such as --answer ' Paris', and --other if there is one"
            )
        chosen = _positions(positions)
        wanted = None if layers is None else read_layers(layers, "--layers")
        tell(f"patches {model} at {at}: {method} cells")
        transformer = loading.load(model)
        metric: Any = None
        if answer is not None:
            metrics = layerleap.metrics
            metric = metrics.log_probability(answer)
            if other is not None:
                _one_token_each(transformer, answer, other)
                metric = metrics.logit_difference(answer, other)
        asked = [
            model,
            clean,
            corrupt,
            str(pairs),
            answer,
            other,
            at,
            how,
            method,
            positions,
            layers,
        ]
        checkpoint = cache_root() / "patching" / f"{content_hash({}, {'asked': asked})[:16]}.json"
        with TerminalProgress() as progress:
            grid = layerleap.patch(
                transformer,
                clean,
                corrupt,
                metric=metric,
                pairs=pairs,
                at=at,  # type: ignore[arg-type]  # checked there
                how=how,  # type: ignore[arg-type]
                method=method,  # type: ignore[arg-type]
                positions=chosen,
                layers=wanted,
                checkpoint=checkpoint,
                progress=progress,
            )
        _write_page(html, grid)
        show(grid, json=json)


def _positions(text: str | None) -> Any:
    if text in (None, "each", "all"):
        return text
    try:
        return [int(part) for part in str(text).split(",")]
    except ValueError as error:
        raise BadSettings(
            f"--positions is {text!r}; expected each, all, or numbers separated by commas, such as "
            "9,-1"
        ) from error


def _one_token_each(transformer: Any, *answers: str) -> None:
    """Refuse answers that have no single logit to compare."""
    from layerleap.lens.attribution.target import output_ids

    for option, text in zip(("--answer", "--other"), answers, strict=True):
        if (n := len(output_ids(transformer, text))) > 1:
            raise BadSettings(
                f"{option} {text!r} is {n} tokens of this model, and --other compares single "
                "ones; leave out --other to score all tokens of --answer"
            )


def direction(
    model: Model,
    positive: Annotated[
        Path,
        typer.Option(help="Prompts to point to: one per line, or .jsonl with the field text."),
        Check(_source_file),
    ],
    negative: Annotated[
        Path, typer.Option(help="Prompts to point away from."), Check(_source_file)
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File for it, such as direction.safetensors."),
        Check(_direction_target),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(help="By default the one that separates held-out prompts best."),
        Check(lambda layer, arguments: arguments.model.check_layer(layer)),
    ] = None,
    method: Annotated[
        str,
        typer.Option(help="'mean': difference of means; 'pca': of pairs, line by line."),
        preflight.choice("method", ("mean", "pca")),
    ] = "mean",
    cost: Annotated[
        bool, typer.Option("--cost", help="Also measure what steering costs on neutral text.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier file.")] = False,
    html: Html = None,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Find a vector of MODEL that tells two sets of prompts apart, to steer with.

    It is scored on prompts that it was not found on. Steer with it by an edit: h15+FILE*2 adds it
    twice to the state of layer 15.

    Examples:
      layerleap direction smollm2 --positive glad.txt --negative sad.txt -o v.st

      layerleap generate smollm2 "I think that" --edit "h16+v.st*2"
    """
    with clean_errors():
        tell(f"reads the prompts of {positive} and {negative} at every layer of {model}")
        transformer = loading.load(model)
        with TerminalProgress() as progress:
            found = layerleap.direction(
                transformer,
                positive,
                negative,
                layer=layer,
                method=method,  # type: ignore[arg-type]  # checked there
                progress=progress,
            )
            costs = layerleap.steering_cost(transformer, found, progress=progress) if cost else None
        if out is not None:
            tell(f"{found.save(out)}: steer with --edit 'h{found.layer}+{out}*2'")
        _write_page(html, found, *([] if costs is None else [costs]))
        if json and costs is not None:
            from layerleap.show.cli.terminal import print_json

            print_json({**found.to_dict(), "cost": costs.to_dict()})
            return
        show(found, json=json)
        if costs is not None:
            show(costs, json=False)


def _write_page(html: Path | None, first: Any, *rest: Any) -> None:
    if html is not None:
        from layerleap.results.page import write_page

        tell(f"the page: {write_page(html, first.head(), first, *rest)}")


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
        int, typer.Option(help="The token whose state is read, negative from the end.")
    ] = -1,
    layer: Annotated[
        list[int] | None,
        typer.Option(help="The layer of the state; repeat it. All by default."),
        _layer,
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The prompt that the state goes into, in place of {}. By default, one that "
            "repeats words."
        ),
    ] = None,
    target_layer: Annotated[
        int | None,
        typer.Option(
            help="The layer at which the state goes in. By default, the one it comes from."
        ),
        _layer,
    ] = None,
    map: Annotated[
        str,
        typer.Option(help="'linear' takes the state to --target-layer by a map of --bank first."),
        preflight.choice("map", ("none", "linear")),
        _mapped,
    ] = "none",
    bank: Bank = None,
    tokens: Annotated[
        int,
        typer.Option("--tokens", "-n", help="How many tokens to write."),
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

      layerleap patchscope smollm2 "An elephant" --target "Rome: a city; {}:"
    """
    with clean_errors():
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
