"""The model card of a bank, its README.md: Markdown with Hugging Face metadata."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerleap.maps.kinds import kind_named
from layerleap.maps.map import Map

if TYPE_CHECKING:
    from layerleap.maps.bank import ShortcutBank


USE = """## How to use

```python
import layerleap as ll

model = ll.load("{}")
bank = ll.ShortcutBank.from_pretrained("path/to/this/bank")
bank.lens(model).read("The capital of France is")
```

The bank belongs to exactly the weights it was fitted on; layerleap refuses any other model."""


def model_card(bank: "ShortcutBank") -> str:
    """The card: metadata, description, use, training and evaluation."""
    name = bank.model["name"]
    sections = [
        _metadata(bank),
        [f"# {_kind(bank).title.capitalize()} for {name}", "", *_description(bank)],
        [USE.format(name)],
        ["## Training", "", f"Fitted by {bank.source}."],
        *_lists({"Model": bank.model, "Data": bank.data, "Settings": bank.settings}),
        ["## Evaluation", "", *_evaluation(bank)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _metadata(bank: "ShortcutBank") -> list[str]:
    name = bank.model["name"]
    tags = ["layerleap", "interpretability", _kind(bank).title.replace(" ", "-")]
    base = [f"base_model: {name}"] if _is_hub_name(name) else []
    return ["---", "library_name: layerleap", *base, "tags:", *(f"- {tag}" for tag in tags), "---"]


def _kind(bank: "ShortcutBank") -> type[Map]:
    return kind_named(bank.kind)


def _is_hub_name(name: str) -> bool:
    """True for "owner/model"; the hub cannot link to a local folder."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)) and not Path(name).exists()


def _description(bank: "ShortcutBank") -> list[str]:
    lines = [
        f"{len(bank)} maps {_pairs(bank)} of {bank.model['name']} ({bank.n_layers} layers, "
        f"width {bank.d_model}). A map carries a hidden state to a later layer. With the model's "
        "own head on top, a map to the last layer shows what the model would predict from that "
        f"state. {_kind(bank).about}".rstrip()
    ]
    if bank.parts:
        names = ", ".join(dict.fromkeys(part for _, part in bank.parts))
        deficient = sum(fit.is_deficient for fit in bank.part_fits.values())
        warning = f" {deficient} of their fits are rank-deficient." if deficient else ""
        lines += [
            "",
            f"The bank also holds {len(bank.parts)} maps that replace parts of blocks ({names}): "
            f"they predict the output of a part from its input.{warning}",
        ]
    return lines


def _pairs(bank: "ShortcutBank") -> str:
    if bank.is_final_only:
        return "from every layer to the last layer"
    all_pairs = bank.n_layers * (bank.n_layers + 1) // 2
    return f"between {'all' if len(bank) == all_pairs else 'some'} pairs of layers"


def _lists(groups: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A section with a list of values for each group that has some."""
    lists = {
        title: [f"- {key}: {value}" for key, value in values.items() if value is not None]
        for title, values in groups.items()
    }
    return [[f"### {title}", "", *items] for title, items in lists.items() if items]


def _evaluation(bank: "ShortcutBank") -> list[str]:
    lines = []
    if bank.quality:
        columns = list(bank.quality[0])
        rows = [[_cell(row.get(column)) for column in columns] for row in bank.quality]
        on = bank.data.get("evaluated_on", "held-out text")
        lines += [f"Scores on {on}:", "", *_table(columns, rows), ""]
    deficient = [fit for fit in bank.fits.values() if fit.is_deficient]
    if deficient:
        worst = min(deficient, key=lambda fit: fit.rank)
        lines += [
            f"**{len(deficient)} of {len(bank.fits)} fits are rank-deficient** (layer {worst.src}: "
            f"rank {worst.rank} of {worst.width} from {worst.rows} rows). Their maps are the "
            "minimum-norm solution, and their R2 on the training rows is high by construction. Fit "
            "on more text.",
            "",
        ]
    finals = [fit for fit in bank.fits.values() if fit.dst == bank.n_layers]
    if finals:
        columns = ["layer", "rows", "rank", "condition", "ridge", "train R2", "logit R2"]
        line = (
            "{0.src}|{0.rows}|{0.rank}/{0.width}|{0.condition:.2g}|{0.ridge:g}|{0.train_r2:.3f}|"
            "{0.train_r2_logit:.3f}"
        )
        rows = [line.format(fit).split("|") for fit in finals]
        lines += ["Fits to the last layer, on the training rows:", "", *_table(columns, rows), ""]
    if not bank.quality:
        lines += ["Not evaluated on held-out text. Use `layerleap.evaluate(model, bank, text)`."]
    return lines if lines[-1] else lines[:-1]


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
