"""`layerleap index` and `search`: neurons by the words they promote or suppress."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

import layerleap
from layerleap.lens.vocabulary.index_settings import IndexSettings, SearchSide, Space, index_folder
from layerleap.lens.vocabulary.store import check_none_building
from layerleap.show.cli import options, preflight
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, out, print_json, show, tell
from layerleap.zoo.catalog import MODEL_NAMES


def index(
    model: options.Model,
    out_file: Annotated[
        Path | None,
        Option("--out", "-o", help="File for the index; by default cached."),
        preflight.index_target,
    ] = None,
    top: Annotated[int, Option(help="Tokens to keep at both ends of a vector.")] = 50,
    text: options.Text = None,
    texts: Annotated[
        int, Option(help="Sentences for natural ranges of coefficients; 0 for none.")
    ] = 200,
    clusters: Annotated[
        int | None, Option(help="How many clusters; 0 for none. Default: one per 40 vectors.")
    ] = None,
    seed: Annotated[int, Option(help="Seed of the clusters.")] = 0,
    loading: options.Loading = options.Loading(),
    json: options.Json = False,
) -> None:
    """Read all neurons of MODEL in its vocabulary and keep the result, for search and debugging.

    For each value vector the index holds the tokens it promotes and suppresses most, its cluster,
    and the range of its coefficient on a text. Interrupted or killed, the same command continues
    where it stopped.

    Example: layerleap index smollm2
    """
    with clean_errors(), TerminalProgress() as progress:
        settings = IndexSettings(top, text, texts, clusters, seed)
        if out_file is None and model in MODEL_NAMES:
            check_none_building(index_folder(), model, asdict(settings))
        tell(f"reads the neurons of {model}, {texts:,} sentences for their ranges, and clusters")
        transformer = loading.load(model)
        how: dict[str, Any] = {"top": top, "text": text, "n_texts": texts, "clusters": clusters}
        concepts = layerleap.index(transformer, out_file, seed=seed, progress=progress, **how)
    if json:
        print_json(concepts.to_dict())
    else:
        _show_index(concepts)


def search(
    model: options.Model,
    query: Annotated[
        str, Argument(help="Words; 'guitar*' also matches 'guitars'."), preflight.query
    ],
    top: Annotated[
        int, Option("--top", "-k", help="How many neurons."), preflight.at_least("top", 1)
    ] = 10,
    side: Annotated[
        str,
        Option(help="Search the tokens that are 'promoted', 'suppressed', or 'both'."),
        preflight.choice("side", SearchSide),
    ] = "both",
    space: Annotated[
        str,
        Option(help="Match tokens 'with' a leading space, 'without' one, or 'any'."),
        preflight.choice("space", Space),
    ] = "any",
    index: Annotated[
        Path | None,
        Option("--index", "-i", help="File of the index; by default the cached one."),
        preflight.index,
    ] = None,
    loading: options.Loading = options.Loading(),
    json: options.Json = False,
) -> None:
    """Find the neurons of MODEL whose value vectors promote or suppress the words of QUERY.

    Neurons with most of the words come first, then those that have them highest among their tokens.
    The index is built first if there is none.

    Example: layerleap search smollm2 "guitar music band"
    """
    with clean_errors():
        if index is None and model in MODEL_NAMES:
            check_none_building(index_folder(), model, asdict(IndexSettings()))
        from layerleap.lens.vocabulary.index import ConceptIndex

        transformer = loading.load(model)
        if index is not None:
            concepts = ConceptIndex.open(transformer, index)
        else:
            with TerminalProgress() as progress:
                concepts = layerleap.index(transformer, progress=progress)
        how: dict[str, Any] = {"side": side, "space": space}
        show(concepts.search(query, top=top, **how), json=json)


def _show_index(index: Any) -> None:
    """What the index holds, and what it lacks and why."""
    about = index.to_dict()
    lines = [repr(index), f"{about['settings']['top']} tokens at both ends of each vector"]
    if about["ranges"]:
        where = f"{about['ranges']['positions']:,} positions of {about['ranges']['text']}"
        lines.append(f"natural ranges of the coefficients on {where}")
    missing = {"natural ranges": about["no_ranges"], "clusters": about["no_clusters"]}
    notes = [f"no {name}: {reason}" for name, reason in missing.items() if reason]
    notes += [f"block {e.block} left out: {e.reason}" for e in index.blocks if e.reason]
    lines += [*notes, f"{index.path} ({index.path.stat().st_size / 1e6:.1f} MB)"]
    for line in lines:
        out.print(line, style="yellow" if line in notes else "", markup=False, highlight=False)
