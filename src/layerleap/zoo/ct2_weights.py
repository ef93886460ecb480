"""The weights inside a CTranslate2 file, without that library.

In: a model.bin of format 2 or newer. Out: its arrays by name.

The file is a head (version, name, revision), a count, then for each array its name, shape, type
and bytes; and in newer ones a list of other names for arrays that are used twice.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
OLDEST, WITH_ALIASES = 2, 3


def read_ct2(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every array of the file, those with a second name under both."""
    reader = _Reader(path.read_bytes())
    try:
        version = reader.number("I")
        if version < OLDEST:
            raise ValueError(f"format {version}, {OLDEST} or newer was wanted")
        reader.text()  # the kind of model
        reader.number("I")  # and its revision
        arrays = dict(reader.array() for _ in range(reader.number("I")))
        if version >= WITH_ALIASES:
            for _ in range(reader.number("I")):
                alias = reader.text()
                arrays[alias] = arrays[reader.text()]
    except (struct.error, KeyError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(
            f"{path.name} is no CTranslate2 file that can be read ({error})"
        ) from error
    return arrays


class _Reader:
    """Takes one value after the other from a run of bytes; all numbers are little-endian."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.place)
        self.place += struct.calcsize(f"<{form}")
        return int(value)

    def take(self, size: int) -> bytes:
        if self.place + size > len(self.data):
            raise ValueError("it ends in the middle of an array")
        self.place += size
        return self.data[self.place - size : self.place]

    def text(self) -> str:
        return self.take(self.number("H")).rstrip(b"\0").decode()

    def array(self) -> tuple[str, np.ndarray[Any, Any]]:
        name = self.text()
        shape = [self.number("I") for _ in range(self.number("B"))]
        dtype = DTYPES[self.number("B")]
        return name, np.frombuffer(self.take(self.number("I")), dtype).reshape(shape)
