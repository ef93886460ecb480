"""What a layer-causal step costs against plain back-propagation, and what it gives.

Memory: each step runs in a process of its own, `python benchmarks/layer_causal.py HOW TOKENS`, on
one window of the bundled text; plain back-propagation is the library's own loss and backward pass.
Both compute the gradients of everything inside the blocks and take a plain step with them.

    layer_causal_memory     what the step adds to the memory of the process, at its peak; the peak
                            of the whole process, libraries and model included, is in the detail
    layer_causal_time       seconds of a step of `ll.finetune`, which reads the losses below the
                            last layer at one position in 16; the paper's own step, at every
                            position, is in the detail
    layer_causal_loss       held-out loss after `ll.finetune` both ways for the same time; also of
                            plain training with the same memory, which is that of as many of the
                            last blocks as take the peak of layer-causal training, both measured in
                            processes of their own
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from common import MODEL, Row, child, interleave, median

from layerleap.memory import give_back

WIDTH, PARAMETERS = 512, "blocks"
RATES = (1e-5, 1e-4)
SECONDS = 40.0  # of training in each run: every schedule ends then
ABOVE = 1.05  # times the peak of layer-causal training still counts as the same memory
FINETUNE = "finetune"  # what a child measures the memory of, beside the steps of HOWS
HOWS = ("plain", "layer-causal", "layer-causal, all positions", "full")


def run(*, smoke: bool) -> list[Row]:
    """Memory, time and what is learned."""
    width = 64 if smoke else WIDTH
    peaks = {how: [child(__file__, how, width) for _ in range(1 if smoke else 2)] for how in HOWS}
    return [_memory_row(peaks, width), _time_row(width, rounds=1 if smoke else 5), _loss_row(smoke)]


def _memory_row(peaks: dict[str, list[dict[str, float]]], width: int) -> Row:
    added, whole = (
        {how: median(sample[key] for sample in samples) for how, samples in peaks.items()}
        for key in ("step", "peak")
    )
    note = (
        "peak resident memory that a step adds to the loaded model: gradients of all blocks and a "
        f"plain step, one window of {width} tokens; layer-causal at all positions (ours) against "
        "the library's own loss and backward (peer); 'full' is plain back-propagation of "
        "layerleap, which makes logits a few rows at a time"
    )
    detail = {"note": note, "added": added, "process": whole, "samples": peaks}
    sides = (added[how] for how in ("layer-causal, all positions", "plain"))
    return Row("layer_causal_memory", *sides, "MiB", at_most=0.5, detail=detail)


class Steps:
    """Single steps on one window of the bundled text."""

    def __init__(self, width: int) -> None:
        import layerleap as ll
        from layerleap.act.learning.lessons import Demonstration, lesson
        from layerleap.act.learning.parameters import choose
        from layerleap.stream.tokens import token_stream

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
        from layerleap.act.fine_tuning import SHARE
        from layerleap.act.learning.gradients import gradients

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
    middle = {how: median(seconds) for how, seconds in samples.items()}
    note = (
        f"seconds of a step on {width} tokens, gradients of all blocks: layer-causal with losses "
        "below the last layer at one position in 16, the default of ll.finetune (ours), against "
        "the library's own loss and backward (peer)"
    )
    return Row(
        "layer_causal_time",
        middle["layer-causal"],
        middle["plain"],
        "s",
        at_most=1.5,
        detail={"note": note, "all": middle, "samples": samples},
    )


def nearest_blocks(
    target: float, peak_of: Callable[[int], float], most: int
) -> tuple[int, dict[int, float]]:
    """How many last blocks take the peak nearest to the target, and all peaks measured.

    At most `ABOVE` times the target, unless one block takes more. Peaks grow with blocks, so the
    number is found by halving.
    """
    peaks: dict[int, float] = {}
    low, high = 1, most
    while low <= high:
        middle = (low + high) // 2
        peaks[middle] = peak_of(middle)
        if peaks[middle] <= ABOVE * target:
            low = middle + 1
        else:
            high = middle - 1
    fitting = [n for n in peaks if peaks[n] <= ABOVE * target]
    return min(fitting, key=lambda n: abs(peaks[n] - target), default=1), peaks


def _options(smoke: bool) -> dict[str, Any]:
    return {"batch": 1, "max_tokens": 32 if smoke else 256, "progress": False}


def _way(model: Any, how: str, blocks: int) -> dict[str, Any]:
    """Options of `ll.finetune` that train so many of the last blocks."""
    if blocks == model.n_layers:
        return {"how": how, "parameters": PARAMETERS}
    return {"how": how, "parameters": [f"{path}.*" for path in model.blocks[-blocks:]]}


def _peaks(model: Any, smoke: bool) -> dict[str, Any]:
    """Peak memory that `ll.finetune` adds, by way, and how many blocks take that of layer-causal.

    A first run of the children counts: each is a process of its own.
    """
    last, width = model.n_layers, _options(smoke)["max_tokens"]

    def peak(how: str, blocks: int) -> float:
        return child(__file__, FINETUNE, how, blocks, width)["step"]

    causal, full = peak("layer-causal", last), peak("full", last)
    if smoke:
        return {"layer-causal": causal, "full": full, "blocks": 2, "by_blocks": {}}
    blocks, by_blocks = nearest_blocks(causal, lambda n: peak("full", n), last - 1)
    return {"layer-causal": causal, "full": full, "blocks": blocks, "by_blocks": by_blocks}


def _slices(smoke: bool) -> tuple[list[str], list[str]]:
    """Two halves of the news: rates are chosen on one, the losses of the other are reported."""
    from layerleap.stream.documents import iter_documents

    texts = [article.text for article in islice(iter_documents("news"), 100 if smoke else 4000)]
    return texts[::2], texts[1::2]


def _seconds(finetune: Any, ways: dict[str, dict[str, Any]], text: list[str], steps: int) -> Any:
    """Seconds of a step, by way; the first one, which looks things up, does not count."""
    seconds = {}
    for name, way in ways.items():
        record = finetune(text=text, steps=steps, check_every=1, tested_tokens=0, **way).record
        ends = [row["seconds"] for row in record][1:]
        seconds[name] = median(b - a for a, b in pairwise(ends))
    return seconds


def _loss_row(smoke: bool) -> Row:
    """Held-out losses after the same time of training; each way at its best rate."""
    import layerleap as ll

    model = ll.load(MODEL)
    peaks = _peaks(model, smoke)
    few = f"full, last {peaks['blocks']} blocks"
    ways: dict[str, dict[str, Any]] = {
        "full": _way(model, "full", model.n_layers),
        few: _way(model, "full", peaks["blocks"]),
        "layer-causal": _way(model, "layer-causal", model.n_layers),
    }
    if not smoke:  # which would fit a bank first
        lens = ll.Lens(model, ll.default_bank(model, progress=False))
        ways["layer-causal, shortcuts"] = {**ways["layer-causal"], "lens": lens}
    finetune = partial(ll.finetune, model, **_options(smoke))
    chosen_on, reported = _slices(smoke)
    seconds = _seconds(finetune, ways, chosen_on, 3 if smoke else 6)
    steps = {n: 2 if smoke else max(2, round(SECONDS / step)) for n, step in seconds.items()}

    def trained(name: str, text: list[str], rate: float) -> Any:
        how = {"steps": steps[name], "check_every": steps[name], "learning_rate": rate}
        tested = 64 if smoke else 2048
        return finetune(text=text, tested_tokens=tested, **how, **ways[name]).record

    rates = RATES[:1] if smoke else RATES
    search = {
        name: {rate: trained(name, chosen_on, rate)[-1]["held_out"] for rate in rates}
        for name in ways
    }
    best = {name: min(by, key=lambda rate: by[rate]) for name, by in search.items()}
    records = {name: trained(name, reported, best[name]) for name in ways}
    loss = {name: record[-1]["held_out"] for name, record in records.items()}
    start = records["full"][0]["held_out"]
    note = (
        f"held-out loss in nats on half of the news after about {SECONDS:.0f} s of training with "
        f"AdamW, each way with as many steps as take that time, at the better of {RATES} on the "
        f"other half: layer-causal (ours) against full back-propagation (peer), all blocks; "
        f"{start:.4f} before. '{few}' is plain training with the peak memory nearest to that of "
        f"layer-causal training, at most {ABOVE} times as much. No bar was set for the loss: the "
        "row holds if layer-causal training did not make the model worse"
    )
    detail = {
        "note": note,
        "losses": loss,
        "start": start,
        "rates": best,
        "steps": steps,
        "seconds": {name: record[-1]["seconds"] for name, record in records.items()},
        "step_seconds": seconds,
        "search": {n: {str(r): v for r, v in by.items()} for n, by in search.items()},
        "peak_mib": peaks,
    }
    sides = loss["layer-causal"], loss["full"]
    return Row("layer_causal_loss", *sides, "nats", at_most=start, detail=detail)


def measure(run_: Callable[[], object]) -> dict[str, float]:
    """Peak memory of this process, and what a run added to what was there before."""
    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: loading does not count
    before = _memory("VmRSS")
    run_()
    peak = _memory("VmHWM")
    return {"peak": peak, "before": before, "step": peak - before}


def measure_finetune(how: str, blocks: int, width: int) -> dict[str, float]:
    """Memory of two steps of `ll.finetune`: copies of parameters and the optimizer's state too."""
    import layerleap as ll

    model = ll.load(MODEL)
    text, _ = _slices(smoke=True)
    options = {**_options(smoke=False), "max_tokens": width, "steps": 2, "tested_tokens": 0}
    return measure(lambda: ll.finetune(model, text, **options, **_way(model, how, blocks)))


def _memory(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def main(words: list[str]) -> dict[str, float]:
    """What a child process measures."""
    if words[0] == FINETUNE:
        return measure_finetune(words[1], int(words[2]), int(words[3]))
    steps = Steps(int(words[1]))
    return measure(lambda: steps.run(words[0]))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
