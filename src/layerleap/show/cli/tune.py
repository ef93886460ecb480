"""Tuning: maps of a bank trained to the model's answers.

In: arguments. Out: a bank of tuned maps, and what tuning gained.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from layerleap.show.cli.options import (
    BankToTune,
    Blocks,
    Dtype,
    Field,
    Json,
    MaxTokens,
    Model,
    Out,
    Positions,
    Revision,
    Seed,
    Starts,
    Tail,
    Text,
    Unit,
    load_model,
)
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, out, print_json


def tune(
    model: Model,
    bank: BankToTune,
    text: Text = None,
    out_folder: Out = Path("tuned"),
    start: Annotated[
        str, typer.Option(help="'mat': from the bank's maps; 'identity': from the logit lens.")
    ] = "mat",
    texts: Annotated[int | None, typer.Option(help="How many texts to take rows from.")] = 1500,
    rows: Annotated[int, typer.Option(help="Rows kept on disk at most, a sample of all.")] = 24_000,
    judged: Annotated[
        float, typer.Option(help="Share of the documents that decide when a layer stops.")
    ] = 0.05,
    most_rows: Annotated[
        int, typer.Option(help="Stop after so many rows per layer at the latest.")
    ] = 23_040,
    rows_per_step: Annotated[int, typer.Option(help="Rows in one step.")] = 256,
    lr: Annotated[float, typer.Option(help="Step size at first; it falls to 0.")] = 1e-3,
    check_every: Annotated[int, typer.Option(help="Steps between checks.")] = 15,
    patience: Annotated[int, typer.Option(help="Checks without gain before a layer stops.")] = 3,
    unit: Unit = "paragraph",
    positions: Positions = "every:4",
    max_tokens: MaxTokens = 128,
    field: Field = "text",
    starts: Starts = None,
    held_out: Annotated[float, typer.Option(help="Share of documents never trained on.")] = 0.25,
    seed: Seed = 0,
    blocks: Blocks = None,
    tail: Tail = None,
    revision: Revision = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Train the maps of a bank until their readings come close to MODEL's own answers.

    fit makes states alike; tune goes on from there and makes answers alike (the tuned lens), layer
    by layer until documents kept apart show no gain. No map ends worse on them than it started.
    If the bank was fitted on the same text, it has seen those documents, which flatters its side.
    Interrupted or killed, the same command goes on where it was. A masked model wants
    --positions one.

    Example: layerleap fit smollm2 -o bank; layerleap tune smollm2 --bank bank -o tuned
    """
    with clean_errors(), TerminalProgress() as progress:
        from layerleap import Sampling, ShortcutBank, collect
        from layerleap.maps.bank import check_target
        from layerleap.maps.tuned import Tuning, summary
        from layerleap.maps.tuned import tune as tuned
        from layerleap.stats.collect import finish
        from layerleap.stats.saved_states import StateFile

        tuning = Tuning(
            start=start,  # type: ignore[arg-type]  # checked there
            max_rows=most_rows,
            rows_per_step=rows_per_step, lr=lr, check_every=check_every, patience=patience,
            seed=seed,
        )  # fmt: skip
        sampling = Sampling(
            unit=unit,
            positions=positions, max_tokens=max_tokens, held_out=held_out, field=field, seed=seed,
        )  # fmt: skip
        kept, passed, trained = (
            out_folder.with_name(f".{out_folder.name}.tuning.{end}")
            for end in ("rows", "pass.safetensors", "safetensors")
        )
        file = StateFile(kept, limit=rows, seed=seed)
        check_target(out_folder)
        transformer = load_model(model, blocks, tail, revision, dtype)
        closed = ShortcutBank.from_pretrained(bank)
        closed.check_model(transformer)
        collect(
            transformer, text, sampling, starts=starts, n_texts=texts, save_states=file,
            checkpoint=passed, progress=progress,
        )  # fmt: skip
        sides = file.open().split(judged, seed)
        found, record = tuned(
            transformer, closed, *sides, tuning, checkpoint=trained, progress=progress
        )
        found.save_pretrained(out_folder)
        for checkpoint in (trained, passed):
            finish(checkpoint)
        file.remove()
    _show(found, out_folder, summary(record), record, json)


def _show(
    bank: Any, folder: Path, rows: list[dict[str, Any]], record: list[dict[str, Any]], json: bool
) -> None:
    if json:
        print_json({"bank": str(folder), "maps": len(bank), "summary": rows, "record": record})
        return
    from layerleap.show.cli.tables import tuned_table

    out.print(tuned_table(rows))
    out.print(f"{bank!r}, tuned: {folder}", highlight=False, soft_wrap=True)
