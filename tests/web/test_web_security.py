"""Requests that no page of ours would send are refused, before they reach anything."""

import re

import pytest
from asking import HERE
from fake import FakeDebugger
from starlette.testclient import TestClient

from layerleap.show.web.access import Access, host_name
from layerleap.show.web.app import create_app
from layerleap.show.web.limits import Limits
from layerleap.show.web.store import Store


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """One for all tests here: nothing that is refused leaves a trace."""
    folder = tmp_path_factory.mktemp("page")
    for name in ("index.html", "app.js"):
        (folder / name).write_text("")
    app = create_app(FakeDebugger(), Store("f" * 32, folder / "saved"), static=folder)
    with TestClient(app, base_url=HERE) as client:
        yield client


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8123", "127.0.0.1", "127.0.0.1:9", "[::1]", "[::1]:8123", "LOCALHOST"],
)
def test_own_names_are_answered(client, host):
    assert client.get("/api/model", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8123",
        "localhost.evil.example",
        "localhost@evil.example",
        "127.0.0.1.evil.example",
        "::1",
        "[::1",
        "[::1]x",
        "[::2]",
        "localhost:",
        "localhost:80x",
        "127.0.0.2",
        "0.0.0.0",
        "localhost, evil.example",
        "localhost.",
        "2130706433",
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/model", "/api/nothing"])
def test_other_names_are_refused_whatever_is_asked(client, host, path):
    answer = client.get(path, headers={"host": host})
    assert answer.status_code == 421
    assert "does not answer to" in answer.json()["error"]


def test_a_request_with_two_hosts_or_none_is_refused(client):
    def status(hosts):
        sent = []

        async def receive():
            return {"type": "http.request", "body": b""}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/api/model",
            "scheme": "http",
            "query_string": b"",
            "headers": [(b"host", host) for host in hosts],
        }
        client.portal.call(client.app, scope, receive, send)  # this thread may have a loop
        return sent[0]["status"]

    assert status([]) == 421
    assert status([b"localhost", b"evil.example"]) == 421


def test_hosts_are_taken_apart_by_the_rules():
    assert host_name("[::1]:80") == "::1"
    assert host_name("Localhost:80") == "localhost"
    assert host_name("a b") is None
    assert host_name("a:b:c") is None


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},  # another port of this machine
        {"sec-fetch-site": "nonsense"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:8123"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "same-origin", "origin": "http://evil.example"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/trace"),
        ("PUT", "/api/sessions/a"),
        ("DELETE", "/api/sessions/a"),
        ("POST", "/"),
        ("GET", "/api/index"),
        ("POST", "/api/index"),
        ("DELETE", "/api/index"),
        ("GET", "/api/model"),
        ("GET", "/api/search?q=guitar"),
    ],
)
def test_another_sites_page_may_not_ask(client, headers, method, path):
    answer = client.request(
        method, path, headers={**headers, "content-type": "application/json"}, content=b"{}"
    )
    assert answer.status_code == 403
    assert answer.json()["error"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"origin": "http://127.0.0.1:8123"},
        {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:8123"},
    ],
)
def test_our_page_and_programs_may_ask(client, headers):
    assert client.post("/api/tokens", json={"text": "a"}, headers=headers).status_code == 200


def test_a_link_on_another_site_may_lead_to_the_page_but_not_into_the_api(client):
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200
    assert client.get("/api/model", headers={"sec-fetch-site": "cross-site"}).status_code == 403


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        "text/plain; application/json",
        "application/jsonp",
    ],
)
def test_only_json_is_taken(client, kind):
    body = b'{"text": "a"}'
    answer = client.post("/api/tokens", content=body, headers={"content-type": kind})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]
    answer = client.request(
        "DELETE", "/api/sessions/a", content=body, headers={"content-type": kind}
    )
    assert answer.status_code == 415


def test_a_large_request_is_refused_whether_it_tells_its_size_or_not(client):
    large = b'{"text": "' + b"a" * Limits().body + b'"}'
    headers = {"content-type": "application/json"}
    assert client.post("/api/tokens", content=large, headers=headers).status_code == 413

    def parts():
        for start in range(0, len(large), 65536):
            yield large[start : start + 65536]

    assert client.post("/api/tokens", content=parts(), headers=headers).status_code == 413
    headers["content-length"] = "9" * 5000
    assert client.post("/api/tokens", content=b"{}", headers=headers).status_code == 413


def test_answers_carry_the_headers_that_keep_the_page_to_itself(client):
    for path in ("/", "/app.js", "/api/model", "/api/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert not [name for name in headers if name.startswith("access-control")]
    refused = client.get("/", headers={"host": "evil.example"}).headers
    assert refused["x-content-type-options"] == "nosniff"


def test_a_mistake_of_the_servers_is_said_in_the_same_way(make_app):
    with TestClient(
        make_app(), base_url="http://localhost", raise_server_exceptions=False
    ) as client:
        answer = client.post(
            "/api/cell", json={"input": {"text": "!crash"}, "block": 1, "position": 0}
        )
    assert answer.status_code == 500
    assert "RuntimeError" in answer.json()["error"]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


def test_only_in_a_notebook_may_pages_of_this_machine_frame_ours(make_app):
    with TestClient(make_app(in_notebook=True), base_url="http://localhost") as client:
        headers = client.get("/").headers
    ancestors = re.search(r"frame-ancestors ([^;]*)", headers["content-security-policy"])[1]
    assert ancestors == "'self' http://localhost:* http://127.0.0.1:* vscode-webview:"
    assert "x-frame-options" not in headers


def test_no_preflight_is_answered(client):
    answer = client.options(
        "/api/trace",
        headers={"origin": "http://evil.example", "access-control-request-method": "POST"},
    )
    assert answer.status_code in (403, 405)
    assert "access-control-allow-origin" not in answer.headers


def test_web_sockets_are_closed(client):
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/api/trace"):
        pass


@pytest.fixture
def links():
    return []


@pytest.fixture
def stranger(make_app, links):
    """A client of a server that listens beyond loopback; the first link, then those told later."""
    access = Access("192.0.2.7", 8123, announce=links.append)
    links.append(access.url)
    with TestClient(make_app(access=access), base_url="http://192.0.2.7:8123") as client:
        yield client


def test_beyond_loopback_nothing_is_answered_without_the_link(stranger):
    for path in ("/", "/app.js", "/api/model", "/?token=", "/?token=wrong", "/?token=%ff"):
        answer = stranger.get(path)
        assert answer.status_code == 401
        assert "layerleap debug printed" in answer.json()["error"]
        assert "set-cookie" not in answer.headers
    assert stranger.post("/api/tokens", json={"text": "a"}).status_code == 401


def test_the_link_works_once_and_gives_a_strict_cookie(stranger, links, make_app):
    link = links[0]
    first = stranger.get(link)
    assert first.status_code == 200
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert first.headers["cache-control"] == "no-store"
    assert stranger.get("/api/model").status_code == 200
    assert stranger.post("/api/tokens", json={"text": "a"}).status_code == 200

    stranger.cookies.clear()
    assert stranger.get(link).status_code == 401
    assert len(links) == 2, "the next link is told"
    assert stranger.get(links[1]).status_code == 200


def test_a_wrong_or_broken_cookie_is_no_cookie(stranger):
    for cookie in ("layerleap_8123=wrong", "layerleap_8123=", "layerleap_9=x", "=;;=", 'a="b'):
        assert stranger.get("/api/model", headers={"cookie": cookie}).status_code == 401


@pytest.mark.parametrize(
    "other",
    ['prefs={"x":1}', "user[id]=3", "flag", "name=caf\xe9", 'a="b', "", "layerleap_8123=old"],
)
def test_cookies_of_other_apps_on_the_host_do_not_hide_ours(stranger, links, other):
    ours = stranger.get(links[0]).headers["set-cookie"].partition(";")[0]
    stranger.cookies.clear()
    for cookies in (f"{other}; {ours}", f"{ours};{other}"):
        headers = {"cookie": cookies.encode("latin1")}
        assert stranger.get("/api/model", headers=headers).status_code == 200, cookies


def test_the_link_is_no_way_around_the_host(stranger, links):
    token = links[0].partition("?")[2]
    answer = stranger.get(f"/?{token}", headers={"host": "evil.example"})
    assert answer.status_code == 421
    assert len(links) == 1


def test_a_server_that_listens_everywhere_answers_to_addresses_and_to_its_own_name_only():
    import socket

    access = Access("0.0.0.0", 8123)
    assert not access.is_open
    assert access.answers_to("10.1.2.3:8123")
    assert access.answers_to("[fe80::1]:8123")
    assert access.answers_to(socket.gethostname())
    assert not access.answers_to("evil.example")


@pytest.mark.parametrize(
    ("host", "is_open"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("127.8.8.8", True),
        ("192.0.2.7", False),
        ("::", False),
    ],
)
def test_only_loopback_needs_no_token(host, is_open):
    access = Access(host, 8123)
    assert access.is_open is is_open
    assert ("token=" in access.url) is not is_open


def test_more_clients_than_allowed_are_told_to_wait(make_app):
    app = make_app(limits=Limits(clients=2))
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/api/model").status_code == 200
        app.open += 2
        answer = client.get("/api/model")
        app.open -= 2
        assert answer.status_code == 429
        assert answer.json()["place"] == 1
        assert client.get("/api/model").status_code == 200
        assert app.open == 0
