"""The self-check: what must hold before a model is trusted.

In: a wrapped model. Out: one verdict per law, each from fresh inputs that discovery never saw.

    blocks    there are as many blocks as the configuration says
    steady    two passes over the same input agree to the bit (no dropout left on)
    finite    every state and logit is a number
    tail      the tail applied to h[n_layers] gives the model's own logits
    parts     attention, FFN and norms of each block add up to the block
    padding   a row's states do not change when it shares a batch with a longer row
    traceless after reading, logits are bit-identical and every hook is gone
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerleap.errors import LayerleapError, ModelRefused
from layerleap.models.discovery.compare import rounding, row_gap, sum_error
from layerleap.models.discovery.probe import N_TOKENS, probe, probe_ids, ready
from layerleap.models.discovery.sites import Anatomy
from layerleap.models.discovery.structure import BY_HAND
from layerleap.models.transformer import Transformer


@dataclass(frozen=True)
class LawResult:
    """One law and how it went."""

    law: str
    status: Literal["holds", "fails", "not applicable"]
    detail: str

    def to_dict(self) -> dict[str, str]:
        """Plain JSON types."""
        return asdict(self)


def check(transformer: Transformer) -> list[LawResult]:
    """Every law's verdict, in the order of the module docstring."""
    hooks_before = _count_hooks(transformer.model)
    inputs = _inputs(transformer)
    with torch.inference_mode():
        before = transformer.model(**inputs).logits
    verdicts = [_verdict(law, rule, transformer, inputs, before) for law, rule in LAWS.items()]
    after_hooks = _count_hooks(transformer.model)
    with torch.inference_mode():
        after = transformer.model(**inputs).logits
    same, left = torch.equal(before, after), after_hooks - hooks_before
    steady = next(v for v in verdicts if v.law == "steady").status == "holds"
    verdicts.append(
        LawResult(
            "traceless",
            "holds" if (same or not steady) and left == 0 else "fails",
            f"logits {'bit-identical' if same else 'changed'} after reading, {left} hooks left",
        )
    )
    return verdicts


def _inputs(transformer: Transformer) -> dict[str, Any]:
    """Always the same, and not those of discovery."""
    return probe(transformer.model, rows=3, seed=11)


def require(transformer: Transformer) -> None:
    """Raise `ModelRefused` if any law fails."""
    failed = [verdict for verdict in check(transformer) if verdict.status == "fails"]
    if failed:
        name = type(transformer.model).__name__
        reasons = "; ".join(f"law '{verdict.law}' failed: {verdict.detail}" for verdict in failed)
        hint = f"; {BY_HAND}" if {verdict.law for verdict in failed} & BY_PATHS else ""
        raise ModelRefused(f"{name} is refused: {reasons}{hint}")


def check_model(model: PreTrainedModel | Transformer, **names: Any) -> list[LawResult]:
    """Wrap and check; a model that cannot even be wrapped gives one failed verdict."""
    if isinstance(model, Transformer):
        return check(model)
    try:
        return check(Transformer.wrap(model, check=False, **names))
    except LayerleapError as error:
        return [LawResult("discovery", "fails", str(error))]


BY_PATHS = {"blocks", "tail", "parts"}  # laws that other paths could mend
Rule = Callable[[Transformer, dict[str, Any], Tensor], tuple[bool | None, str]]


def _verdict(
    law: str, rule: Rule, transformer: Transformer, inputs: dict[str, Any], logits: Tensor
) -> LawResult:
    holds, detail = rule(transformer, inputs, logits)
    status = {True: "holds", False: "fails", None: "not applicable"}[holds]
    return LawResult(law, status, detail)  # type: ignore[arg-type]


def _blocks(transformer: Transformer, _: dict[str, Any], __: Tensor) -> tuple[bool | None, str]:
    config = transformer.model.config
    if config.is_encoder_decoder:
        names = ("decoder_layers", "num_decoder_layers")
    else:
        config, names = config.get_text_config(), ("num_hidden_layers", "n_layer")
    said = next((getattr(config, name) for name in names if hasattr(config, name)), None)
    found = f"{transformer.n_layers} at {transformer.blocks[0].rpartition('.')[0]}"
    return (None if said is None else said == transformer.n_layers), f"{found}, config says {said}"


def _steady(transformer: Transformer, _: dict[str, Any], logits: Tensor) -> tuple[bool | None, str]:
    with torch.inference_mode():
        again = transformer.model(**_inputs(transformer)).logits  # an encoder that hears runs anew
    if transformer.model.training:
        return False, "the model is in training mode; call model.eval()"
    if torch.equal(again, logits):
        return True, "two passes agree to the bit"
    return False, f"two passes differ by {row_gap(again, logits, centre=True):.2g} of the logits"


def _finite(
    transformer: Transformer, inputs: dict[str, Any], logits: Tensor
) -> tuple[bool | None, str]:
    seen = transformer.capture(inputs)
    bad = [layer for layer, h in seen.states.items() if not torch.isfinite(h).all()]
    if bad:
        return False, f"NaN or infinite states at layers {bad}"
    if not torch.isfinite(logits).all():
        return False, "NaN or infinite logits"
    return True, f"{len(seen.states)} layers of states and the logits are numbers"


def _tail(
    transformer: Transformer, inputs: dict[str, Any], logits: Tensor
) -> tuple[bool | None, str]:
    h = transformer.capture(inputs, layers=[transformer.n_layers]).states[transformer.n_layers]
    picked = transformer.picked_position
    rows = h[:, picked] if picked is not None else h.flatten(0, 1)
    with torch.inference_mode():
        ours = transformer.logits(rows)
    error = row_gap(ours, logits.reshape(ours.shape), centre=True)
    path = " -> ".join(str(step) for step in transformer.tail)
    return error <= rounding(logits), f"{path} (off by {error:.1e})"


def _parts(transformer: Transformer, inputs: dict[str, Any], _: Tensor) -> tuple[bool | None, str]:
    unknown = [a for a in transformer.anatomy if isinstance(a, str)]
    if unknown:
        return None, f"no sites in {len(unknown)} blocks: {unknown[0]}; layers can still be read"
    wanted = [
        (block, name)
        for block in range(1, transformer.n_layers + 1)
        for name in transformer.sites(block)
    ]
    seen = transformer.capture(inputs, sites=wanted)
    worst = max(
        parts_error(transformer, block, seen.states, seen.sites)
        for block in range(1, transformer.n_layers + 1)
    )
    anatomy = transformer.anatomy[0]
    assert isinstance(anatomy, Anatomy)
    scale = "" if anatomy.scale == 1 else f", scaled by {anatomy.scale:.4g}"
    summary = f"{anatomy.style}: {' + '.join(anatomy.parts)}{scale}"
    return worst <= 1, f"{summary} (off by {worst:.2f} of what rounding allows)"


def parts_error(
    transformer: Transformer,
    block: int,
    states: Mapping[int, Tensor],
    sites: Mapping[tuple[int, str], Tensor],
) -> float:
    """How far h[block] is from h[block - 1] plus the parts, as a share of what rounding allows."""
    anatomy = transformer.anatomy[block - 1]
    assert isinstance(anatomy, Anatomy)
    names = {site: name for name, site in anatomy.sites.items()}
    values = [sites[block, names[added]] for added in anatomy.adds]
    h = states[block - 1]
    if anatomy.style != "post-norm":
        terms = [h, *(anatomy.scale * value.double() for value in values)]
        return sum_error(states[block], terms)
    for part, value in zip(anatomy.parts, values, strict=True):
        path = anatomy.sites[f"{part}_post.out"].path
        norm = transformer.model.get_submodule(f"{transformer.blocks[block - 1]}.{path}")
        with torch.no_grad():
            h = norm(h + value.to(h.device))
    return row_gap(h, states[block]) / rounding(h)


def _padding(
    transformer: Transformer, inputs: dict[str, Any], _: Tensor
) -> tuple[bool | None, str]:
    if transformer.kind == "class" or "attention_mask" not in inputs:
        return None, "inputs of one size"
    model = transformer.model
    short = probe_ids(model, 1, N_TOKENS - 3, seed=5)
    long = torch.cat([short.expand(2, -1), probe_ids(model, 2, 3, seed=6)], dim=1)
    mask = torch.ones_like(long)
    mask[0, N_TOKENS - 3 :] = 0
    alone = transformer.capture(
        ready(model, {"input_ids": short, "attention_mask": torch.ones_like(short)})
    )
    padded = transformer.capture(ready(model, {"input_ids": long, "attention_mask": mask}))
    worst = max(
        row_gap(padded.states[layer][0, : N_TOKENS - 3], h[0]) for layer, h in alone.states.items()
    )
    # Some families (MPT) make their position bias in float32, whatever the dtype of the model.
    allowed = max(rounding(alone.states[0]), 1e-6)
    return worst <= allowed, f"states move by {worst:.1e} under padding"


def _count_hooks(model: PreTrainedModel) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + ("forward" in vars(module))
        for module in model.modules()
    )


LAWS: dict[str, Rule] = {
    "blocks": _blocks,
    "steady": _steady,
    "finite": _finite,
    "tail": _tail,
    "parts": _parts,
    "padding": _padding,
}
