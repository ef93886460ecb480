"""The optional sections of a made-up study: believable values, fixed seed, no model needed."""

import math
import random
from typing import Any

Row = dict[str, Any]

METRICS = ("precision@1", "precision@5", "precision@10", "surprisal", "kl")
MAPS = {"id": 0.9, "mat": 0.62, "tuned": 0.55}  # how deep a map has to be to be trusted
TARGETS = (0.9, 0.95, 0.98, 0.99)
RULES = {
    "gap": 1.0,
    "top probability": 1.03,
    "entropy": 1.06,
    "similarity": 1.3,
    "patience": 1.15,
    "learned": 0.92,
}


def optional_tables(
    n_layers: int, text: str, other: str, tables: dict[str, list[Row]]
) -> dict[str, dict[str, list[Row]]]:
    """The tables of every optional section of a study of `n_layers` layers."""
    rng = random.Random(11)
    parts, schedules = _parts(n_layers), _schedules(n_layers, rng)
    return {
        "parts": {
            "parts": parts,
            "part_leads": _part_leads(n_layers),
            "part_steps": _part_steps(parts, n_layers),
        },
        "alternation": {
            "schedules": schedules,
            "schedule_leads": _schedule_leads(schedules),
            "schedule_means": [
                _lead(0.03, kind="best R2", blocks="few", schedules=4),
                _lead(-0.03, kind="best R2", blocks="many", schedules=4),
            ],
        },
        "tuned": {**_tuned(n_layers), "tuned_scores": _tuned_scores(tables["scores"], text)},
        "exits": _exits(n_layers, rng) | {"calibrated": _calibrated(n_layers, text, other)},
        "sizes": {"sizes": _sizes()},
    }


def _tuned_scores(scores: list[Row], text: str) -> list[Row]:
    """The scores of the tuned lens: somewhat better than mat's on the same text."""
    rows = []
    for row in scores:
        if (row["fit"], row["read"]) == (text, text):
            factor = 1.0 if row["value"] == 1 or row["metric"] == "surprisal" else 0.85
            if row["metric"].startswith("precision"):
                value = 1 - factor * (1 - row["value"])
            else:
                value = factor * row["value"]
            moved = {"fit": "tuned", "map": "tuned", "value": value, "rows": 2500}
            shift = value - row["value"]
            ends = {k: None if row[k] is None else row[k] + shift for k in ("low", "high")}
            rows.append(row | moved | ends)
    return rows


def _row(value: float, wide: float = 0.02, **rest: Any) -> Row:
    ends = {"value": value, "low": max(0.0, value - wide), "high": value + wide}
    return rest | ends | {"rows": 3000, "documents": 26}


def _lead(value: float, wide: float = 0.02, **rest: Any) -> Row:
    ends = {"value": value, "low": value - wide, "high": value + wide}
    return rest | ends | {"rows": 3000, "documents": 26}


def _value(metric: str, share: float) -> float:
    if metric.startswith("precision"):
        return 1 - (1 - share) ** (1 + 0.55 * math.log(int(metric.split("@")[1])))
    if metric == "surprisal":
        return 1.35 + 7.5 * (1 - share) ** 1.6
    return 5.6 * (1 - share) ** 1.8


def _parts(n_layers: int) -> list[Row]:
    rows = []
    for name, loss in (("attn", 0.45), ("ffn", 0.66), ("norms", 0.78)):
        for bias in (False, True):
            for layer in range(n_layers + 1):
                depth = layer / n_layers
                share = 1 - loss * (1 - depth) ** 1.3 * (0.9 if bias else 1.0)
                for metric in METRICS:
                    named = {"map": name, "bias": bias, "layer": layer, "metric": metric}
                    wide = 0.02 if metric.startswith("precision") else 0.15
                    rows.append(_row(_value(metric, share), wide * (1 - depth), **named))
    return rows


def _part_leads(n_layers: int) -> list[Row]:
    start = min(-(-n_layers // 3), n_layers - 1)
    leads = [("attn", "ffn", 0, 0.1), ("attn", "norms", 0, 0.15), ("attn", "jump", start, 0.2)]
    leads += [("ffn", "jump", start, 0.05), ("norms", "jump", start, -0.1)]
    return [_lead(v, part=part, against=other, start=s) for part, other, s, v in leads]


def _part_steps(parts: list[Row], n_layers: int) -> list[Row]:
    rows = []
    for kind in ("attn", "ffn", "norms"):
        own = {
            row["layer"]: row["value"]
            for row in parts
            if (row["map"], row["metric"], row["bias"]) == (kind, "precision@1", False)
        }
        for layer in range(n_layers - 1):
            rows.append(_lead(own[layer + 1] - own[layer], map=kind, layer=layer))
    return rows


def _schedule_leads(schedules: list[Row]) -> list[Row]:
    rows = [row for row in schedules if row["metric"] == "precision@1"]
    single = {row["blocks"]: row["value"] for row in rows if row["kind"] == "single jump"}
    keys = ("schedule", "kind", "blocks")
    return [
        _lead(row["value"] - single[row["blocks"]], **{key: row[key] for key in keys})
        for row in rows
        if row["kind"] != "single jump"
    ]


def _schedules(n_layers: int, rng: random.Random) -> list[Row]:
    found = []
    for blocks in range(n_layers + 1):
        share = 0.25 + 0.75 * (blocks / n_layers) ** 2.2
        name = f"0-{blocks}~{n_layers}" if 0 < blocks < n_layers else f"0~{n_layers}"
        name = f"0-{n_layers}" if blocks == n_layers else name
        found.append((name, "single jump", blocks, share))
    for run in (1, 2, 3, 4):
        for jump in (1, 2, 3, 4):
            blocks = max(1, n_layers * run // (run + jump))
            share = 0.2 + 0.75 * (blocks / n_layers) ** 2.2 + rng.gauss(0, 0.05)
            name = f"0-{run}~{run + jump}-{2 * run + jump}~{n_layers}"
            found.append((name, "round robin", blocks, min(max(share, 0.02), 1.0)))
    for blocks in range(0, n_layers + 1, max(1, n_layers // 8)):
        share = 0.25 + 0.75 * (blocks / n_layers) ** 1.9
        found.append((f"0~1-{blocks}~{n_layers}", "best R2", blocks, share))
    return [
        _row(
            _value(metric, share), schedule=name, name=name, kind=kind, blocks=blocks, metric=metric
        )
        for name, kind, blocks, share in found
        for metric in ("precision@1", "surprisal")
    ]


def _exits(n_layers: int, rng: random.Random) -> dict[str, list[Row]]:
    block, head, shortcut = 7.1e6, 56.6e6, 0.66e6
    full = n_layers * block + head
    curves, saved = [], []
    for name, hard in MAPS.items():
        for rule, factor in RULES.items():
            knobs = 13 if rule != "patience" else min(6, n_layers)
            for step in range(knobs):
                depth = (1 + step * (n_layers - 1) / max(knobs - 1, 1)) / n_layers
                depth = max(depth, 1 / n_layers)
                agreement = 1 - (1 - depth) ** (1.35 / (hard * factor)) * 0.8
                asked = 1 if rule in ("similarity", "learned") else depth * n_layers
                cost = depth * n_layers * (block + shortcut) + asked * head
                curves.append(
                    _curve(name, rule, step / 12, depth * n_layers, cost / full, agreement)
                )
            saved += _saved(name, rule, hard * factor, n_layers, rng)
        for layer in range(1, n_layers + 1):
            agreement = 1 - (1 - layer / n_layers) ** (0.8 / hard) * 0.9
            cost = (layer * block + head) / full
            curves.append(_curve(name, "fixed", layer, float(layer), cost, agreement))
        layers = hard * 0.7 * n_layers
        curves.append(_curve(name, "oracle", 0.0, layers, (layers * block + head) / full, 1.0))
    cost = {"block": block, "head": head, "map": shortcut, "n_layers": n_layers, "tokens": 16}
    at_95 = [row for row in saved if row["target"] == 0.95]
    return {
        "exits": curves,
        "exits_saved": saved,
        "exits_cost": [cost | {"head_in_blocks": head / block, "full": full}],
        "same_rows": [row for row in at_95 if row["rule"] in ("gap", "entropy", "learned")],
        "exits_lead": [
            _lead(0.05, map=row["map"], rule="gap", knob=row["knob"], layers=row["layers"])
            for row in curves
            if row["rule"] == "gap"
        ],
        "texts": [],
    }


def _curve(name: str, rule: str, knob: float, layers: float, flops: float, agreement: float) -> Row:
    named = {"map": name, "rule": rule, "knob": knob, "layers": layers, "flops": flops}
    wide = 0.02 * (1 - agreement) ** 0.5
    ends = {"agreement": agreement, "low": agreement - wide, "high": min(1.0, agreement + wide)}
    return named | ends | {"rows": 3000, "documents": 26}


def _saved(name: str, rule: str, hard: float, n_layers: int, rng: random.Random) -> list[Row]:
    rows = []
    for target in TARGETS:
        share = max(0.0, (1 - hard) * (1.6 * (1 - target)) ** 0.35 + rng.gauss(0, 0.01))
        layers = share * n_layers
        reached = not (rule == "similarity" and target > 0.98)
        dear = rule not in ("similarity", "learned")
        rows.append(
            {
                "map": name,
                "rule": rule,
                "target": target,
                "saved": layers if reached else None,
                "low": max(0.0, layers - 0.4) if reached else None,
                "high": layers + 0.4 if reached else None,
                "share": share if reached else None,
                "knob": 0.5 if reached else None,
                "flops": (-4.2 + share if dear else 0.7 * share) if reached else None,
                "interpolated": layers + 0.1 if reached else None,
                "rows": 3000,
                "documents": 26,
            }
        )
    return rows


def _calibrated(n_layers: int, text: str, other: str) -> list[Row]:
    rows = []
    for name, rule, method, level in (
        ("mat", "gap", "learn-then-test", 0.034),
        ("mat", "gap", "conformal risk control", 0.047),
        ("mat", "entropy", "learn-then-test", 0.031),
        ("mat", "similarity", "learn-then-test", None),
        ("id", "gap", "learn-then-test", 0.036),
        ("tuned", "learned", "conformal risk control", 0.056),
    ):
        for read, more in ((text, 0.0), (other, 0.021)):
            off = 0.0 if level is None else level + more
            rows.append(
                {
                    "map": name,
                    "rule": rule,
                    "method": method,
                    "knob": None if level is None else 0.7,
                    "calibrated_on": 1500,
                    "text": read,
                    "promised": read == text,
                    "disagreement": off,
                    "low": max(0.0, off - 0.008),
                    "high": off + 0.008 if off else 0.0,
                    "layers": n_layers * 0.82 if off else float(n_layers),
                    "saved": n_layers * 0.18 if off else 0.0,
                    "flops": 5.4 if off else 1.0,
                    "holds": off <= 0.05,
                    "rows": 1500,
                    "documents": 13,
                    "note": "" if level else "no setting could be certified",
                    "tolerance": 0.05,
                    "delta": 0.05,
                    "trained_on": 9000,
                }
            )
    return rows


def _tuned(n_layers: int) -> dict[str, list[Row]]:
    progress, summary = [], []
    for layer in range(0, n_layers, max(1, n_layers // 6)):
        depth = layer / n_layers
        closed = 3.9 * (1 - depth) ** 1.3
        for start, factor in (("mat", 0.72), ("identity", 0.83)):
            never = start == "identity" and depth > 0.75
            needed = None if never else int(2500 * (1 + 9 * (start == "identity")) * (1 + depth))
            summary.append(
                {
                    "layer": layer,
                    "start": start,
                    "rows_needed": needed,
                    "seconds_needed": None if needed is None else needed / 900,
                    "kl_closed": closed,
                    "kl_tuned": closed * (1.05 if never else factor),
                    "agreement_closed": 0.25 + 0.6 * depth**1.5,
                    "agreement_tuned": 0.29 + 0.6 * depth**1.4,
                    "rows": 900,
                    "documents": 8,
                }
            )
            for step in range(4):
                kl = closed * (factor + (1.4 - factor) * 0.5**step)
                seen = {"rows_seen": 8000 * (step + 1), "seconds": 9.0 * (step + 1), "kl": kl}
                progress.append({"layer": layer, "start": start, "agreement": 0.3} | seen)
    return {"tuned": summary, "tuned_progress": progress}


def _sizes() -> list[Row]:
    rows = []
    for model, n_layers, width, count, lift in (
        ("smollm2", 30, 576, 134515008, 0.0),
        ("smollm2-360m", 32, 960, 361821120, 0.04),
        ("gpt2", 12, 768, 124439808, -0.05),
    ):
        for name in ("mat", "id"):
            for layer in range(n_layers + 1):
                depth = layer / n_layers
                mat = 0.27 + lift + 0.2 * depth + (0.53 - lift) * depth**3.2
                own = 1 / (1 + math.exp(-15 * (depth - 0.84 + lift)))
                share = 1.0 if layer == n_layers else mat if name == "mat" else own
                named = {"model": model, "n_layers": n_layers, "d_model": width}
                named |= {"parameters": count, "read": "wikipedia", "map": name, "layer": layer}
                rows.append(_row(share, 0.015 * (depth < 1), metric="precision@1", **named))
    return rows
