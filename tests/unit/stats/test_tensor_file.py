"""Tensors and a header in one file: verified when they are read."""

import pytest
import torch

from layerleap.errors import BadArtifact
from layerleap.stats.tensor_file import TensorFile

FILE = TensorFile("demo", 3)
TENSORS = {"a": torch.arange(6).view(2, 3).T, "b": torch.zeros(0), "c": torch.tensor(1.5)}


def test_tensors_and_header_come_back_bit_identical(tmp_path):
    FILE.save(tmp_path / "file", TENSORS, {"pair": (1, 2), "text": "x"})
    tensors, header = FILE.load(tmp_path / "file")
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
    assert (header["pair"], header["text"], header["format"]) == ([1, 2], "x", 3)
    assert FILE.header(tmp_path / "file") == header


def test_one_changed_byte_is_refused(tmp_path):
    path = tmp_path / "file"
    FILE.save(path, TENSORS, {})
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadArtifact, match="file was changed after it was saved"):
        FILE.load(path)


def test_another_kind_another_format_and_no_file_at_all_are_refused(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(BadArtifact, match="is missing, truncated or not a demo file"):
        FILE.load(path)
    for other, number in ((TensorFile("other", 3), None), (TensorFile("demo", 2), 2)):
        other.save(path, TENSORS, {})
        with pytest.raises(BadArtifact, match=f"has format {number}; expected format 3 of a demo"):
            FILE.load(path)


def test_errors_while_the_content_is_used_name_the_file(tmp_path):
    message = r"somewhere is missing, .* \('lens'\)"
    with pytest.raises(BadArtifact, match=message), FILE.parsing(tmp_path / "somewhere"):
        {}["lens"]


def test_numbers_that_json_does_not_have_are_refused_when_saving(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        FILE.save(tmp_path / "file", TENSORS, {"gap": float("nan")})
    assert not list(tmp_path.iterdir())
