"""FLOPs by hand, on tiny models and on the paper's economics."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from families import build
from layerleap.act.exits.cost import Cost, measure_cost
from layerleap.act.exits.replay import Exits
from layerleap.act.exits.rules import Fixed, Never, Oracle, Patience, Similarity, TopProbability
from layerleap.errors import BadSettings, ModelRefused, WrongModel
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import LinearMap, LowRankMap
from layerleap.models.transformer import Transformer
from tiny_models import tiny

COST = Cost((10.0, 20.0, 30.0), 100.0, (1.0, 2.0, 3.0, 0.0), d_model=4, context=8)


def exits(*layers: int) -> Exits:
    return Exits(torch.tensor(layers), torch.ones(len(layers), dtype=torch.bool), 3)


def test_the_full_model_is_its_blocks_and_one_head():
    assert COST.full == 160
    assert COST.head_in_blocks == 5
    assert COST.of(exits(3, 3), Never()) == COST.full


def test_a_rule_that_reads_pays_map_and_head_at_every_check():
    assert COST.of(exits(1), TopProbability(0.5)) == 10 + (2 + 100)
    assert COST.of(exits(2), Patience(2)) == 10 + 20 + (2 + 100) + (3 + 100)


def test_a_row_that_goes_to_the_end_pays_its_failed_checks_and_the_head_once():
    assert COST.of(exits(3), TopProbability(0.5)) == 60 + (2 + 100) + (3 + 100) + 100
    assert COST.of(exits(3), Similarity(0.5)) == 60 + 2 * 8 + 100


def test_a_rule_that_does_not_read_pays_one_reading_at_the_exit():
    assert COST.of(exits(2), Fixed(2)) == 30 + 3 + 100
    assert COST.of(exits(2), Oracle()) == 30 + 3 + 100
    assert COST.of(exits(2), Similarity(0.5)) == 30 + 2 * 8 + 3 + 100


def test_only_checked_layers_are_paid_for():
    assert COST.of(exits(2), TopProbability(0.5), (0, 2, 3)) == 30 + (3 + 100)
    assert COST.of(exits(3), TopProbability(0.5), (0, 2, 3)) == 60 + (3 + 100) + 100


def test_the_cost_of_many_rows_is_their_mean():
    one, two = COST.of(exits(1), TopProbability(0.5)), COST.of(exits(3), TopProbability(0.5))
    assert COST.of(exits(1, 3, 3, 1), TopProbability(0.5)) == (one + two) / 2


def test_costs_and_exits_of_other_models_do_not_mix():
    other = Exits(torch.tensor([2]), torch.tensor([True]), 5)
    with pytest.raises(BadSettings, match="5 layers"):
        COST.of(other, Never())
    with pytest.raises(BadSettings, match="map costs"):
        Cost((1.0,), 1.0, (0.0,), d_model=4, context=8)


def test_blocks_and_head_of_a_llama_are_what_a_count_by_hand_gives():
    d, ffn, kv, tokens, vocabulary = 24, 40, 12, 16, 61
    products = d * d + 2 * d * kv + d * d + 3 * d * ffn  # q, k and v, o, gated feed-forward
    attention = 2 * d * tokens  # scores and weighted sums over the context
    cost = measure_cost(tiny("llama"), tokens=tokens)
    assert cost.blocks == (2.0 * (products + attention),) * 3
    assert cost.head == 2 * d * vocabulary
    assert cost.maps == (0.0,) * 4
    assert (cost.context, cost.d_model, cost.n_layers) == (tokens, d, 3)


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "bert", "t5", "vit"])
def test_the_count_does_not_depend_on_the_kernel_that_attends(name):
    transformer = Transformer.wrap(build(name), name=name)
    fused = measure_cost(transformer, tokens=16)
    transformer.model.set_attn_implementation("eager")
    assert measure_cost(transformer, tokens=16) == fused


def test_experts_are_counted_as_often_as_they_are_asked():
    d, ffn, kv, tokens = 24, 40, 12, 16
    attention = 2 * d * d + 2 * d * kv + 2 * d * tokens
    router, experts = 4 * d, 2 * 3 * d * ffn  # two of four experts per token
    assert measure_cost(tiny("mixtral"), tokens=tokens).blocks[0] == 2 * (
        attention + router + experts
    )


def test_a_longer_context_costs_more_in_blocks_and_not_in_the_head():
    short, long = (measure_cost(tiny("gpt2"), tokens=n) for n in (4, 32))
    assert long.blocks[0] - short.blocks[0] == 4 * 24 * 28
    assert long.head == short.head


def test_counting_leaves_no_hook_behind():
    transformer = tiny("llama")
    measure_cost(transformer, tokens=4)
    modules = transformer.model.modules()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def bank_of(transformer: Transformer, rank: int | None) -> ShortcutBank:
    d, last = transformer.d_model, transformer.n_layers
    maps = [
        LinearMap(src, last, torch.zeros(d, d))
        if rank is None
        else LowRankMap(src, last, torch.zeros(d, rank), torch.zeros(rank, d))
        for src in range(last)
    ]
    return ShortcutBank(maps, model=transformer.identity.to_dict(), n_layers=last, d_model=d)


def test_maps_cost_two_flops_per_entry_and_less_at_low_rank():
    transformer = tiny("llama")
    whole, low = (
        measure_cost(transformer, tokens=9, bank=bank_of(transformer, r)) for r in (None, 5)
    )
    assert whole.maps == (2.0 * 24 * 24,) * 3 + (0.0,)
    assert low.maps == (4.0 * 24 * 5,) * 3 + (0.0,)


def test_a_bank_of_another_model_is_refused():
    with pytest.raises(WrongModel):
        measure_cost(tiny("llama"), tokens=9, bank=bank_of(tiny("gpt2"), None))


@pytest.mark.parametrize("tokens", [0, 65])
def test_a_context_that_the_model_cannot_take_is_refused(tokens):
    with pytest.raises(BadSettings, match="expected 1 to 64"):
        measure_cost(tiny("llama"), tokens=tokens)


def test_with_a_large_vocabulary_the_head_costs_eight_blocks():
    """SmolLM2's sizes, with two of its thirty blocks: a check at every layer never pays late."""
    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "num_hidden_layers": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    cost = measure_cost(Transformer.wrap(build("llama", **sizes), name="smollm2-like"), tokens=1)
    assert cost.head_in_blocks == pytest.approx(8.0, abs=0.05)
    whole = Cost(cost.blocks[:1] * 30, cost.head, (2.0 * 576**2,) * 30 + (0.0,), 576, 1)
    per_layer = {
        layer: whole.of(Exits(torch.tensor([layer]), torch.tensor([True]), 30), Patience(1))
        for layer in (4, 5)
    }
    assert per_layer[4] < whole.full < per_layer[5]


def test_a_users_hook_on_the_head_is_checked_and_not_counted():
    transformer = tiny("llama")
    plain = measure_cost(transformer, tokens=4)
    with transformer.model.lm_head.register_forward_hook(lambda *_: None):
        assert measure_cost(transformer, tokens=4) == plain
    with (
        transformer.model.register_forward_hook(_doubled),
        pytest.raises(ModelRefused, match="forward hook on the model"),
    ):
        measure_cost(transformer, tokens=4)


def _doubled(module, args, output):
    output.logits = 2 * output.logits
    return output


def test_a_counter_around_a_reading_causes_no_check_of_the_tail():
    transformer = tiny("llama")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        transformer.logits(torch.randn(1, transformer.d_model))
    assert counter.get_total_flops() == 2 * transformer.d_model * transformer.d_vocab
