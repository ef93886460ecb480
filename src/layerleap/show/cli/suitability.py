"""`layerleap suitability`: does early exit pay off for a model, on a text, on this machine?"""

from pathlib import Path
from typing import Annotated

import typer

from layerleap.errors import BadSettings
from layerleap.extras import need
from layerleap.show.cli import preflight
from layerleap.show.cli.options import Cutting, Json, Loading, Model, Starts, Text
from layerleap.show.cli.preflight import Check
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, out, print_json, tell


def suitability(
    model: Model,
    text: Text = None,
    tolerance: Annotated[
        float,
        typer.Option(help="Largest fraction of answers that may differ from the full model's."),
    ] = 0.05,
    delta: Annotated[float, typer.Option(help="How often that guarantee may fail.")] = 0.05,
    bank: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of a bank. Default: fit maps on the text."),
        Check(preflight.bank),
    ] = None,
    fit_texts: Annotated[int, typer.Option(help="Number of texts to fit on.")] = 2000,
    read_texts: Annotated[int, typer.Option(help="Number of held-out texts to read.")] = 1000,
    context: Annotated[int, typer.Option(help="Context length of a timed answer.")] = 32,
    repeats: Annotated[int, typer.Option(help="Number of timed passes.")] = 20,
    cutting: Cutting = Cutting(),
    starts: Starts = None,
    loading: Loading = Loading(),
    plan: Annotated[
        Path | None,
        typer.Option(help="With --bank: save the fastest calibrated rule for `generate --exit`."),
        Check(preflight.target_file),
    ] = None,
    json: Json = False,
) -> None:
    """Measure whether early exit pays off for MODEL, on your text, on this machine.

    Shows agreement by layer, what calibrated rules save in layers, FLOPs and measured time, where
    it is best to check, and an answer with its reasons. If interrupted while fitting, the same
    command resumes.

    Example: layerleap suitability smollm2 --text my-text.jsonl --tolerance 0.05
    """
    with clean_errors():
        from layerleap.files import cache_root
        from layerleap.study.suitability.settings import SuitabilitySettings

        if plan is not None and bank is None:
            raise BadSettings(
                "--plan needs --bank: a plan only works with the bank it was calibrated with; make "
                "one with `layerleap fit`"
            )
        sampling = cutting.sampling()
        settings = SuitabilitySettings(
            text=text,
            tolerance=tolerance,
            delta=delta,
            n_fit=fit_texts,
            n_read=read_texts,
            context=context,
            repeats=repeats,
            starts=starts,
            sampling=sampling,
        )
        for name in ("scipy", "sklearn"):
            need(name, "learn")
        first = f"fits maps of {model} on {fit_texts:,} texts, " if bank is None else ""
        tell(f"{first}reads {read_texts:,} others, times {repeats} passes, then replays all rules")
        from layerleap.study.suitability.study import suitability as run

        transformer = loading.load(model)
        with TerminalProgress() as progress:
            result = run(
                transformer,
                settings,
                bank=bank,
                work=cache_root() / "suitability",
                progress=progress,
            )
        if plan is not None:
            result.save_plan(plan)
            tell(f"plan: {plan}")
        if json:
            print_json(result.to_dict())
            return
        from layerleap.show.cli.suitability_table import suitability_table

        out.print(suitability_table(result))
