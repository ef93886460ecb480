"""One layer's map while it is trained towards the model's own distribution.

In: a start map, rows, and gradients at the last layer. Out: a `LinearMap`, the best so far.

    y = x W0 + b0 + ([x P, c] D) s         D = 0 at first, so training begins at the start map

P whitens x / rms(h[L]), s is how far the start map is off per coordinate, relative to rms(h[L]),
and c is the median rms(h[L]). All of D then has the same meaning, "a share of the error", which is
what lets Adam's one step size serve every direction. The distance to the model's answer is
KL(model || reading), as in "Eliciting Latent Predictions from Transformers with the Tuned Lens"
(arXiv 2303.08112); its gradient at the logits is softmax(z) - p, so no softmax is differentiated.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layerleap.errors import NotFinite
from layerleap.maps.linear import LinearMap
from layerleap.models.transformer import Transformer
from layerleap.stats.saved_states import SavedStates

BETAS, EPSILON = (0.9, 0.98), 1e-8
FLOOR = 1e-4  # of the mean eigenvalue: directions below it are not blown up to full size
SAMPLE = 4096  # rows that whitening is measured on, or 8 per coordinate if that is more
CHUNK = 512  # of them at a time: 36 MB with 30 layers of 576
STATE = ("change", "first", "second", "best", "whiten", "scale", "size")


class Translator:
    """The map from `start.src` to the last layer, and the state of its training."""

    def __init__(self, start: LinearMap, whiten: Tensor, scale: Tensor, size: Tensor) -> None:
        self.start, self.whiten, self.scale, self.size = start, whiten, scale, size
        width = len(scale)
        self.change, self.first, self.second, self.best = (
            torch.zeros(width + 1, width, device=scale.device) for _ in range(4)
        )

    def whitened(self, x: Tensor) -> Tensor:
        """Rows as training sees them, with a constant for the bias: (row, d) -> (row, d + 1)."""
        return torch.cat([x @ self.whiten, self.size.expand(len(x), 1)], dim=1)

    def __call__(self, x: Tensor, white: Tensor | None = None) -> Tensor:
        """Carry rows to the last layer with the map as it is now."""
        white = self.whitened(x) if white is None else white
        return self.start(x).addcmul_(white @ self.change, self.scale)

    def gradient(self, white: Tensor, at_last: Tensor) -> Tensor:
        """The gradient of `change`, from that of the carried rows."""
        return white.T @ (at_last * self.scale)

    def update(self, gradient: Tensor, lr: float, step: int) -> None:
        """One step of Adam; `step` counts from 1."""
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        unbiased = 1 - BETAS[1] ** step
        size = (self.second / unbiased).sqrt_().add_(EPSILON)
        self.change.addcdiv_(self.first, size, value=-lr / (1 - BETAS[0] ** step))

    def keep(self) -> None:
        """Take note that the map as it is now is the best so far."""
        self.best.copy_(self.change)

    def result(self) -> LinearMap:
        """The best map as plain weight and bias; the start map itself if nothing was better."""
        if not self.best.any():
            return self.start
        named = {name: value.double() for name, value in self.start.tensors().items()}
        weight = named["weight"] if "weight" in named else named["left"] @ named["right"]
        best, scale = self.best.double(), self.scale.double()
        weight = weight + (self.whiten.double() @ best[:-1]) * scale
        bias = self.size.double() * best[-1] * scale
        bias = bias + named["bias"] if "bias" in named else bias
        return LinearMap(
            self.start.src, self.start.dst,
            weight=weight.float().contiguous(), bias=bias.float().contiguous(),
        )  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        """All that training has made of the start map; whitening too, for eigenvectors may flip."""
        return {name: getattr(self, name) for name in STATE}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        for name in STATE:
            getattr(self, name).copy_(state[name])


def translators(starts: Sequence[LinearMap], rows: SavedStates) -> list[Translator]:
    """A translator per start map, scaled by what a sample of the rows looks like.

    The start maps must lie where they are to be trained.
    """
    device = next(iter(starts[0].tensors().values())).device
    d, n = rows.d_model, min(len(rows), max(SAMPLE, 8 * rows.d_model))
    chosen = torch.linspace(0, len(rows) - 1, n, dtype=torch.float64).round().long()
    grams = torch.zeros(len(starts), d, d, dtype=torch.float64, device=device)
    errors = torch.zeros(len(starts), d, dtype=torch.float64, device=device)
    sizes = []
    for some in chosen.split(CHUNK):
        states = rows.states(some).to(device)
        y = states[:, -1]
        size = rms(y)
        sizes.append(size)
        for place, start in enumerate(starts):
            x = states[:, start.src]
            shrunk = (x / size).double()
            grams[place].addmm_(shrunk.T, shrunk)
            errors[place] += ((start(x) - y) / size).double().square().sum(0)
    median = torch.cat(sizes).median()
    scales = (errors / n).sqrt()
    made = zip(starts, grams, scales, strict=True)
    return [Translator(m, _whitening(g / n), s.float(), median.clone()) for m, g, s in made]


def _whitening(gram: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp_min(0)
    return (vectors * (values + FLOOR * values.mean()).clamp_min(1e-30).rsqrt()).float()


def rms(rows: Tensor) -> Tensor:
    """The length of each row by coordinate, never 0: (row, d) -> (row, 1)."""
    return rows.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)


def answers(transformer: Transformer, h: Tensor) -> Tensor:
    """The logits of rows of the last layer, float32 or wider, whatever the model's dtype."""
    logits = transformer.logits(h.to(transformer.model.dtype))
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def kl_gradient(transformer: Transformer, y: Tensor, p: Tensor) -> Tensor:
    """The gradient of the mean KL(p || reading of y) over rows with respect to y.

    Only y's gradient is asked for: the model's own parameters get none.
    """
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        z = transformer.logits(y.to(transformer.model.dtype))
    at_logits = z.detach().softmax(-1, dtype=p.dtype).sub_(p.to(z.device)).div_(len(y))
    (found,) = torch.autograd.grad(z, y, at_logits.to(z.dtype))
    return found


class Measure:
    """KL and agreement of several readings with the model, summed chunk by chunk."""

    def __init__(self, names: Sequence[int]) -> None:
        self.kl, self.agreed, self.n = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0), 0

    def add(self, transformer: Transformer, last: Tensor, carried: Mapping[int, Tensor]) -> None:
        """Take in rows of the last layer and what each reading has made of them."""
        z = answers(transformer, last)
        p, top = z.softmax(-1), z.argmax(-1)
        own = z.logsumexp(-1) - torch.linalg.vecdot(p, z)
        self.n += len(last)
        for name, y in carried.items():
            read = answers(transformer, y)
            cross = read.logsumexp(-1) - torch.linalg.vecdot(p, read)
            # Clamped because rounding can put a divergence of zero just below it.
            self.kl[name] += (cross - own).clamp_min(0).double().sum().item()
            self.agreed[name] += int((read.argmax(-1) == top).sum())

    def of(self, name: int) -> tuple[float, float]:
        """Mean KL in nats, and the share of rows whose top token is the model's."""
        return self.kl[name] / self.n, self.agreed[name] / self.n


def require_finite(kl: float, layer: int) -> None:
    """Refuse a start map that reads no numbers: there is nothing to improve on."""
    if not kl < float("inf"):
        raise NotFinite(
            f"the start map of layer {layer} reads NaN or infinite logits on held-out rows; look "
            "for a dtype too narrow, or a map fitted on too few rows"
        )
