"""Options that several commands share, and how their text becomes values.

In: what was typed. Out: loaded models and plain values.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

import layerleap
from layerleap.show.cli import preflight
from layerleap.show.cli.preflight import Check, run_checks
from layerleap.show.cli.terminal import clean_errors, tell

Model = Annotated[
    str, typer.Argument(help="Bundled name, hub name, folder or GGUF file."), Check(preflight.model)
]
Prompt = Annotated[str, typer.Argument(help="What to read; for masked models with the mask token.")]
Text = Annotated[
    str | None,
    typer.Option(
        "--text",
        "-t",
        help="wikipedia, enwik8 (far more articles), news, reviews (of films), 'generated' "
        "(sampled from the model), a file (txt, jsonl, parquet, .gz), a folder, '-' for standard "
        "input, or a data set of the hub. By default wikipedia, or generated for bundled models "
        "that do not speak English. For encoder-decoders: a .tsv or .jsonl file of pairs. For "
        "image classifiers: mnist, digits, a folder of images, .npz or .csv. For speech: beckett, "
        "spoken (by espeak-ng), a .wav file with its transcript as .txt beside it, or a folder of "
        "these.",
    ),
    Check(preflight.text),
]
Bank = Annotated[
    str | None, typer.Option("--bank", help="Folder or hub name of a bank."), Check(preflight.bank)
]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder for the bank."), Check(preflight.bank_folder)
]
Force = Annotated[bool, typer.Option("--force", help="Replace the result of an earlier run.")]
Html = Annotated[
    Path | None, typer.Option(help="Also write the result as a page."), Check(preflight.target_file)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Blocks = Annotated[str | None, typer.Option(help="Path of the list of blocks, if discovery fails.")]
Tail = Annotated[
    str | None, typer.Option(help="Paths of the modules after the last block, separated by commas.")
]
Revision = Annotated[str | None, typer.Option(help="Hub revision of the model.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16, ... By default, as saved."),
    preflight.choice("dtype", preflight.DTYPES),
]
Laws = Annotated[
    str,
    typer.Option(
        help="'loose' reads a model whose rows depend on their batch, such as one with activations "
        "quantised per batch; every result then says so."
    ),
    preflight.choice("laws", ("strict", "loose")),
]
OtherModel = Annotated[
    bool,
    typer.Option(
        "--other-model",
        help="Allow a bank of another model of the same class and width, such as the base of a "
        "fine-tuned one.",
    ),
]
Unit = Annotated[str, typer.Option(help="What one text is: sentence, paragraph or document.")]
Positions = Annotated[
    str, typer.Option(help="'one' random position per text, 'all', or 'every:N'.")
]
Starts = Annotated[
    str | None,
    typer.Option(help="File of real sequences from which a masked model draws its texts."),
    Check(preflight.text),
]
Rank = Annotated[
    int | None,
    typer.Option(help="Keep only this many directions of each map."),
    Check(preflight.solving),
]
NoEvaluate = Annotated[
    bool,
    typer.Option("--no-evaluate", help="Leave out the scores on held-out documents in the card."),
]


@dataclass(frozen=True)
class Loading:
    """How a model is loaded."""

    blocks: Blocks = None
    tail: Tail = None
    revision: Revision = None
    dtype: Dtype = None
    laws: Laws = "strict"

    def load(self, model: str) -> Any:
        """The model, wrapped."""
        return load_model(model, self.blocks, self.tail, self.revision, self.dtype, self.laws)


@dataclass(frozen=True)
class Cutting:
    """How a text is cut into examples."""

    unit: Unit = "sentence"
    positions: Positions = "one"
    max_tokens: Annotated[int, typer.Option(help="Longer texts are cut here.")] = 128
    field: Annotated[
        str, typer.Option(help="The key or column that holds the text in jsonl and parquet.")
    ] = "text"
    held_out: Annotated[
        float, typer.Option(help="Share of documents that is never fitted or trained on.")
    ] = 0.25
    seed: Annotated[
        int, typer.Option(help="Decides which documents, texts and positions are used.")
    ] = 0

    def sampling(self) -> Any:
        """As `Sampling`, which checks the values."""
        return layerleap.Sampling(**vars(self))

    check = sampling


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each dataclass among its parameters replaced by the fields of that class."""
    groups: dict[str, Any] = {}
    parameters: dict[str, tuple[Any, Any]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = parameter.annotation
        if is_dataclass(kind):
            groups[name], hints = kind, get_type_hints(kind, include_extras=True)
            parameters |= {each.name: (hints[each.name], each.default) for each in fields(kind)}
        else:
            parameters[name] = (kind, parameter.default)

    def run(**values: Any) -> None:
        with clean_errors():
            run_checks({name: kind for name, (kind, _) in parameters.items()}, values)
            for name, kind in groups.items():
                values[name] = kind(**{each.name: values.pop(each.name) for each in fields(kind)})
                if hasattr(kind, "check"):
                    values[name].check()
        command(**values)

    run.__name__, run.__doc__ = command.__name__, unwrapped(command.__doc__ or "")
    return with_signature(run, parameters)


def unwrapped(text: str) -> str:
    """Each paragraph on one line, because typer keeps line breaks; indented lines stay."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(re.sub(r"\n(?! )", " ", paragraph) for paragraph in paragraphs)


def with_signature(
    function: Callable[..., None], parameters: dict[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """Show the function to typer with these parameters: (annotation, default) by name."""
    named = inspect.Parameter.KEYWORD_ONLY
    function.__annotations__ = {name: kind for name, (kind, _) in parameters.items()}
    shown = [
        inspect.Parameter(name, named, default=default, annotation=kind)
        for name, (kind, default) in parameters.items()
    ]
    function.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return function


def load_model(
    model: str,
    blocks: str | None = None,
    tail: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    laws: str = "strict",
) -> Any:
    """Load a model, with paths given by hand and options of `from_pretrained`."""
    options = {"revision": revision, "dtype": dtype}
    chosen: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    chosen |= {"laws": laws, "tell": tell}
    tell(f"loading {model}")  # before the first slow import
    return layerleap.load(model, blocks=blocks, tail=parse_words(tail), **chosen)


def parse_words(text: str | None) -> list[str] | None:
    """Words separated by commas."""
    return None if text is None else [part.strip() for part in text.split(",")]
