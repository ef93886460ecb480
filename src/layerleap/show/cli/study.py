"""Studying: the papers' experiments as one page each.

In: arguments. Out: a report, its data and a bank.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from layerleap.show.cli.options import (
    Blocks,
    Dtype,
    Field,
    Intercept,
    Json,
    MaxTokens,
    Positions,
    ReportOut,
    Revision,
    Ridge,
    Seed,
    Starts,
    Tail,
    Text,
    Unit,
    load_model,
    parse_ridge,
)
from layerleap.show.cli.studied import clear, show, words
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, tell


def study_shortcuts(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Bundled name, hub name, folder or GGUF file; of further models only the curves "
            "are compared.",
        ),
    ],
    text: Text = None,
    other: Annotated[
        str, typer.Option(help="A second text, for transfer; 'none' leaves it out.")
    ] = "news",
    out_folder: ReportOut = Path("report"),
    fit_texts: Annotated[int, typer.Option(help="Texts to fit on.")] = 9000,
    read_texts: Annotated[int, typer.Option(help="Held-out texts to read.")] = 3000,
    pairs: Annotated[
        str, typer.Option(help="'all': heat maps of every pair; 'final': without.")
    ] = "all",
    sections: Annotated[
        str,
        typer.Option(
            help="Besides reading, with commas: parts (replaced by matrices), alternation (blocks "
            "and jumps in turn), exits (early exit, replayed and calibrated), tuned (trained "
            "maps); or 'none'."
        ),
    ] = "parts,alternation,exits,tuned",
    part_texts: Annotated[int, typer.Option(help="Of the texts read, those for parts.")] = 300,
    tolerance: Annotated[
        float, typer.Option(help="Largest disagreement of calibrated exits, as a share.")
    ] = 0.05,
    delta: Annotated[
        float, typer.Option(help="How often that promise may be broken, as a share.")
    ] = 0.05,
    unit: Unit = "sentence",
    positions: Positions = "one",
    max_tokens: MaxTokens = 128,
    field: Field = "text",
    starts: Starts = None,
    held_out: Annotated[float, typer.Option(help="Share of documents never fitted on.")] = 0.25,
    include_special: Annotated[
        bool, typer.Option(help="Masked models: may special tokens be masked and read?")
    ] = False,
    intercept: Intercept = False,
    ridge: Ridge = "0",
    seed: Seed = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look in about two minutes.")
    ] = False,
    blocks: Blocks = None,
    tail: Tail = None,
    revision: Revision = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """How well can each layer be read, and carried to later ones? One report with everything.

    R2 of all layer pairs, Precision@k, Surprisal and KL per layer, mat beside id, on documents
    that were not fitted on, and transfer to a second text. Then what --sections names, and what
    the paper claims beside what was seen. At full size that takes most of an hour for a model of
    135 million weights on two cores. Interrupted, the same command goes on where it was; a text
    that was being read is read again.

    Example: layerleap study shortcuts smollm2 --quick -o report

    Several sizes: layerleap study shortcuts gpt2 gpt2-medium gpt2-large -o report
    """
    with clean_errors():
        from layerleap import Sampling
        from layerleap.show.report.report import write_report
        from layerleap.study.shortcuts.sizes import with_sizes
        from layerleap.study.shortcuts.study import ShortcutSettings
        from layerleap.study.shortcuts.study import study_shortcuts as run

        number = parse_ridge(ridge)
        sampling = Sampling(
            unit=unit,
            positions=positions, max_tokens=max_tokens, held_out=held_out,
            include_special=include_special, seed=seed, field=field,
        )  # fmt: skip
        settings = ShortcutSettings(
            text=text, other=None if other == "none" else other, n_fit=fit_texts,
            n_read=read_texts, pairs=pairs, intercept=intercept, ridge=number,
            starts=starts, sampling=sampling, part_texts=part_texts, tolerance=tolerance,
            delta=delta, sections=tuple(words(sections)),
        )  # fmt: skip
        if quick:
            settings = settings.quickened()
        transformer = load_model(models[0], blocks, tail, revision, dtype)
        work = out_folder / ".work"
        if work.exists():
            tell(f"going on from what an earlier run left in {work}")
        with TerminalProgress() as progress:
            result, bank = run(transformer, settings, work=work, progress=progress)
            if len(models) > 1:
                others = [partial(load_model, name, dtype=dtype) for name in models[1:]]
                result = with_sizes(result, others, settings, work=work, progress=progress)
            page = write_report(result, out_folder)
            bank.save_pretrained(out_folder / "bank")
        clear(work)
    from layerleap.show.cli.exit_tables import claims_table, exits_table
    from layerleap.show.cli.tables import study_table

    tables = (study_table(result), exits_table(result), claims_table(result))
    show(result, tables, {"report": page, "bank": page.parent / "bank"}, json=json)
