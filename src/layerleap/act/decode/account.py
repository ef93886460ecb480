"""What a decoding run did: passes, layers, guesses, seconds; and how exact its text is.

In: notes from the loop. Out: `Account`, in words, as plain numbers, and per token for pictures.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

Exactness = Literal["exact", "rounded", "approximate"]
EXACTNESS = {
    "exact": "identical to the full model's own text",
    "rounded": "the full model's own text up to near-ties: passes over several tokens round "
    "otherwise in this dtype",
    "approximate": "tokens may be read before the last layer",
}


@dataclass
class Account:
    """One text, as it was written."""

    n_layers: int
    exactness: Exactness
    most_tokens: int  # that may be written
    policy: str | None = None  # how keys and values of skipped layers are made, if any are
    layers: list[int] = field(default_factory=list)  # per token written: where it was read
    guessed: list[bool] = field(default_factory=list)  # per token: had it been guessed?
    passes: int = 0
    tried: int = 0  # guesses that were judged
    right: int = 0
    agreed: int = 0  # of `compared` early readings, those that were the full model's choice
    compared: int = 0
    prompt_seconds: float = 0.0
    seconds: float = 0.0  # after the prompt
    reading: int | None = None  # where the token that is being chosen was read
    abreast: int = 1  # texts that share the passes, and so the seconds
    _started: float = field(default_factory=time.perf_counter, repr=False)

    def room(self, written: int) -> int:
        """How many tokens may follow the next one."""
        return self.most_tokens - written - 1

    def passed(self, *, tokens: int, tried: int = 0, layer: int, is_prompt: bool = False) -> None:
        """One pass gave `tokens` tokens, all but the first of them guessed."""
        now = time.perf_counter()
        if is_prompt:
            self.prompt_seconds = now - self._started
            self._started = now
        else:
            self.passes += 1
            self.seconds = now - self._started
        self.tried += tried
        self.right += tokens - 1
        self.layers += [layer] * tokens
        self.guessed += [False] + [True] * (tokens - 1)

    def share(self, texts: int) -> None:
        """All prompts have been read: from here on, passes serve so many texts."""
        self.abreast, self._started = texts, time.perf_counter()

    def closed(self) -> None:
        """What was left to run has been run: it belongs to the time that the text took."""
        self.seconds = time.perf_counter() - self._started

    def compare(self, agreed: int, compared: int) -> None:
        """Early readings were held against what the full model says."""
        self.agreed, self.compared = self.agreed + agreed, self.compared + compared

    @property
    def tokens(self) -> int:
        """Tokens written."""
        return len(self.layers)

    @property
    def per_second(self) -> float | None:
        """Tokens a second after the first, which waits for the prompt."""
        return (self.tokens - 1) / self.seconds if self.seconds and self.tokens > 1 else None

    @property
    def per_pass(self) -> float | None:
        """Tokens that a pass gave."""
        return (self.tokens - 1) / self.passes if self.passes else None

    @property
    def acceptance(self) -> float | None:
        """Share of guesses that were right."""
        return self.right / self.tried if self.tried else None

    @property
    def agreement(self) -> float | None:
        """Share of tokens that are the full model's choice, of those that were held against it."""
        early = sum(layer < self.n_layers for layer in self.layers)
        if self.exactness != "approximate":
            return 1.0 if self.exactness == "exact" else None
        if self.compared < early:
            return None  # some were never held against it
        return 1 - (self.compared - self.agreed) / self.tokens if self.tokens else None

    @property
    def mean_layer(self) -> float | None:
        """Layers that a written token was read at, on average."""
        return sum(self.layers) / self.tokens if self.tokens else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "tokens": self.tokens, "passes": self.passes, "tokens_per_second": self.per_second,
            "tokens_per_pass": self.per_pass, "mean_layer": self.mean_layer,
            "n_layers": self.n_layers, "tried": self.tried, "right": self.right,
            "acceptance": self.acceptance, "agreement": self.agreement,
            "exactness": self.exactness, "policy": self.policy, "abreast": self.abreast,
            "prompt_seconds": self.prompt_seconds, "seconds": self.seconds,
            "layers": list(self.layers), "guessed": list(self.guessed),
        }  # fmt: skip

    def __str__(self) -> str:
        said = [f"{self.tokens} tokens"]
        if self.abreast > 1:
            said = [f"{self.tokens} tokens in passes shared by {self.abreast} texts"]
        if self.per_second is not None:
            said.append(f"{self.per_second:.1f} tokens/s")
        if self.mean_layer is not None:
            said.append(f"{self.mean_layer:.1f} of {self.n_layers} layers per token")
        if self.tried:
            said.append(
                f"{self.per_pass:.2f} tokens per pass, {self.acceptance:.0%} of guesses right"
            )
        if self.exactness == "approximate":
            found = self.agreement
            said.append("agreement not measured" if found is None else f"agreement {found:.1%}")
        said.append(EXACTNESS[self.exactness])
        return ", ".join(said)
