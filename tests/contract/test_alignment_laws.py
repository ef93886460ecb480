"""A rotated copy with its blocks in another order: the alignment finds both, raw weights do not."""

from functools import cache

import numpy as np
import pytest
import torch

from layerleap.lens.compare.align import align
from layerleap.lens.compare.alignment import Alignment
from layerleap.lens.compare.similarity import Vocabulary
from layerleap.models.transformer import Transformer
from layerleap.models.weights import dual, kinds, unembedding, vectors
from rotated import FAMILIES, LAYERS, permuted, plain, rotated, rotation

ORDER = [2, 0, 5, 1, 4, 3]  # block i of the copy is block ORDER[i] of the model, from 0
IDS = torch.tensor([[5, 9, 17, 33, 60, 2, 8]])


@cache
def model(name: str) -> Transformer:
    return Transformer.wrap(plain(name), name=name)


@cache
def turned(name: str) -> Transformer:
    return Transformer.wrap(rotated(model(name).model, rotation()), name=f"{name}, rotated")


@cache
def copied(name: str) -> Transformer:
    blocks = model(name).blocks[0].rpartition(".")[0]
    return Transformer.wrap(permuted(turned(name).model, blocks, ORDER), name=f"{name}, copied")


@cache
def alignment(name: str) -> Alignment:
    return align(model(name), copied(name), progress=False)


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_the_rotated_copy_is_the_same_function_by_other_numbers(name):
    ours, theirs = (one.model(input_ids=IDS).logits for one in (model(name), turned(name)))
    # Many norms compute in float32, whatever the model.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    kind = kinds(model(name), 1)[0]
    own, other = (vectors(one, 1, kind) for one in (model(name), turned(name)))
    assert not torch.allclose(own, other, atol=0.1)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_order_of_blocks_comes_back_by_every_kind_and_measure(name):
    found = alignment(name)
    assert found.kinds == kinds(model(name), 1)
    assert not found.missing
    wanted = {source + 1: place + 1 for place, source in enumerate(ORDER)}
    for kind in found.kinds:
        for measure in ("best", "mean"):
            one = found.matching(kind, measure)
            assert {match.a: match.b for match in one.matches} == wanted, (kind, measure)
            assert one.smallest_margin > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_best_match_of_a_block_and_its_copy_is_one_and_of_no_other(name):
    found = alignment(name)
    for kind in found.kinds:
        one = found.matching(kind)
        for row, similarities in enumerate(one.similarity):
            place = ORDER.index(row)
            assert similarities[place] == pytest.approx(1.0, abs=1e-5)
            assert max(s for p, s in enumerate(similarities) if p != place) < 0.95


@pytest.mark.parametrize("name", FAMILIES)
def test_raw_coordinates_do_not_find_the_order(name):
    found = alignment(name)
    wanted = {source + 1: place + 1 for place, source in enumerate(ORDER)}
    for kind in found.kinds:
        for measure in ("best", "mean"):
            one = found.matching(kind, measure, "raw")
            right = sum(wanted[match.a] == match.b for match in one.matches)
            assert right < LAYERS, (kind, measure)
        assert max(map(max, found.matching(kind, "best", "raw").similarity)) < 0.9


@pytest.mark.parametrize("name", FAMILIES)
def test_correlations_from_kernels_are_those_of_the_scores_of_all_tokens(name):
    one, other = model(name), copied(name)
    e_a, e_b = (unembedding(each).double() for each in (one, other))
    space = Vocabulary.of(e_a, e_b)
    for kind in kinds(one, 1):
        x, y = vectors(one, 2, kind).double(), vectors(other, 4, kind).double()
        explicit = np.corrcoef((x @ e_a.T).numpy(), (y @ e_b.T).numpy())[: len(x), len(x) :]
        ours = space.left(x) @ space.right(y).T
        torch.testing.assert_close(ours.double(), torch.tensor(explicit), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_kernel_between_the_output_matrices_is_the_rotation(name):
    e_a, e_b = (unembedding(each).double() for each in (model(name), turned(name)))
    kernel = dual(e_a.T @ e_b, e_b)  # E_A E_B^+, for matrices with a row per token
    torch.testing.assert_close(kernel.double(), rotation(), rtol=0, atol=1e-6)
