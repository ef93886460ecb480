"""The self-check: laws that must hold before a model is used.

In: a wrapped model. Out: one `LawResult` per law, from inputs that discovery did not use.

    blocks         the number of blocks matches the configuration
    deterministic  two passes over the same input are bit-identical (no dropout)
    finite         all states and logits are finite
    tail           the tail applied to h[n_layers] gives the model's own logits, at two lengths
    parts          attention, FFN and norms of each block add up to the block
    padding        a row's states do not change when it shares a batch with a longer row,
                   whichever side is padded
    rows           the tail gives a row the same logits alone as among others
    clean          after reading, logits are bit-identical and no hook is left

A pass over a large model takes long, so the laws share passes: one whose states and sites are read
serves three of them, and a plain one before and one after show both that the model repeats itself
and that reading left nothing behind.

A model that breaks "padding" or "rows" alone can be loaded with laws="loose": both say that a row
does not depend on its neighbours. By how much it does is then part of the model's identity, which
all results carry. The other laws say that what is read is the model itself, and are never loosened.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerleap.arguments import checked
from layerleap.errors import LayerleapError, ModelRefused
from layerleap.models.discovery.blocks import PATHS_HINT
from layerleap.models.discovery.compare import rounding, row_gap, sum_error
from layerleap.models.discovery.probe import N_TOKENS, probe, probe_ids
from layerleap.models.discovery.sites import Anatomy, Site
from layerleap.models.hooks.capture import Capture
from layerleap.models.transformer import Laws, Transformer
from layerleap.results.base import Result
from layerleap.results.columns import Column, Table

Status = Literal["holds", "fails", "not applicable", "loosened"]
STATUS_COLOURS = {"holds": "good", "fails": "bad", "loosened": "partly", "not applicable": "open"}
STATUS: dict[bool | None, Status] = {True: "holds", False: "fails", None: "not applicable"}


@dataclass(frozen=True)
class LawResult:
    """The result of checking one law."""

    law: str
    status: Status
    detail: str

    def to_dict(self) -> dict[str, str]:
        """Plain JSON types."""
        return asdict(self)


class LawResults(Result, list[LawResult]):
    """The result of every law."""

    KIND: ClassVar[str] = "about"
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "laws",
            "",
            lambda results: [result.to_dict() for result in results],
            (
                Column("law"),
                Column("status", "result", colours=STATUS_COLOURS),
                Column("detail", "measured"),
            ),
        ),
    )

    def short(self) -> str:
        """What it is, in one line."""
        return f"LawResults({', '.join(self._counts())})"

    def _counts(self) -> list[str]:
        numbers: Counter[str] = Counter(result.status for result in self)
        words = {"holds": "hold", "fails": "fail"}
        shown = [status for status in STATUS_COLOURS if numbers[status] or status != "loosened"]
        return [f"{numbers[status]} {words.get(status, status)}" for status in shown]

    def headline(self) -> str:
        """How many laws hold, fail and do not apply."""
        return ", ".join(self._counts())


@dataclass(frozen=True, eq=False)
class _Case:
    """A model, inputs different from those of discovery, and the model's own answer."""

    transformer: Transformer
    inputs: dict[str, Any]
    logits: Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, transformer: Transformer, n_tokens: int = N_TOKENS) -> "_Case":
        inputs = probe(transformer.model, rows=3, seed=11, n_tokens=n_tokens)
        return cls(transformer, inputs, transformer.model(**inputs).logits)

    @cached_property
    def captured(self) -> Capture:
        """All states, and what each part adds to them, of the same inputs: from one pass."""
        sites = [
            (block, name)
            for block, anatomy in enumerate(self.transformer.anatomy, 1)
            if isinstance(anatomy, Anatomy)
            for name in _added(anatomy)
        ]
        return self.transformer.capture(self.inputs, sites=sites)

    @cached_property
    def read(self) -> tuple[Tensor, Tensor]:
        """The rows that the tail reads of the last layer, and the logits that it gives them."""
        return _read(self.transformer, self.captured.states[self.transformer.n_layers])


@torch.inference_mode()
def _read(transformer: Transformer, h: Tensor) -> tuple[Tensor, Tensor]:
    rows = transformer.rows(h, transformer.pooled(torch.ones(h.shape[:2])))
    return rows, transformer.logits(rows)


def verdicts(transformer: Transformer) -> list[LawResult]:
    """The result of every law, in the order of the module docstring."""
    hooks_before = _count_hooks(transformer.model)
    case = _Case.of(transformer)
    verdicts = {law: rule(case) for law, rule in READING.items()}
    verdicts |= _repeated(case, _count_hooks(transformer.model) - hooks_before)
    loosened = dict(transformer.identity.loosened)
    results = []
    for law in LAWS:
        holds, detail = verdicts[law]
        is_loose = holds is False and law in loosened
        results.append(LawResult(law, "loosened" if is_loose else STATUS[holds], detail))
    return results


def require(transformer: Transformer, laws: Laws = "strict") -> None:
    """Raise `ModelRefused` if any law fails; those that may be loosened are noted if asked for."""
    failed = [result for result in verdicts(transformer) if result.status == "fails"]
    names = {result.law for result in failed}
    if failed and laws == "loose" and names <= LOOSENED:
        loosened = tuple((result.law, result.detail) for result in failed)
        transformer.identity = replace(transformer.identity, loosened=loosened)
    elif failed:
        name = type(transformer.model).__name__
        reasons = "; ".join(f"law '{result.law}' failed: {result.detail}" for result in failed)
        hint = f"; {PATHS_HINT}" if names & FIXED_BY_PATHS else ""
        raise ModelRefused(
            f"{name} is refused: {reasons}{LOOSE_HINT if names <= LOOSENED else hint}"
        )


@checked
def check(model: nn.Module | Transformer, *, laws: Laws = "strict", **paths: Any) -> LawResults:
    """The result of every law; a model that cannot be wrapped gives one failed result.

    Args:
        model: a model of transformers, or one that is already wrapped.
        laws: "loose" reports a law that `load(laws="loose")` does not enforce as "loosened".
        paths: `blocks` and `tail` for `Transformer.wrap`.
    """
    if isinstance(model, Transformer):
        return LawResults(verdicts(model))
    try:
        results = verdicts(Transformer.wrap(model, check=False, **paths))
        return LawResults(
            replace(result, status="loosened")
            if laws == "loose" and result.status == "fails" and result.law in LOOSENED
            else result
            for result in results
        )
    except LayerleapError as error:
        return LawResults([LawResult("discovery", "fails", str(error))])


LOOSENED = {"padding", "rows"}  # laws about a row's neighbours, which `laws="loose"` notes down
LOOSE_HINT = (
    ": what a row gives depends on the other rows of its batch, as where activations are quantised "
    "by the range of a whole batch; load(model, laws='loose') reads it all the same, and writes "
    "this on every result"
)
FIXED_BY_PATHS = {"blocks", "tail", "parts"}  # laws that can fail because of wrong paths
Verdict = tuple[bool | None, str]  # None: the law does not apply


def _blocks(case: _Case) -> Verdict:
    transformer = case.transformer
    config = transformer.model.config
    if config.is_encoder_decoder:
        names: tuple[str, ...] = ("decoder_layers", "num_decoder_layers")
    else:
        config = config.get_text_config()
        names = ("num_hidden_layers", "n_layer")
        if transformer.kind == "next-token" and hasattr(config, "decoder_layers"):
            names = ("decoder_layers",)  # the decoder of an encoder-decoder, on its own
    expected = next((getattr(config, name) for name in names if hasattr(config, name)), None)
    path = transformer.blocks[0].rpartition(".")[0]
    holds = None if expected is None else expected == transformer.n_layers
    return holds, f"{transformer.n_layers} at {path}, config says {expected}"


def _repeated(case: _Case, n_left: int) -> dict[str, Verdict]:
    """Laws 'deterministic' and 'clean', once everything was read; `n_left` hooks were left."""
    after = _Case.of(case.transformer).logits  # runs a speech encoder again
    is_same = torch.equal(after, case.logits)
    # Only if the logits moved, another pass tells a random model from one that reading changed.
    again = after if is_same else _Case.of(case.transformer).logits
    repeats = torch.equal(again, after)
    if case.transformer.model.training:
        deterministic = False, "the model is in training mode; call model.eval()"
    elif repeats:
        deterministic = True, "two passes are bit-identical"
    else:
        gap = row_gap(again, after, centre=True)
        deterministic = False, f"two passes differ by {gap:.2g} of the logits"
    change = "bit-identical" if is_same else "changed"
    is_clean = (is_same or not deterministic[0]) and n_left == 0
    clean = is_clean, f"logits {change} after reading, {n_left} hooks left"
    return {"deterministic": deterministic, "clean": clean}


def _finite(case: _Case) -> Verdict:
    states = case.captured.states
    bad = [layer for layer, h in states.items() if not torch.isfinite(h).all()]
    if bad:
        return False, f"NaN or infinite states at layers {bad}"
    if not torch.isfinite(case.logits).all():
        return False, "NaN or infinite logits"
    return True, f"the states of {len(states)} layers and the logits are finite"


def _tail(case: _Case) -> Verdict:
    """At two lengths: a head may read a position that only happens to fit one of them."""
    transformer, last = case.transformer, case.transformer.n_layers
    pairs = [(case.read[1], case.logits)]
    if transformer.kind != "image-class":
        inputs = probe(transformer.model, rows=1, seed=11, n_tokens=N_TOKENS + 4)
        longer = transformer.capture(inputs, layers=[last], logits=True)
        assert longer.logits is not None
        pairs.append((_read(transformer, longer.states[last])[1], longer.logits))
    error = max(
        row_gap(ours, theirs.reshape(-1, ours.shape[-1]), centre=True) for ours, theirs in pairs
    )
    path = " -> ".join(str(step) for step in transformer.tail)
    return error <= rounding(case.logits), f"{path} (off by {error:.1e})"


def tail_error(transformer: Transformer) -> str | None:
    """How law 'tail' fails now; None if it holds."""
    holds, detail = _tail(_Case.of(transformer))
    return None if holds else detail


def _parts(case: _Case) -> Verdict:
    transformer, blocks = case.transformer, range(1, case.transformer.n_layers + 1)
    unknown = [a for a in transformer.anatomy if isinstance(a, str)]
    if unknown:
        return None, f"no sites in {len(unknown)} blocks: {unknown[0]}; layers can still be read"
    captured = case.captured
    worst = max(parts_error(transformer, b, captured.states, captured.sites) for b in blocks)
    anatomy = transformer.anatomy[0]
    assert isinstance(anatomy, Anatomy)
    scale = "" if anatomy.scale == 1 else f", scaled by {anatomy.scale:.4g}"
    summary = f"{anatomy.style}: {' + '.join(anatomy.parts)}{scale}"
    return worst <= 1, f"{summary} (off by {worst:.2f} of what rounding allows)"


def parts_error(
    transformer: Transformer,
    block: int,
    states: Mapping[int, Tensor],
    sites: Mapping[tuple[int, str | Site], Tensor],
) -> float:
    """The distance of h[block] from h[block - 1] plus the parts, relative to rounding error."""
    anatomy = transformer.anatomy[block - 1]
    assert isinstance(anatomy, Anatomy)
    values = [sites[block, name] for name in _added(anatomy)]
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


def _added(anatomy: Anatomy) -> list[str]:
    """The names of the sites whose values are added to the stream, part after part."""
    names = {site: name for name, site in anatomy.sites.items()}
    return [names[site] for site in anatomy.adds]


def _padding(case: _Case) -> Verdict:
    transformer = case.transformer
    if "attention_mask" not in case.inputs:
        return None, "inputs have a fixed size"
    n = N_TOKENS - 3
    ids = probe_ids(transformer.model, 2, N_TOKENS, seed=5)
    mask = torch.ones_like(ids)
    mask[0, n:] = 0
    # The short text padded on the right, the long one, and the short one padded on the left.
    ids = torch.cat([ids, ids[:1].roll(-n, 1)])
    mask = torch.cat([mask, mask[:1].roll(-n, 1)])
    alone = transformer.capture(ids[:1, :n])
    both = transformer.capture({"input_ids": ids, "attention_mask": mask})
    worst = max(
        row_gap(h, single[0])
        for layer, single in alone.states.items()
        for h in (both.states[layer][0, :n], both.states[layer][2, -n:])
    )
    # Some families (MPT) compute their position bias in float32, whatever the model's dtype.
    allowed = max(rounding(alone.states[0]), 1e-6)
    return worst <= allowed, f"padding changes states by {worst:.1e}"


def _rows(case: _Case) -> Verdict:
    rows, logits = case.read
    with torch.inference_mode():
        alone = case.transformer.logits(rows[-1:])
    gap = row_gap(alone, logits[-1:], centre=True)
    return gap <= rounding(case.logits), f"other rows change a row's logits by {gap:.1e}"


def _count_hooks(model: PreTrainedModel) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + ("forward" in vars(module))
        for module in model.modules()
    )


READING: dict[str, Callable[[_Case], Verdict]] = {
    "blocks": _blocks,
    "finite": _finite,
    "tail": _tail,
    "parts": _parts,
    "padding": _padding,
    "rows": _rows,
}
LAWS = ("blocks", "deterministic", "finite", "tail", "parts", "padding", "rows", "clean")
