"""`layerleap evaluate`: how good banks are on a text they were not fitted on."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from layerleap.show.cli import options, preflight
from layerleap.show.cli.preflight import Check
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, show, tell
from layerleap.stream.sampling import parse_positions
from layerleap.stream.split import Side, Unit


def evaluate(
    model: options.Model,
    bank: Annotated[
        list[str] | None,
        Option(
            help="Folder or hub name of a bank, or 'default'; repeat it to compare several. "
            "By default, the bank in the cache."
        ),
        preflight.bank,
    ] = None,
    other_model: options.OtherModel = False,
    text: options.Text = None,
    texts: Annotated[
        int, Option(help="Read this many texts."), preflight.at_least("texts", 1)
    ] = 300,
    unit: Annotated[
        str | None,
        Option(help="What one text is: sentence, paragraph or document. Default: as fitted."),
        preflight.choice("unit", Unit),
    ] = None,
    positions: Annotated[
        str,
        Option(help="'one' random position per text, 'all', or 'every:N'."),
        Check(lambda value, _: parse_positions(value)),
    ] = "one",
    field: Annotated[
        str | None, Option(help="The key or column of the text in jsonl and parquet.")
    ] = None,
    side: Annotated[
        str | None,
        Option(help="'held-out', 'fit' or 'both'. Default: all documents no bank was fitted on."),
        preflight.choice("side", Side),
    ] = None,
    keep_fitted: Annotated[
        bool, Option("--keep-fitted", help="Also read documents a bank was fitted on.")
    ] = False,
    starts: options.Starts = None,
    out_folder: Annotated[
        Path | None,
        Option("--out", "-o", help="Write page, figure, CSV and JSON into this folder."),
        preflight.report_folder("evaluation.html", "report of an evaluation"),
        preflight.extras("report", "matplotlib"),
    ] = None,
    force: options.Force = False,
    loading: options.Loading = options.Loading(),
    json: options.Json = False,
) -> None:
    """Show how well the shortcuts of MODEL predict its output on a text, layer by layer.

    Compares banks with the logit lens: Precision@k, surprisal, KL and R2, with 95 % intervals
    over documents. Documents that a bank was fitted on are recognised and left out.

    Example: layerleap evaluate smollm2 --bank bank --bank default --text news -o scores
    """
    with clean_errors(), TerminalProgress() as progress:
        tell(f"reads {texts:,} texts of {text or 'the default text'} with {model}, at every layer")
        from layerleap.lens.evaluate import evaluate
        from layerleap.maps.fit import find_bank, sampling_of

        transformer = loading.load(model)
        banks: dict[str, Any] = {}
        for name in bank or ["default"]:
            label = Path(name).name
            label = label if label not in banks else name
            banks[label] = find_bank(transformer, name, other_model=other_model, progress=progress)
        cutting = {"unit": unit, "positions": positions, "field": field}
        chosen: dict[str, Any] = {k: v for k, v in cutting.items() if v is not None}
        sampling = replace(sampling_of(next(iter(banks.values()))), **chosen)
        evaluation = evaluate(
            transformer,
            banks if len(banks) > 1 else [*banks.values()],
            text,
            sampling,
            side=side,  # type: ignore[arg-type]  # checked there
            keep_fitted=keep_fitted or None,
            starts=starts,
            n_texts=texts,
            progress=progress,
        )
    if out_folder is not None:
        tell(f"page: {evaluation.report(out_folder)}")
    show(evaluation, json=json)
