"""Options that several commands share, and how their text becomes values.

In: what was typed. Out: loaded models and plain values.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

import layerleap
from layerleap.errors import BadSettings
from layerleap.show.cli.terminal import tell

Model = Annotated[str, typer.Argument(help="Bundled name, hub name, folder or GGUF file.")]
Text = Annotated[
    str | None,
    typer.Option(
        "--text",
        "-t",
        help="wikipedia, news, 'generated' (sampled from the model), a file (txt, jsonl, parquet, "
        ".gz), a folder, '-' for standard input, or a data set of the hub. By default wikipedia, "
        "or generated for bundled models that do not speak English. For image classifiers: mnist, "
        "digits, a folder of images, .npz or .csv. For speech: beckett, spoken (by espeak-ng), "
        "a .wav file with its transcript as .txt beside it, or a folder of these.",
    ),
]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder for the result; replaced when finished.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
BankToTune = Annotated[str, typer.Option("--bank", help="Folder or hub name of a fitted bank.")]
Blocks = Annotated[str | None, typer.Option(help="Path of the list of blocks, if discovery fails.")]
Tail = Annotated[
    str | None, typer.Option(help="Paths of the modules after the last block, separated by commas.")
]
Revision = Annotated[str | None, typer.Option(help="Hub revision of the model.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ... By default, as saved.")]
Intercept = Annotated[bool, typer.Option("--intercept", help="Fit a bias too.")]
Ridge = Annotated[
    str, typer.Option(help="Penalty as a fraction of the mean eigenvalue, or 'auto'.")
]
MergeIntercept = Annotated[
    bool | None,
    typer.Option(
        "--intercept/--no-intercept", help="Fit a bias. By default, as the shards were fitted."
    ),
]
MergeRidge = Annotated[
    str | None, typer.Option(help="A number or 'auto'. By default, as the shards were fitted.")
]
Rank = Annotated[int | None, typer.Option(help="Keep only this many directions of each map.")]
Unit = Annotated[str, typer.Option(help="What one text is: sentence, paragraph or document.")]
Positions = Annotated[
    str, typer.Option(help="'one' random position per text, 'all', or 'every:N'.")
]
MaxTokens = Annotated[int, typer.Option(help="Longer texts are cut here.")]
Field = Annotated[
    str, typer.Option(help="The key or column that holds the text in jsonl and parquet.")
]
Starts = Annotated[
    str | None,
    typer.Option(help="File of real sequences from which a masked model draws its texts."),
]
Seed = Annotated[int, typer.Option(help="Decides which documents, texts and positions are used.")]


Folder = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="Folder with the published maps.")
]
Of = Annotated[str, typer.Option("--model", "-m", help="The model the maps belong to.")]


def load_model(
    model: str,
    blocks: str | None = None,
    tail: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    **more: Any,
) -> Any:
    """Load a model, with paths given by hand and options of `from_pretrained`."""
    options = {"revision": revision, "dtype": dtype}
    chosen: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    paths = parse_paths(tail)
    return layerleap.load(model, blocks=blocks, tail=paths, tell=tell, **chosen, **more)


def parse_sampling(unit: str, **options: Any) -> Any:
    """How texts are cut; the values are checked there."""
    return layerleap.Sampling(unit=unit, **options)  # type: ignore[arg-type]


def parse_paths(text: str | None) -> list[str] | None:
    """Paths separated by commas."""
    return [part.strip() for part in text.split(",")] if text else None


def parse_ridge(text: str) -> float | str:
    """A number, or "auto"."""
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError as error:
        raise BadSettings(f"ridge is {text!r}; expected a number or 'auto'") from error
