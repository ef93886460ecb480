"""Decoders: rules exit live where replay exits; statistics, refusals, and no side effects."""

import re
import time
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from contract_bank import bank_of
from decoders import wrapped
from families import build
from layerleap.act.decode import pass_cost, prepared
from layerleap.act.decode.coloured import coloured_html
from layerleap.act.decode.decoder import decoder
from layerleap.act.decode.pass_cost import PassCost
from layerleap.act.decode.speculative import near_ties
from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.replay import replay
from layerleap.act.exits.rules import (
    Entropy,
    Fixed,
    Gap,
    Oracle,
    Patience,
    Similarity,
    Task,
    TopProbability,
    rule_from_dict,
)
from layerleap.errors import BadSettings, BadText, WrongModel
from layerleap.lens.lens import Lens
from layerleap.lens.probes.task import Softmax, TaskProbe
from layerleap.lens.scores import score
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.cursor.verify import find_axes
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Example, collate

PROMPT = torch.tensor([[5, 9, 7, 5, 9, 7, 8, 5, 9]])
CHEAP = PassCost((1, 2, 4, 8, 16), (1.0, 1.01, 1.02, 1.04, 1.08))
N = 24


@pytest.fixture(scope="module")
def llama():
    transformer = wrapped(num_hidden_layers=5)
    return transformer, bank_of(transformer)


def write(transformer, custom, ids=PROMPT, **options):
    options = {"max_new_tokens": N, "do_sample": False, **options}
    return transformer.model.generate(ids, custom_generate=custom, **options)


RULES = [
    Fixed(2),
    Similarity(0.9),
    TopProbability(0.1),
    Entropy(3.6),
    Patience(2),
    Gap(0.01, 12.0),
]


@pytest.mark.parametrize("checks", [None, (2, 4)])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_live_run_exits_where_replay_does(llama, rule, checks):
    transformer, bank = llama
    decoding = decoder(bank, rule=rule, checks=checks, transformer=transformer)
    ids = write(transformer, decoding)[0].tolist()
    lens = Lens(transformer, bank)
    places = range(PROMPT.shape[1] - 1, len(ids) - 1)
    batch = collate(transformer, [Example(0, tuple(ids), tuple(places))])
    seen = Evidence.from_scores(score(transformer, {"linear": lens}, [batch]), "linear")
    seen = seen.at(range(1, 5) if checks is None else checks)
    wanted = replay(rule, seen).layer.tolist()
    stats = decoding.stats[0]
    assert stats.layers[0] == 5  # the prompt is run in full
    assert stats.layers[1:] == wanted[1:]
    assert min(wanted[1:]) < 5 or rule.name in ("entropy", "gap", "top-probability")


def test_agreement_is_measured_against_the_full_model_after_the_same_text(llama):
    transformer, bank = llama
    decoding = decoder(bank, rule=Fixed(2), transformer=transformer, compare=True)
    ids = write(transformer, decoding)
    logits = transformer.model(ids).logits[0, PROMPT.shape[1] - 1 : -1]
    expected = (logits.argmax(-1) == ids[0, PROMPT.shape[1] :]).double().mean().item()
    assert decoding.stats[0].agreement == pytest.approx(expected)
    assert decoding.stats[0].exactness == "approximate"


def test_recomputed_keys_are_those_of_the_full_model(llama):
    transformer, bank = llama
    decoding = decoder(bank, rule=Fixed(2), transformer=transformer)
    found = write(transformer, decoding, return_dict_in_generate=True)
    cache = transformer.model(found.sequences[:, :-1], use_cache=True).past_key_values
    for ours, theirs in zip(found.past_key_values.layers, cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)


@pytest.mark.parametrize("rule", [Similarity(0.9), TopProbability(0.1)], ids=lambda rule: rule.name)
def test_tokens_that_exit_early_can_be_read_from_a_shortlist_alone(llama, rule):
    transformer, bank = llama
    short = list(range(3, 40, 2))
    decoding = decoder(bank, rule=rule, transformer=transformer, shortlist=short, head="shortlist")
    ids = write(transformer, decoding)[0]
    lens, left = Lens(transformer, bank), 0
    states = transformer.capture({"input_ids": ids[None]}, layers=range(6)).states
    for written, layer in enumerate(decoding.stats[0].layers):
        at = PROMPT.shape[1] + written
        logits = lens.logits(states[layer][0, at - 1][None], layer)[0]
        if layer < 5:
            left += 1
            assert int(ids[at]) == short[int(logits[short].argmax())]
        else:
            assert int(ids[at]) == int(logits.argmax())
    assert left > N // 4


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_if_processors_rule_out_the_shortlist_the_whole_head_is_read(llama, options):
    transformer, bank = llama
    short = list(range(3, 40, 2))
    banned = {"bad_words_ids": [[token] for token in short], **options}
    decoding = decoder(
        bank, rule=Fixed(2), transformer=transformer, shortlist=short, head="shortlist"
    )
    whole = decoder(bank, rule=Fixed(2), transformer=transformer)
    texts = []
    for custom in (decoding, whole):
        torch.manual_seed(5)
        texts.append(write(transformer, custom, **banned))
    assert torch.equal(*texts)
    assert not set(texts[0][0, PROMPT.shape[1] :].tolist()) & set(short)


def test_end_of_text_tokens_are_always_on_the_shortlist():
    transformer = wrapped()
    transformer.model.generation_config.eos_token_id = [50, 51]
    decoding = decoder(
        None, rule=Fixed(1), transformer=transformer, shortlist=[3, 4], head="shortlist"
    )
    write(transformer, decoding, max_new_tokens=2)
    assert decoding._prepared.shortlist.ids.tolist() == [3, 4, 50, 51]


@pytest.mark.parametrize("policy", ["propagate", "shortcut"])
def test_approximate_policies_differ_from_the_full_model_only_above_exits(llama, policy):
    transformer, bank = llama
    decoding = decoder(bank, rule=Fixed(2), policy=policy, transformer=transformer)
    found = write(transformer, decoding, return_dict_in_generate=True)
    assert decoding.stats[0].policy == policy
    cache = transformer.model(found.sequences[:, :-1], use_cache=True).past_key_values
    n, layers = PROMPT.shape[1], found.past_key_values.layers
    for number, (ours, theirs) in enumerate(zip(layers, cache.layers, strict=True)):
        torch.testing.assert_close(ours.keys[..., :n, :], theirs.keys[..., :n, :])
        first = ours.keys[..., n, :] - theirs.keys[..., n, :]
        assert (first.abs().max() < 1e-9) == (
            number < 3
        )  # blocks 1 and 2, and what the third takes


def test_accepted_drafts_make_fewer_passes(llama):
    transformer, _ = llama
    cycle = torch.tensor([[5, 6, 7, 8] * 6])
    decoding = decoder(None, transformer=transformer, cost=CHEAP)
    write(transformer, decoding, ids=cycle)
    stats = decoding.stats[0]
    assert stats.tokens == N
    assert stats.accepted > 0
    assert stats.passes == N - 1 - stats.accepted
    assert sum(stats.drafted) == stats.accepted
    assert stats.tokens_per_second > 0


def test_streamers_get_every_token_and_the_end(llama, capsys):
    transformer, bank = llama

    class Heard:
        def __init__(self):
            self.tokens, self.ended = [], 0

        def put(self, value):
            self.tokens.append(value.flatten().tolist())

        def end(self):
            self.ended += 1

    heard = Heard()
    decoding = decoder(bank, transformer=transformer, cost=CHEAP)
    ids = write(transformer, decoding, stream_to=heard)
    assert heard.tokens[0] == PROMPT[0].tolist()
    assert [token for put in heard.tokens[1:] for token in put] == ids[
        0, PROMPT.shape[1] :
    ].tolist()
    assert heard.ended == 1


def test_a_streamer_that_generate_would_drop_is_refused(llama):
    """Whoever reads from it would wait forever."""
    transformer, bank = llama
    decoding = decoder(bank, transformer=transformer, cost=CHEAP)
    with pytest.raises(BadSettings, match="pass it as stream_to"):
        write(transformer, decoding, streamer=SimpleNamespace(put=print, end=print))
    with pytest.raises(BadSettings, match="synced_gpus"):
        write(transformer, decoding, synced_gpus=True)


def test_bad_input_is_refused_before_anything_is_timed(llama, monkeypatch):
    transformer, bank = llama
    refuse = lambda *_, **__: pytest.fail("timed before the input was checked")  # noqa: E731
    monkeypatch.setattr(pass_cost, "measure_passes", refuse)
    monkeypatch.setattr(prepared.Packed, "of", refuse)
    decoding = decoder(bank, transformer=transformer)
    with pytest.raises(BadSettings, match="beam"):
        write(transformer, decoding, num_beams=2)
    with pytest.raises(BadText, match="at most"):
        write(transformer, decoding, ids=PROMPT.repeat(1, 50))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "guess"}, "'recompute', 'propagate', 'shortcut'"),
        ({"drafts": ("oracle",)}, "'table', 'lookup', 'early'"),
        ({"head": "half"}, "'whole', 'shortlist'"),
        ({"rule": Fixed(2), "checks": ["3"]}, "expected 1 to 4"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_choices(llama, settings, message):
    transformer, bank = llama
    with pytest.raises(BadSettings, match=message):
        write(transformer, decoder(bank, transformer=transformer, **settings))


def test_scores_and_logits_are_those_of_generate(llama):
    transformer, bank = llama
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.3,
    }
    theirs = write(transformer, None, **options)
    ours = write(transformer, decoder(bank, transformer=transformer, cost=CHEAP), **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.cat(ours.scores), torch.cat(theirs.scores))
    torch.testing.assert_close(torch.cat(ours.logits), torch.cat(theirs.logits))


def test_sampled_tokens_after_drafts_follow_the_models_distribution(llama):
    transformer, bank = llama
    decoding = decoder(bank, transformer=transformer, cost=CHEAP)
    torch.manual_seed(0)
    tried, third, n = 0, [], 120
    for _ in range(n):
        ids = write(
            transformer,
            decoding,
            ids=PROMPT[:, :3],
            max_new_tokens=3,
            do_sample=True,
            temperature=0.3,
        )
        tried += decoding.stats[0].accepted
        third.append(ids[0, 3:5].tolist())
    assert tried > 0  # else no draft was tested
    scores = transformer.model(PROMPT[:, :3]).logits[0, -1] / 0.3
    first = scores.softmax(-1)
    likely = int(first.argmax())
    after = torch.cat([PROMPT[0, :3], torch.tensor([likely])])[None]
    p = (transformer.model(after).logits[0, -1] / 0.3).softmax(-1)
    seconds = torch.tensor([b for a, b in third if a == likely])
    assert len(seconds) > 20
    seen = torch.bincount(seconds, minlength=len(p)) / len(seconds)
    allowed = 5 * (p * (1 - p) / len(seconds)).sqrt() + 2 / len(seconds)
    assert (seen - p).abs().le(allowed).all()


def narrow_llama():
    model = build("llama").bfloat16()
    model.generation_config.eos_token_id = None
    return Transformer.wrap(model)


@pytest.mark.parametrize(("texts", "strict"), [(1, None), (1, True), (3, None)])
def test_in_a_narrow_dtype_drafts_write_what_generate_writes(texts, strict):
    """Passes over several tokens are verified to keep the bits of one-token passes."""
    transformer = narrow_llama()
    transformer.model.generation_config.pad_token_id = 0
    some = torch.randint(5, 60, (texts, 5), generator=torch.Generator().manual_seed(3))
    ids = torch.cat([some, some], 1)  # something to look up
    made = decoder(bank_of(transformer), transformer=transformer, cost=CHEAP, strict=strict)
    written = write(transformer, made, ids=ids)
    for own, row in zip(written, ids, strict=True):
        assert torch.equal(own[None], write(transformer, None, ids=row[None]))
    assert all(one.exactness == "exact" and one.drafts > 0 for one in made.stats)


def test_where_bits_are_not_kept_strict_decodes_one_token_at_a_time(monkeypatch):
    monkeypatch.setattr(prepared, "keeps_bits", lambda *_: False)
    transformer = narrow_llama()
    strict = decoder(None, transformer=transformer, cost=CHEAP, strict=True)
    assert torch.equal(write(transformer, strict), write(transformer, None))
    assert (strict.stats[0].exactness, strict.stats[0].drafts) == ("exact", 0)
    default = decoder(None, transformer=transformer, cost=CHEAP)
    write(transformer, default)
    assert default.stats[0].exactness == "rounded"
    assert default.stats[0].drafts > 0


@pytest.mark.parametrize("texts", [1, 2])
def test_near_ties_of_a_narrow_dtype_are_decided_by_a_pass_of_their_own(monkeypatch, texts):
    """If all are near-ties, every token comes from a one-token pass, as with generate."""
    monkeypatch.setattr(prepared, "TIE_STEPS", 1e9)
    transformer = narrow_llama()
    transformer.model.generation_config.pad_token_id = 0
    loose = decoder(bank_of(transformer), transformer=transformer, cost=CHEAP, strict=False)
    written = write(transformer, loose, ids=PROMPT.repeat(texts, 1))
    for own, stats in zip(written, loose.stats, strict=True):
        assert torch.equal(own[None], write(transformer, None))
        assert stats.exactness == "rounded"
        assert "near-ties" in str(stats)
        assert stats.ties > 0
        assert stats.tokens == len(stats.drafted) == N
        assert stats.accepted == 0
        assert stats.to_dict()["ties"] == stats.ties


def test_without_near_ties_no_pass_is_spent_on_them(monkeypatch):
    monkeypatch.setattr(prepared, "TIE_STEPS", 1e-9)
    transformer = narrow_llama()
    loose = decoder(None, transformer=transformer, cost=CHEAP, packed=False, strict=False)
    write(transformer, loose)
    exact_ties = sum(
        bool(row.topk(2).values.diff() == 0)
        for row in write(transformer, None, return_dict_in_generate=True, output_logits=True).logits
    )
    assert loose.stats[0].ties <= exact_ties + 2


def test_two_logits_one_rounding_step_apart_are_a_near_tie():
    rows = torch.tensor([[16.0, 16.0, 1.0], [16.0, 15.875, 1.0], [16.0, 15.75, 1.0]]).bfloat16()
    assert near_ties(rows, 1.0) == [True, True, False]


class InHalf(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner.half()

    def forward(self, x):
        return self.inner(x.half()).float()


@pytest.mark.parametrize("how", ["autocast", "cast", "mixed"])
def test_strict_checks_the_precision_at_every_call(how):
    model = build("llama")
    model.generation_config.eos_token_id = None
    transformer = Transformer.wrap(model)
    strict = decoder(None, transformer=transformer, cost=CHEAP, strict=True)
    write(transformer, strict)
    assert strict.stats[0].drafts > 0  # float32: drafts are safe
    if how == "cast":
        model.bfloat16()
    elif how == "mixed":  # as quantisers leave some parts in another dtype than the model's
        model.model.layers[0].mlp = InHalf(model.model.layers[0].mlp)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        expected = model.generate(PROMPT, max_new_tokens=N, do_sample=False)
        assert torch.equal(write(transformer, strict), expected)
    assert strict.stats[0].exactness == "exact"
    assert (strict.stats[0].drafts > 0) == (how == "cast")  # bfloat16 alone keeps its bits


def test_early_drafts_never_try_a_token_that_the_embedding_does_not_know():
    model = build("llama")
    model.generation_config.eos_token_id = None
    known, width = model.lm_head.weight.shape
    head = torch.nn.Linear(width, known + 64, bias=False)
    head.weight.data[:known] = model.lm_head.weight.data
    head.weight.data[known:] = 3.0  # by far the largest logits
    model.lm_head = head
    transformer = Transformer.wrap(model)
    only_known = [lambda _, scores: scores.index_fill(1, torch.arange(known, known + 64), -1e9)]
    early = decoder(None, transformer=transformer, drafts=("early",), draft_layer=1)
    plain = model.generate(PROMPT, max_new_tokens=N, do_sample=False, logits_processor=only_known)
    assert torch.equal(write(transformer, early, logits_processor=only_known), plain)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states"),
        ({"cache_implementation": "static"}, "StaticCache"),
    ],
)
def test_unsupported_options_are_refused(llama, options, said):
    transformer, bank = llama
    decoding = decoder(bank, transformer=transformer, cost=CHEAP)
    with pytest.raises(BadSettings, match=said):
        write(transformer, decoding, **options)


def test_right_padding_and_gaps_are_refused(llama):
    transformer, bank = llama
    mask = torch.ones_like(PROMPT)
    mask[0, 3] = 0
    with pytest.raises(BadSettings, match="pad on the left"):
        write(transformer, decoder(bank, transformer=transformer), attention_mask=mask)


def test_no_tokens_and_prompts_beyond_the_context_are_refused(llama):
    transformer, bank = llama
    decoding = decoder(bank, transformer=transformer, cost=CHEAP)
    with pytest.raises(ValueError, match="max_new_tokens"):
        write(transformer, decoding, max_new_tokens=0)
    with pytest.raises(BadText, match="at most 64"):
        write(transformer, decoding, ids=torch.full((1, 65), 5))


def test_caches_of_padded_texts_and_half_texts_are_refused(llama):
    transformer, bank = llama
    decoding = decoder(bank, transformer=transformer, cost=CHEAP)
    mask = torch.ones_like(PROMPT)
    mask[0, :2] = 0
    with pytest.raises(BadSettings, match="padded"):
        write(transformer, decoding, attention_mask=mask, return_dict_in_generate=True)
    cache = DynamicCache()
    transformer.model(PROMPT[:, :5], past_key_values=cache, use_cache=True)
    with pytest.raises(BadSettings, match="whole text"):
        write(
            transformer,
            decoding,
            ids=PROMPT[:, 5:],
            past_key_values=cache,
            attention_mask=torch.ones_like(PROMPT),
        )


def test_what_needs_a_batch_in_step_is_refused(llama):
    transformer, bank = llama
    decoding = decoder(bank, transformer=transformer, cost=CHEAP)
    with pytest.raises(BadSettings, match="in step"):
        write(transformer, decoding, ids=PROMPT.repeat(2, 1), max_time=100.0)


def test_another_thread_is_not_caught_in_a_pass(llama):
    transformer, _ = llama
    ids = PROMPT
    expected = transformer.model(ids).logits
    seen = []

    def other(*_):
        thread = Thread(target=lambda: seen.append(transformer.model(ids).logits))
        thread.start()
        thread.join()
        return False

    with Cursor(transformer, find_axes(transformer)) as walk:
        walk.run(ids[0].tolist(), watch=other, checks=[2])
    assert torch.equal(seen[0], expected)


def test_a_bank_or_rule_of_another_model_is_refused(llama):
    transformer, _ = llama
    other = wrapped("gpt2")
    with pytest.raises(WrongModel):
        write(transformer, decoder(bank_of(other), transformer=transformer))
    with pytest.raises(BadSettings, match="1 to 4"):
        write(transformer, decoder(None, rule=Fixed(1), checks=[9], transformer=transformer))


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "forget"},
        {"drafts": ("oracle",)},
        {"drafts": ("early",)},
        {"policy": "shortcut"},
        {"max_nodes": 0},
        {"rule": Oracle()},
        {"head": "half"},
        {"rule": Fixed(2), "head": "shortlist"},
        {"shortlist": [3, 4], "head": "shortlist"},
    ],
)
def test_invalid_settings_are_refused_at_once(options):
    with pytest.raises(BadSettings):
        decoder(None, **options)


def test_after_an_error_model_and_config_are_as_before(llama):
    transformer, bank = llama
    model = transformer.model

    def broken(ids, scores):
        raise ZeroDivisionError

    before = [set(module.__dict__) for module in model.modules()], model.config.to_dict()
    with pytest.raises(ZeroDivisionError):
        write(
            transformer,
            decoder(bank, transformer=transformer, cost=CHEAP),
            logits_processor=[broken],
        )
    assert ([set(module.__dict__) for module in model.modules()], model.config.to_dict()) == before


def test_a_decoder_without_a_wrapped_model_wraps_it(llama):
    transformer, bank = llama
    decoding = decoder(bank, cost=CHEAP)
    assert torch.equal(write(transformer, decoding), write(transformer, None))


def made_probe(transformer):
    """A probe of random weights, trained on nothing: enough to score every state."""
    g = torch.Generator().manual_seed(0)
    width = transformer.d_model
    weights = Softmax(
        torch.zeros(width).double(),
        torch.ones(width).double(),
        torch.randn(2, width, generator=g).double(),
        torch.zeros(2).double(),
    )
    return TaskProbe(
        weights, (2, 3, 4), transformer.n_layers, transformer.identity.to_dict(), "linear"
    )


@pytest.mark.parametrize("checks", [None, (2, 4)])
def test_a_task_probe_exits_live_where_replay_does(llama, checks):
    transformer, bank = llama
    probe = made_probe(transformer)
    rule = Task(0.6, probe)
    decoding = decoder(bank, rule=rule, checks=checks, transformer=transformer)
    ids = write(transformer, decoding)[0].tolist()
    places = range(PROMPT.shape[1] - 1, len(ids) - 1)
    batch = collate(transformer, [Example(0, tuple(ids), tuple(places))])
    lens = Lens(transformer, bank)
    seen = Evidence.from_scores(score(transformer, {"linear": lens}, [batch]), "linear")
    states = transformer.capture(batch.inputs, keep=batch.keep).states
    seen = replace(seen, extra=probe.evidence(states))
    wanted = replay(rule, seen.at(range(1, 5) if checks is None else checks)).layer.tolist()
    assert decoding.stats[0].layers[1:] == wanted[1:]
    assert 2 <= min(wanted[1:]) < 5
    assert len(set(wanted[1:])) > 1


def test_a_task_rule_without_its_probe_cannot_run_live(llama):
    transformer, bank = llama
    with pytest.raises(BadSettings, match=r"TaskProbe\.rule"):
        write(transformer, decoder(bank, rule=Task(0.5), transformer=transformer))


def test_a_probe_of_another_model_is_refused(llama):
    rule = Task(0.5, made_probe(wrapped(num_hidden_layers=6)))
    with pytest.raises(WrongModel):
        write(llama[0], decoder(llama[1], rule=rule, transformer=llama[0]))


def test_time_after_the_last_token_is_counted(llama, monkeypatch):
    transformer, bank = llama
    slow = Cursor.run

    def run(self, new, **options):
        if not new:
            time.sleep(0.3)
        return slow(self, new, **options)

    monkeypatch.setattr(Cursor, "run", run)
    early = decoder(bank, rule=Fixed(2), transformer=transformer)
    write(transformer, early)
    assert early.stats[0].seconds >= 0.3


def test_a_saved_task_rule_leaves_its_probe_out(llama):
    rule = Task(0.25, made_probe(llama[0]))
    assert rule.to_dict() == {"name": "task", "threshold": 0.25}
    assert rule_from_dict(rule.to_dict()) == rule


def test_line_ends_show_their_colour_and_only_the_last_of_several_ends_a_line():
    tokens = ["a\n", "\n", "", "\n", "b", "\nc\n"]
    stats = {"n_layers": 4, "layers": [1] * 6, "drafted": [False] * 6}
    page = coloured_html({"tokens": tokens, "stats": stats, "prompt": "p\nq", "summary": "six"})
    shown = re.findall(r'<span title="[^"]*" style="[^"]*">([^<]*)</span>', page)
    assert shown == ["a⏎", "⏎", "", "⏎\n", "b", "⏎\nc⏎\n"]
    assert ">p\nq</span>" in page
