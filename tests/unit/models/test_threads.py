"""Several threads, one model: everybody gets the right answer, and nobody disturbs the others."""

from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest
import torch

from contract_bank import bank_of
from layerleap.act.decode.decoder import decoder
from layerleap.act.decode.generate import generate
from layerleap.act.decode.pass_cost import PassCost
from layerleap.act.edits import AddNeuron, PatchState, ReplaceAttention
from layerleap.lens.lens import Lens
from layerleap.models.hooks.recording import record
from tiny_models import tiny

THREADS, CALLS = 4, 240
IDS = [torch.randint(5, 60, (2, n), generator=torch.Generator().manual_seed(n)) for n in (4, 7, 9)]
TEXTS = ["the cat sat on", "a dog ran under the tree and", "it was big"]
CHEAP = PassCost((1, 2, 4, 8, 16), (1.0, 1.01, 1.02, 1.04, 1.08))


@pytest.fixture(scope="module")
def model():
    transformer = tiny("llama")
    transformer.model.double().generation_config.eos_token_id = None
    transformer.model.generation_config.pad_token_id = 0
    return transformer


def shift(module, query, key, value, attention_mask, **kwargs):
    """Some attention that is not the model's own."""
    heads = query.shape[1] // value.shape[1]
    n = query.shape[2]
    return value.repeat_interleave(heads, 1)[:, :, -n:].transpose(1, 2).contiguous(), None


def jobs(model):
    """By name: from a number to a result that can be compared."""
    bank, shared = bank_of(model), decoder(bank_of(model), transformer=model, cost=CHEAP)
    edits = AddNeuron(2, 3, 5.0, positions="last"), ReplaceAttention(shift, [3])

    def edited(run):
        def job(n):
            with model.edit(*edits, PatchState(1, torch.ones(24), n % 3)) as report:
                result = run(n)
            assert not report.unused
            return result

        return job

    def captured(n):
        found = model.capture({"input_ids": IDS[n % 3]}, sites=[(2, "ffn.out")], logits=True)
        return [*found.states.values(), *found.sites.values(), found.logits]

    def recorded(n):
        found = record(model, {"input_ids": IDS[n % 3]})
        return [*found.states, found.run(found.states[1], 1)]

    def read(n):
        rows = Lens(model, bank).read(TEXTS[n % 3]).rows()
        return [torch.tensor([[row["kl"], *(one["prob"] for one in row["top"])] for row in rows])]

    def plain(n):
        with torch.no_grad():
            return [model.model(IDS[n % 3]).logits]

    def theirs(n):
        return [model.model.generate(IDS[n % 3], max_new_tokens=6, do_sample=False)]

    def ours(n):
        own = generate(model, TEXTS[n % 3], decoder=shared, max_new_tokens=6)
        assert len(own.ids) == own.stats.tokens == 6
        return [torch.tensor(own.ids)]

    def batch(n):
        custom = decoder(bank, transformer=model, cost=CHEAP)
        return [
            model.model.generate(
                IDS[n % 3], max_new_tokens=6, do_sample=False, custom_generate=custom
            )
        ]

    plainly = {
        "capture": captured,
        "record": recorded,
        "read": read,
        "plain": plain,
        "their generate": theirs,
        "our generate": ours,
        "our batch": batch,
    }
    names = ("capture", "record", "plain", "their generate", "our generate", "our batch")
    return plainly | {f"{name}, edited": edited(plainly[name]) for name in names}


def run(work, calls=CALLS):
    """Each job many times on several threads; all results must be those of one thread."""
    expected = {(name, n): job(n) for name, job in work.items() for n in range(3)}
    order = [(name, n) for n in range(3) for name in work]
    tasks = [task for task, _ in zip(cycle(order), range(calls), strict=False)]
    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(lambda task: work[task[0]](task[1]), tasks))
    right = 0
    for task, result in zip(tasks, results, strict=True):
        right += all(torch.equal(a, b) for a, b in zip(result, expected[task], strict=True))
    return right


@pytest.mark.parametrize("name", ["capture", "record", "read", "capture, edited", "plain, edited"])
def test_four_threads_reading_one_model_get_the_right_answers(model, name):
    assert run({name: jobs(model)[name]}) == CALLS


@pytest.mark.parametrize(
    "name",
    [
        "their generate",
        "our generate",
        "our batch",
        "their generate, edited",
        "our generate, edited",
    ],
)
def test_four_threads_writing_with_one_model_get_the_right_texts(model, name):
    assert run({name: jobs(model)[name]}, 60) == 60


def test_reading_editing_and_writing_at_once_are_all_right(model):
    assert run(jobs(model)) == CALLS


def test_plain_calls_never_wait_for_those_who_hook(model):
    ids = IDS[0]
    with torch.no_grad():
        expected = model.model(ids).logits
    with model.edit(AddNeuron(1, 1, 9.0)), ThreadPoolExecutor(1) as pool:

        def call():
            with torch.no_grad():
                return model.model(ids).logits, model.model.generate(ids, max_new_tokens=3)

        logits, text = pool.submit(call).result(timeout=30)
    assert torch.equal(logits, expected)
    assert torch.equal(text, model.model.generate(ids, max_new_tokens=3))
