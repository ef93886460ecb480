"""Which heads need many keys, and what do they look at?

In: the held-out rows. Out: mass of the top k keys by layer and head, what heads look at, and the
section of the study that shows it.

Weights come from the model's own attention functions: masks, windows, soft-caps, sinks and position
biases included. The attention matrix of a block lives only while that block runs on one batch.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from layerleap import StudyResult, Transformer, study
from layerleap.act.edits import ReplaceAttention
from layerleap.lens import ANY, SHARE
from layerleap.models import AttentionFunction, attention_wrapped_by
from layerleap.stream import Batch
from layerleap.study import percent
from layerleap_papers.topk_attention.attention import SHORT, eighth
from layerleap_papers.topk_attention.comparisons import Rows, kept_share, last_states, shares
from layerleap_papers.topk_attention.sparsity_context import SparsityContext

MOST = 0.5  # a head is named after a place if the interval of its share is above this
SPREAD = 0.25  # and "spread" if it attends to more than this part of the keys it sees
NAMES = {
    "first": "first token",
    "previous": "previous token",
    "self": "own token",
    "near": "nearby",
    "spread": "spread out",
    "distant": "distant tokens",
    "mixed": "mixed",
}
LINES = {
    "first": study.Line("first token", "blue"),
    "previous": study.Line("previous token", "green"),
    "near": study.Line("nearby", "amber", marker="s"),
    "self": study.Line("own token", "grey"),
}
# Shares of a row's attention, beside those of its top k keys.
PLACES = ("first", "self", "previous", "near", "effective")
MASS = 0.9  # of the attention of a row that "needed" keys carry
SHOWN = 12  # heads in the table of those that need most keys
ENOUGH = 0.9  # of the mass


def observe(
    rows: Rows, keys: Sequence[int], window: int, on_step: Callable[[int], None]
) -> dict[str, Tensor]:
    """Statistics of the attention of all rows: (row, block, head) by name.

    Names are "top 8" and so on, "needed", and those of `PLACES`.
    """
    modules = ReplaceAttention(lambda *_: (None, None)).changes(rows.model)
    batches = []
    for number, batch in enumerate(rows.batches):
        on_step(number)
        waiting: dict[nn.Module, list[int]] = {}
        for change in modules:  # several blocks of a module that layers share, as in ALBERT
            waiting.setdefault(change.module, []).append(change.block)
        batches.append(_observe(rows.model, batch, waiting, keys, window))
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _observe(
    model: Transformer,
    batch: Batch,
    waiting: dict[nn.Module, list[int]],
    keys: Sequence[int],
    window: int,
) -> dict[str, Tensor]:
    """The same for one batch; `waiting` are the blocks that each module runs as, in order."""
    pools = model.row_kind != "position"  # one row per text: the mean over its positions
    blocks: dict[int, list[dict[str, Tensor]]] = {}

    def watch(
        function: AttentionFunction, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        if waiting.get(module):  # attention of other modules is left alone
            texts = blocks[waiting[module].pop(0)] = []
            weights = attention_weights(function, module, *args, **kwargs)
            for of_text, keep in zip(weights, batch.keep.to(weights.device), strict=True):
                if keep.any():
                    kept = keep.nonzero()[:, 0]
                    values = statistics(of_text[:, kept], kept, keys, window)
                    texts.append({k: v.mean(0, True) if pools else v for k, v in values.items()})
        return function(module, *args, **kwargs)

    with attention_wrapped_by(watch):
        last_states(model, batch)
    by_block = [blocks[block] for block in sorted(blocks)]
    return {
        name: torch.stack([torch.cat([text[name] for text in texts]) for texts in by_block], 1)
        for name in by_block[0][0]
    }


@torch.no_grad()
def attention_weights(
    function: AttentionFunction,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    """(text, head, query, key): what attention gives if the values are the identity matrix."""
    n = key.shape[2]
    identity = torch.eye(n, dtype=value.dtype, device=value.device).expand(*value.shape[:2], n, n)
    weights = function(module, query, key, identity, attention_mask, **kwargs)[0]
    return torch.as_tensor(weights).transpose(1, 2).float()


def statistics(
    weights: Tensor, rows: Tensor, keys: Sequence[int], window: int
) -> dict[str, Tensor]:
    """Mass of the top keys and of some places, from (head, row, key): (row, head) by name.

    top k      the share of the k keys with the most attention
    needed     how many keys carry 90 % of it
    first      the first position of the text
    self       the row's own position
    previous   the position before it
    near       positions up to `window` before or after it, itself and the first one left out
    effective  exp(entropy): as many keys as attention is spread over
    """
    ordered = weights.sort(dim=-1, descending=True).values.cumsum(-1)
    total = ordered[..., -1:].clamp_min(1e-30)  # below 1 where a sink takes part
    n_keys = weights.shape[-1]
    values = {f"top {k}": ordered[..., min(k, n_keys) - 1] / total[..., 0] for k in keys}
    values["needed"] = (ordered < MASS * total).sum(-1).float() + 1
    places, rows = torch.arange(n_keys, device=weights.device), rows.to(weights.device)
    # Padding is on the right, so the first position is that of the text.
    offsets = (places - rows[:, None]).abs()
    is_first = places == 0
    masks = {
        "first": is_first,
        "self": (offsets == 0) & ~is_first,
        "previous": (places == rows[:, None] - 1) & ~is_first,
        "near": (offsets > 0) & (offsets <= window) & ~is_first,
    }
    for name, mask in masks.items():
        values[name] = (weights * mask).sum(-1) / total[..., 0]
    values["effective"] = torch.special.entr(weights / total).sum(-1).exp()
    return {name: value.T.cpu() for name, value in values.items()}


def _run(context: SparsityContext) -> study.Tables:
    rows, s = context.rows, context.settings
    most, total = int(rows.visible.max()), len(rows.batches)
    keys = [k for k in s.keys if k < most] or [s.keys[0]]
    observed = observe(
        rows, keys, s.window, lambda n: context.progress("attention of heads", n, total, "batches")
    )
    needed = observed["needed"]
    n_layers, n_heads = needed.shape[1:]
    spread = observed["effective"] / rows.visible[:, None, None].clamp_min(1)
    estimates = {
        name: rows.estimates(values.flatten(1), ANY if name in ("needed", "effective") else SHARE)
        for name, values in {**observed, "spread": spread}.items()
    }
    heads = []
    for place in range(n_layers * n_heads):
        head = {name: estimated[place] for name, estimated in estimates.items()}
        row: study.Row = {"layer": place // n_heads + 1, "head": place % n_heads}
        row["does"] = _does(head)
        for name, estimate in head.items():
            key = name.replace(" ", "_")
            row |= {key: estimate["value"]}
            row |= {f"{key}_{end}": estimate[end] for end in ("low", "high")}
        sizes = head["needed"]
        heads.append({**row, "rows": sizes["rows"], "documents": sizes["documents"]})

    def by_layer(name: str) -> Iterator[study.Row]:
        """The mean of a statistic over the heads of each layer, and over all heads."""
        means = observed[name].mean(2)  # (row, block)
        columns = torch.cat([means, means.mean(1, keepdim=True)], dim=1)
        layers = [*range(1, n_layers + 1), None]
        for layer, row in zip(layers, rows.estimates(columns), strict=True):
            yield {"layer": layer, **row}

    masses = {k: {"k": k, "keys_kept": kept_share(rows.visible, k)} for k in keys}
    return {
        "heads": heads,
        "layers_mass": [{**masses[k], **row} for k in keys for row in by_layer(f"top {k}")],
        "layers_places": [{"name": name, **row} for name in PLACES for row in by_layer(name)],
        "heads_sizes": [{"most_keys": most, "heads": n_heads}],
    }


def _does(head: dict[str, study.Row]) -> str:
    """What a head mostly looks at, decided by intervals."""
    for place in ("first", "previous", "self", "near"):
        if study.above(head[place], MOST) == "yes":
            return place
    if study.above(head["spread"], SPREAD) == "yes":
        return "spread"
    ends = [head[place]["high"] for place in ("first", "self", "near")]
    is_far = None not in ends and sum(ends) < MOST
    return "distant" if is_far and study.below(head["spread"], SPREAD) == "yes" else "mixed"


@study.claim(
    "Attention is sparse: in nearly every head, an eighth of the keys carry nearly all of "
    "the attention."
)
def _most_mass(result: StudyResult) -> study.Verdict:
    rows = eighth(result, "layers_mass", layer=None)
    if not rows:
        return study.untested(SHORT)
    k = rows[0]["k"]
    ends = [{end: row[f"top_{k}_{end}"] for end in ("low", "high")} for row in result.rows("heads")]
    answers = [study.above(end, ENOUGH) for end in ends]
    return study.Verdict(
        study.share_of(answers, 0.9),
        f"{answers.count('yes')} of {len(answers)} heads have clearly more than "
        f"{percent(ENOUGH)} of their attention on their top {k} keys, {answers.count('no')} "
        f"clearly less; the mean over heads is {shares(rows[0])}",
        "yes if at least 90 % of heads clearly do",
    )


def neediest(result: StudyResult) -> list[study.Row]:
    """Heads by how many keys carry most of their attention, most first."""
    return sorted(result.rows("heads"), key=lambda row: -row["needed"])


def _counted(heads: Iterable[study.Row]) -> str:
    """What heads mostly look at, with how many do."""
    counts = Counter(row["does"] for row in heads)
    return ", ".join(f"{words} {counts[name]}" for name, words in NAMES.items() if counts[name])


def _findings(result: StudyResult) -> Iterator[study.Said]:
    heads = neediest(result)
    needed = torch.tensor([row["needed"] for row in heads])
    first = {
        "value": heads[0]["needed"],
        "low": heads[0]["needed_low"],
        "high": heads[0]["needed_high"],
    }
    yield study.Headline(
        f"The median head puts {percent(MASS)} of its attention on {needed.median():.0f} keys; a "
        f"tenth of the heads need {needed.quantile(0.9):.0f} or more, the neediest "
        f"(layer {heads[0]['layer']}, head {heads[0]['head']}) needs "
        f"{study.in_words(first, '.0f')}."
    )
    yield study.Finding(
        f"What heads mostly look at, by number of heads: {_counted(heads)}.", under="kinds"
    )
    top = heads[: max(1, len(heads) // 10)]
    layers = sorted({row["layer"] for row in top})
    yield study.Finding(
        f"Of the tenth of heads that need most keys: {_counted(top)}; in "
        f"layer{'s'[: len(layers) - 1]} {', '.join(map(str, layers))}.",
        under="kinds",
        headline=True,
    )


def _drawn_keys(result: StudyResult) -> list[int]:
    keys = sorted({row["k"] for row in result.rows("layers_mass")})
    return keys[:: max(1, len(keys) // 4)]


def _ends(key: str, title: str, form: str, scale: float = 1.0) -> study.Column:
    return study.Column(key, title, form, scale, low=f"{key}_low", high=f"{key}_high")


SECTION = study.Section(
    "heads",
    "Which heads need many keys, and what do they look at?",
    _run,
    "Attention of every head at the same rows, as the model computes it. A head is named after "
    "the first token, the previous token, its own token or nearby tokens if more than half of its "
    "attention goes there, spread out if its attention is as wide as a quarter of the keys it "
    "sees, distant tokens if it is neither and less than half goes to all of these places, and "
    "mixed if intervals leave it open.",
    help="attention mass in the top k by layer and head",
    findings=_findings,
    shows=(
        _most_mass,
        study.Figure(
            "mass",
            "Attention on the top k keys, by layer",
            "The mean over heads of the share of attention that goes to the k keys with most of "
            "it.",
            study.points("layers_mass", line="top {k}", k=_drawn_keys),
            y=study.Axis("share of attention", "share"),
            unit="rows",
            size=(5.2, 3.5),
            narrow=True,
        ),
        study.Figure(
            "kinds",
            "Where attention goes, by layer",
            "The mean over heads; near is up to a few positions away, without the token itself "
            "and the first one.",
            study.points("layers_places", line="{name}", name=set(LINES)),
            y=study.Axis("share of attention", "share"),
            unit="rows",
            size=(5.2, 3.5),
            narrow=True,
            lines=LINES,
        ),
        study.Figure(
            "needed",
            "Keys that carry 90 % of attention, by layer and head",
            "Means over rows. Light heads need many keys.",
            study.points("heads", y="head", value="needed"),
            kind="heatmap",
            y=study.Axis("head"),
            value=study.Axis("keys"),
            size=(9.0, 3.4),
            unit="rows",
            sample="means over rows",
        ),
        study.Table(
            "heads-table",
            "The heads that need most keys",
            lambda result: neediest(result)[:SHOWN],
            (
                study.Column("layer"),
                study.Column("head"),
                _ends("needed", "keys for 90 %", "{:.0f}"),
                _ends("effective", "effective keys", "{:.0f}"),
                _ends("first", "first token", "{:.0f} %", 100),
                _ends("previous", "previous", "{:.0f} %", 100),
                _ends("near", "nearby", "{:.0f} %", 100),
                study.Column("does", "mostly", words=NAMES),
            ),
            terminal=True,
        ),
        study.Table(
            "mass-table",
            "Share of attention on the top k keys, mean over heads",
            study.pick("layers_mass", layer=study.KNOWN),
            (study.Column("layer"),),
            across="k",
            cells=(study.estimate("value", "", "{:.2f}"),),
            dense=True,
        ),
    ),
)
