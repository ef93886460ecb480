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
    """What the server refuses; `/api/model` lists the first five."""

    tokens: int = 512  # of one prompt
    edits: int = EDITS  # in force at the same time
    new_tokens: int = NEW_TOKENS  # of one generation
    top: int = TOP  # tokens per cell
    follow: int = FOLLOW  # output tokens that are read in every cell, besides the top ones
    waiting: int = 8  # requests that may wait for the model
    clients: int = 32  # requests that may be open at the same time
    body: int = 4 * 2**20  # bytes of one request
    sessions: int = 500  # kept per model
