"""What the tests of the server share: where it is, and how streams are read."""

import json
from typing import Any

HERE = "http://127.0.0.1:8123"


def frames(text: str) -> list[dict[str, Any]]:
    """The frames of a stream."""
    return [json.loads(line) for line in text.splitlines()]
