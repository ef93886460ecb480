"""The command line: parse, call one function, print one thing.

In: arguments. Out: tables on stdout (or JSON with --json), progress and errors on stderr.
Computes nothing: what a command can do, three lines of Python can do. torch is imported only
inside the commands that need it, so that --help answers at once.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

import layerleap
from layerleap.errors import BadSettings
from layerleap.show.terminal import TerminalProgress, clean_errors, out, print_json, tell

app = typer.Typer(
    name="layerleap",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""See what a transformer is about to say, layers before it says it.

    [bold]First steps[/]

      layerleap models                                     what is bundled
      layerleap check smollm2                              can this model be trusted to be read?
      layerleap read smollm2 "The capital of France is"    every layer's guess
      layerleap study shortcuts smollm2 --quick -o report  a report to look at

    MODEL is a bundled name, a hub name, a folder, or a GGUF file.
    """,
)
study_app = typer.Typer(no_args_is_help=True, help="Run one of the papers' experiments.")
import_app = typer.Typer(no_args_is_help=True, help="Turn maps that others published into a bank.")
app.add_typer(study_app, name="study")
app.add_typer(import_app, name="import")

Model = Annotated[str, typer.Argument(help="Bundled name, hub name, folder or GGUF file.")]
Text = Annotated[
    str | None,
    typer.Option(
        "--text",
        "-t",
        help="wikipedia, news, 'drawn' (by the model itself), a file (txt, jsonl, parquet, .gz), "
        "a folder, '-' for standard input, or a data set of the hub. By default wikipedia, or "
        "drawn for bundled models that do not speak English.",
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write; replaced when finished.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Blocks = Annotated[str | None, typer.Option(help="Path of the list of blocks, if discovery fails.")]
Tail = Annotated[
    str | None, typer.Option(help="Paths of the modules after the last block, with commas.")
]
Revision = Annotated[str | None, typer.Option(help="Hub revision of the model.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 ...; as saved when left out.")]
Intercept = Annotated[bool, typer.Option("--intercept", help="Fit a bias too.")]
Ridge = Annotated[
    str, typer.Option(help="Penalty as a fraction of the mean eigenvalue, or 'auto'.")
]
Rank = Annotated[int | None, typer.Option(help="Keep only this many directions of each map.")]
Unit = Annotated[str, typer.Option(help="What one text is: sentence, paragraph or document.")]
Positions = Annotated[
    str, typer.Option(help="'one' random position per text, 'all', or 'every:N'.")
]
MaxTokens = Annotated[int, typer.Option(help="Longer texts are cut here.")]
Seed = Annotated[int, typer.Option(help="Decides which documents, texts and positions.")]


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        out.print(f"layerleap {layerleap.__version__}", highlight=False)
        raise typer.Exit


def _load(
    model: str,
    blocks: str | None = None,
    tail: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    **more: Any,
) -> Any:
    options = {"revision": revision, "dtype": dtype}
    chosen = {key: value for key, value in options.items() if value is not None}
    paths = [part.strip() for part in tail.split(",")] if tail else None
    return layerleap.load(model, blocks=blocks, tail=paths, tell=tell, **chosen, **more)


def _ridge(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError as error:
        raise BadSettings(f"ridge {text!r} is neither 'auto' nor a number") from error


@app.command()
def models(json: Json = False) -> None:
    """List the bundled models and texts, and which of them are in the cache.

    Example: layerleap models
    """
    from layerleap.models.zoo import inventory

    with clean_errors():
        rows = inventory()
        if json:
            print_json(rows)
            return
        from layerleap.show.tables import inventory_table

        out.print(inventory_table(rows))


@app.command()
def check(
    model: Model,
    blocks: Blocks = None,
    tail: Tail = None,
    revision: Revision = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Check MODEL against the laws that make it readable; exit code 0 only if all hold.

    A folder without a tokenizer is enough.

    Example: layerleap check ./my-model --blocks transformer.h --tail transformer.ln_f,lm_head
    """
    with clean_errors():
        from layerleap.models.laws import check_model
        from layerleap.models.load import load_bare

        bare = load_bare(model, tell=tell, revision=revision, dtype=dtype)
        paths = [part.strip() for part in tail.split(",")] if tail else None
        verdicts = [verdict.to_dict() for verdict in check_model(bare, blocks=blocks, tail=paths)]
        if json:
            print_json(verdicts)
        else:
            from layerleap.show.tables import laws_table

            out.print(laws_table(verdicts))
    if any(verdict["status"] == "fails" for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def fit(
    model: Model,
    text: Text = None,
    out_folder: Out = Path("bank"),
    texts: Annotated[
        int | None, typer.Option(help="How many texts to fit on; all by default.")
    ] = None,
    pairs: Annotated[
        str, typer.Option(help="'final': to the last layer; 'all': every pair.")
    ] = "final",
    unit: Unit = "sentence",
    positions: Positions = "one",
    max_tokens: MaxTokens = 128,
    held_out: Annotated[float, typer.Option(help="Share of documents never fitted on.")] = 0.25,
    intercept: Intercept = False,
    ridge: Ridge = "0",
    rank: Rank = None,
    seed: Seed = 0,
    shard: Annotated[
        str | None,
        typer.Option(help="'0/4': do the first of four parts and write its statistics, for merge."),
    ] = None,
    blocks: Blocks = None,
    tail: Tail = None,
    revision: Revision = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Fit linear shortcuts for MODEL in one pass over a text, and save them as a bank.

    Interrupted or killed, the same command goes on where it was. Under torchrun the processes
    share the work; --shard divides it between machines by hand.

    Example: layerleap fit smollm2 --text news --positions every:4 --unit paragraph -o bank
    """
    with clean_errors(), TerminalProgress() as progress:
        from layerleap import Sampling, bank_from, collect
        from layerleap.maps.linear import check_solving
        from layerleap.recipes import resolve_text
        from layerleap.stats.tally import world

        number = _ridge(ridge)
        sampling = Sampling(
            unit=unit,
            positions=positions, max_tokens=max_tokens, held_out=held_out, seed=seed,
        )  # fmt: skip
        part = _shard(shard)
        transformer = _load(model, blocks, tail, revision, dtype)
        check_solving(number, rank, transformer.d_model)
        source, sampling = resolve_text(transformer, text, sampling, progress)
        work = out_folder.with_name(f".{out_folder.name}.fitting.safetensors")
        tally = collect(
            transformer, source, sampling, n_texts=texts, pairs=pairs, shard=part,
            choose_ridge=number == "auto", checkpoint=work, progress=progress,
        )  # fmt: skip
        if part:
            tally.save(out_folder)
            out.print(f"statistics of shard {shard} ({tally.fit.n} rows): {out_folder}")
            return
        if world()[0] != 0:
            return
        bank = bank_from(tally, intercept=intercept, ridge=number, rank=rank, progress=progress)
        bank.save_pretrained(out_folder)
    _show_bank(bank, out_folder, json)


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    which, _, of = text.partition("/")
    if not (which.isdigit() and of.isdigit()):
        raise BadSettings(f"shard {text!r} is not of the form 0/4")
    return int(which), int(of)


def _show_bank(bank: Any, folder: Path, json: bool) -> None:
    finals = [fit.to_dict() for fit in bank.fits.values() if fit.dst == bank.n_layers]
    if json:
        print_json({"bank": str(folder), "maps": len(bank), "data": bank.data, "fits": finals})
        return
    from layerleap.show.tables import fits_table

    out.print(fits_table(finals))
    out.print(f"{bank!r}: {folder}", highlight=False, soft_wrap=True)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="The files of all shards.")],
    out_folder: Out = Path("bank"),
    intercept: Intercept = False,
    ridge: Ridge = "0",
    rank: Rank = None,
    json: Json = False,
) -> None:
    """Add up the statistics of shards and fit the bank that one run would have given.

    Example: layerleap merge part-0 part-1 part-2 part-3 -o bank
    """
    with clean_errors(), TerminalProgress() as progress:
        from layerleap import bank_from
        from layerleap import merge as merged

        tally = merged(files)
        bank = bank_from(
            tally, intercept=intercept, ridge=_ridge(ridge), rank=rank, progress=progress
        )
        bank.save_pretrained(out_folder)
    _show_bank(bank, out_folder, json)


@app.command()
def read(
    model: Model,
    text: Annotated[
        str, typer.Argument(help="What to read; for masked models with the mask token.")
    ],
    bank: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of a bank. Without it, one is fitted once and kept."),
    ] = None,
    no_bank: Annotated[bool, typer.Option("--no-bank", help="Only the logit lens (id).")] = False,
    position: Annotated[
        int | None, typer.Option(help="Which token's reading to show; the last by default.")
    ] = None,
    top_k: Annotated[int, typer.Option(help="How many tokens per layer.")] = 3,
    html: Annotated[Path | None, typer.Option(help="Also write all positions as a page.")] = None,
    revision: Revision = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Show what every layer of MODEL would say, id and mat side by side.

    Example: layerleap read smollm2 "The capital of France is"
    """
    with clean_errors():
        from layerleap import Lens, ShortcutBank
        from layerleap.recipes import default_bank

        transformer = _load(model, revision=revision, dtype=dtype)
        with TerminalProgress() as progress:
            if no_bank:
                found = None
            elif bank is not None:
                found = ShortcutBank.from_pretrained(bank)
            else:
                found = default_bank(transformer, tell=tell, progress=progress)
        readings = Lens(transformer, found).read(
            text, positions=None if html or position is None else [position], top_k=top_k
        )
        if html:
            from layerleap.show.report import write_readings

            tell(f"all positions: {write_readings(readings, text, html)}")
        if json:
            print_json(readings.to_dict())
            return
        from layerleap.show.tables import readings_table

        shown = readings.positions[-1] if position is None else position
        rows = readings.at(shown)
        out.print(readings_table(rows, readings.n_layers))


@app.command()
def card(bank: Annotated[str, typer.Argument(help="Folder or hub name of a bank.")]) -> None:
    """Print the card of a bank: what it is of, how it was made, how good it is.

    Example: layerleap card bank
    """
    with clean_errors():
        from layerleap import ShortcutBank

        out.print(ShortcutBank.from_pretrained(bank).card(), highlight=False, markup=False)


@study_app.command("shortcuts")
def study_shortcuts(
    model: Model,
    text: Text = None,
    other: Annotated[
        str, typer.Option(help="A second text, for transfer; 'none' leaves it out.")
    ] = "news",
    out_folder: Out = Path("report"),
    fit_texts: Annotated[int, typer.Option(help="Texts to fit on.")] = 9000,
    read_texts: Annotated[int, typer.Option(help="Held-out texts to read.")] = 3000,
    pairs: Annotated[
        str, typer.Option(help="'all': heat maps of every pair; 'final': without.")
    ] = "all",
    unit: Unit = "sentence",
    positions: Positions = "one",
    max_tokens: MaxTokens = 128,
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
    that were not fitted on, and transfer to a second text. Interrupted while fitting, the same
    command goes on where it was.

    Example: layerleap study shortcuts smollm2 --quick -o report
    """
    with clean_errors():
        from layerleap import Sampling
        from layerleap.show.report import write_report
        from layerleap.study.shortcuts import ShortcutSettings, default_texts
        from layerleap.study.shortcuts import study_shortcuts as run

        number = _ridge(ridge)
        sampling = Sampling(
            unit=unit,
            positions=positions, max_tokens=max_tokens, held_out=held_out,
            include_special=include_special, seed=seed,
        )  # fmt: skip
        transformer = _load(model, blocks, tail, revision, dtype)
        main, second = default_texts(transformer, text, None if other == "none" else other)
        settings = ShortcutSettings(
            text=main, other=second, n_fit=fit_texts, n_read=read_texts, pairs=pairs,
            intercept=intercept, ridge=number, sampling=sampling,
        )  # fmt: skip
        if quick:
            settings = settings.quickened()
        with TerminalProgress() as progress:
            result, bank = run(transformer, settings, work=out_folder / ".work", progress=progress)
            bank.save_pretrained(out_folder / "bank")
            page = write_report(result, out_folder)
        _clear(out_folder / ".work")
    _show_study(result, page, json)


def _clear(folder: Path) -> None:
    """Remove the checkpoints of a study that has finished."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _show_study(result: dict[str, Any], page: Path, json: bool) -> None:
    if json:
        print_json(result)
        return
    from layerleap.show.tables import study_table

    out.print(study_table(result))
    for finding in result["findings"]:
        if finding["topic"] == "headline":
            out.print(f"- {finding['text']}", highlight=False)
    out.print(f"\nreport: {page}", highlight=False, soft_wrap=True)
    out.print(f"bank:   {page.parent / 'bank'}", highlight=False, soft_wrap=True)


def _imported(kind: str, folder: Path, model: str, out_folder: Path) -> None:
    with clean_errors():
        importer = {"mat": layerleap.import_mat, "tuned-lens": layerleap.import_tuned_lens}[kind]
        bank = importer(folder, _load(model))
        bank.save_pretrained(out_folder)
        out.print(f"{bank!r}: {out_folder}", highlight=False, soft_wrap=True)


Folder = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="What they published.")]
Of = Annotated[str, typer.Option("--model", "-m", help="The model the maps belong to.")]


@import_app.command("mat")
def import_mat(folder: Folder, model: Of, out_folder: Out = Path("bank")) -> None:
    """Import mat's i_j.pickle matrices; nothing in the files is executed.

    Example: layerleap import mat linear-shortcut/gpt2-medium --model gpt2-medium -o bank
    """
    _imported("mat", folder, model, out_folder)


@import_app.command("tuned-lens")
def import_tuned_lens(folder: Folder, model: Of, out_folder: Out = Path("bank")) -> None:
    """Import a tuned-lens folder (config.json, params.pt); nothing in it is executed.

    Example: layerleap import tuned-lens lens/gpt2 --model gpt2 -o bank
    """
    _imported("tuned-lens", folder, model, out_folder)


def main() -> None:
    """Entry point."""
    app()
