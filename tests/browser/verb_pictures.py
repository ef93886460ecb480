"""Makes the pictures and figures of the pages on attribution, attention, patching and steering.

    python tests/browser/verb_pictures.py [--out docs]

In: the bundled model. Out: attribution.png, attention.png, patching.png and steering.png, and
what the pages quote in results/: attribution.txt, the direct and the total effect of heads, and
steering.txt, the direction, its texts and its cost.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from browsing import find_chromium
from playwright.sync_api import sync_playwright

import layerleap as ll

TEXT, ANSWER, OTHER = "The capital of France is", " Paris", " London"
CLEAN, CORRUPT = (
    f"When Mary and John went to the store, {giver} gave a drink to" for giver in ("John", "Mary")
)
PAIRS = (  # positive, negative: alike in all else
    ("I love this", "I hate this"),
    ("What a wonderful day", "What a terrible day"),
    ("They won the prize", "They lost everything"),
    ("The food was delicious", "The food was disgusting"),
    ("She is a kind neighbour", "She is a cruel neighbour"),
    ("We had a great time", "We had an awful time"),
    ("The trip was a pleasure", "The trip was a nightmare"),
    ("He is happy with the result", "He is angry with the result"),
    ("The children were laughing", "The children were crying"),
    ("This is the best book of the year", "This is the worst book of the year"),
    ("The show was brilliant", "The show was boring"),
    ("I feel good about it", "I feel bad about it"),
    ("The room was clean and bright", "The room was dirty and dark"),
    ("Everyone enjoyed the party", "Everyone regretted the party"),
    ("The news is excellent", "The news is dreadful"),
    ("They are proud of her", "They are ashamed of her"),
    ("The service was friendly", "The service was rude"),
    ("It is a beautiful song", "It is an ugly song"),
    ("My holiday was perfect", "My holiday was ruined"),
    ("The plan worked well", "The plan failed badly"),
)
PROMPT = "I went to see the new film and"
FACTORS = (-4.0, -2.0, 2.0, 4.0)
ONLY_PICTURES = """chosen => {
  const all = [...document.querySelectorAll('svg')];
  const box = document.createElement('div');
  box.className = 'layerleap';
  box.style.cssText = 'display:flex;flex-wrap:wrap;gap:16px 40px;align-items:flex-start';
  box.append(...chosen.map(number => {
    const picture = document.createElement('div');
    picture.className = 'shapes';
    picture.append(all[number]);
    return picture;
  }));
  document.body.replaceChildren(...document.querySelectorAll('style'), box);
  document.body.style.cssText =
    'margin:0;padding:12px;background:white;width:max-content;max-width:1380px';
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the pictures of the verbs' pages.")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    out = parser.parse_args().out
    if find_chromium() is None:
        sys.exit("no Chromium on this machine; on Debian: apt-get install chromium")
    model = ll.load("smollm2")
    split = ll.attribute(model, TEXT, ANSWER, against=OTHER, by="head")
    photograph([split], out / "attribution.png", [0, 1])
    total = ll.attribute(model, TEXT, ANSWER, against=OTHER, by="head", total=True)
    (out / "results" / "attribution.txt").write_text(f"{total}\n", encoding="utf8")
    looks = [ll.attention(model, TEXT), ll.attention(model, TEXT, block=24, head=4)]
    # The strip; one head, plain and weighted; and induction, the last of the named patterns.
    photograph([*looks, ll.heads(model)], out / "attention.png", [0, 4, 5, -1])
    metric = ll.metrics.logit_difference(" Mary", " John")
    grids = [ll.patch(model, CLEAN, CORRUPT, metric=metric, at=at) for at in ("state", "head")]
    photograph(grids, out / "patching.png", [0, 1])
    direction = ll.direction(model, *map(list, zip(*PAIRS, strict=True)))
    photograph([direction], out / "steering.png", [0])
    (out / "results" / "steering.txt").write_text(steered(model, direction), encoding="utf8")


def photograph(results: Sequence[Any], file: Path, chosen: Sequence[int]) -> None:
    """Some of the pictures of these results, by their number, without the tables."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
        page.set_content("<!doctype html>" + "".join(one._repr_html_() for one in results))
        n = page.locator("svg").count()
        page.evaluate(ONLY_PICTURES, [number % n for number in chosen])
        page.locator("body").screenshot(path=file)
        browser.close()
    sys.stdout.write(f"{file}\n")


def steered(model: Any, direction: ll.Direction) -> str:
    """The direction, what the model writes with it, and what that costs."""
    parts = [str(direction)]
    for factor in FACTORS:
        with model.edit(ll.edits.AddVector(direction.layer, direction, factor)):
            text = ll.generate(model, PROMPT, max_new_tokens=24)
        parts.append(f"factor {factor:g}: {text}")
    parts.append(str(ll.steering_cost(model, direction, factors=[1, 2])))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
