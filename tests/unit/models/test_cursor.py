"""Positions may wait, trees may branch, passes may fail: what stays is always right."""

import pytest
import torch

from families import NEXT_TOKEN, build
from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.cursor.tree import Tree
from layerleap.models.cursor.verify import find_axes
from layerleap.models.transformer import Transformer

IDS = [5, 9, 7, 11, 23, 6, 40, 8, 31, 12, 17, 50]


def wrapped(name="llama", **changes):
    model = build(name, **changes)
    return Transformer.wrap(
        model if name in ("gpt_oss", "mixtral", "qwen2_moe", "mpt") else model.double()
    )


def whole(transformer, ids):
    keep = torch.ones(1, len(ids), dtype=torch.bool)
    return transformer.capture({"input_ids": torch.tensor([ids])}, keep=keep).states


def stop(*_):
    return True


@pytest.fixture(scope="module")
def llama():
    transformer = wrapped()
    return transformer, find_axes(transformer)


def test_tokens_one_by_one_end_where_one_pass_ends(llama):
    transformer, axes = llama
    with Cursor(transformer, axes) as cursor:
        h = [cursor.run([token]).h[-1] for token in IDS]
    torch.testing.assert_close(torch.stack(h), whole(transformer, IDS)[3])


def test_a_position_that_waited_ends_where_it_would_have(llama):
    transformer, axes = llama
    with Cursor(transformer, axes) as cursor:
        cursor.run(IDS[:4])
        early = cursor.run(IDS[4:5], watch=stop, checks=[1])
        assert (early.layer, cursor.waiting) == (1, 1)
        later = cursor.run(IDS[5:6])
    states = whole(transformer, IDS[:6])
    torch.testing.assert_close(early.h, states[1][4:5])
    torch.testing.assert_close(later.h, states[3][4:6])
    assert cursor.waiting == 0


def test_positions_wait_at_falling_layers_and_all_reach_the_last(llama):
    transformer, axes = llama
    with Cursor(transformer, axes) as cursor:
        cursor.run(IDS[:3])
        for token, layer in zip(IDS[3:7], (2, 1, 2, 1), strict=True):
            cursor.run([token], watch=stop, checks=[layer])
        lengths = [layer.length for layer in cursor.cache.layers]
        assert lengths == sorted(lengths, reverse=True)
        rest = cursor.run([])
    torch.testing.assert_close(rest.h, whole(transformer, IDS[:7])[3][3:7])


def test_positions_that_were_cut_leave_no_trace(llama):
    transformer, axes = llama
    with Cursor(transformer, axes) as cursor:
        cursor.run(IDS[:4])
        cursor.run([1, 2, 3])
        cursor.run([4], watch=stop, checks=[1])
        cursor.cut(4)
        assert (cursor.ids, cursor.waiting) == (IDS[:4], 0)
        h = cursor.run(IDS[4:6]).h
    torch.testing.assert_close(h, whole(transformer, IDS[:6])[3][4:6])


def test_cutting_among_waiting_positions_keeps_the_others(llama):
    transformer, axes = llama
    with Cursor(transformer, axes) as cursor:
        cursor.run(IDS[:4])
        for token in (*IDS[4:6], 1):
            cursor.run([token], watch=stop, checks=[1])
        cursor.cut(6)
        h = cursor.run([]).h
    torch.testing.assert_close(h, whole(transformer, IDS[:6])[3][4:6])


def test_a_node_of_a_tree_sees_only_its_own_past(llama):
    transformer, axes = llama
    tree = Tree((IDS[4], 1, IDS[5], 2, 3), (-1, -1, 0, 0, 1))
    with Cursor(transformer, axes) as cursor:
        cursor.run(IDS[:4])
        h = cursor.run(tree).h
    for node, path in ((2, IDS[4:6]), (3, [IDS[4], 2]), (4, [1, 3])):
        expected = whole(transformer, IDS[:4] + path)[3][-1]
        torch.testing.assert_close(h[node], expected)


@pytest.mark.parametrize("path", [[0], [1, 4], [0, 3], [0, 2]])
def test_only_the_path_that_is_kept_is_remembered(llama, path):
    transformer, axes = llama
    tree = Tree((IDS[4], 1, IDS[5], 2, 3), (-1, -1, 0, 0, 1))
    with Cursor(transformer, axes) as cursor:
        cursor.run(IDS[:4])
        cursor.run(tree)
        cursor.keep(path, tree)
        ids = IDS[:4] + [tree.ids[node] for node in path]
        assert cursor.ids == ids
        h = cursor.run([9]).h
    torch.testing.assert_close(h[-1], whole(transformer, [*ids, 9])[3][-1])


def test_keys_of_skipped_layers_are_computed_from_the_carried_states(llama):
    transformer, axes = llama
    carried = []

    def carry(h, src, dst):
        carried.append((src, dst))
        return h + dst

    with Cursor(transformer, axes) as cursor:
        cursor.run(IDS[:4])
        ran = cursor.run(IDS[4:5], watch=stop, checks=[1], carry=carry)
        keys = [layer.keys[..., -1, :].clone() for layer in cursor.cache.layers]
    assert carried == [(1, 1), (1, 2)]
    assert ran.layer == 1
    assert [layer.length for layer in cursor.cache.layers] == [5, 5, 5]
    # The third block must have seen h[1] + 2 where it would have seen h[2].
    model = transformer.model
    block = model.model.layers[2]
    k = block.self_attn.k_proj(block.input_layernorm(ran.h[None] + 2)).view(1, 1, 2, -1)
    cos, sin = model.model.rotary_emb(k, torch.tensor([[4]]))
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    expected = apply_rotary_pos_emb(k.transpose(1, 2), k.transpose(1, 2), cos, sin)[0][:, :, 0]
    torch.testing.assert_close(keys[2], expected)


def test_an_interrupted_pass_does_not_count(llama):
    transformer, axes = llama

    def interrupt(*_):
        raise KeyboardInterrupt

    with Cursor(transformer, axes) as cursor:
        cursor.run(IDS[:4])
        cursor.run(IDS[4:5], watch=stop, checks=[1])
        with pytest.raises(KeyboardInterrupt):
            cursor.run(IDS[5:6], watch=interrupt, checks=[2])
        assert (cursor.ids, cursor.waiting) == (IDS[:5], 1)
        h = cursor.run(IDS[5:6]).h
    torch.testing.assert_close(h, whole(transformer, IDS[:6])[3][4:6])


def test_the_model_is_as_before_even_after_an_error(llama):
    transformer, axes = llama
    before = [dict(module.__dict__) for module in transformer.model.modules()]

    def fail(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Cursor(transformer, axes) as cursor:
        cursor.run(IDS[:4], watch=fail, checks=[1])
    assert [dict(module.__dict__) for module in transformer.model.modules()] == before


def test_another_pass_inside_is_not_disturbed(llama):
    transformer, axes = llama
    ids = torch.tensor([IDS])
    expected = transformer.model(ids).logits
    with Cursor(transformer, axes) as cursor:
        cursor.run(IDS[:4])
        assert torch.equal(transformer.model(ids).logits, expected)
        torch.testing.assert_close(cursor.run(IDS[4:5]).h, whole(transformer, IDS[:5])[3][4:])


@pytest.mark.parametrize("name", NEXT_TOKEN)
def test_every_family_can_wait_and_those_that_branch_say_so(name):
    axes = find_axes(wrapped(name))
    assert axes.branches == (name not in ("gpt_neo", "mpt"))  # these hide a mask from arguments


@pytest.mark.parametrize("name", ["bert", "t5", "whisper", "vit"])
def test_models_that_do_not_predict_the_next_token_are_refused(name):
    with pytest.raises(ModelRefused, match="is not a causal language model"):
        find_axes(Transformer.wrap(build(name)))


def test_recurrent_layers_are_refused_with_the_reason():
    import transformers

    config = transformers.MambaConfig(
        vocab_size=61, hidden_size=24, num_hidden_layers=2, state_size=4, expand=2, conv_kernel=3
    )
    torch.manual_seed(0)
    transformer = Transformer.wrap(transformers.MambaForCausalLM(config).eval(), check=False)
    with pytest.raises(ModelRefused, match="recurrent"):
        find_axes(transformer)


def test_trees_and_waiting_do_not_mix(llama):
    transformer, axes = llama
    with Cursor(transformer, axes) as cursor:
        cursor.run(IDS[:4])
        cursor.run(IDS[4:5], watch=stop, checks=[1])
        with pytest.raises(BadSettings, match="while positions wait"):
            cursor.run(Tree((1, 2), (-1, -1)))


def test_nothing_to_run_is_an_error(llama):
    transformer, axes = llama
    with Cursor(transformer, axes) as cursor, pytest.raises(BadSettings, match="no token"):
        cursor.run([])


@pytest.mark.parametrize(("ids", "parents"), [((), ()), ((1, 2), (-1,)), ((1, 2), (1, -1))])
def test_a_malformed_tree_is_refused(ids, parents):
    with pytest.raises(BadSettings):
        Tree(ids, parents)
