"""Evaluate banks on text they were not fitted on: how well do they predict the model's output?

In: a wrapped model, one or several of its banks, and a text.
Out: an `Evaluation`: Precision@k, surprisal, KL and R2 of each layer's map to the last layer, next
to the logit lens, with 95 % intervals over documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, BadText, CannotFetch, check_choice
from layerleap.lens.lens import Lens
from layerleap.lens.map_errors import MapErrors
from layerleap.lens.scores import score
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import find_bank, sampling_of
from layerleap.maps.map import IdentityMap
from layerleap.models.identity import caveats
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, reporting
from layerleap.results.base import WIDE, Result
from layerleap.results.cells import Grid, grid_of
from layerleap.results.columns import Column, Row, Table, Wide
from layerleap.results.plain import plain
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Batch, Sampling, TextCounts
from layerleap.stream.source import default_text, n_to_generate, resolve_text
from layerleap.stream.split import Side

METRICS = ("precision@1", "precision@5", "precision@10", "surprisal", "kl", "r2")
SIDES = {"held-out": "held-out ", "fit": "fitting ", "both": ""}  # as an adjective

Bank = ShortcutBank | str | Path  # a bank, its folder or hub name, or "default"


@dataclass(frozen=True, repr=False)
class Evaluation(Result):
    """The scores of banks and of the logit lens on one text.

    `scores` has one row per map, layer and metric: map ("logit" is the logit lens), layer, metric,
    value, low and high (a 95 % interval over documents), rows and documents. At the last layer all
    maps read the model itself: precision and R2 are 1, KL is 0, surprisal is -ln p_max.
    """

    KIND: ClassVar[str] = "evaluation"
    LEGEND: ClassVar[str] = (
        "P@k: how often the map's top token is among the model's top k; surprisal and KL in nats; "
        "bold: best of the layer; all numbers: to_pandas() or --json"
    )
    TEMPLATE: ClassVar[str] = "evaluation"
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table("scores", "", lambda evaluation: evaluation.scores),
    )

    model: dict[str, Any]  # identity, as in the bank
    text: str
    side: Side  # which documents of the text were read
    fitted_on: bool  # True if a bank was fitted on some of these documents
    left_out: int  # documents that were left out because a bank was fitted on them
    unknown: tuple[str, ...]  # banks that do not say which documents they were fitted on
    n_layers: int
    n_rows: int
    n_documents: int
    scores: list[dict[str, Any]] = field(repr=False)

    @property
    def maps(self) -> list[str]:
        """The names of the maps, the logit lens first."""
        return list(dict.fromkeys(row["map"] for row in self.scores))

    def at(self, layer: int) -> list[dict[str, Any]]:
        """The rows of one layer; negative numbers count from the last."""
        if not -self.n_layers - 1 <= layer <= self.n_layers:
            raise BadSettings(f"layer {layer} does not exist; expected 0 to {self.n_layers}")
        layer %= self.n_layers + 1
        return [row for row in self.scores if row["layer"] == layer]

    def by_layer(self) -> list[dict[str, Any]]:
        """One row per layer below the last: the first bank beside the logit lens, for a card."""
        by_map = {(row["layer"], row["map"]): row for row in _by_map(self)}
        table = []
        for layer in range(self.n_layers):
            row: dict[str, Any] = {"layer": layer, "rows": self.n_rows}
            for metric in ("precision@1", "kl", "r2"):
                row[f"{metric} of logit"] = by_map[layer, IdentityMap.kind][metric]
                row[metric] = by_map[layer, self.maps[1]][metric]
            table.append(row)
        return table

    @property
    def notes(self) -> list[str]:
        """What limits these scores, a sentence each."""
        notes = caveats(self.model)
        if self.fitted_on:
            notes.append("A bank was fitted on some of these documents: its scores are too good.")
        if self.left_out:
            notes.append(f"{self.left_out} documents that a bank was fitted on were left out.")
        if self.unknown:
            notes.append(
                f"{' and '.join(self.unknown)}: which documents it was fitted on is not known. If "
                "it was fitted on some of these, its scores are too good."
            )
        return notes

    def facts(self) -> Row:
        """What was evaluated, and on what."""
        return {key: plain(value) for key, value in vars(self).items()}

    def report(self, folder: str | Path) -> Path:
        """Write a page, its figure (SVG) and the numbers (CSV, JSON); returns the page's path."""
        from layerleap.show.report.evaluation import write_evaluation

        return write_evaluation(self, Path(folder))

    def short(self) -> str:
        """What it is, in one line."""
        size = f"{self.n_rows} rows, {self.n_documents} documents"
        maps = " and ".join(self.maps)
        return f"Evaluation({maps} of {self.model['name']} on {self.text}: {size})"

    def headline(self) -> str:
        """What was evaluated, and on how much."""
        is_unseen = self.side == "both" and not (self.fitted_on or self.unknown)
        kind = "unseen " if is_unseen else SIDES[self.side]
        return (
            f"{self.model['name']} on {self.text}: {self.n_rows} rows from {self.n_documents} "
            f"{kind}documents, 95 % intervals over documents"
        )

    def grids(self, width: int | None = None) -> list[Grid]:
        """The scores of every map at every layer.

        Terminals narrower than 130 columns show intervals of Precision@1 and KL only, and leave
        out Precision@5.
        """
        wide = width is None or width >= WIDE
        return [grid_of(SCORES, self, wide=wide)]

    def picture(self) -> Row:
        """The scores by layer, drawn, or why they are not."""
        from layerleap.show.figures.evaluation import evaluation_figure  # a convenience

        try:
            return {"figure": evaluation_figure(self), "no_figure": ""}
        except CannotFetch as error:  # matplotlib belongs to an extra
            return {"figure": "", "no_figure": str(error)}


def _by_map(evaluation: Evaluation) -> list[Row]:
    """One row per layer and map, with a key per metric and end of its interval."""
    table: dict[tuple[int, str], Row] = {}
    for layer in range(evaluation.n_layers + 1):
        for row in evaluation.at(layer):
            key = (layer, row["map"])
            wide = table.setdefault(key, {"layer": layer, "map": row["map"]})
            metric, low, high = row["metric"], row["low"], row["high"]
            wide |= {metric: row["value"], f"{metric} low": low, f"{metric} high": high}
    return list(table.values())


def _metric(metric: str, title: str, wide: Wide = "interval") -> Column:
    """The column of one metric."""
    form, scale = ("{:.0f}", 100.0) if metric.startswith("precision") else ("{:.2f}", 1.0)
    best: Literal["min", "max"] = "min" if metric in ("surprisal", "kl") else "max"
    ends = (f"{metric} low", f"{metric} high")
    return Column(metric, title, form, scale, *ends, best=best, wide=wide)


SCORES = Table(
    "scores",
    "",
    _by_map,
    (
        Column("layer"),
        Column("map"),
        _metric("precision@1", "P@1, %", wide=""),
        _metric("precision@5", "P@5, %", wide="column"),
        _metric("precision@10", "P@10, %"),
        _metric("surprisal", "surprisal"),
        _metric("kl", "KL", wide=""),
        _metric("r2", "R2"),
    ),
    within="layer",
)


@checked
def evaluate(
    transformer: Transformer,
    bank: Bank | Sequence[Bank] | Mapping[str, Bank] = "default",
    text: Any = None,
    sampling: Sampling | None = None,
    *,
    side: Side | None = None,
    other_model: bool = False,
    keep_fitted: bool | None = None,
    starts: str | None = None,
    n_texts: int | None = None,
    tokens_per_batch: int = 1024,
    progress: Progress | bool = True,
) -> Evaluation:
    """The scores of banks on a text, next to the logit lens, from one pass.

        print(ll.evaluate(model, bank, "news"))
        ll.evaluate(model, {"mine": bank, "default": "default"}, "news").report("scores")

    Documents that a bank was fitted on are recognised and left out, even in another text.

    Args:
        bank: a bank of the model with a map from every layer to the last; or its folder or hub
            name; or "default", the bank in the cache. A list or a dictionary by name compares
            several banks on the same rows.
        text: anything `batches_of` reads, "generated", or None for the model's default text.
        sampling: how to cut texts, choose positions and hold out documents; by default as the
            (first) bank was fitted, with one position per text: more of them are hardly
            independent, and each is read at every layer.
        side: "held-out" documents, "fit" for those the bank may be fitted on, or "both". By
            default both, because documents that were fitted on are left out; but the held-out ones
            if a bank does not know its documents.
        other_model: allow banks of another model of the same class and width, with a warning.
        keep_fitted: also read documents that a bank was fitted on; only for side "fit" by default.
        starts: a text of real sequences from which a masked model draws its texts.
        n_texts: stop after this many texts; all by default.
        progress: a function to call, True for bars on a terminal or in a notebook, or False.
    """
    transformer.refresh(thorough=True)
    with reporting(progress) as report:
        banks = _named_banks(transformer, bank, report, other_model=other_model)
        to_last = {name: _to_last(one) for name, one in banks.items()}
        first = next(iter(banks.values()))
        sampling = sampling or replace(sampling_of(first), positions="one")
        unknown = tuple(label for label, one in banks.items() if one.documents is None)
        side = side or ("held-out" if unknown and sampling.held_out else "both")
        name, source, sampling = _source(transformer, text, sampling, side, starts, n_texts, report)
        keep = side == "fit" if keep_fitted is None else keep_fitted
        fitted = frozenset[int]().union(*(one.documents or () for one in banks.values()))
        text_counts = TextCounts(leave_out=frozenset() if keep else fitted)
        options: dict[str, Any] = {
            "side": side,
            "n_texts": n_texts,
            "tokens_per_batch": tokens_per_batch,
        }
        batches = batches_of(transformer, source, sampling, text_counts=text_counts, **options)
        errors = {name: MapErrors(one) for name, one in to_last.items()}

        def on_states(states: Mapping[int, Tensor], batch: Batch) -> None:
            for one in errors.values():
                one.add(states, batch)

        lenses = {IdentityMap.kind: Lens(transformer)}
        lenses |= {label: Lens(transformer, one) for label, one in banks.items()}
        try:
            watched: dict[str, Any] = {"progress": report, "total": n_texts, "phase": "evaluating"}
            scores = score(transformer, lenses, batches, on_states=on_states, **watched)
        except BadText as error:
            if not text_counts.left_out:
                raise
            raise _too_little(name, 0, 0, text_counts.left_out) from error
    n_rows, n_documents = len(scores.documents), len(scores.documents.unique())
    if n_documents < 2:
        raise _too_little(name, n_rows, n_documents, text_counts.left_out)
    is_fitted_on, table = bool(text_counts.used & fitted), [*scores.table(), *_r2_rows(errors)]
    documents = is_fitted_on, text_counts.left_out, unknown
    return Evaluation(
        first.model, name, side, *documents, first.n_layers, n_rows, n_documents, table
    )


def _named_banks(
    transformer: Transformer,
    bank: Bank | Sequence[Bank] | Mapping[str, Bank],
    progress: Progress,
    *,
    other_model: bool = False,
) -> dict[str, ShortcutBank]:
    """The banks by the name they have in tables."""
    if isinstance(bank, Mapping):
        named: list[tuple[str | None, Bank]] = list(bank.items())
    else:
        many = [bank] if isinstance(bank, ShortcutBank | str | Path) else list(bank)
        named = [(None, one) for one in many]
    banks: dict[str, ShortcutBank] = {}
    for label, one in named:
        opened = find_bank(transformer, one, other_model=other_model, progress=progress)
        if opened is None:
            raise BadSettings("there is no bank to evaluate; expected a bank, its folder or name")
        if label is None:
            is_named = isinstance(one, str | Path) and len(named) > 1
            label = Path(str(one)).name if is_named else Lens(transformer, opened).name
        labels = [label, *(f"{label} {number}" for number in range(2, len(named) + 2))]
        banks[next(name for name in labels if name not in {IdentityMap.kind, *banks})] = opened
    if not banks:
        raise BadSettings("there is no bank to evaluate; expected at least one")
    return banks


def _to_last(bank: ShortcutBank) -> ShortcutBank:
    """Only the maps to the last layer, of which none may be missing."""
    last = bank.n_layers
    maps = [bank.maps[pair] for pair in sorted(bank.maps) if pair[1] == last]
    if len(maps) < last:
        missing = sorted(set(range(last)) - {m.src for m in maps})
        raise BadSettings(f"this bank has no map to the last layer from layers {missing}")
    return bank.changed(maps=maps, parts={}, fits=[])


def _source(
    transformer: Transformer,
    text: Any,
    sampling: Sampling,
    side: Side,
    starts: str | None,
    n_texts: int | None,
    progress: Progress,
) -> tuple[str, Any, Sampling]:
    """The name of the text, the text itself, and how to sample it."""
    shares = {"held-out": sampling.held_out, "fit": 1 - sampling.held_out, "both": 1.0}
    check_choice(side, Side, "side")
    if not shares[side]:
        raise BadSettings(
            "no document is held out: the sampling has held_out 0; read all documents of a text "
            "the bank was not fitted on (side='both'), or pass a sampling with held_out above 0"
        )
    if text is None:
        text = default_text(transformer) if starts is None else "generated"
    n_generated = None if n_texts is None else n_to_generate(n_texts, shares[side])
    source, sampling = resolve_text(transformer, text, sampling, progress, starts, n_generated)
    name = str(text) if isinstance(text, str | Path) else "given texts"
    return name, source, sampling


def _too_little(text: str, rows: int, documents: int, left_out: int) -> BadText:
    fitted = f" ({left_out} more were left out: a bank was fitted on them)" if left_out else ""
    return BadText(
        f"{text} gives {rows} rows of {documents} document{fitted}; an interval needs at least 2 "
        "documents: give more or other text, or raise held_out"
    )


def _r2_rows(errors: Mapping[str, MapErrors]) -> Iterator[dict[str, Any]]:
    """R2 in the form of the other metrics; the last layer predicts itself."""
    tables = {label: one.table() for label, one in errors.items()}
    plain = IdentityMap.kind
    kinds = [(plain, plain, next(iter(tables.values())))]
    kinds += [(errors[label].kind, label, table) for label, table in tables.items()]
    for kind, label, table in kinds:
        ends = {row["src"]: row for row in table if row["map"] == kind}
        last = {"src": len(ends), "r2": 1.0, "low": 1.0, "high": 1.0}
        for layer, row in [*sorted(ends.items()), (len(ends), {**ends[0], **last})]:
            numbers = {key: row[key] for key in ("low", "high", "rows", "documents")}
            metric = {"map": label, "layer": layer, "metric": "r2", "value": row["r2"]}
            yield {**metric, **numbers}
