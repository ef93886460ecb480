"""Limits on one request, and on all of them together."""

from dataclasses import dataclass

TEXT = 20_000  # characters of a prompt
IDS = 4096  # tokens of a prompt; the model's own limit may be lower
EDITS = 32
NEW_TOKENS = 256
TOP = 50
FOLLOW = 8
NAME = 200  # characters of a name or a title
NOTE = 4000
STATE = 256 * 1024  # bytes of a saved session, as JSON


@dataclass(frozen=True)
class Limits:
    """What the server refuses; `/api/model` lists the first five.

    Args:
        tokens: of one prompt.
        edits: in force at the same time.
        new_tokens: of one generation.
        top: tokens per cell.
        follow: output tokens that are read in every cell, besides the top ones.
        waiting: requests that may wait for the model.
        clients: requests that may be open at the same time.
        body: bytes of one request.
        sessions: that are kept per model.
    """

    tokens: int = 512
    edits: int = EDITS
    new_tokens: int = NEW_TOKENS
    top: int = TOP
    follow: int = FOLLOW
    waiting: int = 8
    clients: int = 32
    body: int = 4 * 2**20
    sessions: int = 500
