"""Linear shortcuts between layers, solved in closed form from moments.

In: `Moments` of layers or of parts of blocks. Out: `LinearMap`s, each with a `FitReport`.

    h[dst] ~ h[src] @ W + b        W = argmin  sum |h[src] W + b - h[dst]|^2 + penalty |W|^2

"Jump to Conclusions" (arXiv 2303.09435) uses b = 0 and no penalty. One eigendecomposition of the
source's Gram matrix serves every target, ridge and rank. Where the data leave directions
undetermined, it gives the minimum-norm solution.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.maps.map import Map
from layerleap.maps.map_settings import check_solving
from layerleap.models.discovery.parts import BlockPart
from layerleap.progress import Progress, silent
from layerleap.stats.moments import Moments

PAPER = 'The method is described in ["Jump to Conclusions"](https://arxiv.org/abs/2303.09435).'
RIDGES = (0.0, *(10.0**power for power in range(-9, 1)))  # those to choose from


@dataclass(frozen=True)
class FitReport:
    """How one map was fitted; plain JSON types."""

    src: int
    dst: int
    rows: int  # number of rows fitted on
    rank: int  # number of directions the data determine
    width: int  # number of all directions
    condition: float  # largest over smallest singular value of the rows, determined ones only
    ridge: float  # penalty as a fraction of the mean squared singular value per direction
    train_r2: float  # average over coordinates, on the rows fitted on
    train_r2_logit: float  # the same for the identity map, that of the logit lens
    part: str | None = None  # the part of block `dst` that the map replaces; None for layers

    @property
    def is_deficient(self) -> bool:
        """True if the rows do not determine the map."""
        return self.rank < self.width

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `part` only if there is one."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "FitReport":
        """The report that gave these values, or one of a bank saved before lenses had names."""
        renamed = {"train_r2_id": "train_r2_logit"}
        return cls(**{renamed.get(key, key): value for key, value in values.items()})


@dataclass(frozen=True, eq=False, repr=False)
class LinearMap(Map):
    """h[dst] ~ h[src] @ weight + bias, in float32 whatever the model's dtype."""

    kind: ClassVar[str] = "linear"
    title: ClassVar[str] = "linear shortcuts"
    about: ClassVar[str] = PAPER

    weight: Tensor
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        """The inner width: d_model."""
        return self.weight.shape[1]

    def apply(self, h: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """One product, and the bias if there is one."""
        return _with_bias(h @ tensors["weight"], tensors)

    def affine(self, width: int) -> tuple[Tensor, Tensor | None]:
        """The weight and bias of the map."""
        return self.weight.double(), None if self.bias is None else self.bias.double()


@dataclass(frozen=True, eq=False, repr=False)
class LowRankMap(Map):
    """h[dst] ~ h[src] @ left @ right + bias, in float32 whatever the model's dtype."""

    kind: ClassVar[str] = "low-rank"
    title: ClassVar[str] = "low-rank shortcuts"
    about: ClassVar[str] = PAPER

    left: Tensor
    right: Tensor
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        """The inner width."""
        return self.left.shape[1]

    def apply(self, h: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Two thin products, and the bias if there is one."""
        return _with_bias(h @ tensors["left"] @ tensors["right"], tensors)

    def affine(self, width: int) -> tuple[Tensor, Tensor | None]:
        """The product of both matrices, and the bias."""
        weight = self.left.double() @ self.right.double()
        return weight, None if self.bias is None else self.bias.double()


@dataclass(frozen=True, eq=False, repr=False)
class TunedMap(LinearMap):
    """A linear map that was trained until its readings match the model's output."""

    kind: ClassVar[str] = "tuned"
    title: ClassVar[str] = "tuned lens"
    about: ClassVar[str] = (
        "The maps to the last layer were fine-tuned to match the model's output, as in a [tuned "
        "lens](https://arxiv.org/abs/2303.08112)."
    )


def _with_bias(y: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    return y + tensors["bias"] if "bias" in tensors else y


def solve(
    moments: Moments,
    src: int,
    *,
    targets: Sequence[int] | None = None,
    intercept: bool = False,
    ridge: float | str = 0.0,
    rank: int | None = None,
    ridge_rows: Moments | None = None,
) -> Iterator[tuple[Map, FitReport]]:
    """Maps from `src` to each of `targets`.

    Args:
        targets: the target layers; by default all that the moments hold.
        ridge: penalty as a fraction of the mean eigenvalue of the Gram matrix; "auto" chooses the
            one with the least squared error on `ridge_rows`.
        rank: keep only the best `rank` directions of the prediction.
        ridge_rows: moments of other documents, to choose the ridge.
    """
    check_solving(ridge, rank, moments.d_model)
    if not 0 <= src <= moments.n_layers:
        raise BadSettings(f"layer {src} does not exist: there are layers 0 to {moments.n_layers}")
    solver = RidgeSolver(moments, src, intercept)
    if ridge == "auto":
        ridge = solver.best_ridge(ridge_rows)
    assert isinstance(ridge, float | int)
    for dst in moments.targets(src) if targets is None else targets:
        weight, bias = solver.solve(dst, ridge)
        if rank is None:
            linear = LinearMap(src, dst, _f32(weight), _f32(bias))
            yield linear, solver.report(dst, weight, bias, ridge)
        else:
            left, right, bias = solver.reduce(dst, weight, rank, ridge)
            low = LowRankMap(src, dst, _f32(left), _f32(right), _f32(bias))
            yield low, solver.report(dst, left @ right, bias, ridge)


def solve_parts(
    moments: Moments,
    parts: Sequence[BlockPart],
    *,
    intercept: bool = False,
    ridge: float = 0.0,
    progress: Progress = silent,
) -> tuple[dict[tuple[int, str], Map], list[FitReport]]:
    """Maps that replace parts of blocks, by (block, part), and a report per fit.

    y ~ x @ W + b, from the input of a part (attention, FFN, a norm) to its output at the same
    position; what attention reads from other positions enters only on average. Maps and reports
    have src = block - 1 and dst = block; `FitReport.part` names the part.
    """
    if moments.pairs != "parts" or moments.n_layers + 1 != 2 * len(parts):
        raise BadSettings(
            f"got moments of {moments.n_layers + 1} vectors ({moments.pairs!r}); expected the "
            f"inputs and outputs of {len(parts)} parts"
        )
    maps, fits = {}, []
    for index, part in enumerate(parts):
        src, dst = part.block - 1, part.block
        for linear, fit in solve(moments, 2 * index, intercept=intercept, ridge=ridge):
            maps[dst, part.part] = replace(linear, src=src, dst=dst)
            fits.append(replace(fit, src=src, dst=dst, part=part.part))
        progress("solving parts", index + 1, len(parts), "parts")
    return maps, fits


def _f32(value: Any) -> Any:
    """A tensor as it is saved; None stays None."""
    return None if value is None else value.float().contiguous()


class RidgeSolver:
    """Solves from one source layer, with one eigendecomposition of its Gram matrix."""

    def __init__(self, moments: Moments, src: int, intercept: bool) -> None:
        self.moments, self.src, self.intercept = moments.flush(), src, intercept
        if moments.n == 0:
            raise BadText("no rows to fit on: the text has no position to read")
        self.xx = self._centred(moments.xx(src), src, src)
        values, self.vectors = torch.linalg.eigh(self.xx)
        self.values = values.clamp_min(0)
        # Eigenvalues below this share of the largest are rounding: not determined by the data.
        scale = self.values[-1] * len(values)
        if intercept:  # centring subtracts uncentred products and leaves their rounding
            scale = torch.maximum(scale, 8 * moments.xx(src).trace())
        self.determined = self.values > scale * torch.finfo(values.dtype).eps

    def _centred(self, products: Tensor, src: int, dst: int) -> Tensor:
        if not self.intercept:
            return products
        sums, n = self.moments.sums, self.moments.n
        return products - torch.outer(sums[src], sums[dst]) / n

    def _xy(self, dst: int) -> Tensor:
        return self._centred(self.moments.xy(self.src, dst), self.src, dst)

    def _inverse(self, ridge: float) -> Tensor:
        """1 / (eigenvalue + penalty), or 0 if not determined: the minimum-norm solution."""
        penalised = self.values + self._penalty(ridge)
        return torch.where(self.determined, 1 / penalised.clamp_min(1e-300), 0.0)

    def _penalty(self, ridge: float) -> Tensor:
        return ridge * self.values.mean()

    def solve(self, dst: int, ridge: float) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the map to `dst`."""
        rotated = self._inverse(ridge)[:, None] * (self.vectors.T @ self._xy(dst))
        weight = self.vectors @ rotated
        return weight, self._bias(dst, weight)

    def _bias(self, dst: int, weight: Tensor) -> Tensor | None:
        if not self.intercept:
            return None
        sums = self.moments.sums
        return (sums[dst] - sums[self.src] @ weight) / self.moments.n

    def reduce(
        self, dst: int, weight: Tensor, rank: int, ridge: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Reduced-rank regression: project the predictions onto their leading directions.

        A penalty is like extra rows sqrt(penalty) I with targets 0, predicted like the others. So
        the result has the least penalised error of all maps of that rank.
        """
        predicted = weight.T @ self.xx @ weight + self._penalty(ridge) * (weight.T @ weight)
        directions = torch.linalg.eigh(predicted).eigenvectors[:, -rank:]
        left = weight @ directions
        return left, directions.T, self._bias(dst, left @ directions.T)

    def report(self, dst: int, weight: Tensor, bias: Tensor | None, ridge: float) -> FitReport:
        """How a map was fitted."""
        values = self.values[self.determined]
        condition = (values[-1] / values[0]).sqrt().item() if len(values) else 1.0
        r2 = moments_r2(self.moments, self.src, dst, weight, bias)
        logit_r2 = moments_r2(self.moments, self.src, dst, None, None)
        rank, width = int(self.determined.sum()), len(weight)
        n = self.moments.n
        return FitReport(self.src, dst, n, rank, width, condition, ridge, r2, logit_r2)

    def best_ridge(self, ridge_rows: Moments | None) -> float:
        """The penalty with the least error to the last layer on `ridge_rows`.

        In the eigenbasis the error is a quadratic form in the inverse eigenvalues, so each
        candidate costs d^2 instead of a new fit.
        """
        if ridge_rows is None or ridge_rows.flush().n == 0:
            raise BadSettings(
                "ridge 'auto' needs rows held back from the fit, but there are none: give more "
                "documents, or a ridge as a number"
            )
        src, dst = self.src, self.moments.n_layers
        mean_x, mean_y = self.moments.sums[[src, dst]] / self.moments.n * self.intercept

        def around(products: Tensor, layer: int, mean: Tensor) -> Tensor:
            """Products of deviations from the means of the fit, not from their own."""
            sums = ridge_rows.sums
            products = products - torch.outer(sums[src], mean) - torch.outer(mean_x, sums[layer])
            return products + ridge_rows.n * torch.outer(mean_x, mean)

        spread = _spread(ridge_rows, dst)
        # R2 averages coordinates. Without any spread (one row) it is undefined: plain errors.
        weights = torch.where(spread > 0, spread.rsqrt(), 0.0 if spread.any() else 1.0)
        fitted = self.vectors.T @ self._xy(dst) * weights
        gram = self.vectors.T @ around(ridge_rows.xx(src), src, mean_x) @ self.vectors
        quadratic = gram * (fitted @ fitted.T)
        xy = around(ridge_rows.xy(src, dst), dst, mean_y)
        linear = (fitted * (self.vectors.T @ xy * weights)).sum(1)

        def error(ridge: float) -> float:
            inverse = self._inverse(ridge)
            return (inverse @ quadratic @ inverse - 2 * inverse @ linear).item()

        return min(RIDGES, key=error)


def moments_r2(
    moments: Moments, src: int, dst: int, weight: Tensor | None, bias: Tensor | None
) -> float:
    """R2 of a map on the rows of `moments`, averaged over coordinates, without a second pass.

    `weight` None is the identity map. Coordinates that never vary are left out; if none varies,
    R2 is 0.
    """
    error, spread = squared_error(moments, src, dst, weight, bias), _spread(moments, dst)
    varies = spread > 0
    return (1 - error[varies] / spread[varies]).mean().item() if varies.any() else 0.0


def _spread(moments: Moments, layer: int) -> Tensor:
    """Sum of squared deviations from the mean, per coordinate; 0 if it is only rounding."""
    squares = moments.squares(layer)
    spread = squares - moments.sums[layer].square() / moments.n
    return torch.where(spread > 1e-12 * squares, spread, 0.0)


def squared_error(
    moments: Moments, src: int, dst: int, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Sum over rows of (h[src] W + b - h[dst])^2, per coordinate."""
    if weight is None:
        xx, yy = moments.squares(src), moments.squares(dst)
        return (xx - 2 * moments.xy(src, dst).diagonal() + yy).clamp_min(0)
    weight = weight.double()
    predicted = (weight * (moments.xx(src) @ weight)).sum(0)
    both = (weight * moments.xy(src, dst)).sum(0)
    error = predicted - 2 * both + moments.squares(dst)
    if bias is not None:
        bias = bias.double()
        drift = moments.sums[src] @ weight - moments.sums[dst]
        error = error + 2 * bias * drift + moments.n * bias.square()
    return error.clamp_min(0)
