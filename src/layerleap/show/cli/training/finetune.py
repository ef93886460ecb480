"""`layerleap finetune`: train a copy of a model on a text, block by block or as a whole."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from layerleap.act.fine_tuning import fine_tuning
from layerleap.show.cli import options, preflight
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, out, show, tell


@dataclass(frozen=True)
class Training:
    """How the copy is trained: settings of `fine_tuning`, which checks them."""

    how: Annotated[
        str, Option(help="'layer-causal': each block by its own loss; 'full': plain.")
    ] = "layer-causal"
    parameters: Annotated[
        str,
        Option(
            help="What is trained: blocks, keys-values, queries, keys, values, outputs, all, or "
            "patterns of names such as '*.mlp.*'; several separated by commas."
        ),
    ] = "blocks"
    steps: Annotated[int, Option(help="Steps of the optimizer.")] = 50
    learning_rate: Annotated[float, Option(help="Its peak; it decays to 0.")] = 1e-5
    optimizer: Annotated[str, Option(help="adamw or sgd.")] = "adamw"
    decay: Annotated[float, Option(help="Weight decay of matrices.")] = 0.01
    batch: Annotated[int, Option(help="Windows of text per step.")] = 4
    max_tokens: Annotated[int, Option(help="Tokens per window.")] = 128
    share: Annotated[
        float | None,
        Option(
            help="Share of the positions that losses below the last layer are computed on; 0.0625 "
            "by default, 1 for the method of the paper."
        ),
    ] = None
    check_every: Annotated[int, Option(help="Steps between checks on held-out text.")] = 25
    held_out: Annotated[float, Option(help="Share of documents that is never trained on.")] = 0.25
    seed: Annotated[int, Option(help="Decides which text is held out, and the order.")] = 0

    def settings(self) -> dict[str, Any]:
        """As `layerleap.finetune` takes them."""
        return {**vars(self), "parameters": options.parse_words(self.parameters) or []}

    def check(self) -> None:
        """Refuse what is out of range."""
        fine_tuning(**self.settings())


def finetune_command(
    model: options.Model,
    out_folder: Annotated[
        Path, Option("--out", "-o", help="Folder for the model."), preflight.model_folder
    ],
    text: options.Text = None,
    training: Training = Training(),
    bank: Annotated[
        str | None,
        Option(
            "--bank", help="Read those losses through the shortcuts of a bank (folder or hub name)."
        ),
        preflight.bank,
    ] = None,
    other_model: options.OtherModel = False,
    force: options.Force = False,
    loading: options.Loading = options.Loading(),
    json: options.Json = False,
) -> None:
    """Fine-tune a copy of MODEL on a text and save it in the hub's format.

    With --how layer-causal each block learns from its own prediction, read through the model's
    head, and is trained as soon as it has run: memory is that of one block. Interrupted or killed,
    the same command continues from its last checkpoint.

    Example: layerleap finetune smollm2 --text news --steps 200 -o smollm2-news
    """
    with clean_errors(), TerminalProgress() as progress:
        tell(
            f"{training.steps:,} steps of {training.batch} x {training.max_tokens} tokens "
            f"({training.how}) for a copy of {model}, with a check on held-out text every "
            f"{training.check_every}"
        )
        from layerleap import Lens, finetune
        from layerleap.maps.fit import find_bank

        transformer = loading.load(model)
        maps = find_bank(transformer, bank, other_model=other_model)
        lens = None if maps is None else Lens(transformer, maps)
        if (work := out_folder.with_name(f".{out_folder.name}.finetuning")).exists():
            tell(f"continuing from {work}")
        tuned = finetune(
            transformer,
            text,
            lens=lens,
            folder=out_folder,
            progress=progress,
            **training.settings(),
        )
    show(tuned, json=json, folder=str(out_folder))
    if not json:
        told = f"{model}, fine-tuned ({training.how}): {out_folder}"
        out.print(told, highlight=False, soft_wrap=True)
