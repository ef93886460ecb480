"""`layerleap tune`: fine-tune the maps of a bank against the model's output (tuned lens)."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from layerleap.show.cli import options, preflight
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, out, show, tell


@dataclass(frozen=True)
class TuneCutting(options.Cutting):
    """Training needs many rows: many positions of longer texts."""

    unit: options.Unit = "paragraph"
    positions: options.Positions = "every:4"


@dataclass(frozen=True)
class Training:
    """How each layer is trained: fields of `Tuning`, which checks them."""

    start: Annotated[
        str, Option(help="'linear': from the bank's maps; 'logit': from the logit lens.")
    ] = "linear"
    max_rows: Annotated[int, Option(help="Rows to train each layer on, at most.")] = 23_040
    rows_per_step: Annotated[int, Option(help="Rows per step.")] = 256
    lr: Annotated[float, Option(help="Initial step size; it decays to 0.")] = 1e-3
    check_every: Annotated[int, Option(help="Steps between checks.")] = 15
    patience: Annotated[int, Option(help="Checks without improvement before a layer stops.")] = 3


def tune_command(
    model: options.Model,
    bank: Annotated[
        str, Option("--bank", help="Folder or hub name of a fitted bank."), preflight.bank
    ],
    text: options.Text = None,
    out_folder: options.Out = Path("tuned"),
    texts: Annotated[int | None, Option(help="Texts to take states from.")] = 1500,
    max_states: Annotated[
        int, Option(help="States kept on disk, a random sample of all.")
    ] = 24_000,
    stop_share: Annotated[
        float, Option(help="Share of the documents that decide when a layer stops.")
    ] = 0.05,
    training: Training = Training(),
    cutting: TuneCutting = TuneCutting(),
    starts: options.Starts = None,
    no_evaluate: options.NoEvaluate = False,
    force: options.Force = False,
    loading: options.Loading = options.Loading(),
    json: options.Json = False,
) -> None:
    """Fine-tune the maps of a bank against MODEL's own output (the tuned lens).

    fit predicts the last state; tune continues from there and predicts the output distribution.
    Each layer stops when held-out documents show no more improvement, and never ends up worse on
    them than it started. If the bank was fitted on the same text, it has seen those documents.
    Interrupted or killed, the same command continues where it stopped. For a masked model, use
    --positions one.

    Example: layerleap fit smollm2 -o bank; layerleap tune smollm2 --bank bank -o tuned
    """
    with clean_errors(), TerminalProgress() as progress:
        from layerleap.maps.map_settings import Tuning

        tuning = Tuning(**vars(training), seed=cutting.seed)
        sampling = cutting.sampling()
        how_many = "all" if texts is None else f"{texts:,}"
        tell(
            f"one pass of {model} over {how_many} texts, then at most {tuning.steps:,} steps of "
            "training at every layer"
        )
        from layerleap import ShortcutBank, tune

        transformer = loading.load(model)
        work = out_folder.with_name(f".{out_folder.name}.tuning")
        if work.exists():
            tell(f"continuing from {work}")
        tuned = tune(
            transformer,
            ShortcutBank.from_pretrained(bank),
            text,
            sampling,
            starts=starts,
            n_texts=texts,
            max_states=max_states,
            stop_share=stop_share,
            tuning=tuning,
            folder=work,
            evaluate=not no_evaluate,
            progress=progress,
        )
        tuned.bank.save_pretrained(out_folder)
        shutil.rmtree(work, ignore_errors=True)
    show(tuned, json=json, bank=str(out_folder))
    if not json:
        out.print(f"{tuned.bank!r}, tuned: {out_folder}", highlight=False, soft_wrap=True)
