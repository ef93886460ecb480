"""Decoding under edits: every exact decoder writes what `generate` writes under the same edits."""

import copy
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from contract_bank import bank_of
from edit_cases import EXPERTS, OWN_ATTENTION, average, random_parts, traces
from families import NEXT_TOKEN, build
from layerleap.act.decode.decoder import decoder
from layerleap.act.decode.generate import generate
from layerleap.act.decode.pass_cost import PassCost
from layerleap.act.edits import (
    AddNeuron,
    AddVector,
    ClampAlong,
    PatchHead,
    PatchSite,
    PatchState,
    ProjectOut,
    ReplaceAttention,
    ReplaceParts,
    ScaleHead,
    ScaleNeuron,
    ScaleSite,
    SetNeuron,
    ZeroHead,
    ZeroNeuron,
)
from layerleap.act.edits.patch import Patch
from layerleap.act.exits.rules import Fixed, Never
from layerleap.errors import BadSettings
from layerleap.models.transformer import Transformer
from layerleap.models.weights import all_heads, heads
from tiny_models import tiny

SINGLE = (*EXPERTS, "mpt")  # parts of these compute in float32 whatever the dtype
CHEAP = PassCost((1, 2, 4, 8, 16), (1.0, 1.01, 1.02, 1.04, 1.08))  # so that trees are large
PROMPT = [5, 9, 7, 5, 9, 7, 8, 5, 9]
WAYS = {
    "tree": {"cost": CHEAP},
    "lookup": {"cost": CHEAP, "drafts": ("lookup",)},
    "early": {"drafts": ("early",), "draft_layer": 1},
    "never": {"rule": Never()},
}
OPTIONS = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture(scope="module", params=NEXT_TOKEN)
def case(request):
    """A model, its decoders, and edits of every kind that it allows."""
    name = request.param
    transformer = prepared(name)
    bank = bank_of(transformer)
    ways = {way: decoder(bank, transformer=transformer, **o) for way, o in WAYS.items()}
    return transformer, ways, edits_of(name, transformer)


def prepared(name: str) -> Transformer:
    model = build(name)
    model = model if name in SINGLE else model.double()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.config.use_cache = model.generation_config.use_cache = True
    return Transformer.wrap(model)


def edits_of(name: str, transformer: Transformer) -> list:
    """At the prompt, at its end, at what is generated, and everywhere."""
    draw = torch.Generator().manual_seed(3)
    states = torch.randn(3, transformer.d_model, generator=draw)
    edits = [PatchState(1, states[:2], [3, 12]), PatchState(0, states[2], 10)]
    edits += [
        PatchSite(2, "attn", states[0], 11),
        ScaleSite(3, "attn", -0.5, positions="generated"),
        AddVector(2, states[1], 0.7, positions="last"),
        ProjectOut(1, states[2]),
        ClampAlong(3, states[0], high=0.1, positions=[2, 9]),
    ]
    if not isinstance(all_heads(transformer)[2], str):
        width = heads(transformer, 2).d_value
        edits += [ScaleHead(1, 2, 3.0), ZeroHead(2, 0, positions="generated")]
        edits.append(PatchHead(3, 1, torch.ones(2, width), [0, 10]))
    if name not in EXPERTS:
        edits += [
            AddNeuron(2, 5, 3.0, positions="generated"),
            ScaleNeuron(1, 7, -2.0, positions="last"),
            SetNeuron(2, 4, 1.5, positions=[0, 10, 11]),
        ]
    if name not in OWN_ATTENTION:
        edits.append(ReplaceAttention(average, [2]))
    edits.append(ReplaceParts(random_parts(transformer, ["ffn"]), ["ffn"], 2))
    return edits


def written(case, way=None, ids=None, edits=None, **options):
    transformer, ways, own = case
    ids = torch.tensor([PROMPT]) if ids is None else ids
    with transformer.edit(*(own if edits is None else edits)) as report:
        custom = None if way is None else ways[way]
        text = transformer.model.generate(ids, custom_generate=custom, **{**OPTIONS, **options})
    assert not report.unused
    return text


@pytest.mark.parametrize("way", WAYS)
def test_the_text_is_that_of_generate_under_the_same_edits(case, way):
    transformer = case[0]
    plain = transformer.model.generate(torch.tensor([PROMPT]), **OPTIONS)
    before = traces(transformer.model)
    theirs = written(case)
    assert torch.equal(written(case, way), theirs)
    assert not torch.equal(theirs, plain)
    assert traces(transformer.model) == before
    assert torch.equal(transformer.model.generate(torch.tensor([PROMPT]), **OPTIONS), plain)


def test_edits_do_not_depend_on_the_cache(case):
    assert torch.equal(written(case, use_cache=False), written(case))


def test_each_edit_alone_is_the_same_for_tree_and_generate(case):
    for edit in case[2]:
        texts = [written(case, way, edits=[edit], max_new_tokens=5) for way in (None, "tree")]
        assert torch.equal(*texts)


def test_processors_and_seeds_are_honoured_under_edits(case):
    for options in (
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
    ):
        texts = []
        for way in (None, "tree"):
            torch.manual_seed(3)
            texts.append(written(case, way, **options))
        assert torch.equal(*texts)


def test_positions_count_from_the_first_real_token_of_padded_texts(case):
    """In a batch padded on the left, each text is edited as it is alone."""
    ids = torch.tensor([PROMPT, [0, 0, 0, 0, 11, 12, 13, 11, 12]])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    ours = written(case, "tree", ids, attention_mask=mask)
    for row, skip in enumerate((0, 4)):
        alone = written(case, None, ids[row : row + 1, skip:])
        assert torch.equal(ours[row, skip:], alone[0])


def test_a_cached_continuation_is_edited_as_the_whole_text_is(case):
    texts = []
    for way in (None, "tree"):
        cache = DynamicCache()  # without a window: one that has dropped keys is refused
        first = written(case, way, past_key_values=cache, max_new_tokens=6)
        longer = torch.cat([first, torch.tensor([[21, 22]])], 1)
        edits = [e for e in case[2] if not isinstance(e, Patch | ClampAlong)]
        edits.append(PatchState(2, torch.ones(case[0].d_model), longer.shape[1] + 1))
        texts.append(
            written(
                case,
                way,
                longer,
                [e for e in edits if not isinstance(e, SetNeuron)],
                past_key_values=cache,
                max_new_tokens=8,
                attention_mask=torch.ones_like(longer),
            )
        )
    assert torch.equal(*texts)


@pytest.fixture(scope="module")
def llama():
    transformer = prepared("llama")
    ways = {"tree": decoder(bank_of(transformer), transformer=transformer, cost=CHEAP)}
    return transformer, ways, edits_of("llama", transformer)


def padded_batch(n: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """More texts than share a pass, of several lengths."""
    ids = torch.randint(3, 60, (n, 9), generator=torch.Generator().manual_seed(n))
    mask = torch.ones_like(ids)
    for row in range(n):
        mask[row, : row % 4] = 0
    return ids * mask, mask


def test_padded_batches_are_those_of_generate(llama):
    ids, mask = padded_batch()
    theirs = written(llama, None, ids, attention_mask=mask)
    assert torch.equal(written(llama, "tree", ids, attention_mask=mask), theirs)


def test_an_edit_of_one_text_leaves_the_others_of_a_batch_alone(llama):
    transformer, ids_mask = llama[0], padded_batch()
    ids, mask = ids_mask
    plain = transformer.model.generate(ids, attention_mask=mask, **OPTIONS)
    for text in (1, 9):  # the second is in another group of texts that share passes
        patch = PatchState(2, torch.full((2, 24), 30.0), [2, 8], [text, text])
        theirs = written(llama, None, ids, [patch], attention_mask=mask)
        ours = written(llama, "tree", ids, [patch], attention_mask=mask)
        assert torch.equal(ours, theirs)
        others = [row for row in range(len(ids)) if row != text]
        assert torch.equal(ours[others], plain[others])
        assert not torch.equal(ours[text], plain[text])


def test_beams_and_several_samples_of_a_text_are_all_edited(llama):
    transformer, ids = llama[0], torch.tensor([PROMPT, PROMPT[::-1]])
    patch = PatchState(2, torch.randn(24, generator=torch.Generator().manual_seed(1)), 8, 1)
    scored = {"return_dict_in_generate": True, "output_scores": True, **OPTIONS}
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        plain = transformer.model.generate(ids, **scored, **options).sequences_scores
        with transformer.edit(patch) as report:
            edited = transformer.model.generate(ids, **scored, **options).sequences_scores
        half = len(plain) // 2
        assert torch.equal(edited[:half], plain[:half])
        assert not torch.equal(edited[half:], plain[half:])
        assert report[0].positions == options["num_beams"]


def test_generated_means_after_the_prompt_even_if_a_cache_holds_all_but_one_token(llama):
    """The pass over the last token of the prompt looks like one over a token that was written."""
    transformer, ids = llama[0], torch.tensor([PROMPT])
    with torch.no_grad():
        cache = transformer.model(ids[:, :-1], use_cache=True).past_key_values
    for positions, count in (("generated", 19), ("last", 20), ([len(PROMPT) - 1], 1)):
        with transformer.edit(AddNeuron(2, 3, 1.0, positions=positions)) as report:
            cached = transformer.model.generate(
                ids, past_key_values=copy.deepcopy(cache), **OPTIONS
            )
        assert report[0].positions == count
        with transformer.edit(AddNeuron(2, 3, 1.0, positions=positions)):
            assert torch.equal(transformer.model.generate(ids, **OPTIONS), cached)


def test_passes_that_transformers_splits_or_drafts_are_edited_alike(llama):
    theirs = written(llama)
    assert torch.equal(written(llama, prompt_lookup_num_tokens=3), theirs)
    assert torch.equal(written(llama, prefill_chunk_size=4), theirs)


def test_early_exits_under_edits_are_those_of_the_edited_model(llama):
    """Waiting positions are edited when they are run, so a fixed exit is the lens of that layer."""
    transformer = llama[0]
    custom = decoder(transformer=transformer, rule=Fixed(2), compare=True)
    edits = [AddNeuron(1, 5, 4.0, positions="generated"), AddNeuron(3, 5, 4.0, positions="last")]
    with transformer.edit(*edits) as report:
        text = transformer.model.generate(
            torch.tensor([PROMPT]), custom_generate=custom, **OPTIONS
        )[0]
        new = text[len(PROMPT) :].tolist()
        assert not report.unused
    for n in range(1, len(new)):
        # The same text in one pass, its generated positions named by number.
        ids = text[: len(PROMPT) + n]
        places = list(range(len(PROMPT), len(ids)))
        last = list(range(len(PROMPT) - 1, len(ids)))
        with transformer.edit(
            AddNeuron(1, 5, 4.0, positions=places), AddNeuron(3, 5, 4.0, positions=last)
        ):
            h = transformer.capture({"input_ids": ids[None]}).states
        assert int(transformer.logits(h[2][0, -1:]).argmax()) == new[n]
    stats = custom.stats[0]
    assert stats.compared == len(new)


def test_replaced_attention_modules_need_a_pass_without_cache(llama):
    transformer, ways, _ = llama
    edit = ReplaceParts(random_parts(transformer), ["attn"], 1)
    with transformer.edit(edit):
        for custom in (None, ways["tree"]):
            with pytest.raises(BadSettings, match="use_cache=False"):
                transformer.model.generate(
                    torch.tensor([PROMPT]), custom_generate=custom, **OPTIONS
                )
        text = transformer.model.generate(torch.tensor([PROMPT]), use_cache=False, **OPTIONS)
        for n in range(len(PROMPT), text.shape[1]):
            logits = transformer.capture({"input_ids": text[:, :n]}, logits=True).logits
            assert int(logits[0, -1].argmax()) == int(text[0, n])


def test_what_a_decoder_prepares_does_not_depend_on_edits(llama):
    """The model is wrapped, its cursor verified and its drafts made as if nothing were edited."""
    transformer = prepared("llama")
    bank, ids = bank_of(transformer), torch.tensor([PROMPT])
    fresh = decoder(bank, cost=CHEAP)  # wraps the model itself, at its first call
    strong = [AddNeuron(1, 5, 1e3), PatchState(0, torch.full((24,), 1e3), 3)]
    with transformer.edit(*strong):
        inside = transformer.model.generate(ids, custom_generate=fresh, **OPTIONS)
        assert torch.equal(inside, transformer.model.generate(ids, **OPTIONS))
    clean = decoder(bank, transformer=transformer, cost=CHEAP)
    transformer.model.generate(ids, custom_generate=clean, **OPTIONS)
    ours, theirs = fresh._prepared, clean._prepared
    assert ours.transformer.blocks == theirs.transformer.blocks
    assert (ours.axes.branches, ours.axes.batches) == (True, True)
    rows = ours.drafter.table.known  # computed while the edits were in force
    assert rows.any()
    theirs.drafter.table.need(rows.nonzero()[:, 0].tolist())
    assert torch.equal(ours.drafter.table.p[rows], theirs.drafter.table.p[rows])


def test_generate_of_this_package_is_edited_too():
    transformer = tiny("llama")
    transformer.model.double().generation_config.eos_token_id = None
    edit = ZeroNeuron(2, 3), AddNeuron(3, 7, 20.0, positions="generated")
    with transformer.edit(*edit) as report:
        theirs = generate(transformer, "the cat sat on", decoder="transformers", max_new_tokens=12)
        custom = decoder(bank_of(transformer), transformer=transformer, cost=CHEAP)
        ours = generate(transformer, "the cat sat on", decoder=custom, max_new_tokens=12)
    plain = generate(transformer, "the cat sat on", decoder="transformers", max_new_tokens=12)
    assert ours.ids == theirs.ids != plain.ids
    assert not report.unused


@pytest.mark.parametrize(("name", "changes"), [("t5", {"num_layers": 3}), ("bart", {})])
def test_decoders_of_encoder_decoders_are_edited_while_they_generate(name, changes):
    transformer = Transformer.wrap(build(name, **changes).double())
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    options = {**OPTIONS, "min_new_tokens": 20, "return_dict_in_generate": True}
    options["output_scores"] = True
    plain = torch.stack(transformer.model.generate(ids, **options).scores)
    patch = PatchState(2, torch.full((24,), 3.0), 4, 1)
    for edit in (patch, AddNeuron(2, 3, 5.0, positions=[4])):
        with transformer.edit(edit) as report:
            edited = torch.stack(transformer.model.generate(ids, **options).scores)
        assert torch.equal(edited[:4], plain[:4])  # the fifth token is chosen at position 4
        assert not torch.equal(edited[4, 1], plain[4, 1])
        assert torch.equal(edited[4, 0], plain[4, 0]) == (edit is patch)
        assert report[0].passes == 1
    with transformer.edit(patch) as report:
        transformer.model.generate(ids, num_beams=3, **OPTIONS)
    assert report[0].positions == 3
    with (
        transformer.edit(AddNeuron(2, 3, 5.0, positions="generated")),
        pytest.raises(BadSettings, match="no prompt of known length"),
    ):
        transformer.model.generate(ids, **OPTIONS)


def test_recurrent_caches_do_not_tell_positions_and_are_refused():
    import transformers

    config = transformers.MambaConfig(
        vocab_size=61, hidden_size=24, num_hidden_layers=2, state_size=4, expand=2, conv_kernel=3
    )
    torch.manual_seed(0)
    transformer = Transformer.wrap(transformers.MambaForCausalLM(config).eval(), check=False)
    ids, patch = torch.tensor([PROMPT]), PatchState(1, torch.ones(24), 10)
    options = {**OPTIONS, "pad_token_id": 0, "min_new_tokens": 20}
    with transformer.edit(patch) as report:
        with pytest.raises(BadSettings, match="recurrent state"):
            transformer.model.generate(ids, **options)
        transformer.model.generate(ids, use_cache=False, **options)
    assert report[0].passes == 18  # position 10 is in every pass but the first two


@pytest.mark.parametrize("policy", ["propagate", "shortcut"])
def test_edits_of_skipped_blocks_are_reported_as_never_applied(llama, policy):
    """These policies never run the blocks above an exit, and so nothing is edited there."""
    transformer = llama[0]
    before = traces(transformer.model)
    custom = decoder(bank_of(transformer), transformer=transformer, rule=Fixed(1), policy=policy)
    low, high = (AddNeuron(block, 5, 4.0, positions="generated") for block in (1, 3))
    ids = torch.tensor([PROMPT])
    with transformer.edit(low, high) as report:
        edited = transformer.model.generate(ids, custom_generate=custom, **OPTIONS)
    assert report.unused == (high,)
    with transformer.edit(low):
        again = transformer.model.generate(ids, custom_generate=custom, **OPTIONS)
    assert torch.equal(edited, again)
    assert set(custom.stats[0].layers) == {1, 3}  # the first token is read off the prompt
    assert traces(transformer.model) == before


def test_steered_text_is_that_of_generate_under_plain_hooks(case):
    """One vector added to a state, one head switched off, everywhere, by hooks of PyTorch alone."""
    transformer, _, _ = case
    vector = torch.linspace(-1, 1, transformer.d_model)
    edits = [AddVector(2, vector, 0.8)]
    known = not isinstance(all_heads(transformer)[3], str)
    hooks = [transformer.block(2).register_forward_hook(partial(_added, vector))]
    if known:
        own = heads(transformer, 3)
        edits.append(ZeroHead(3, 1))
        columns = slice(own.d_value, 2 * own.d_value)
        module = transformer.model.get_submodule(own.outputs.path)
        hooks.append(module.register_forward_pre_hook(partial(_without, columns)))
    theirs = transformer.model.generate(torch.tensor([PROMPT]), **OPTIONS)
    for hook in hooks:
        hook.remove()
    for way in (None, *WAYS):
        assert torch.equal(written(case, way, edits=edits), theirs)


def _added(vector, _module, _args, output):
    is_tuple = isinstance(output, tuple)
    h = output[0] if is_tuple else output
    h = h + (0.8 * vector.double()).to(h.dtype)
    return (h, *output[1:]) if is_tuple else h


def _without(columns, _module, args):
    given = args[0].clone()
    given[..., columns] = 0
    return (given, *args[1:])
