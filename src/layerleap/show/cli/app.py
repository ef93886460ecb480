"""The command line: each command parses, calls one function, prints one thing.

In: arguments. Out: tables on stdout (or JSON with --json), progress and errors on stderr.
Computes nothing: what a command can do, three lines of Python can do. torch is imported only
inside the commands that need it, so that --help answers at once.
"""

from typing import Annotated

import typer

import layerleap
from layerleap.show.cli import fit, look, tune
from layerleap.show.cli.generate import generate
from layerleap.show.cli.saturation import saturation
from layerleap.show.cli.study import StudyGroup
from layerleap.show.cli.suitability import suitability
from layerleap.show.cli.terminal import out

app = typer.Typer(
    name="layerleap",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""See what a transformer is about to say, layers before it says it.

    [bold]First steps[/]

      layerleap models                                     what is bundled
      layerleap check smollm2                              can it be trusted?
      layerleap check dinov2-mnist                         a vision model, made on first use
      layerleap read smollm2 "The capital of France is"    every layer's guess
      layerleap saturation smollm2 "Once upon a time"      where each guess is settled
      layerleap study shortcuts smollm2 --quick -o report  a report to look at
      layerleap study saturation smollm2 --quick -o report does it settle in order?
      layerleap suitability smollm2                        is early exit worth it?
      layerleap generate smollm2 "Once upon a time"        faster, and exactly

    MODEL is a bundled name, a hub name, a folder, or a GGUF file.
    """,
)
study_app = typer.Typer(
    cls=StudyGroup, no_args_is_help=True, help="Run an experiment and write its report."
)
import_app = typer.Typer(no_args_is_help=True, help="Turn maps that others published into a bank.")
app.add_typer(study_app, name="study")
app.add_typer(import_app, name="import")


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        out.print(f"layerleap {layerleap.__version__}", highlight=False)
        raise typer.Exit


LOOKING = (look.models, look.check, look.read, look.card)
for command in (*LOOKING, fit.fit, fit.merge, tune.tune, saturation, suitability, generate):
    app.command()(command)
import_app.command("mat")(fit.import_mat)
import_app.command("tuned-lens")(fit.import_tuned_lens)


def main() -> None:
    """Entry point."""
    app()
