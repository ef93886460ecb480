"""`ll.stitch`: the first blocks of one model, a kernel, and the last blocks of another.

In: two models with one vocabulary, a layer of each, and a kernel (`maps/kernel.py`).
Out: `Stitched`, which runs like a model. Nothing is cut out of either: A runs up to its layer, and
B runs with its states at its layer replaced. So hooks, edits and lenses work on both.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.act.edits.patch import PatchState
from layerleap.arguments import checked
from layerleap.errors import BadSettings, BadText, check_choice
from layerleap.maps.kernel import embedding_kernel, fit_kernels, random_kernel, shared_tokens
from layerleap.maps.linear import LinearMap
from layerleap.maps.map import IdentityMap
from layerleap.models.hooks.capture import check_layer
from layerleap.models.hooks.edit import EditReport
from layerleap.models.inputs import as_inputs
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, reporting
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Sampling, require_text
from layerleap.stream.source import default_text

Kernel = Literal["embedding", "folded", "least-squares", "identity", "random"]
Carry = Callable[[Tensor], Tensor]  # states of A, (row, d_A), as states of B, (row, d_B)
FITTED_TEXTS = 300  # by default; every position of each is a row


@dataclass(frozen=True, eq=False, repr=False)
class Stitched:
    """A model made of two: blocks 1 .. layer_a of A, a kernel, then B from layer_b on.

    Call it with anything that a model reads: a text, several, token ids, or a tokenizer's batch.
    """

    a: Transformer
    layer_a: int
    b: Transformer
    layer_b: int
    kernel: str  # its name
    map: Carry

    def __repr__(self) -> str:
        a, b = self.a, self.b
        first = f"layers 0 to {self.layer_a} of {a.identity.name} ({a.n_layers} layers)"
        last = f"layer {self.layer_b} of {b.identity.name} ({b.n_layers} layers) on"
        return f"Stitched({first}, {self.kernel} kernel {a.d_model} x {b.d_model}, from {last})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, without the kernel's numbers."""
        return {
            "a": self.a.identity.to_dict(),
            "layer_a": self.layer_a,
            "b": self.b.identity.to_dict(),
            "layer_b": self.layer_b,
            "kernel": self.kernel,
        }

    def __call__(self, inputs: Any) -> Tensor:
        """The logits: (batch, pos, d_vocab), or (batch, class) if B is a classifier.

        Logits of padding mean nothing.
        """
        arguments = self.arguments(inputs)
        with self.spliced(arguments):
            logits = self.b.capture(arguments, layers=(), logits=True).logits
        assert logits is not None
        return logits

    def arguments(self, inputs: Any) -> dict[str, Tensor]:
        """Token ids and their mask, which both models get."""
        encoded = as_inputs(self.a, inputs)
        ids, mask = encoded.get("input_ids"), encoded.get("attention_mask")
        if not isinstance(ids, Tensor):
            raise BadText(f"got {', '.join(encoded) or 'nothing'}; expected a text or token ids")
        mask = torch.ones_like(ids) if mask is None else mask
        return {"input_ids": ids, "attention_mask": mask}

    @contextmanager
    def spliced(self, inputs: Any) -> Iterator[EditReport]:
        """B with the states of A in it, for passes of B over these very inputs.

        with stitched.spliced(text):
            ll.Lens(stitched.b).read(text)  # what the layers after the seam would say
        """
        arguments = self.arguments(inputs)
        real = arguments["attention_mask"].cpu().bool()
        h = self.a.capture(arguments, layers=[self.layer_a]).states[self.layer_a]
        with torch.no_grad():
            states = self.map(h[real.to(h.device)])
        positions, texts = (real.long().cumsum(1) - 1)[real], real.nonzero()[:, 0]
        with self.b.edit(PatchState(self.layer_b, states, positions, texts)) as report:
            yield report

    def loss(self, text: Any) -> float:
        """The mean of -log p(next token) over all positions of the text or texts, in nats."""
        if self.b.kind != "next-token":
            raise BadSettings(
                f"{self.b.identity.name} predicts a {self.b.kind.replace('-', ' ')}, not the next "
                "token; a loss needs a language model at the end"
            )
        arguments = self.arguments(text)
        ids, real = arguments["input_ids"], arguments["attention_mask"].bool()
        follows = real[:, :-1] & real[:, 1:]
        if not follows.any():
            raise BadText("the text has one token; expected at least two, to predict one")
        logits = self(arguments)[:, :-1].cpu()[follows.cpu()]
        targets = ids[:, 1:].cpu()[follows.cpu()]
        return float(torch.nn.functional.cross_entropy(logits.float(), targets))


@checked
def stitch(
    a: Transformer,
    layer_a: int,
    b: Transformer,
    layer_b: int,
    kernel: Any = "embedding",
    *,
    text: Any = None,
    n_texts: int = FITTED_TEXTS,
    sampling: Sampling | None = None,
    ridge: float | None = None,
    seed: int = 0,
    progress: Progress | bool = True,
) -> Stitched:
    """Blocks 1 .. layer_a of A, a kernel, and what B does from its layer_b on.

        a, b = ll.load("small-lm"), ll.load("small-lm-2")
        stitched = ll.stitch(a, 3, b, 3)
        stitched("The capital of France is")     # logits
        stitched.loss("The capital of France is Paris.")

    Args:
        layer_a: 0 .. n_layers of A; 0 is what enters the first block.
        layer_b: the same for B; n_layers leaves only its norm and head.
        kernel: "embedding" and "folded" (no data needed; the second with final norms folded in),
            "least-squares" (fitted on a text), the controls "identity" and "random"; or a matrix
            (d_A, d_B), or any function of states.
        text: what a fitted kernel is fitted on, as `ll.fit` takes it.
        n_texts: how many texts of it.
        sampling: how it is cut; by default every position of sentences is used.
        ridge: penalty of a fitted kernel; by default none, unless rows are few.
        seed: of a random kernel.
    """
    for model in (a, b):
        require_text(model)
    for side, model, layer in (("layer_a", a, layer_a), ("layer_b", b, layer_b)):
        try:
            check_layer(model, layer)
        except BadSettings as error:
            raise BadSettings(f"{side}: {error} ({model.identity.name})") from error
    name = kernel if isinstance(kernel, str) else "given"
    if isinstance(kernel, str):
        check_choice(kernel, Kernel, "kernel")
    if name != "least-squares" and any(one is not None for one in (text, sampling, ridge)):
        raise BadSettings(
            f"text, sampling and ridge are for kernel='least-squares'; a kernel that is {name} is "
            "not fitted"
        )
    if name == "least-squares":
        shared_tokens(a, b)
        source = default_text(a) if text is None else text
        sampling = sampling or Sampling(positions="all")
        batches = batches_of(a, source, sampling, side="fit", n_texts=n_texts)
        layers = (layer_a, layer_b)
        with reporting(progress) as report:
            options: Any = {"ridge": ridge, "n_texts": n_texts, "progress": report}
            carry: Carry = fit_kernels(a, b, [layers], batches, **options)[layers][0]
    elif isinstance(kernel, str):
        carry = kernel_map(kernel, a, layer_a, b, layer_b, seed)
    else:
        carry = _own_kernel(kernel, a, layer_a, b, layer_b)
    return Stitched(a, layer_a, b, layer_b, name, carry)


def kernel_map(
    kernel: str, a: Transformer, layer_a: int, b: Transformer, layer_b: int, seed: int = 0
) -> Carry:
    """A kernel that needs no text: embedding, folded, random or identity."""
    if kernel == "identity":
        shared_tokens(a, b)
        _require_width(a, b, a.d_model, "an identity kernel keeps")
        return IdentityMap(layer_a, layer_b)
    matrix = embedding_kernel(a, b, folded=kernel == "folded")
    weight = random_kernel(matrix, seed) if kernel == "random" else matrix
    # At least float32, as all maps are; float64 for a model that runs in it.
    dtype = torch.promote_types(b.model.dtype, torch.float32)
    return LinearMap(layer_a, layer_b, weight=weight.to(dtype))


def _own_kernel(kernel: Any, a: Transformer, layer_a: int, b: Transformer, layer_b: int) -> Carry:
    """A matrix or a function of the user's own."""
    shared_tokens(a, b)
    if isinstance(kernel, Tensor):
        if tuple(kernel.shape) != (a.d_model, b.d_model):
            raise BadSettings(
                f"the kernel has shape {tuple(kernel.shape)}; expected {(a.d_model, b.d_model)}, "
                "from states of the first model to states of the second"
            )
        return LinearMap(layer_a, layer_b, weight=kernel.detach())
    if not callable(kernel):
        raise BadSettings(
            f"kernel is a {type(kernel).__name__}; expected a name, a matrix, or a function of "
            "states such as a map of a bank"
        )
    with torch.no_grad():
        probe = kernel(torch.zeros(1, a.d_model, dtype=a.model.dtype, device=a.device(layer_a)))
    width = probe.shape[-1] if isinstance(probe, Tensor) else 0
    _require_width(a, b, width, "the kernel gives")
    return kernel


def _require_width(a: Transformer, b: Transformer, width: int, what: str) -> None:
    if width != b.d_model:
        raise BadSettings(
            f"{what} states of width {width}, but {b.identity.name} has width {b.d_model}; "
            f"expected a kernel from {a.d_model} to {b.d_model}"
        )
