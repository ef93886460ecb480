"""`ll.debug`: a page beside a Python session, which comes and goes without a trace."""

import sys
import threading
from functools import partial
from types import SimpleNamespace

import httpx2
import pytest

import layerleap as ll
from families import build
from layerleap.errors import BadSettings, CannotFetch
from layerleap.models.transformer import Transformer
from layerleap.results.page import write_page
from layerleap.show.web import schemas, session as web_session
from layerleap.show.web.access import Access
from layerleap.show.web.serve import listen, next_free
from tiny_models import sentences, tiny

TEXT = {"text": "the cat sat on the"}
get, post = partial(httpx2.get, timeout=60), partial(httpx2.post, timeout=60)  # machines are busy


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(autouse=True)
def _own_cache(empty_cache, monkeypatch):
    for name in web_session.REMOTE:
        monkeypatch.delenv(name, raising=False)


def test_a_session_serves_the_page_until_it_is_closed(model):
    before = set(threading.enumerate())  # other tests may have servers of their own
    with ll.debug(model, index=False, port=0) as session:  # no other test takes its port
        assert session.is_running
        assert session.url in repr(session)
        found = get(f"{session.url}api/model").json()
        assert found["name"] == model.identity.name
        traced = post(f"{session.url}api/trace", json={"input": TEXT})
        assert traced.text.splitlines()[-1].startswith('{"frame":"done"')
    assert not session.is_running
    assert "closed" in repr(session)
    assert "closed" in session._repr_html_()
    left = set(threading.enumerate()) - before
    assert not [thread.name for thread in left if thread.name.startswith("layerleap")]
    with pytest.raises(httpx2.ConnectError):
        get(session.url)
    session.close()  # twice is once


@pytest.mark.parametrize("kernel", [None, object()])
def test_only_a_notebook_may_frame_the_page(model, monkeypatch, kernel):
    shell = SimpleNamespace(kernel=kernel)  # that of a terminal has none
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with ll.debug(model, index=False) as session:
        policy = get(f"{session.url}api/model").headers["content-security-policy"]
    assert ("http://localhost:*" in policy) is (kernel is not None)


def test_an_index_can_be_given_by_its_file(model, tmp_path):
    path = tmp_path / "own index"
    ll.index(model, path, top=3, n_texts=0, clusters=0, progress=False)
    with ll.debug(model, index=path) as session:
        assert get(f"{session.url}api/search?q=cat").json()["results"]
    with pytest.raises(ll.LayerleapError, match="nothing here"):
        ll.debug(model, index=tmp_path / "nothing here")
    with pytest.raises(ll.LayerleapError, match="other weights"):
        ll.debug(tiny(seed=1), index=path)
    assert web_session.running(model) is None


def test_a_notebook_shows_the_page_and_may_frame_it(model, monkeypatch):
    monkeypatch.setattr(web_session, "in_notebook", lambda: True)
    with ll.debug(model, index=False) as session:
        shown = session._repr_html_()
        assert f'<iframe src="{session.url}"' in shown
        policy = get(f"{session.url}api/model").headers["content-security-policy"]
        assert "frame-ancestors 'self' http://localhost:*" in policy


def test_a_notebook_elsewhere_shows_only_the_link(model, monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 22")
    with ll.debug(model, index=False) as session:
        shown = session._repr_html_()
    assert "<iframe" not in shown
    assert session.url in shown
    assert "ssh -L" in shown


def test_a_second_session_of_a_model_replaces_the_first(model):
    with ll.debug(model, index=False) as first:
        second = ll.debug(model, index=False)
        assert not first.is_running
        assert web_session.running(model) is second
        second.close()
    assert web_session.running(model) is None


def test_readings_link_to_the_debugger_of_their_model_while_it_runs(model, tmp_path):
    readings = ll.read(model, TEXT["text"], bank=None)
    assert "Open in the debugger" not in readings._repr_html_()
    with ll.debug(model, index=False) as session:
        assert f'href="{session.url}' in readings._repr_html_()
        assert "debugger" not in ll.read(tiny(seed=1), TEXT["text"], bank=None)._repr_html_()
        # This tokenizer's tokens do not say where spaces were: then the prompt is left out.
        assert session.link(["the", "cat"]) == session.url
        assert session.link(["the"]) == f"{session.url}#p=the"
        page = write_page(tmp_path / "page.html", readings.head("m", TEXT["text"]), readings)
        assert session.url not in page.read_text(), "a page outlives the server"
    assert "Open in the debugger" not in readings._repr_html_()


def test_two_models_have_two_sessions(model):
    other = tiny(seed=1)
    with ll.debug(model, index=False) as one, ll.debug(other, index=False) as two:
        assert one.url != two.url
        for each, own in ((one, model), (two, other)):
            found = get(f"{each.url}api/model").json()
            assert found["fingerprint"] == own.identity.fingerprint


def test_without_an_index_it_is_said_how_to_build_it(model):
    with ll.debug(model) as session:
        found = get(f"{session.url}api/model").json()["index"]
    assert not found["ready"]
    assert "layerleap index" in found["reason"]


@pytest.fixture
def own_text(monkeypatch):
    """A text for natural ranges: the bundled one would be fetched, because the cache is empty."""
    build = "layerleap.lens.vocabulary.build.reference_text"
    monkeypatch.setattr(build, lambda _: (sentences(20), ""))


@pytest.mark.usefixtures("own_text")
def test_an_index_that_is_built_meanwhile_is_found(model):
    with ll.debug(model) as session, ll.debug(tiny(seed=1), index=False) as without:
        assert not get(f"{session.url}api/model").json()["index"]["ready"]
        ll.index(model, progress=False)
        found = get(f"{session.url}api/model").json()["index"]
        assert found == {"ready": True, "reason": None, "vectors": 120, "buildable": True}
        assert not get(f"{without.url}api/model").json()["index"]["ready"]


@pytest.mark.usefixtures("own_text")
def test_the_index_is_built_when_asked_for_and_found_later(model):
    with ll.debug(model, index=True, progress=False) as session:
        found = get(f"{session.url}api/model").json()["index"]
        assert found == {"ready": True, "reason": None, "vectors": 120, "buildable": True}
    with ll.debug(model) as session:
        client = httpx2.Client(base_url=session.url, timeout=60)
        hits = client.get("/api/search", params={"q": "cat", "top": 3}).json()["results"]
        assert len(hits) == 3
        assert all("cat" in [token["text"].strip() for token in hit["matched"]] for hit in hits)
        place = f"/api/vectors/{hits[0]['block']}/{hits[0]['neuron']}"
        client.put(f"{place}/name", json={"name": "cats"})
        assert client.get("/api/search", params={"q": "cat"}).json()["results"][0]["name"] == "cats"
        vector = client.get(place).json()
        assert vector["name"] == "cats"
        assert vector["promotes"][0]["token"]["label"]
        near = client.get(f"{place}/neighbours", params={"top": 4}).json()["neighbours"]
        assert [each["cosine"] for each in near] == sorted(
            (e["cosine"] for e in near), reverse=True
        )
        schemas.Search.model_validate(client.get("/api/search", params={"q": "cat"}).json())
        schemas.Vector.model_validate(vector)
        schemas.Model.model_validate(client.get("/api/model").json())
        clusters = client.get("/api/clusters").json()["clusters"]
        assert clusters
        one = client.get(f"/api/clusters/{clusters[0]['number']}").json()
        assert one["tokens"] == clusters[0]["tokens"]
        assert one["members"][0]["promotes"]
        cell = client.post("/api/cell", json={"input": TEXT, "block": 2, "position": 1})
        assert cell.status_code == 200
        assert "range" in cell.json()["updates"][0]
        for path in ("/api/search?q=", "/api/search?q=%F0%9F%98%80%22*", "/api/clusters?q=cat"):
            assert client.get(path).status_code in (200, 422)
        assert client.get("/api/clusters/99999").status_code == 422
        client.close()


def test_a_taken_port_is_said_and_the_next_free_one_offered(model):
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(BadSettings, match=rf"port {port} of 127.0.0.1 is in use.*use port \d+"):
        ll.debug(model, port=port, index=False)
    assert next_free("127.0.0.1", port) != port
    taken.close()


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("127.0.0.1", 99999, "port 99999"),
        ("127.0.0.1", -1, "port -1"),
        ("no.such.host.invalid", 0, "must be an address of this machine"),
        ("192.0.2.77", 0, "must be an address of this machine"),
    ],
)
def test_an_address_that_cannot_be_had_is_one_sentence(host, port, said):
    with pytest.raises(BadSettings, match=said):
        listen(host, port)


def test_two_servers_cannot_share_a_port_even_before_they_run():
    first = listen("127.0.0.1", 0)
    with pytest.raises(BadSettings, match="in use"):
        listen("127.0.0.1", first.getsockname()[1])
    first.close()


def test_an_address_of_ipv6_stands_in_brackets():
    assert Access("::1", 8123).url == "http://[::1]:8123/"


def test_a_session_that_fails_to_start_leaves_the_port_free(model):
    port = next_free("127.0.0.1", 20000)
    with pytest.raises(ll.LayerleapError):
        ll.debug(model, port=port, index=False, bank="no/such/bank")
    listen("127.0.0.1", port).close()


def test_a_model_that_reads_no_text_is_refused_and_leaves_no_server():
    images = Transformer.wrap(build("vit"), None, name="tiny-vit")
    with pytest.raises(ll.LayerleapError, match="reads images"):
        ll.debug(images, index=False)
    assert web_session.running(images) is None


def test_a_model_without_a_tokenizer_reads_ids():
    bare = Transformer.wrap(build("llama"), None, name="bare")
    with ll.debug(bare, index=False) as session:
        answer = post(f"{session.url}api/tokens", json={"text": "the cat"})
        assert answer.status_code == 422
        assert "no tokenizer" in answer.json()["error"]
        answer = post(f"{session.url}api/trace", json={"input": {"ids": [5, 6]}})
        assert '"frame":"done"' in answer.text


def test_without_the_libraries_the_install_line_is_said(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(CannotFetch, match=r'pip install "layerleap\[web\]"'):
        ll.debug(model)
