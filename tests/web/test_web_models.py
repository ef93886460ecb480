"""Every route on tiny real models: what the page gets is what the model computes."""

import threading
from contextlib import nullcontext

import pytest
import torch
from asking import frames
from starlette.testclient import TestClient

import layerleap as ll
from layerleap import edits as edit_namespace
from layerleap.act.debug.debugger import Debugger
from layerleap.act.edits.spec import parse_edit
from layerleap.show.web import schemas
from layerleap.show.web.limits import Limits
from layerleap.show.web.snippet import snippet
from tiny_models import tiny

TEXT = "the cat sat on the mat and then it ran"
FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "mixtral", "bert")


@pytest.fixture(scope="module")
def models():
    return {}


@pytest.fixture(params=FAMILIES)
def model(request, models):
    if request.param not in models:
        models[request.param] = tiny(request.param)
    return models[request.param]


@pytest.fixture(scope="module")
def llama():
    return tiny()


@pytest.fixture
def ask(make_app):
    """A client of a model."""
    opened = []

    def start(transformer, index=None, **more):
        debugger = Debugger(transformer, index=index)
        client = TestClient(make_app(debugger, **more), base_url="http://localhost")
        opened.append(client.__enter__())
        return client

    yield start
    for client in opened:
        client.__exit__(None, None, None)


def text_of(transformer):
    return TEXT.replace("mat", "<mask>") if transformer.kind == "masked-token" else TEXT


def ids_of(client, text):
    return [
        token["id"] for token in client.post("/api/tokens", json={"text": text}).json()["tokens"]
    ]


def logits(transformer, ids):
    with torch.no_grad():
        return transformer.model(torch.tensor([ids])).logits[0]


def test_a_model_says_what_it_is(ask, model):
    found = ask(model).get("/api/model").json()
    assert found["n_layers"] == model.n_layers
    assert found["fingerprint"] == model.identity.fingerprint
    reason = found["index"]["reason"]
    expected = {"ready": False, "reason": reason, "vectors": None, "buildable": False}
    assert found["index"] == expected
    assert "layerleap index" in found["index"]["reason"]
    assert found["limits"]["tokens"] == min(512, found["longest"])
    for block in found["blocks"]:
        assert (block["n_neurons"] is None) == (block["reason"] is not None)


def test_the_last_layer_reads_as_the_model_answers(ask, model):
    client = ask(model)
    ids = ids_of(client, text_of(model))
    body = {"input": {"ids": ids}, "top": 3, "watch": 7, "follow": [7, 8]}
    got = frames(client.post("/api/trace", json=body).text)
    meta = got[0]
    assert [token["id"] for token in meta["tokens"]] == ids
    probs = logits(model, ids).softmax(-1)
    names = {}
    cells = {}
    for frame in got:
        if frame["frame"] == "cells":
            names |= frame["names"]
            cells |= {(cell["layer"], cell["position"]): cell for cell in frame["cells"]}
    assert set(cells) == {(y, x) for y in meta["layers"] for x in meta["positions"]}
    for position in meta["positions"]:
        cell, row = cells[model.n_layers, position], probs[position]
        top = row.topk(3)
        assert [id for id, _ in cell["top"]] == top.indices.tolist()
        assert [p for _, p in cell["top"]] == pytest.approx(top.values.tolist(), abs=1e-5)
        assert cell["final"] == [pytest.approx(float(row.max()), abs=1e-5), 1]
        assert cell["watch"][0] == pytest.approx(float(row[7]), abs=1e-5)
        assert cell["watch"][1] == int((row > row[7]).sum()) + 1
        assert cell["follow"]["7"] == cell["watch"]
        assert cell["follow"]["8"][0] == pytest.approx(float(row[8]), abs=1e-5)
        assert cell["agrees"]
        assert all(str(id) in names for id, _ in cell["top"])
    assert got[-1]["frame"] == "done"


def test_an_edit_changes_what_it_should_and_nothing_else(ask, model):
    client = ask(model)
    found = client.get("/api/model").json()
    ids = ids_of(client, text_of(model))
    body = {"input": {"ids": ids}, "edits": ["L2.N3=9@last"]}
    answer = client.post("/api/trace", json=body)
    if found["blocks"][1]["n_neurons"] is None:
        assert answer.status_code == 422
        assert answer.json()["error"]
        return
    got = frames(answer.text)
    meta = got[0]
    assert meta["lowest"] == 2
    assert meta["edits"][0]["spec"] == "L2.N3=9@last"
    assert "neuron 3 of block 2" in meta["edits"][0]["sentence"]
    after = [c for f in got if f.get("side") == "after" for c in f["cells"]]
    assert {cell["layer"] for cell in after if cell["changed"]} == {2, 3}
    plain = {
        (c["layer"], c["position"]): c for f in got if f.get("side") == "before" for c in f["cells"]
    }
    for cell in after:  # compared with another answer, the reading may be the same
        same = plain[cell["layer"], cell["position"]]
        assert cell["changed"] or cell["top"] == same["top"]
    if model.kind == "next-token":
        assert {cell["position"] for cell in after} == {len(ids) - 1}
    with model.edit(parse_edit("L2.N3=9@last")):
        edited = logits(model, ids).softmax(-1)
    for cell in after:
        if cell["layer"] == model.n_layers:
            row = edited[cell["position"]]
            assert cell["top"][0][0] == int(row.argmax())
            assert cell["top"][0][1] == pytest.approx(float(row.max()), abs=1e-5)


def test_a_cell_shows_stages_and_neurons_or_says_why_not(ask, model):
    client = ask(model)
    found = client.get("/api/model").json()
    ids = ids_of(client, text_of(model))
    body = {"input": {"ids": ids}, "block": 2, "position": 3, "watch": 7, "top": 6}
    cell = client.post("/api/cell", json=body).json()
    stages = [stage["where"] for stage in cell["stages"]]
    has_attention = "attention" not in cell["missing"]
    assert stages == (["before", "attention", "ffn"] if has_attention else ["before", "ffn"])
    assert cell["style"] == found["blocks"][1]["style"]
    assert cell["token"]["id"] == ids[3]
    for stage in cell["stages"]:
        ranks = [predicted["rank"] for predicted in stage["top"]]
        assert ranks == list(range(1, 1 + len(ranks)))
        assert all(predicted["token"]["label"] for predicted in stage["top"])
        assert stage["watched"]["rank"] >= 1
        assert stage["watched"]["token"]["id"] == 7
    assert cell["after"] is None
    if found["blocks"][1]["n_neurons"] is None:
        assert cell["updates"] == []
        assert cell["missing"]["neurons"]
        return
    assert len(cell["updates"]) == 6
    assert {update["name"] for update in cell["updates"]} == {None}
    strengths = [update["strength"] for update in cell["updates"]]
    assert strengths == sorted(strengths, reverse=True)
    shares = cell["shown_share"] + cell["bias_share"] + cell["rest_share"]
    assert shares == pytest.approx(1)
    edited = client.post("/api/cell", json={**body, "edits": ["L2.N3=9"]}).json()
    strongest = {update["neuron"]: update for update in edited["after"]["updates"]}
    assert strongest[3]["coefficient"] == pytest.approx(9)
    assert {**edited, "after": None} == cell


def test_text_is_what_generate_writes(ask, model):
    client = ask(model)
    found = client.get("/api/model").json()
    ids = ids_of(client, text_of(model))
    body = {"input": {"ids": ids}, "max_new_tokens": 4, "edits": ["L1.N3=9"]}
    if not found["can_generate"]:
        answer = client.post("/api/generate", json=body)
        assert answer.status_code == 422
        assert answer.json()["error"] == found["generate_reason"]
        return
    if found["blocks"][0]["n_neurons"] is None:
        body["edits"] = []
    got = frames(client.post("/api/generate", json=body).text)
    assert got[-1] == {"frame": "end"}
    for side, own in (("plain", []), ("edited", body["edits"])):
        written = [f["id"] for f in got if f["frame"] == "token" and f["side"] == side]
        with model.edit(*map(parse_edit, own)) if own else nullcontext():
            expected = model.model.generate(
                torch.tensor([ids]), max_new_tokens=4, do_sample=False, pad_token_id=0
            )[0, len(ids) :].tolist()
        assert written == expected


def test_a_vector_is_read_without_an_index(ask, model):
    client = ask(model)
    found = client.get("/api/model").json()["blocks"][0]
    answer = client.get("/api/vectors/1/3")
    if found["n_neurons"] is None:
        assert answer.status_code == 422
        return
    vector = answer.json()
    scores = [each["score"] for each in vector["promotes"]]
    assert scores == sorted(scores, reverse=True)
    assert vector["suppresses"][0]["score"] < 0 < scores[0]
    assert vector["norm"] > 0
    assert client.get(f"/api/vectors/1/{found['n_neurons']}").status_code == 422
    assert (
        client.put(f"/api/vectors/1/{found['n_neurons']}/name", json={"name": "x"}).status_code
        == 422
    )
    assert client.put("/api/vectors/1/3/name", json={"name": "x"}).status_code == 200


@pytest.mark.parametrize("family", ["bert_text", "bert_token"])
def test_classifiers_show_their_classes(ask, family):
    transformer = tiny(family)
    client = ask(transformer)
    got = frames(client.post("/api/trace", json={"input": {"text": TEXT}, "top": 50}).text)
    names = {id: token for f in got if "names" in f for id, token in f["names"].items()}
    assert {token["kind"] for token in names.values()} == {"class"}
    assert len(names) == transformer.d_vocab
    n_read = 1 if family == "bert_text" else len(TEXT.split())
    assert len(got[0]["positions"]) == n_read
    position = got[0]["positions"][0]
    body = {"input": {"text": TEXT}, "block": 2, "position": position, "edits": ["L2.N3=9"]}
    cell = client.post("/api/cell", json=body).json()
    assert cell["updates"]
    assert cell["after"]["stages"]
    assert not {"neurons", "vectors"} & set(cell["missing"])
    assert client.get("/api/vectors/1/3").status_code == 200
    assert client.post("/api/generate", json={"input": {"text": TEXT}}).status_code == 422


@pytest.mark.parametrize(
    ("route", "body", "said"),
    [
        ("trace", {"input": {"ids": [5, 61]}}, "knows 0 to 60"),
        ("trace", {"input": {"ids": [5]}, "watch": 61}, "output 61"),
        ("trace", {"input": {"ids": [5]}, "lens": "linear"}, "lens"),
        ("trace", {"input": {"ids": [5] * 65}}, "at most 64"),
        ("trace", {"input": {"ids": [5]}, "edits": ["L4.N0=1"]}, "4"),
        ("trace", {"input": {"ids": [5]}, "edits": ["L1.N40=1"]}, "40"),
        ("trace", {"input": {"ids": [5]}, "edits": ["L1.N1=1e999"]}, "too large"),
        ("cell", {"input": {"ids": [5]}, "block": 4, "position": 0}, "4"),
        ("cell", {"input": {"ids": [5]}, "block": 1, "position": 1}, "position 1"),
        ("generate", {"input": {"ids": [5]}, "edits": ["L9.N1=1"]}, "9"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_streamed(ask, llama, route, body, said):
    answer = ask(llama).post(f"/api/{route}", json=body)
    assert answer.status_code == 422, answer.text
    assert said in answer.json()["error"]


def test_an_edit_that_blows_the_model_up_still_gives_json(ask, llama):
    client = ask(llama)
    for edit in ("L1.N1=1e38", "L1.N1*1e38", "L3.N1=-3e38"):
        got = frames(
            client.post("/api/trace", json={"input": {"text": TEXT}, "edits": [edit]}).text
        )
        assert got[-1]["frame"] in ("done", "error")
        body = {"input": {"text": TEXT}, "edits": [edit], "block": 3, "position": 2}
        assert client.post("/api/cell", json=body).status_code in (200, 422)
        text = client.post("/api/generate", json={"input": {"text": TEXT}, "edits": [edit]}).text
        assert frames(text)[-1]["frame"] in ("end", "error")


def test_an_edit_of_a_position_that_is_not_there_is_marked(ask, llama):
    body = {"input": {"ids": [5]}, "edits": ["L1.N1=1@7", "L1.N1=1@0"]}
    meta = frames(ask(llama).post("/api/trace", json=body).text)[0]
    assert [edit["applied"] for edit in meta["edits"]] == [False, True]


def test_generation_near_the_end_of_the_models_reach_ends_or_says_so(ask):
    client = ask(tiny("gpt2"))
    body = {"input": {"ids": [5] * 60}, "max_new_tokens": 20}
    answer = client.post("/api/generate", json=body)
    if answer.status_code == 200:
        last = frames(answer.text)[-1]
        assert last["frame"] == "end" or "server failed" not in last["error"], last
    else:
        assert answer.status_code == 422


def test_answers_have_the_shapes_of_the_schema(ask, model):
    client = ask(model)
    described = schemas.Model.model_validate(client.get("/api/model").json())
    assert described.name == model.identity.name
    text = {"text": "cat"}
    tokens = schemas.Tokens.model_validate(client.post("/api/tokens", json=text).json())
    assert "cat" in [token.text.strip() for token in tokens.tokens]
    schemas.Vocabulary.model_validate(client.post("/api/vocabulary", json=text).json())
    if (vector := client.get("/api/vectors/1/3")).status_code == 200:
        assert schemas.Vector.model_validate(vector.json()).neuron == 3
        keys = schemas.Keys.model_validate(client.get("/api/vectors/1/3/keys").json())
        assert all(len(key.promotes) == len(key.suppresses) > 0 for key in keys.keys)
    if (heads := client.get("/api/heads/1")).status_code == 200:
        n_heads = schemas.Heads.model_validate(heads.json()).n_heads
        for form in ("vo", "qk"):
            answer = client.get(f"/api/heads/1/{n_heads - 1}", params={"form": form, "top": 3})
            if answer.status_code == 200:
                assert len(schemas.Pairs.model_validate(answer.json()).pairs) == 3
            else:
                assert answer.status_code == 422
        assert client.get(f"/api/heads/1/{n_heads}").status_code == 422
    saved = client.put("/api/sessions/a", json={"title": "a", "state": {"b": [1]}}).json()
    assert schemas.SavedTitle.model_validate(saved).title == "a"
    schemas.SavedSession.model_validate(client.get("/api/sessions/a").json())
    schemas.SavedTitle.model_validate(client.get("/api/sessions").json()[0])


def test_the_watched_word_is_found_in_the_vocabulary(ask, llama):
    client = ask(llama)
    tokens = client.post("/api/vocabulary", json={"text": "cat"}).json()["tokens"]
    assert [token["text"].strip() for token in tokens] == ["cat"]
    assert client.post("/api/vocabulary", json={"text": ""}).json()["tokens"] == []


def test_a_session_as_python_runs_and_shows_the_same(ask, llama, monkeypatch):
    client = ask(llama)
    ids = ids_of(client, TEXT)
    state = {
        "prompt": TEXT + "\n\u2028'''",
        "ids": ids,
        "edits": ["L2.N3=9"],
        "new_tokens": 3,
        "selected": {"grid": 0, "layer": 2, "position": 1},
        "watch": {"id": 7, "label": "a"},
    }
    found = client.post("/api/export", json={"state": state}).json()
    assert found["json"]["state"] == state
    assert found["json"]["model"]["fingerprint"] == llama.identity.fingerprint
    import layerleap

    loaded = []
    monkeypatch.setattr(layerleap, "load", lambda name: loaded.append(name) or llama)
    printed = []
    values = {"print": printed.append}
    exec(compile(found["python"], "snippet", "exec"), values)
    assert loaded == [llama.identity.name]
    assert values["prompt"] == ids
    assert len(printed) == 9
    cell = {"input": {"ids": ids}, "block": 2, "position": 1, "edits": ["L2.N3=9"]}
    read = client.post("/api/cell", json=cell).json()
    for table, side in ((printed[3], read), (printed[5], read["after"])):
        strengths = [update["strength"] for update in side["updates"]]
        assert sorted(table["strength"])[-1] == pytest.approx(max(strengths))
    assert printed[3]["strength"].max() != printed[5]["strength"].max(), "one is with the edits"
    assert values["edits"] == [edit_namespace.SetNeuron(block=2, neuron=3, value=9)]
    plain = frames(
        client.post("/api/generate", json={"input": {"ids": ids}, "max_new_tokens": 3}).text
    )
    assert printed[7].ids[-3:] == [f["id"] for f in plain if f.get("side") == "plain" and "id" in f]


def test_the_python_of_two_prompts_shows_all_that_the_page_shows(ask, llama, monkeypatch, tmp_path):
    index = ll.index(llama, tmp_path / "index", top=9, n_texts=0, clusters=0, progress=False)
    client = ask(llama, index=index)
    texts = TEXT, "a dog ran"
    ids = [ids_of(client, text) for text in texts]
    edit, neuron = "L2.N3=9", {"block": 2, "neuron": 3}
    state = {
        "prompt": texts[0],
        "ids": ids[0],
        "second": texts[1],
        "second_ids": ids[1],
        "edits": [edit],
        "selected": {"grid": 1, "layer": 2, "position": 1},
        "watch": {"id": 7, "label": "a"},
        "pinned": [{"id": 8, "label": "b"}],
        "vector": neuron,
        "query": "cat",
        "side": "promoted",
        "new_tokens": 2,
    }
    code = client.post("/api/export", json={"state": state}).json()["python"]
    monkeypatch.setattr("layerleap.load", lambda name: llama)
    monkeypatch.setattr("layerleap.index", lambda *_, **__: index)
    monkeypatch.setattr("layerleap.search", lambda _, *words, **how: index.search(*words, **how))
    printed = []
    exec(compile(code, "snippet", "exec"), {"print": printed.append})
    for place in (0, 1):
        reading, strip, effect = printed[3 * place : 3 * place + 3]
        body = {"input": {"ids": ids[place]}, "edits": [edit]}
        cells = grid_of(client, body)
        top = reading[(reading["map"] == "logit") & (reading["rank"] == 1)]
        assert len(top) == len(cells["before"])
        assert set(strip["position"]) == set(range(len(ids[place])))
        for row in top.itertuples():
            cell = cells["before"][row.layer, row.position]
            assert row.prob == pytest.approx(cell["top"][0][1], abs=1e-5)
        for row in effect.itertuples():
            place_ = row.layer, row.position
            after = cells["after"].get(place_, cells["before"][place_])
            assert row.final_prob_after == pytest.approx(after["final"][0], abs=1e-5)
    cells = grid_of(client, {"input": {"ids": ids[1]}, "watch": 7, "follow": [8], "edits": [edit]})
    body = {"input": {"ids": ids[1]}, "block": 2, "position": 1, "edits": [edit]}
    cell = client.post("/api/cell", json=body).json()
    for table, paths, side, whole in (
        (printed[6], printed[7], "before", cell),
        (printed[8], printed[9], "after", cell["after"]),
    ):
        strongest = max(update["strength"] for update in whole["updates"])
        assert table["strength"].max() == pytest.approx(strongest)
        for layer, probs in enumerate(paths):
            shown = cells[side].get((layer, 1), cells["before"][layer, 1])
            expected = [shown["watch"][0], shown["follow"]["8"][0]]
            assert probs == pytest.approx(expected, abs=1e-5)
    vector, _, neighbours, matches, *texts = printed[10:]
    promoted = client.get("/api/vectors/2/3").json()["promotes"][0]["token"]["label"]
    assert promoted in list(vector["token"])
    assert len(neighbours) == 8
    query = {"q": "cat", "side": "promoted", "top": 30}
    found = client.get("/api/search", params=query).json()["results"]
    assert len(matches) == len(found) > 0
    assert len(texts) == 2, "generated without and with edits"


def grid_of(client, body):
    """The cells of a trace by side, layer and position."""
    cells = {"before": {}, "after": {}}
    for frame in frames(client.post("/api/trace", json=body).text):
        for cell in frame.get("cells", ()):
            cells[frame["side"]][cell["layer"], cell["position"]] = cell
    return cells


@pytest.mark.parametrize(
    ("bank", "said"),
    [
        ("default", "ll.default_bank(model)"),
        ("a/fold'er", 'from_pretrained("a/fold\'er")'),
        (None, "my_bank"),
    ],
)
def test_the_python_reads_through_the_pages_own_bank(bank, said):
    model = {"name": "smollm2", "class": "LlamaForCausalLM", "fingerprint": "f", "bank": bank}
    code = snippet(model, {"lens": "linear", "prompt": "a"})
    assert said in code
    assert "ll.load('smollm2')" in code
    assert "bank = None" in snippet(model, {"lens": "logit", "prompt": "a"})


def test_the_python_does_not_load_a_class_by_its_name():
    model = {"name": "LlamaForCausalLM", "class": "LlamaForCausalLM", "fingerprint": "f"}
    assert "ll.load(my_model, tokenizer=my_tokenizer)" in snippet(model, {})


@pytest.mark.parametrize(
    "state",
    [
        {},
        {
            "prompt": 5,
            "ids": "x",
            "edits": [1],
            "lens": [],
            "selected": {"layer": True},
            "new_tokens": -1,
        },
        {"edits": ["'); import os"]},
    ],
)
def test_any_state_gives_python_that_compiles(ask, llama, state):
    found = ask(llama).post("/api/export", json={"state": state}).json()
    compile(found["python"], "snippet", "exec")  # raises SyntaxError if it is not Python
    assert "import layerleap as ll" in found["python"]


def test_eight_clients_at_once_get_the_answers_of_one(serve, llama):
    client = serve(Debugger(llama), limits=Limits(waiting=20))
    words = TEXT.split()
    prompts = [" ".join(words[: 3 + n]) for n in range(8)]

    def answers(prompt):
        cell = {"input": {"text": prompt}, "block": 2, "position": 1, "edits": ["L1.N3=9"]}
        traced = frames(client.post("/api/trace", json={"input": {"text": prompt}}).text)
        cells = [f["cells"] for f in traced if f["frame"] == "cells"]
        written = frames(
            client.post("/api/generate", json={"input": {"text": prompt}, "max_new_tokens": 3}).text
        )
        text = [f["id"] for f in written if f["frame"] == "token"]
        return cells, client.post("/api/cell", json=cell).json(), text

    alone = {prompt: answers(prompt) for prompt in prompts}
    wrong, failed = [], []

    def work(prompt):
        try:
            for _ in range(5):
                if answers(prompt) != alone[prompt]:
                    wrong.append(prompt)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed
    assert not wrong


def test_texts_are_cut_into_tokens_by_many_at_once_while_the_model_works(serve, llama):
    client = serve(Debugger(llama), limits=Limits(waiting=20))
    words = TEXT.split()
    wrong = []

    def work(number):
        text = " ".join(words[: 1 + number])
        for _ in range(25):
            if number % 4 == 3:
                found = frames(client.post("/api/trace", json={"input": {"text": text}}).text)
                tokens = next(f["tokens"] for f in found if f["frame"] == "meta")
            else:
                tokens = client.post("/api/tokens", json={"text": text}).json()["tokens"]
            if [token["text"].strip() for token in tokens] != words[: 1 + number]:
                wrong.append(tokens)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong


def test_the_page_takes_no_file_of_a_direction():
    import pydantic

    from layerleap.show.web.requests import Trace

    Trace(input={"text": "the cat"}, edits=["L2.H1=0", "L2.attn*0.5"])
    with pytest.raises(pydantic.ValidationError, match="the page takes no files"):
        Trace(input={"text": "the cat"}, edits=[" h2+secret.safetensors*2"])
