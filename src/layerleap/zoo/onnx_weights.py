"""The weights inside an ONNX file, without the onnx library.

In: an ONNX file as torch exports it: a protocol-buffers message.
Out: its arrays by name, as a state dict would name them.

The exporter keeps most names, but stores the matrix of a linear layer transposed and under a
running number; which layer it belongs to is told by the name of the node that multiplies by it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Numbers of fields, as onnx.proto3 gives them.
GRAPH = 7
NODE, INITIALIZER = 1, 5
NODE_INPUT, NODE_NAME, NODE_OPERATION = 1, 3, 4
TENSOR_DIMS, TENSOR_TYPE, TENSOR_NAME, TENSOR_RAW = 1, 2, 8, 9
DTYPES = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64, 10: np.float16}


def read_onnx(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every array of the file; linear layers under "path.of.module.weight", as torch keeps them."""
    try:
        graphs = [
            value for field, value in _fields(memoryview(path.read_bytes())) if field == GRAPH
        ]
        arrays = dict(_array(value) for field, value in _fields(graphs[0]) if field == INITIALIZER)
        nodes = [_node(value) for field, value in _fields(graphs[0]) if field == NODE]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is no ONNX file with its weights in it ({error})") from error
    for module, matrix in nodes:
        if matrix in arrays:
            arrays[f"{module}.weight"] = arrays.pop(matrix).T
    return arrays


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """The fields of a message in order: (number, integer or bytes)."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield field, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire} is unknown")
        size, place = _varint(message, place) if wire == 2 else ({1: 8, 5: 4}[wire], place)
        if place + size > len(message):
            raise ValueError("it ends in the middle of a field")
        yield field, message[place : place + size]
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first; and the place after it."""
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def _array(tensor: memoryview) -> tuple[str, np.ndarray[Any, Any]]:
    shape: list[int] = []
    found: dict[int, Any] = {}
    for field, value in _fields(tensor):
        if field == TENSOR_DIMS:
            # Integers of a list stand one by one, or packed into one field.
            shape += [value] if isinstance(value, int) else _packed(value)
        else:
            found[field] = value
    flat = np.frombuffer(found[TENSOR_RAW], DTYPES[found[TENSOR_TYPE]])
    return bytes(found[TENSOR_NAME]).decode(), flat.reshape(shape)


def _packed(value: memoryview) -> list[int]:
    numbers, place = [], 0
    while place < len(value):
        number, place = _varint(value, place)
        numbers.append(number)
    return numbers


def _node(node: memoryview) -> tuple[str, str]:
    """The module that a node multiplies for, and the name of its matrix; "" for other nodes."""
    inputs: list[str] = []
    name = operation = ""
    for field, value in _fields(node):
        if field == NODE_INPUT:
            inputs.append(bytes(value).decode())
        elif field == NODE_NAME:
            name = bytes(value).decode()
        elif field == NODE_OPERATION:
            operation = bytes(value).decode()
    if operation != "MatMul" or len(inputs) != 2:
        return "", ""
    return name.strip("/").rpartition("/")[0].replace("/", "."), inputs[1]
