"""Two prompts, token by token: the clean one, the corrupt one, and what is asked of them.

In: prompts as a user gives them, a metric, or records of many pairs. Out: `Pair`s whose tokens are
aligned; prompts of unequal length are refused with their tokens side by side.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerleap.act.metrics import log_probability, logit_difference
from layerleap.errors import BadSettings, BadText
from layerleap.lens.vocabulary.tokens import token_label
from layerleap.models.inputs import MASKED, as_inputs, without_padding
from layerleap.models.metric import Bound
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import longest_input
from layerleap.stream.records import opened, records_of


@dataclass(frozen=True, eq=False)
class Pair:
    """Arguments of the forward pass for both prompts, one text each."""

    clean: Mapping[str, Any]
    corrupt: Mapping[str, Any]
    tokens: Sequence[tuple[str, str]]  # labels by position; () where the model reads no tokens
    metric: Any
    n_answer: int = 0  # tokens behind both prompts, for a metric of several; they are no positions

    @property
    def ids(self) -> list[Any]:
        """The tokens of both, for a fingerprint."""
        sides = (self.clean, self.corrupt)
        return [one[name].tolist() for one in sides for name in sorted(one) if name.endswith("ids")]


def pair_of(transformer: Transformer, clean: Any, corrupt: Any, metric: Any) -> Pair:
    """Both prompts as arguments, continued with an answer of several tokens if it has one."""
    answer = Bound.of(transformer, metric).answer
    sides = [_arguments(transformer, prompt, answer) for prompt in (clean, corrupt)]
    name, n_answer = _ids_name(transformer), len(answer)
    if name not in sides[0]:
        return Pair(sides[0], sides[1], (), metric)
    ids = [side[name][0, : side[name].shape[1] - n_answer].tolist() for side in sides]
    labels = [[token_label(transformer, one).label for one in text] for text in ids]
    if len(ids[0]) != len(ids[1]):
        n, m = map(len, ids)
        shown = "\n".join(
            f"  {side:<8}{' | '.join(text)}"
            for side, text in zip(("clean", "corrupt"), labels, strict=True)
        )
        raise BadText(
            f"the prompts have {n} and {m} tokens; expected as many of each, so that every "
            f"position has its counterpart:\n{shown}"
        )
    if (n := len(ids[0]) + n_answer) > (limit := longest_input(transformer)):
        with_answer = " with the answer" if n_answer else ""
        raise BadText(f"the prompts{with_answer} have {n} tokens; this model reads at most {limit}")
    return Pair(sides[0], sides[1], list(zip(*labels, strict=True)), metric, n_answer)


def _ids_name(transformer: Transformer) -> str:
    return "decoder_input_ids" if transformer.model.config.is_encoder_decoder else "input_ids"


def _arguments(transformer: Transformer, prompt: Any, answer: Sequence[int]) -> dict[str, Any]:
    arguments = as_inputs(transformer, prompt)
    main = next(value for value in arguments.values() if isinstance(value, Tensor))
    if len(main) != 1:
        raise BadSettings(
            f"a side of a pair holds {len(main)} prompts; give many pairs as pairs=[(clean, "
            "corrupt), ...]"
        )
    name = _ids_name(transformer)
    mask = name.replace("input_ids", "attention_mask")
    _strip(transformer, arguments)
    for key, value in ((name, list(answer)), (mask, [1] * len(answer))):
        if answer and isinstance(own := arguments.get(key), Tensor):
            arguments[key] = torch.cat([own, torch.tensor([value]).to(own)], 1)
    return arguments


def _strip(transformer: Transformer, arguments: dict[str, Any]) -> None:
    """Take padding off both ends: positions count from the first real token."""
    for name, others in MASKED.items():
        mask, ids = arguments.get(name), arguments.get(others[0])
        beside = [
            key
            for key in (*others, "position_ids")
            if isinstance(own := arguments.get(key), Tensor)
            and own.shape[:2] == getattr(mask, "shape", None)
        ]
        if mask is None or not beside or not mask.any():
            continue
        real = mask[0].nonzero()[:, 0].tolist()
        start, stop = real[0], real[-1] + 1
        if ids is not None:
            stop = start + len(without_padding(transformer, ids[0, start:stop].tolist()))
        for key in (name, *beside):
            arguments[key] = arguments[key][:, start:stop]


def repeated(arguments: Mapping[str, Any], n: int) -> dict[str, Any]:
    """The same text n times."""
    return {
        key: value.expand(n, *value.shape[1:]).contiguous() if isinstance(value, Tensor) else value
        for key, value in arguments.items()
    }


def pairs_given(pairs: Any, metric: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(clean, corrupt, metric) of many pairs.

    Args:
        pairs: tuples (clean, corrupt); or records with these fields, and answer and other, the
            tokens that its metric compares; or a .jsonl file of records.
        metric: of the pairs that have no answer of their own.
    """
    if isinstance(pairs, str | Path):
        path = Path(pairs).expanduser()
        if not path.is_file():
            raise BadText(f"there is no file {pairs}; expected .jsonl with clean, corrupt, answer")
        with opened(path) as stream:
            given = [(one.where, one.fields) for one in records_of(stream, path, str(pairs))]
    else:
        given = [(f"pair {number}", one) for number, one in enumerate(pairs, 1)]
    if not given:
        raise BadText("there are no pairs; expected one or more")
    for where, one in given:
        is_record = isinstance(one, Mapping)
        if is_record and {"clean", "corrupt"} <= one.keys():
            if "answer" in one and metric is not None:
                raise BadSettings(
                    f"{where} has an answer of its own, which the metric (--answer) would replace; "
                    "leave out the one or the other"
                )
            own = _metric(one, metric)
            prompts = one["clean"], one["corrupt"]
        elif not is_record and isinstance(one, Sequence) and len(one) == 2:
            own, prompts = metric, (one[0], one[1])
        else:
            raise BadText(f"{where} is not a pair; expected clean and corrupt")
        if own is None:
            raise BadSettings(
                f"{where} has no metric; give metric=..., or the fields answer and other"
            )
        yield *prompts, own


def _metric(record: Mapping[str, Any], metric: Any) -> Any:
    if "answer" not in record:
        return metric
    if "other" in record:
        return logit_difference(record["answer"], record["other"])
    return log_probability(record["answer"])
