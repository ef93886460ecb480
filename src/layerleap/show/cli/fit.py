"""`layerleap fit`, `merge` and `import`: banks from a text, from shards, or from others' maps."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

import layerleap
from layerleap.maps.map_settings import read_ridge
from layerleap.show.cli import options, preflight
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, out, print_json, tell
from layerleap.stream.sampling import read_shard


def fit(
    model: options.Model,
    text: options.Text = None,
    out_folder: options.Out = Path("bank"),
    texts: Annotated[int | None, Option(help="How many texts to fit on; all by default.")] = None,
    pairs: Annotated[
        str,
        Option(help="'final': to the last layer; 'all': every pair."),
        preflight.choice("pairs", ("final", "all")),
    ] = "final",
    parts: Annotated[
        bool, Option("--parts", help="Also fit maps that replace attention, FFN and norms.")
    ] = False,
    cutting: options.Cutting = options.Cutting(),
    starts: options.Starts = None,
    intercept: Annotated[bool, Option("--intercept", help="Fit a bias too.")] = False,
    ridge: Annotated[
        str | None,
        Option(
            help="Penalty as a fraction of the mean eigenvalue, or 'auto': chosen on a tenth of "
            "the documents. Default: chosen up to ten rows per direction, else 0."
        ),
        preflight.solving,
    ] = None,
    rank: options.Rank = None,
    no_evaluate: options.NoEvaluate = False,
    shard: Annotated[
        str | None,
        Option(help="'0/4': do the first of four parts and save its statistics for merge."),
        preflight.shard,
    ] = None,
    force: options.Force = False,
    loading: options.Loading = options.Loading(),
    json: options.Json = False,
) -> None:
    """Fit linear shortcuts for MODEL in one pass over a text, and save them as a bank.

    Interrupted or killed, the same command continues where it stopped. An existing bank is only
    replaced with --force. Under torchrun the processes share the work; --shard divides it between
    machines by hand.

    Example: layerleap fit smollm2 --text news --positions every:4 --unit paragraph -o bank
    """
    with clean_errors(), TerminalProgress() as progress:
        how_many = "all texts" if texts is None else f"{texts:,} texts"
        tell(f"one pass of {model} over {how_many} of {text or 'its default text'}, then the maps")
        from layerleap.maps.fit import fit
        from layerleap.stats import collect, finish
        from layerleap.stats.fit_statistics import world

        number = None if ridge is None else read_ridge(ridge)
        sampling = cutting.sampling()
        part = None if shard is None else read_shard(shard)
        transformer = loading.load(model)
        solving: dict[str, Any] = {"intercept": intercept, "ridge": number, "rank": rank}
        work = out_folder.with_name(f".{out_folder.name}.fitting.safetensors")
        if work.exists():
            tell(f"continuing from the checkpoint {work}")
        how: dict[str, Any] = {"starts": starts, "n_texts": texts, "pairs": pairs, "parts": parts}
        how |= {"checkpoint": work, "progress": progress}
        if part:
            how |= {"shard": part, "choose_ridge": number == "auto", "solving": solving}
            stats = collect(transformer, text, sampling, **how)
            stats.save(out_folder)
            finish(work)
            out.print(f"statistics of shard {shard} ({stats.fit.n} rows): {out_folder}")
            return
        bank = fit(transformer, text, sampling, **solving, evaluate=not no_evaluate, **how)
        is_first = world()[0] == 0
        if is_first:
            bank.save_pretrained(out_folder)
        finish(work)
    if is_first:
        _show_bank(bank, out_folder, json)


def _show_bank(bank: Any, folder: Path, json: bool) -> None:
    finals = [fit.to_dict() for fit in bank.fits.values() if fit.dst == bank.n_layers]
    if json:
        print_json({"bank": str(folder), "maps": len(bank), "data": bank.data, "fits": finals})
        return
    from layerleap.show.cli.tables import fits_table

    out.print(fits_table(finals))
    if "ridge" in bank.data:
        out.print(f"ridge: {bank.data['ridge']}", highlight=False, soft_wrap=True)
    out.print(f"{bank!r}: {folder}", highlight=False, soft_wrap=True)


def merge(
    files: Annotated[list[Path], Argument(help="The files of all shards.")],
    out_folder: options.Out = Path("bank"),
    intercept: Annotated[
        bool | None,
        Option(
            "--intercept/--no-intercept", help="Fit a bias. By default, as the shards were fitted."
        ),
    ] = None,
    ridge: Annotated[
        str | None,
        Option(help="A number or 'auto'. By default, as the shards were fitted."),
        preflight.solving,
    ] = None,
    rank: options.Rank = None,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Merge the statistics of shards into the bank that one run would have given.

    Intercept, ridge and rank are those that the shards were fitted with, unless given here.

    Example: layerleap merge part-0 part-1 part-2 part-3 -o bank
    """
    with clean_errors(), TerminalProgress() as progress:
        from layerleap.maps.fit import solve_bank
        from layerleap.stats import merge as merged

        number = None if ridge is None else read_ridge(ridge)
        stats = merged(files)
        bank = solve_bank(stats, intercept=intercept, ridge=number, rank=rank, progress=progress)
        bank.save_pretrained(out_folder)
    _show_bank(bank, out_folder, json)


Folder = Annotated[
    Path, Argument(exists=True, file_okay=False, help="Folder with the published maps.")
]
Of = Annotated[str, Option("--model", "-m", help="The model the maps belong to."), preflight.model]


def _imported(kind: str, folder: Path, model: str, out_folder: Path) -> None:
    with clean_errors():
        importer = {"mat": layerleap.import_mat, "tuned-lens": layerleap.import_tuned_lens}[kind]
        bank = importer(folder, options.Loading().load(model))
        bank.save_pretrained(out_folder)
        out.print(f"{bank!r}: {out_folder}", highlight=False, soft_wrap=True)


def import_mat(
    folder: Folder, model: Of, out_folder: options.Out = Path("bank"), force: options.Force = False
) -> None:
    """Import mat's i_j.pickle matrices; nothing in the files is executed.

    Example: layerleap import mat linear-shortcut/gpt2-medium --model gpt2-medium -o bank
    """
    _imported("mat", folder, model, out_folder)


def import_tuned_lens(
    folder: Folder, model: Of, out_folder: options.Out = Path("bank"), force: options.Force = False
) -> None:
    """Import a tuned-lens folder (config.json, params.pt); nothing in it is executed.

    Example: layerleap import tuned-lens lens/gpt2 --model gpt2 -o bank
    """
    _imported("tuned-lens", folder, model, out_folder)
