import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from layerleap.errors import BadArtifact, BadSettings, NotFinite, WrongModel
from layerleap.files import content_hash
from layerleap.stats.moments import (
    Moments,
    load_about,
    load_moments,
    save_moments,
)

LAYERS, WIDTH = 2, 4
few = settings(max_examples=25, deadline=None, derandomize=True, database=None)
both = pytest.mark.parametrize("pairs", ["final", "all"])


def states(n: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, WIDTH, generator=generator) + layer for layer in range(LAYERS + 1)]


def moments_of(h: list[torch.Tensor], pairs="all", cuts: list[int] = ()) -> Moments:
    """Moments of the rows, added in the pieces that `cuts` make."""
    moments = Moments(LAYERS, WIDTH, pairs)
    for start, stop in pairwise([0, *sorted(cuts), len(h[0])]):
        moments.add([layer[start:stop] for layer in h])
    return moments.flush()


def assert_same(ours: Moments, theirs: Moments, tolerance: float = 1e-12) -> None:
    assert ours.shape == theirs.shape
    assert ours.n == theirs.n
    for a, b in zip([ours.sums, *ours.cross], [theirs.sums, *theirs.cross], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_bit_equal(ours: Moments, theirs: Moments) -> None:
    a, b = ours.tensors(), theirs.tensors()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


@both
@few
@given(cuts=st.lists(st.integers(0, 90), max_size=8))
def test_any_split_into_batches_gives_the_moments_of_the_whole(pairs, cuts):
    assert_same(moments_of(states(90), pairs, cuts), moments_of(states(90), pairs))


@both
@few
@given(
    owner=st.lists(st.integers(0, 4), min_size=60, max_size=60),
    order=st.permutations(range(5)),
    left_first=st.booleans(),
)
def test_merging_shards_in_any_order_and_grouping_equals_seeing_the_whole(
    pairs, owner, order, left_first
):
    h, part_of = states(60), torch.tensor(owner)
    parts = [moments_of([layer[part_of == part] for layer in h], pairs) for part in order]
    while len(parts) > 1:
        at = 0 if left_first else len(parts) - 2
        parts[at : at + 2] = [parts[at].merge(parts[at + 1])]
    assert_same(parts[0], moments_of(h, pairs))


def test_merging_changes_neither_side():
    a, b = moments_of(states(5, 1)), moments_of(states(6, 2))
    before = {key: value.clone() for key, value in a.tensors().items()}
    whole = a.merge(b)
    whole.add(states(3))
    whole.flush()
    assert all(torch.equal(value, before[key]) for key, value in a.tensors().items())
    assert (a.n, b.n, whole.n) == (5, 6, 14)


def test_buffered_rows_are_counted_when_merged_or_read():
    buffered = Moments(LAYERS, WIDTH, "all")
    buffered.add(states(5, 1))
    assert buffered.n == 0
    assert buffered.merge(moments_of(states(6, 2))).n == 11
    assert_same(buffered, moments_of(states(5, 1)))


def test_the_buffer_is_bounded(monkeypatch):
    monkeypatch.setattr("layerleap.stats.moments.BUFFER", 16)
    moments = Moments(LAYERS, WIDTH)
    for _ in range(10):
        moments.add(states(7))
        assert len(moments._buffer) == 16
        assert moments._filled < 16
    assert moments.n > 0


def test_an_empty_batch_adds_nothing():
    moments = Moments(LAYERS, WIDTH)
    moments.add(states(0))
    assert moments.flush().n == 0


def test_what_is_added_may_be_changed_afterwards():
    h = states(8)
    moments = Moments(LAYERS, WIDTH, "all")
    moments.add(h)
    for layer in h:
        layer.fill_(9)
    assert_bit_equal(moments.flush(), moments_of(states(8)))


@both
def test_moments_hold_the_pairs_they_promise(pairs):
    moments = moments_of(states(30), pairs)
    h = [layer.double() for layer in states(30)]
    for src in range(LAYERS + 1):
        torch.testing.assert_close(moments.xx(src), h[src].T @ h[src])
        for dst in range(LAYERS + 1):
            if dst > src and (pairs == "all" or dst == LAYERS):
                torch.testing.assert_close(moments.xy(src, dst), h[src].T @ h[dst])
            else:
                with pytest.raises(BadSettings, match=f"from layer {src} to layer {dst}"):
                    moments.xy(src, dst)


@both
def test_moments_load_bit_identical_including_the_buffer(pairs, tmp_path):
    flushed, buffered = moments_of(states(30), pairs), moments_of(states(20), pairs)
    buffered.add(states(3, 5))
    buffered.add([layer.bfloat16() for layer in states(2, 6)])
    save_moments(tmp_path / "m.safetensors", {"a": flushed, "b": buffered}, {"text": "x"})
    sets, about = load_moments(tmp_path / "m.safetensors")
    assert about == {"text": "x"}
    assert_bit_equal(sets["a"], flushed)
    assert_bit_equal(sets["b"], buffered)
    for moments in (sets["b"], buffered):
        moments.add(states(4, 7))
        moments.flush()
    assert_bit_equal(sets["b"], buffered)


def test_more_than_nine_buffered_batches_keep_their_order(tmp_path):
    moments = Moments(LAYERS, WIDTH)
    for seed in range(12):
        moments.add(states(2, seed))
    save_moments(tmp_path / "m.safetensors", {"a": moments}, {})
    assert_bit_equal(load_moments(tmp_path / "m.safetensors")[0]["a"].flush(), moments.flush())


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file_is_a_bad_artifact(size, tmp_path):
    path = tmp_path / "m.safetensors"
    save_moments(path, {"a": moments_of(states(30))}, {})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(BadArtifact, match=r"m\.safetensors is missing, truncated or not a moments"):
        load_moments(path)


def test_foreign_files_are_bad_artifacts(tmp_path):
    path = tmp_path / "m.safetensors"
    with pytest.raises(BadArtifact, match="missing"):
        load_moments(path)
    with pytest.raises(BadArtifact):
        load_moments(tmp_path)
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(BadArtifact, match="format None; expected format 2"):
        load_moments(path)
    path.write_text("not a tensor in sight")
    with pytest.raises(BadArtifact):
        load_moments(path)


@pytest.mark.parametrize(
    "header",
    [
        "not json",
        json.dumps([1]),
        json.dumps({"format": 3, "shapes": {}, "about": {}}),
        json.dumps({"format": 2, "about": {}}),
        json.dumps({"format": 2, "shapes": {}}),
        json.dumps({"format": 2, "shapes": {"a": [2, 4, "all"]}, "about": {}}),
        json.dumps({"format": 2, "shapes": {"x": [2, 4]}, "about": {}}),
        json.dumps({"format": 2, "shapes": {"x": 7}, "about": {}}),
    ],
)
def test_a_header_that_was_tampered_with_is_a_bad_artifact(header, tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"x/n": torch.tensor(1)}, path, metadata={"layerleap.moments": header})
    with pytest.raises(BadArtifact):
        load_moments(path)


def test_tensors_of_another_shape_than_the_header_says_are_a_bad_artifact(tmp_path):
    path = tmp_path / "m.safetensors"
    save_moments(path, {"a": moments_of(states(30))}, {})
    tensors = load_file(path)
    tensors["a/cross.1"] = tensors["a/cross.1"][:, :-1].contiguous()
    header = {"format": 2, "shapes": {"a": [LAYERS, WIDTH, "all"]}, "about": {}}
    save_file(tensors, path, metadata={"layerleap.moments": json.dumps(header)})
    with pytest.raises(BadArtifact):
        load_moments(path)


def forge(path, tensors, *, sign=True, **changes):
    """A file of moments with other content; with a hash that fits, as a forger could."""
    header = {"format": 2, "shapes": {"a": [LAYERS, WIDTH, "all"]}, "about": {}, **changes}
    if sign:
        header["sha256"] = content_hash(tensors, header)
    save_file(tensors, path, metadata={"layerleap.moments": json.dumps(header)})


@pytest.fixture
def good(tmp_path):
    """Tensors of moments with rows in the buffer."""
    path = tmp_path / "good.safetensors"
    moments = moments_of(states(30))
    moments.add(states(3))
    save_moments(path, {"a": moments}, {})
    return load_file(path)


def test_statistics_that_were_changed_are_a_bad_artifact(good, tmp_path):
    path = tmp_path / "m.safetensors"
    forge(path, good)
    load_moments(path)  # the forger's hash fits
    forge(path, good, sign=False)
    with pytest.raises(BadArtifact, match="was changed after it was saved"):
        load_moments(path)
    save_moments(path, {"a": moments_of(states(30))}, {"text": "x"})
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadArtifact, match="was changed after it was saved"):
        load_moments(path)
    save_moments(path, {"a": moments_of(states(30))}, {"text": "x"})
    path.write_bytes(path.read_bytes().replace(b'\\"x\\"', b'\\"y\\"'))
    assert load_about(path) == {"text": "y"}
    with pytest.raises(BadArtifact, match="was changed after it was saved"):
        load_moments(path)


@pytest.mark.parametrize("shape", [(3, 1), (3, 11), (12,), (5000, 12), (1024, 12), ()])
def test_buffered_rows_of_another_shape_are_a_bad_artifact(shape, good, tmp_path):
    path = tmp_path / "m.safetensors"
    assert good["a/buffer"].shape == (3, 12)
    forge(path, {**good, "a/buffer": torch.zeros(shape, dtype=torch.float64)})
    with pytest.raises(BadArtifact):
        load_moments(path)


@pytest.mark.parametrize(
    "shapes",
    [
        "text",
        ["a"],
        None,
        3,
        {"a": "text"},
        {"a": None},
        {"a": [2, 4, "most"]},
        {"a": [-1, 4, "all"]},
        {"a": [2, -4, "all"]},
        {"a": [2.5, 4, "all"]},
        {"b": [2, 4, "all"]},
    ],
    ids=repr,
)
def test_forged_shapes_are_a_bad_artifact(shapes, good, tmp_path):
    path = tmp_path / "m.safetensors"
    forge(path, good, shapes=shapes)
    with pytest.raises(BadArtifact, match=r"m\.safetensors|expected"):
        load_moments(path)


@pytest.mark.parametrize("key", ["a/n", "a/sums", "a/cross.1", "a/buffer"])
@pytest.mark.parametrize("change", ["gone", "other shape", "float32"])
def test_forged_tensors_are_a_bad_artifact(key, change, good, tmp_path):
    path, value = tmp_path / "m.safetensors", good[key]
    others = {"other shape": value.new_ones(2, 2), "float32": value.float()}
    tensors = {name: tensor for name, tensor in good.items() if name != key}
    forge(path, {**tensors, key: others[change]} if change in others else tensors)
    if (key, change) == ("a/buffer", "gone"):
        assert load_moments(path)[0]["a"].n == 30  # as if the buffer was empty
        return
    with pytest.raises(BadArtifact):
        load_moments(path)


def test_what_a_file_is_about_is_read_without_its_numbers(tmp_path):
    path = tmp_path / "m.safetensors"
    save_moments(path, {"a": moments_of(states(30))}, {"shard": [0, 2]})
    assert load_about(path) == {"shard": [0, 2]}
    path.write_bytes(b"no file of moments")
    with pytest.raises(BadArtifact, match=r"m\.safetensors"):
        load_about(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_state_that_is_not_finite_is_reported_with_its_layer(layer, value):
    moments = moments_of(states(30))
    broken = states(3)
    broken[layer][1, 2] = value
    with pytest.raises(NotFinite, match=f"at layer {layer} after 30 good rows"):
        moments.add(broken)
    assert moments.flush().n == 30


def test_states_of_a_wrong_shape_are_refused_before_they_are_added():
    moments = Moments(LAYERS, WIDTH)
    with pytest.raises(BadSettings, match="got 2 layers of states; expected 3"):
        moments.add(states(3)[:2])
    narrow = states(3)
    narrow[1] = narrow[1][:, :-1]
    with pytest.raises(BadSettings, match="layer 1"):
        moments.add(narrow)
    short = states(3)
    short[2] = short[2][:2]
    with pytest.raises(BadSettings, match="layer 2"):
        moments.add(short)
    assert moments.flush().n == 0


@pytest.mark.parametrize(
    "other", [Moments(3, WIDTH), Moments(LAYERS, 5), Moments(LAYERS, WIDTH, "all")]
)
def test_moments_of_another_shape_cannot_be_merged(other):
    with pytest.raises(WrongModel, match="cannot be added"):
        Moments(LAYERS, WIDTH, "final").merge(other)
