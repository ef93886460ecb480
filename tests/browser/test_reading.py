"""Run a prompt, read the grid, follow tokens, select cells."""

from browsing import FIRST, prompt, ran, until


def test_an_example_runs_and_fills_the_grid(tab):
    page = tab()
    assert page.locator(".example").count() == 3
    page.click(".example >> nth=0")
    ran(page)
    page.wait_for_selector("#live-0 .token")
    rows = page.locator("#grid-0 tbody tr")
    assert rows.count() == page.locator("#live-0 .token").count() == 13
    assert rows.nth(12).locator(".token").inner_text() == "␣is"
    # Its watched token is chosen with it.
    assert page.input_value("#watch") == "␣Madrid"
    assert "layer 30: " in rows.nth(12).locator("td").last.get_attribute("aria-label")


def test_tokens_appear_while_one_types(tab):
    page = tab()
    page.click("#prompt-0")
    page.keyboard.type("two words")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("€")
    page.wait_for_selector("#live-0 .token.bytes")
    labels = page.locator("#live-0 .token").all_inner_texts()
    assert labels == ["two", "␣words", "⏎", "<E2 82>"]
    page.wait_for_selector("#live-0 :text('4 of 512 tokens')")


def test_a_prompt_that_looks_like_markup_stays_text(tab):
    page = tab()
    prompt(page, '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>')
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script, #ask img").count() == 0
    assert "<" in page.locator("#grid-0 tbody th").first.inner_text()


def test_layers_are_left_out_when_space_is_short_but_never_the_last(tab):
    page = tab()
    prompt(page, FIRST)
    heads = page.locator("#grid-0 thead th").all_inner_texts()
    assert heads[-1] == "30"
    assert len(heads) == 17
    assert page.inner_text("#stride") == "every 2nd layer"
    page.click("#all-layers")
    until(page, "document.querySelectorAll('#grid-0 thead th').length === 32")
    assert page.inner_text("#stride") == ""


def test_a_selected_cell_shows_stages_and_sub_updates(tab):
    page = tab()
    prompt(page, FIRST)
    page.click("#grid-0 td[data-layer='12'][data-position='3']")
    page.wait_for_selector("#cell h2:text('Block 12 of 30')")
    page.wait_for_selector("#cell .updates")
    titles = page.locator("#cell .stage h4").all_inner_texts()
    assert titles == ["Before", "After attention", "After the FFN"]
    assert page.locator("#cell .updates tbody tr").count() == 10
    signs = [text[0] for text in page.locator(".updates tbody .meter").all_inner_texts()]
    assert set(signs) <= {"+", "\N{MINUS SIGN}"}
    assert "these 10: 47 %" in page.inner_text("#cell")
    assert "the rest: 51 %" in page.inner_text("#cell")


def test_a_block_without_neurons_says_why(tab):
    page = tab("p=one+two&cell=7.0.0&layers=all")
    ran(page)
    page.wait_for_selector("#cell .stages")
    assert "Block 7 is a mixture of experts." in page.inner_text("#cell")
    assert page.locator("#cell .updates").count() == 0


def test_the_embedding_has_no_block(tab):
    page = tab("p=one+two&cell=0.0.0&layers=all")
    ran(page)
    page.wait_for_selector("#cell h2:text('before block 1')")
    page.wait_for_selector("#cell .guesses-list li")
    assert page.locator("#cell .stages").count() == 0


def test_a_look_at_a_cell_covers_nothing(tab):
    page = tab()
    prompt(page, FIRST)
    page.hover("#grid-0 td[data-layer='20'][data-position='2']")
    page.wait_for_selector("#peek .where")
    assert "layer 20" in page.inner_text("#peek")
    box, grid = page.locator("#peek").bounding_box(), page.locator("#grids").bounding_box()
    assert box["y"] >= grid["y"] + grid["height"]


def test_tokens_can_be_pinned_and_followed(tab):
    page = tab()
    prompt(page, FIRST)
    page.wait_for_selector("#cell .stage .pin")
    before = page.locator("#paths .lines li").count()
    token = page.locator("#cell .stage").last.locator(".pin").nth(3)
    label = token.inner_text()
    token.click()
    page.wait_for_selector("#paths .pin[aria-pressed=true]")
    assert page.inner_text("#paths .pin[aria-pressed=true]") == label
    assert page.locator("#paths .lines li").count() >= before
    assert "saturated from layer 21" in page.text_content("#paths svg >> nth=0")


def test_an_exit_with_another_token_than_the_models_is_a_warning(tab):
    page = tab("p=one+two")
    ran(page)
    label = "document.querySelector('#paths text.exit').lastChild.data"  # after its title
    assert page.evaluate(label) == "could exit at layer 26"
    assert page.locator("#paths .exit.wrong").count() == 0
    prompt(page, "one !early")
    page.wait_for_selector("#paths text.exit.wrong")
    words = "⚠ would exit at layer 26 with “␣”, not “␣Madrid”"
    assert page.evaluate(label) == words
    assert words in page.get_attribute("#paths .chart > svg", "aria-label")
    assert page.locator("#paths path.exit:not(.wrong)").count() == 0


def test_a_pinned_token_has_its_whole_path_after_the_next_run(tab):
    page = tab()
    prompt(page, FIRST)
    page.wait_for_selector("#cell .stage .pin")
    page.locator("#cell .stage").last.locator(".pin").nth(3).click()
    page.wait_for_selector("#paths .gaps:text('Run again for the whole path')")
    line = "#paths g.pinned path.path"
    assert page.get_attribute(line, "d").count("L") < 30
    page.click("#run")
    ran(page)
    page.wait_for_selector("#paths .gaps", state="detached")
    assert page.get_attribute(line, "d").count("M") == 1
    assert page.get_attribute(line, "d").count("L") == 30


def test_numbers_keep_three_digits_that_count(tab):
    page = tab()
    shown = {-0.17: "\N{MINUS SIGN}0.17", 0.04: "+0.04", 12.345: "+12.3", 1234.6: "+1235", 0: "0"}
    for value, text in shown.items():
        code = f"import('./words.js').then((words) => words.signed({value}))"
        assert page.evaluate(code) == text


def test_two_prompts_scroll_together(tab):
    page = tab()
    prompt(page, "one two three " * 12)
    page.click("#open-second")
    page.fill("#prompt-1", "four five six " * 12)
    page.click("#run")
    page.wait_for_selector("#grid-1 tbody td")
    ran(page)
    page.evaluate("document.querySelector('[data-grid=\"0\"] .scroll').scrollTop = 200")
    until(page, "document.querySelector('.gridbox[data-grid=\"1\"] .scroll').scrollTop === 200")
    page.click("#close-second")
    page.wait_for_selector("#grid-1", state="hidden")
    assert page.is_visible("#grid-0")


def test_a_long_prompt_has_only_the_rows_in_view_in_the_document(tab):
    page = tab()
    prompt(page, " ".join(f"w{number}" for number in range(400)))
    rows = page.locator("#grid-0 tbody tr[data-row]")
    assert rows.count() < 80
    assert page.get_attribute("#grid-0", "aria-rowcount") == "401"
    # A cell in view: a click that first has to scroll replaces the rows under the pointer.
    page.click("#grid-0 td.chosen")
    until(page, "document.activeElement.dataset.position === '399'")
    page.keyboard.press("Control+Home")
    until(page, "document.activeElement.dataset.position === '0'")
    assert rows.count() < 80
    page.keyboard.press("Control+End")
    until(page, "document.activeElement.dataset.position === '399'")
    assert rows.count() < 80


def test_another_text_selects_its_last_token(tab):
    page = tab()
    prompt(page, FIRST)
    page.click("#grid-0 td[data-layer='18'][data-position='4']")
    page.wait_for_selector("#cell .bar:has-text('position 4')")
    page.click("#run")
    ran(page)
    assert page.get_attribute("td.chosen", "data-position") == "4"
    prompt(page, "one two three four five six seven")
    page.wait_for_selector("#cell .bar:has-text('position 6')")
    assert page.get_attribute("td.chosen", "data-position") == "6"
    assert page.get_attribute("td.chosen", "data-layer") == "18"
    assert page.get_attribute("#grid-0 td[tabindex='0']", "data-position") == "6"


def test_a_link_keeps_its_selection(tab):
    page = tab("p=one+two+three+four&cell=18.1.0")
    ran(page)
    assert page.get_attribute("td.chosen", "data-position") == "1"


def test_heads_of_the_selected_block_show_their_token_pairs(tab):
    page = tab()
    prompt(page, FIRST)
    page.click("#grid-0 td[data-layer='18'][data-position='4']")
    page.click("#open-heads:has-text('block 18')")
    page.wait_for_selector("#head-18-3")
    assert page.locator("#heads [data-head]").count() == 4
    page.click("#head-18-3")
    page.wait_for_selector("#heads .pairs >> nth=1")
    assert page.get_attribute("#head-18-3", "aria-pressed") == "true"
    assert page.locator("#heads .pairs >> nth=0 >> tbody tr").count() == 20
    page.click("#grid-0 td[data-layer='4'][data-position='4']")  # whose scores are not known
    page.click("#head-4-0")
    page.wait_for_selector("#heads .empty:has-text('cannot be verified')")
    assert page.locator("#heads .pairs").count() == 1
    page.click("#grid-0 td[data-layer='2'][data-position='4']")
    page.wait_for_selector("#heads .error:has-text('No single matrix')")


def test_a_vector_shows_its_keys_too(tab):
    page = tab()
    prompt(page, FIRST)
    page.click("#cell .updates tbody button >> nth=0")
    for name in ("Value: what it writes", "Gate key: what it responds to", "Up key"):
        page.wait_for_selector(f"#vector .ends:has-text('{name}')")
    assert page.locator("#vector .ends").count() >= 3
