"""A reader for the weights in a CTranslate2 file that does not need that library.

In: a model.bin of format 2 or newer. Out: its arrays by name.

The file has a header (version, name, revision) and a count, then the name, shape, type and bytes
of each array. Newer files end with a list of aliases for arrays that are used twice.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
OLDEST, WITH_ALIASES = 2, 3


def read_ct2(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every array of the file; those with an alias appear under both names."""
    reader = _Reader(path.read_bytes())
    try:
        version = reader.number("I")
        if version < OLDEST:
            raise ValueError(f"format {version}, expected {OLDEST} or newer")
        reader.text()  # model type
        reader.number("I")  # revision
        arrays = dict(reader.array() for _ in range(reader.number("I")))
        if version >= WITH_ALIASES:
            for _ in range(reader.number("I")):
                alias = reader.text()
                arrays[alias] = arrays[reader.text()]
    except (struct.error, KeyError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path.name} is not a readable CTranslate2 file ({error})") from error
    return arrays


class _Reader:
    """Reads one value after another from a byte string; numbers are little-endian."""

    def __init__(self, data: bytes) -> None:
        self.data, self.offset = data, 0

    def number(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.offset)
        self.offset += struct.calcsize(f"<{code}")
        return int(value)

    def take(self, size: int) -> bytes:
        if self.offset + size > len(self.data):
            raise ValueError("it ends in the middle of an array")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def text(self) -> str:
        return self.take(self.number("H")).rstrip(b"\0").decode()

    def array(self) -> tuple[str, np.ndarray[Any, Any]]:
        name = self.text()
        shape = [self.number("I") for _ in range(self.number("B"))]
        dtype = DTYPES[self.number("B")]
        return name, np.frombuffer(self.take(self.number("I")), dtype).reshape(shape)
