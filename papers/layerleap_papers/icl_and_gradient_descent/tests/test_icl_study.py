"""The study of in-context learning on a tiny model."""

import copy
import math
from pathlib import Path

import icl_studies
import pytest
import torch
from icl_studies import made, settings

from contract_bank import bank_of
from golden import differences
from intervals import require_inside
from layerleap.act.learning.descent import learn
from layerleap.act.learning.measures import Ratio
from layerleap.errors import BadSettings, BadText, ModelRefused, NotFinite
from layerleap.stream.tasks import draw, load
from layerleap.study.result import StudyResult
from layerleap_papers.icl_and_gradient_descent import (
    STUDY,
    IclSettings,
    changes,
    conditions,
    icl_context as context_module,
    layers,
    rates,
    similarity,
)
from layerleap_papers.icl_and_gradient_descent.conditions import Trial
from layerleap_papers.icl_and_gradient_descent.icl_context import IclContext, layer_mean
from layerleap_papers.icl_and_gradient_descent.rates import _Search, next_rate
from tiny_models import tiny


def test_every_section_runs_and_every_table_has_its_controls():
    result = made()
    assert not result.failed
    rows = result.rows("similarity", task="sizes", measure="aou", seed=None, layer=None)
    cases = {(row["way"], row["control"]) for row in rows}
    controls = ("", "queries", "labels", "untrained")
    ways = {(way, control) for way in ("gd", "lcgd-logit") for control in controls}
    assert cases == ways | {("noise", "")}
    layers = {row["layer"] for row in result.rows("similarity", way="gd", measure="aou")}
    assert layers == {None, 1, 2, 3}
    assert {row["seed"] for row in result.rows("similarity")} == {None, 0, 1}
    for row in result.rows("similarity"):
        if row["rows"] > 1:
            assert -1 <= row["low"] <= row["value"] <= row["high"] <= 1
        else:  # not measured, or once
            assert row["low"] is row["high"] is None


@pytest.mark.parametrize("table", ["changes", "readings", "saturation_gaps"])
def test_predictions_and_readings_have_controls_too(table):
    result, column = made(), "way" if table == "changes" else "case"
    for way in ("gd", "lcgd-logit"):
        rows = result.rows(table, task="sizes", **{column: way})
        assert {row["control"] for row in rows} == {"", "labels", "queries"}
    section = changes if table == "changes" else layers
    assert "untrained blocks" in section.SECTION.lead
    assert "Noise" in section.SECTION.lead


def test_a_model_that_does_not_learn_in_context_leaves_the_claims_untested():
    result = made()
    assert not any(row["works"] for row in result.rows("tasks"))
    verdicts = {claim["claim"]: claim for claim in result.claims}
    first = verdicts.pop("The model learns the tasks in context.")
    assert first["agrees"] in ("no", "cannot tell")
    assert {claim["agrees"] for claim in verdicts.values()} == {"not tested"}
    assert "(not learned in context)" in " ".join(row["text"] for row in result.findings)


def give_seeds(tables, **values):
    """Mean SimAOU of gradient descent by seed, with trained and with untrained blocks."""
    for row in tables["similarity"]:
        is_mean = (row["measure"], row["way"], row["layer"]) == ("aou", "gd", None)
        name = {"": "trained", "untrained": "untrained"}.get(row["control"])
        if is_mean and name and row["seed"] is not None:
            row["value"] = values[name][row["seed"]]


def test_claims_are_decided_on_the_tasks_that_are_learned():
    tables = copy.deepcopy(made().tables)
    for row in tables["tasks"]:
        row["works"] = row["task"] == "sizes"
    for row in tables["learns"]:
        row["learns"] = "yes"
    for row in tables["similarity_leads"]:
        if row["task"] == "sizes":
            row.update(value=0.2, low=0.1, high=0.3)
    for row in tables["untrained_leads"]:
        row.update(value=-0.2, low=-0.3, high=-0.1)
    give_seeds(tables, trained=(0.5, 0.6), untrained=(0.2, 0.28))
    learned = StudyResult(**{**vars(made()), "tables": tables, "findings": [], "claims": []})
    verdicts = {claim["claim"]: claim for claim in STUDY.conclude(learned).claims}
    closer = verdicts[
        "Layer-causal gradient descent is closer to in-context learning than plain gradient "
        "descent (SimAOU)."
    ]
    assert closer["agrees"] == "yes"
    assert closer["seen"] == "sizes +0.200 (+0.100 to +0.300)"
    untrained = "A model with untrained blocks reaches the SimAOU of the trained one."
    assert verdicts[untrained]["agrees"] == "no"
    noise = verdicts["SimAOU is higher than that of isotropic noise."]
    assert noise["agrees"] == "yes"


def learned(tables, idle: tuple[str, ...] = ()) -> dict[str, dict]:
    """The claims of these tables if all tasks are learned in context, and by all but idle ways."""
    for row in tables["tasks"]:
        row["works"] = True
    for row in tables["learns"]:
        row["learns"] = "cannot tell" if row["way"] in idle else "yes"
    result = StudyResult(**{**vars(made()), "tables": tables, "findings": [], "claims": []})
    return {claim["claim"]: claim for claim in STUDY.conclude(result).claims}


def test_a_claim_cannot_be_told_if_a_task_was_not_measured():
    tables = copy.deepcopy(made().tables)
    for row in tables["similarity_leads"]:
        row.update(value=0.2, low=0.1, high=0.3)
    closer = (
        "Layer-causal gradient descent is closer to in-context learning than plain gradient "
        "descent (SimAOU)."
    )
    noise = "SimAOU is higher than that of isotropic noise."
    whole = learned(tables)
    assert (whole[closer]["agrees"], whole[noise]["agrees"]) == ("yes", "yes")
    for name in ("similarity_leads", "changes"):  # as if gradient descent had diverged there
        tables[name] = [
            row
            for row in tables[name]
            if row["task"] == "sizes" or "gd" not in (row.get("way"), *_ways_of(row))
        ]
    for row in tables["changes"]:
        row.update(value=0.5, low=0.4, high=0.6, size_value=0.0, size_low=0.0, size_high=0.01)
    some = learned(tables)
    assert (some[closer]["agrees"], some[noise]["agrees"]) == ("cannot tell", "partly")
    assert "reverse not measured" in some[closer]["seen"]
    few = some["Rec2FTP says little, because training makes few queries right."]
    assert few["agrees"] == "cannot tell"
    assert "reverse, gradient descent not measured" in few["seen"]


def test_no_claim_rests_on_a_way_of_training_that_does_not_learn():
    tables = copy.deepcopy(made().tables)
    for name in ("similarity_leads", "layer_leads", "changes", "untrained_leads"):
        for row in tables[name]:
            row.update(value=0.2, low=0.1, high=0.3, size_value=0.0, size_low=0.0, size_high=0.01)
    for row in tables["readings"]:
        row.update(lead_value=0.2, lead_low=0.1, lead_high=0.3)
    known = learned(copy.deepcopy(tables))
    idle = learned(tables, idle=("gd",))
    needs = [
        text
        for text in known
        if "than plain gradient descent" in text
        or "by gradient descent" in text
        or "closer in most layers" in text
        or "untrained" in text
        or "Rec2FTP says" in text
    ]
    assert len(needs) == 8
    assert {known[text]["agrees"] for text in needs} >= {"yes"}
    for text in needs:
        assert idle[text]["agrees"] == "cannot tell"
        assert "not clearly learn" in idle[text]["seen"]
    free = "Through linear shortcuts, layer-causal training is closer than through the logit lens "
    for text in known:
        if text.startswith(free):
            assert idle[text] == known[text]


def test_a_way_learns_if_right_answers_are_clearly_more_likely_than_without_training(tmp_path):
    context = IclContext(tiny("llama", seed=1), settings(), tmp_path, lambda *_, **__: None)
    gains = {
        "gain/gd": torch.tensor([0.3, 0.2, 0.4]),
        "gain/lcgd-logit": torch.tensor([-0.3, 0.2, -1]),
    }
    context.cells = lambda: iter([("sizes", [gains, gains])])
    rows = {row["way"]: row for row in rates._gains(context)["learns"]}
    assert (rows["gd"]["learns"], rows["lcgd-logit"]["learns"]) == ("yes", "cannot tell")
    assert rows["gd"]["value"] == pytest.approx(0.3)
    assert (rows["gd"]["rows"], rows["gd"]["seeds"]) == (6, 2)
    tables = copy.deepcopy(made().tables) | {"learns": list(rows.values())}
    result = StudyResult(**{**vars(made()), "tables": tables, "findings": [], "claims": []})
    told = [row["text"] for row in STUDY.conclude(result).findings]
    said = next(text for text in told if "gain of the right answer's log-probability" in text)
    assert said.startswith("sizes (not learned in context): learned by gradient descent +0.3 (")
    assert "; not clearly learned by layer-causal (logit lens) -0.367 (" in said


@pytest.mark.parametrize(
    ("rates", "values", "wanted"),
    [
        ((0.1, 0.2, 0.4), (1, 2, 3), 0.8),
        ((0.4, 0.1, 0.2), (1, 3, 2), 0.05),
        ((0.1, 0.2, 0.4), (1, 3, 2), None),
        ((0.1, 0.2, 0.4), (1, 3, None), None),
        ((0.1, 0.2), (None, None), 0.05),
        ((0.1,), (1,), None),
        # Equally good: the highest counts, in whatever order they were tried.
        ((0.1, 0.2, 0.4), (3, 3, 2), None),
        ((0.2, 0.4, 0.1), (3, 2, 3), None),
        ((0.1, 0.2), (3, 3), 0.4),
    ],
)
def test_the_search_goes_on_beyond_the_edge_where_the_best_rate_is(rates, values, wanted):
    rows = [{"rate": rate, "value": v} for rate, v in zip(rates, values, strict=True)]
    assert next_rate(rows) == wanted


def test_a_best_rate_at_the_edge_extends_the_search_five_times_at_most():
    chosen = settings(tasks=settings().tasks[:1], seeds=1, rates=(1e-9, 1e-8))
    result = STUDY(tiny("llama", seed=1), chosen, sections=[])
    for way in ("gd", "lcgd-logit"):
        rows = result.rows("rates", way=way)
        assert 3 <= len(rows) <= 7
        if len(rows) == 7:  # as far as it goes
            told = next(row["text"] for row in result.findings if row["section"] == "rates")
            is_edge = next(i for i, row in enumerate(rows) if row["chosen"]) in (0, 6)
            assert is_edge == ("at the edge of the search for" in told)
        else:
            assert not any(row["chosen"] for row in (rows[0], rows[-1]))


def test_a_rate_is_the_best_of_all_seeds_together(monkeypatch):
    """Seed 0 alone would take 0.1, which fails with seed 1; 0.01 is best for both."""
    by_rate = {0.1: (0.0, None), 0.01: (-1.0, -1.0), 0.001: (-0.5, -3.0)}

    def trained(search, trial, way, rate):
        seed = next(seed for seed, one in search.trials.items() if one is trial)
        value = by_rate.get(rate, (-9.0, -9.0))[seed]
        n = len(trial.queries)
        return {} if value is None else {"log_p": [value] * n, "accuracy": [0.5] * n}

    monkeypatch.setattr(_Search, "_trained", trained)
    chosen = settings(tasks=settings().tasks[:1], rates=(0.001, 0.01, 0.1))
    result = STUDY(tiny("llama", seed=1), chosen, sections=[])
    for way in ("gd", "lcgd-logit"):
        rows = {row["rate"]: row for row in result.rows("rates", way=way)}
        assert [rate for rate, row in rows.items() if row["chosen"]] == [0.01]
        assert rows[0.1]["value"] is None
        assert rows[0.001]["value"] == pytest.approx(-1.75)
        assert (rows[0.01]["seeds"], rows[0.01]["accuracy"]) == (2, 0.5)


def test_a_training_that_ends_in_nan_is_reported_with_its_seed(monkeypatch):
    original = conditions.train

    def diverging(context, trial, way, rate, pieces, start=None):
        if way == "gd" and pieces[0] == context.draw("sizes", 1).demonstrations[0]:
            raise NotFinite("what was learned is NaN")
        return original(context, trial, way, rate, pieces, start)

    monkeypatch.setattr(conditions, "train", diverging)
    chosen = settings(tasks=settings().tasks[:1])
    result = STUDY(tiny("llama", seed=1), chosen, sections=["similarity"])
    failed = {"task": "sizes", "seed": 1, "way": "gd", "control": ""}
    assert failed in result.rows("failed_trainings")
    told = " ".join(row["text"] for row in result.findings)
    assert "training by gradient descent diverged to NaN or infinity with seed 1" in told
    assert not result.rows("similarity", way="gd", control="")
    assert result.rows("similarity", way="lcgd-logit", control="")


def _ways_of(row) -> list[str]:
    return [row[side].split("/")[0] for side in ("of", "over") if side in row]


def test_leads_are_means_over_the_layers_that_both_have():
    x = torch.tensor([[math.nan, 0.5, 0.7], [0.1, 0.2, 0.3]])
    y = torch.tensor([[0.9, 0.4, math.nan], [0.0, 0.2, 0.3]])
    (gaps,) = similarity._gaps([{"x": x, "y": y}], "x", "y")
    assert layer_mean(gaps)[:, 0].tolist() == pytest.approx([0.1, 0.1 / 3])


@pytest.mark.parametrize(("counted", "has_interval"), [(2, False), (9, False), (10, True)])
def test_a_share_of_few_queries_has_no_interval(counted, has_interval):
    mask = torch.arange(20) < counted
    row = changes._estimate([Ratio(mask, mask)], 1)
    assert (row["value"], row["counted"]) == (1, counted)
    assert (row["low"] is not None, row["high"] is not None) == (has_interval, has_interval)
    assert row["size_low"] is not None


def test_a_query_that_two_ways_change_differently_is_one_query_of_two_changes():
    halves = [torch.full((n,), 2) for n in (4, 5)]
    row = changes._estimate([Ratio(torch.zeros_like(own), own) for own in halves], 2)
    assert (row["counted"], row["low"]) == (18, None)  # 9 queries
    counts = [torch.tensor([2, 2, 2, 1, 2, 2, 2, 2]), torch.tensor([2, 1, 2, 2, 2, 1, 2, 2])]
    row = changes._estimate([Ratio(torch.zeros_like(own), own) for own in counts], 2)
    assert 1 < row["size_low"] < row["size_value"] < row["size_high"] <= 2


def test_the_mean_over_layers_leaves_out_the_embedding_which_always_agrees():
    shown = torch.tensor([[1, 2, 3], [1, 2, 3]])
    own = torch.tensor([[1, 0, 3], [1, 0, 0]])
    rows = list(layers._agreement([own], [shown], [shown], {}))
    assert [row["value"] for row in rows] == [1, 0, 0.5, 0.25]
    assert [row["lead_value"] for row in rows] == [0, -1, -0.5, -0.75]
    assert rows[-1]["layer"] is None
    for row in made().rows("readings", layer=0):
        assert row["value"] == 1


def test_untrained_blocks_are_compared_with_trained_ones_query_by_query():
    trained = torch.linspace(0.1, 0.9, 30)[:, None].expand(30, 3)
    cells = [{"aou/gd/": trained, "aou/gd/untrained": 0.85 * trained}]
    (row,) = similarity._untrained_leads(cells, {"task": "sizes"})
    assert row["value"] == pytest.approx(-0.15 * 0.5)
    assert -0.12 < row["low"] < row["high"] < 0
    assert {row["task"] for row in made().rows("untrained_leads")} == {"sizes", "reverse"}


@pytest.mark.parametrize(
    ("untrained", "noise", "agrees"),
    [
        ((0.26, 0.5), 0.1, "yes"),  # lower by less than a fifth, however much seeds differ
        ((0.2, 0.44), 0.1, "no"),
        ((0.2, 0.6), 0.1, "cannot tell"),
        ((0.3, 0.6), -0.1, "cannot tell"),  # no similarity to reach
    ],
)
def test_untrained_blocks_reach_a_similarity_only_if_there_is_one(untrained, noise, agrees):
    tables = copy.deepcopy(made().tables)
    give_seeds(tables, trained=(0.3, 0.6), untrained=untrained)
    for row in tables["similarity_leads"]:
        row.update(value=noise, low=noise - 0.05, high=noise + 0.05)
    claim = learned(tables)["A model with untrained blocks reaches the SimAOU of the trained one."]
    assert claim["agrees"] == agrees


def test_no_claim_is_decided_by_a_single_seed():
    tables = copy.deepcopy(made().tables)
    for row in tables["similarity_leads"]:
        row.update(value=0.2, low=0.1, high=0.3)
    for row in (*tables["tasks"], *tables["learns"]):
        row |= {"works": True} if "works" in row else {"learns": "yes"}
    several, single = (
        STUDY.conclude(
            StudyResult(
                **{**vars(made()), "tables": tables, "findings": [], "claims": [], "settings": own}
            )
        ).claims
        for own in (made().settings, {**made().settings, "seeds": 1})
    )
    assert "yes" in {row["agrees"] for row in several}
    assert {row["agrees"] for row in single} <= {"cannot tell", "not tested"}
    assert any("one seed says nothing" in row["why"] for row in single)


def test_layers_are_read_with_the_head_that_training_has_changed(tmp_path):
    """Where everything learns, the last layer reads what the trained model predicts."""
    model = tiny("llama", seed=1)
    chosen = settings(tasks=settings().tasks[1:], seeds=1, parameters="all", rates=(0.3, 0.5))
    context = IclContext(model, chosen, tmp_path, lambda *_: None)
    context.key = "test"
    context.tables = {
        "rates": [
            {"task": "reverse", "way": way, "rate": 0.3, "chosen": True} for way in chosen.ways
        ]
    }
    cell = conditions.measure(context, "reverse", 0)
    for way in chosen.ways:
        tops, own = cell[f"tops/logit/{way}"][:, -1], cell[f"prediction/{way}"]
        assert torch.equal(tops, own[: len(tops)])
        assert not torch.equal(own, cell["prediction/zero-shot"])


def test_one_demonstration_keeps_its_answer_so_shuffling_it_is_no_control(tmp_path):
    chosen = settings(tasks=settings().tasks[:1], seeds=1, demonstrations=1)
    result = STUDY(tiny("llama", seed=1), chosen, sections=["similarity"])
    assert not result.failed
    assert not result.rows("similarity", control="labels")
    assert result.rows("similarity", way="gd", control="queries")


def test_mistyped_parameters_are_refused_before_anything_runs():
    for words in ("keyz-values", "keys,valuez"):
        with pytest.raises(BadSettings, match="no parameter"):
            STUDY(tiny("llama", seed=1), settings(parameters=words))
    assert settings(parameters="keys, values").chosen_parameters == ("keys", "values")


def test_every_seed_has_its_own_untrained_blocks(tmp_path):
    context = IclContext(tiny("llama", seed=1), settings(), tmp_path, lambda *_, **__: None)
    first, second = (context.untrained_control(seed) for seed in (0, 1))
    assert context.untrained_control(1) is second
    assert first.identity.fingerprint != second.identity.fingerprint


def test_rates_are_chosen_on_queries_that_nothing_else_uses(tmp_path):
    context = IclContext(tiny("llama", seed=1), settings(), tmp_path, lambda *_, **__: None)
    for task in context.encoded:
        chosen_on = {piece.number for piece in context.draw(task, context.settings.seed).search}
        assert chosen_on
        for seed in context.seeds:
            drawn = context.draw(task, seed)
            roles = [drawn.demonstrations, drawn.queries]
            numbers = [piece.number for role in roles for piece in role]
            assert len(numbers) == len(set(numbers))
            assert chosen_on.isdisjoint(numbers)
    for way in ("gd", "lcgd-logit"):
        rows = made().rows("rates", task="sizes", way=way)
        assert {0.01, 0.1} <= {row["rate"] for row in rows}
        best = max(rows, key=lambda row: row["value"])
        assert [row["chosen"] for row in rows] == [row is best for row in rows]


def test_whether_a_task_is_learned_is_decided_on_the_demonstrations_of_the_study(
    monkeypatch, tmp_path
):
    asked = []
    monkeypatch.setattr(context_module, "answered", lambda *given: asked.append(given))
    chosen = settings(tasks=settings().tasks[:1])
    context = IclContext(tiny("llama", seed=1), chosen, tmp_path, lambda *_, **__: None)
    context.in_context("sizes")
    ((_, _, draws, shots, _),) = asked
    assert shots == [0, 1, 2, 4]
    for seed, own in zip(context.seeds, draws, strict=True):
        drawn = context.draw("sizes", seed)
        assert own.demonstrations[: chosen.demonstrations] == drawn.demonstrations
        assert own.queries == drawn.queries


def test_as_many_demonstrations_are_shown_as_fit_before_the_queries_of_every_seed(tmp_path):
    """The texts of one seed are longer than those of the others."""
    chosen = settings(tasks=settings().tasks[:1], seeds=4, demonstrations=2, most=32)
    context = IclContext(tiny("llama", seed=1), chosen, tmp_path, lambda *_, **__: None)
    encoded = context.encoded["sizes"]
    fits = iter([9, 9, 3, 9])
    object.__setattr__(encoded, "fitting", lambda *_: next(fits, 9))
    drawn = {seed: draw(encoded, seed, demonstrations=2, queries=8, search=4) for seed in range(4)}
    context.draw = lambda task, seed: drawn[seed]
    assert context.in_context("sizes").shots == (0, 1, 2)


def test_demonstrations_have_the_same_order_in_all_conditions(monkeypatch, tmp_path):
    """What is trained on, one by one, is what is shown, in that order."""
    trained, shown = [], []

    def spy(model, demonstrations, **how):
        trained.append([one.ids for one in demonstrations])
        return learn(model, demonstrations, **how)

    original = Trial._observe

    def watch(self, context):
        shown.append((self.encoded, context))
        return original(self, context)

    monkeypatch.setattr(conditions, "learn", spy)
    monkeypatch.setattr(Trial, "_observe", watch)
    source = str(icl_studies.task_file(tmp_path))
    STUDY(tiny("llama", seed=1), settings(tasks=(source,), seeds=1), sections=["similarity"])
    encoded = shown[0][0]
    context = IclContext(tiny("llama", seed=1), settings(tasks=(source,)), tmp_path, print)
    drawn = context.draw("sizes", 0)
    true = [encoded.demonstration(piece) for piece in drawn.demonstrations]
    mixed = [encoded.demonstration(piece) for piece in drawn.shuffled()]
    contexts = {one for _, one in shown}
    assert encoded.context(drawn.demonstrations) in contexts
    assert {tuple(map(tuple, one)) for one in trained} == {
        tuple(true),
        tuple(mixed),
        tuple(true[:1]),
        tuple(true[1:]),
    }


def test_the_model_is_the_same_to_the_bit_afterwards():
    model = tiny("llama", seed=1)
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    STUDY(model, settings(seeds=1, tasks=settings().tasks[:1]), sections=["changes"])
    for name, value in model.model.state_dict().items():
        assert torch.equal(value, before[name])


class Stopped(Exception):
    pass


def test_a_stopped_run_continues_with_the_next_seed_and_ends_the_same(tmp_path, monkeypatch):
    chosen = {"tasks": settings().tasks[1:], "seeds": 2}
    whole = STUDY(tiny("llama", seed=1), settings(**chosen), sections=["similarity"])
    measured: list[int] = []
    measure = conditions.measure

    def stop_at_second(context, task, seed):
        if seed == 1 and len(measured) == 1:
            measured.append(-1)
            raise Stopped
        measured.append(seed)
        return measure(context, task, seed)

    monkeypatch.setattr(conditions, "measure", stop_at_second)
    for _ in range(2):
        try:
            result = STUDY(
                tiny("llama", seed=1), settings(**chosen), sections=["similarity"], folder=tmp_path
            )
        except Stopped:
            continue
    assert measured == [0, -1, 1]  # the first seed is not measured again
    assert result.tables == whole.tables


def test_layer_causal_losses_can_be_read_through_a_bank():
    model = tiny("llama", seed=1)
    bank = bank_of(model)
    chosen = settings(tasks=settings().tasks[:1], seeds=1, lenses=("logit", "linear"), bank=bank)
    result = STUDY(model, chosen, sections=["similarity", "layers"])
    assert {row["way"] for row in result.rows("rates")} == {"gd", "lcgd-logit", "lcgd-linear"}
    assert result.row("similarity_leads", of="lcgd-linear/", over="lcgd-logit/") is not None
    assert {row["lens"] for row in result.rows("readings")} == {"logit", "linear"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tasks": ()}, "tasks are none"),
        ({"seeds": 0}, "seeds is 0"),
        ({"most": 2}, "most is 2; expected at least the 4"),
        ({"rates": (0.0,)}, "rates are"),
        ({"lenses": ("linear",)}, "lenses lack logit"),
        ({"lenses": ("logit", "max")}, "lenses is 'max'"),
        ({"tokens": "some"}, "tokens is 'some'"),
        ({"tuned": "folder"}, "a tuned bank was given, but lenses are"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changed, message):
    with pytest.raises(BadSettings, match=message):
        settings(**changed)


def test_bad_input_is_refused_in_one_sentence(tmp_path: Path):
    with pytest.raises(ModelRefused, match="masked model"):
        STUDY(tiny("bert"), settings())
    with pytest.raises(BadText, match=r"demonstrations .* at most \d+ fit"):
        STUDY(tiny("llama"), settings(demonstrations=16, most=16, tasks=settings().tasks[:1]))
    with pytest.raises(BadText, match="there is no task or file"):
        STUDY(tiny("llama"), settings(tasks=("./none.csv",)))


def test_a_quick_run_is_small():
    quick = IclSettings().scaled_down()
    assert (len(quick.tasks), quick.seeds, quick.lenses) == (1, 1, ("logit",))
    assert quick.demonstrations <= 8
    assert quick.queries <= 30
    assert quick.rates == (0.0003, 0.001, 0.003)
    assert IclSettings(rates=(0.1, 0.2)).scaled_down().rates == (0.1, 0.2)


def test_a_quick_run_keeps_what_was_asked_for():
    asked = {"seeds": 2, "demonstrations": 12, "tasks": ("plurals", "kinds")}
    quick = STUDY._settings(IclSettings(**asked), True, {})
    assert {name: getattr(quick, name) for name in asked} == asked
    assert (quick.most, quick.queries, quick.lenses) == (12, 30, ("logit",))


def test_a_task_made_in_python_is_studied(tmp_path):
    task = load(icl_studies.task_file(tmp_path), template="{text} is")
    chosen = {**icl_studies.SMALL, "seeds": 1}
    result = STUDY(tiny("llama", seed=1), tasks=[task], sections=[], **chosen)
    (row,) = result.rows("tasks")
    assert (row["task"], row["template"]) == ("sizes", "{text} is")
    assert result.settings["tasks"] == [f"sizes ({task.digest})"]
    assert IclSettings(tasks=task).tasks == (task,)
    assert IclSettings(tasks="plurals, kinds").tasks == ("plurals", "kinds")


def test_every_estimate_of_the_study_lies_inside_its_interval():
    require_inside(made().tables, 10)


def test_a_small_study_measures_what_it_did_before():
    assert not differences(made(), "icl_and_gradient_descent")
