"""The study of saturation: do predictions settle rank by rank, and is that of any use?

In: a model, a text, images or speech, and settings. Out: one plain dictionary: order of saturation
with both nulls, runners-up as guesses, the task probe, the intervention, exits by task beside other
rules, the same of an untrained twin; findings and claims in words. `show.report` draws it.

Maps are fitted on one side of the text, everything else is read off the other. What cannot be made
(too few rows, a model that is not suited) is left out and said in the notes.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from torch import Tensor

import layerleap
from layerleap.act.exits.rules import Rule
from layerleap.errors import (
    BadMedia,
    BadSettings,
    BadText,
    CannotFetch,
    ModelRefused,
    NotFinite,
    NothingToFit,
)
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import fit
from layerleap.memory import peak_memory
from layerleap.models.transformer import Transformer
from layerleap.models.untrained import untrained
from layerleap.progress import Progress, silent
from layerleap.read.lens import Lens
from layerleap.read.probes.cells import CellSampling
from layerleap.read.probes.scores import score_probe
from layerleap.read.saturation import Saturation, require_ranks
from layerleap.stats.collect import finish
from layerleap.stream.batches import batches_of, reads
from layerleap.stream.examples import Batch, Census, Sampling, require_text
from layerleap.stream.pieces import Side
from layerleap.stream.source import enough, resolve_text
from layerleap.study.early_texts import early_texts
from layerleap.study.saturation.claims import claims
from layerleap.study.saturation.donors import PairSettings
from layerleap.study.saturation.findings import findings
from layerleap.study.saturation.guesses import GuessSettings, guesses
from layerleap.study.saturation.intervention import intervene
from layerleap.study.saturation.kept import Kept
from layerleap.study.saturation.live_exits import live_exits, prompts_of
from layerleap.study.saturation.order import OrderSettings, order
from layerleap.study.saturation.rows import SaturationData, observe
from layerleap.study.saturation.settings import SaturationSettings, default_sampling
from layerleap.study.saturation.task_exits import costs_of, task_exits, training_documents

__all__ = ["SaturationSettings", "default_sampling", "study_saturation"]

FORMAT = 1
CHECKPOINT = "fit.safetensors"
LEFT_OUT = (BadSettings, BadText, BadMedia, ModelRefused, NotFinite, CannotFetch)
PAPER_LEAD = 7  # layers before the end that count as early, in a model of 48 layers
PROMPT = 8  # tokens from which rules are tried live
T = TypeVar("T")
Row = dict[str, Any]


def study_saturation(
    transformer: Transformer,
    settings: SaturationSettings | None = None,
    *,
    bank: ShortcutBank | None = None,
    work: Path | None = None,
    progress: Progress = silent,
) -> Row:
    """Run the study.

    Args:
        transformer: the model.
        settings: sizes, text and sections.
        bank: shortcuts to the last layer; fitted on the fitting side of the text when None.
        work: a folder for states and the checkpoint of the fit, which goes on from there.
        progress: told about every batch.
    """
    settings = (settings or SaturationSettings()).settled(transformer)
    require_ranks(transformer, settings.k)
    if bank is not None:
        bank.check_model(transformer)
    started, is_fresh = time.monotonic(), work is None or not work.exists()
    with _folder(work) as folder:
        run = _Run(transformer, settings, folder, progress)
        result = run.study(bank)
    seconds = round(time.monotonic() - started, 1)
    # Without the time that an interrupted run had spent before.
    result["summary"] = {"run": {"seconds": seconds, "whole": is_fresh, "peak_mib": peak_memory()}}
    return result


@contextmanager
def _folder(work: Path | None) -> Iterator[Path]:
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
        yield work
        return
    with TemporaryDirectory(prefix="layerleap-") as name:
        yield Path(name)


class _Run:
    """One study under way."""

    def __init__(
        self, transformer: Transformer, settings: SaturationSettings, folder: Path, told: Progress
    ) -> None:
        assert settings.text is not None
        assert settings.sampling is not None
        assert settings.n_fit is not None
        assert settings.n_read is not None
        self.transformer, self.settings, self.folder = transformer, settings, folder
        self.text, self.sampling, self.progress = settings.text, settings.sampling, told
        self.n_fit, self.n_read = settings.n_fit, settings.n_read
        self.data: list[Row] = []
        self.notes: list[str] = []
        self.tokens = 1  # of a text, on average
        self.side: Side = "held-out"

    def study(self, bank: ShortcutBank | None) -> Row:
        transformer, settings = self.transformer, self.settings
        if bank is None:
            bank = self._fit()
        else:
            self.notes.append(
                "The bank was given: what it was fitted on may hold documents that are read here."
            )
        lenses = {"id": Lens(transformer)}
        if bank is not None:
            lenses["mat"] = Lens(transformer, bank)
        seen = self._see(transformer, lenses, "read")
        kept = self._kept(bank)
        result: Row = {
            "format": FORMAT, "kind": "saturation", "version": layerleap.__version__,
            "made": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "model": {
                **transformer.identity.to_dict(), "kind": transformer.kind,
                "reads": reads(transformer), "n_layers": transformer.n_layers,
                "d_model": transformer.d_model, "d_vocab": transformer.d_vocab,
            },
            "settings": settings.to_dict(), "data": self.data, "notes": self.notes,
            "order": kept.part("order", lambda: self._each(
                "Order of saturation", seen, self._order)),
            "guesses": kept.part("guesses", lambda: self._wanted(
                "guesses", "Guesses", seen, self._guesses)),
            "probe": kept.part("probe", lambda: self._wanted(
                "probe", "The task probe", seen, self._probe)),
            "intervention": kept.part("intervention", lambda: self._intervention(seen)),
            "exits": kept.part("exits", lambda: self._exits(seen, bank)),
            "twin": kept.part("twin", self._twin),
        }  # fmt: skip
        if kept.found:
            self.notes.append(
                f"Taken over from an earlier run in the same folder: {', '.join(kept.found)}. The "
                "time taken is that of the last run alone."
            )
        result["claims"] = claims(result)
        result["findings"] = findings(result)
        finish(self.folder / CHECKPOINT)  # until here an interrupted study need not fit again
        return result

    def _attempt(self, what: str, make: Callable[[], T]) -> T | None:
        """What `make` gives, or a note that says why there is nothing."""
        try:
            return make()
        except LEFT_OUT as error:
            self.notes.append(f"{what}: left out. {str(error)[:1].upper()}{str(error)[1:]}.")
            return None

    def _each(
        self, what: str, seen: SaturationData, make: Callable[[SaturationData, str], Row]
    ) -> dict[str, Row]:
        """By lens; lenses of which it cannot be made are left out."""
        found = {
            name: self._attempt(f"{what} through {name}", partial(make, seen, name))
            for name in seen.lenses
        }
        return {name: one for name, one in found.items() if one is not None}

    def _wanted(
        self,
        section: str,
        what: str,
        seen: SaturationData,
        make: Callable[[SaturationData, str], Row],
    ) -> dict[str, Row]:
        return self._each(what, seen, make) if section in self.settings.sections else {}

    def _kept(self, bank: ShortcutBank | None) -> Kept:
        """Where finished parts are kept: for this model, these settings, these rows, this bank."""
        data = [{key: row[key] for key in row if key != "seconds"} for row in self.data]
        about: Row = {
            "version": layerleap.__version__, "model": self.transformer.identity.to_dict(),
            "settings": self.settings.to_dict(), "data": data,
            "bank": None if bank is None else bank.digest(),
        }  # fmt: skip
        return Kept(self.folder, about, self.notes, self.data)

    def _fit(self) -> ShortcutBank | None:
        """The bank; None if there is nothing to fit one on, and then everything is read."""
        started, checkpoint = time.monotonic(), self.folder / CHECKPOINT
        try:
            bank = fit(
                self.transformer, self.text, self.sampling, n_texts=self.n_fit,
                starts=self.settings.starts, checkpoint=checkpoint, progress=self.progress,
            )  # fmt: skip
        except NothingToFit as error:
            self.side = "both"
            self.notes.append(
                f"Everything is read through the logit lens alone, and all of it: {error}."
            )
            return None
        self._account("fit", self.text, bank.data, self.n_fit, started)
        deficient = [fit for fit in bank.fits.values() if fit.is_deficient]
        if deficient:
            self.notes.append(
                f"{len(deficient)} of {len(bank.fits)} maps rest on fewer independent rows than "
                f"the {bank.d_model} that they need: fit on more before you judge mat."
            )
        return bank

    def _source(self) -> tuple[Any, Sampling]:
        share = self.sampling.held_out
        n_drawn = max(enough(self.n_fit, 1 - share), enough(self.n_read, share))
        return resolve_text(
            self.transformer, self.text, self.sampling, self.progress, self.settings.starts, n_drawn
        )

    def _see(
        self, transformer: Transformer, lenses: Mapping[str, Lens], role: str
    ) -> SaturationData:
        started, census = time.monotonic(), Census()
        source, sampling = self._source()

        def batches(count: Census | None = None) -> Iterator[Batch]:
            return batches_of(
                transformer, source, sampling, side=self.side, n_texts=self.n_read,
                census=count,
            )  # fmt: skip

        for _ in batches(census):  # tokenising is cheap, and says how much there is
            pass
        if not census.texts:
            raise BadText(
                f"no document of {self.text!r} can be read, or none fell to the held-out side: "
                "give more, or another seed"
            )
        seen = observe(
            transformer, lenses, batches, self.folder / f"{role}.rows", k=self.settings.k,
            walk_share=self.settings.walk_share, seed=sampling.seed,
            total=census.texts, progress=self.progress,
            phase=f"reading {self.text}" if role == "read" else "reading (twin)",
        )  # fmt: skip
        self._account(role, self.text, census.to_dict(), self.n_read, started)
        self.tokens = max(1, round(census.tokens / census.texts))
        return seen

    def _account(
        self, role: str, text: str, data: Mapping[str, Any], asked: int, started: float
    ) -> None:
        seconds = round(time.monotonic() - started, 2)
        counts = ("documents", "texts", "tokens", "rows", "fingerprint")
        row: Row = {"role": role, "text": text, **{key: data.get(key) for key in counts}}
        self.data.append({**row, "seconds": seconds})
        if (row["texts"] or 0) < asked and role != "twin":
            self.notes.append(
                f"{text}: {row['texts']:,} of {asked:,} texts asked for were found to "
                f"{'fit on' if role == 'fit' else 'read'}."
            )

    def _order(self, seen: SaturationData, name: str) -> Row:
        settings = OrderSettings(draws=self.settings.draws, seed=self.sampling.seed)
        return order(seen.saturation[name], seen.walks[name], settings)

    def _guesses(self, seen: SaturationData, name: str) -> Row:
        n_layers = seen.transformer.n_layers
        lead = PAPER_LEAD if n_layers > 2 * PAPER_LEAD else max(1, n_layers // 3)
        settings = GuessSettings(lead=lead, seed=self.sampling.seed)
        return guesses(seen.saturation[name], settings)

    def _probe(self, seen: SaturationData, name: str) -> Row:
        """With as many tasks as the rows allow; fewer than ranks is said."""
        saturation, settings = seen.saturation[name], self.settings
        why = ""
        for tasks in range(settings.k, 1, -1):
            # With all ranks told apart, layers at which none is open are nobody's task.
            apart = None if tasks == settings.k else tasks
            choice = CellSampling(tasks=apart, limit=settings.cells, seed=self.sampling.seed)
            try:
                found = score_probe(
                    saturation, seen.states, choice, permutations=settings.permutations,
                    progress=self.progress,
                )  # fmt: skip
            except (BadText, BadSettings) as error:
                if tasks == 2:
                    raise
                why = str(error)
                continue
            if tasks < settings.k:
                self.notes.append(
                    f"The task probe through {name} tells {tasks} tasks apart, the last with all "
                    f"later ones, and not {settings.k}: {why}."
                )
            return {"lens": name, "tasks": tasks, **found.to_dict(), "words": found.summary()}
        raise AssertionError  # k is 3 or more

    def _intervene(self, seen: SaturationData) -> Row:
        name = "id"
        n_layers, seed = seen.transformer.n_layers, self.sampling.seed
        plan = PairSettings.of(n_layers, limit=self.settings.pairs, seed=seed)
        found = intervene(
            seen.transformer, seen.lenses[name], seen.batches(), seen.saturation[name],
            seen.evidence[name], seen.states, plan, progress=self.progress,
        )  # fmt: skip
        return {**found.to_dict(), "words": found.words()}

    def _intervention(self, seen: SaturationData) -> Row | None:
        if "intervention" not in self.settings.sections:
            return None
        return self._attempt("The intervention", lambda: self._intervene(seen))

    def _exits(self, seen: SaturationData, bank: ShortcutBank | None) -> Row | None:
        s = self.settings
        if "exits" not in s.sections:
            return None
        made = self._attempt(
            "Early exit",
            lambda: task_exits(
                seen, costs_of(seen, bank, self.tokens), self.text, tolerance=s.tolerance,
                delta=s.delta, cells=s.cells, seed=self.sampling.seed,
            ),
        )  # fmt: skip
        if made is None:
            return None
        found, rules = made
        if found["calibrated"] is None:
            self.notes.append(f"Exits with a promise: left out. {found['not_calibrated']}.")
        prompts = self._attempt("Exits live", lambda: self._prompts(seen))
        found["live"], found["texts"] = [], []
        if prompts:
            live, texts = partial(live_exits, progress=self.progress), partial(self._texts, bank)
            model = seen.transformer
            found["live"] = self._attempt("Exits live", lambda: live(model, bank, rules, prompts))
            found["texts"] = self._attempt("Texts", lambda: texts(model, rules, prompts)) or []
        return found

    def _prompts(self, seen: SaturationData) -> list[Tensor]:
        require_text(seen.transformer)
        known = training_documents(seen, self.sampling.seed)
        return prompts_of(
            seen.batches(), self.settings.prompts, PROMPT, without=known, seed=self.sampling.seed
        )

    def _texts(
        self,
        bank: ShortcutBank | None,
        model: Transformer,
        rules: Mapping[tuple[str, str], Rule],
        prompts: list[Tensor],
    ) -> list[Row]:
        """What the rules write that look at states only."""
        shown = {key: rule for key, rule in rules.items() if key[1] in ("task", "similarity")}
        return early_texts(model, {"id": None, "mat": bank}, shown, prompts[0][0].tolist())

    def _twin(self) -> Row | None:
        """Order and intervention in the same model with random weights, through id."""
        if "twin" not in self.settings.sections:
            return None

        def made() -> Row:
            twin = untrained(self.transformer, seed=self.sampling.seed)
            seen = self._see(twin, {"id": Lens(twin)}, "twin")
            asked = "intervention" in self.settings.sections
            return {
                "order": self._attempt(
                    "Order of saturation in the untrained twin", lambda: self._order(seen, "id")
                ),
                "settled": _settled_share(seen.saturation["id"]),
                "intervention": self._attempt(
                    "The intervention in the untrained twin", lambda: self._intervene(seen)
                ) if asked else None,
            }  # fmt: skip

        return self._attempt("The untrained twin", made)


def _settled_share(saturation: Saturation) -> float:
    """The share of rows whose top token settles before the last block."""
    return float((saturation.layer[:, 0] < saturation.n_layers).double().mean())
