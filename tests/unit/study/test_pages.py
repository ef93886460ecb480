"""Pages: words and looks of a study, read from a file beside its code."""

import pytest

from layerleap.study.claims import Verdict
from layerleap.study.pages import Page, words
from layerleap.study.result import Finding, Headline
from layerleap.study.tables import P_VALUE

TEXT = """
[study]
name = "norms"
title = "Norms of {model}"
help = "Are states long?"

[[study.about]]
text = "A model of {n_layers} layers."

[[study.about]]
reads = "images"
text = "It sees."

[sections.norms]
title = "How long are states?"

[claims.growing]
text = "Norms grow."
seen = "at {yes} of {n} layers"
why = '''
yes if they
do'''

[claims.everywhere]
text = "Norms grow everywhere."
each = "{name}: {yes} of {n}, not at {no}"
missing = "none was read"
why = "yes if all do"

[claims.large]
text = "Norms are large."
seen = "at {yes} of {n} layers"
why = "yes if all are"

[findings.plain]
text = "{share:%} of {rows:,}, {row:.1f}"

[findings.top]
text = "{row[layer]}"
headline = true

[findings.under]
text = "below"
under = "norms"

[figures.norms]
title = "Norm by layer"
how = "Length."
y = { label = "norm", low = 0 }
marks = [{ axis = "x", at = 1.0 }]
lines.model = { label = "model", like = "logit" }

[tables.norms-table]
caption = "Norms"
columns = ["layer", "p", { key = "value", interval = true, words = { none = "-", true = "yes" } }]
"""
ROW = {"value": 0.5, "low": 0.25, "high": 0.75, "layer": 3}


@pytest.fixture
def page(tmp_path):
    (tmp_path / "page.toml").write_text(TEXT)
    return Page(str(tmp_path / "section.py"))


def test_words_write_rows_with_their_intervals_and_shares_in_percent():
    assert words("{row:.2f} at {row[layer]}", row=ROW) == "0.50 (0.25 to 0.75) at 3"
    assert words("{a:%}, {a:1 %}, {a:.0%}, {n:,}", a=0.381, n=1000) == "38 %, 38.1 %, 38%, 1,000"


def test_a_finding_stands_where_the_file_says(page):
    assert page.say("plain", share=0.5, rows=1000, row=ROW) == "50 % of 1,000, 0.5 (0.2 to 0.8)"
    assert page.say("top", row=ROW) == Headline("3")
    assert isinstance(page.say("top", row=ROW), Headline)
    assert page.say("under") == Finding("below", "norms")


def test_a_claim_gets_its_words_unless_the_test_gives_a_verdict(page):
    claim = page.claim("growing")(lambda _: ("yes", {"yes": 2, "n": 3}))
    assert (claim.text, claim(None)) == (
        "Norms grow.",
        Verdict("yes", "at 2 of 3 layers", "yes if they do"),
    )
    untested = Verdict("not tested", "no rows")
    assert page.claim("growing")(lambda _: untested)(None) == untested
    assert page.each("large", lambda _: [ROW])(None).seen == "at 1 of 1 layers"


def test_a_claim_on_groups_lists_them_and_holds_if_all_do(page):
    def verdict(**groups):
        return page.groups("everywhere", lambda _: groups)(None)

    mixed = verdict(a=["yes", "no"], b=["yes"], empty=[])
    assert (mixed.agrees, mixed.seen) == ("partly", "a: 1 of 2, not at 1; b: 1 of 1, not at 0")
    assert verdict(a=["yes"]).agrees == "yes"
    assert verdict(empty=[]) == Verdict("not tested", "none was read")


def test_figures_tables_and_the_study_take_their_looks_from_the_file(page):
    figure = page.figure("norms", lambda _: [])
    assert (figure.y.label, figure.lines["model"].style) == ("norm", "dashed")
    assert [mark.at for mark in figure.marks(None)] == [1.0]
    layer, p, value = page.table("norms-table", lambda _: []).columns
    assert (layer.key, p) == ("layer", P_VALUE)
    assert (value.low, value.words) == ("low", {None: "-", True: "yes"})
    section = page.section("norms", lambda _: {}, shows=(figure,))
    study = page.study(settings=object, sections=(section,))
    assert (section.title, study.name) == ("How long are states?", "norms")
    result = type("Result", (), {"model": {"n_layers": 4, "reads": "text"}})
    assert list(study.about(result)) == ["A model of 4 layers."]
