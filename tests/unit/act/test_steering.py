"""`ll.direction` and `ll.steering_cost`."""

import json
from dataclasses import replace

import pytest
import torch

import layerleap as ll
from layerleap.act.steering.saved import FILE
from layerleap.errors import BadArtifact, BadSettings, BadText, ModelRefused, WrongModel
from layerleap.models.prompts import encode
from pages import Page
from tiny_models import WORDS, sentences, tiny

POSITIVE = [f"the {one} was big and red" for one in WORDS[:12]]
NEGATIVE = [f"the {one} was small and blue" for one in WORDS[:12]]


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def found(model):
    return direction(model)


def direction(model, positive=POSITIVE, negative=NEGATIVE, **options):
    return ll.direction(model, positive, negative, **{"progress": False, **options})


def states(model, prompts, layer):
    """The last state of each prompt, one prompt at a time."""
    each = [model.capture(one, layers=[layer]).states[layer][0, -1] for one in prompts]
    return torch.stack(each).double()


def test_the_vector_is_the_difference_of_the_means(model):
    for layer in (1, 3):
        own = direction(model, layer=layer)
        pos, neg = states(model, POSITIVE, layer), states(model, NEGATIVE, layer)
        torch.testing.assert_close(
            own.vector.double(), pos.mean(0) - neg.mean(0), rtol=1e-4, atol=1e-5
        )
        size = torch.cat([pos, neg]).norm(dim=1).mean()
        assert own.norm == pytest.approx(float((pos.mean(0) - neg.mean(0)).norm() / size), rel=1e-4)
        unit = own.vector.double() / own.vector.double().norm()
        ends = (float((neg @ unit).mean()), float((pos @ unit).mean()))
        assert own.ends == pytest.approx(ends, rel=1e-3, abs=1e-4)
        assert own.layer == layer


def test_the_first_component_of_paired_differences_is_that_of_a_decomposition(model):
    own = direction(model, layer=2, method="pca")
    pos, neg = states(model, POSITIVE, 2), states(model, NEGATIVE, 2)
    main = torch.linalg.svd(pos - neg).Vh[0]
    cosine = torch.nn.functional.cosine_similarity(own.vector.double(), main, dim=0)
    assert abs(float(cosine)) == pytest.approx(1, abs=1e-4)
    assert float(own.vector.double() @ (pos - neg).mean(0)) > 0
    with pytest.raises(BadSettings, match="11 positive and 12 negative prompts are not pairs"):
        direction(model, POSITIVE[1:], method="pca")


def test_prompts_that_are_alike_are_not_told_apart(model):
    texts = sentences(80)
    same = direction(model, texts[:40], texts[40:])
    assert same.auc["low"] < 0.5 < same.auc["high"]


def test_the_auc_is_of_prompts_that_were_held_out_and_layers_are_chosen_by_it(found):
    best = max(row["auc"] for row in found.layers)
    assert found.layers[found.layer]["auc"] == best
    assert [row["layer"] for row in found.layers] == [0, 1, 2, 3]
    for row in (*found.layers, {**found.auc, "auc": found.auc["value"]}):
        assert 0 <= row["low"] <= row["auc"] <= row["high"] <= 1
    assert "The smaller set has 12 prompts" in found.notes[-1]


def test_a_random_direction_among_random_prompts_has_an_auc_near_a_half():
    """Neither the vector nor the choice of the layer has seen the fold that is scored."""
    from layerleap.act.steering.find import _Sets

    generator = torch.Generator().manual_seed(3)
    aucs = []
    for _ in range(40):
        pos, neg = torch.randn(2, 6, 15, 8, generator=generator)
        aucs.append(_Sets(pos, neg, "mean", *[torch.arange(15)] * 2).nested()["value"])
    assert abs(sum(aucs) / 40 - 0.5) < 0.06


@pytest.mark.parametrize("method", ["mean", "pca"])
def test_a_prompt_that_is_given_several_times_is_never_scored_by_its_own_vector(model, method):
    texts = [" ".join(words) for words in zip(WORDS, WORDS[5:] + WORDS[:5], strict=True)][:24]
    aucs = []
    for start in range(8):  # sets that are alike, so that only knowing a prompt tells them apart
        mixed = texts[start:] + texts[:start]
        found = direction(model, mixed[::2] * 5, mixed[1::2] * 5, layer=0, method=method)
        aucs.append(found.auc["value"])
        assert "The smaller set has 12 prompts" in found.notes[-1]
        assert found.auc["high"] - found.auc["low"] > 0.2  # as wide as 12 prompts are, not 60
    assert sum(aucs) / len(aucs) < 0.7


def test_prompts_are_told_apart_by_their_ids_and_pairs_stay_whole():
    from layerleap.act.steering.find import _groups

    names = [["a", "b", "a", "c", "d", "e", "f"], ["p", "q", "r", "r", "s", "t", "u"]]
    assert [one.tolist() for one in _groups(names, "mean")] == [
        [0, 1, 0, 2, 3, 4, 5],
        [0, 1, 2, 2, 3, 4, 5],
    ]
    assert [one.tolist() for one in _groups(names, "pca")] == [[0, 1, 0, 0, 2, 3, 4]] * 2
    with pytest.raises(BadText, match="3 different prompts in a set; expected 4"):
        _groups([["a", "b", "c", "a"], ["p", "q", "r", "s"]], "mean")


def test_a_prompt_too_long_is_refused_with_its_length(model):
    with pytest.raises(BadText, match="a prompt has 80 tokens; this model reads at most 64"):
        direction(model, [*POSITIVE, "the cat " * 40])


def test_a_model_in_training_mode_is_refused(found):
    other = tiny("llama", attention_dropout=0.1)
    other.model.train()
    with pytest.raises(ModelRefused, match="is in training mode"):
        direction(other)
    with pytest.raises(ModelRefused, match="is in training mode"):
        ll.steering_cost(other, found)
    other.model.eval()
    direction(other)


def test_a_direction_is_saved_and_read_back_bit_for_bit(model, found, tmp_path):
    file = found.save(tmp_path / "own.safetensors")
    again = ll.Direction.load(file)
    assert torch.equal(again.vector, found.vector)
    assert again.to_dict() == found.to_dict()
    json.dumps(again.to_dict(), allow_nan=False)
    edit = ll.edits.parse_edit(f"h2-{file}*0.5@last")
    assert isinstance(edit, ll.edits.AddVector)
    assert (edit.layer, edit.factor, edit.positions) == (2, -0.5, "last")
    spec = ll.edits.edit_spec(edit)
    assert spec == f"h2-{file}*0.5@last"
    assert ll.edits.edit_sentence(edit).startswith("Add -0.5 times")
    with model.edit(spec) as report:
        after = model.capture("the cat sat", layers=[2]).states[2]
    before = model.capture("the cat sat", layers=[2]).states[2]
    assert report[0].positions == 1
    torch.testing.assert_close(after[0, -1], before[0, -1] - 0.5 * found.vector)
    assert torch.equal(after[0, :-1], before[0, :-1])
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(BadArtifact):
        ll.Direction.load(file)
    FILE.save(file, {"vector": found.vector}, {"layer": 1})
    with pytest.raises(BadArtifact, match="does not describe a direction"):
        ll.Direction.load(file)


def test_a_direction_of_another_model_or_width_is_refused(found):
    with (
        pytest.raises(WrongModel, match="this direction belongs to tiny-llama"),
        tiny("llama", seed=1).edit(ll.edits.AddVector(1, found)),
    ):
        pass
    with (
        pytest.raises(WrongModel),
        tiny("llama", hidden_size=32).edit(ll.edits.AddVector(1, found)),
    ):
        pass


def test_a_strength_in_states_is_the_mean_length_of_states_at_the_layer_of_the_edit(model, found):
    other = torch.cat([states(model, one, 1) for one in (POSITIVE, NEGATIVE)]).norm(dim=1).mean()
    with model.edit(ll.edits.AddVector(1, found, 0.5, "state")):
        after = model.capture("the cat sat", layers=[1]).states[1]
    moved = (after - model.capture("the cat sat", layers=[1]).states[1]).norm(dim=-1)
    torch.testing.assert_close(
        moved, (0.5 * other).to(moved).expand_as(moved), rtol=1e-4, atol=1e-5
    )
    with model.edit(ll.edits.AddVector(2, found, 0.5, "state")):
        after = model.capture("the cat sat", layers=[2]).states[2]
    before = model.capture("the cat sat", layers=[2]).states[2]
    mean_length = float(found.vector.norm()) / found.norm
    assert found.state_length(found.layer) == pytest.approx(mean_length)
    lengths = (after - before).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 0.5 * mean_length))


def test_encoders_are_read_at_the_mean_of_their_tokens_and_steered():
    bert = tiny("bert")
    own = direction(bert)
    assert own.positions == "mean"
    with bert.edit(ll.edits.ProjectOut(own.layer, own)):
        after = bert.capture("the cat sat", layers=[own.layer]).states[own.layer]
    unit = own.vector / own.vector.norm()
    torch.testing.assert_close(after @ unit, torch.zeros(after.shape[:2]), rtol=0, atol=1e-5)
    cost = ll.steering_cost(
        bert, own, factors=[3.0], text=sentences(12), n_texts=10, random=1, progress=False
    )
    assert all(line["kl"] > 0 for line in cost.lines)


def test_steered_text_is_what_every_decoder_writes(model, found):
    bank = ll.fit(model, sentences(30), n_texts=30, evaluate=False, progress=False)
    edits = [ll.edits.AddVector(found.layer, found, 4.0)]
    texts = {
        ll.generate(model, "the cat", edits=edits, bank=own, decoder=way, max_new_tokens=8).text
        for own, way in ((None, "transformers"), (None, None), (bank, None))
    }
    assert len(texts) == 1
    assert encode(model, texts.pop())


def test_prompts_come_from_files_too(model, found, tmp_path):
    lines, records = tmp_path / "positive.txt", tmp_path / "negative.jsonl"
    lines.write_text("\n\n".join(POSITIVE))
    records.write_text("\n".join(json.dumps({"text": one}) for one in NEGATIVE))
    assert torch.equal(direction(model, lines, records).vector, found.vector)
    with pytest.raises(BadText, match="there is no file"):
        direction(model, tmp_path / "none.txt")


def test_what_is_wrong_is_said_in_one_sentence(model):
    with pytest.raises(BadText, match="3 positive prompts; expected 4 or more"):
        direction(model, POSITIVE[:3])
    with pytest.raises(BadSettings, match="layer 9 does not exist"):
        direction(model, layer=9)
    with pytest.raises(BadSettings, match="the same mean state at layer 1"):
        direction(model, POSITIVE, POSITIVE, layer=1)


def test_the_cost_of_steering_stands_beside_random_vectors(model, found):
    text = sentences(12)
    cost = ll.steering_cost(
        model, found, factors=[0.0, 2.0], text=text, n_texts=10, random=2, progress=False
    )
    lines = {(line["factor"], line["vector"]): line for line in cost.lines}
    assert list(lines) == [(0.0, "direction"), (0.0, "random"), (2.0, "direction"), (2.0, "random")]
    for name in ("direction", "random"):
        assert lines[0.0, name]["kl"] == pytest.approx(0, abs=1e-6)
        assert lines[0.0, name]["loss"] == pytest.approx(0, abs=1e-6)
        line = lines[2.0, name]
        assert 0 < line["kl_low"] <= line["kl"] <= line["kl_high"]
        assert line["low"] <= line["loss"] <= line["high"]
    assert "2 random vectors of the same length" in str(cost)
    json.dumps(cost.to_dict(), allow_nan=False)
    other = replace(found, model={**found.model, "fingerprint": "0" * 32})
    with pytest.raises(WrongModel):
        ll.steering_cost(model, other, text=text)


def test_the_picture_is_a_curve_without_script(found, tmp_path):
    from layerleap.results.page import write_page

    html = found._repr_html_()
    assert html.count("<circle") == 4
    assert "<script" not in html
    Page(html)
    assert "A direction of" in write_page(tmp_path / "page.html", found.head(), found).read_text()


@pytest.mark.parametrize("positions", ["last", "generated", [999], [63, 999]])
def test_positions_that_no_scored_prediction_sees_are_refused(model, found, positions):
    with pytest.raises(BadSettings, match="would change nothing that is scored"):
        ll.steering_cost(model, found, text=sentences(4), positions=positions, progress=False)
    cost = ll.steering_cost(
        model, found, factors=[3.0], text=sentences(4), n_texts=1, positions=[0], progress=False
    )
    assert cost.lines[0]["kl"] > 0


def test_the_cost_on_one_text_is_worded_as_that_of_one(model, found):
    cost = ll.steering_cost(
        model, found, factors=[3.0], text=sentences(4), n_texts=1, random=1, progress=False
    )
    assert "of 1 document of" in cost.short()
    assert (
        cost.legend()
        == "random: 1 random vector of the same length; one document gives no intervals"
    )


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_mean_over_tokens_leaves_the_first_out_unless_it_is_the_only_one(name):
    model = tiny(name)
    positive = ["cat", *POSITIVE]
    own = direction(model, positive, layer=2, at="mean")
    means = []
    for texts in (positive, NEGATIVE):
        h = [model.capture(one, layers=[2]).states[2][0] for one in texts]
        means.append(torch.stack([one[min(1, len(one) - 1) :].mean(0) for one in h]).mean(0))
    torch.testing.assert_close(own.vector, means[0] - means[1], rtol=1e-4, atol=1e-5)
    assert "read as the mean over tokens" in own.legend()


def test_an_auc_that_differs_from_that_of_the_chosen_layer_is_explained(model):
    texts = sentences(80)
    found = direction(model, texts[:40], texts[40:])
    own, chosen = (f"{one:.2f}" for one in (found.auc["value"], found.layers[found.layer]["auc"]))
    assert own != chosen
    (note,) = (one for one in found.notes if "first line" in one)
    assert own in note
    assert chosen in note


def test_no_prompts_are_counted_as_none(model, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    for empty in ([], (), tmp_path / "empty.txt"):
        with pytest.raises(BadText, match="0 positive prompts; expected 4"):
            direction(model, empty)


def test_a_direction_of_an_earlier_version_does_not_know_how_long_states_are(found):
    layers = [{k: v for k, v in row.items() if k != "state_length"} for row in found.layers]
    with pytest.raises(BadArtifact, match="saved by an earlier version"):
        replace(found, layers=layers).state_length(1)
