"""A reader for the weights in an ONNX file that does not need the onnx library.

In: an ONNX file exported by torch: a protocol-buffers message.
Out: its arrays, named as in a state dict.

The exporter keeps most names, but stores the matrix of a linear layer transposed and under a
number. The name of the node that multiplies by the matrix says which layer it belongs to.

Quantised arrays become float32: (integers - zero point) * scale, three arrays with one name and the
endings "_quantized", "_zero_point" and "_scale".
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Field numbers from onnx.proto3.
GRAPH = 7
NODE, INITIALIZER = 1, 5
NODE_INPUT, NODE_NAME, NODE_OPERATION = 1, 3, 4
TENSOR_DIMS, TENSOR_TYPE, TENSOR_NAME, TENSOR_RAW = 1, 2, 8, 9
TENSOR_FLOATS, TENSOR_INTEGERS = 4, 5  # a few numbers, instead of raw bytes
DTYPES = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64, 10: np.float16}
PRODUCTS = ("MatMul", "MatMulInteger")
QUANTISED, ZERO, SCALE = "_quantized", "_zero_point", "_scale"


def read_onnx(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every array of the file; linear layers as "path.of.module.weight", in torch's layout."""
    try:
        graphs = [
            value for field, value in _fields(memoryview(path.read_bytes())) if field == GRAPH
        ]
        arrays = dict(_array(value) for field, value in _fields(graphs[0]) if field == INITIALIZER)
        nodes = [_node(value) for field, value in _fields(graphs[0]) if field == NODE]
        for name in [name for name in arrays if name.endswith(QUANTISED)]:
            arrays[name.removesuffix(QUANTISED)] = _dequantised(arrays, name)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path.name} is not an ONNX file that contains its weights ({error})"
        ) from error
    for module, matrix in nodes:
        if matrix in arrays:
            arrays[f"{module}.weight"] = arrays.pop(matrix).T
    return arrays


def _dequantised(arrays: dict[str, np.ndarray[Any, Any]], quantised: str) -> np.ndarray[Any, Any]:
    """The numbers behind integers of one scale; they, the scale and the zero point are removed."""
    name = quantised.removesuffix(QUANTISED)
    zero, scale = (arrays.pop(name + end).astype(np.float32) for end in (ZERO, SCALE))
    if scale.size != 1:
        raise ValueError(f"{name} has {scale.size} scales, expected one")
    numbers: np.ndarray[Any, Any] = (arrays.pop(quantised).astype(np.float32) - zero) * scale
    return numbers


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """The fields of a message in order: (number, integer or bytes)."""
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, offset = _varint(message, offset)
            yield field, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire} is unknown")
        size, offset = _varint(message, offset) if wire == 2 else ({1: 8, 5: 4}[wire], offset)
        if offset + size > len(message):
            raise ValueError("it ends in the middle of a field")
        yield field, message[offset : offset + size]
        offset += size


def _varint(message: memoryview, offset: int) -> tuple[int, int]:
    """A number stored in groups of seven bits, lowest first, and the offset after it."""
    value = shift = 0
    while True:
        byte = message[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset


def _array(tensor: memoryview) -> tuple[str, np.ndarray[Any, Any]]:
    shape: list[int] = []
    fields: dict[int, Any] = {}
    for field, value in _fields(tensor):
        if field == TENSOR_DIMS:
            # A list of integers is stored as separate fields, or packed into one.
            shape += _packed(value)
        else:
            fields[field] = value
    dtype = DTYPES[fields[TENSOR_TYPE]]
    flat: np.ndarray[Any, Any]
    if TENSOR_RAW in fields:
        flat = np.frombuffer(fields[TENSOR_RAW], dtype)
    elif TENSOR_FLOATS in fields:
        flat = np.frombuffer(fields[TENSOR_FLOATS], np.float32).astype(dtype)
    else:  # negative ones are stored as if they had 64 bits
        numbers = [n - 2**64 if n >= 2**63 else n for n in _packed(fields[TENSOR_INTEGERS])]
        flat = np.array(numbers, dtype)
    return bytes(fields[TENSOR_NAME]).decode(), flat.reshape(shape)


def _packed(value: memoryview | int) -> list[int]:
    if isinstance(value, int):  # one number may come without a list around it
        return [value]
    numbers, offset = [], 0
    while offset < len(value):
        number, offset = _varint(value, offset)
        numbers.append(number)
    return numbers


def _node(node: memoryview) -> tuple[str, str]:
    """The module that a product belongs to and the name of its matrix; "" for other nodes."""
    inputs: list[str] = []
    name = operation = ""
    for field, value in _fields(node):
        if field == NODE_INPUT:
            inputs.append(bytes(value).decode())
        elif field == NODE_NAME:
            name = bytes(value).decode()
        elif field == NODE_OPERATION:
            operation = bytes(value).decode()
    if operation not in PRODUCTS or len(inputs) < 2:
        return "", ""
    matrix = inputs[1].removesuffix(QUANTISED)
    return name.strip("/").rpartition("/")[0].replace("/", "."), matrix
