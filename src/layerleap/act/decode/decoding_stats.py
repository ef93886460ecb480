"""Statistics of a decoding run: passes, layers, drafts, seconds, and how exact the text is.

In: reports from the decoding loop. Out: `DecodingStats`, as numbers per text and per token.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Exactness = Literal["exact", "rounded", "approximate"]
EXACTNESS = {
    "exact": "every token is the full model's choice, up to the last digits of its logits",
    "rounded": "every token is the full model's choice, up to near-ties that rounding decides in "
    "this dtype",
    "approximate": "tokens may be read before the last layer",
}
# Of a text that is being written.
INTERNAL = {"max_tokens", "draft_room", "compared", "agreed", "full_token", "current_layer"}
COSTS = {
    "measured": "the cost of passes measured",
    "this process": "the cost of passes known from before",
    "cache": "the cost of passes read from the cache",
    "given": "the cost of passes given",
}


@dataclass(frozen=True)
class Preparation:
    """What was prepared on the way, for this text and all later ones."""

    after: int  # new tokens that came first
    seconds: float
    packed: str | None  # the layout of the packed weights; None if they are not packed
    cost: str | None  # where the cost of passes is from; None if no drafts are drawn

    def __str__(self) -> str:
        steps = ["weights packed"] * bool(self.packed) + ([COSTS[self.cost]] if self.cost else [])
        details = f": {', '.join(steps)}" if steps else ""
        return f"{self.seconds:.1f} s of preparation after {self.after} tokens{details}"


@dataclass
class DecodingStats:
    """How one text was generated."""

    n_layers: int
    exactness: Exactness
    max_tokens: int  # limit of new tokens, by request and by the positions of the model
    policy: str | None = None  # how keys and values of skipped layers are made, if any
    layers: list[int] = field(default_factory=list)  # per new token: the layer it was read at
    drafted: list[bool] = field(default_factory=list)  # per new token: was it an accepted draft?
    passes: int = 0  # forward passes after the prompt
    drafts: int = 0  # draft tokens that the full model verified
    accepted: int = 0
    ties: int = 0  # near-ties that a pass of its own decided
    compared: int = 0  # tokens that were compared with the full model's choice after the same text
    agreed: int = 0  # those that were its choice
    departs_at: int | None = None  # the first that was not, from 0: there the two texts part
    full_token: int | None = None  # what the full model chooses there
    prompt_seconds: float = 0.0
    seconds: float = 0.0  # after the prompt, without preparation
    current_layer: int | None = None  # where the token that is being chosen was read
    texts_per_pass: int = 1  # texts that share the passes, and so the seconds
    fallback: str | None = None  # why transformers' own loop wrote the text, if it did
    preparation: Preparation | None = None  # made while this text was written, if any
    _started: float = field(default_factory=time.perf_counter, repr=False)

    @property
    def draft_room(self) -> int:
        """How many tokens may follow the next one."""
        return max(0, self.max_tokens - self.tokens - 1)

    def record_pass(
        self, *, tokens: int, drafts: int = 0, layer: int, is_prompt: bool = False
    ) -> None:
        """Record a pass that gave `tokens` tokens, all but the first of them drafted."""
        now = time.perf_counter()
        if is_prompt:
            self.prompt_seconds = now - self._started
            self._started = now
        else:
            self.passes += 1
            self.seconds = now - self._started
        self.drafts += drafts
        self.accepted += max(0, tokens - 1)
        self.layers += [layer] * tokens
        self.drafted += [n > 0 for n in range(tokens)]

    def record_tie(self, layer: int) -> None:
        """Record a near-tie, and the pass of its own that decided it."""
        self.ties += 1
        self.record_pass(tokens=1, layer=layer)

    def record_preparation(self, made: Preparation, exactness: Exactness) -> None:
        """Record what was prepared, and what holds for the text from now on."""
        self.preparation = made
        self._started += made.seconds
        if self.exactness == "exact":  # so far
            self.exactness = exactness

    def start_sharing(self, texts: int) -> None:
        """All prompts have been read: from now on each pass serves this many texts."""
        self.texts_per_pass, self._started = texts, time.perf_counter()

    def record_end(self) -> None:
        """Count the time of what had to run after the last token."""
        self.seconds = time.perf_counter() - self._started

    def record_comparison(self, ours: Sequence[int], full: Sequence[int]) -> None:
        """Record the chosen tokens and what the full model chooses after the same text."""
        pairs = zip(ours, full, strict=True)
        departures = [n for n, (written, chosen) in enumerate(pairs) if written != chosen]
        self.compared, self.agreed = len(ours), len(ours) - len(departures)
        if departures:
            self.departs_at, self.full_token = departures[0], full[departures[0]]

    @property
    def tokens(self) -> int:
        """Number of new tokens."""
        return len(self.layers)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second, not counting the first, which waits for the prompt."""
        return (self.tokens - 1) / self.seconds if self.seconds and self.tokens > 1 else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Mean number of tokens per pass, not counting the prompt."""
        return (self.tokens - 1) / self.passes if self.passes else None

    @property
    def acceptance_rate(self) -> float | None:
        """Fraction of draft tokens that the full model accepted."""
        return self.accepted / self.drafts if self.drafts else None

    @property
    def agreement(self) -> float | None:
        """Fraction of tokens that are the full model's choice; None if not measured."""
        early = sum(layer < self.n_layers for layer in self.layers)
        if self.exactness != "approximate":
            return 1.0 if self.exactness == "exact" else None
        if self.compared < early:
            return None  # some early tokens were not compared
        return 1 - (self.compared - self.agreed) / self.tokens if self.tokens else None

    @property
    def tokens_in_common(self) -> int | None:
        """How many tokens the text begins with that the full model would write; None if unknown.

        After the first token that departs, agreement is with what the full model chooses after a
        text that it would not have written itself.
        """
        if self.agreement is None:
            return None
        return self.tokens if self.departs_at is None else self.departs_at

    @property
    def mean_layer(self) -> float | None:
        """Mean layer at which tokens were read."""
        return sum(self.layers) / self.tokens if self.tokens else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        properties = [name for name, one in vars(type(self)).items() if isinstance(one, property)]
        values = asdict(self) | {name: getattr(self, name) for name in properties}
        values.pop("_started")
        return {name: value for name, value in values.items() if name not in INTERNAL}

    def __str__(self) -> str:
        texts = self.texts_per_pass
        parts = [f"{self.tokens} tokens" + f" in passes shared by {texts} texts" * (texts > 1)]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.mean_layer is not None:
            parts.append(f"{self.mean_layer:.1f} of {self.n_layers} layers per token")
        if self.drafts:
            parts.append(
                f"{self.tokens_per_pass:.2f} tokens per pass, {self.acceptance_rate:.0%} of drafts "
                "accepted"
            )
        common = self.tokens_in_common
        if self.exactness == "approximate" and common is None:
            parts.append("agreement not measured")
        elif self.exactness == "approximate" and common == self.tokens:
            parts.append("agreement 100%: the full model writes the same text")
        elif self.exactness == "approximate":
            parts.append(
                f"the first {common} are the full model's own text, agreement {self.agreement:.1%} "
                "with its choices after this text"
            )
        parts.append(EXACTNESS[self.exactness])
        if self.fallback is not None:
            parts.append(f"written by transformers' own loop because of {self.fallback}")
        if self.preparation is not None:
            parts.append(str(self.preparation))
        return ", ".join(parts)
