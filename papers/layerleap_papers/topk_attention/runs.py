"""Single training runs: a task, an attention function and a seed.

In: a task for a small encoder from scratch, or a language model to fine-tune. Out: points of its
learning curve, saved as soon as the run ends, so that an interrupted study repeats none.

Two attention functions with the same seed start from the same weights and see the same batches.
"""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from layerleap import Transformer, topk_attention
from layerleap.errors import BadText
from layerleap.files import whole_file
from layerleap.zoo import token_stream, warmup_cosine
from layerleap_papers.topk_attention.comparisons import EIGHTH, kept_share
from layerleap_papers.topk_attention.tasks import PAD, START, Rows, Task, reviews_by_side

EXACT, TOP, SWAPPED = "exact", "top-k", "exact, read with top-k"
THETA = 10_000.0  # of rotary positions; the library's default is for thousands of positions
Point = dict[str, float]  # step, loss and accuracy on held-out rows
OnStep = Callable[[int], None]


@dataclass(frozen=True)
class EncoderSettings:
    """Model shape and training; plain values, which become part of every result."""

    layers: int = 2
    d_model: int = 64
    heads: int = 4
    steps: int = 600
    batch: int = 32
    rate: float = 1e-3  # peak learning rate; warmed up, then a cosine decay
    decay: float = 0.01
    points: int = 6  # times that the held-out rows are classified, evenly over the steps


@dataclass(frozen=True)
class TuneSettings:
    """How a language model is fine-tuned; plain values, which become part of every result."""

    steps: int = 200
    window: int = 128  # tokens of a training step
    rate: float = 5e-5  # peak learning rate; warmed up, then a cosine decay
    tested: int = 16  # windows that the loss is measured on
    points: int = 4

    @property
    def visible(self) -> Tensor:
        """How many keys the rows of a window see."""
        return torch.arange(1, self.window + 1)


class Windows(NamedTuple):
    """Token windows of two sides of a text: (window, pos)."""

    fitted: Tensor
    held_out: Tensor


def implementation(attention: str, visible: Tensor) -> str:
    """The name of an attention function for transformers."""
    return "sdpa" if attention == EXACT else topk_attention(k=keys_of(visible))


def keys_of(visible: Tensor) -> int:
    """The k with which rows that see so many keys keep about an eighth of them, on average."""
    return min(range(1, int(visible.max()) + 1), key=lambda k: abs(kept_share(visible, k) - EIGHTH))


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
    task: Task, attention: str, settings: EncoderSettings, seed: int, on_step: OnStep
) -> list[Point]:
    """The curve of a small encoder; the exact one is also read with top-k attention at its end."""
    name = implementation(attention, task.held_out.lengths)
    model, curve = train_encoder(task, name, settings, seed, on_step)
    points = [{**point, "swapped": 0} for point in curve]
    if attention == EXACT:
        model.set_attn_implementation(implementation(TOP, task.held_out.lengths))
        points.append({"step": settings.steps, **scores(model, task.held_out), "swapped": 1})
    return points


def train_encoder(
    task: Task,
    attention: str,
    settings: EncoderSettings,
    seed: int,
    on_step: OnStep = lambda _: None,
) -> tuple[Any, list[Point]]:
    """The trained model in eval mode, and points of its learning curve; the last is the end.

    `attention` is an implementation that transformers knows by name; the seed decides weights and
    batches.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = new_encoder(task, settings).train()
        model.set_attn_implementation(attention)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.rate, weight_decay=settings.decay
        )

        def losses() -> Iterator[Tensor]:
            for rows in _batches(task.fitted, settings, seed):
                logits = model(**task.fitted.inputs(rows)).logits
                yield nn.functional.cross_entropy(logits, task.fitted.labels[rows])

        test = partial(scores, model, task.held_out)
        curve = list(_descend(optimizer, losses(), test, settings, on_step))
    return model.eval(), curve


def _descend(
    optimizer: torch.optim.Optimizer,
    losses: Iterator[Tensor],
    test: Callable[[], Point],
    settings: EncoderSettings | TuneSettings,
    on_step: OnStep,
) -> Iterator[Point]:
    """One step for each loss, and points of the learning curve."""
    steps, parameters = settings.steps, optimizer.param_groups[0]["params"]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, max(1, steps // 10), steps)
    )
    every = max(1, steps // settings.points)
    for step, loss in enumerate(losses, start=1):
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        on_step(step)
        if step == steps or step % every == 0:
            yield {"step": step, **test()}


def new_encoder(task: Task, settings: EncoderSettings) -> Any:
    """An untrained classifier without dropout: rotary positions, and a mean over all positions."""
    from transformers import ModernBertConfig, ModernBertForSequenceClassification

    config = ModernBertConfig(
        vocab_size=task.symbols,
        hidden_size=settings.d_model,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=2 * settings.d_model,
        max_position_embeddings=task.longest,
        num_labels=task.classes,
        pad_token_id=PAD,
        bos_token_id=START,
        cls_token_id=START,
        eos_token_id=None,
        sep_token_id=None,
        layer_types=["full_attention"] * settings.layers,
        classifier_pooling="mean",
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": THETA}},
    )
    return ModernBertForSequenceClassification(config)


def _batches(rows: Rows, settings: EncoderSettings, seed: int) -> Iterator[Tensor]:
    """Random batches, without repeating a row before all have been seen."""
    generator = torch.Generator().manual_seed(seed)
    waiting = torch.empty(0, dtype=torch.long)
    for _ in range(settings.steps):
        if len(waiting) < settings.batch:
            waiting = torch.cat([waiting, torch.randperm(len(rows), generator=generator)])
        yield waiting[: settings.batch]
        waiting = waiting[settings.batch :]


@torch.no_grad()
def scores(model: Any, rows: Rows, batch: int = 128) -> dict[str, float]:
    """Mean loss and accuracy over rows."""
    was_training = model.training
    model.eval()
    parts = [model(**rows.inputs(chosen)).logits for chosen in torch.arange(len(rows)).split(batch)]
    model.train(was_training)
    logits = torch.cat(parts).double()
    return {
        "loss": float(nn.functional.cross_entropy(logits, rows.labels)),
        "accuracy": float((logits.argmax(-1) == rows.labels).double().mean()),
    }


def review_windows(model: Transformer, path: Path, settings: TuneSettings) -> Windows:
    """Windows of film reviews, as many as are needed."""
    sides, reviews = [], reviews_by_side(path)
    for is_test, n in ((False, settings.steps), (True, settings.tested)):
        characters, chosen = 0, []
        for record in reviews[is_test]:
            chosen.append(record["text"])
            characters += len(record["text"])
            if characters > 8 * n * settings.window:  # a token has about four
                break
        stream = token_stream(model.need_tokenizer(), chosen)
        known = len(stream) // settings.window
        if known < 2:
            raise BadText(f"{path} has too few reviews for windows of {settings.window} tokens")
        sides.append(stream[: known * settings.window].reshape(-1, settings.window)[:n])
    return Windows(*sides)


def fine_tuned(
    model: Transformer,
    windows: Windows,
    attention: str,
    settings: TuneSettings,
    seed: int,
    on_step: OnStep,
) -> list[Point]:
    """The curve of a copy of the model, all of whose weights are trained."""
    tuned: Any = copy.deepcopy(model.model)
    tuned.set_attn_implementation(implementation(attention, settings.visible))
    generator, n = torch.Generator().manual_seed(seed), len(windows.fitted)
    rounds = range(-(-settings.steps // n))
    order = torch.cat([torch.randperm(n, generator=generator) for _ in rounds])
    optimizer = torch.optim.AdamW(
        tuned.parameters(), lr=settings.rate, weight_decay=0.0, fused=True
    )

    def losses() -> Iterator[Tensor]:
        # In eval mode: dropout would make the two attention functions see other noise.
        for window in windows.fitted[order[: settings.steps]][:, None]:
            yield tuned(input_ids=window, labels=window, use_cache=False).loss

    def test() -> Point:
        return {"loss": lm_loss(tuned, windows.held_out)}

    curve = [{"step": 0, **test()}, *_descend(optimizer, losses(), test, settings, on_step)]
    points = [{**point, "swapped": 0} for point in curve]
    if attention == EXACT:
        tuned.set_attn_implementation(implementation(TOP, settings.visible))
        points.append({"step": settings.steps, **test(), "swapped": 1})
    return points


@torch.no_grad()
def lm_loss(model: Any, windows: Tensor) -> float:
    """The mean of -log p over the tokens of some windows, in nats."""
    losses = [
        model(input_ids=part, labels=part, use_cache=False).loss.double() * len(part)
        for part in windows.split(4)
    ]
    return float(torch.stack(losses).sum()) / len(windows)
