"""The whole API under requests that nobody would write: never a 5xx, always one sentence."""

import json
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.errors import Unsatisfiable
from starlette.testclient import TestClient

from layerleap.act.debug.debugger import Debugger
from layerleap.lens.vocabulary.build import index as build_index
from layerleap.show.web.app import create_app
from layerleap.show.web.store import Store
from tiny_models import WORDS, tiny

schemathesis = pytest.importorskip("schemathesis")
GenerationMode = schemathesis.GenerationMode

FUZZ = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """The app of a tiny model, which outlives the clients that come and go."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "index.html").write_text("page")
    transformer = tiny()
    index = build_index(transformer, folder / "index", n_texts=0, clusters=5, progress=False)
    debugger = Debugger(transformer, index=index)
    made = create_app(debugger, Store("m", folder / "saved"), static=folder)

    async def serve(scope, receive, send):
        if scope["type"] != "lifespan":
            own = {b"testserver": b"localhost"}  # schemathesis has a name of its own for it
            headers = [(key, own.get(value, value)) for key, value in scope["headers"]]
            await made({**scope, "headers": headers}, receive, send)
            return
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})

    yield serve
    made.stop()


@pytest.fixture(scope="module")
def schema(app):
    return schemathesis.openapi.from_asgi("/api/openapi.json", app)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_what_the_schema_allows_and_what_it_does_not_never_breaks_the_server(schema, mode):
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == 23
    asked = set()
    for operation in operations:
        try:
            cases = operation.as_strategy(generation_mode=mode)
            one_by_one(cases, asked)
        except Unsatisfiable:  # nothing about it can be wrong
            assert mode is GenerationMode.NEGATIVE
            assert not operation.body
    assert len(asked) >= 14


def one_by_one(cases, asked):
    @given(cases)
    @FUZZ
    def ask(case):
        answer = case.call()
        asked.add((case.method, case.operation.path))
        assert answer.status_code < 500, answer.content
        check(answer.status_code, answer.content)

    ask()


def check(status, content):
    if status >= 400:
        assert set(json.loads(content)) <= {"error", "place"}
        assert json.loads(content)["error"]


NUMBERS = st.integers(-2, 70) | st.sampled_from([0, 1, 2, 3, 39, 40, 2**31 - 1])
EDITS = st.lists(
    st.builds(
        "L{}.N{}{}{}".format,
        st.integers(0, 4),
        st.integers(0, 41),
        st.sampled_from(["=5", "=off", "*-1", "+3", "-3", "=1e38", "*1e38", "=-0", "=1e-45", "="]),
        st.sampled_from(["", "@last", "@all", "@generated", "@0", "@0,3,99", "@", "@x"]),
    )
    | st.text(max_size=12),
    max_size=4,
)
PROMPTS = st.one_of(
    st.builds(lambda ids: {"ids": ids}, st.lists(st.integers(0, 61), min_size=1, max_size=12)),
    st.builds(lambda w: {"text": " ".join(w)}, st.lists(st.sampled_from(WORDS), max_size=12)),
    st.builds(lambda text: {"text": text}, st.text(max_size=20)),
)
COMMON = {"input": PROMPTS, "edits": EDITS, "lens": st.sampled_from(["logit", "linear", ""])}
WATCHED = {**COMMON, "watch": st.none() | NUMBERS, "top": st.integers(0, 51)}
QUESTIONS = st.one_of(
    st.tuples(st.just("trace"), st.fixed_dictionaries(WATCHED | {"selected": NUMBERS})),
    st.tuples(
        st.just("cell"), st.fixed_dictionaries(WATCHED | {"block": NUMBERS, "position": NUMBERS})
    ),
    st.tuples(
        st.just("generate"),
        st.fixed_dictionaries(
            {
                "input": PROMPTS,
                "edits": EDITS,
                "max_new_tokens": st.integers(0, 8),
                "sides": st.lists(st.sampled_from(["plain", "edited", "both"]), max_size=3),
            }
        ),
    ),
)


SEARCHES = st.one_of(
    st.builds(
        "/search?{}".format,
        st.builds(
            lambda **values: urlencode(values),
            q=st.text(max_size=12) | st.sampled_from(["cat", "cat*", '"cat', "a dog", "*", "a,b"]),
            top=st.integers(0, 201),
            side=st.sampled_from(["both", "promoted", "x"]),
            space=st.sampled_from(["any", "with", "without", ""]),
        ),
    ),
    st.builds("/clusters?q={}".format, st.sampled_from(["", "cat", "%22", "*", "%00"])),
    st.builds("/clusters/{}".format, NUMBERS),
    st.builds("/vectors/{}/{}".format, NUMBERS, NUMBERS),
    st.builds("/vectors/{}/{}/neighbours?top={}".format, NUMBERS, NUMBERS, NUMBERS),
    st.builds("/vectors/{}/{}/keys".format, NUMBERS, NUMBERS),
    st.builds("/heads/{}/{}?offset={}".format, NUMBERS, NUMBERS, NUMBERS),
)


@given(SEARCHES)
@settings(FUZZ, max_examples=200)
def test_searches_that_are_nearly_right_never_break_the_server(app, path):
    with TestClient(app, base_url="http://localhost") as client:
        answer = client.get(f"/api{path}")
    assert answer.status_code < 500, answer.content
    check(answer.status_code, answer.content)


@given(QUESTIONS)
@settings(FUZZ, max_examples=250)
def test_questions_that_are_nearly_right_never_break_the_server(app, question):
    route, body = question
    with TestClient(app, base_url="http://localhost") as client:
        answer = client.post(f"/api/{route}", json=body)
    assert answer.status_code < 500, answer.content
    check(answer.status_code, answer.content)
    if answer.status_code == 200 and route != "cell":
        last = json.loads(answer.text.splitlines()[-1], parse_constant=pytest.fail)
        assert last["frame"] in ("done", "end", "error")
        assert "server failed" not in last.get("error", "")
