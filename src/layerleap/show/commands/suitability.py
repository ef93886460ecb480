"""Deciding: is early exit worth it for a model, on a text, on this machine?

In: arguments. Out: a verdict with its reasons.
"""

from typing import Annotated

import typer

from layerleap.show.options import (
    Blocks,
    Dtype,
    Field,
    Json,
    MaxTokens,
    Model,
    Positions,
    Revision,
    Seed,
    Starts,
    Tail,
    Text,
    Unit,
    load_model,
)
from layerleap.show.terminal import TerminalProgress, clean_errors, out, print_json


def suitability(
    model: Model,
    text: Text = None,
    tolerance: Annotated[
        float, typer.Option(help="Share of answers that may differ from the full model's.")
    ] = 0.05,
    delta: Annotated[float, typer.Option(help="How often that promise may fail.")] = 0.05,
    bank: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of a bank. Without it, maps are fitted on the text."),
    ] = None,
    fit_texts: Annotated[int, typer.Option(help="Texts to fit on.")] = 2000,
    read_texts: Annotated[int, typer.Option(help="Held-out texts to read.")] = 1000,
    context: Annotated[int, typer.Option(help="Tokens that a timed answer rests on.")] = 32,
    repeats: Annotated[int, typer.Option(help="How many timed passes.")] = 20,
    unit: Unit = "sentence",
    positions: Positions = "one",
    max_tokens: MaxTokens = 128,
    field: Field = "text",
    starts: Starts = None,
    held_out: Annotated[float, typer.Option(help="Share of documents never fitted on.")] = 0.25,
    seed: Seed = 0,
    blocks: Blocks = None,
    tail: Tail = None,
    revision: Revision = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Is early exit worth it for MODEL, on your text, on this machine? A verdict with reasons.

    Agreement by layer, what rules could save and what calibrated ones do save in layers, FLOPs and
    measured time, where it is best to check, and what would have to change. Interrupted while
    fitting, the same command goes on where it was.

    Example: layerleap suitability smollm2 --text my-text.jsonl --tolerance 0.05
    """
    with clean_errors():
        from layerleap import Sampling, ShortcutBank
        from layerleap.files import cache_root
        from layerleap.study.suitability import SuitabilitySettings
        from layerleap.study.suitability import suitability as run

        sampling = Sampling(
            unit=unit,
            positions=positions, max_tokens=max_tokens, held_out=held_out, field=field, seed=seed,
        )  # fmt: skip
        settings = SuitabilitySettings(
            text=text, tolerance=tolerance, delta=delta, n_fit=fit_texts, n_read=read_texts,
            context=context, repeats=repeats, starts=starts, sampling=sampling,
        )  # fmt: skip
        transformer = load_model(model, blocks, tail, revision, dtype)
        found = None if bank is None else ShortcutBank.from_pretrained(bank)
        with TerminalProgress() as progress:
            result = run(
                transformer, settings, bank=found, work=cache_root() / "suitability",
                progress=progress,
            )  # fmt: skip
        if json:
            print_json(result)
            return
        from layerleap.show.suitability_table import suitability_table

        out.print(suitability_table(result))
