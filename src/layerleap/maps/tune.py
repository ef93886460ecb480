"""Fine-tune a bank on a text: `ll.tune`.

In: a model, a closed-form bank and a text. Out: `Tuned`, the bank after training and its record.
One pass saves a sample of states; the maps are then trained on them until held-out documents show
no more improvement. With a folder, an interrupted run continues where it stopped.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from layerleap.arguments import checked
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import with_scores
from layerleap.maps.settings import Tuning
from layerleap.maps.tuned import check_starts, summary, tune_maps
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, reporting
from layerleap.results.base import Result
from layerleap.results.columns import Column, Row, Table
from layerleap.short_repr import ShortRepr
from layerleap.stats.collect import collect
from layerleap.stats.saved_states import StateFile
from layerleap.stream.examples import Sampling


@dataclass(frozen=True, eq=False, repr=False)
class Tuned(ShortRepr, Result):
    """A fine-tuned bank, and the record of its training: a row per layer and check."""

    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "summary",
            "tuned against the closed form, on documents not trained on",
            lambda tuned: tuned.summary,
            (
                Column("layer"),
                Column("kl_closed", "KL, closed form", "{:.3f}"),
                Column("kl_tuned", "KL, tuned", "{:.3f}"),
                Column("agreement_closed", "agreement, closed form", "{:.1f} %", 100),
                Column("agreement_tuned", "agreement, tuned", "{:.1f} %", 100),
                Column("rows_needed", "rows until ahead", "{:,.0f}", words={None: "never"}),
            ),
        ),
        Table("record", "", lambda tuned: tuned.record),
    )

    bank: ShortcutBank
    record: list[dict[str, Any]]

    @property
    def summary(self) -> list[dict[str, Any]]:
        """Per layer: the closed form beside the tuned map, and when training overtook it."""
        return summary(self.record)

    def headline(self) -> str:
        """The bank."""
        return repr(self.bank)

    def facts(self) -> Row:
        """The number of maps."""
        return {"maps": len(self.bank)}


@checked
def tune(
    transformer: Transformer,
    bank: ShortcutBank,
    text: Any = None,
    sampling: Sampling | None = None,
    *,
    starts: str | None = None,
    n_texts: int | None = 1500,
    max_states: int = 24_000,
    stop_share: float = 0.05,
    tuning: Tuning | None = None,
    folder: str | Path | None = None,
    evaluate: bool = True,
    progress: Progress | bool = True,
) -> Tuned:
    """Train the maps of a bank until their readings come close to the model's own output.

        tuned = ll.tune(model, bank, "wikipedia")
        tuned.bank.save_pretrained("tuned")

    No map ends up worse on the documents that decide when to stop than it started. If the bank was
    fitted on the same text, it has seen those documents, too.

    Args:
        text: anything that `ll.fit` accepts; None is the model's default text.
        sampling: how texts are cut and positions chosen.
        starts: a text of real sequences from which a masked model generates its texts.
        n_texts: texts to take states from; None takes all.
        max_states: states to keep on disk, a random sample of all.
        stop_share: share of the documents that decide when a layer stops.
        folder: where states and checkpoints are kept, to continue after an interruption. Delete
            it once the bank is saved.
        evaluate: score the tuned bank on a few held-out documents, for its card.
        progress: a function to call, True for bars on a terminal or in a notebook, or False.
    """
    tuning = tuning or Tuning()
    bank.check_model(transformer)
    if tuning.start == "linear":
        check_starts(bank)
    sampling = sampling or Sampling(
        unit="paragraph", positions="one" if transformer.kind == "masked-token" else "every:4"
    )
    place = TemporaryDirectory(prefix="layerleap-") if folder is None else nullcontext(folder)
    with place as name, reporting(progress) as report:
        work = Path(name)
        work.mkdir(parents=True, exist_ok=True)
        file = StateFile(work / "states", limit=max_states, seed=tuning.seed)
        tally = collect(
            transformer,
            text,
            sampling,
            starts=starts,
            n_texts=n_texts,
            save_states=file,
            checkpoint=work / "pass.safetensors",
            progress=report,
        )
        sides = file.open().split(stop_share, tuning.seed)
        checkpoint = work / "training.safetensors"
        tuned, record = tune_maps(
            transformer, bank, *sides, tuning, checkpoint=checkpoint, progress=report
        )
        if bank.documents is not None:
            tuned = tuned.changed(documents=bank.documents | (tally.documents or set()))
        if evaluate:
            tuned = with_scores(transformer, tuned, text, progress=report)
        return Tuned(tuned, record)
