"""How a concept index is built and asked, and where it is kept; checked without torch."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerleap.arguments import check_fields
from layerleap.errors import BadSettings
from layerleap.files import cache_root

if TYPE_CHECKING:
    from layerleap.models.transformer import Transformer

SearchSide = Literal["both", "promoted", "suppressed"]
Space = Literal["any", "with", "without"]
Norms = Literal["skip", "fold"]
Inverse = Literal["transpose", "pseudo"]
Form = Literal["vo", "qk"]
Largest = Literal["value", "magnitude", "negative"]
MOST_WORDS, LONGEST_WORD = 32, 64  # of a query
METHOD = 3  # raise it when the same weights would give another index: it invalidates caches
MOST_TOKENS = 250  # per end: ranks are kept in one byte


@dataclass(frozen=True)
class IndexSettings:
    """What an index depends on besides the weights; plain values, written into the file."""

    top: int = 50  # tokens per end of a vector
    text: str | None = None  # reference text of natural ranges; None for the model's default
    n_texts: int = 200  # sentences of it; 0 for no ranges
    clusters: int | None = None  # 0 for none; None for one per 40 vectors
    seed: int = 0  # of the clusters

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.top <= MOST_TOKENS:
            raise BadSettings(f"top is {self.top}; expected 1 to {MOST_TOKENS}")
        if self.n_texts < 0:
            raise BadSettings(f"n_texts is {self.n_texts}; expected 0 (no ranges) or more")
        if self.clusters is not None and self.clusters < 0:
            raise BadSettings(f"clusters is {self.clusters}; expected 0 (none) or more, or None")

    def to_dict(self, transformer: "Transformer") -> dict[str, Any]:
        """With the weights and the method: all that decides what the file holds."""
        fingerprint = transformer.identity.fingerprint
        return {"method": METHOD, "fingerprint": fingerprint, **asdict(self)}


def default_path(transformer: "Transformer", settings: IndexSettings) -> Path:
    """The file in the cache for these weights and settings."""
    transformer.refresh()
    key = json.dumps(settings.to_dict(transformer), sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    return index_folder() / f"{transformer.identity.fingerprint}-{digest}.sqlite"


def index_folder() -> Path:
    """Where the cached indexes are."""
    return cache_root() / "indexes"


def text_name(text: Any) -> str | None:
    """A text in the settings: its name, or a fingerprint of given texts."""
    if text is None or isinstance(text, str):
        return text
    if isinstance(text, Path):
        return str(text)
    if isinstance(text, list | tuple):
        return f"given texts {hashlib.sha256(repr(text).encode()).hexdigest()[:16]}"
    # Nothing tells two of them apart, so an index on one must not be taken for another's.
    raise BadSettings(
        f"a reference text of type {type(text).__name__} has no name; give a list of texts, a file "
        "or the name of a text"
    )


def reference_text(transformer: "Transformer") -> tuple[str | None, str]:
    """The default text for natural ranges, or None and why there is none."""
    from layerleap.stream.batches import modality  # settings are checked without torch
    from layerleap.stream.examples import reads_pairs
    from layerleap.stream.source import default_text

    name = transformer.identity.name
    if modality(transformer) != "text" or reads_pairs(transformer):
        return None, f"no text is bundled for {name}, which does not read single texts"
    if transformer.tokenizer is None:
        return None, f"{name} has no tokenizer"
    text = default_text(transformer)
    if text == "generated":
        return None, f"no text is bundled for {name}, which does not read English"
    return text, ""


def split_query(query: str) -> list[str]:
    """The words of a query, each once."""
    query = query.encode("utf8", "replace").decode("utf8")  # lone surrogates cannot be stored
    parts = [part for part in re.split(r"[\s,;]+", query) if part] or query.split()
    first = {part.casefold(): part for part in reversed(parts)}  # the first spelling of each
    words = [first[key] for key in dict.fromkeys(map(str.casefold, parts))]
    if not words:
        raise BadSettings("the query is empty; expected one or more words, such as 'guitar music'")
    if len(words) > MOST_WORDS or max(map(len, words)) > LONGEST_WORD:
        raise BadSettings(
            f"the query has {len(words)} words, the longest of {max(map(len, words))} characters; "
            f"expected at most {MOST_WORDS} words of {LONGEST_WORD} characters"
        )
    return words
