"""The card of a bank: what a reader must know before trusting it, as Markdown with hub metadata.

In: a bank. Out: the text of its README.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerleap.maps.bank import ShortcutBank


def readme(bank: "ShortcutBank") -> str:
    """Front matter, use, how it was made, how good it is."""
    name = bank.model["name"]
    return "\n".join(
        [
            "---",
            "library_name: layerleap",
            "tags: [layerleap, linear-shortcut, interpretability]",
            *([f"base_model: {name}"] if _is_hub_name(name) else []),
            "---",
            "",
            f"# Linear shortcuts of {name}",
            "",
            f"{len(bank)} maps, {_kind(bank)}, of a "
            f"model with {bank.n_layers} layers of width {bank.d_model}.",
            *_parts(bank),
            "",
            "```python",
            "import layerleap as ll",
            f'model = ll.load("{name}")',
            'bank = ll.ShortcutBank.from_pretrained("this folder")',
            'bank.lens(model).read("The capital of France is")',
            "```",
            "",
            "## Made from",
            "",
            *_bullets({"made by": bank.source, **_model(bank), **bank.data, **bank.settings}),
            "",
            "## How good",
            "",
            *_quality(bank),
            "",
        ]
    )


def _is_hub_name(name: str) -> bool:
    """True for "maker/model"; a path to a folder is nothing that the hub could link to."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)) and not Path(name).exists()


def _kind(bank: "ShortcutBank") -> str:
    if bank.is_final_only:
        return "layer to last"
    every = bank.n_layers * (bank.n_layers + 1) // 2
    return "all pairs" if len(bank) == every else "some pairs"


def _parts(bank: "ShortcutBank") -> list[str]:
    """One line about maps of parts, if there are any."""
    if not bank.parts:
        return []
    names = ", ".join(dict.fromkeys(part for _, part in bank.parts))
    deficient = sum(fit.is_deficient for fit in bank.part_fits.values())
    warning = f" {deficient} of their fits are rank-deficient." if deficient else ""
    return [
        f"And {len(bank.parts)} maps that stand in for parts of blocks ({names}), from what enters "
        f"a part to what leaves it.{warning}"
    ]


def _model(bank: "ShortcutBank") -> dict[str, Any]:
    """Set apart from the data, which has a fingerprint too."""
    return {f"model {key}": value for key, value in bank.model.items()}


def _bullets(values: dict[str, Any]) -> list[str]:
    return [f"- {key}: {value}" for key, value in values.items() if value is not None]


def _quality(bank: "ShortcutBank") -> list[str]:
    deficient = [fit for fit in bank.fits.values() if fit.is_deficient]
    lines = []
    if deficient:
        worst = min(deficient, key=lambda fit: fit.rank)
        lines += [
            f"**{len(deficient)} of {len(bank.fits)} fits are rank-deficient** (layer {worst.src}: "
            f"rank {worst.rank} of {worst.width} from {worst.rows} rows): their maps are the "
            "minimum-norm answer, and on the rows fitted on their R2 is high by construction. "
            "Fit on more text.",
            "",
        ]
    if bank.quality:
        columns = list(bank.quality[0])
        lines += ["Held-out scores:", "", _row(columns), _row(["---"] * len(columns))]
        lines += [_row([_cell(row.get(column)) for column in columns]) for row in bank.quality]
    finals = [fit for fit in bank.fits.values() if fit.dst == bank.n_layers]
    if finals:
        columns = ["layer", "rows", "rank", "condition", "ridge", "train R2", "train R2 of id"]
        lines += ["", "Fits to the last layer:", "", _row(columns), _row(["---"] * len(columns))]
        lines += [
            _row([
                str(fit.src), str(fit.rows), f"{fit.rank}/{fit.width}", f"{fit.condition:.2g}",
                f"{fit.ridge:g}", f"{fit.train_r2:.3f}", f"{fit.train_r2_id:.3f}",
            ])
            for fit in finals
        ]  # fmt: skip
    return lines or ["Not measured: these maps were imported or saved without scores."]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
