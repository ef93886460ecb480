"""Deciding: is early exit worth it for a model, on a text, on this machine?

In: arguments. Out: a verdict with its reasons.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from layerleap.errors import BadSettings
from layerleap.files import write_json
from layerleap.show.cli.options import (
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
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, out, print_json, tell


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
    plan: Annotated[
        Path | None,
        typer.Option(help="With --bank: keep the quickest calibrated rule for `generate --exit`."),
    ] = None,
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
        from layerleap.study.suitability.study import SuitabilitySettings
        from layerleap.study.suitability.study import suitability as run

        if plan is not None and bank is None:
            raise BadSettings(
                "a plan holds for one bank only: give it with --bank, or make one with fit"
            )
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
        if plan is not None:
            write_json(plan, plan_of(result, str(bank)))
            tell(f"plan: {plan}")
        if json:
            print_json(result)
            return
        from layerleap.show.cli.suitability_table import suitability_table

        out.print(suitability_table(result))


def plan_of(result: dict[str, Any], bank: str) -> dict[str, Any]:
    """What `generate --exit` needs of a verdict: the rule, where it is asked, through which map."""
    chosen = result["chosen"]
    if chosen is None:
        return {"rule": None, "layers": [], "bank": None}
    rule, own = chosen["calibrated"]["rule"], bank if chosen["map"] == "mat" else None
    return {"rule": rule, "layers": chosen["layers"], "bank": own}
