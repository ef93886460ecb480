"""`layerleap finetune`: train a copy of a model on a text, block by block or as a whole."""

from pathlib import Path
from typing import Annotated, Any

import typer

from layerleap.act.fine_tuning import fine_tuning
from layerleap.show.cli import preflight
from layerleap.show.cli.options import Force, Json, Loading, Model, OtherModel, Text, parse_words
from layerleap.show.cli.preflight import Check
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, out, print_json, tell


def finetune_command(
    model: Model,
    out_folder: Annotated[
        Path,
        typer.Option("--out", "-o", help="Folder for the model."),
        Check(preflight.model_folder),
    ],
    text: Text = None,
    how: Annotated[
        str, typer.Option(help="'layer-causal': each block by its own loss; 'full': plain.")
    ] = "layer-causal",
    parameters: Annotated[
        str,
        typer.Option(
            help="What is trained: blocks, keys-values, queries, keys, values, outputs, all, or "
            "patterns of names such as '*.mlp.*'; several separated by commas."
        ),
    ] = "blocks",
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 50,
    learning_rate: Annotated[float, typer.Option(help="Its peak; it decays to 0.")] = 1e-5,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    decay: Annotated[float, typer.Option(help="Weight decay of matrices.")] = 0.01,
    batch: Annotated[int, typer.Option(help="Windows of text per step.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Tokens per window.")] = 128,
    share: Annotated[
        float | None,
        typer.Option(
            help="Share of the positions that losses below the last layer are computed on; 0.0625 "
            "by default, 1 for the method of the paper."
        ),
    ] = None,
    bank: Annotated[
        str | None,
        typer.Option(
            "--bank", help="Read those losses through the shortcuts of a bank (folder or hub name)."
        ),
        Check(preflight.bank),
    ] = None,
    other_model: OtherModel = False,
    check_every: Annotated[int, typer.Option(help="Steps between checks on held-out text.")] = 25,
    held_out: Annotated[
        float, typer.Option(help="Share of documents that is never trained on.")
    ] = 0.25,
    seed: Annotated[int, typer.Option(help="Decides which text is held out, and the order.")] = 0,
    force: Force = False,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Fine-tune a copy of MODEL on a text and save it in the hub's format.

    With --how layer-causal each block learns from its own prediction, read through the model's
    head, and is trained as soon as it has run: memory is that of one block. Interrupted or killed,
    the same command continues from its last checkpoint.

    Example: layerleap finetune smollm2 --text news --steps 200 -o smollm2-news
    """
    with clean_errors(), TerminalProgress() as progress:
        training: dict[str, Any] = {
            "how": how,
            "parameters": parse_words(parameters) or [],
            "share": share,
            "steps": steps,
            "learning_rate": learning_rate,
            "optimizer": optimizer,
            "decay": decay,
            "batch": batch,
            "max_tokens": max_tokens,
            "check_every": check_every,
            "held_out": held_out,
            "seed": seed,
        }
        fine_tuning(**training)  # refuses what is out of range
        tell(
            f"{steps:,} steps of {batch} x {max_tokens} tokens ({how}) for a copy of {model}, with "
            f"a check on held-out text every {check_every}"
        )
        from layerleap import Lens, finetune
        from layerleap.maps.fit import find_bank

        transformer = loading.load(model)
        maps = find_bank(transformer, bank, other_model=other_model)
        lens = None if maps is None else Lens(transformer, maps)
        if (work := out_folder.with_name(f".{out_folder.name}.finetuning")).exists():
            tell(f"continuing from {work}")
        tuned = finetune(
            transformer, text, lens=lens, folder=out_folder, progress=progress, **training
        )
    if json:
        print_json({"folder": str(out_folder), **tuned.to_dict()})
        return
    out.print(tuned)
    out.print(f"{model}, fine-tuned ({how}): {out_folder}", highlight=False, soft_wrap=True)
