"""One layer's map while it is fine-tuned towards the model's own output distribution.

In: a start map, rows, and gradients at the last layer. Out: a `TunedMap`, the best so far.

    y = x W0 + b0 + ([x P, c] D) s         D = 0 at first, so training begins at the start map

P whitens x / rms(h[L]). s is the start map's error per coordinate, relative to rms(h[L]), and c is
the median of rms(h[L]). All entries of D then have the same meaning, "a share of the error", so one
step size of Adam suits every direction. The loss is KL(model || reading), as in "Eliciting Latent
Predictions from Transformers with the Tuned Lens" (arXiv 2303.08112). Its gradient at the logits
is softmax(z) - p, so the softmax itself needs no backward pass.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layerleap.errors import BadSettings
from layerleap.maps.linear import TunedMap
from layerleap.maps.map import Map
from layerleap.models.transformer import Transformer
from layerleap.stats.saved_states import SavedStates

BETAS, EPSILON = (0.9, 0.98), 1e-8
FLOOR = 1e-4  # of the mean eigenvalue: smaller directions are not scaled up to full size
SAMPLE = 4096  # rows used to measure the whitening, or 8 per coordinate if that is more
CHUNK = 512  # of them at a time: 36 MB with 30 layers of 576
STATE = ("delta", "first", "second", "best", "whiten", "scale", "size")


class Translator:
    """The map from `start.src` to the last layer, and the state of its training."""

    def __init__(self, start: Map, whiten: Tensor, scale: Tensor, size: Tensor) -> None:
        self.start, self.whiten, self.scale, self.size = start, whiten, scale, size
        width = len(scale)
        # The change to the start map (D above), Adam's two moments, and the best change so far.
        self.delta, self.first, self.second, self.best = (
            torch.zeros(width + 1, width, device=scale.device) for _ in range(4)
        )

    def whitened(self, x: Tensor) -> Tensor:
        """Whitened rows with a constant for the bias: (row, d) -> (row, d + 1)."""
        return torch.cat([x @ self.whiten, self.size.expand(len(x), 1)], dim=1)

    def __call__(self, x: Tensor, white: Tensor | None = None) -> Tensor:
        """Rows carried to the last layer by the current map."""
        white = self.whitened(x) if white is None else white
        return self.start(x).addcmul_(white @ self.delta, self.scale)

    def gradient(self, white: Tensor, at_last: Tensor) -> Tensor:
        """The gradient of `delta`, from the gradient at the carried rows."""
        return white.T @ (at_last * self.scale)

    def update(self, gradient: Tensor, lr: float, step: int) -> None:
        """One step of Adam; `step` counts from 1."""
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        unbiased = 1 - BETAS[1] ** step
        size = (self.second / unbiased).sqrt_().add_(EPSILON)
        self.delta.addcdiv_(self.first, size, value=-lr / (1 - BETAS[0] ** step))

    def keep_best(self) -> None:
        """Remember the current map as the best so far."""
        self.best.copy_(self.delta)

    def result(self) -> Map:
        """The best map as plain weight and bias; the start map itself if nothing was better."""
        if not self.best.any():
            return self.start
        weight, bias = affine_of(self.start, len(self.scale))
        best, scale = self.best.double(), self.scale.double()
        weight = weight + (self.whiten.double() @ best[:-1]) * scale
        change = self.size.double() * best[-1] * scale
        bias = change if bias is None else change + bias
        weight, bias = weight.float().contiguous(), bias.float().contiguous()
        return TunedMap(self.start.src, self.start.dst, weight, bias)

    def state(self) -> dict[str, Tensor]:
        """Everything but the start map; whitening too, because eigenvectors may flip sign."""
        return {name: getattr(self, name) for name in STATE}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""
        for name in STATE:
            getattr(self, name).copy_(state[name])


def affine_of(start: Map, width: int) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a map; `BadSettings` if training cannot start at one of its kind."""
    affine = start.affine(width)
    if affine is None:
        raise BadSettings(
            f"a map of the kind {start.kind!r} is not a matrix with a bias, so it cannot be tuned; "
            "expected a bank of linear maps"
        )
    return affine


def translators(starts: Sequence[Map], states: SavedStates) -> list[Translator]:
    """A translator per start map (on the device to train on), scaled by a sample of the states."""
    device = next(iter(starts[0].tensors().values())).device
    d, n = states.d_model, min(len(states), max(SAMPLE, 8 * states.d_model))
    rows = torch.linspace(0, len(states) - 1, n, dtype=torch.float64).round().long()
    grams = torch.zeros(len(starts), d, d, dtype=torch.float64, device=device)
    errors = torch.zeros(len(starts), d, dtype=torch.float64, device=device)
    sizes = []
    for chunk in rows.split(CHUNK):
        h = states.states(chunk).to(device)
        y = h[:, -1]
        size = y.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)  # rms, (row, 1)
        sizes.append(size)
        for index, start in enumerate(starts):
            x = h[:, start.src]
            scaled = (x / size).double()
            grams[index].addmm_(scaled.T, scaled)
            errors[index] += ((start(x) - y) / size).double().square().sum(0)
    median = torch.cat(sizes).median()
    scales = (errors / n).sqrt()
    return [
        Translator(start, _whitening(gram / n), scale.float(), median.clone())
        for start, gram, scale in zip(starts, grams, scales, strict=True)
    ]


def _whitening(gram: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp_min(0)
    return (vectors * (values + FLOOR * values.mean()).clamp_min(1e-30).rsqrt()).float()


def logits_of(transformer: Transformer, h: Tensor) -> Tensor:
    """The logits of rows of the last layer, in float32 or wider whatever the model's dtype."""
    logits = transformer.logits(h.to(transformer.model.dtype))
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Answers:
    """The model's own output for some rows, to compare readings with."""

    def __init__(self, transformer: Transformer, last: Tensor) -> None:
        """`last` holds the rows of the last layer."""
        self.transformer = transformer
        z = logits_of(transformer, last)
        self.p, self.top = z.softmax(-1), z.argmax(-1)
        self.entropy = z.logsumexp(-1) - torch.linalg.vecdot(self.p, z)

    def compare(self, carried: Tensor) -> tuple[Tensor, Tensor]:
        """KL(model || reading of the carried rows) in nats, and if the top token agrees: (row,)."""
        z = logits_of(self.transformer, carried)
        cross = z.logsumexp(-1) - torch.linalg.vecdot(self.p, z)
        # Clamped because rounding can push a divergence of zero slightly below zero.
        return (cross - self.entropy).clamp_min(0).double(), z.argmax(-1) == self.top


def kl_gradient(transformer: Transformer, y: Tensor, p: Tensor) -> Tensor:
    """The gradient of the mean KL(p || reading of y) over rows with respect to y alone."""
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        z = transformer.logits(y.to(transformer.model.dtype))
    at_logits = z.detach().softmax(-1, dtype=p.dtype).sub_(p.to(z.device)).div_(len(y))
    (gradient,) = torch.autograd.grad(z, y, at_logits.to(z.dtype))
    return gradient
