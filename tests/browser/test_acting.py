"""Search, edit, generate."""

import json

import pytest
from browsing import FIRST, prompt, ran, until


def test_from_a_sub_update_to_the_edited_answer_in_four_clicks(tab):
    page = tab()
    prompt(page, FIRST)
    page.wait_for_selector("#cell .updates")
    name = page.inner_text(".updates tbody th >> nth=0")
    page.click(".updates tbody tr >> nth=0")
    page.wait_for_selector("#vector .ends li")
    assert page.inner_text("#vector h2") == name
    page.click("#vector >> text=Add to edits")
    page.click("#run")
    ran(page)
    page.click("#generate")
    page.wait_for_selector(".side.edited.done")
    assert "Madrid" in page.inner_text(".side.plain")
    assert "Barcelona" in page.inner_text(".side.edited")
    # The first run with an edit shows what it does.
    assert page.get_attribute("[data-view=after]", "aria-pressed") == "true"
    page.click("[data-view=difference]")
    page.wait_for_selector("#grid-0 td.change")
    assert "unchanged" in page.get_attribute("#grid-0 td[data-position='0'] >> nth=0", "aria-label")


def test_results_are_marked_as_old_until_they_are_run_again(tab):
    page = tab()
    prompt(page, FIRST)
    page.fill("#edit-spec", "L12.N34=5@last")
    page.press("#edit-spec", "Enter")
    page.wait_for_selector("#notice:text('the edits changed since')")
    assert page.locator(".gridbox.stale").count() == 1
    page.select_option("#lens", "linear")
    page.wait_for_selector("#notice:text('the lens and edits changed since')")
    page.click("#notice button")
    ran(page)
    assert page.is_hidden("#notice")


def test_an_edit_is_a_sentence_that_can_be_changed(tab):
    page = tab("edits=L12.N34=5@last")
    page.select_option("#operation-0", "scale")
    page.fill("#value-0", "-2")
    page.press("#value-0", "Tab")
    page.select_option("#place-0", "some")
    page.fill(".positions", "0, 3")
    page.press(".positions", "Tab")
    until(page, "decodeURIComponent(location.hash) === '#edits=L12.N34*-2@0,3'")
    page.uncheck("#on-0", force=True)
    until(page, "decodeURIComponent(location.hash) === '#edits=!L12.N34*-2@0,3'")
    page.click("[data-delete]")
    page.wait_for_selector("#edit-list .empty")
    until(page, "location.hash === ''")
    assert page.locator("[data-delete]").count() == 0


def test_edits_that_cannot_be_are_refused_in_a_sentence(tab):
    page = tab()
    for text, message in {
        "L99.N1=5": "Block 99 does not exist: this model has blocks 1 to 30.",
        "L3.N9999=5": "Neuron 9999 does not exist: block 3 has neurons 0 to 1535.",
        "L7.N1=5": "Neurons of block 7 cannot be edited. Block 7 is a mixture of experts.",
        "nonsense": '"nonsense" is not an edit.',
    }.items():
        page.fill("#edit-spec", text)
        page.press("#edit-spec", "Enter")
        page.wait_for_selector(f"#edit-error:has-text('{message}')")
    assert page.locator("#edit-list .empty").count() == 1


def test_specs_are_written_as_python_reads_them(tab):
    from layerleap.act.edits.spec import edit_spec, parse_edit

    specs = [
        "L1.N0=5",
        "L12.N34*-0.5@last",
        "L2.N3+3@0,4",
        "L2.N3-3@generated",
        "L1.N1=off",
        "L1.N1=-2.5e-3@all",
        "l4n5=1e20",
        "L2.H1=0",
        "l3h2*-0.5@last",
        "L1.attn=off@0,4",
        "L2.ffn.in*2",
    ]
    page = tab()
    script = """async texts => {
      const { parse, spec } = await import('./specs.js');
      return texts.map(text => spec(parse(text)));
    }"""
    written = page.evaluate(script, specs)
    assert [edit_spec(parse_edit(text)) for text in written] == [
        edit_spec(parse_edit(text)) for text in specs
    ]


def test_search_finds_vectors_and_opens_them(tab):
    page = tab()
    page.fill("#query", "guitar music")
    page.wait_for_selector("#found [data-neuron]")
    assert page.locator("#found .token.matched, #found [data-neuron]").count() > 0
    first = page.locator("#found [data-neuron]").first
    name = first.locator("b").inner_text()
    first.click()
    page.wait_for_selector("#vector .neighbours li")
    assert page.inner_text("#vector h2") == name
    page.click("#vector [data-cluster]")
    page.wait_for_selector("#found h3:has-text('Cluster')")
    page.click("#found [data-back]")
    page.fill("#query", "zzzz")
    page.wait_for_selector("#found .empty")
    assert "No token of this model begins a word with 'zzzz'." in page.inner_text("#found .note")


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("**/api/search?*", "#found [data-neuron]"),
        ("**/api/vectors/12/34", "#vector .ends li"),
        ("**/neighbours?*", "#vector .neighbours li"),
    ],
)
def test_a_busy_server_is_asked_again(tab, path, place):
    page, refused = tab(), []

    def refuse_once(route):
        if refused:
            route.continue_()
        else:
            refused.append(route.request.url)
            body = json.dumps({"error": "the model is busy", "place": 2})
            route.fulfill(status=429, body=body, content_type="application/json")

    page.route(path, refuse_once)
    wanted = {"query": "guitar", "vector": {"block": 12, "neuron": 34}}
    page.evaluate("view => import('./state.js').then(({ set }) => set(view))", wanted)
    page.wait_for_selector(place)
    assert refused
    assert page.locator("#found .error, #vector .error").count() == 0


def test_a_vector_can_be_named(tab):
    page = tab("vector=12.34")
    page.fill("#vector [name=name]", "strings <b>and</b> bows")
    page.press("#vector [name=name]", "Enter")
    page.wait_for_selector("#vector output:has-text('Saved.')")
    again = tab("vector=12.34")
    again.wait_for_selector("#vector [name=name]")
    assert again.input_value("#vector [name=name]") == "strings <b>and</b> bows"
    again.fill("#vector [name=name]", "")
    again.press("#vector [name=name]", "Enter")
    again.wait_for_selector("#vector output:has-text('Saved.')")


def test_without_an_index_the_page_says_how_to_get_one(tab, own_server):
    page = tab("p=one+two&vector=12.34", url=own_server(index=False).url)
    ran(page)
    page.wait_for_selector("#found .empty")
    assert "layerleap index" in page.inner_text("#found")
    assert page.is_disabled("#query")
    page.wait_for_selector("#vector .ends li")
    assert "layerleap index" in page.inner_text("#vector")


def test_the_page_builds_the_index_shows_how_far_it_is_and_then_searches(tab, own_server):
    server = own_server(index=False, buildable=True, step=0.5)
    page = tab("p=one+two&vector=12.34", url=server.url)
    ran(page)
    page.wait_for_selector("#build-index:text('Build the index (about 2 minutes, 65 MB)')")
    assert "can be built under Concepts" in page.inner_text("#vector")
    page.click("#build-index")
    page.wait_for_selector("#found :text('of 30 blocks')")
    until(page, "!document.querySelector('#found').innerText.includes(' 0 of 30')")
    page.click("#stop-index")
    page.wait_for_selector("#build-index:has-text('left')")
    assert page.inner_text("#build-index").startswith("Go on building (about")
    page.click("#build-index")
    page.wait_for_selector("#found :text('of 30 blocks')")
    page.reload()  # the build is the server's
    page.wait_for_selector("#found progress")
    other = tab(share=page.context, url=server.url)
    other.wait_for_selector("#found progress")
    prompt(page, "three four")  # nobody waits for the index
    assert page.is_visible("#found progress")
    server.debugger.step = 0
    for each in (page, other):
        each.wait_for_selector("#found [data-cluster]")
    page.fill("#query", "guitar")
    page.wait_for_selector("#found [data-neuron]")
    page.wait_for_selector("#vector .neighbours li")


def test_an_index_that_cannot_be_built_says_why_and_can_be_tried_again(tab, own_server):
    from layerleap.errors import CannotWrite

    server = own_server(index=False, buildable=True)
    own, words = server.debugger.build_index, "another process is building it"

    def refuse(progress):
        server.debugger.build_index = own
        raise CannotWrite(words)

    server.debugger.build_index = refuse
    page = tab(url=server.url)
    page.click("#build-index")
    page.wait_for_selector("#found .error:text('Another process is building it.')")
    page.click("#build-index:has-text('Try again')")
    page.wait_for_selector("#found [data-cluster]")


def test_a_generation_can_be_stopped(tab):
    page = tab()
    page.fill("#prompt-0", "very !slow")
    page.click("#generate")
    page.wait_for_selector(".side.plain .piece")
    page.click("#stop-generate")
    page.wait_for_selector("#generation-note:text('Stopped.')")
    assert page.locator(".side.plain .piece").count() < 5


def test_a_run_can_be_stopped(tab):
    page = tab()
    page.fill("#prompt-0", "very !slow")
    page.click("#run")
    page.wait_for_selector("#grid-0 td:not(.waiting)")
    page.click("#stop")
    page.wait_for_selector("#notice:has-text('Stopped before all cells were read.')")
    assert page.locator("#grid-0 td.waiting").count() > 0


def test_failures_are_said_in_a_sentence(tab):
    page = tab()
    page.click("#run")
    page.wait_for_selector("#live-0 :text('The prompt is empty.')")
    page.fill("#prompt-0", "an !error")
    page.click("#run")
    page.wait_for_selector(
        "#notice.bad:has-text('The prompt asks for an error; take the word out of it.')"
    )
    page.fill("#prompt-0", "it fails !midway")
    page.click("#run")
    page.wait_for_selector("#notice.bad:has-text('The reading failed midway')")
    assert "Error" not in page.inner_text("#notice")  # a sentence, not the name of a class
    page.fill("#prompt-0", "so !busy")
    page.click("#run")
    page.wait_for_selector("#notice.busy:has-text('Place 3 in the queue')")
    page.click("#stop")


def test_a_neuron_without_tokens_can_still_be_edited(tab):
    page = tab()
    refused = {"status": 422, "json": {"error": "the head cannot be read"}}
    page.route("**/api/vectors/12/34", lambda route: route.fulfill(**refused))
    page.goto(f"{page.url}#vector=12.34")
    page.wait_for_selector("#vector .error:text('The head cannot be read.')")
    page.click("#vector [data-edit]")
    assert page.inner_text("#open-0") == "L12.N34"


def test_an_edit_that_met_no_position_is_marked(tab):
    page = tab("p=one+two&edits=L12.N34=1000000000@99;L2.N3=5")
    ran(page)
    page.wait_for_selector("#edit-list li:first-child .error:has-text('positions 0 to 1')")
    assert page.locator("#edit-list .error").count() == 1
    assert page.evaluate(
        "(e => e.scrollWidth <= e.clientWidth)(document.querySelector('#value-0'))"
    )


def test_an_edit_far_out_of_the_natural_range_says_so_after_the_run(tab):
    page = tab("p=one+two&edits=L12.N34=9000;L2.N3=5")
    ran(page)
    page.wait_for_selector("#edit-list li:first-child .remark:text('9000 is outside')")
    assert page.locator("#edit-list .remark").count() == 1
    assert page.locator("#edit-list .error").count() == 0


def test_an_error_of_a_generation_ends_with_the_next_run(tab):
    page = tab()
    page.click("#generate-too")
    page.wait_for_selector("#generation-note.error")
    prompt(page, "one two")
    assert page.inner_text("#generation-note") == ""
    page.fill("#new-tokens", "-5")
    page.press("#new-tokens", "Tab")
    page.wait_for_selector("#generation-note:has-text('Set to 1')")


def test_an_edit_of_a_head_is_a_sentence_of_two_choices(tab):
    page = tab()
    page.fill("#edit-spec", "L3.H2=0@last")
    page.press("#edit-spec", "Enter")
    page.wait_for_selector("#edit-list code:has-text('L3.H2')")
    options = page.locator("#edit-list select[name=operation] option")
    assert options.all_inner_texts() == ["Multiply", "Switch off"]
    page.fill("#edit-spec", "L3.H2+1")
    page.press("#edit-spec", "Enter")
    page.wait_for_selector("#edit-error:has-text('is not an edit')")
