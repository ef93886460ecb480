"""Fine-tuning: what it learns, leaves alone, saves and resumes."""

import json
import math
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

import layerleap as ll
from families import build
from layerleap.act.edits import ApplyDelta
from layerleap.act.learning import trainer as module
from layerleap.act.learning.trainer import Optimizer
from layerleap.errors import BadSettings, BadText, CannotWrite, ModelRefused, NotFinite, WrongModel
from layerleap.models.transformer import Transformer
from layerleap.stats import fit_statistics
from layerleap.stats.fit_statistics import Saver, interrupts_wait
from layerleap.stream.tokens import token_stream, windows
from tiny_models import sentences, tiny

TEXT = sentences(60)
QUICK = {"steps": 6, "batch": 2, "max_tokens": 12, "check_every": 3, "tested_tokens": 200}


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def tuned(model, text=TEXT, **options):
    return ll.finetune(model, text, **{**QUICK, "progress": False, **options})


def same(first, second) -> bool:
    return all(torch.equal(value, second.values[name]) for name, value in first.values.items())


@pytest.mark.parametrize("how", ["full", "layer-causal"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_both_ways_learn_the_text_and_leave_the_model_alone(model, how, optimizer):
    before = {n: p.detach().clone() for n, p in model.model.named_parameters()}
    rate = 3e-3 if optimizer == "adamw" else 0.1
    result = tuned(
        model, how=how, optimizer=optimizer, learning_rate=rate, steps=40, check_every=20, share=1.0
    )
    first, middle, last = result.record
    assert (first["step"], middle["step"], last["step"]) == (0, 20, 40)
    assert first["loss"] is None
    assert last["held_out"] < first["held_out"] - 0.1
    assert last["tested_tokens"] == first["tested_tokens"] > 100
    assert all(torch.equal(p, before[n]) for n, p in model.model.named_parameters())


def test_parameters_that_were_not_chosen_do_not_change(model):
    result = tuned(model, parameters="keys-values")
    assert {name.split(".")[-2] for name in result.values} == {"k_proj", "v_proj"}
    fused = Transformer.wrap(build("gpt2"), model.tokenizer)
    delta = tuned(fused, parameters="keys-values", decay=0.0).delta
    weight = delta.tensors["transformer.h.1.attn.c_attn.weight"]
    assert not weight[:, :24].any()
    assert weight[:, 24:].any(0).all()


@pytest.mark.parametrize("how", ["full", "layer-causal"])
def test_a_step_is_that_of_torch(model, how):
    from layerleap.act.learning.gradients import gradients
    from layerleap.act.learning.lessons import Demonstration, lesson
    from layerleap.act.learning.parameters import choose
    from learning_cases import values

    chosen = choose(model, "blocks")
    text = [Demonstration((7, 8, 9, 10, 11, 12))]
    ours, theirs = values(model, chosen), values(model, chosen)
    optimizer = Optimizer("adamw", decay=0.1)
    matrices = [theirs[n].requires_grad_() for n in theirs if theirs[n].dim() > 1]
    vectors = [theirs[n].requires_grad_() for n in theirs if theirs[n].dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    batch = lesson(model, text)
    for step in (1, 2, 3):
        found = gradients(model, chosen, dict(theirs), batch, how=how)
        for name, value in theirs.items():
            value.grad = found.tensors[name]
        reference.step()
        gradients(
            model,
            chosen,
            ours,
            batch,
            how=how,
            take=lambda name, g, step=step: optimizer.update(name, ours[name], g, 1e-2, step),
        )
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name].detach(), rtol=1e-4, atol=1e-6)


def test_entries_that_do_not_learn_do_not_decay():
    value, mask = torch.ones(4, 3), torch.zeros(4, 3, dtype=torch.bool)
    mask[2:] = True
    for kind in ("adamw", "sgd"):
        own = value.clone()
        Optimizer(kind, decay=0.1).update("w", own, torch.ones(4, 3) * mask, 0.5, 1, mask)
        assert torch.equal(own[:2], value[:2])
        assert (own[2:] < 1).all()


def test_the_saved_folder_is_a_model_of_the_hub(model, tmp_path):
    result = tuned(model, folder=tmp_path / "tuned")
    assert not (tmp_path / ".tuned.finetuning").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    own = dict(loaded.named_parameters())
    base = dict(model.model.named_parameters())
    for name, value in own.items():
        assert torch.equal(value, result.values.get(name, base[name])), name
    inputs = torch.tensor([[7, 8, 9]])
    with torch.no_grad(), model.edit(ApplyDelta(result.delta)):
        applied = model.model(inputs).logits
    torch.testing.assert_close(applied, loaded(inputs).logits, rtol=1e-4, atol=1e-5)
    again = ll.load(str(tmp_path / "tuned"))
    assert again.tokenizer is not None
    written = json.loads((tmp_path / "tuned" / "layerleap.json").read_text())
    assert written["settings"]["how"] == "layer-causal"
    assert written["settings"]["share"] == 1 / 16
    assert written["record"] == result.record
    assert written["model"]["fingerprint"] == model.identity.fingerprint
    assert list(result.to_pandas()["step"]) == [0, 3, 6]


@pytest.mark.parametrize("how", ["full", "layer-causal"])
def test_a_killed_run_continues_and_ends_with_the_same_bits(model, tmp_path, how, monkeypatch):
    whole = tuned(model, how=how)

    class EveryStep(module.Saver):
        def save_if_due(self) -> None:
            self.save()

    monkeypatch.setattr(module, "Saver", EveryStep)

    def stop(phase, done, total, unit="texts"):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(model, how=how, folder=tmp_path / "tuned", progress=stop)
    assert not (tmp_path / "tuned").exists()
    with pytest.raises(WrongModel, match="different settings \\(settings\\)"):
        tuned(model, how=how, folder=tmp_path / "tuned", learning_rate=5e-4)
    seen = []
    again = tuned(
        model,
        how=how,
        folder=tmp_path / "tuned",
        progress=lambda phase, done, total, unit="texts": seen.append(done),
    )
    assert seen == [5, 6]  # step 5 was not saved: it was reported first
    assert same(whole, again)
    for ours, theirs in zip(whole.record, again.record, strict=True):
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}


def test_half_precision_keeps_small_steps():
    model = Transformer.wrap(build("llama").to(torch.bfloat16), tiny("llama").tokenizer)
    result = tuned(model, learning_rate=1e-5)
    assert all(value.dtype == torch.float32 for value in result.values.values())
    assert all(value.any() for value in result.delta.tensors.values())


def test_the_order_of_windows_depends_on_the_seed_alone(model):
    assert same(tuned(model, seed=1), tuned(model, seed=1))
    assert not same(tuned(model, seed=1), tuned(model, seed=2))


def test_losses_may_be_read_through_a_bank(model):
    from contract_bank import bank_of

    lens = ll.Lens(model, bank_of(model))
    through = tuned(model, lens=lens, share=1.0)
    assert through.settings["lens"] == "linear"
    assert not same(through, tuned(model, share=1.0))
    with pytest.raises(BadSettings, match="a lens is for how='layer-causal' alone"):
        tuned(model, how="full", lens=lens)
    with pytest.raises(WrongModel, match="make a lens of this model"):
        tuned(tiny("llama", seed=5), lens=lens)


def test_held_out_documents_are_never_trained_on(model):
    fitted, held_out = (
        token_stream(model, TEXT, 10**6, side=side, held_out=0.5) for side in ("fit", "held-out")
    )
    both = token_stream(model, TEXT, 10**6, side="both")
    assert len(fitted) + len(held_out) == len(both)
    assert len(token_stream(model, TEXT, 33)) == 33
    assert windows(both[:50], 12).shape == (4, 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0; expected a number above 0"),
        ({"learning_rate": -1e-4}, "expected a number above 0"),
        ({"steps": 0}, "steps is 0; expected 1 or more"),
        ({"max_tokens": 1}, "max_tokens is 1; expected 2 or more"),
        ({"max_tokens": 65}, "max_tokens is 65; this model reads at most 64"),
        ({"decay": -1.0}, "decay is -1.0"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"seed": -1}, "seed is -1; expected 0 or more"),
        ({"tested_tokens": -5}, "tested_tokens is -5; expected 0 or more"),
        ({"how": "layercausal"}, "did you mean 'layer-causal'"),
        ({"optimizer": "adam"}, "did you mean 'adamw'"),
        ({"parameters": "*.nothing"}, "no parameter of tiny-llama matches"),
        ({"how": "full", "share": 0.5}, "for how='layer-causal' alone"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(model, options, message):
    with pytest.raises(BadSettings, match=message):
        tuned(model, **options)


def test_texts_and_models_that_cannot_be_trained_on_are_refused(model, tmp_path):
    with pytest.raises(BadText, match="contains no text"):
        tuned(model, [""])
    with pytest.raises(BadText, match="fewer than one window of 12"):
        tuned(model, ["the cat"], held_out=0.0)
    with pytest.raises(ModelRefused, match="masked-token model"):
        tuned(tiny("bert"))
    bare = Transformer.wrap(build("llama"))
    with pytest.raises(BadText, match="has no tokenizer"):
        tuned(bare)
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(CannotWrite, match="holds other files than a fine-tuned model"):
        tuned(model, folder=tmp_path)
    with pytest.raises(NotFinite, match="lower the learning rate"):
        tuned(model, learning_rate=1e30, optimizer="sgd", how="full")


@pytest.mark.parametrize("held_out", [0.0, 0.25])
def test_a_last_step_that_diverges_is_refused_and_leaves_no_folder(
    model, tmp_path, held_out, monkeypatch
):
    def infinite(self, name, value, *_):
        value.fill_(math.inf if held_out == 0 else 1e30)  # finite, but no loss will be

    monkeypatch.setattr(Optimizer, "update", infinite)
    with pytest.raises(NotFinite, match="lower the learning rate"):
        tuned(model, how="full", folder=tmp_path / "tuned", steps=1, held_out=held_out)
    assert not (tmp_path / "tuned" / "config.json").exists()


def test_the_held_out_loss_of_a_half_precision_model_is_summed_in_float32():
    from layerleap.zoo.small_lm import lm_loss

    torch.manual_seed(0)
    logits = (4 * torch.randn(1, 40, 500)).bfloat16()
    stream = torch.randint(0, 500, (40,))

    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, use_cache):
            return type("Output", (), {"logits": logits[:, : input_ids.shape[1]]})

    exact = torch.nn.functional.cross_entropy(logits[0, :-1].double(), stream[1:])
    assert lm_loss(Fixed(), stream, 64)["loss"] == pytest.approx(float(exact), rel=1e-5)


def test_the_held_out_loss_is_measured_where_the_model_is(model):
    from layerleap.zoo.small_lm import lm_loss

    devices = []

    class Elsewhere(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(9, 9, device="meta")

        def get_input_embeddings(self):
            return self.embedding

        def forward(self, input_ids, use_cache):
            devices.append(input_ids.device.type)
            return type("Output", (), {"logits": torch.zeros(1, input_ids.shape[1], 9)})

    lm_loss(Elsewhere(), torch.arange(8), 8)
    assert devices == ["meta"]


def test_a_text_that_is_held_out_as_a_whole_is_told_what_to_do(model):
    text = [" ".join(TEXT)]
    seed = next(s for s in range(50) if not len(token_stream(model, text, 50, seed=s)))
    with pytest.raises(BadText, match=r"held_out=0.25 took \d+ tokens .* set held_out=0, or give"):
        tuned(model, text, seed=seed)
    assert tuned(model, text, seed=seed, held_out=0.0).notes == ()


def test_a_text_of_which_nothing_is_held_out_says_so(model, tmp_path):
    text = [" ".join(TEXT)]
    seed = next(s for s in range(50) if len(token_stream(model, text, 50, seed=s)))
    result = tuned(model, text, seed=seed, folder=tmp_path / "tuned")
    assert "Nothing was held out, so no held-out loss was measured" in result.notes[0]
    assert json.loads((tmp_path / "tuned" / "layerleap.json").read_text())["notes"] == [
        *result.notes
    ]
    assert tuned(model).notes == ()
    assert tuned(model, text, seed=seed, tested_tokens=0).notes == ()


@pytest.fixture
def ctrl_c():
    """Python's handling of Ctrl-C, which a shell takes from what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", ["full", "layer-causal"])
def test_ctrl_c_saves_the_step_that_was_running_and_the_bits_stay_the_same(
    model, tmp_path, how, ctrl_c
):
    whole, folder = tuned(model, how=how), tmp_path / "tuned"

    def press(phase, done, total, unit="texts"):
        if done == 4:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tuned(model, how=how, folder=folder, progress=press)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    seen = []
    again = tuned(
        model, how=how, folder=folder, progress=lambda p, done, *_, **__: seen.append(done)
    )
    assert seen == [5, 6]  # step 4 was saved although no checkpoint was due
    assert same(whole, again)


def test_a_second_ctrl_c_does_not_wait_for_the_end_of_the_step(ctrl_c):
    with interrupts_wait() as is_interrupted:
        signal.raise_signal(signal.SIGINT)
        assert is_interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("step", [0.1, 3.0, 7.0, 12.0])
def test_a_checkpoint_is_never_older_than_twenty_seconds(monkeypatch, tmp_path, step):
    """With a clock that only steps move, whatever saving costs."""
    now = 1000.0
    monkeypatch.setattr(fit_statistics.time, "monotonic", lambda: now)
    saved = []
    saver = Saver(lambda path: saved.append(now), tmp_path / "x", longest=module.OLDEST)
    for _ in range(200):
        now += step
        saver.save_if_due()
    ages = [after - before for before, after in zip([1000.0, *saved], [*saved, now], strict=True)]
    assert max(ages) <= module.OLDEST == 20.0
    assert len(saved) < 200 or step > 10  # and not after every short step


def test_a_bad_share_or_rate_is_refused(model):
    with pytest.raises(BadSettings, match="share is 2"):
        tuned(model, share=2)
    with pytest.raises(BadSettings, match="learning_rate is -1"):
        tuned(model, learning_rate=-1)


def test_the_record_of_a_fine_tuned_model_names_its_text(model, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("\n\n".join(TEXT))
    tuned(model, str(text), folder=tmp_path / "tuned")
    assert json.loads((tmp_path / "tuned" / "layerleap.json").read_text())["text"] == str(text)
    assert tuned(model).to_dict()["text"] == "given texts"
