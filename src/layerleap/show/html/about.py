"""A model, a bank and the laws of a model as HTML: a title and a table each."""

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from layerleap.show.html.page import styled, table

if TYPE_CHECKING:
    from layerleap.maps.bank import ShortcutBank
    from layerleap.models.discovery.laws import LawResult
    from layerleap.models.transformer import Transformer


def model_html(model: "Transformer") -> str:
    """What was found in a model."""
    step_names = (step.path or step.kind for step in model.tail)
    unknown = sum(isinstance(anatomy, str) for anatomy in model.anatomy)
    facts = {
        "class": type(model.model).__name__,
        "kind": model.kind,
        "layers": model.n_layers,
        "d_model": model.d_model,
        "outputs": model.d_vocab,
        "first block": model.blocks[0],
        "last block": model.blocks[-1],
        "tail": ", ".join(step_names),
        "sites of block 1": ", ".join(model.sites(1)) or "not known",
        "tokenizer": type(model.tokenizer).__name__ if model.tokenizer else "none",
    }
    if unknown:
        facts["blocks of unknown parts"] = unknown
    return styled("about", table(model.identity.name, ("", ""), _cells(facts.items())))


def bank_html(bank: "ShortcutBank") -> str:
    """What a bank was fitted on, and how good its maps are, as far as it says."""
    kept = {key: value for key, value in bank.data.items() if value not in (None, "", [])}
    facts = {"maps": len(bank), "layers": bank.n_layers, "d_model": bank.d_model, **kept}
    body = table(f"bank of {bank.model['name']}", ("", ""), _cells(facts.items()))
    if bank.quality:
        rows = _cells(row.values() for row in bank.quality)
        body += table("scores on held-out documents", list(bank.quality[0]), rows)
    return styled("about", body)


def laws_html(results: Sequence["LawResult"]) -> str:
    """The result of every law."""
    failed = sum(one.status == "fails" for one in results)
    title = f"{failed or 'none'} of {len(results)} laws failed"
    rows = _cells((one.law, one.status, one.detail) for one in results)
    return styled("about", table(title, ("law", "result", "measured"), rows))


def _cells(rows: Iterable[Iterable[Any]]) -> list[list[str]]:
    """Values as HTML."""
    return [
        [html.escape(f"{one:.3f}" if isinstance(one, float) else str(one)) for one in row]
        for row in rows
    ]
