"""A session written down: its state with what it was made with, and Python that reproduces it."""

from typing import Any

import layerleap


def exported(model: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """`json` for programs and `python` for people.

    Of the page's state these are understood, all optional: `ids` or `text`, `lens`, `edits` (specs,
    or objects with `spec` and `on`), `max_new_tokens`.
    """
    made_with = {key: model.get(key) for key in ("name", "class", "fingerprint")}
    whole = {"format": 1, "layerleap": layerleap.__version__, "model": made_with, "state": state}
    return {"json": whole, "python": ""}
