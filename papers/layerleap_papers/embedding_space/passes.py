"""One pass over a text: which parameter vectors are active, and which tokens states name.

In: batches, a model and perhaps a bank. Out: `Observed`: for every position and layer, the most
active vectors of each kind with the signs of their activity, and the top tokens of the state as it
is and carried to the last layer. Nothing as large as the vocabulary or as an FFN is kept.

How active a vector is, at a position:
    FFN value       |coefficient|, times the length of the value or not
    FFN key         it belongs to the neuron, so as active as the value, by length
    W_V column      |its product with what attention reads|
    W_O row         |what attention puts on it| times its length
A vector that is active with a negative sign stands for the tokens at its other end.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap import Lens, ShortcutBank, Transformer
from layerleap.errors import BadText
from layerleap.lens import chunks
from layerleap.models import Capture, Site
from layerleap.models.weights import feed_forward, heads, kinds, vectors
from layerleap.progress import Progress
from layerleap.stream import Batch, modality
from layerleap_papers.embedding_space.embedding_settings import EmbeddingSettings

# Ways to choose active vectors, and the kind of vector that each chooses.
BY_SIZE, BY_COEFFICIENT = "values", "values by coefficient alone"
WAYS = {
    BY_SIZE: "ffn.value",
    BY_COEFFICIENT: "ffn.value",
    "keys": "ffn.key",
    "gates": "ffn.gate",
    "ups": "ffn.up",
    "W_V columns": "attn.v",
    "W_O rows": "attn.o",
}
KEY_WAYS = {"keys": "ffn.key", "gates": "ffn.gate", "ups": "ffn.up"}


@dataclass(frozen=True, eq=False)
class Active:
    """The most active vectors at every position, of one kind in one block."""

    rows: Tensor  # which vectors, most active first: (position, active)
    positive: Tensor  # whether their activity is positive: bool (position, active)


@dataclass(frozen=True, eq=False)
class Observed:
    """What a text shows, one row per position."""

    documents: Tensor  # (row,)
    active: dict[tuple[str, int], Active]  # by way and block
    tops: dict[str, Tensor]  # "raw", and "linear" if there is a bank: ids (row, layer from 1 on, k)
    states: Tensor  # one state of each row, at a random layer: (row, d_model)
    layers: Tensor  # that layer, below the last: (row,)


def _joined(parts: list[Observed]) -> Observed:
    """What all batches show together."""
    if not parts:
        raise BadText("no position of the held-out text can be read; give longer texts")
    first = parts[0]
    return Observed(
        torch.cat([part.documents for part in parts]),
        {
            key: Active(
                torch.cat([part.active[key].rows for part in parts]),
                torch.cat([part.active[key].positive for part in parts]),
            )
            for key in first.active
        },
        {name: torch.cat([part.tops[name] for part in parts]) for name in first.tops},
        torch.cat([part.states for part in parts]),
        torch.cat([part.layers for part in parts]),
    )


@torch.no_grad()
def observe(
    model: Transformer,
    batches: Iterable[Batch],
    bank: ShortcutBank | None,
    settings: EmbeddingSettings,
    *,
    generator: torch.Generator,
    progress: Progress,
) -> Observed:
    """Run the model over the batches once.

    The first position of a text is left out where later ones can be read: in most models its state
    is an outlier that says nothing about the text.
    """
    lenses = {"raw": Lens(model)} | ({} if bank is None else {"linear": Lens(model, bank)})
    blocks = [_Block(model, block, settings.active) for block in range(1, model.n_layers + 1)]
    sites = [site for block in blocks for site in block.sites]
    parts: list[Observed] = []
    texts = 0
    for batch in batches:
        progress("reading active parameters", texts, settings.n_read)
        texts += batch.n_texts
        keep, documents = batch.keep, batch.documents
        if model.kind == "next-token" and modality(model) == "text":
            keep, documents = keep.clone(), documents[batch.positions > 0]
            keep[:, 0] = False
        if not len(documents):
            continue
        captured = model.capture(batch.inputs, sites=sites, keep=keep)
        layers = torch.randint(1, max(2, model.n_layers), (len(documents),), generator=generator)
        states = [captured.states[int(layer)][row] for row, layer in enumerate(layers)]
        active = {
            (way, block.number): best for block in blocks for way, best in block.active(captured)
        }
        tops = {name: _tops(lens, captured, settings.state_k) for name, lens in lenses.items()}
        states_read = torch.stack(states).float().cpu()
        parts.append(Observed(documents, active, tops, states_read, layers))
    return _joined(parts)


def _tops(lens: Lens, captured: Capture, k: int) -> Tensor:
    """The top tokens of every layer's state from layer 1 on: (row, layer, k)."""
    model, layers = lens.transformer, []
    for layer in range(1, model.n_layers + 1):
        states = captured.states[layer]
        parts = [
            lens.logits(states[rows], layer).topk(k, dim=1).indices.int().cpu()
            for rows in chunks(len(states), model.d_vocab)
        ]
        layers.append(torch.cat(parts))
    return torch.stack(layers, dim=1)


class _Block:
    """Where the activity of one block's vectors is read, and how long they are."""

    def __init__(self, model: Transformer, number: int, n_active: int) -> None:
        self.model, self.number, self.n_active = model, number, n_active
        self.kinds, names = kinds(model, number), model.sites(number)
        self.has_input = {part: f"{part}.in" in names for part in ("ffn", "attn")}
        self.sites: list[tuple[int, str | Site]] = []
        if "ffn.value" in self.kinds:
            self.coefficients = feed_forward(model, number).site
            self.sites.append((number, self.coefficients))
        if "attn.o" in self.kinds:
            path = heads(model, number).outputs.path
            self.mixed = Site(path.removeprefix(f"{model.blocks[number - 1]}."), "in")
            self.sites.append((number, self.mixed))
        self.sites += [(number, f"{part}.in") for part, known in self.has_input.items() if known]
        self.lengths = {
            kind: vectors(model, number, kind).float().norm(dim=1)
            for kind in ("ffn.value", "attn.o")
            if kind in self.kinds
        }

    def active(self, captured: Capture) -> Iterator[tuple[str, Active]]:
        """The most active vectors, by way."""
        sites = {
            name: value for (block, name), value in captured.sites.items() if block == self.number
        }
        if "ffn.value" in self.kinds:
            activity = sites[self.coefficients].float()
            by_size = self._top(activity, activity.abs() * self.lengths["ffn.value"])
            yield BY_SIZE, by_size
            yield BY_COEFFICIENT, self._top(activity, activity.abs())
            for way, kind in KEY_WAYS.items():
                if kind in self.kinds and self.has_input["ffn"]:
                    keys = self._vectors(kind)[by_size.rows]
                    products = torch.linalg.vecdot(keys, sites["ffn.in"].float()[:, None].cpu())
                    yield way, Active(by_size.rows, products > 0)
        if "attn.v" in self.kinds and self.has_input["attn"]:
            activity = sites["attn.in"].float() @ self._vectors("attn.v").T.to(
                sites["attn.in"].device
            )
            yield "W_V columns", self._top(activity, activity.abs())
        if "attn.o" in self.kinds:
            activity = sites[self.mixed].float()
            yield "W_O rows", self._top(activity, activity.abs() * self.lengths["attn.o"])

    def _vectors(self, kind: str) -> Tensor:
        return vectors(self.model, self.number, kind).float().cpu()

    def _top(self, signed: Tensor, activity: Tensor) -> Active:
        rows = activity.topk(min(self.n_active, activity.shape[1]), dim=1).indices
        return Active(rows.cpu(), (signed.gather(1, rows) > 0).cpu())
