"""The engine that runs every study: sections in order, checkpointed, with findings and claims.

In: a `Study`, a model and settings. Out: a `StudyResult`.

A section turns a context (the model, its settings, and whatever sections share) into tables.
Finished sections are saved in a folder, so that an interrupted study continues with the next one. A
section that cannot run is reported as failed, and the others go on.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, Self, TypeVar

import layerleap
from layerleap.errors import (
    BadSettings,
    BadText,
    CannotWrite,
    LayerleapError,
    UnknownArgument,
    WrongModel,
    did_you_mean,
)
from layerleap.files import whole_file
from layerleap.memory import give_back, peak_memory
from layerleap.models.identity import caveats
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stream.batches import modality
from layerleap.study.claims import Claim, untested
from layerleap.study.figures import Figure
from layerleap.study.result import Finding, Headline, Row, Said, StudyResult, Tables
from layerleap.study.tables import Table


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of a settings class that is also a command-line option.

    Args:
        default: its value when nothing is given.
        help: one line for `--help`.
        more: `flags`, its names on the command line (`--its-name` when left out); `parse`, a
            function from the typed text to the value; `repeats`, True if the option may be given
            several times: `parse` then gets the texts joined by commas; `least`, the lowest value;
            `within`, what it must lie strictly between; and `quick`, the most in a quick run.
    """
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Settings:
    """Base of the settings of a study: plain values, checked in `__post_init__`."""

    def outlook(self) -> str:
        """What a run will do, in a few words, told before the model is loaded; may be empty."""
        return ""

    def __post_init__(self) -> None:
        for name, least in self._options("least").items():
            if (value := getattr(self, name)) is not None and value < least:
                raise BadSettings(f"{name} is {value}; expected {least} or more")
        for name, (low, high) in self._options("within").items():
            if not low < (value := getattr(self, name)) < high:
                raise BadSettings(f"{name} is {value}; expected a share between {low} and {high}")

    def scaled_down(self) -> Self:
        """Smaller sizes for a first look: of each option, at most its `quick`."""
        sizes = {}
        for name, most in self._options("quick").items():
            value = getattr(self, name)
            sizes[name] = most if value is None else min(value, most)
        return replace(self, **sizes)

    def _options(self, key: str) -> dict[str, Any]:
        """By name, this entry of all options that have it."""
        return {field.name: field.metadata[key] for field in fields(self) if key in field.metadata}

    def resolved(self, model: Transformer) -> Self:
        """The same settings with everything decided that depends on the model."""
        return self

    def to_dict(self) -> Row:
        """Plain JSON values; a fitted object is named by its digest."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    digest = getattr(value, "digest", None)
    if isinstance(digest, str):  # a task, which has a name as well
        return f"{value.name} ({digest})"
    return value if digest is None else digest()


S = TypeVar("S", bound=Settings)
T = TypeVar("T")


class Context(Generic[S]):
    """What the sections of one run share. Studies derive from it to add banks, scores, ..."""

    def __init__(self, model: Transformer, settings: S, folder: Path, progress: Progress) -> None:
        self.model, self.settings, self.folder, self.progress = model, settings, folder, progress
        self.sections: frozenset[str] = frozenset()  # keys of all sections of this run
        self.notes: list[str] = []
        self.data: list[Row] = []  # what was read, by role and text
        self.tables: Tables = {}  # of the sections that have finished
        self.key = ""  # a digest of model, settings and text, set before the first section runs

    @property
    def workspace(self) -> Path:
        """A folder for work in progress, apart from that of other models, settings and texts."""
        workspace = self.folder / f"work-{self.key}"
        workspace.mkdir(exist_ok=True)
        return workspace

    def note(self, *texts: str) -> None:
        """Add remarks for the reader, each once."""
        self.notes += [text for text in texts if text not in self.notes]

    def account(self, *rows: Row) -> None:
        """Record what was read; a second reading for the same purpose does not count again."""
        known = {(row["role"], row["text"]) for row in self.data}
        self.data += [row for row in rows if (row["role"], row["text"]) not in known]

    def attempt(self, what: str, make: Callable[[], T]) -> T | None:
        """What `make` returns, or None and a note if there is too little text for it.

        Anything else, such as a missing library or a bad setting, fails the section.
        """
        try:
            return make()
        except BadText as error:
            self.leave_out(what, error)
            return None

    def leave_out(self, what: str, error: LayerleapError) -> None:
        """Note that something is left out, and why."""
        self.note(f"{what}: left out. {str(error)[:1].upper()}{str(error)[1:]}.")

    def fingerprint(self) -> Any:
        """What else results depend on, besides model and settings: usually a digest of the text."""
        return None

    def artifacts(self) -> Mapping[str, Any]:
        """Fitted objects to save with the report, by folder name."""
        return {}


@dataclass(frozen=True)
class Texts:
    """Generated texts of a section, shown token by token."""

    table: str


@dataclass(frozen=True)
class Section:
    """One part of a study. `run` makes its tables; everything else is derived from them."""

    key: str
    title: str
    run: Callable[[Any], Tables]
    lead: str = ""  # a paragraph that says what is asked, and how
    short: str = ""  # its name in the page's navigation; the key with a capital when empty
    help: str = ""  # a few words for `--sections` in the command's help
    findings: Callable[[StudyResult], Iterable[Said]] = lambda _: ()
    shows: tuple[Claim | Figure | Table | Texts, ...] = ()
    required: bool = False  # runs always, and if it fails, so does the study
    needs: tuple[str, ...] = ()  # sections that must have run before
    after: tuple[str, ...] = ()  # sections whose results it also uses if they have run
    # Whether the settings ask for it: then it always runs, and otherwise only if named.
    when: Callable[[Any], bool] | None = None
    quick: bool = True  # False: too slow for a quick run, unless it is named

    @property
    def name(self) -> str:
        """Its name in the page's navigation."""
        return self.short or f"{self.key[:1].upper()}{self.key[1:]}"

    def finding(self, sentence: Said) -> Finding:
        """The sentence as a finding, under the first figure unless it says where."""
        if isinstance(sentence, Finding):
            return sentence
        under = self.figures[0].key if self.figures else ""
        return Finding(str(sentence), under, isinstance(sentence, Headline))

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What it tests."""
        return tuple(item for item in self.shows if isinstance(item, Claim))

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Drawn above the tables."""
        return tuple(item for item in self.shows if isinstance(item, Figure))

    @property
    def tables(self) -> tuple[Table, ...]:
        """Below the figures."""
        return tuple(item for item in self.shows if isinstance(item, Table))

    @property
    def texts(self) -> tuple[str, ...]:
        """Tables of generated texts, at the end."""
        return tuple(item.table for item in self.shows if isinstance(item, Texts))


@dataclass(frozen=True)
class Tile:
    """One number for the top of the page: what it is, and its value through each lens."""

    title: str
    values: tuple[tuple[str, str, float], ...]  # name, as text, and as a share for a bar


@dataclass(frozen=True)
class Box:
    """A short explanation of one lens or method, in a coloured box."""

    name: str  # linear, logit and tuned have their colours
    title: str
    text: str
    when: Callable[[StudyResult], bool] = lambda _: True  # whether a result has any of it


@dataclass(frozen=True)
class Picture:
    """The summary image: figures side by side under a computed title."""

    title: Callable[[StudyResult], str]
    figures: tuple[str, ...]  # keys of figures
    panels: tuple[str, ...] = ()  # of these, the panels shown; all when empty
    lines: tuple[str, ...] = ()  # and the lines; all when empty
    widths: tuple[float, ...] = (1.75, 1)
    # From x, to an earlier x, at which height, and what it means.
    arrow: Callable[[StudyResult], tuple[float, float, float, str] | None] = lambda _: None


@dataclass(frozen=True)
class Study(Generic[S]):
    """An experiment. Call it with a model to run it.

    Example:
        >>> result = ll.studies.saturation("smollm2", quick=True)
        >>> result.report("out")
    """

    name: str
    title: str  # of the page; may use {model} and {text}
    help: str  # what it asks, for the command's help
    settings: type[S]
    sections: tuple[Section, ...]
    context: type[Context[S]] = Context
    method: int = 1  # raise when results change meaning: old checkpoints are then not used
    paper: str = ""  # what it reproduces
    about: Callable[[StudyResult], Iterable[str]] = lambda _: ()  # paragraphs: "What is this?"
    boxes: tuple[Box, ...] = ()
    tiles: Callable[[StudyResult], Iterable[Tile]] = lambda _: ()
    picture: Picture | None = None

    def __post_init__(self) -> None:
        earlier: set[str] = set()
        for section in self.sections:
            if missing := {*section.needs, *section.after} - earlier:
                raise BadSettings(
                    f"section {section.key!r} needs {missing}, which do not run before"
                )
            earlier.add(section.key)

    def __call__(
        self,
        model: Transformer | str,
        settings: S | None = None,
        *,
        quick: bool = False,
        sections: Iterable[str] | None = None,
        folder: str | Path | None = None,
        progress: Progress = silent,
        **changes: Any,
    ) -> StudyResult:
        """Run the study on a model.

        Args:
            model: a wrapped model, or what `load` takes.
            settings: of this study's settings class; the defaults when None.
            quick: smaller sizes for a first look, without sections that are slow at any size.
            sections: keys of the optional sections to run, or one key; all of them when None.
            folder: where finished sections are saved; an interrupted study continues from there.
            progress: called with every batch and section.
            changes: single settings, by name.
        """
        settings = self._settings(settings, quick, changes)
        chosen = self.chosen(sections, settings, quick=quick)
        if not isinstance(model, Transformer):
            from layerleap.models.load import load

            model = load(model)
        settings = settings.resolved(model)
        started = time.monotonic()
        with TemporaryDirectory(prefix="layerleap-") as temporary:
            work = Path(temporary if folder is None else folder)
            work.mkdir(parents=True, exist_ok=True)
            context = self.context(model, settings, work, progress)
            context.sections = frozenset(section.key for section in chosen)
            run = _Run(self, context, settings)
            for number, section in enumerate(chosen):
                progress(f"study of {self.name}", number, len(chosen), "sections")
                run.section(section)
            result = run.result()
        seconds = round(time.monotonic() - started, 1)
        whole = not any(row["resumed"] for row in result.sections)
        result.run.update(
            seconds=seconds, whole=whole, peak_mib=peak_memory(), quick=quick, method=self.method
        )
        return result

    def chosen(
        self, wanted: Iterable[str] | None, settings: S, *, quick: bool = False
    ) -> list[Section]:
        """The sections to run, in order: required ones, those asked for, and what they need."""
        by_key = {section.key: section for section in self.sections}
        if wanted is None:
            usual = [section for section in self.sections if section.quick or not quick]
            wanted = [section.key for section in usual if section.when is None]
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        if unknown := [name for name in names if name not in by_key]:
            known = ", ".join(by_key)
            raise BadSettings(
                f"study {self.name!r} has no section {unknown[0]!r}; choose from {known}"
            )
        for key, section in by_key.items():
            if section.required or (section.when is not None and section.when(settings)):
                names.append(key)
        for key in reversed(by_key):  # whoever needs a section comes after it
            if key in names:
                names += by_key[key].needs
        return [section for key, section in by_key.items() if key in names]

    def outlook(self, settings: S, *, quick: bool = False) -> str:
        """What a run with these settings will do, if the study says so."""
        return (_quick(settings) if quick else settings).outlook()

    def conclude(self, result: StudyResult) -> StudyResult:
        """The result with the findings and claims that follow from its tables."""
        result.findings.clear()
        result.claims.clear()
        log = {row["key"]: row for row in result.sections}
        for section in self.sections:
            entry = log.get(section.key)
            is_done = entry is not None and entry["status"] == "done"
            for sentence in section.findings(result) if is_done else ():
                finding = asdict(section.finding(sentence))
                result.findings.append({"section": section.key, **finding})
            for claim in (claim for claim in section.claims if claim.when(result)):
                if entry is None:
                    verdict = untested(f"section {section.key!r} was not run")
                else:
                    verdict = claim(result) if is_done else untested(entry["reason"])
                about = {"section": section.key, "claim": claim.text}
                result.claims.append(about | asdict(verdict))
        return result

    def _settings(self, settings: S | None, quick: bool, changes: Mapping[str, Any]) -> S:
        known = [field.name for field in fields(self.settings)]
        if unknown := sorted(set(changes) - set(known)):
            raise UnknownArgument(
                f"study {self.name!r} has no setting {unknown[0]!r}; choose from "
                f"{', '.join(known)}{did_you_mean(unknown[0], known)}"
            )
        settings = replace(settings or self.settings(), **changes)
        return _quick(settings) if quick else settings


def _quick(settings: S) -> S:
    """Smaller sizes; what was asked for, rather than left at its default, stays."""
    values = {field: getattr(settings, field.name) for field in fields(settings)}
    chosen = {field.name: value for field, value in values.items() if value != field.default}
    return replace(settings.scaled_down(), **chosen)


class _Run:
    """One study in progress: its sections, finished or failed."""

    def __init__(self, study: Study[S], context: Context[S], settings: S) -> None:
        self.study, self.context, self.settings = study, context, settings
        self.model: Row = describe(context.model)
        context.notes += caveats(self.model)
        self.log: list[Row] = []
        depends = [layerleap.__version__, study.name, study.method, self.model]
        depends += [settings.to_dict(), context.fingerprint()]
        text = json.dumps(depends, sort_keys=True, default=str)
        self.key = context.key = blake2b(text.encode(), digest_size=16).hexdigest()

    def section(self, section: Section) -> None:
        """Run one section, or take its tables from an earlier run with the same settings."""
        done = {row["key"] for row in self.log if row["status"] == "done"}
        failed = {row["key"] for row in self.log} - done
        started, entry = time.monotonic(), {"key": section.key, "title": section.title}
        path = self.context.folder / f"section-{section.key}.json"
        key = "+".join([self.key, *(key for key in section.after if key in done)])
        try:
            if lacking := [key for key in section.needs if key in failed]:
                raise BadSettings(f"it needs section {lacking[0]!r}, which failed")
            saved = self._saved(path, key)
            resumed = saved is not None
            if saved is None:
                saved = self._ran(section)
                saved["seconds"] = round(time.monotonic() - started, 1)
                with whole_file(path) as temporary:
                    text = json.dumps({"key": key, **saved}, allow_nan=False)
                    temporary.write_text(text, encoding="utf8")
        except (WrongModel, CannotWrite):
            raise
        except LayerleapError as error:
            if section.required:
                raise
            seconds = round(time.monotonic() - started, 1)
            entry |= {"status": "failed", "reason": str(error)}
            self.log.append({**entry, "seconds": seconds, "resumed": False})
            return
        self.context.note(*saved["notes"])  # known already, unless the section was resumed
        self.context.account(*saved["data"])
        self.context.tables |= saved["tables"]
        entry |= {"status": "done", "reason": ""}
        self.log.append({**entry, "seconds": saved["seconds"], "resumed": resumed})

    def _ran(self, section: Section) -> Row:
        """The tables of a section as JSON gives them back, and what it noted along the way."""
        notes, data = len(self.context.notes), len(self.context.data)
        tables = section.run(self.context)
        give_back()
        if taken := set(tables) & set(self.context.tables):
            raise BadSettings(f"table {min(taken)!r} of section {section.key!r} exists already")
        # JSON has neither NaN nor infinity: both become None.
        plain = json.loads(json.dumps(tables), parse_constant=lambda _: None)
        new = {"notes": self.context.notes[notes:], "data": self.context.data[data:]}
        return {"tables": plain, **new}

    def _saved(self, path: Path, key: str) -> Row | None:
        try:
            saved = json.loads(path.read_text(encoding="utf8"))
        except (OSError, ValueError):  # none yet, or damaged: run the section
            return None
        is_ours = isinstance(saved, dict) and saved.get("key") == key
        return saved if is_ours and {"tables", "notes", "data", "seconds"} <= saved.keys() else None

    def result(self) -> StudyResult:
        """Everything that has run, with findings and verdicts."""
        context = self.context
        if resumed := [row["title"] for row in self.log if row["resumed"]]:
            context.notes.append(
                f"Sections taken from an earlier run in the same folder: {', '.join(resumed)}. "
                "The time taken is that of the last run alone."
            )
        result = StudyResult(
            study=self.study.name,
            version=layerleap.__version__,
            made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            model=self.model,
            settings=self.settings.to_dict(),
            tables=context.tables,
            data=context.data,
            notes=context.notes,
            sections=self.log,
            artifacts=context.artifacts(),
        )
        return self.study.conclude(result)


def describe(model: Transformer) -> Row:
    """A model as plain JSON values: its identity, kind and sizes."""
    model.refresh(thorough=True)
    return {
        **model.identity.to_dict(),
        "kind": model.kind,
        "reads": modality(model),
        "n_layers": model.n_layers,
        "d_model": model.d_model,
        "d_vocab": model.d_vocab,
    }
