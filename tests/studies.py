"""Made-up shortcut studies that look like real ones: plain data, fixed seed, no model needed."""

import math
import random
from typing import Any

from full_study import optional_tables
from layerleap.study.result import StudyResult
from layerleap_papers.jump_to_conclusions import STUDY
from layerleap_papers.jump_to_conclusions.checks import laws

Row = dict[str, Any]
SECTIONS = ("readings", "parts", "alternation", "tuned", "exits", "sizes")


def make_study(
    n_layers: int = 4,
    *,
    name: str = "smollm2",
    kind: str = "next-token",
    texts: tuple[str, ...] = ("wikipedia", "news"),
    interval: bool = True,
    full: bool = False,
    sections: tuple[str, ...] = SECTIONS,
) -> StudyResult:
    """A study of `n_layers` layers; with two texts it has transfer.

    `full` adds every optional section, or those that are named.
    """
    rng = random.Random(7)
    other = texts[1] if len(texts) > 1 else None
    tables: dict[str, list[Row]] = {
        "scores": _scores(n_layers, texts, interval, rng),
        "lead": _leads(n_layers, interval),
        "r2": (r2 := _r2(n_layers, rng)),
        "r2_lead": _r2_leads(r2),
        "fits": _fits(n_layers, rng),
        "tail": [{"text": text, "rows": 64, "agreement": 1.0, "gap": 1e-5} for text in texts],
    }
    if other is not None:
        tables["transfer"] = [_transfer(*texts[:2]), _transfer(*texts[1::-1])]
    tables["laws"] = laws(tables)
    done = sections if full else ("readings",)
    if full:
        tables |= {
            key: rows
            for section, made in optional_tables(n_layers, texts[0], texts[-1], tables).items()
            if section in sections
            for key, rows in made.items()
        }
    result = StudyResult(
        study="shortcuts",
        version="0.1.0",
        made="2026-11-15T21:00:00Z",
        model={
            "name": name,
            "revision": None,
            "fingerprint": "ab12" * 16,
            "kind": kind,
            "architecture": "BertForMaskedLM" if kind == "masked-token" else "LlamaForCausalLM",
            "n_layers": n_layers,
            "d_model": 576,
            "d_vocab": 49152,
            "reads": "text",
            "dtype": "float32",
            "parameters": 134515008,
        },
        settings={"text": texts[0], "other": other, "unit": "sentence", "seed": 0, "ridge": 0.0},
        tables=tables,
        data=_data(texts),
        notes=["Texts were cut at 128 tokens; longer ones lost their ends."],
        sections=[_log(key) for key in SECTIONS if key in done],
        run={"seconds": 60.0, "whole": True, "peak_mib": 900.0, "quick": False},
    )
    return STUDY.conclude(result)


def _log(key: str) -> Row:
    title = next(section.title for section in STUDY.sections if section.key == key)
    entry = {"key": key, "title": title, "status": "done", "reason": ""}
    return {**entry, "seconds": 10.0, "resumed": False}


def _data(texts: tuple[str, ...]) -> list[Row]:
    rows = []
    for index, text in enumerate(texts):
        for role, count, documents in (("fit", 9000, 80), ("read", 3000 - 2000 * index, 26)):
            rows.append(
                {
                    "role": role,
                    "text": text,
                    "documents": documents,
                    "texts": count,
                    "tokens": count * 16,
                    "rows": count,
                    "fingerprint": f"{index}{role}"[:3] * 20,
                    "seconds": count / 50,
                }
            )
    return rows


def _transfer(read: str, away: str) -> Row:
    ends = {"value": -0.06, "low": -0.07, "high": -0.05, "rows": 3000, "documents": 26}
    fits = {"fit": away, "own_fit": read, "fit_rows": 9000, "own_rows": 9000}
    return {"read": read, "fitted_on": away, **fits, **ends}


def _leads(n_layers: int, interval: bool) -> list[Row]:
    rows = []
    for metric in ("precision@1", "precision@5", "precision@10", "surprisal"):
        for layer in range(n_layers):
            mat, own = (_value(metric, _share(name, layer / n_layers)) for name in ("mat", "id"))
            value = mat - own
            ends = {"low": value - 0.02, "high": value + 0.02} if interval else {}
            sample = {"rows": 3000, "documents": 26 if interval else 1}
            rows.append(
                {"layer": layer, "metric": metric, "value": value, "low": None, "high": None}
                | ends
                | sample
            )
    return rows


def _r2_leads(r2: list[Row]) -> list[Row]:
    by = {(row["map"], row["src"], row["dst"]): row for row in r2}
    rows = []
    for (name, src, dst), row in by.items():
        if name == "mat":
            value = row["r2"] - by["id", src, dst]["r2"]
            ends = {"value": value, "low": value - 0.01, "high": value + 0.01}
            sample = {"rows": 3000, "documents": 26, "groups": 26}
            rows.append({"src": src, "dst": dst, **ends, **sample})
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
                        "groups": 26,
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


def _scores(n_layers: int, texts: tuple[str, ...], interval: bool, rng: random.Random) -> list[Row]:
    metrics = ("precision@1", "precision@5", "precision@10", "surprisal", "kl")
    rows = []
    for read in texts:
        for name, fit in [("mat", fit) for fit in texts] + [("id", "-")]:
            for layer in range(n_layers + 1):
                share, noise = _share(name, layer / n_layers), rng.gauss(0, 0.006)
                if name == "mat" and fit != read and layer < n_layers:
                    share *= 0.82
                for metric in metrics:
                    value = _value(metric, share)
                    if layer < n_layers:
                        value = max(0.0, value + noise)
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
            "train_r2_logit": -3.0 + 3 * src / n_layers,
        }
        for src in range(n_layers)
        for dst in range(src + 1, n_layers + 1)
    ]
