"""A small transformer encoder that is trained on a task, and what it learned along the way.

In: a task, the name of an attention implementation, and settings. Out: loss and held-out accuracy
at several steps.

Two attention functions with the same seed start from the same weights and see the same batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.errors import BadSettings
from layerleap.zoo import warmup_cosine
from layerleap_papers.topk_attention.encoders.task import PAD, START, Rows, Task

THETA = 10_000.0  # of rotary positions; the library's default is for thousands of positions
Point = dict[str, float]  # step, loss and accuracy on held-out rows


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

    def __post_init__(self) -> None:
        for name in ("layers", "d_model", "heads", "steps", "batch", "points"):
            if (value := getattr(self, name)) < 1:
                raise BadSettings(f"{name} is {value}; expected 1 or more")


def train_encoder(
    task: Task,
    attention: str,
    settings: EncoderSettings,
    seed: int,
    tell: Callable[[int], None] = lambda _: None,
) -> tuple[Any, list[Point]]:
    """The trained model in eval mode, and points of its learning curve; the last is the end.

    Args:
        task: what to learn.
        attention: an implementation that transformers knows by name.
        settings: shape and training.
        seed: of weights and batches.
        tell: called with the number of each step.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = new_encoder(task, settings).train()
        model.set_attn_implementation(attention)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.rate, weight_decay=settings.decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: warmup_cosine(step, max(1, settings.steps // 10), settings.steps),
        )
        every, curve = max(1, settings.steps // settings.points), list[Point]()
        for step, rows in enumerate(_batches(task.fitted, settings, seed), start=1):
            logits = model(**task.fitted.inputs(rows)).logits
            loss = nn.functional.cross_entropy(logits, task.fitted.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            tell(step)
            if step == settings.steps or step % every == 0:
                curve.append({"step": step, **scores(model, task.held_out)})
    return model.eval(), curve


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
    was_training, parts = model.training, []
    model.eval()
    for chosen in torch.arange(len(rows)).split(batch):
        parts.append(model(**rows.inputs(chosen)).logits.double())
    model.train(was_training)
    logits = torch.cat(parts)
    return {
        "loss": float(nn.functional.cross_entropy(logits, rows.labels)),
        "accuracy": float((logits.argmax(-1) == rows.labels).double().mean()),
    }
