"""A make-believe debugger: canned but realistic answers, so that the server and the page can be
worked on and tested without a model.

Prompts with these words behave specially: `!error` (refused), `!midway` (fails in the middle of the
stream), `!early` (an exit with a wrong token), `!busy` (queue full), `!slow` (a frame per second),
`!crash` (a mistake of the server's).
"""

import math
import random
import re
import time
from dataclasses import dataclass, field
from typing import Any

from layerleap.act.debug.debugger import Debugger
from layerleap.act.debug.index_cost import IndexCost
from layerleap.errors import BadArtifact, BadSettings, BadText, ModelRefused
from layerleap.lens.vocabulary.tokens import TokenLabel
from layerleap.show.web.worker import Busy

PROMPT = "The capital of France is Paris, and the capital of Spain is"
N_LAYERS, N_NEURONS = 30, 1536
ENDS = (" Madrid", " the", " a", " Barcelona", " Spain", " not", " located", " in", " called")
EARLY = ("\n", " ", "\t", "ed", "ing", " thing", "é", " of", " and", " very", " capital", " city")
MORE = (
    " guitar",
    " music",
    " band",
    " song",
    " album",
    " drum",
    " jazz",
    " rock",
    " piano",
    " singer",
    " river",
    " mountain",
    " lake",
    " sea",
    " Paris",
    " London",
    " Berlin",
    " Rome",
    " Lisbon",
    " king",
    " queen",
    " war",
    " peace",
    " 1",
    " 2",
    " 3",
    ".",
    ",",
    "!",
    "<|endoftext|>",
)
TEXTS = (
    "Madrid . It is a large city in the middle of the country ,",
    "Barcelona , a city by the sea , with music and guitar",
)
RANGE = {"low": -3.0, "mean": 0.1, "high": 9.5, "std": 2.0, "positive": 0.4}
BROKEN = 900  # the id of an incomplete piece of UTF-8
SPEC = re.compile(r"L(\d+)\.N(\d+)\s*(=off|off|[=*+-]\s*-?[\d.]+)?(@(all|last|generated|[\d,]+))?")


@dataclass
class Words:
    """Text pieces and their ids, made up on first sight."""

    ids: dict[str, int] = field(default_factory=dict)

    def id(self, text: str) -> int:
        return self.ids.setdefault(text, len(self.ids) + 1000)

    def label(self, id: int) -> TokenLabel:
        if id == BROKEN:
            return TokenLabel(id, "", "<E2 82>", "bytes")
        text = next((text for text, number in self.ids.items() if number == id), f"#{id}")
        if text.startswith("<|"):
            return TokenLabel(id, text, text, "special")
        shown = text.replace("\n", "⏎").replace("\t", "⇥")
        if not text.strip(" ") or text.startswith(" "):
            shown = "␣" + shown[1:]
        return TokenLabel(id, text, shown, "text" if text.strip() else "space")


class FakeDebugger(Debugger):
    """See the module; the methods are those of `Debugger`, which has more."""

    def __init__(
        self, *, index: bool = True, delay: float = 0.0, buildable: bool = False, step: float = 0.01
    ) -> None:
        self.words, self.delay = Words(), delay
        self.buildable, self.step = buildable, step
        self.blocks_done = 0  # of the index, kept if its build is stopped
        for text in (*ENDS, *EARLY, *MORE):
            self.words.id(text)
        self._index = FakeIndex(self) if index else None

    def _need_index(self) -> Any:
        if self._index is None:
            raise BadArtifact(self.index_state()["reason"])
        return self._index

    def search(self, query: str, *, top: int, side: str, space: str) -> Any:
        return self._need_index().search(query, top=top, side=side, space=space)

    def neighbours(self, block: int, neuron: int, *, top: int) -> Any:
        return self._need_index().neighbours(block, neuron, top=top)

    def clusters(self, *, top: int, query: str | None) -> Any:
        return self._need_index().clusters(top=top, query=query)

    def cluster(self, number: int) -> Any:
        return self._need_index().cluster(number)

    def index_state(self) -> dict[str, Any]:
        return {
            "ready": self._index is not None,
            "reason": None
            if self._index
            else "there is no concept index of this model; build it with: layerleap index MODEL",
            "vectors": N_LAYERS * N_NEURONS if self._index else None,
            "buildable": self.buildable,
        }

    def describe(self) -> dict[str, Any]:
        return {
            "name": "make-believe",
            "class": "FakeForCausalLM",
            "kind": "next-token",
            "n_layers": N_LAYERS,
            "d_model": 576,
            "d_vocab": 49152,
            "blocks": [
                {
                    "block": b,
                    "n_neurons": None,
                    "reason": "block 7 is a mixture of experts",
                    "style": "experts",
                }
                if b == 7
                else {"block": b, "n_neurons": N_NEURONS, "reason": None, "style": "gated"}
                for b in range(1, N_LAYERS + 1)
            ],
            "lenses": [
                {"name": "logit", "title": "logit lens"},
                {"name": "linear", "title": "linear shortcuts"},
            ],
            "mask_token": None,
            "can_generate": True,
            "generate_reason": None,
            "longest": None,
            "exit_rule": "top probability of 0.9",
            "bank": None,
            "index": self.index_state(),
            "examples": [
                {"title": "A fact", "text": PROMPT, "watch": " Madrid"},
                {"title": "A pattern", "text": "red blue red blue red", "watch": " blue"},
                {"title": "A story", "text": "Once upon a time", "watch": None},
            ],
            "fingerprint": "f" * 32,
        }

    def index_cost(self) -> IndexCost:
        seconds = {"reading neurons": 90.0, "clusters": 30.0}
        return IndexCost(seconds, 120.0 - 3.0 * self.blocks_done, 64.8)

    def build_index(self, progress: Any) -> None:
        while self.blocks_done < N_LAYERS:
            time.sleep(self.step)
            progress("reading neurons", self.blocks_done, N_LAYERS, "blocks")
            self.blocks_done += 1
        self._index = FakeIndex(self)

    def encode(self, text: Any) -> list[int]:
        return [label.id for label in self.tokens(text)]

    def tokens(self, text: Any) -> list[TokenLabel]:
        pieces = re.findall(r" ?\w+|\n|\t| |[^\w\s]", text)
        return [
            self.words.label(BROKEN if piece == "€" else self.words.id(piece)) for piece in pieces
        ]

    def outputs(self, text: str) -> list[TokenLabel]:
        wanted = [" " + text.strip(), text] if not text.startswith(" ") else [text]
        known = [self.words.ids[each] for each in wanted if each in self.words.ids]
        return [self.words.label(id) for id in known]

    def _given(self, given: Any, edits: Any = ()) -> list[TokenLabel]:
        if isinstance(given, str):
            tokens = self.tokens(given)
        else:
            tokens = [self.words.label(id) for id in given]
        text = "".join(token.text for token in tokens)
        if "!error" in text:
            raise BadText("the prompt asks for an error; take the word out of it")
        if "!busy" in text:
            raise Busy(3)
        if "!crash" in text:
            raise RuntimeError("a mistake of the server's")
        for edit in edits:
            self._edit(edit)
        return tokens

    def _edit(self, spec: str) -> dict[str, Any]:
        match = SPEC.fullmatch(spec)
        if not match:
            raise BadSettings(f"edit {spec!r} is not understood; expected one such as L12.N34=5")
        block, neuron = int(match[1]), int(match[2])
        self.check_neuron(block, neuron)
        return {
            "spec": spec,
            "sentence": f"Change neuron {neuron} of block {block} by {match[3] or '=0'} at "
            f"{match[5] or 'all'} positions",
            "block": block,
        }

    def check_edits(self, edits: Any) -> None:
        for edit in edits:
            self._edit(edit)

    def check_neuron(self, block: int, neuron: int) -> None:
        if not (1 <= block <= N_LAYERS and neuron < N_NEURONS):
            raise BadSettings(
                f"there is no neuron L{block}.N{neuron}; blocks are 1 to {N_LAYERS}, neurons 0 to "
                f"{N_NEURONS - 1}"
            )
        if block == 7:
            raise BadSettings("block 7 is a mixture of experts, so its neurons cannot be edited")

    def _cell(self, layer: int, position: int, watch: int | None, top: int, shift: float) -> Any:
        rng = random.Random(f"{layer} {position} {shift}")
        final = self.words.id(ENDS[position % 3]) if shift == 0 or layer < 20 else None
        final = final or self.words.id(ENDS[3])
        grown = layer / N_LAYERS
        pool = [self.words.id(w) for w in rng.sample(EARLY + MORE, 12)] + [BROKEN]
        chosen = list(dict.fromkeys([final, *pool] if grown > 0.6 else [*pool[:2], final, *pool]))
        weights = sorted((rng.random() ** 3 + 0.02 for _ in chosen), reverse=True)
        weights[0] += grown**2 * 8
        total = sum(weights) * (1.3 - 0.3 * grown)
        probs = [w / total for w in weights]
        rank = chosen.index(final)
        base = self.words.id(ENDS[position % 3])
        return {
            "layer": layer,
            "position": position,
            "top": [[i, round(p, 6)] for i, p in list(zip(chosen, probs, strict=True))[:top]],
            "watch": None
            if watch is None
            else [round(grown**3 * 0.7, 6), max(0, int(5000 * (1 - grown) ** 3) - 1)],
            "final": [probs[rank], rank],
            "agrees": chosen[0] == base,
            "kl": round((1 - grown) * 6 * rng.uniform(0.8, 1.2), 5),
            "entropy": round(0.5 + (1 - grown) * 7, 5),
            "changed": False,
            "change": None,
        }

    def trace(
        self,
        text: Any,
        *,
        lens: str = "logit",
        watch: int | None = None,
        follow: Any = (),
        edits: Any = (),
        top: int = 5,
        selected: int | None = None,
        should_stop: Any = lambda: False,
    ) -> Any:
        tokens = self._given(text, edits)
        text = "".join(token.text for token in tokens)
        positions = list(range(len(tokens)))
        chosen = positions[-1] if selected is None else selected
        if chosen not in positions:
            raise BadSettings(f"selected is {chosen}; the prompt has {len(tokens)} tokens")
        known = [self._edit(each) for each in edits]
        lowest = min((each["block"] for each in known), default=None)
        started = time.perf_counter()
        yield {
            "frame": "meta",
            "tokens": [token.to_dict() for token in tokens],
            "positions": positions,
            "layers": list(range(N_LAYERS + 1)),
            "selected": chosen,
            "lens": lens,
            "edits": [
                {
                    "spec": e["spec"],
                    "sentence": e["sentence"],
                    "applied": "@99" not in e["spec"],
                    "remark": "9000 is outside its natural range" if "=9000" in e["spec"] else "",
                }
                for e in known
            ],
            "lowest": lowest,
        }
        coarse = [layer for layer in range(N_LAYERS + 1) if layer % 4 == 0 or layer == N_LAYERS]
        fine = [layer for layer in range(N_LAYERS + 1) if layer not in coarse]
        others = [p for p in positions if p != chosen]
        parts = [[(layer, chosen) for layer in range(N_LAYERS + 1)]]
        parts += [[(layer, p) for p in others] for layer in (*coarse, *fine)]
        seen: set[int] = set()
        for number, part in enumerate(parts):
            for side in ("before", "after") if known else ("before",):
                if should_stop():
                    return
                time.sleep(1.0 if "!slow" in text else self.delay)
                cells = [self._side(*c, watch, top, side, lowest) for c in part]
                for cell in cells:
                    cell["follow"] = {str(id): self._followed(cell, id) for id in follow}
                cells = [cell for cell in cells if side == "before" or cell["changed"]]
                new = {id for cell in cells for id, _ in cell["top"]} - seen
                seen |= new
                names = {str(id): self.words.label(id).to_dict() for id in sorted(new)}
                if cells:
                    yield {"frame": "cells", "side": side, "names": names, "cells": cells}
            if number == 0:
                yield {
                    "frame": "saturation",
                    "position": chosen,
                    "before": 21,
                    "after": 24 if known else None,
                    "exits": {
                        "before": self._stop(26, 0 if "!early" in text else 1),
                        "after": self._stop(27, 1) if known else None,
                    },
                }
            if number == 3 and "!midway" in text:
                raise BadText("the reading failed midway, as the prompt asked for")
        for position in others:
            yield {
                "frame": "saturation",
                "position": position,
                "before": 19 + position % 9,
                "after": None,
                "exits": {"before": None, "after": None},
            }
        yield {"frame": "done", "seconds": time.perf_counter() - started}

    def _stop(self, layer: int, agrees: int) -> dict[str, Any]:
        top, answer = (self.words.label(self.words.id(t)).to_dict() for t in (" ", " Madrid"))
        return {
            "layer": layer,
            "agrees": bool(agrees),
            "top": answer if agrees else top,
            "answer": answer,
        }

    def _side(self, layer: int, position: int, watch: Any, top: int, side: str, lowest: Any) -> Any:
        touched = side == "after" and layer >= (lowest or 0)
        cell = self._cell(layer, position, watch, top, 0.5 if touched else 0.0)
        if side == "after":
            cell |= {
                "change": round(0.4 * layer / N_LAYERS, 5) if touched else 0.0,
                "changed": touched,
            }
        return cell

    def _followed(self, cell: Any, id: int) -> list[Any]:
        known = [(prob, rank) for rank, (own, prob) in enumerate(cell["top"]) if own == id]
        return list(known[0]) if known else [0.0001 * (1 + id % 5), 99 + id % 50]

    def cell(
        self,
        text: Any,
        *,
        block: int,
        position: int,
        lens: str = "logit",
        watch: int | None = None,
        edits: Any = (),
        top: int = 10,
    ) -> Any:
        tokens = self._given(text, edits)
        if not (1 <= block <= N_LAYERS and position < len(tokens)):
            raise BadSettings(f"there is no block {block} at position {position}")
        time.sleep(self.delay)
        after = self._reading(block, position, watch, top, 0.5) if edits else None
        return {
            "block": block,
            "position": position,
            "token": tokens[position].to_dict(),
            "after": after,
            **self._reading(block, position, watch, top, 0.0),
        }

    def _reading(self, block: int, position: int, watch: Any, top: int, shift: float) -> Any:
        stages = []
        for number, where in enumerate(("before", "attention", "ffn")):
            cell = self._cell(block - 1 + number // 2, position, watch, top, shift + number)
            rows = [
                self._predicted(id, prob, rank, None if not number else (id % 7) - 3)
                for rank, (id, prob) in enumerate(cell["top"])
            ]
            watched = None if watch is None else self._predicted(watch, *cell["watch"], None)
            layer = block - 1 + number // 2
            stages.append({"where": where, "layer": layer, "top": rows, "watched": watched})
        has_neurons = block != 7
        return {
            "block": block,
            "style": "sequential",
            "stages": stages,
            "updates": self._updates(block, position) if has_neurons else [],
            "shown_share": 0.47,
            "bias_share": 0.02,
            "rest_share": 0.51,
            "total_norm": 180.5 if has_neurons else None,
            "missing": {} if has_neurons else {"neurons": "block 7 is a mixture of experts"},
        }

    def _predicted(self, id: int, prob: float, rank: int, climbed: int | None) -> dict[str, Any]:
        token = self.words.label(id).to_dict()
        return {"token": token, "prob": prob, "rank": rank, "climbed": climbed}

    def _updates(self, block: int, position: int) -> list[dict[str, Any]]:
        rng = random.Random(f"{block} {position}")
        updates = []
        for _ in range(10):
            neuron, size = rng.randrange(N_NEURONS), rng.uniform(0.5, 26)
            coefficient = size * rng.choice((-1, 1))
            ends = self._ends(block, neuron)
            updates.append(
                {
                    "block": block,
                    "neuron": neuron,
                    "name": f"L{block}.N{neuron}",
                    "coefficient": coefficient,
                    "norm": 4.5,
                    "strength": size * 4.5,
                    "share": size / 200,
                    "promotes": ends["promotes"][:5],
                    "suppresses": ends["suppresses"][:5],
                    "range": RANGE if neuron % 3 else None,
                }
            )
        return sorted(updates, key=lambda update: -update["strength"])

    def _ends(self, block: int, neuron: int) -> dict[str, Any]:
        rng = random.Random(f"{block}.{neuron}")
        pool = rng.sample(ENDS + EARLY + MORE, 50)
        rows = [
            {"token": self.words.label(self.words.id(t)).to_dict(), "score": 3 * math.exp(-i / 15)}
            for i, t in enumerate(pool)
        ]
        return {"promotes": rows, "suppresses": [{**r, "score": -r["score"]} for r in rows[::-1]]}

    def vector(self, block: int, neuron: int) -> dict[str, Any]:
        self.check_neuron(block, neuron)
        return {
            "block": block,
            "neuron": neuron,
            "norm": 4.5,
            **self._ends(block, neuron),
            "range": RANGE if self._index else None,
            "cluster": neuron % 40 if self._index else None,
        }

    def keys(self, block: int, neuron: int) -> dict[str, Any]:
        self.check_neuron(block, neuron)
        keys = [
            {"kind": kind, "norm": 2.5, **self._ends(block, neuron + 1)}
            for kind in ("ffn.gate", "ffn.up")
        ]
        return {"keys": keys, "reason": None}

    def heads(self, block: int) -> dict[str, Any]:
        if block == 2:
            raise ModelRefused("no single matrix gives the output of attention of block 2")
        reason = "its queries and keys cannot be verified" if block == 4 else None
        return {
            "block": block,
            "n_heads": 4,
            "n_kv_heads": 2,
            "positions": "rotary",
            "qk_reason": reason,
        }

    def pairs(self, block: int, head: int, *, form: str, offset: int, top: int) -> dict[str, Any]:
        if head >= 4:
            raise BadSettings(f"block {block} has no head {head}; expected 0 to 3")
        ends = self._ends(block, head)
        both = zip(ends["promotes"], ends["suppresses"], strict=True)
        pairs = [
            {"first": one["token"], "second": other["token"], "score": one["score"]}
            for one, other in both
        ]
        roles = ["source token", "written token"] if form == "vo" else ["query token", "key token"]
        return {
            "title": f"L{block}.H{head} W_{form.upper()}",
            "legend": "made up",
            "roles": roles,
            "pairs": pairs[:top],
        }

    def generate(
        self,
        text: Any,
        *,
        edits: Any = (),
        max_new_tokens: int = 20,
        on_token: Any = lambda token, piece: None,
        should_stop: Any = lambda: False,
    ) -> Any:
        tokens = self._given(text, edits)
        text = "".join(token.text for token in tokens)
        words = TEXTS[bool(edits)].split()
        for number in range(max_new_tokens):
            if should_stop():
                return
            time.sleep(1.0 if "!slow" in text else self.delay * 3)
            if number == 3 and "!midway" in text:
                raise BadText("the generation failed midway, as the prompt asked for")
            piece = " " + words[number % len(words)]
            on_token(self.words.label(self.words.id(piece)), piece)


class FakeIndex:
    """Search, neighbours and clusters over made-up vectors."""

    def __init__(self, debugger: FakeDebugger) -> None:
        self.debugger = debugger

    def _row(self, block: int, neuron: int) -> dict[str, Any]:
        ends = self.debugger._ends(block, neuron)
        return {
            "block": block,
            "neuron": neuron,
            "promotes": [e["token"] for e in ends["promotes"][:5]],
            "suppresses": [e["token"] for e in ends["suppresses"][:5]],
        }

    def search(self, query: str, *, top: int, side: str, space: str) -> dict[str, Any]:
        words = self.debugger.words
        matched = [i for w in query.split() for t, i in words.ids.items() if t.strip() == w]
        known = {text.strip() for text in words.ids}
        notes = [
            f"no token of this model begins a word with {w!r}."
            for w in query.split()
            if w not in known
        ]
        if not matched:
            return {"results": [], "notes": notes}
        rng = random.Random(query)
        rows = []
        for number in range(min(top, 25)):
            row = self._row(rng.choice((3, 12, 24, 29)), rng.randrange(N_NEURONS))
            end = ("promoted", "suppressed")[number % 4 == 3] if side == "both" else side
            hits = [words.label(i).to_dict() for i in matched[: 1 + number % 3]]
            row |= {"score": 9.5 - number / 3, "side": end, "matched": hits, "partial": False}
            rows.append(row)
        return {"results": rows, "notes": notes}

    def neighbours(self, block: int, neuron: int, *, top: int) -> list[dict[str, Any]]:
        self.debugger.check_neuron(block, neuron)
        return [
            {**self._row(1 + (block + n) % 6, (neuron + n) % N_NEURONS), "cosine": 0.9 - n / 20}
            for n in range(1, top + 1)
        ]

    def clusters(self, *, top: int, query: str | None) -> list[dict[str, Any]]:
        groups = map(self.cluster, range(min(top, 40)))
        return [{key: group[key] for key in ("number", "size", "tokens")} for group in groups]

    def cluster(self, number: int) -> dict[str, Any]:
        if number >= 40:
            raise BadSettings(f"there is no cluster {number}; there are 40")
        rng = random.Random(number)
        tokens = [self.debugger.words.id(t) for t in rng.sample(MORE, 8)]
        rows = [self._row(rng.choice((3, 12, 24)), rng.randrange(N_NEURONS)) for _ in range(10)]
        fields = ("block", "neuron", "promotes")
        members = [{**{key: row[key] for key in fields}, "cosine": 0.8} for row in rows]
        return {
            "number": number,
            "size": 20 + number * 3,
            "members": members,
            "tokens": [self.debugger.words.label(i).to_dict() for i in tokens],
        }
