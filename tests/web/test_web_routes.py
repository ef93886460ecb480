"""Every route, with the make-believe debugger: shapes, limits and sentences."""

import inspect
import json
import re

import pytest
from asking import HERE, frames
from fake import N_LAYERS, PROMPT, FakeDebugger
from starlette.testclient import TestClient

from layerleap.act.debug.debugger import Debugger
from layerleap.show.web import limits
from layerleap.show.web.answers import NDJSON, TYPES
from layerleap.show.web.app import STATIC

ASK = {"input": {"text": PROMPT}}


def test_the_model_is_described_with_its_limits(client):
    found = client.get("/api/model").json()
    assert found["name"] == "make-believe"
    assert set(found["limits"]) == {"tokens", "edits", "new_tokens", "top", "follow"}
    assert found["fingerprint"] == "f" * 32
    assert found["version"]


def test_the_page_and_its_files_have_types_and_tags(client):
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    module = client.get("/app.js")
    assert module.headers["content-type"] == "text/javascript; charset=utf-8"
    assert module.headers["cache-control"] == "no-cache"
    again = client.get("/app.js", headers={"if-none-match": module.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""


def test_every_file_of_the_page_is_served_and_none_is_asked_of_others(make_app):
    with TestClient(make_app(static=STATIC), base_url=HERE) as client:
        page = client.get("/").text
        for file in sorted(STATIC.iterdir()):
            answer = client.get(f"/{file.name}")
            assert answer.status_code == 200
            assert answer.headers["content-type"] == TYPES[file.suffix]
            assert answer.content == file.read_bytes()
        named = re.findall(r'(?:src|href)="([^"#]+)"', page)
        assert named
        assert all((STATIC / name).is_file() for name in named), "no file elsewhere, none missing"
        assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", page)


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/api/nothing",
        "/../saved.sqlite",
        "/%2e%2e/saved.sqlite",
        "/docs",
        "/redoc",
        "/api",
        "/static/../../saved.sqlite",
        "/%00",
    ],
)
def test_there_is_nothing_elsewhere(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert set(answer.json()) == {"error"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/trace"),
        ("PUT", "/api/model"),
        ("POST", "/"),
        ("DELETE", "/api/search"),
        ("PATCH", "/api/sessions/a"),
    ],
)
def test_a_wrong_method_is_said(client, method, path):
    answer = client.request(method, path, headers={"content-type": "application/json"})
    assert answer.status_code == 405
    assert set(answer.json()) == {"error"}


def test_the_schema_stays_and_names_no_other_site(client):
    schema = client.get("/api/openapi.json")
    assert schema.status_code == 200
    assert set(schema.json()["paths"]) >= {"/api/model", "/api/trace", "/api/sessions/{id}"}
    assert "http" not in schema.text
    paths = schema.json()["paths"]
    typed = [
        ("get", "/api/model"),
        ("post", "/api/tokens"),
        ("get", "/api/search"),
        ("get", "/api/vectors/{block}/{neuron}"),
        ("put", "/api/sessions/{id}"),
        ("get", "/api/heads/{block}/{head}"),
    ]
    answers = {
        path: paths[path][method]["responses"]["200"]["content"]["application/json"]["schema"]
        for method, path in typed
    }
    assert all("$ref" in answer for answer in answers.values()), answers


def test_a_text_is_cut_into_tokens(client):
    found = client.post("/api/tokens", json={"text": "The capital"}).json()
    assert [token["text"] for token in found["tokens"]] == ["The", " capital"]
    assert found["limit"] == limits.Limits().tokens
    assert client.post("/api/tokens", json={"text": ""}).json()["tokens"] == []
    words = client.post("/api/vocabulary", json={"text": "Madrid"}).json()["tokens"]
    assert [token["text"] for token in words] == [" Madrid"]


def test_a_trace_is_streamed_in_frames(client):
    answer = client.post("/api/trace", json={**ASK, "edits": ["L12.N34=5"], "top": 3})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert answer.headers["cache-control"] == "no-store"
    got = frames(answer.text)
    assert got[0]["frame"] == "meta"
    assert got[-1]["frame"] == "done"
    cells = [cell for frame in got if frame["frame"] == "cells" for cell in frame["cells"]]
    before = {
        (c["layer"], c["position"]) for f in got if f.get("side") == "before" for c in f["cells"]
    }
    tokens = len(got[0]["tokens"])
    assert before == {(layer, p) for layer in range(N_LAYERS + 1) for p in range(tokens)}
    assert all(len(cell["top"]) == 3 for cell in cells)


def test_followed_tokens_are_read_in_every_cell(client):
    got = frames(client.post("/api/trace", json={**ASK, "follow": [1000, 1007], "top": 1}).text)
    cells = [cell for frame in got if frame["frame"] == "cells" for cell in frame["cells"]]
    assert all(set(cell["follow"]) == {"1000", "1007"} for cell in cells)
    many = client.post("/api/trace", json={**ASK, "follow": list(range(limits.FOLLOW + 1))})
    assert many.status_code == 422
    assert "follow" in many.json()["error"]


def test_a_search_says_which_words_are_no_tokens(client):
    answer = client.get("/api/search", params={"q": "guitar qqqq"}).json()
    assert answer["results"]
    assert answer["notes"] == ["no token of this model begins a word with 'qqqq'."]


def test_ids_are_read_as_they_are(client):
    tokens = client.post("/api/tokens", json={"text": PROMPT}).json()["tokens"]
    ids = [token["id"] for token in tokens]
    got = frames(client.post("/api/trace", json={"input": {"ids": ids}}).text)
    assert [token["id"] for token in got[0]["tokens"]] == ids


def test_a_cell_carries_the_users_names(client):
    ask = {**ASK, "block": 3, "position": 1, "edits": ["L3.N4=5"]}
    first = client.post("/api/cell", json=ask).json()
    neuron = first["updates"][0]["neuron"]
    assert first["updates"][0]["name"] is None
    named = client.put(f"/api/vectors/3/{neuron}/name", json={"name": " music ", "note": "why"})
    assert named.json() == {"block": 3, "neuron": neuron, "name": "music", "note": "why"}
    second = client.post("/api/cell", json=ask).json()
    assert second["updates"][0]["name"] == "music"
    assert second["after"]["updates"][0]["name"] == "music"
    vector = client.get(f"/api/vectors/3/{neuron}").json()
    assert (vector["name"], vector["note"]) == ("music", "why")


def test_text_is_generated_with_and_without_edits(client):
    ask = {**ASK, "edits": ["L3.N4=5"], "max_new_tokens": 3}
    got = frames(client.post("/api/generate", json=ask).text)
    assert [f["frame"] for f in got] == [*(["start", *["token"] * 3, "done"] * 2), "end"]
    for side in ("plain", "edited"):
        pieces = [f["piece"] for f in got if f["frame"] == "token" and f["side"] == side]
        done = next(f for f in got if f["frame"] == "done" and f["side"] == side)
        assert done["text"] == "".join(pieces)
    only = frames(client.post("/api/generate", json={**ask, "sides": ["plain", "plain"]}).text)
    assert {f["side"] for f in only if "side" in f} == {"plain"}


def test_vectors_are_searched_and_clustered(client):
    found = client.get("/api/search", params={"q": "guitar", "top": 5}).json()
    assert found["query"] == "guitar"
    assert len(found["results"]) == 5
    assert {"block", "neuron", "score", "side", "matched", "name"} <= set(found["results"][0])
    near = client.get("/api/vectors/3/4/neighbours", params={"top": 4}).json()["neighbours"]
    assert len(near) == 4
    assert client.get("/api/clusters", params={"top": 3}).json()["clusters"][2]["number"] == 2
    assert client.get("/api/clusters/2").json()["members"]


def test_keys_and_heads_are_read_from_the_weights(client):
    keys = client.get("/api/vectors/3/4/keys").json()
    assert [key["kind"] for key in keys["keys"]] == ["ffn.gate", "ffn.up"]
    assert client.get("/api/heads/1").json()["n_kv_heads"] == 2
    for form, title in (("vo", "L1.H3 W_VO"), ("qk", "L1.H3 W_QK")):
        answer = client.get("/api/heads/1/3", params={"form": form, "top": 5}).json()
        assert answer["title"] == title
        assert len(answer["pairs"]) == 5
    for path, words in (
        ("/api/heads/2", "no single matrix"),
        ("/api/heads/1/4", "has no head 4"),
        ("/api/heads/1/0?form=ov", "form"),
        ("/api/heads/1/0?offset=9999", "offset"),
    ):
        refused = client.get(path)
        assert refused.status_code == 422
        assert words in refused.json()["error"]


def test_without_an_index_vectors_are_still_read_and_the_rest_says_what_to_do(make_app):
    with TestClient(make_app(FakeDebugger(index=False)), base_url="http://localhost") as client:
        assert client.get("/api/model").json()["index"]["ready"] is False
        assert client.get("/api/vectors/3/4").status_code == 200
        for path in (
            "/api/search?q=a",
            "/api/clusters",
            "/api/clusters/1",
            "/api/vectors/3/4/neighbours",
        ):
            answer = client.get(path)
            assert answer.status_code == 422
            assert "layerleap index" in answer.json()["error"]


def test_sessions_are_saved_listed_and_deleted(client):
    state = {"prompt": PROMPT, "edits": ["L1.N2=3"]}
    saved = client.put("/api/sessions/abc-1", json={"title": "Mine", "state": state}).json()
    assert saved["title"] == "Mine"
    assert [each["id"] for each in client.get("/api/sessions").json()] == ["abc-1"]
    assert client.get("/api/sessions/abc-1").json()["state"] == state
    assert client.delete("/api/sessions/abc-1").json() == {"deleted": True}
    for method in ("GET", "DELETE"):
        assert client.request(method, "/api/sessions/abc-1").status_code == 404
    assert client.get("/api/sessions/a b").status_code == 422
    assert client.get("/api/sessions/" + "a" * 65).status_code == 422


@pytest.mark.parametrize(
    "raw",
    [
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": "\\ud800"}',
        '{"\\udfff": 1}',
        '{"a":' * 50 + "1" + "}" * 50,
    ],
)
def test_states_that_are_no_json_are_refused_and_others_come_back(client, raw):
    body = f'{{"title": "t", "state": {raw}}}'
    headers = {"content-type": "application/json"}
    answer = client.put("/api/sessions/x", content=body, headers=headers)
    if answer.status_code == 200:
        assert client.get("/api/sessions/x").json()["state"] == json.loads(raw)
    else:
        assert answer.status_code == 422
        assert "state" in answer.json()["error"]


def test_an_export_of_no_json_is_refused(client):
    headers = {"content-type": "application/json"}
    for raw in (
        '{"a": NaN}',
        '{"a": "\\ud800"}',
        '{"\\udfff": -Infinity}',
        '{"a":' * 200 + "1" + "}" * 200,
    ):
        body = f'{{"state": {raw}}}'
        answer = client.post("/api/export", content=body, headers=headers)
        assert answer.status_code == (200 if "1" in raw else 422)
        assert json.loads(answer.text, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/api/trace", {}, "input"),
        ("/api/trace", {"input": {}}, "either ids or text"),
        ("/api/trace", {"input": {"text": "a", "ids": [1]}}, "either ids or text"),
        ("/api/trace", {"input": {"text": ""}}, "the prompt is empty"),
        ("/api/trace", {"input": {"ids": []}}, "the prompt is empty"),
        ("/api/trace", {"input": {"ids": [-1]}}, "input.ids.0"),
        ("/api/trace", {"input": {"ids": [2**40]}}, "input.ids.0"),
        ("/api/trace", {"input": {"text": "a " * 600}}, "at most 512 are read"),
        ("/api/trace", {"input": {"text": "a" * 20_001}}, "at most 20,000"),
        ("/api/trace", {**ASK, "edits": ["L1.N1=1"] * 33}, "at most 32"),
        ("/api/trace", {**ASK, "edits": ["nonsense"]}, "not understood"),
        ("/api/trace", {**ASK, "edits": ["L99.N1=1"]}, "no neuron L99.N1"),
        ("/api/trace", {**ASK, "top": 0}, "top"),
        ("/api/trace", {**ASK, "top": 51}, "top"),
        ("/api/trace", {**ASK, "unknown": 1}, "unknown"),
        ("/api/trace", {**ASK, "input": {"text": "!error"}}, "asks for an error"),
        ("/api/generate", {**ASK, "max_new_tokens": 257}, "max_new_tokens"),
        ("/api/generate", {**ASK, "sides": []}, "sides"),
        ("/api/generate", {**ASK, "sides": ["other"]}, "sides"),
        ("/api/cell", {**ASK, "block": 0, "position": 0}, "block"),
        ("/api/cell", {**ASK, "block": 99, "position": 0}, "no block 99"),
        ("/api/export", {"state": [1]}, "state"),
    ],
)
def test_a_mistake_is_one_sentence(client, path, body, said):
    answer = client.post(path, json=body)
    assert answer.status_code == 422
    assert set(answer.json()) == {"error"}
    assert said in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_bodies_that_are_no_json_are_refused(client):
    headers = {"content-type": "application/json"}
    for body in (
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"text": ' + b"9" * 5000 + b"}",
    ):
        answer = client.post("/api/tokens", content=body, headers=headers)
        assert answer.status_code in (400, 422), body[:20]
        assert set(answer.json()) == {"error"}


def test_an_error_in_the_middle_of_a_stream_is_its_last_line(client):
    got = frames(client.post("/api/trace", json={"input": {"text": "!midway here"}}).text)
    assert got[-1] == {
        "frame": "error",
        "error": "the reading failed midway, as the prompt asked for",
        "place": None,
    }
    assert got[0]["frame"] == "meta"


def test_numbers_that_are_not_finite_arrive_as_null(make_app):
    nan, infinity = float("nan"), float("inf")
    cell = {"layer": 0, "position": 0, "agrees": False, "watch": None, "follow": {}}
    cell |= {"entropy": 0.5, "changed": False, "change": None}
    frame = {"frame": "cells", "side": "before", "names": {}}

    class Wild(FakeDebugger):
        def trace(self, text, **options):
            wild = {"kl": nan, "top": [[1, infinity]], "final": [nan, 0]}
            yield {**frame, "cells": [{**cell, **wild}]}

        def vector(self, block, neuron):
            return {**super().vector(block, neuron), "norm": -infinity}

    with TestClient(make_app(Wild()), base_url="http://localhost") as client:
        null = {"kl": None, "top": [[1, None]], "final": [None, 1]}
        assert frames(client.post("/api/trace", json=ASK).text) == [
            {**frame, "cells": [{**cell, **null}]}
        ]
        assert client.get("/api/vectors/1/1").json()["norm"] is None


def test_an_answer_of_another_shape_is_not_sent(make_app):
    class Wrong(FakeDebugger):
        def trace(self, text, **options):
            yield {"frame": "done", "seconds": 1.0, "passes": 2}

        def heads(self, block):
            return {**super().heads(block), "n_heads": "four"}

    app = make_app(Wrong())
    with TestClient(app, base_url=HERE, raise_server_exceptions=False) as client:
        for answer in (client.post("/api/trace", json=ASK), client.get("/api/heads/1")):
            assert answer.status_code == 500
            assert re.match(r"the server failed \(\w*ValidationError\)", answer.json()["error"])


def test_every_route_has_a_model_for_what_it_sends(client):
    """The two that stream have one for their frames."""
    paths = client.get("/api/openapi.json").json()["paths"]
    contents = {
        f"{method} {path}": operation["responses"]["200"]["content"]
        for path, operations in paths.items()
        for method, operation in operations.items()
    }
    streams = {name for name, content in contents.items() if NDJSON in content}
    assert streams == {"post /api/trace", "post /api/generate"}
    assert len(contents) == 23
    for name, content in contents.items():
        (schema,) = (kind["schema"] for kind in content.values())
        shape = schema.get("items", schema)
        assert "$ref" in shape or all("$ref" in one for one in shape["anyOf"]), name


def test_the_make_believe_debugger_has_the_methods_of_the_real_one():
    """Else a route may call what only the fake has, or pass what only the fake takes."""
    made_up = {name for name in vars(FakeDebugger) if not name.startswith("_")}
    assert made_up <= set(dir(Debugger))
    for name in made_up:
        ours = inspect.signature(getattr(FakeDebugger, name)).parameters
        real = inspect.signature(getattr(Debugger, name)).parameters
        assert list(ours) == list(real), name
