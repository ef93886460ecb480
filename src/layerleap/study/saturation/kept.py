"""Parts of a study that are finished, kept in case the rest is interrupted.

In: a folder, and what the parts follow from. Out: each part made once, also over several runs.
"""

import json
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from layerleap.files import whole_file

T = TypeVar("T")


class Kept:
    """Parts as JSON files; those of another run, by settings, model or text, are made anew."""

    def __init__(self, folder: Path, of: Mapping[str, Any], *lists: list[Any]) -> None:
        """Nothing read yet.

        Args:
            folder: where the files are.
            of: everything that the parts follow from; plain values.
            lists: what making a part adds to these is kept with it.
        """
        self.folder, self.found, self._lists = folder, list[str](), lists
        self._key = blake2b(json.dumps(of, sort_keys=True).encode(), digest_size=16).hexdigest()

    def part(self, name: str, make: Callable[[], T]) -> T:
        """What was kept under that name, or else what `make` gives.

        Either way it has been through JSON, so that going on gives the same as going through.

        Args:
            name: of the part.
            make: makes it.
        """
        path = self.folder / f"{name}.json"
        kept = self._read(path)
        if kept is None:
            before = [len(one) for one in self._lists]
            made = make()
            added = [one[n:] for one, n in zip(self._lists, before, strict=True)]
            text = json.dumps({"key": self._key, "made": made, "added": added})
            with whole_file(path) as temporary:
                temporary.write_text(text, encoding="utf8")
            result: T = json.loads(text)["made"]
            return result
        self.found.append(name)
        for one, added in zip(self._lists, kept["added"], strict=True):
            one += added
        found: T = kept["made"]
        return found

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            kept = json.loads(path.read_text(encoding="utf8"))
        except (OSError, ValueError):  # none yet, or half a file from elsewhere
            return None
        is_ours = isinstance(kept, dict) and kept.get("key") == self._key
        return kept if is_ours and {"made", "added"} <= kept.keys() else None
