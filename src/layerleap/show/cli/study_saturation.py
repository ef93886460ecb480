"""The study of saturation as one page.

In: arguments. Out: a report and its data.
"""

from pathlib import Path
from typing import Annotated

import typer

from layerleap.show.cli.options import (
    Blocks,
    Dtype,
    Field,
    Json,
    MaxTokens,
    Model,
    ReportOut,
    Revision,
    Seed,
    Starts,
    Tail,
    Text,
    Unit,
    load_model,
)
from layerleap.show.cli.studied import clear, show, words
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, out, tell


def study_saturation(
    model: Model,
    text: Text = None,
    out_folder: ReportOut = Path("report"),
    bank: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of a bank to read through; fitted when left out."),
    ] = None,
    fit_texts: Annotated[
        int | None,
        typer.Option(help="Texts, images or clips to fit on. By default 3000, of speech 200."),
    ] = None,
    read_texts: Annotated[
        int | None, typer.Option(help="Held-out ones to read. By default 800, of speech 120.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-k", help="How many ranks, 3 or more.")] = 5,
    sections: Annotated[
        str,
        typer.Option(
            help="Besides order, with commas: guesses (early runners-up), probe (tasks), "
            "intervention (states put into other texts), exits (exiting by task), twin (the same "
            "model untrained); or 'none'."
        ),
    ] = "guesses,probe,intervention,exits,twin",
    permutations: Annotated[
        int, typer.Option(help="How often the probe's labels are exchanged.")
    ] = 39,
    pairs: Annotated[int, typer.Option(help="Pairs of the intervention, at most.")] = 100,
    tolerance: Annotated[
        float, typer.Option(help="Largest disagreement of calibrated exits, as a share.")
    ] = 0.05,
    delta: Annotated[
        float, typer.Option(help="How often that promise may be broken, as a share.")
    ] = 0.05,
    unit: Unit = "sentence",
    positions: Annotated[
        str | None,
        typer.Option(
            help="'one' random position per text, 'all', or 'every:N'. By default every:4, one "
            "for masked models, and all of speech."
        ),
    ] = None,
    max_tokens: MaxTokens = 128,
    field: Field = "text",
    starts: Starts = None,
    held_out: Annotated[float, typer.Option(help="Share of documents never fitted on.")] = 0.25,
    seed: Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A first look in a few minutes.")] = False,
    blocks: Blocks = None,
    tail: Tail = None,
    revision: Revision = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Do predictions settle rank by rank, and is that of any use? One report with everything.

    From which layer on each of the best tokens stands where it ends; do ranks settle in order,
    beyond chance and beyond a random walk; can the rank that is being decided be read off a state;
    does a settled state stay settled in another text; does exiting by that save more than other
    rules. What cannot be made with so few texts is said in the report's notes.

    Example: layerleap study saturation smollm2 --quick -o report
    """
    with clean_errors():
        from dataclasses import replace

        from layerleap import ShortcutBank
        from layerleap.show.report.report import write_report
        from layerleap.study.saturation.study import SaturationSettings, default_sampling
        from layerleap.study.saturation.study import study_saturation as run

        settings = SaturationSettings(
            text=text, n_fit=fit_texts, n_read=read_texts, k=ranks, sections=tuple(words(sections)),
            permutations=permutations, pairs=pairs, tolerance=tolerance, delta=delta, starts=starts,
        )  # fmt: skip
        if quick:
            settings = settings.quickened()
        transformer = load_model(model, blocks, tail, revision, dtype)
        sampling = default_sampling(transformer)
        sampling = replace(
            sampling,
            unit=unit,  # type: ignore[arg-type]
            max_tokens=max_tokens, held_out=held_out, seed=seed,
            field=field, positions=positions or sampling.positions,
        )  # fmt: skip
        settings = replace(settings, sampling=sampling)
        given = None if bank is None else ShortcutBank.from_pretrained(bank)
        work = out_folder / ".work"
        if work.exists() and any(work.iterdir()):
            tell(f"going on from what an earlier run left in {work}")
        with TerminalProgress() as progress:
            result = run(transformer, settings, bank=given, work=work, progress=progress)
            page = write_report(result, out_folder)
        clear(work)
    from layerleap.show.cli.exit_tables import claims_table, exits_table
    from layerleap.show.cli.saturation_table import order_table

    tables = (order_table(result), exits_table(result), claims_table(result))
    show(result, tables, {"report": page}, json=json)
    if not json:
        for note in result["notes"]:
            out.print(f"note: {note}", highlight=False, style="dim")
