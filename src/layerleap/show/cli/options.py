"""Options that several commands share, and how their text becomes values.

In: what was typed. Out: loaded models and plain values.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Argument, Option

import layerleap
from layerleap.show.cli import preflight
from layerleap.show.cli.preflight import run_checks
from layerleap.show.cli.terminal import clean_errors, tell

Model = Annotated[
    str, Argument(help="Bundled name, hub name, folder or GGUF file."), preflight.model
]
Prompt = Annotated[str, Argument(help="What to read; for masked models with the mask token.")]
Text = Annotated[
    str | None,
    Option(
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
    preflight.text,
]
Bank = Annotated[
    str | None,
    Option(help="Folder or hub name of a bank to read through as well as the logit lens."),
    preflight.bank,
]
Html = Annotated[
    Path | None, Option(help="Also write the result as a page."), preflight.target_file
]
Out = Annotated[Path, Option("--out", "-o", help="Folder for the bank."), preflight.bank_folder]
Force = Annotated[bool, Option("--force", help="Replace the result of an earlier run.")]
Json = Annotated[bool, Option("--json", help="Print JSON for programs.")]
OtherModel = Annotated[
    bool,
    Option(
        "--other-model",
        help="Allow a bank of another model of the same class and width, such as the base of a "
        "fine-tuned one.",
    ),
]
Unit = Annotated[str, Option(help="What one text is: sentence, paragraph or document.")]
Positions = Annotated[str, Option(help="'one' random position per text, 'all', or 'every:N'.")]
Starts = Annotated[
    str | None,
    Option(help="File of real sequences from which a masked model draws its texts."),
    preflight.text,
]
Rank = Annotated[
    int | None, Option(help="Keep only this many directions of each map."), preflight.solving
]
NoEvaluate = Annotated[
    bool, Option("--no-evaluate", help="Leave out the scores on held-out documents in the card.")
]


@dataclass(frozen=True)
class Loading:
    """How a model is loaded."""

    blocks: Annotated[str | None, Option(help="Path of the blocks, if discovery fails.")] = None
    tail: Annotated[
        str | None, Option(help="Paths of the modules after the last block, separated by commas.")
    ] = None
    revision: Annotated[str | None, Option(help="Hub revision of the model.")] = None
    dtype: Annotated[
        str | None,
        Option(help="float32, bfloat16, ... By default, as saved."),
        preflight.choice("dtype", preflight.DTYPES),
    ] = None
    laws: Annotated[
        str,
        Option(
            help="'loose' reads a model whose rows depend on their batch, such as one with "
            "activations quantised per batch; every result then says so."
        ),
        preflight.choice("laws", ("strict", "loose")),
    ] = "strict"

    def load(self, model: str) -> Any:
        """The model, wrapped."""
        given = {"revision": self.revision, "dtype": self.dtype}
        options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        options |= {"blocks": self.blocks, "tail": parse_words(self.tail), "laws": self.laws}
        tell(f"loading {model}")  # before the first slow import
        return layerleap.load(model, **options)


@dataclass(frozen=True)
class Cutting:
    """How a text is cut into examples."""

    unit: Unit = "sentence"
    positions: Positions = "one"
    max_tokens: Annotated[int, Option(help="Longer texts are cut here.")] = 128
    field: Annotated[
        str, Option(help="The key or column that holds the text in jsonl and parquet.")
    ] = "text"
    held_out: Annotated[
        float, Option(help="Share of documents that is never fitted or trained on.")
    ] = 0.25
    seed: Annotated[int, Option(help="Decides which documents, texts and positions are used.")] = 0

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
            parameters |= {field.name: (hints[field.name], field.default) for field in fields(kind)}
        else:
            parameters[name] = (kind, parameter.default)

    def run(**values: Any) -> None:
        with clean_errors():
            run_checks({name: kind for name, (kind, _) in parameters.items()}, values)
            for name, kind in groups.items():
                chosen = {field.name: values.pop(field.name) for field in fields(kind)}
                values[name] = kind(**chosen)
                if hasattr(kind, "check"):
                    values[name].check()
        command(**values)

    run.__name__, run.__doc__ = command.__name__, unwrapped(command.__doc__ or "")
    return with_signature(run, parameters)


def unwrapped(text: str) -> str:
    """Each paragraph on one line, because typer keeps line breaks; indented lines stay."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(re.sub(r"\n(?! )", " ", paragraph) for paragraph in paragraphs)


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def with_signature(
    function: Callable[..., None], parameters: dict[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """Show the function to typer with these parameters: (annotation, default) by name."""
    function.__annotations__ = {name: kind for name, (kind, _) in parameters.items()}
    shown = [
        inspect.Parameter(name, _KEYWORD, default=default, annotation=kind)
        for name, (kind, default) in parameters.items()
    ]
    function.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return function


def parse_words(text: str | None) -> list[str] | None:
    """Words separated by commas."""
    return None if text is None else [part.strip() for part in text.split(",")]
