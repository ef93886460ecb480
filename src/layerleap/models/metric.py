"""Where a metric of an answer looks: the logits that predict it, and a number per text.

In: a metric, which makes numbers of logits, or a plain function of them; a wrapped model.
Out: `Bound`: the positions whose logits are needed, and the numbers. The kinds of metrics are in
`act/metrics`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText, NotFinite
from layerleap.models.inputs import real_positions

if TYPE_CHECKING:
    from layerleap.models.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Bound:
    """A metric for one model: logits (text, n, d_vocab) at its n last positions -> (text,)."""

    transformer: "Transformer"
    numbers: Callable[[Tensor], Tensor]
    n: int = 1  # positions that it looks at
    answer: tuple[int, ...] = ()  # tokens that a prompt is continued with, for these positions
    name: str = "metric"

    @classmethod
    def of(
        cls, transformer: "Transformer", metric: Any, reference: Tensor | None = None
    ) -> "Bound":
        """A value of `ll.metrics`, or a function from (text, d_vocab) to a number per text.

        `reference` are the logits of the clean run, (1, n, d_vocab), for metrics that compare.
        """
        if isinstance(metric, Bound):
            return metric
        if hasattr(metric, "bound"):
            bound: Bound = metric.bound(transformer, reference)
            return bound
        if not callable(metric):
            raise BadSettings(
                f"{metric!r:.80} is not a metric; expected a value such as "
                "ll.metrics.logit_difference(' John', ' Mary'), or a function of logits"
            )
        name = getattr(metric, "__name__", "metric")
        return cls(transformer, lambda logits: metric(logits[:, -1]), name=name)

    def of_logits(self, logits: Tensor) -> Tensor:
        """(text, n, d_vocab) -> (text,); a metric that gives anything else is refused."""
        values = self.numbers(logits)
        if not isinstance(values, Tensor) or values.shape != logits.shape[:1]:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise BadSettings(
                f"{self.name} gives {shape} for logits of {tuple(logits.shape[::2])}; expected a "
                f"number per text, ({len(logits)},)"
            )
        if not torch.isfinite(values).all():
            raise NotFinite(
                f"{self.name} is not finite for this prompt: {values.detach().tolist()!s:.60}"
            )
        return values

    def keep(self, arguments: Mapping[str, Any], shape: tuple[int, int]) -> Tensor:
        """(text, pos): True at the positions that the metric looks at.

        They are the last ones of a text; the mask tokens of a masked model; what a head pools.
        """
        transformer = self.transformer
        real = real_positions(transformer, arguments, shape)
        if transformer.pooling is not None:
            return transformer.pooled(real)
        if transformer.kind == "masked-token":
            token = getattr(transformer.tokenizer, "mask_token_id", None)
            real = real & (arguments["input_ids"].cpu() == (-1 if token is None else token))
            if (real.sum(1) != self.n).any():
                raise BadText(
                    f"{transformer.identity.name} is a masked model, and the prompt has "
                    f"{int(real.sum(1).amin())} mask tokens; expected {self.n}, where the answer is"
                )
            return real
        return real & (real.flip(1).cumsum(1).flip(1) <= self.n)

    def of_pass(self, arguments: Mapping[str, Any], logits: Tensor) -> Tensor:
        """The metric of each text of a pass, from its logits."""
        logits = wide(logits)
        if logits.dim() == 2:  # one row per text
            return self.of_logits(logits[:, None])
        keep = self.keep(arguments, (logits.shape[0], logits.shape[1]))
        return self.of_logits(logits[keep.to(logits.device)].unflatten(0, (len(logits), -1)))

    def of_states(self, keep: Tensor, h: Tensor) -> Tensor:
        """The metric of each text whose h[n_layers] is given: (text, pos, d_model) -> (text,)."""
        logits = self.transformer.logits(self.transformer.rows(h, keep))
        return self.of_logits(wide(logits).unflatten(0, (len(h), -1)))


def wide(logits: Tensor) -> Tensor:
    """The logits in float32 or wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
