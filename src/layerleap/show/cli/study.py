"""`layerleap study NAME MODEL`: a command for every study, made from its settings.

In: arguments. Out: a report, its data, and whatever the study fitted.

Each field of a study's settings class becomes an option, so that no study has command-line code of
its own. A study is imported only when its command runs or shows its help.
"""

import inspect
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.markup import escape
from typer import Exit, Option
from typer.core import TyperCommand, TyperGroup

from layerleap.show.cli import preflight
from layerleap.show.cli.options import (
    Force,
    Json,
    Loading,
    Model,
    grouped,
    parse_words,
    with_signature,
)
from layerleap.show.cli.preflight import run_checks
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, out, print_json, tell
from layerleap.study import studies

if TYPE_CHECKING:
    from layerleap.study.engine import Study
    from layerleap.study.result import StudyResult

Report = Annotated[
    Path,
    Option("--out", "-o", help="Folder for the report; other files in it stay."),
    preflight.report_folder("study.json", "report of a study"),
    preflight.extras("report", "matplotlib"),
]
CHECKS = {
    "text": preflight.text,
    "starts": preflight.text,
    "bank": preflight.bank,
    "tuned": preflight.bank,
    "tolerance": preflight.share("tolerance"),
    "delta": preflight.share("delta"),
}
SHARED = {
    "model": Model,
    "out": Report,
    **{key: Annotated[str, check] for key, check in CHECKS.items()},
}
SOME_FAILED = 3  # exit code of a study of which some sections could not run


class StudyGroup(TyperGroup):
    """The studies as commands, each made when it is used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not set(studies.PAPERS) & set(studies.names()):
            self.epilog = escape(studies.INSTALL[0].upper() + studies.INSTALL[1:])

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all studies."""
        return studies.names()

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """A placeholder that knows its help line; the study is imported when it is parsed."""
        known = cmd_name in studies.names() or cmd_name in studies.PAPERS
        return _StudyCommand(cmd_name) if known else None


class _StudyCommand(TyperCommand):
    """A command with the name of a study, which is imported when its arguments are parsed."""

    def __init__(self, name: str) -> None:
        super().__init__(name, short_help=studies.summary(name), help=studies.summary(name))

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Parse with the real command; what all studies share is checked before one is imported."""
        with clean_errors():
            run_checks(SHARED, _shared(args))
            command = command_of(studies.find(str(self.name)))
        return command.make_context(info_name, args, parent, **extra)


def _shared(args: list[str]) -> dict[str, Any]:
    """The model, if it comes first, and the values of options that mean the same in all studies."""
    values: dict[str, Any] = {"force": "--force" in args}
    if args and not args[0].startswith("-"):
        values["model"] = args[0]
    for word, following in zip(args, [*args[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        name = {"-t": "text", "-o": "out"}.get(option, option.removeprefix("--"))
        is_shared = name in (*SHARED, "field", "revision")
        if option.startswith("-") and is_shared and "--help" not in args:
            values[name] = value if equals else following
    if "out" in values:
        values["out"] = Path(values["out"])
    return values


def command_of(study: "Study[Any]") -> Any:
    """The command of a study: its settings as options, beside those that all studies have."""
    hints = get_type_hints(study.settings)
    options: dict[str, Any] = {}
    parsers: dict[str, Callable[[str], Any]] = {}
    for field in fields(study.settings):
        kind, default, about = hints[field.name], field.default, field.metadata
        more = {"help": about.get("help", "")}
        if parse := about.get("parse"):  # typed as text; without it, the default holds
            parsers[field.name], default = parse, None
            kind = list[str] | None if about.get("repeats") else str | None
            more |= {} if field.default in (None, ()) else {"show_default": str(field.default)}
        kind = Annotated[kind, Option(*about.get("flags", ()), **more)]
        check = CHECKS.get(field.name)
        options[field.name] = (Annotated[kind, check] if check else kind, default)

    def run(
        model: str,
        out: Path,
        force: bool,
        quick: bool,
        loading: Loading,
        json: bool,
        sections: str | None = None,
        **values: Any,
    ) -> None:
        with clean_errors():
            for name, parse in parsers.items():
                typed = values.pop(name)
                if typed:
                    values[name] = parse(typed if isinstance(typed, str) else ",".join(typed))
            settings = study.settings(**values)
            keys = [] if sections == "none" else parse_words(sections)
            study.chosen(keys, settings)  # refuses unknown names before the model is loaded
            if outlook := study.outlook(settings, quick=quick):
                tell(outlook)
            transformer = loading.load(model)
            _run(study, transformer, settings, out, json=json, quick=quick, sections=keys)

    optional = [s for s in study.sections if not s.required]
    listed = ", ".join(f"{s.key} ({s.help})" if s.help else s.key for s in optional)
    about_sections = Option(
        help=f"Which optional sections to run, separated by commas: {listed}; or 'none'. All by "
        "default."
    )
    parameters: dict[str, tuple[Any, Any]] = {
        "model": (Model, inspect.Parameter.empty),
        **options,
        "out": (Report, Path("report")),
        "force": (Force, False),
        **({"sections": (Annotated[str | None, about_sections], None)} if optional else {}),
        "quick": (
            Annotated[bool, Option("--quick", help="A first look: smaller defaults.")],
            False,
        ),
        "loading": (Loading, None),
        "json": (Json, False),
    }
    example = f"layerleap study {study.name} smollm2 --quick -o report"
    run.__doc__ = f"{inspect.cleandoc(study.help)}\n\nExample: {example}"
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.command(study.name)(grouped(with_signature(run, parameters)))
    return typer.main.get_command(app)


def _run(
    study: "Study[Any]", model: Any, settings: Any, folder: Path, *, json: bool, **how: Any
) -> None:
    work = folder / ".work"
    if work.exists() and any(work.iterdir()):
        tell(f"continuing from what an earlier run left in {work}")
    with TerminalProgress() as progress:
        result = study(model, settings, folder=work, progress=progress, **how)
        page = result.report(folder)
    shutil.rmtree(work, ignore_errors=True)
    if json:
        print_json(result.to_dict())
    else:
        _show(study, result, page)
    if result.failed:
        raise Exit(SOME_FAILED)


def _show(study: "Study[Any]", result: "StudyResult", page: Path) -> None:
    """Tables, claims, headlines, notes and where the files are."""
    from layerleap.show.cli.tables import claims_table, study_table

    for table in (table for section in study.sections for table in section.tables):
        if table.terminal and (shown := study_table(table, result)):
            out.print(shown)
    if result.claims:
        out.print(claims_table(result))
    for text in result.headlines:
        out.print(f"- {text}", highlight=False)
    for note in result.notes:
        out.print(f"note: {note}", highlight=False, style="dim")
    for key, reason in result.failed.items():
        out.print(f"section {key} could not run: {reason}", highlight=False, style="red")
    out.print()
    for name, path in {"report": page, **{n: page.parent / n for n in result.artifacts}}.items():
        out.print(f"{name + ':':7} {path}", highlight=False, soft_wrap=True)
