"""Drafts: prompt lookup, the draft table, and which drafts are worth a pass."""

import pytest
import torch

from contract_bank import bank_of
from families import build
from layerleap.act.decode import pass_cost
from layerleap.act.decode.draft_table import DraftTable
from layerleap.act.decode.draft_tree import MOST, AcceptanceRates, Draft, Drafter, Lookup
from layerleap.act.decode.pass_cost import PassCost, measure_passes
from layerleap.act.decode.shortlist import Shortlist
from layerleap.errors import BadSettings
from layerleap.lens.lens import Lens
from layerleap.models.cursor.tree import Tree
from layerleap.models.transformer import Transformer

FREE = PassCost((1, MOST), (1.0, 1.0001))
EXPENSIVE = PassCost((1, 2), (1.0, 2.0))


@pytest.fixture(scope="module")
def lens():
    transformer = Transformer.wrap(build("llama"))
    return Lens(transformer, bank_of(transformer))


def test_a_lookup_finds_what_followed_the_longest_run():
    lookup = Lookup()
    lookup.extend([1, 2, 3, 9, 7, 2, 3, 4, 1, 2, 3])
    assert lookup.find(3) == ([9, 7, 2], 3)  # after 1 2 3, not what came after 2 3 later


def test_of_equal_runs_the_last_one_counts():
    lookup = Lookup()
    lookup.extend([1, 2, 5, 1, 2, 6, 1, 2])
    assert lookup.find(1) == ([6], 2)


def test_a_run_is_not_followed_by_itself_alone():
    lookup = Lookup()
    lookup.extend([1, 2, 3])
    assert lookup.find(4) == ([], 0)


def test_a_row_of_the_table_is_the_reading_of_layer_0(lens):
    table = DraftTable(lens, width=4)
    ids, p = table.of(7)
    h = lens.transformer.capture(
        {"input_ids": torch.tensor([[7]])}, keep=torch.ones(1, 1, dtype=torch.bool), layers=[0]
    ).states[0]
    reading = lens.logits(h, 0).softmax(-1)[0].topk(4)
    assert ids == reading.indices.tolist()
    assert p == pytest.approx(reading.values.tolist(), rel=0.02)  # read in bfloat16


def test_rows_are_computed_once_for_all_tables_of_a_bank(lens, monkeypatch):
    bank = bank_of(lens.transformer)
    table, other = (DraftTable(Lens(lens.transformer, bank), width=4) for _ in range(2))
    table.need([3, 5])
    assert table.known.nonzero()[:, 0].tolist() == [3, 5]
    monkeypatch.setattr(
        DraftTable, "_compute", lambda _, tokens: pytest.fail(f"computed again: {tokens}")
    )
    table.need([5, 3])
    assert other.of(3) == table.of(3)


def test_cheap_tokens_fill_the_tree_and_expensive_ones_leave_a_root(lens):
    table = DraftTable(lens)
    free = Drafter(FREE, table)
    free.begin([5, 6, 5, 6])
    assert len(free.draw(7, room=10).tree) == MOST
    expensive = Drafter(EXPENSIVE, table)
    expensive.begin([5, 6, 5, 6])
    assert expensive.draw(7, room=10).tree.ids == (7,)


def test_nodes_are_no_deeper_than_there_is_room(lens):
    drafter = Drafter(FREE, DraftTable(lens))
    drafter.begin([5, 6, 7, 8, 5, 6, 7, 8, 5, 6])
    for room in (0, 1, 2):
        assert max(drafter.draw(6, room).tree.depths) <= room


def test_without_branches_the_tree_is_a_chain(lens):
    drafter = Drafter(FREE, DraftTable(lens), branches=False)
    drafter.begin([5, 6, 7, 8, 5, 6])
    tree = drafter.draw(6, room=10).tree
    assert len(tree) > 2
    assert tree.is_chain


def test_no_draft_occurs_twice_after_the_same_node(lens):
    drafter = Drafter(FREE, DraftTable(lens))
    follower = DraftTable(lens).of(7)[0][0]
    drafter.begin([9, 7, follower, 3, 9, 7])  # the lookup drafts what the table drafts
    tree = drafter.draw(7, room=10).tree
    pairs = list(zip(tree.parents, tree.ids, strict=True))
    assert len(set(pairs)) == len(pairs)


def test_chances_follow_what_was_accepted(lens):
    drafter = Drafter(FREE, DraftTable(lens))
    drafter.begin([5, 6])
    drafted = drafter.draw(7, room=3)
    kind = drafted.kinds[1]
    before = drafter.chances.of(kind, 0.1)
    for _ in range(50):
        drafter.learn(drafted, [0, 1], [0] * len(drafted.tree), [])
    assert drafter.chances.of(kind, 0.1) > before
    chances = AcceptanceRates()
    assert chances.of(("table", 3), 0.25) == pytest.approx(0.25)


def test_the_models_answer_after_a_rejected_draft_is_drafted_when_its_words_come_up_again(lens):
    drafter = Drafter(FREE)  # nothing but the text itself
    drafter.begin([5, 6])
    assert drafter.draw(6, room=3).tree.ids == (6,)
    tried = Draft(Tree((6, 30), (-1, 0)), (None, ("table", 0)), (1.0, 0.5))
    drafter.learn(tried, [0], [40, 50], [])
    drafter.add(40)
    assert drafter.draw(40, room=3).tree.ids == (40,)
    drafter.add(30)  # after which the model answered 50, though for a rejected draft
    assert drafter.draw(30, room=3).tree.ids[:2] == (30, 50)
    drafter.begin([5, 30])  # another text by the same model
    assert drafter.draw(30, room=3).tree.ids[:2] == (30, 50)


def test_paths_are_in_one_piece_and_the_likeliest_comes_first(lens):
    drafter = Drafter(FREE, DraftTable(lens))
    drafter.begin([5, 6])
    drafted = drafter.draw(6, room=4)
    parents, chances = drafted.tree.parents, drafted.chances
    for node in range(1, len(parents)):
        is_first = parents.index(parents[node]) == node
        assert parents[node] == node - 1 if is_first else True
        siblings = [n for n, parent in enumerate(parents) if parent == parents[node]]
        assert [chances[n] for n in siblings] == sorted(
            (chances[n] for n in siblings), reverse=True
        )


def test_the_cost_of_sizes_in_between_lies_between():
    cost = PassCost((1, 2, 4), (1.0, 1.5, 2.5))
    assert [cost.of(n) for n in (1, 2, 3, 4, 6)] == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.5])


@pytest.mark.parametrize(
    ("sizes", "seconds"), [((), ()), ((2,), (1.0,)), ((1, 1), (1.0, 2.0)), ((1,), (0.0,))]
)
def test_invalid_costs_are_refused(sizes, seconds):
    with pytest.raises(BadSettings):
        PassCost(sizes, seconds)


def test_passes_are_not_measured_for_long(lens, monkeypatch):
    monkeypatch.setattr(pass_cost, "BUDGET", 0.0)
    cost = measure_passes(lens.transformer, repeats=9)
    assert cost.repeats == 1  # the user is waiting
    assert cost.sizes[0] == 1
    assert min(cost.seconds) > 0


def test_a_shortlist_gives_the_numbers_of_the_whole_head(lens):
    short = Shortlist(lens.transformer, [3, 11, 40])
    h = torch.randn(5, lens.transformer.d_model, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(short.logits(h), lens.transformer.logits(h)[:, [3, 11, 40]])


def test_a_shortlist_of_common_tokens_and_invalid_ones(lens):
    short = Shortlist.common(lens.transformer, [[5, 5, 7], [7, 5, 9]], 2)
    assert short.ids.tolist() == [5, 7]
    for ids in ([1], [-1, 3], [3, 61]):
        with pytest.raises(BadSettings, match="shortlist"):
            Shortlist(lens.transformer, ids)
