"""Pairs of texts for encoder-decoders: what the encoder reads, and what the decoder writes.

In: a .tsv file, a .jsonl file with two fields, or (source, target) tuples; and the model.
Out: `Example`s of the decoder, each with the encoder's token ids.

Pairs are not cut into sentences: a pair is one text.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from layerleap.errors import BadSettings, BadText
from layerleap.models.inputs import encode_pair
from layerleap.models.transformer import Transformer
from layerleap.stream.documents import LINES_SUFFIXES, Document
from layerleap.stream.examples import Census, Example, Sampling, longest_input
from layerleap.stream.positions import Positions, parse_positions
from layerleap.stream.split import Side, is_held_out, on_side

FIELDS = "source:target"  # names of the two fields of a record


def iter_pairs(source: Any, *, field: str = FIELDS) -> Iterator[tuple[Document, str]]:
    """Each source text as a document, and its target.

    Args:
        source: a .tsv file (source, tab, target on each line), a .jsonl file of records, or
            tuples.
        field: the two fields of a record, separated by a colon.
    """
    if not isinstance(source, str | Path):
        return _checked(source, "the list of pairs")
    path = Path(source).expanduser()
    if not path.is_file():
        raise BadText(
            f"there is no file {source}; an encoder-decoder reads pairs of texts from a .tsv or "
            ".jsonl file"
        )
    if path.suffix == ".tsv":
        return _checked(_from_tsv(path), str(source))
    if path.suffix in LINES_SUFFIXES:
        return _checked(_from_records(path, field), str(source))
    raise BadText(
        f"{source} is not a file of pairs; expected .tsv (source, tab, target) or .jsonl with the "
        f"fields {field}"
    )


def _checked(pairs: Iterable[Any], label: str) -> Iterator[tuple[Document, str]]:
    number = 0
    for number, pair in enumerate(pairs, start=1):
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) and text.strip() for text in pair):
            raise BadText(
                f"item {number} of {label} is {pair!r:.60}; expected a source text and a target "
                "text, both not empty"
            )
        source, target = (text.strip() for text in pair)
        yield Document(f"pair#{number}", source), target
    if not number:
        raise BadText(f"{label} contains no pair of texts")


def _from_tsv(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf8", newline="") as lines:
            rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
            yield from (row for row in rows if row)
    except (OSError, UnicodeDecodeError) as error:
        raise BadText(f"{path} cannot be read as text ({error})") from error


def _from_records(path: Path, field: str) -> Iterator[Any]:
    names = FIELDS if field == "text" else field
    first, colon, second = names.partition(":")
    if not colon:
        raise BadSettings(f"field {field!r} names one field; expected two, as in {FIELDS!r}")
    try:
        with path.open(encoding="utf8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    record = json.loads(line)
                    if not isinstance(record, dict) or not {first, second} <= record.keys():
                        raise BadText(
                            f"line {number} of {path} has no fields {first!r} and {second!r}; name "
                            "its fields with field='source:target'"
                        )
                    yield record[first], record[second]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadText(f"{path} cannot be read as lines of JSON ({error})") from error


def iter_pair_examples(
    transformer: Transformer,
    source: Any,
    sampling: Sampling,
    *,
    side: Side = "fit",
    n_texts: int | None = None,
    census: Census | None = None,
    ridge_share: float = 0.0,
) -> Iterator[Example]:
    """The examples of one side of a source of pairs; a hash of each source text decides its side.

    The arguments are those of `iter_examples`.
    """
    transformer.need_tokenizer()
    census = census if census is not None else Census()
    policy = parse_positions(sampling.positions, sampling.seed)

    def examples() -> Iterator[Example]:
        for number, (document, target) in enumerate(iter_pairs(source, field=sampling.field)):
            held_out = is_held_out(document, share=sampling.held_out, seed=sampling.seed)
            if on_side(side, held_out):
                held_back = is_held_out(document, share=ridge_share, seed=sampling.seed + 1)
                yield pair_example(
                    transformer, (document.text, target), number, policy, sampling, held_back
                )

    for example in islice(examples(), n_texts):
        census.documents += 1
        census.note(example)
        yield example


def pair_example(
    transformer: Transformer,
    pair: tuple[str, str],
    number: int,
    policy: Positions,
    sampling: Sampling,
    held_back: bool,
) -> Example:
    """One pair, with the positions of the decoder to read and the tokens that follow them."""
    limit = min(sampling.max_tokens, longest_input(transformer))
    encoder, decoder = (ids[:limit] for ids in encode_pair(transformer, *pair))
    keep = policy.choose(range(len(decoder)), "\t".join(pair))
    gold = [decoder[p + 1] if p + 1 < len(decoder) else -1 for p in keep]
    return Example(
        number, tuple(decoder), tuple(keep), held_back, tuple(gold), source=tuple(encoder)
    )
