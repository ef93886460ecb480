"""Links, sessions, exports, several tabs, and a server that goes away."""

import json

import pytest
from browsing import FIRST, prompt, ran, until


def test_a_link_reopens_the_same_view(tab):
    page = tab()
    prompt(page, FIRST)
    entries = page.evaluate("history.length")
    page.fill("#edit-spec", "L12.N34=5@last")
    page.press("#edit-spec", "Enter")
    page.click("#run")
    ran(page)
    page.click("#grid-0 td[data-layer='18'][data-position='4']")
    page.wait_for_selector(".updates tbody tr")
    page.click(".updates tbody tr >> nth=2")
    page.click("#cell .stage .pin >> nth=1")
    page.click("[data-view=difference]")
    page.select_option("#colour", "final")
    page.hover("#grid-0 td[data-layer='20'][data-position='2']")
    page.wait_for_selector("#vector .ends li")
    until(page, "location.hash.includes('colour=final')")
    assert page.evaluate("history.length") == entries
    other = tab(page.url.partition("#")[2])
    ran(other)
    other.wait_for_selector("#vector .ends li")
    other.wait_for_selector(".updates tbody tr")
    for selector in ("#grid-0", "#edit-list", "#vector h2", "#cell h2", "#paths .lines"):
        assert other.inner_text(selector) == page.inner_text(selector), selector
    chosen = "td.chosen"
    assert other.get_attribute(chosen, "aria-label") == page.get_attribute(chosen, "aria-label")
    assert other.url == page.url


def test_a_plain_view_has_a_plain_address(tab):
    page = tab()
    page.wait_for_timeout(300)
    assert "#" not in page.url
    page.fill("#prompt-0", "one")
    until(page, "location.hash === '#p=one'")


def test_a_link_opens_even_if_the_page_writes_its_address_at_that_moment(tab):
    page = tab()
    page.evaluate(
        "location.hash = 'vector=12.34'; history.replaceState(null, '', location.pathname)"
    )
    page.wait_for_selector("#vector .ends li")
    until(page, "location.hash === '#vector=12.34'")


def test_a_damaged_link_still_opens(tab):
    page = tab("p=one+two&cell=x.y&edits=foo;L1.N2=3&pins=%7B&watch=3&vector=1&view=evil&new=-x")
    ran(page)
    assert page.locator("#edit-list li").count() == 1
    assert '"foo"' in page.inner_text("#edit-error")


def test_a_link_with_a_lens_that_is_not_loaded_names_those_that_are(tab):
    page = tab("p=one+two&lens=foo")
    page.wait_for_selector("#notice.bad:has-text('Choose one of: logit lens, linear shortcuts.')")
    assert page.locator("#grid-0 tbody td:not(.waiting)").count() == 0  # nothing was read instead


def test_a_very_long_prompt_is_refused_in_a_sentence_and_stays_out_of_the_link(tab):
    page = tab()
    page.fill("#prompt-0", "word " * 5000)
    words = "The text has 25,000 characters, but at most 20,000 can be read; shorten it."
    page.wait_for_selector(f"#live-0 .error:text('{words}')")
    page.click("#run")
    page.wait_for_selector(f"#notice.bad:has-text('{words}')")
    assert len(page.url) < 500


def test_a_link_with_edits_shows_what_they_do(tab):
    page = tab("p=one+two&edits=L12.N34=5")
    ran(page)
    assert page.get_attribute("[data-view=after]", "aria-pressed") == "true"
    page.click("[data-view=before]")
    until(page, "location.hash.includes('view=before')")
    other = tab(page.url.partition("#")[2])
    ran(other)
    assert other.get_attribute("[data-view=before]", "aria-pressed") == "true"


def test_sessions_are_saved_listed_opened_and_deleted(tab):
    page = tab("p=one+two&edits=!L12.N34=5")
    ran(page)
    page.click("#open-sessions")
    page.fill("#sessions [name=title]", "my <i>view</i>")
    page.click("#sessions .primary")
    page.wait_for_selector("#sessions li")
    other = tab()
    other.click("#open-sessions")
    other.click("#sessions [data-open]:has-text('my <i>view</i>')")
    ran(other)
    assert other.input_value("#prompt-0") == "one two"
    assert not other.is_checked("#on-0")
    other.click("#open-sessions")
    other.click("#sessions [data-delete]")
    other.wait_for_selector("#sessions .empty")


def test_an_export_opens_offline(tab, chromium, tmp_path):
    page = tab("p=one+two&edits=L12.N34=5&vector=12.34")
    ran(page)
    page.wait_for_selector("#vector .ends li")
    page.wait_for_selector(".updates")
    page.click("#open-export")
    with page.expect_download() as waiting:
        page.click("[data-export=html]")
    waiting.value.save_as(tmp_path / "view.html")
    context = chromium.new_context(offline=True, viewport={"width": 1600, "height": 1000})
    asked = []
    copy = context.new_page()
    copy.on("request", lambda request: asked.append(request.url))
    copy.goto((tmp_path / "view.html").as_uri())
    assert copy.inner_text("#grid-0 tbody") == page.inner_text("#grid-0 tbody")
    assert "L12.N34" in copy.inner_text("#vector")
    assert "one two" in copy.inner_text("#ask")
    assert copy.locator("script, button, input").count() == 0
    assert len(asked) == 1
    colour = "getComputedStyle(document.querySelector('#grid-0 td:last-child')).backgroundColor"
    assert copy.evaluate(colour) == page.evaluate(colour)
    context.close()


@pytest.mark.parametrize(("live", "width"), [(1400, 1400), (1000, 390)])
def test_an_export_of_two_prompts_keeps_its_chart_and_its_tables(
    tab, chromium, tmp_path, live, width
):
    page = tab("p=one+two&p2=three+four&edits=L12.N34=5", size={"width": live, "height": 900})
    ran(page)
    page.wait_for_selector("#grid-1 tbody td")
    ran(page)
    page.click("#open-export")
    with page.expect_download() as waiting:
        page.click("[data-export=html]")
    waiting.value.save_as(tmp_path / "view.html")
    context = chromium.new_context(offline=True, viewport={"width": width, "height": 900})
    copy = context.new_page()
    copy.goto((tmp_path / "view.html").as_uri())
    boxes = copy.evaluate(BOXES)
    live_height = page.evaluate("document.querySelector('#paths svg').clientHeight")
    assert boxes["svg"]["height"] == live_height > 140
    assert boxes["paths"]["bottom"] >= max(boxes["svg"]["bottom"], boxes["lines"]["bottom"])
    assert live > width or boxes["lines"]["right"] <= boxes["paths"]["right"]
    middle = boxes["middle"]
    assert all(
        middle["left"] <= box["left"] < box["right"] <= middle["right"] + 0.5
        for box in boxes["grids"]
    )
    assert len(boxes["grids"]) == 2
    assert boxes["page"] == width
    context.close()


BOXES = """(() => {
  const box = (selector) => document.querySelector(selector).getBoundingClientRect().toJSON();
  return {
    svg: box('#paths svg'), lines: box('#paths .lines'), paths: box('#paths'),
    middle: box('#middle'), page: document.documentElement.scrollWidth,
    grids: [...document.querySelectorAll('.gridbox .scroll')].map(
      (each) => each.getBoundingClientRect().toJSON()),
  };
})()"""


def test_json_and_python_come_from_the_server(tab, tmp_path):
    page = tab("p=one+two")
    ran(page)
    page.click("#open-export")
    with page.expect_download() as waiting:
        page.click("[data-export=json]")
    waiting.value.save_as(tmp_path / "view.json")
    data = json.loads((tmp_path / "view.json").read_text())
    assert data["state"]["prompt"] == "one two"
    assert [token["label"] for token in data["shown"][0]["tokens"]] == ["one", "␣two"]
    assert len(data["shown"][0]["cells"]) == 2 * 31
    assert "label" in data["shown"][0]["cells"][0]["top"][0]
    with page.expect_download() as waiting:
        page.click("[data-export=python]")
    assert waiting.value.suggested_filename == "layerleap-one-two.py"


def test_two_tabs_do_not_disturb_each_other(tab):
    first = tab()
    second = tab(share=first.context)
    first.fill("#prompt-0", "one two three")
    second.fill("#prompt-0", "four five")
    first.click("#run")
    second.click("#run")
    ran(first)
    ran(second)
    assert first.locator("#grid-0 tbody .token").all_inner_texts() == ["one", "␣two", "␣three"]
    assert second.locator("#grid-0 tbody .token").all_inner_texts() == ["four", "␣five"]


def test_after_a_reconnect_nothing_of_the_old_prompt_and_no_red_notice_stays(tab, own_server):
    server = own_server()
    page = tab(url=server.url)
    prompt(page, "one two")
    server.stop()
    page.fill("#prompt-0", "three four five")
    page.click("#run")
    page.wait_for_selector("#connection.gone:has-text('The server does not answer')")
    page.wait_for_selector("#notice.bad:has-text('The server does not answer.')")
    page.wait_for_selector("#live-0:has-text('when the server answers again')")
    assert page.locator("#live-0 .token").count() == 0
    server.start()
    page.wait_for_selector("#connection.ok", state="attached")
    page.wait_for_selector("#notice.stale:has-text('The server was away')")
    page.wait_for_selector("#live-0 .token >> nth=2")
    assert page.locator("#live-0 .token").all_inner_texts() == ["three", "␣four", "␣five"]
    page.click("#notice button:text('Run again')")
    ran(page)
    assert page.is_hidden("#notice")
    assert page.locator("#grid-0 tbody tr").count() == 3


BROKEN = {
    "generate": [
        {"frame": "start", "side": "plain"},
        {"frame": "token", "side": "plain", "id": 5, "piece": " on", "label": "␣on"},
    ],
    "trace": [
        {
            "frame": "meta",
            "tokens": [],
            "positions": [],
            "layers": [],
            "selected": 0,
            "edits": [],
            "lowest": None,
        }
    ],
}


@pytest.mark.parametrize("route", BROKEN)
def test_an_answer_that_the_server_breaks_off_ends_and_can_be_asked_again(tab, route):
    page = tab()
    lines = "".join(json.dumps(frame) + "\n" for frame in BROKEN[route])
    page.route(f"**/api/{route}", lambda it: it.fulfill(body=lines))
    page.fill("#prompt-0", "one two")
    page.click("#generate" if route == "generate" else "#run")
    words = "The server stopped before its answer was complete."
    if route == "generate":
        page.wait_for_selector(f"#generation-note.error:has-text('{words}')")
        assert "stopped" in page.inner_text(".side.plain h3")
        assert page.locator(".side.running").count() == 0
    else:
        page.wait_for_selector(f"#notice:has-text('{words}')")
        assert page.is_hidden("#stop")
    page.unroute(f"**/api/{route}")
    if route == "generate":
        page.click("#generate-too:text('Generate again')")
        page.wait_for_selector(".side.plain.done")
        assert page.inner_text("#generation-note") == ""
    else:
        page.click("#notice button:text('Run again')")
        ran(page)
        assert page.is_hidden("#notice")


def test_a_search_and_a_vector_that_got_no_answer_can_be_asked_again(tab):
    page = tab()
    page.wait_for_selector("#found [data-cluster]")
    for path, action, place in (
        ("search?*", lambda: page.fill("#query", "guitar"), "#found"),
        ("vectors/12/34", lambda: page.evaluate(OPEN_VECTOR), "#vector"),
    ):
        page.route(f"**/api/{path}", lambda it: it.fulfill(status=500, json={"error": "broken"}))
        action()
        page.wait_for_selector(f"{place} .error:text('Broken.')")
        page.unroute(f"**/api/{path}")
        page.click(f"{place} [data-retry]")
        page.wait_for_selector(f"{place} .token")
        assert page.locator(f"{place} .error").count() == 0


OPEN_VECTOR = "import('./state.js').then(({ set }) => set({ vector: { block: 12, neuron: 34 } }))"


def test_run_again_is_offered_only_where_it_can_succeed(tab):
    page = tab()
    prompt(page, "one two")
    page.fill("#prompt-0", "a " * 600)
    page.wait_for_selector("#notice:has-text('at most 512 can be read')")
    assert page.locator("#notice button").count() == 0
    assert page.inner_text("#run") == "Run"
    page.click("#run")
    page.wait_for_selector("#notice.bad:has-text('at most 512 are read')")
    assert page.locator("#notice button").count() == 0
    page.fill("#prompt-0", "!error")
    page.wait_for_selector("#notice button:text('Run again')")
    page.click("#notice button")
    page.wait_for_selector("#notice.bad:has-text('asks for an error')")
    page.wait_for_selector("#notice button", state="detached")
    page.fill("#prompt-0", "one")
    page.click("#notice button:text('Run again')")
    ran(page)
    page.fill("#edit-spec", "L12.N34=5")
    page.press("#edit-spec", "Enter")
    page.wait_for_selector("#notice button:text('Run again')")
    page.fill("#prompt-0", "")
    page.wait_for_selector("#notice:has-text('The prompt is empty.')")
    assert page.locator("#notice button").count() == 0


def test_another_model_at_the_same_address_is_noticed(tab, own_server):
    server = own_server()
    page = tab("p=one+two", url=server.url)
    ran(page)
    server.stop()
    page.fill("#prompt-0", "one two three")
    page.wait_for_selector("#connection.gone")
    model = {**server.debugger.describe(), "name": "another", "fingerprint": "e" * 32}
    server.debugger.describe = lambda: model
    server.start()
    page.wait_for_selector("#model:has-text('another')")
    ran(page)
    assert page.locator("#grid-0 tbody tr").count() == 3
    page.wait_for_selector("#live-0 .token >> nth=2")
