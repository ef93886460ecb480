"""Passes over several tokens with the bits of passes over one."""

import pytest
import torch
from torch import nn

from families import build
from layerleap.act.edits import ReplaceAttention
from layerleap.models.cursor import verify
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.cursor.packed import Packed
from layerleap.models.cursor.rowwise import RowByRow
from layerleap.models.cursor.tree import Tree
from layerleap.models.cursor.verify import find_axes, keeps_bits
from layerleap.models.transformer import Transformer

TEXT = [5, 9, 7, 11, 23, 6, 40, 8, 3, 12, 31, 2, 19, 4, 22, 30, 17, 29, 10, 13]
TREE = Tree((5, 6, 7, 8, 9), (-1, 0, 0, 2, 1))
PATHS = ([0, 1, 4], [0, 2, 3])


@pytest.fixture(scope="module")
def narrow():
    torch.manual_seed(0)
    return Transformer.wrap(build("llama").to(torch.bfloat16))


def one_by_one(transformer, path):
    with Cursor(transformer, find_axes(transformer)) as cursor:
        cursor.run(TEXT)
        return torch.cat([cursor.run([TREE.ids[node]]).h for node in path])


def test_every_node_of_a_tree_has_the_bits_of_a_pass_of_its_own(narrow):
    packed = Packed.of(narrow.model, range(1, 33))
    with Cursor(narrow, find_axes(narrow), packed=packed, rowwise=True) as cursor:
        cursor.run(TEXT)
        together = cursor.run(TREE).h
    for path in PATHS:
        assert torch.equal(together[path], one_by_one(narrow, path))
    assert keeps_bits(narrow, find_axes(narrow), packed)


def test_a_chain_has_them_too_and_lists_of_tokens_are_run_as_a_whole(narrow):
    with Cursor(narrow, find_axes(narrow), rowwise=True) as cursor:
        cursor.run(TEXT)
        assert torch.equal(cursor.run(Tree.chain(TREE.ids)).h[:1], one_by_one(narrow, [0]))
    with Cursor(narrow, find_axes(narrow)) as cursor:
        expected = cursor.run(TEXT).h
    with Cursor(narrow, find_axes(narrow), rowwise=True) as cursor:
        assert torch.equal(cursor.run(TEXT).h, expected)


def test_attention_that_does_not_go_through_the_interface_keeps_no_bits():
    """On a short probe it may look as if it did."""
    bloom = Transformer.wrap(build("bloom").to(torch.bfloat16))
    assert not keeps_bits(bloom, find_axes(bloom), None)


def test_bits_that_are_not_kept_are_noticed(narrow, monkeypatch):
    def as_a_whole(self, function, *args, **kwargs):
        self.n_split += 1
        output, weights = function(*args, **kwargs)
        return output * (1 + 2**-7) if args[1].shape[2] > 1 else output, weights

    monkeypatch.setattr(RowByRow, "__call__", as_a_whole)
    assert not verify.keeps_bits(narrow, find_axes(narrow), None)


def attend(module, query, key, value, attention_mask, **kwargs):
    """Notes which keys each row was given."""
    seen.append((query.shape[2], key[0, 0, :, 0].tolist(), attention_mask))
    return query.transpose(1, 2), None


seen: list = []


def called(mask, n_rows, n_keys):
    seen.clear()
    key = torch.arange(n_keys).float()[None, None, :, None]
    query = torch.zeros(1, 1, n_rows, 1)
    output, _ = RowByRow()(attend, nn.Identity(), query, key, key, mask)
    assert output.shape == (1, n_rows, 1, 1)
    return [keys for _, keys, _ in seen]


def test_each_row_is_given_its_visible_keys_and_no_mask():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]).bool()[None, None]
    expected = [[0, 1], [0, 1, 2], [0, 3]]
    assert called(mask, 3, 4) == expected
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.bfloat16).min)
    assert called(additive, 3, 4) == expected
    assert called(None, 2, 4) == [[0, 1, 2], [0, 1, 2, 3]]
    assert all(n == 1 and given is None for n, _, given in seen)


def test_a_mask_with_biases_is_left_to_the_function():
    biased = torch.tensor([[0.0, -1.0, -torch.inf], [0.0, -1.0, -2.0]])[None, None]
    assert called(biased, 2, 3) == [[0.0, 1.0, 2.0]]
    assert seen[0][2] is biased


def test_replaced_attention_is_called_row_by_row_too(narrow):
    calls = []

    def average(module, query, key, value, attention_mask, **kwargs):
        calls.append(query.shape[2])
        return query.transpose(1, 2).contiguous(), None

    cursor = Cursor(narrow, find_axes(narrow), rowwise=True)
    with narrow.edit(ReplaceAttention(average, blocks=[1])), cursor:
        cursor.run(TEXT)
        calls.clear()
        cursor.run(TREE)
    assert calls == [1] * len(TREE)
