"""Which heads need many keys, and what do they look at?

In: attention of the held-out rows. Out: mass of the top k keys by layer and head, what heads look
at, and the section of the study that shows it.
"""

from collections.abc import Iterator

import torch

from layerleap import StudyResult, study
from layerleap.lens import ANY, SHARE
from layerleap.study import percent
from layerleap_papers.topk_attention.attention import SHORT, eighth
from layerleap_papers.topk_attention.curves import kept_share, shares
from layerleap_papers.topk_attention.observed import MASS, PLACES, Observed, observe
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
DRAWN = {"first", "previous", "near", "self"}
SHOWN = 12  # heads in the table of those that need most keys
ENOUGH = 0.9  # of the mass


def _run(context: SparsityContext) -> study.Tables:
    rows, s = context.rows, context.settings
    keys = [k for k in s.keys if k < int(rows.visible.max())] or [s.keys[0]]
    total = len(rows.batches)
    observed = observe(
        rows, keys, s.window, lambda n: context.progress("attention of heads", n, total, "batches")
    )
    return {
        "heads": _head_rows(context, observed, keys),
        "layers_mass": [
            {"k": k, "keys_kept": kept_share(rows.visible, k), **row}
            for k in keys
            for row in _layer_rows(context, observed, f"top {k}")
        ],
        "layers_places": [
            {"name": name, **row} for name in PLACES for row in _layer_rows(context, observed, name)
        ],
        "heads_sizes": [{"most_keys": int(rows.visible.max()), "heads": observed.n_heads}],
    }


def _head_rows(context: SparsityContext, observed: Observed, keys: list[int]) -> list[study.Row]:
    """One row per block and head: estimates of every statistic, and what the head does."""
    rows = context.rows
    spread = observed.values["effective"] / rows.visible[:, None, None].clamp_min(1)
    names = [f"top {k}" for k in keys] + ["needed", *PLACES, "spread"]
    columns = [*(observed.column(name) for name in names[:-1]), spread.flatten(1)]
    estimates = dict(
        zip(
            names,
            (
                rows.estimates(column, [ANY if name == "needed" else SHARE])
                for name, column in zip(names, columns, strict=True)
            ),
            strict=True,
        )
    )
    found = []
    for place in range(len(observed.blocks) * observed.n_heads):
        own = {name: estimates[name][place] for name in names}
        block, head = divmod(place, observed.n_heads)
        row: study.Row = {"layer": observed.blocks[block], "head": head, "does": _does(own)}
        for name, estimated in own.items():
            key = name.replace(" ", "_")
            row |= {
                key: estimated["value"],
                f"{key}_low": estimated["low"],
                f"{key}_high": estimated["high"],
            }
        found.append(
            {**row, "rows": own["needed"]["rows"], "documents": own["needed"]["documents"]}
        )
    return found


def _does(own: dict[str, study.Row]) -> str:
    """What a head mostly looks at, decided by intervals."""
    for place in ("first", "previous", "self", "near"):
        if study.above(own[place], MOST) == "yes":
            return place
    if study.above(own["spread"], SPREAD) == "yes":
        return "spread"
    ends = [own[place]["high"] for place in ("first", "self", "near")]
    is_far = None not in ends and sum(ends) < MOST
    return "distant" if is_far and study.below(own["spread"], SPREAD) == "yes" else "mixed"


def _layer_rows(context: SparsityContext, observed: Observed, name: str) -> Iterator[study.Row]:
    """The mean of a statistic over the heads of each layer, and over all heads."""
    means = observed.values[name].mean(2)  # (row, block)
    columns = torch.cat([means, means.mean(1, keepdim=True)], dim=1)
    found = context.rows.estimates(columns)
    for layer, row in zip([*observed.blocks, None], found, strict=True):
        yield {"layer": layer, **row}


# --- claims and findings -----------------------------------------------------------------------


@study.claim(
    "Attention is sparse: in nearly every head, an eighth of the keys carry nearly all of "
    "the attention."
)
def _most_mass(result: StudyResult) -> study.Verdict:
    own = eighth(result, "layers_mass")
    if own is None:
        return study.untested(SHORT)
    k = own["k"]
    heads = result.rows("heads")
    answers = [
        study.above({"low": row[f"top_{k}_low"], "high": row[f"top_{k}_high"]}, ENOUGH)
        for row in heads
    ]
    mean = result.row("layers_mass", k=k, layer=None)
    return study.Verdict(
        study.share_of(answers, 0.9),
        f"{answers.count('yes')} of {len(answers)} heads have clearly more than "
        f"{percent(ENOUGH)} of their attention on their top {k} keys, {answers.count('no')} "
        f"clearly less; the mean over heads is {shares(mean)}",
        "yes if at least 90 % of heads clearly do",
    )


CLAIMS = (_most_mass,)


def neediest(result: StudyResult) -> list[study.Row]:
    """Heads by how many keys carry most of their attention, most first."""
    return sorted(result.rows("heads"), key=lambda row: -row["needed"])


def _findings(result: StudyResult) -> Iterator[study.Said]:
    heads = neediest(result)
    if not heads:
        return
    needed = torch.tensor([row["needed"] for row in heads])
    yield study.Headline(
        f"The median head puts {percent(MASS)} of its attention on {needed.median():.0f} keys; a "
        f"tenth of the heads need {needed.quantile(0.9):.0f} or more, the neediest "
        f"({_name(heads[0])}) needs {_needed(heads[0])}."
    )
    kinds = {name: [row for row in heads if row["does"] == name] for name in NAMES}
    listed = ", ".join(f"{NAMES[name]} {len(own)}" for name, own in kinds.items() if own)
    yield study.Finding(f"What heads mostly look at, by number of heads: {listed}.", under="kinds")
    top = heads[: max(1, len(heads) // 10)]
    kinds = {name: sum(row["does"] == name for row in top) for name in NAMES}
    listed = ", ".join(f"{NAMES[name]} {n}" for name, n in kinds.items() if n)
    layers = sorted({row["layer"] for row in top})
    numbers = ", ".join(map(str, layers))
    yield study.Finding(
        f"Of the tenth of heads that need most keys: {listed}; in layer{'s'[: len(layers) - 1]} "
        f"{numbers}.",
        under="kinds",
        headline=True,
    )


def _needed(row: study.Row) -> str:
    return study.in_words(
        {end: row[f"needed_{end}"] for end in ("low", "high")} | {"value": row["needed"]}, ".0f"
    )


def _name(row: study.Row) -> str:
    return f"layer {row['layer']}, head {row['head']}"


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
        *CLAIMS,
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
            study.points("layers_places", line="{name}", name=DRAWN),
            y=study.Axis("share of attention", "share"),
            unit="rows",
            size=(5.2, 3.5),
            narrow=True,
            lines={
                "first": study.Line("first token", "blue"),
                "previous": study.Line("previous token", "green"),
                "near": study.Line("nearby", "amber", marker="s"),
                "self": study.Line("own token", "grey"),
            },
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
