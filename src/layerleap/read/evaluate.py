"""Evaluate a bank on held-out text: how well do its maps predict the model's output?

In: a wrapped model, its bank, and a text.
Out: an `Evaluation`: Precision@k, surprisal, KL and R2 of each layer's map to the last layer, next
to the logit lens, with 95 % intervals over documents.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from layerleap.errors import BadSettings, BadText
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.read.lens import Lens
from layerleap.read.map_errors import MapErrors
from layerleap.read.scores import score
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Sampling
from layerleap.stream.source import default_text, n_to_generate, resolve_text
from layerleap.stream.split import Side

SHOWN = ("precision@1", "surprisal", "kl", "r2")  # columns of the printed table


@dataclass(frozen=True)
class Evaluation:
    """The scores of a bank and of the logit lens on one text.

    `scores` has one row per map, layer and metric: map ("id" is the logit lens), layer, metric,
    value, low and high (a 95 % interval over documents), rows and documents. At the last layer all
    maps read the model itself: precision and R2 are 1, KL is 0, surprisal is -ln p_max.
    """

    model: dict[str, Any]  # identity, as in the bank
    text: str
    side: Side  # which documents of the text were read
    fitted_on: bool  # True if the bank is known to be fitted on some of these documents
    n_layers: int
    n_rows: int
    n_documents: int
    scores: list[dict[str, Any]] = field(repr=False)

    def at(self, layer: int) -> list[dict[str, Any]]:
        """The rows of one layer; negative numbers count from the last."""
        if not -self.n_layers - 1 <= layer <= self.n_layers:
            raise BadSettings(f"layer {layer} does not exist; expected 0 to {self.n_layers}")
        layer %= self.n_layers + 1
        return [row for row in self.scores if row["layer"] == layer]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def to_pandas(self) -> Any:
        """One line per map, layer and metric."""
        import pandas

        return pandas.DataFrame(self.scores)

    def __repr__(self) -> str:
        maps = " and ".join(dict.fromkeys(row["map"] for row in self.scores))
        size = f"{self.n_rows} rows, {self.n_documents} documents"
        return f"Evaluation({maps} of {self.model['name']} on {self.text}: {size})"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        documents = {"held-out": "held-out ", "fit": "fitting ", "both": ""}[self.side]
        yield (
            f"{self.model['name']} on {self.text}: {self.n_rows} rows from {self.n_documents} "
            f"{documents}documents, 95 % intervals over documents"
        )
        if self.fitted_on:
            yield "The bank was fitted on some of these documents, so its scores are too good."
        yield "layer  map   " + "".join(f"{metric:<25}" for metric in SHOWN).rstrip()
        for layer in range(self.n_layers + 1):
            cells = {(row["map"], row["metric"]): _cell(row) for row in self.at(layer)}
            for name in dict.fromkeys(map_name for map_name, _ in cells):
                columns = "".join(f"{cells[name, metric]:<25}" for metric in SHOWN)
                yield f"{layer:>5}  {name:<5} {columns}".rstrip()


def _cell(row: dict[str, Any]) -> str:
    numbers = (row[key] for key in ("value", "low", "high"))
    return "{} [{}, {}]".format(*("-" if n is None else f"{n:.3f}" for n in numbers))


def evaluate(
    transformer: Transformer,
    bank: ShortcutBank,
    text: Any = None,
    sampling: Sampling | None = None,
    *,
    side: Side = "held-out",
    starts: str | None = None,
    n_texts: int | None = None,
    tokens_per_batch: int = 1024,
    progress: Progress = silent,
) -> Evaluation:
    """The scores of a bank's maps to the last layer on a text, from one pass.

        print(ll.evaluate(model, bank, "news"))

    By default only held-out documents are read. Which documents are held out follows from the
    bank's own sampling settings, so none of them was used to fit the bank, even if `text` is the
    text it was fitted on.

    Args:
        bank: a bank of that model, fitted or tuned, with a map from every layer to the last.
        text: anything `batches_of` reads, "generated", or None for the model's default text.
        sampling: how to cut texts, choose positions and hold out documents; by default as the
            bank was fitted.
        side: "held-out" documents, "fit" for those the bank may be fitted on, or "both".
        starts: a text of real sequences from which a masked model draws its texts.
    """
    lens = Lens(transformer, bank)
    last = bank.n_layers
    to_last = [bank.maps[pair] for pair in sorted(bank.maps) if pair[1] == last]
    if len(to_last) < last:
        missing = sorted(set(range(last)) - {m.src for m in to_last})
        raise BadSettings(f"this bank has no map to the last layer from layers {missing}")
    sampling = sampling or _sampling_of(bank)
    share = {"held-out": sampling.held_out, "fit": 1 - sampling.held_out, "both": 1.0}[side]
    if not share:
        raise BadSettings(
            "no document is held out: the sampling has held_out 0; read all documents of a text "
            "the bank was not fitted on (side='both'), or pass a sampling with held_out above 0"
        )
    if text is None:
        text = default_text(transformer) if starts is None else "generated"
    n_generated = None if n_texts is None else n_to_generate(n_texts, share)
    source, sampling = resolve_text(transformer, text, sampling, progress, starts, n_generated)
    batches = batches_of(
        transformer, source, sampling, side=side, n_texts=n_texts, tokens_per_batch=tokens_per_batch
    )
    errors = MapErrors(bank.changed(maps=to_last, parts={}, fits=[]))
    scores = score(
        transformer, {"id": Lens(transformer), lens.name: lens}, batches,
        on_states=errors.add, progress=progress, total=n_texts, phase="evaluating",
    )  # fmt: skip
    n_rows, n_documents = len(scores.documents), len(scores.documents.unique())
    name = str(text) if isinstance(text, str | Path) else "given texts"
    if n_documents < 2:
        raise BadText(
            f"{name} gives {n_rows} rows of {n_documents} document; an interval needs at least 2 "
            "documents: give more text, or raise held_out"
        )
    return Evaluation(
        bank.model, name, side, _is_fitted_on(bank, name, side, sampling), last, n_rows,
        n_documents, [*scores.table(), *_r2_rows(errors, lens.name)],
    )  # fmt: skip


def _sampling_of(bank: ShortcutBank) -> Sampling:
    """The sampling the bank was fitted with; the defaults if it does not say."""
    known = {f.name: bank.settings[f.name] for f in fields(Sampling) if f.name in bank.settings}
    return Sampling(**known)


def _is_fitted_on(bank: ShortcutBank, name: str, side: Side, sampling: Sampling) -> bool:
    """True if documents that were read are known to be among those the bank was fitted on."""
    if name == "given texts" or bank.data.get("text") != name:
        return False
    own = _sampling_of(bank)
    # A smaller share with the same seed holds out some of the same documents.
    is_apart = own.seed == sampling.seed and own.held_out >= sampling.held_out
    return side != "held-out" or not is_apart


def _r2_rows(errors: MapErrors, lens: str) -> Iterator[dict[str, Any]]:
    """R2 in the form of the other metrics; the last layer predicts itself."""
    table, last = errors.table(), errors.n_layers
    sizes = {key: table[0][key] for key in ("rows", "documents")}
    for name, label in (("id", "id"), ("mat", lens)):
        ends = {row["src"]: row for row in table if row["map"] == name}
        ends[last] = {"r2": 1.0, "low": 1.0, "high": 1.0}
        for layer, row in sorted(ends.items()):
            yield {
                "map": label, "layer": layer, "metric": "r2", "value": row["r2"],
                "low": row["low"], "high": row["high"], **sizes,
            }  # fmt: skip
