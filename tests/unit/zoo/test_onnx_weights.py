import numpy as np
import pytest

from layerleap.zoo.onnx_weights import read_onnx

FLOAT = 1


def varint(number):
    groups = bytearray()
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def tensor(name, array, *, packed=False):
    dims = (
        field(1, b"".join(map(varint, array.shape)))
        if packed
        else b"".join(field(1, size) for size in array.shape)
    )
    return dims + field(2, FLOAT) + field(8, name) + field(9, array.tobytes())


def node(operation, name, *inputs):
    taken = b"".join(field(1, each) for each in inputs)
    return taken + field(2, f"{name}_out") + field(3, name) + field(4, operation)


def model(*, tensors=(), nodes=()):
    graph = b"".join(field(1, each) for each in nodes) + field(2, "a graph")
    graph += b"".join(field(5, each) for each in tensors)
    fixed = varint(9 << 3 | 5) + b"abcd" + varint(10 << 3 | 1) + b"abcdefgh"  # skipped over
    return field(1, 7) + field(2, "pytorch") + fixed + field(7, graph)


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=300).astype(np.float32)


@pytest.mark.parametrize("packed", [False, True])
def test_arrays_keep_their_names_and_linear_layers_get_theirs_back(tmp_path, arrays, packed):
    matrix, vector = arrays
    nodes = [
        node("MatMul", "/net/layer.0/query/MatMul", "x", "onnx::MatMul_7"),
        node("MatMul", "/net/MatMul", "x", "y"),  # a product of two activations
        node("Add", "/net/Add", "x", "net.bias"),
    ]
    tensors = [
        tensor("net.bias", vector, packed=packed),
        tensor("onnx::MatMul_7", matrix, packed=packed),
    ]
    (tmp_path / "m.onnx").write_bytes(model(tensors=tensors, nodes=nodes))
    arrays = read_onnx(tmp_path / "m.onnx")
    assert sorted(arrays) == ["net.bias", "net.layer.0.query.weight"]
    assert np.array_equal(arrays["net.bias"], vector)
    assert np.array_equal(arrays["net.layer.0.query.weight"], matrix.T)


def small_tensor(name, kind, number, data):
    """A number as the exporter writes it: without a shape and without raw bytes."""
    return field(2, kind) + field(number, data) + field(8, name)


@pytest.mark.parametrize(("kind", "zero"), [(3, -7), (2, 129)])
def test_quantised_arrays_become_the_numbers_that_they_stand_for(tmp_path, kind, zero):
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 100, size=(6, 4)).astype({3: np.int8, 2: np.uint8}[kind])
    scale = np.float32(0.03125)
    quantised = b"".join(field(1, size) for size in stored.shape) + field(2, kind)
    quantised += field(8, "onnx::MatMul_9_quantized") + field(9, stored.tobytes())
    tensors = [
        small_tensor("onnx::MatMul_9_scale", 1, 4, scale.tobytes()),
        small_tensor("onnx::MatMul_9_zero_point", kind, 5, varint(zero % 2**64)),
        quantised,
    ]
    inputs = (
        "x_quantized",
        "onnx::MatMul_9_quantized",
        "x_zero_point",
        "onnx::MatMul_9_zero_point",
    )
    nodes = [node("MatMulInteger", "/net/wi/MatMul_quant", *inputs)]
    (tmp_path / "m.onnx").write_bytes(model(tensors=tensors, nodes=nodes))
    (name, found), *others = read_onnx(tmp_path / "m.onnx").items()
    assert (name, others) == ("net.wi.weight", [])
    assert np.array_equal(found, ((stored.astype(np.float32) - zero) * scale).T)


def test_quantised_arrays_without_their_scale_are_refused(tmp_path):
    data = tensor("a_quantized", np.ones((2, 2), np.float32))
    (tmp_path / "m.onnx").write_bytes(model(tensors=[data]))
    with pytest.raises(ValueError, match="a_zero_point"):
        read_onnx(tmp_path / "m.onnx")


@pytest.mark.parametrize("cut", [3, 40, -1])
def test_a_truncated_file_is_refused(tmp_path, arrays, cut):
    data = model(tensors=[tensor("a", arrays[0]), tensor("b", arrays[1])])
    (tmp_path / "m.onnx").write_bytes(data[:cut])
    with pytest.raises(ValueError, match=r"m\.onnx is not an ONNX file"):
        read_onnx(tmp_path / "m.onnx")


@pytest.mark.parametrize("data", [b"", b"not a model at all", b"\xff" * 30])
def test_a_file_of_another_format_is_refused(tmp_path, data):
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(ValueError, match="is not an ONNX file"):
        read_onnx(tmp_path / "m.onnx")


def test_weights_kept_outside_the_file_are_refused(tmp_path):
    outside = field(1, 5) + field(2, FLOAT) + field(8, "a") + field(14, 1)
    (tmp_path / "m.onnx").write_bytes(model(tensors=[outside]))
    with pytest.raises(ValueError, match="that contains its weights"):
        read_onnx(tmp_path / "m.onnx")
