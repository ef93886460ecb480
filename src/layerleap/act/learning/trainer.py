"""Fine-tune a model on a text: `ll.finetune`.

In: a wrapped model and a text. Out: `FineTuned`: what was learned, as a delta or as a folder in the
format of the hub, and the losses on the way. The model that was given stays as it is.

    full           plain back-propagation: memory grows with the number of blocks
    layer-causal   every block learns by its own loss, as soon as it has run: memory of one block

A plain loop over windows of tokens. A checkpoint holds parameters and the state of the optimizer,
so a resumed run ends with the same bits.
"""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from layerleap.act.fine_tuning import FineTuning, How, Kind, fine_tuning
from layerleap.act.learning.delta import Delta, wide_dtype
from layerleap.act.learning.descent import require_finite
from layerleap.act.learning.gradients import check_lens, gradients
from layerleap.act.learning.lessons import Demonstration, lesson, require_learner
from layerleap.act.learning.parameters import Chosen, choose
from layerleap.arguments import checked
from layerleap.errors import BadSettings, BadText, NotFinite
from layerleap.files import whole_folder, write_json
from layerleap.lens.lens import Lens
from layerleap.maps.artifact import TUNED_MODEL
from layerleap.maps.tune import batch
from layerleap.models.hooks.parameters import computing_with
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, reporting
from layerleap.quiet import quiet_transformers
from layerleap.results.base import Result
from layerleap.results.columns import Column, Row, Table
from layerleap.short_repr import ShortRepr
from layerleap.stats.fit_statistics import Saver, interrupts_wait
from layerleap.stats.tensor_file import TensorFile, require_same_run
from layerleap.stream.examples import Sampling, longest_input
from layerleap.stream.source import default_text, resolve_text
from layerleap.stream.tokens import token_stream, windows
from layerleap.zoo.small_lm import lm_loss
from layerleap.zoo.training_loop import warmup_cosine

CHECKPOINT = TensorFile("finetuning", 1)
BETAS, EPSILON = (0.9, 0.95), 1e-8  # of AdamW
OLDEST = 20.0  # seconds between two checkpoints: what a kill may cost


@dataclass(frozen=True, eq=False, repr=False)
class FineTuned(ShortRepr, Result):
    """What was learned, and how the losses went."""

    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "record",
            "mean loss per token in nats: of the steps since the last check, and on held-out text",
            lambda tuned: tuned.record,
            (
                Column("step"),
                Column("loss", "trained on", "{:.3f}"),
                Column("held_out", "held out", "{:.3f}"),
                Column("seconds", form="{:.0f}"),
            ),
        ),
    )

    transformer: Transformer
    values: Mapping[str, Tensor]  # the trained parameters, float32 or wider
    settings: Mapping[str, Any]
    record: list[dict[str, Any]]  # by check: step, loss, held_out, seconds
    notes: tuple[str, ...] = ()  # what a reader of the record should know
    text: str = "given texts"  # the name of what it was trained on

    @property
    def delta(self) -> Delta:
        """The change of the parameters; `ll.edits.ApplyDelta` puts it in force.

        In float32 the sum of parameter and change may differ from the trained parameter in its
        last bit; what `save_pretrained` writes does not.
        """
        known = dict(self.transformer.model.named_parameters())
        tensors = {
            name: value.detach() - known[name].detach().to(value.dtype)
            for name, value in self.values.items()
        }
        return Delta.of(self.transformer, tensors, **self.settings)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the fine-tuned model in the format of the hub, with its tokenizer and record."""
        folder = Path(folder)
        TUNED_MODEL.check_target(folder)
        zero = {name: torch.zeros_like(value) for name, value in self.values.items()}
        with whole_folder(folder) as temporary, quiet_transformers(), torch.no_grad():
            model = Delta.of(self.transformer, zero).merged(self.transformer)
            parameters = dict(model.named_parameters())
            for name, value in self.values.items():
                parameters[name].copy_(value)
            model.save_pretrained(temporary)
            if self.transformer.tokenizer is not None:
                self.transformer.tokenizer.save_pretrained(temporary)
            write_json(temporary / TUNED_MODEL.config, self.to_dict())
        return folder

    def headline(self) -> str:
        """The model and the text."""
        return f"{self.transformer.identity.name}, fine-tuned on {self.text}"

    def facts(self) -> Row:
        """The model, the settings and the text."""
        identity = self.transformer.identity.to_dict()
        return {"model": identity, "settings": dict(self.settings), "text": self.text}


@checked
def finetune(
    transformer: Transformer,
    text: Any = None,
    *,
    how: How = "layer-causal",
    parameters: str | Sequence[str] = "blocks",
    steps: int = 50,
    learning_rate: float = 1e-5,
    optimizer: Kind = "adamw",
    decay: float = 0.01,
    batch: int = 4,
    max_tokens: int = 128,
    share: float | None = None,
    lens: Lens | None = None,
    check_every: int = 25,
    tested_tokens: int = 2048,
    held_out: float = 0.25,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | bool = True,
) -> FineTuned:
    """Fine-tune a model on a text, block by block or by plain back-propagation.

        tuned = ll.finetune(model, "news", how="layer-causal", steps=50)
        tuned.save_pretrained("smollm2-news")     # or folder="smollm2-news" in the call
        with model.edit(ll.edits.ApplyDelta(tuned.delta)):
            ...

    Args:
        text: anything that `ll.fit` accepts; None is the model's default text.
        how: "layer-causal": every block by its own loss; "full": plain back-propagation.
        parameters: those that are trained: "blocks", "keys-values", "all", or patterns of names.
        steps: of the optimizer.
        learning_rate: its peak; warmed up over a tenth of the steps, then a cosine decay.
        optimizer: "adamw" or "sgd".
        decay: of the weights of matrices.
        batch: windows per step.
        max_tokens: tokens per window.
        share: of the rows that losses below the last layer are computed on, for "layer-causal";
            1/16 when None, 1 is the method of the paper.
        lens: what those losses are read through; the logit lens when None.
        check_every: steps between two measurements on held-out text.
        tested_tokens: of held-out text; 0 measures nothing.
        held_out: share of the documents that is never trained on.
        seed: decides which documents are held out, and the order of the windows.
        folder: where the fine-tuned model is written, in the format of the hub. A hidden folder
            beside it holds the checkpoint: the same call continues an interrupted run.
        progress: a function to call, True for bars on a terminal or in a notebook, or False.
    """
    settings = fine_tuning(
        how,
        parameters,
        share,
        steps=steps,
        learning_rate=learning_rate,
        optimizer=optimizer,
        decay=decay,
        batch=batch,
        max_tokens=max_tokens,
        check_every=check_every,
        tested_tokens=tested_tokens,
        held_out=held_out,
        seed=seed,
    )
    require_learner(transformer)
    if max_tokens > (limit := longest_input(transformer)):
        raise BadSettings(f"max_tokens is {max_tokens}; this model reads at most {limit}")
    if folder is not None:
        TUNED_MODEL.check_target(folder)
    with reporting(progress) as report:
        name = str(default_text(transformer) if text is None else text)
        name = name if text is None or isinstance(text, str | Path) else "given texts"
        text, _ = resolve_text(transformer, text, Sampling(), report)
        run, checkpoint = _Run(transformer, text, settings, lens), None
        if folder is not None:
            hidden = f".{Path(folder).name}.finetuning"
            checkpoint = Path(folder).with_name(hidden) / "training.safetensors"
        run.train(checkpoint, report)
        tuned = FineTuned(transformer, run.values, run.about_result(), run.record, run.notes, name)
        if folder is not None and checkpoint is not None:
            tuned.save_pretrained(folder)
            checkpoint.unlink(missing_ok=True)
            with suppress(OSError):  # no such folder, or something else is in it
                checkpoint.parent.rmdir()
        return tuned


class _Run:
    """The training, step by step."""

    def __init__(
        self, transformer: Transformer, text: Any, settings: FineTuning, lens: Lens | None
    ) -> None:
        self.transformer, self.settings, self.lens = transformer, settings, lens
        if settings.how == "full" and lens is not None:
            raise BadSettings("a lens is for how='layer-causal' alone")
        check_lens(transformer, lens)
        self.chosen: Chosen = choose(transformer, settings.parameters)
        needed = settings.steps * settings.batch * settings.max_tokens
        read = partial(
            token_stream, transformer, text, held_out=settings.held_out, seed=settings.seed
        )
        has_test = settings.held_out and settings.tested_tokens
        self.tested = read(settings.tested_tokens if has_test else 0, side="held-out")
        stream, width = read(needed), settings.max_tokens
        is_short = settings.held_out and len(stream) < width
        if is_short and (n_taken := len(read(needed, side="held-out"))):
            raise BadText(
                f"the text has {len(stream)} tokens to train on, fewer than one window of {width}: "
                f"held_out={settings.held_out} took {n_taken} tokens or more, whole documents at a "
                "time; set held_out=0, or give more documents"
            )
        self.windows = windows(stream, width)
        self.notes: tuple[str, ...] = ()
        if has_test and len(self.tested) < 2:
            self.notes = (
                "Nothing was held out, so no held-out loss was measured: no document of the text "
                f"fell to the {settings.held_out:.0%} that are never trained on. Give more "
                "documents, or another seed.",
            )
        known = dict(transformer.model.named_parameters())
        self.values = {
            name: known[name].detach().to(wide_dtype(known[name]), copy=True)
            for name in self.chosen.names
        }
        self.optimizer = Optimizer(settings.optimizer, settings.decay)
        self.step, self.seconds = 0, 0.0
        self.losses: list[float] = []  # since the last check
        self.record: list[dict[str, Any]] = []

    def train(self, checkpoint: Path | None, progress: Progress) -> None:
        """Run all steps, from a checkpoint if there is one."""
        about, steps = self._about(), self.settings.steps
        if checkpoint is not None and checkpoint.exists():
            self._resume(checkpoint, about)
        saver = Saver(lambda path: self._save(path, about), checkpoint, longest=OLDEST)
        with interrupts_wait() as is_interrupted:
            self._check_if_due()
            while self.step < steps:
                self._step()
                progress("fine-tuning", self.step, steps, "steps")
                if is_interrupted():
                    saver.save()
                    raise KeyboardInterrupt
                saver.save_if_due()
                self._check_if_due()

    def _check_if_due(self) -> None:
        is_due = self.step % self.settings.check_every == 0 or self.step == self.settings.steps
        if is_due and (not self.record or self.record[-1]["step"] < self.step):
            self._check()

    def _step(self) -> None:
        settings, started = self.settings, time.perf_counter()
        rows = batch(len(self.windows), settings.batch, self.step, settings.seed)
        texts = [Demonstration(tuple(window)) for window in self.windows[rows].tolist()]
        warmup = max(1, settings.steps // 10)
        rate = settings.learning_rate * warmup_cosine(self.step, warmup, settings.steps)
        number = self.step + 1

        def take(name: str, gradient: Tensor) -> None:
            mask = self.chosen.masks[name]
            self.optimizer.update(name, self.values[name], gradient, rate, number, mask)

        result = gradients(
            self.transformer,
            self.chosen,
            self._inputs(),
            lesson(self.transformer, texts),
            how=settings.how,
            lens=self.lens,
            share=settings.share,
            seed=settings.seed + self.step,
            take=take,
        )
        self.step = number
        self.losses.append(result.losses.get(self.transformer.n_layers, math.nan))
        self.seconds += time.perf_counter() - started

    def _inputs(self) -> dict[str, Tensor]:
        """The parameters in the model's dtype; the trained tensors themselves in float32."""
        dtypes = {name: one.dtype for name, one in self.transformer.model.named_parameters()}
        return {name: value.to(dtypes[name]) for name, value in self.values.items()}

    def _check(self) -> None:
        """Measure the loss on held-out text; training time does not count it."""
        require_finite(self.values)
        tested = None
        if len(self.tested) > 1:
            with computing_with(self.transformer, self._inputs()):
                tested = lm_loss(self.transformer.model, self.tested, self.settings.max_tokens)
            if not math.isfinite(tested["loss"]):
                raise NotFinite(
                    f"the held-out loss is {tested['loss']} after step {self.step}; lower the "
                    "learning rate, or use a wider dtype"
                )
        losses, self.losses = [loss for loss in self.losses if math.isfinite(loss)], []
        row = {"step": self.step, "loss": sum(losses) / len(losses) if losses else None}
        row["held_out"] = None if tested is None else tested["loss"]
        row["tested_tokens"] = 0 if tested is None else tested["tokens"]
        self.record.append({**row, "seconds": self.seconds})

    def _about(self) -> dict[str, Any]:
        """What a resumed run must have in common."""
        tokens = hashlib.sha256(self.windows.numpy().tobytes() + self.tested.numpy().tobytes())
        bank = None if self.lens is None else self.lens.bank
        return {
            "model": self.transformer.identity.fingerprint,
            "settings": asdict(self.settings),
            "text": tokens.hexdigest(),
            "lens": None if bank is None else bank.digest(),
        }

    def about_result(self) -> dict[str, Any]:
        """How it was trained, for the delta and the folder."""
        lens = (self.lens or Lens(self.transformer)).name
        settings = asdict(self.settings) | {"parameters": list(self.settings.parameters)}
        return {**settings, "lens": lens if self.settings.how == "layer-causal" else None}

    def _save(self, path: Path, about: Mapping[str, Any]) -> None:
        tensors = {f"value.{name}": value for name, value in self.values.items()}
        plain = {name: getattr(self, name) for name in ("step", "seconds", "losses", "record")}
        CHECKPOINT.save(path, {**tensors, **self.optimizer.tensors()}, {"about": about, **plain})

    def _resume(self, path: Path, about: Mapping[str, Any]) -> None:
        tensors, header = CHECKPOINT.load(path)
        require_same_run(path, header["about"], about)
        with CHECKPOINT.parsing(path):
            for name, value in self.values.items():
                value.copy_(tensors[f"value.{name}"])
            self.optimizer.restore(tensors, self.values)
            for name in ("step", "seconds", "losses", "record"):
                setattr(self, name, header[name])


@dataclass
class Optimizer:
    """AdamW or plain SGD; both shrink matrices by weight decay, if there is any.

    A step needs no gradient but the parameter's own, so that a block can learn as soon as its
    gradient is there; and everything a checkpoint has to hold is a dictionary of tensors.
    """

    kind: Kind
    decay: float = 0.0
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of AdamW, by name

    @torch.no_grad()
    def update(
        self,
        name: str,
        value: Tensor,
        gradient: Tensor,
        rate: float,
        step: int,
        mask: Tensor | None = None,
    ) -> None:
        """Change a parameter by one step; steps count from 1.

        `mask` is True where the parameter learns: the rest does not decay either.
        """
        gradient = gradient.to(value.device, value.dtype)
        if self.decay and value.dim() > 1:
            factor = 1 - rate * self.decay
            value.mul_(factor if mask is None else torch.where(mask.to(value.device), factor, 1.0))
        if self.kind == "sgd":
            value.sub_(gradient, alpha=rate)
            return
        if name not in self.moments:
            self.moments[name] = torch.zeros_like(value), torch.zeros_like(value)
        first, second = self.moments[name]
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        size = (second / (1 - BETAS[1] ** step)).sqrt_().add_(EPSILON)
        value.addcdiv_(first, size, value=-rate / (1 - BETAS[0] ** step))

    def tensors(self) -> dict[str, Tensor]:
        """The state, to save."""
        named: dict[str, Tensor] = {}
        for name, (first, second) in self.moments.items():
            named |= {f"first.{name}": first, f"second.{name}": second}
        return named

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Load what `tensors` gave; others are ignored. Tensors go where the values are."""
        for name, value in values.items():
            if (first := tensors.get(f"first.{name}")) is not None:
                second = tensors[f"second.{name}"]
                self.moments[name] = first.to(value.device), second.to(value.device)
