"""The command line: each command parses its arguments, calls one function and prints the result.

In: arguments. Out: tables on stdout (or JSON with --json), progress and errors on stderr.
Computes nothing: what a command can do, three lines of Python can do. torch is imported only
inside the commands that need it, so that --help is fast.
"""

from typing import Annotated

import typer
from typer import Exit, Option

import layerleap
from layerleap.show.cli import attribution, concepts, fit, look
from layerleap.show.cli.compare import align, diff
from layerleap.show.cli.debug import debug
from layerleap.show.cli.evaluate import evaluate
from layerleap.show.cli.generate import generate
from layerleap.show.cli.options import grouped
from layerleap.show.cli.patching import direction, patch, patchscope
from layerleap.show.cli.study import StudyGroup
from layerleap.show.cli.terminal import out
from layerleap.show.cli.training.finetune import finetune_command
from layerleap.show.cli.training.tune import tune_command
from layerleap.show.cli.weights import weights

app = typer.Typer(
    name="layerleap",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""See what a transformer is about to say, layers before it says it.

    [bold]First steps[/]

      layerleap models                                     list the bundled models
      layerleap check smollm2                              can this model be read?
      layerleap read smollm2 "The capital of France is"    each layer's prediction
      layerleap evaluate smollm2 --text news               how good are shortcuts?
      layerleap saturation smollm2 "Once upon a time"      when predictions settle
      layerleap study shortcuts smollm2 --quick -o report  a report on shortcuts
      layerleap study saturation smollm2 --quick -o report a report on saturation
      layerleap study suitability smollm2                  is early exit worth it?
      layerleap generate smollm2 "Once upon a time"        decode exactly, faster
      layerleap search smollm2 "guitar music band"         neurons by their words
      layerleap diff smollm2 smollm2-reviews               what training changed
      layerleap weights smollm2                            heads that copy or map
      layerleap attribute smollm2 "Once upon a time"       what makes the answer
      layerleap heads smollm2                              what heads look at
      layerleap patchscope smollm2 "I saw the elephant"    a state in words
      layerleap patch smollm2 --pairs pairs.jsonl          what carries an answer
      layerleap direction smollm2 ...                      a vector to steer with
      layerleap debug smollm2                              a page to look inside

    MODEL is a bundled name, a hub name, a folder, or a GGUF file.
    """,
)
study_app = typer.Typer(
    cls=StudyGroup, no_args_is_help=True, help="Run an experiment and write its report."
)
import_app = typer.Typer(no_args_is_help=True, help="Import maps published by others.")
app.add_typer(study_app, name="study")
app.add_typer(import_app, name="import")


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(f"layerleap {layerleap.__version__}", highlight=False)
        raise Exit


LOOKING = (look.models, look.tasks, look.check, look.read, look.card)
CONCEPTS = (concepts.index, concepts.search)
BANKS = (fit.fit, fit.merge, evaluate, look.saturation, generate)
PARTS = (attribution.attribute, attribution.attention, attribution.heads, weights)
CAUSES = (patch, direction, patchscope)
for command in (*LOOKING, *CONCEPTS, *BANKS, *PARTS, *CAUSES, align, diff, debug):
    app.command()(grouped(command))
app.command("tune")(grouped(tune_command))
app.command("finetune")(grouped(finetune_command))
import_app.command("mat")(grouped(fit.import_mat))
import_app.command("tuned-lens")(grouped(fit.import_tuned_lens))


def main() -> None:
    """Entry point."""
    app()
