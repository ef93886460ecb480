"""Names of parameters."""

import pytest

from layerleap.errors import BadSettings
from layerleap.lens.vocabulary.addresses import Address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("L12.N34", Address(12, neuron=34)),
        ("L1.H0", Address(1, head=0)),
        ("L12.H3.Q5", Address(12, None, 3, "Q", 5)),
        (" l2.h1.o0 ", Address(2, None, 1, "O", 0)),
    ],
)
def test_a_name_is_parsed_and_printed_again(text, address):
    assert parse_address(text) == address
    assert str(address) == text.strip().upper()


@pytest.mark.parametrize(
    "text", ["", "12.3", "L12", "L12.X3", "N34", "L12.H3.Q", "L12.H3.X5", "L12.N34.Q5", "L-1.N2"]
)
def test_anything_else_is_refused_with_examples(text):
    with pytest.raises(BadSettings, match=r"not the name of a parameter.*L12\.N34.*L12\.H3\.Q5"):
        parse_address(text)
