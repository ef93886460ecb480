"""Synthetic studies that look like real ones: plain data, fixed seed, no model needed."""

import math
import random
from typing import Any

from full_study import optional_findings, optional_parts, tuned_scores

Row = dict[str, Any]


def make_study(
    n_layers: int = 4,
    *,
    name: str = "smollm2",
    kind: str = "next-token",
    texts: tuple[str, ...] = ("wikipedia", "news"),
    kl: bool = True,
    interval: bool = True,
    full: bool = False,
) -> Row:
    """A study of `n_layers` layers; with two texts or more it has cross-corpus rows.

    `full` adds every optional part.
    """
    rng = random.Random(7)
    r2, scores = _r2(n_layers, rng), _scores(n_layers, texts, kl, interval, rng)
    study = {
        "format": 1,
        "kind": "shortcuts",
        "version": "0.1.0",
        "made": "2026-11-15T21:00:00Z",
        "model": {
            "name": name,
            "revision": None,
            "fingerprint": "ab12" * 16,
            "kind": kind,
            "architecture": "BertForMaskedLM" if kind == "masked-token" else "LlamaForCausalLM",
            "n_layers": n_layers,
            "d_model": 576,
            "d_vocab": 49152,
            "dtype": "float32",
            "parameters": 134515008,
        },
        "settings": {
            "unit": "sentence",
            "max_tokens": 128,
            "positions": "one",
            "seed": 0,
            "intercept": False,
            "ridge": 0.0,
            "n_train": 9000,
            "n_val": 3000,
            "quick": False,
        },
        "data": _data(texts),
        "notes": ["Texts were cut at 128 tokens; longer ones lost their ends."],
        "r2": r2,
        "scores": scores,
        "fits": _fits(n_layers, rng),
        "laws": [
            {
                "law": "train error of mat is never above id's",
                "holds": True,
                "detail": f"checked on {n_layers * (n_layers + 1) // 2} pairs",
            },
            {"law": "the last layer reads as the model", "holds": True, "detail": "gap 0.0"},
        ],
        "summary": {
            "half": _half(n_layers, texts, scores),
            "equal_fits": {text: text for text in texts},
            "tail": [{"text": text, "rows": 64, "agreement": 1.0, "gap": 1e-5} for text in texts],
        },
        "findings": _findings(n_layers, texts),
    }
    if full:
        study |= optional_parts(n_layers, texts[0], texts[-1])
        study["scores"] = scores + tuned_scores(scores, texts[0])
        study["findings"] += optional_findings()
    return study


def _half(n_layers: int, texts: tuple[str, ...], scores: list[Row]) -> Row:
    """The layer from which on half of the answers are foretold, by map."""
    found = {}
    for name, fit in (("mat", texts[0]), ("id", "-")):
        wanted = (fit, texts[0], "precision@1")
        values = [r["value"] for r in scores if (r["fit"], r["read"], r["metric"]) == wanted]
        found[name] = next(n for n in range(n_layers + 1) if min(values[n:]) >= 0.5)
    return found


def _data(texts: tuple[str, ...]) -> list[Row]:
    rows = []
    for index, text in enumerate(texts):
        for role, count, documents in (("fit", 9000, 80), ("read", 3000 - 2000 * index, 26)):
            rows.append(
                {
                    "role": role,
                    "text": text,
                    "fingerprint": f"{index}{role}"[:3] * 20,
                    "documents": documents,
                    "texts": count,
                    "rows": count,
                    "tokens": count * 16,
                    "seconds": count / 50,
                }
            )
    return rows


def _r2(n_layers: int, rng: random.Random) -> list[Row]:
    rows = []
    for src in range(n_layers):
        for dst in range(src + 1, n_layers + 1):
            depth, gap = src / n_layers, (dst - src) / n_layers
            mat = 1 - 0.62 * gap**0.7 * (1.15 - 0.75 * depth) + rng.gauss(0, 0.008)
            own = 1 - 3.2 * gap**0.9 * (1.1 - 0.5 * depth) - (0.9 if dst == n_layers else 0)
            for name, r2 in (("mat", mat), ("id", own)):
                rows.append(
                    {
                        "map": name,
                        "src": src,
                        "dst": dst,
                        "r2": r2,
                        "low": r2 - 0.02,
                        "high": r2 + 0.02,
                        "weighted": min(1.0, r2 + 0.1),
                        "no_first": r2 - 0.03,
                        "rows": 3000,
                        "documents": 26,
                    }
                )
    return rows


def _share(name: str, depth: float) -> float:
    if depth >= 1:
        return 1.0
    if name == "id":
        return 0.9 / (1 + math.exp(-16 * (depth - 0.84)))
    return 0.25 + 0.2 * depth + 0.5 * depth**3.2


def _value(metric: str, share: float) -> float:
    if metric.startswith("precision"):
        k = int(metric.split("@")[1])
        return 1 - (1 - share) ** (1 + 0.55 * math.log(k))
    if metric == "surprisal":
        return 1.35 + 7.5 * (1 - share) ** 1.6
    return 5.6 * (1 - share) ** 1.8


def _scores(
    n_layers: int, texts: tuple[str, ...], kl: bool, interval: bool, rng: random.Random
) -> list[Row]:
    metrics = ["precision@1", "precision@5", "precision@10", "surprisal"] + ["kl"] * kl
    rows = []
    for read in texts:
        for name, fit in [("mat", fit) for fit in texts] + [("id", "-")]:
            for layer in range(n_layers + 1):
                share = _share(name, layer / n_layers)
                if name == "mat" and fit != read and layer < n_layers:
                    share *= 0.82
                for metric in metrics:
                    value = _value(metric, share)
                    if layer < n_layers:
                        value = abs(value + rng.gauss(0, 0.006))
                    wide = 0.022 if metric.startswith("precision") else 0.16
                    wide *= layer < n_layers or metric == "surprisal"
                    rows.append(
                        {
                            "fit": fit,
                            "read": read,
                            "map": name,
                            "layer": layer,
                            "metric": metric,
                            "value": value,
                            "low": max(0.0, value - wide) if interval else None,
                            "high": value + wide if interval else None,
                            "rows": 3000 if read == texts[0] else 1000,
                            "documents": 26 if interval else 1,
                        }
                    )
    return rows


def _fits(n_layers: int, rng: random.Random) -> list[Row]:
    return [
        {
            "src": src,
            "dst": dst,
            "rows": 9000,
            "rank": 575 if src == 0 else 576,
            "width": 576,
            "condition": 10 ** (7.5 - 2.2 * math.sin(src / n_layers * 2.6) + rng.gauss(0, 0.08)),
            "ridge": 0.0,
            "train_r2": 0.5 + 0.4 * src / n_layers,
            "train_r2_id": -3.0 + 3 * src / n_layers,
        }
        for src in range(n_layers)
        for dst in range(src + 1, n_layers + 1)
    ]


def _findings(n_layers: int, texts: tuple[str, ...]) -> list[Row]:
    pairs = n_layers * (n_layers + 1) // 2
    found = [
        ("headline", f"Halfway, at layer {n_layers // 2}, mat agrees far more often than id."),
        ("headline", "mat agrees more often than id at every layer before the last."),
        ("r2", f"R2 of mat is above that of id on {pairs} of {pairs} pairs."),
        ("precision", "Precision@1 of mat is above that of id at every layer before the last."),
        ("surprisal", "The model is less surprised by mat's top token at every layer."),
        ("fit", "The fit from layer 0 has rank 575 of 576: one direction carries no variance."),
    ]
    if len(texts) > 1:
        found.append(("transfer", f"Maps fitted on {texts[1]} lose 6 points on {texts[0]}."))
    return [{"topic": topic, "text": text} for topic, text in found]
