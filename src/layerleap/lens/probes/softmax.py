"""A multinomial logistic regression, fitted by scikit-learn and stored as plain tensors.

In: rows of features and their class. Out: `Softmax`, which can be used and saved without
scikit-learn.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from layerleap.errors import BadSettings
from layerleap.extras import learn_library
from layerleap.short_repr import ShortRepr

# Inverse of the penalty. States have hundreds of features and there are few cells: with a much
# smaller penalty the probe memorises cells, and takes ten times as long to fit.
STRENGTH = 0.01
ARRAYS = ("mean", "scale", "coefficients", "intercepts")


@dataclass(frozen=True, eq=False, repr=False)
class Softmax(ShortRepr):
    """A multinomial logistic regression on standardised features, in float64."""

    mean: Tensor  # (feature,)
    scale: Tensor  # (feature,)
    coefficients: Tensor  # (task, feature)
    intercepts: Tensor  # (task,)

    def __post_init__(self) -> None:
        tasks, width = self.coefficients.shape if self.coefficients.dim() == 2 else (0, 0)
        shapes = {"mean": (width,), "scale": (width,), "intercepts": (tasks,)}
        for name, shape in shapes.items():
            if tasks < 2 or tuple(getattr(self, name).shape) != shape:
                raise BadSettings(f"{name} of a probe with {tasks} tasks must have shape {shape}")
        if not all(getattr(self, name).isfinite().all() for name in ARRAYS):
            raise BadSettings("this probe contains NaN or infinite numbers; fit it again")

    def probabilities(self, x: Tensor) -> Tensor:
        """The probability of each task: (row, feature) -> (row, task)."""
        weight, bias = (part.to(x.device) for part in self._folded)
        return torch.addmm(bias, x.to(weight.dtype), weight).softmax(-1)

    @cached_property
    def _folded(self) -> tuple[Tensor, Tensor]:
        """Standardisation and regression as one product, because it runs at every layer."""
        weight = self.coefficients.contiguous() / self.scale
        # A copy: how a product rounds depends on where in memory its factors begin, and those of a
        # loaded probe may begin anywhere.
        return weight.T.contiguous(), self.intercepts - weight @ self.mean.clone()

    @classmethod
    def fit(cls, x: Tensor, task: Tensor, n_tasks: int, strength: float) -> "Softmax":
        """A regression of tasks 1 to n_tasks on rows of features; every task must occur."""
        linear = learn_library("sklearn.linear_model")
        scaling = learn_library("sklearn.preprocessing")
        pipeline = learn_library("sklearn.pipeline").make_pipeline(
            scaling.StandardScaler(), linear.LogisticRegression(C=strength, max_iter=2000)
        )
        # The matrices are small: more threads cost more time than they save.
        with learn_library("threadpoolctl").threadpool_limits(1):
            pipeline.fit(x.numpy(), task.numpy())
        scaler, model = pipeline[0], pipeline[1]
        weight, bias = torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)
        if n_tasks == 2:  # scikit-learn then stores only the log odds of the second task
            weight, bias = (torch.cat([torch.zeros_like(one), one]) for one in (weight, bias))
        return cls(torch.from_numpy(scaler.mean_), torch.from_numpy(scaler.scale_), weight, bias)


def require_strength(strength: float) -> None:
    """Refuse an invalid penalty."""
    if not 0 < strength < float("inf"):
        raise BadSettings(f"strength {strength} is invalid; expected a number above 0")
