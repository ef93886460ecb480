"""Names of parameters: a neuron, a head, or one column of a head.

    L12.N34      neuron 34 of the FFN of block 12
    L12.H3       attention head 3 of block 12
    L12.H3.Q5    column 5 of its W_Q; likewise K and V, and O for row 5 of its W_O

Blocks count from 1; heads, neurons and columns count from 0.
"""

import re
from dataclasses import dataclass
from typing import Literal, cast

from layerleap.errors import BadSettings

Part = Literal["Q", "K", "V", "O"]
FORM = re.compile(r"L(\d+)\.(?:N(\d+)|H(\d+)(?:\.([QKVO])(\d+))?)", re.IGNORECASE)
EXAMPLES = (
    "a neuron such as L12.N34, a head such as L12.H3, or a column of a head such as L12.H3.Q5 "
    "(Q, K, V or O)"
)


@dataclass(frozen=True)
class Address:
    """One of the three; `neuron` or `head` is set, and `part` with `column` for a column."""

    block: int
    neuron: int | None = None
    head: int | None = None
    part: Part | None = None
    column: int | None = None

    def __str__(self) -> str:
        if self.neuron is not None:
            return f"L{self.block}.N{self.neuron}"
        column = "" if self.part is None else f".{self.part}{self.column}"
        return f"L{self.block}.H{self.head}{column}"

    @property
    def is_head(self) -> bool:
        """True for a whole head."""
        return self.head is not None and self.part is None


def parse_address(text: str) -> Address:
    """The parameter with that name; whether it exists is for the model to say."""
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise BadSettings(f"{text!r} is not the name of a parameter; expected {EXAMPLES}")
    block, neuron, head, part, column = match.groups()
    if neuron is not None:
        return Address(int(block), neuron=int(neuron))
    if part is None:
        return Address(int(block), head=int(head))
    return Address(int(block), None, int(head), cast(Part, part.upper()), int(column))
