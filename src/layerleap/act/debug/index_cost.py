"""What building a concept index will take: seconds by phase, and megabytes.

In: a wrapped model. Out: `IndexCost`, from two short measurements on this machine: value vectors
read in the vocabulary, and one pass. It is an estimate for people who wait: half or twice as long
is possible.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile

import torch

from layerleap.errors import ModelRefused
from layerleap.lens.vocabulary.clusters import EPOCHS, default_number
from layerleap.lens.vocabulary.ends import both_ends
from layerleap.lens.vocabulary.index_settings import IndexSettings, default_path, reference_text
from layerleap.lens.vocabulary.store import finished_steps
from layerleap.models.hooks.capture import capture
from layerleap.models.inputs import padded
from layerleap.models.transformer import Transformer
from layerleap.models.weights import FeedForward, feed_forwards, unembedding
from layerleap.stream.examples import longest_input

# By phase, as progress names it, the step that `build` keeps when it is over.
STEPS = {
    "reading neurons": "block",
    "naming tokens": "tokens",
    "sorting tokens": "postings",
    "natural ranges": "ranges",
    "clusters": "clusters",
}
PROBE_PRODUCTS = 1e9  # multiplications of the probe: some tens of milliseconds
PASS_TOKENS = 64  # of the pass that is timed
TEXT_TOKENS = 30  # of a sentence, about
TOKEN_SECONDS, ENTRY_SECONDS = 5e-5, 1.5e-6  # to name a token, and to sort one of a vector's end
CLUSTER_SPEED = 0.3  # products of k-means, which also gathers its rows, over those of `both_ends`
VECTOR_BYTES, ENTRY_BYTES, TOKEN_BYTES = 140, 11, 150  # as found in finished files


@dataclass(frozen=True)
class IndexCost:
    """The estimate."""

    seconds: Mapping[str, float]  # by phase, in order
    left: float  # seconds without what an interrupted build has kept
    megabytes: float  # of the file

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    def reached(self, phase: str, done: int, total: int | None) -> float | None:
        """Seconds of work behind a report of progress; None if the phase is not one of these."""
        if phase not in self.seconds:
            return None
        earlier = takewhile(lambda name: name != phase, self.seconds)
        before = sum(self.seconds[name] for name in earlier)
        return before + self.seconds[phase] * min(1.0, done / max(1, total or 1))

    def __str__(self) -> str:
        return f"about {duration(self.left)}, {self.megabytes:.0f} MB"


def duration(seconds: float) -> str:
    """An estimate in words."""
    if seconds < 55:
        return f"{max(5, 5 * round(seconds / 5))} seconds"
    minutes = round(seconds / 60)
    return "1 minute" if minutes == 1 else f"{minutes} minutes"


def index_cost(transformer: Transformer, settings: IndexSettings | None = None) -> IndexCost:
    """What `ll.index(model)` takes on this machine.

    Raises `CannotWrite` if another process is building it now.
    """
    settings = settings or IndexSettings()
    target = default_path(transformer, settings)
    finished = finished_steps(target, settings.to_dict(transformer))
    ffns = [ffn for ffn in feed_forwards(transformer).values() if isinstance(ffn, FeedForward)]
    if not ffns:
        raise ModelRefused(f"{transformer.identity.name} has no neurons to index")
    seconds = _seconds(transformer, settings, ffns)
    left = sum(amount * (STEPS[phase] not in finished) for phase, amount in seconds.items())
    n_blocks = sum(step.startswith("block") for step in finished)
    left -= seconds["reading neurons"] * n_blocks / transformer.n_layers
    n_tokens = len(unembedding(transformer))
    per_vector = VECTOR_BYTES + 2 * min(settings.top, n_tokens) * ENTRY_BYTES
    n_bytes = sum(ffn.n_neurons for ffn in ffns) * per_vector + n_tokens * TOKEN_BYTES
    return IndexCost(seconds, left, n_bytes / 1e6)


@torch.no_grad()
def _seconds(
    transformer: Transformer, settings: IndexSettings, ffns: list[FeedForward]
) -> dict[str, float]:
    """Seconds by phase."""
    matrix = unembedding(transformer)
    n_tokens, width = matrix.shape
    top = min(settings.top, n_tokens)
    n_rows = max(8, min(256, int(PROBE_PRODUCTS / matrix.numel())))
    n_vectors = sum(ffn.n_neurons for ffn in ffns)
    values = ffns[0].written(transformer).float()[:n_rows]
    per_vector = _timed(lambda: both_ends(values, matrix, top)) / len(values)
    number = default_number(n_vectors) if settings.clusters is None else settings.clusters
    sorting = n_vectors * 2 * top * ENTRY_SECONDS
    per_product = per_vector / (n_tokens * width) / CLUSTER_SPEED
    return {
        "reading neurons": n_vectors * per_vector,
        "naming tokens": n_tokens * TOKEN_SECONDS,
        "sorting tokens": sorting,
        "natural ranges": _ranges_seconds(transformer, settings),
        "clusters": (EPOCHS + 1) * n_vectors * number * width * per_product + sorting / 2,
    }


def _ranges_seconds(transformer: Transformer, settings: IndexSettings) -> float:
    """Seconds of the passes over the reference text, if there is one."""
    text = settings.text or reference_text(transformer)[0]
    if text is None or not settings.n_texts:
        return 0.0
    n_tokens = min(PASS_TOKENS, longest_input(transformer) or PASS_TOKENS)
    inputs = padded(transformer, [[index % transformer.d_vocab for index in range(n_tokens)]])
    last = (transformer.n_layers,)
    per_token = _timed(lambda: capture(transformer, inputs, layers=last)) / n_tokens
    return settings.n_texts * TEXT_TOKENS * per_token


def _timed(work: Callable[[], object]) -> float:
    """Seconds of the second run: the first one also fills caches."""
    work()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
