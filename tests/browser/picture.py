"""Makes the README's picture of the debugger: `make picture`.

    python tests/browser/picture.py [--model smollm2] [--out docs/debugger.png]

Starts the debugger with its concept index, runs a prompt, searches a concept, sets its first vector
and generates with and without it.
"""

import argparse
import io
import subprocess
import sys
from pathlib import Path

from browsing import WIDE, find_chromium, ran
from PIL import Image
from playwright.sync_api import Page, sync_playwright

VIEW = (
    "p=On+a+quiet+evening+at+home,+when+the+work+is+done,+she+likes+to&q=guitar+music+band&new=24"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Photograph the debugger.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=Path("docs/debugger.png"))
    parser.add_argument("--url", help="of a debugger that runs already")
    options = parser.parse_args()
    if find_chromium() is None:
        sys.exit("no Chromium on this machine; on Debian: apt-get install chromium")
    if options.url:
        photograph(options.url, options.out)
        return
    command = [sys.executable, "-m", "layerleap", "debug", options.model, "--no-browser", "--index"]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as running:
        try:
            photograph(running.stdout.readline().strip(), options.out)
        finally:
            running.terminate()


def photograph(url: str, out: Path) -> None:
    """Open the page, go through the loop once, and save the picture."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport=WIDE, color_scheme="light", reduced_motion="reduce")
        page.set_default_timeout(120_000)
        page.goto(f"{url}#{VIEW}")
        go_through_the_loop(page)
        shot = page.screenshot()
        browser.close()
    out.parent.mkdir(parents=True, exist_ok=True)
    # A third of the size, with the colours of thin lines kept.
    few = Image.open(io.BytesIO(shot)).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
    few.save(out, optimize=True)
    sys.stdout.write(f"{out}\n")


def go_through_the_loop(page: Page) -> None:
    page.fill("#watch", "play")
    page.wait_for_selector("#watch-list li")
    page.press("#watch", "Enter")
    page.click("#run")
    ran(page)
    page.click("#found [data-neuron] >> nth=0")
    page.wait_for_selector("#vector .neighbours li")
    page.click("[data-edit]")
    page.click("#run")
    ran(page)
    page.click("#generate")
    page.wait_for_selector(".side.edited.done")
    page.wait_for_timeout(500)


if __name__ == "__main__":
    main()
