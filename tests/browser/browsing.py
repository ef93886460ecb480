"""What a user does again and again."""

import shutil
import time

FIRST = "The capital of France is Paris, and the capital of Spain is"
WIDE = {"width": 1600, "height": 1000}
NARROW = {"width": 420, "height": 900}


def find_chromium():
    """The path of the system's Chromium, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


def prompt(page, text):
    """Type a prompt, run it and wait for the whole answer."""
    page.fill("#prompt-0", text)
    page.click("#run")
    ran(page)


def ran(page):
    """Wait until the run is over and every cell of the grid is read."""
    page.wait_for_selector("#grid-0 tbody td")
    page.wait_for_selector("#stop", state="hidden")
    until(page, "!document.querySelector('.gridbox.stale, #grid-0 td.waiting')")


def until(page, expression, seconds=30):
    """Wait until JavaScript is true. Playwright's own way needs `eval`, which the page forbids."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(30)
