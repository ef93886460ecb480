"""Single training runs: a task, an attention function and a seed.

In: a task from scratch, or a language model to fine-tune. Out: points of its learning curve, saved
as soon as the run ends, so that an interrupted study repeats none.
"""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerleap import Transformer, topk_attention
from layerleap.errors import BadText
from layerleap.files import whole_file
from layerleap.zoo import is_held_out, token_stream, warmup_cosine
from layerleap_papers.topk_attention.curves import EIGHTH, kept_share
from layerleap_papers.topk_attention.encoders.encoder import (
    EncoderSettings,
    Point,
    scores,
    train_encoder,
)
from layerleap_papers.topk_attention.encoders.task import Task

EXACT, TOP, SWAPPED = "exact", "top-k", "exact, read with top-k"
Tell = Callable[[int], None]


def implementation(attention: str, seen: Tensor) -> str:
    """The name of an attention function for transformers."""
    return "sdpa" if attention == EXACT else topk_attention(k=keys_of(seen))


def keys_of(seen: Tensor) -> int:
    """The k with which rows that see so many keys keep about an eighth of them, on average."""
    return min(range(1, int(seen.max()) + 1), key=lambda k: abs(kept_share(seen, k) - EIGHTH))


def saved(path: Path, run: Callable[[], list[Point]]) -> list[Point]:
    """What `run` returns; from the file if an earlier run has written it."""
    try:
        points: list[Point] = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError):  # none yet, or damaged
        points = run()
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(points), encoding="utf8")
    return points


def from_scratch(
    task: Task, attention: str, settings: EncoderSettings, seed: int, tell: Tell
) -> list[Point]:
    """The curve of a small encoder; the exact one is also read with top-k attention at its end."""
    name = implementation(attention, task.held_out.lengths)
    model, curve = train_encoder(task, name, settings, seed, tell)
    points = [{**point, "swapped": 0} for point in curve]
    if attention == EXACT:
        model.set_attn_implementation(implementation(TOP, task.held_out.lengths))
        points.append({"step": settings.steps, **scores(model, task.held_out), "swapped": 1})
    return points


@dataclass(frozen=True)
class TuneSettings:
    """How a language model is fine-tuned; plain values, which become part of every result."""

    steps: int = 200
    window: int = 128  # tokens of a training step
    rate: float = 5e-5  # peak learning rate; warmed up, then a cosine decay
    tested: int = 16  # windows that the loss is measured on
    points: int = 4

    @property
    def seen(self) -> Tensor:
        """How many keys the rows of a window see."""
        return torch.arange(1, self.window + 1)


@dataclass(frozen=True, eq=False)
class Windows:
    """Token windows of two sides of a text: (window, pos)."""

    fitted: Tensor
    held_out: Tensor


def review_windows(model: Transformer, path: Path, settings: TuneSettings) -> Windows:
    """Windows of film reviews, as many as are needed."""
    needed = {False: settings.steps, True: settings.tested}
    texts: dict[bool, list[str]] = {False: [], True: []}
    with path.open(encoding="utf8") as lines:
        records = [json.loads(line) for line in lines]
    random.Random(0).shuffle(records)  # the file has one source and verdict after the other
    for record in records:
        texts[is_held_out(record["text"])].append(record["text"])
    sides = {}
    for is_held, n in needed.items():
        characters, chosen = 0, []
        for text in texts[is_held]:
            chosen.append(text)
            characters += len(text)
            if characters > 8 * n * settings.window:  # a token has about four
                break
        stream = token_stream(model.need_tokenizer(), chosen)
        found = len(stream) // settings.window
        if found < 2:
            raise BadText(f"{path} has too few reviews for windows of {settings.window} tokens")
        sides[is_held] = stream[: found * settings.window].reshape(-1, settings.window)[:n]
    return Windows(sides[False], sides[True])


def fine_tuned(
    model: Transformer,
    windows: Windows,
    attention: str,
    settings: TuneSettings,
    seed: int,
    tell: Tell,
) -> list[Point]:
    """The curve of a copy of the model, all of whose weights are trained."""
    tuned: Any = copy.deepcopy(model.model)
    tuned.set_attn_implementation(implementation(attention, settings.seen))
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat(
        [
            torch.randperm(len(windows.fitted), generator=generator)
            for _ in range(-(-settings.steps // len(windows.fitted)))
        ]
    )
    optimizer = torch.optim.AdamW(
        tuned.parameters(), lr=settings.rate, weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, max(1, settings.steps // 10), settings.steps)
    )
    every = max(1, settings.steps // settings.points)
    points: list[Point] = [{"step": 0, "loss": lm_loss(tuned, windows.held_out), "swapped": 0}]
    # In eval mode: dropout would make the two attention functions see other noise.
    for step in range(1, settings.steps + 1):
        window = windows.fitted[order[step - 1]][None]
        loss = tuned(input_ids=window, labels=window, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(tuned.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        tell(step)
        if step == settings.steps or step % every == 0:
            now = lm_loss(tuned, windows.held_out)
            points.append({"step": step, "loss": now, "swapped": 0})
    if attention == EXACT:
        tuned.set_attn_implementation(implementation(TOP, settings.seen))
        now = lm_loss(tuned, windows.held_out)
        points.append({"step": settings.steps, "loss": now, "swapped": 1})
    return points


@torch.no_grad()
def lm_loss(model: Any, windows: Tensor) -> float:
    """The mean of -log p over the tokens of some windows, in nats."""
    losses = [
        model(input_ids=part, labels=part, use_cache=False).loss.double() * len(part)
        for part in windows.split(4)
    ]
    return float(torch.stack(losses).sum()) / len(windows)
