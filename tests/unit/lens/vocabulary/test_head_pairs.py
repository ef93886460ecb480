"""The strongest entries of a product made block by block, against sorting all of it."""

import pytest
import torch
from torch import Tensor

from layerleap.lens.vocabulary import token_pairs
from layerleap.lens.vocabulary.token_pairs import strongest

KEYS = {"value": lambda x: x, "negative": torch.neg, "magnitude": torch.abs}


def by_sorting(rows: Tensor, columns: Tensor, top: int, largest: str, identical: bool) -> list:
    """(row, column, value) of the best entries: sorted by key, then row, then column."""
    product = rows @ columns.T
    keys = KEYS[largest](product).tolist()
    entries = [
        (-keys[i][j], i, j, float(product[i, j]))
        for i in range(len(rows))
        for j in range(len(columns))
        if identical or i != j
    ]
    return [entry[1:] for entry in sorted(entries)[:top]]


def listed(best: token_pairs.Best) -> list:
    return list(zip(*(part.tolist() for part in best), strict=True))


@pytest.fixture(params=[(1024, 4096), (7, 5), (1, 1), (100, 3)])
def blocks(request, monkeypatch) -> None:
    for name, size in zip(("BLOCK_ROWS", "BLOCK_COLUMNS"), request.param, strict=True):
        monkeypatch.setattr(token_pairs, name, size)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("largest", KEYS)
@pytest.mark.parametrize("identical", [True, False])
@pytest.mark.parametrize("top", [1, 13, 2000])
def test_blocks_find_what_sorting_all_entries_finds(largest, identical, top):
    """Small whole numbers: products are exact whatever the order, and full of ties."""
    generator = torch.Generator().manual_seed(top)
    rows, columns = (torch.randint(-3, 4, (n, 4), generator=generator).float() for n in (23, 31))
    found = strongest(rows, columns, top, largest=largest, identical=identical)
    assert listed(found) == by_sorting(rows, columns, top, largest, identical)


@pytest.mark.usefixtures("blocks")
def test_real_numbers_give_the_same_entries():
    torch.manual_seed(1)
    rows, columns = torch.randn(40, 8).double(), torch.randn(37, 8).double()
    found = listed(strongest(rows, columns, 25))
    expected = by_sorting(rows, columns, 25, "value", True)
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    assert [entry[2] for entry in found] == pytest.approx([entry[2] for entry in expected])


@pytest.mark.usefixtures("blocks")
def test_if_all_entries_are_equal_the_first_ones_count():
    found = strongest(torch.zeros(11, 3), torch.zeros(12, 3), 14, identical=False)
    places = [(i, j) for i in range(11) for j in range(12) if i != j]
    assert [entry[:2] for entry in listed(found)] == places[:14]


def test_progress_counts_rows():
    told = []
    strongest(
        torch.ones(5, 2),
        torch.ones(3, 2),
        1,
        progress=lambda phase, done, total, unit: told.append((phase, done, total, unit)),
    )
    assert told == [("pairs", 5, 5, "tokens")]
