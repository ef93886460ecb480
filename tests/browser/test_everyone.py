"""Keyboard, screen readers, small windows, both themes."""

import pytest
from browsing import FIRST, NARROW, WIDE, prompt, ran, until


def focused(page, what="id"):
    return page.evaluate(f"document.activeElement.{what}")


def test_everything_works_by_keyboard_alone(tab):
    page = tab()
    for _ in range(30):
        page.keyboard.press("Tab")
        if focused(page) == "prompt-0":
            break
    page.keyboard.type(FIRST)
    page.keyboard.press("Enter")
    ran(page)
    page.keyboard.press("Escape")
    assert (focused(page, "dataset.layer"), focused(page, "dataset.position")) == ("30", "12")
    for key in ("ArrowLeft", "ArrowLeft", "ArrowUp"):
        page.keyboard.press(key)
    assert (focused(page, "dataset.layer"), focused(page, "dataset.position")) == ("26", "11")
    page.keyboard.press("Enter")
    page.wait_for_selector("#cell h2:text('Block 26 of 30')")
    page.wait_for_selector(".updates")
    page.keyboard.press("Home")
    assert focused(page, "dataset.layer") == "0"
    for _ in range(60):
        page.keyboard.press("Tab")
        if focused(page).startswith("update-"):
            break
    update = focused(page)
    page.keyboard.press("Enter")
    page.wait_for_selector("#vector .ends li")
    until(page, "document.activeElement.id === 'vector'")
    page.keyboard.press("Escape")
    until(page, f"document.activeElement.id === '{update}'")
    page.keyboard.press("/")
    assert focused(page) == "query"
    page.keyboard.type("guitar")
    page.wait_for_selector("#found [data-neuron]")
    page.keyboard.press("Escape")
    page.keyboard.press("e")
    assert focused(page) == "edit-spec"
    page.keyboard.type("L12.N34=5")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    page.keyboard.press("r")
    ran(page)
    page.keyboard.press("g")
    page.wait_for_selector(".side.edited.done")
    page.keyboard.press("?")
    page.wait_for_selector("#help[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#help[open]", state="hidden")


def test_the_keyboard_keeps_its_place(tab):
    page = tab(f"p={FIRST}")
    ran(page)
    page.wait_for_selector("#cell .updates")
    page.focus("#grid-0 td[tabindex='0']")
    page.keyboard.press("n")
    assert focused(page) == page.get_attribute(".updates tbody button >> nth=0", "id")
    for place in ("#cell .stage:last-child", "#paths"):
        pin = page.locator(f"{place} [data-pin]").nth(1)
        token = pin.get_attribute("data-pin")
        pin.focus()
        for pressed in ("true", "false"):
            page.keyboard.press("Enter")
            chosen = f"{place} [data-pin='{token}'][aria-pressed='{pressed}']"
            until(page, f"document.querySelector({chosen!r})")
            assert focused(page, "dataset.pin") == token
            assert page.evaluate(f"!!document.activeElement.closest({place!r})")
    page.keyboard.press("?")
    assert "first neuron" in page.inner_text("#help")


def test_focus_is_visible_wherever_it_goes(tab):
    page = tab("p=one+two")
    ran(page)
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        outline, name = page.evaluate(
            "(() => { const e = document.activeElement; const s = getComputedStyle("
            "e.matches('.switch input') ? e.nextElementSibling : e);"
            "return [s.outlineStyle, e.id || e.className || e.tagName] })()"
        )
        if name == "BODY":
            break
        seen.add(name)
        assert outline != "none", name
    assert len(seen) > 15


def test_a_columns_width_follows_the_arrow_keys_and_is_kept(tab):
    page = tab()
    page.focus("#split-right")
    before = page.locator("#right").bounding_box()["width"]
    page.keyboard.press("ArrowLeft")
    assert page.locator("#right").bounding_box()["width"] == before + 16
    page.reload()
    assert page.locator("#right").bounding_box()["width"] == before + 16


def test_a_narrow_window_needs_no_sideways_scrolling(tab):
    page = tab("edits=L12.N34=5&vector=12.34", size=NARROW)
    prompt(page, FIRST)
    page.click("#generate")
    page.wait_for_selector(".side.edited.done")
    page.wait_for_selector(".updates")
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    heads = page.locator("#grid-0 thead th").all_inner_texts()
    assert heads[-1] == "30"
    assert len(heads) < 10
    assert "layer" in page.inner_text("#stride")


def test_a_neurons_name_leaves_the_other_columns_in_their_place(tab):
    page = tab(f"p={FIRST}")
    ran(page)
    page.wait_for_selector(".updates tbody button")
    for width in (390, 1001, 1400):
        page.set_viewport_size({"width": width, "height": 900})
        for name in ("capitalcities", "W" * 13, "a very long name of many words"):
            page.evaluate(RENAME, name)
            page.wait_for_selector(f".updates .given[title='{name}']")
            edge = right(page.locator("#cell"))
            assert all(right(each) <= edge + 0.5 for each in page.locator("[data-off]").all())
            row = page.locator(".updates tbody tr").first
            cells = row.locator("th, td").all()
            left = [cell.bounding_box()["x"] for cell in cells]
            assert right(row.locator(".given")) <= left[1] + 0.5
            assert all(
                right(cell) <= next_ + 0.5 for cell, next_ in zip(cells[:-1], left[1:], strict=True)
            )


def test_rank_marks_never_touch_the_percentages(tab):
    page = tab(f"p={FIRST}")
    ran(page)
    page.wait_for_selector(".stage .moved")
    page.evaluate(JUMP)
    page.wait_for_selector(".moved:text('▼40k')")
    for width in (390, 1400):
        page.set_viewport_size({"width": width, "height": 900})
        gaps = page.evaluate(
            """[...document.querySelectorAll('.stage .numbers')].flatMap((each) => {
              const mark = each.querySelector('.moved');
              if (!mark) return [];
              const range = document.createRange();
              range.selectNodeContents(mark);
              const share = each.querySelector('.meter .number').getBoundingClientRect();
              return [range.getBoundingClientRect().left - share.right];
            })"""
        )
        assert len(gaps) > 5
        assert min(gaps) >= 2


RENAME = """name => import('./state.js').then(({ now, set }) => {
  now().cell.reading.updates[0].name = name;
  set({ cell: { ...now().cell } });
})"""
JUMP = """() => import('./state.js').then(({ now, set }) => {
  for (const { top } of now().cell.reading.stages)
    top.forEach((guess, index) => { guess.climbed = [-40321, 999, -12345][index % 3]; });
  set({ cell: { ...now().cell } });
})"""


def right(part):
    box = part.bounding_box()
    return box["x"] + box["width"]


@pytest.mark.parametrize("width", [600, 800, 1000, 1001, 1400])
def test_the_paths_keep_their_height(tab, width):
    page = tab(f"p={FIRST}&edits=L12.N34=5", size={"width": width, "height": 900})
    ran(page)
    size = "document.querySelector('#paths svg').getBoundingClientRect().height"
    before = page.evaluate(size)
    page.wait_for_timeout(400)
    assert page.evaluate(size) == before < 260
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_labels_of_the_paths_are_above_the_curves(tab):
    page = tab(f"p={FIRST}&edits=L12.N34=5", size={"width": 1400, "height": 900})
    ran(page)
    lowest, highest = page.evaluate(
        """(() => {
          const svg = document.querySelector('#paths svg');
          const edges = (selector, edge) =>
            [...svg.querySelectorAll(selector)].map(each => each.getBoundingClientRect()[edge]);
          return [Math.max(...edges('text.settled, text.exit', 'bottom')),
                  Math.min(...edges('.rule', 'top'))];
        })()"""
    )
    assert page.locator("#paths text.settled, #paths text.exit").count() == 3
    assert lowest < highest


def test_the_theme_can_be_switched_and_is_kept(tab):
    page = tab(scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(17, 23, 29)"
    page.click("#theme")
    assert page.evaluate(background) == "rgb(245, 247, 249)"
    page.reload()
    assert page.evaluate(background) == "rgb(245, 247, 249)"
    assert page.get_attribute("#theme", "aria-label") == "Colours: light"


def test_the_tour_shows_every_part_and_ends(tab):
    page = tab()
    page.click("[data-tour]")
    for stop in range(1, 7):
        page.wait_for_selector(f"#tour :text('{stop} of 6')")
        assert page.locator(".tour-target").count() == 1
        page.click("#tour .primary")
    assert page.is_hidden("#tour")
    assert page.locator(".tour-target").count() == 0


VIEW = "p=one+two+%E2%82%AC&edits=L12.N34=5;!L2.N3*2&vector=12.34&q=guitar&layers="


@pytest.mark.parametrize(("scheme", "size"), [("light", WIDE), ("dark", WIDE), ("dark", NARROW)])
def test_no_accessibility_rule_is_broken(tab, axe, scheme, size):
    page = tab(VIEW, scheme=scheme, size=size)
    ran(page)
    page.click("#generate")
    page.wait_for_selector(".side.edited.done")
    page.wait_for_selector("#vector .neighbours li")
    page.wait_for_selector("#cell .updates")
    assert broken(axe, page) == []


def test_no_accessibility_rule_is_broken_by_other_states(tab, axe):
    page = tab()
    assert broken(axe, page) == []
    for name in ("sessions", "export", "help"):
        page.click(f"#open-{name}")
        page.wait_for_selector(f"#{name}[open]")
        assert broken(axe, page, f"#{name}") == []
        page.keyboard.press("Escape")
    prompt(page, "one two")
    page.fill("#edit-spec", "L12.N34=5")
    page.press("#edit-spec", "Enter")
    page.click("#run")
    ran(page)
    page.click("[data-view=difference]")
    page.click("#start-tour")
    assert broken(axe, page) == []


@pytest.fixture
def axe():
    return pytest.importorskip("axe_playwright_python.sync_playwright").Axe()


def broken(axe, page, part=None):
    """Rules that the page breaks, with the places where it does."""
    found = axe.run(page, context=part).response["violations"]
    return [(rule["id"], [node["html"][:150] for node in rule["nodes"][:4]]) for rule in found]
