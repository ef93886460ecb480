"""What a layer-causal step costs against plain back-propagation, and what it gives.

Memory: each step runs in a process of its own, `python benchmarks/layer_causal.py HOW TOKENS`, on
one window of the bundled text; plain back-propagation is the library's own loss and backward pass.
Both compute the gradients of everything inside the blocks and take a plain step with them.

    layer_causal_memory     what the step adds to the memory of the process, at its peak; the peak
                            of the whole process, libraries and model included, is in the detail
    layer_causal_time       seconds of a step of `ll.finetune`, which reads the losses below the
                            last layer at one position in 16; the paper's own step, at every
                            position, is in the detail
    layer_causal_loss       held-out loss after `ll.finetune` both ways; also after the same time,
                            and with the same memory (plain training of the last blocks alone)
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import MODEL, Row, interleave, median

from layerleap.memory import give_back

WIDTH, PARAMETERS = 512, "blocks"
RATES = (1e-5, 1e-4)
LAST_BLOCKS = 2  # whose plain training takes about the memory of a layer-causal step
HOWS = ("plain", "layer-causal", "layer-causal, all positions", "full")


def run(*, smoke: bool) -> list[Row]:
    """Memory, time and what is learned."""
    width = 64 if smoke else WIDTH
    peaks = {how: [_child(how, width) for _ in range(1 if smoke else 2)] for how in HOWS}
    return [
        _memory_row(peaks, width), _time_row(width, rounds=1 if smoke else 5), _loss_row(smoke)
    ]  # fmt: skip


def _memory_row(peaks: dict[str, list[dict[str, float]]], width: int) -> Row:
    added, whole = (
        {how: median(one[key] for one in found) for how, found in peaks.items()}
        for key in ("step", "peak")
    )
    note = (
        "peak resident memory that a step adds to the loaded model: gradients of all blocks and a "
        f"plain step, one window of {width} tokens; layer-causal at all positions (ours) against "
        "the library's own loss and backward (peer); 'full' is plain back-propagation of "
        "layerleap, which makes logits a few rows at a time"
    )
    return Row(
        "layer_causal_memory", added["layer-causal, all positions"], added["plain"], "MiB", 0.5,
        "<=", detail={"note": note, "added": added, "process": whole, "samples": peaks},
    )  # fmt: skip


def _child(how: str, width: int) -> dict[str, float]:
    command = [sys.executable, __file__, how, str(width)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the step {how!r} failed: {last}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


class Steps:
    """Single steps on one window of the bundled text."""

    def __init__(self, width: int) -> None:
        import layerleap as ll
        from layerleap.act.learn.lessons import Demonstration, lesson
        from layerleap.act.learn.parameters import choose
        from layerleap.stream.windows import token_stream

        self.model = ll.load(MODEL)
        ids = token_stream(self.model, "wikipedia", width)
        self.lesson = lesson(self.model, [Demonstration(tuple(ids.tolist()))])
        self.chosen = choose(self.model, PARAMETERS)
        known = dict(self.model.model.named_parameters())
        self.values = {name: known[name].detach() for name in self.chosen.names}

    def run(self, how: str) -> None:
        """One step; the parameters themselves change, so that none are held twice."""
        if how == "plain":
            self._plain()
            return
        from layerleap.act.learn.gradients import gradients
        from layerleap.act.learn.trainer import SHARE

        options: dict[str, Any] = {"how": "full"}
        if how != "full":
            share = 1.0 if how.endswith("all positions") else SHARE
            options = {"how": "layer-causal", "share": share}

        def take(name: str, gradient: Any) -> None:
            self.values[name].sub_(gradient, alpha=1e-9)

        gradients(self.model, self.chosen, self.values, self.lesson, take=take, **options)

    def _plain(self) -> None:
        """As anybody would write it with transformers and torch."""
        import torch

        model: Any = self.model.model
        trained = [p for n, p in model.named_parameters() if n in self.values]
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
        ids = self.lesson.inputs["input_ids"]
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        with torch.no_grad():
            for parameter in trained:
                parameter.sub_(parameter.grad, alpha=1e-9)
                parameter.grad = None


def _time_row(width: int, rounds: int) -> Row:
    steps = Steps(width)
    for how in HOWS:
        steps.run(how)  # what is looked up about a model once does not count
    sides = {how: lambda _, how=how: steps.run(how) for how in HOWS}
    samples = interleave(sides, rounds)
    middle = {how: median(found) for how, found in samples.items()}
    note = (
        f"seconds of a step on {width} tokens, gradients of all blocks: layer-causal with losses "
        "below the last layer at one position in 16, the default of ll.finetune (ours), against "
        "the library's own loss and backward (peer)"
    )
    return Row(
        "layer_causal_time", middle["layer-causal"], middle["plain"], "s", 1.5, "<=",
        detail={"note": note, "all": middle, "samples": samples},
    )  # fmt: skip


def _loss_row(smoke: bool) -> Row:
    """Held-out losses on the bundled text, by step and by training time; each at its best rate."""
    import layerleap as ll

    model = ll.load(MODEL)
    steps, every = (2, 1) if smoke else (40, 8)
    options: dict[str, Any] = {
        "steps": steps, "check_every": every, "batch": 1, "max_tokens": 32 if smoke else 256,
        "tested_tokens": 64 if smoke else 2048, "progress": False,
    }  # fmt: skip
    last_blocks = [f"{path}.*" for path in model.blocks[-LAST_BLOCKS:]]
    ways: dict[str, dict[str, Any]] = {
        "full": {"how": "full", "parameters": PARAMETERS},
        "full, last blocks": {"how": "full", "parameters": last_blocks},
        "layer-causal": {"how": "layer-causal", "parameters": PARAMETERS},
    }
    if not smoke:  # which would fit a bank first
        lens = ll.Lens(model, ll.default_bank(model, progress=False))
        ways["layer-causal, shortcuts"] = {**ways["layer-causal"], "lens": lens}
    rates = RATES[:1] if smoke else RATES
    runs = {
        name: {
            rate: ll.finetune(model, "news", learning_rate=rate, **way, **options).record
            for rate in rates
        }
        for name, way in ways.items()
    }
    best = {name: min(by.values(), key=lambda r: r[-1]["held_out"]) for name, by in runs.items()}
    shortest = min(record[-1]["seconds"] for record in best.values())
    at_time = {
        name: [row for row in record if row["seconds"] <= shortest * 1.001][-1]["held_out"]
        for name, record in best.items()
    }
    start = best["full"][0]["held_out"]
    note = (
        f"held-out loss in nats on the news after {steps} steps of AdamW, each way at the better "
        f"of {RATES}: layer-causal (ours) against full back-propagation (peer), all blocks; "
        f"{start:.4f} before. 'full, last blocks' trains the last {LAST_BLOCKS} blocks alone, "
        "which takes about the memory of a layer-causal step. No bar was set for the loss: the "
        "row holds if layer-causal training did not make the model worse"
    )
    return Row(
        "layer_causal_loss", best["layer-causal"][-1]["held_out"], best["full"][-1]["held_out"],
        "nats", start, "<=", "ours",
        detail={
            "note": note, "at_equal_time": at_time, "start": start,
            "by_step": {n: {str(rate): r for rate, r in by.items()} for n, by in runs.items()},
        },
    )  # fmt: skip


def measure(how: str, width: int) -> dict[str, float]:
    """Peak memory of this process, and what one step added to what was there before."""
    steps = Steps(width)
    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: loading does not count
    before = _memory("VmRSS")
    steps.run(how)
    peak = _memory("VmHWM")
    return {"peak": peak, "before": before, "step": peak - before}


def _memory(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
