"""A task in the tokens of one model: prompts, answers, contexts, and what fits.

In: a wrapped decoder and a `Task`. Out: an `EncodedTask`.

Everything is tokenized piece by piece, so that a query has the same tokens alone and after
demonstrations, and a demonstration the same in a context and when it is trained on. The last token
of a prompt is the one that predicts the answer. A model whose tokenizer knows a first token (BOS)
gets it in all conditions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

from layerleap.errors import BadText, ModelRefused, check_choice
from layerleap.short_repr import ShortRepr
from layerleap.stream.tasks.task import Task

if TYPE_CHECKING:  # tasks are loaded, and their mistakes found, without torch
    from layerleap.models.transformer import Transformer

Answers = Literal["token", "sequence"]
FEWEST = 4  # examples that a task needs for a model


@dataclass(frozen=True)
class Piece:
    """One example in tokens."""

    number: int  # of the example in its task
    prompt: tuple[int, ...]  # its last token predicts the answer
    answer: tuple[int, ...]
    label: str


@dataclass(frozen=True, eq=False, repr=False)
class EncodedTask(ShortRepr):
    """A task for one model."""

    task: Task
    model: str
    start: tuple[int, ...]  # the first token of every input, or nothing
    separator: tuple[int, ...]
    pieces: tuple[Piece, ...]  # examples whose answers are as many tokens as wanted
    labels: dict[str, tuple[int, ...]]  # tokens of every answer among the pieces
    left_out: int  # examples whose answers are not
    longest: int  # tokens that the model can read

    def demonstration(self, piece: Piece) -> tuple[int, ...]:
        """An example with its answer, to be trained on; the answer is at the end."""
        return self.start + piece.prompt + piece.answer

    def context(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """Demonstrations that a query follows; without any, only the first token if there is one.

        A query after it has the tokens `context(pieces) + piece.prompt`.
        """
        shown = (piece.prompt + piece.answer + self.separator for piece in pieces)
        return self.start + tuple(chain.from_iterable(shown))

    def fitting(self, demonstrations: Sequence[Piece], queries: Sequence[Piece]) -> int:
        """How many of the demonstrations, from the first on, fit before every query."""
        # Every label of a class is scored after every query, so the longest one has to fit.
        most = max(map(len, self.labels.values())) if self.task.kind == "classes" else 0
        longest = max(len(piece.prompt) + max(most, len(piece.answer)) for piece in queries)
        room = self.longest - longest
        for n in range(len(demonstrations), -1, -1):
            if len(self.context(demonstrations[:n])) <= room:
                return n
        return 0

    def require_fit(self, demonstrations: Sequence[Piece], queries: Sequence[Piece]) -> None:
        """Refuse demonstrations that do not fit, and say how many would."""
        if (fit := self.fitting(demonstrations, queries)) < len(demonstrations):
            raise BadText(
                f"{len(demonstrations)} demonstrations of task {self.task.name!r} and a query take "
                f"more than the {self.longest:,} tokens that {self.model} reads; at most {fit} fit"
            )


def encode(
    transformer: "Transformer",
    task: Task,
    *,
    answers: Answers = "token",
    bos: bool | None = None,
    can_score: bool = True,
) -> EncodedTask:
    """The task in the tokens of a model.

    Of a mapping, examples whose answers have several tokens are left out if one is wanted; of a
    task with classes, such a label is an error.

    Args:
        transformer: a decoder with a tokenizer.
        task: what to encode.
        answers: "token" wants answers of one token, "sequence" takes any.
        bos: whether inputs begin with the tokenizer's first token; by default, if it has one.
        can_score: whether the caller could score whole sequences instead, for the advice of errors.
    """
    advice = " score whole sequences (answers='sequence', or --answers sequence), or"
    instead = advice if can_score else ""
    check_choice(answers, Answers, "answers")
    require_decoder(transformer)
    first = transformer.need_tokenizer().bos_token_id
    if bos and first is None:
        raise BadText(f"the tokenizer of {transformer.identity.name} has no first token (BOS)")
    pieces = _pieces(transformer, task)
    several = [piece for piece in pieces if len(piece.answer) > 1]
    if answers == "token" and several and task.kind == "classes":
        worst = several[0]
        raise BadText(
            f"label {worst.label!r} of task {task.name!r} has {len(worst.answer)} tokens in "
            f"{transformer.identity.name}; expected one:{instead} choose other words for its "
            "labels (labels={'0': 'bad', ...}, or --labels 0=bad,1=good)"
        )
    usable = [piece for piece in pieces if len(piece.answer) == 1 or answers == "sequence"]
    if len(pieces) < FEWEST:
        raise BadText(f"task {task.name!r} has {len(pieces)} examples; expected at least {FEWEST}")
    if len(usable) < FEWEST:
        raise BadText(
            f"{len(usable)} of {len(pieces)} answers of task {task.name!r} are one token in "
            f"{transformer.identity.name}; expected at least {FEWEST}:{instead} choose another task"
        )
    from layerleap.stream.examples import longest_input

    labels: dict[str, tuple[int, ...]] = {}
    for piece in usable:
        labels.setdefault(piece.label, piece.answer)
    _require_different(task, labels)
    return EncodedTask(
        task,
        transformer.identity.name,
        () if first is None or bos is False else (int(first),),
        _separator(transformer, task),
        tuple(usable),
        labels,
        len(pieces) - len(usable),
        longest_input(transformer),
    )


def require_decoder(transformer: "Transformer") -> None:
    """Refuse models that cannot continue a text."""
    is_pair = bool(transformer.model.config.is_encoder_decoder)
    if transformer.kind != "next-token" or is_pair:
        kind = {"masked-token": "a masked model"}.get(transformer.kind, "not a language model")
        raise ModelRefused(
            f"{transformer.identity.name} is {'an encoder-decoder' if is_pair else kind}; learning "
            "in context needs a decoder that predicts the next token"
        )


def _tokens(transformer: "Transformer", texts: Sequence[str]) -> list[tuple[int, ...]]:
    """The tokens of each text alone, without first and last tokens."""
    from layerleap.models.prompts import encode as encode_text

    ids = transformer.need_tokenizer()(list(texts), add_special_tokens=False)["input_ids"]
    return [tuple(encode_text(transformer, text_ids)) for text_ids in ids]


def _pieces(transformer: "Transformer", task: Task) -> list[Piece]:
    texts = [task.prompt(example.text) for example in task.examples]
    prompts = _tokens(transformer, texts)
    answered = [f"{text} {e.answer}" for text, e in zip(texts, task.examples, strict=True)]
    wholes = _tokens(transformer, answered)
    pieces = []
    for number, (prompt, whole) in enumerate(zip(prompts, wholes, strict=True)):
        answer = task.examples[number].answer
        if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
            raise BadText(
                f"the answer {answer!r} of task {task.name!r} changes the tokens of its prompt in "
                f"{transformer.identity.name}, so no token predicts it; end the template with "
                "another character"
            )
        pieces.append(Piece(number, prompt, whole[len(prompt) :], answer))
    return pieces


def _separator(transformer: "Transformer", task: Task) -> tuple[int, ...]:
    try:
        return _tokens(transformer, [task.separator])[0] if task.separator else ()
    except BadText:  # a tokenizer that drops white space
        return ()


def _require_different(task: Task, labels: dict[str, tuple[int, ...]]) -> None:
    known: dict[tuple[int, ...], str] = {}
    for label, tokens in labels.items():
        if (other := known.setdefault(tokens, label)) != label and task.kind == "classes":
            raise BadText(
                f"labels {other!r} and {label!r} of task {task.name!r} have the same tokens; "
                "choose other words"
            )
    if len(known) < 2:
        raise BadText(f"task {task.name!r} has one answer in the tokens of this model")
