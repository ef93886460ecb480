"""Searching an index: order against a plain loop, words against tokens, and odd queries."""

import json

import pytest

from concepts import TEXTS, worded
from layerleap.errors import BadSettings
from layerleap.lens.vocabulary.build import index as build_index
from layerleap.lens.vocabulary.index import ConceptIndex
from layerleap.lens.vocabulary.search import find_tokens, split_query

TOP = 12


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> ConceptIndex:
    path = tmp_path_factory.mktemp("search") / "index"
    return build_index(worded(), path, top=TOP, n_texts=0, clusters=4, progress=False)


def tokens_of(index: ConceptIndex, query: str, space: str = "any") -> dict[str, list[str]]:
    with index.file.reading() as connection:
        found = find_tokens(connection, query, space).tokens  # type: ignore[arg-type]
    return {word: [TEXTS[id_] for id_ in ids] for word, ids in found.items()}


def plain_ranking(
    index: ConceptIndex, words: list[set[int]], sides: tuple[str, ...]
) -> list[tuple]:
    """(score, vector, side) of every vector, by loops."""
    ranked = []
    for entry in index.blocks:
        for neuron in range(entry.n_neurons):
            vector = index.vector(entry.block, neuron)
            best = (0, 0, "")
            for side in sides:
                end = vector.promotes if side == "promoted" else vector.suppresses
                ids = [one.token.id for one in end]
                close = [
                    [TOP - rank for rank, id_ in enumerate(ids) if id_ in word] for word in words
                ]
                score = sum(TOP + max(hits) for hits in close if hits)
                total = sum(sum(hits) for hits in close)
                if (score, total) > best[:2]:
                    best = (score, total, side)
            if best[0]:
                ranked.append((*best, entry.block, neuron))
    return sorted(ranked, key=lambda row: (-row[0], -row[1], *row[3:]))


@pytest.mark.parametrize("side", ["both", "promoted", "suppressed"])
@pytest.mark.parametrize("query", ["guitar", "guitar music", "music, band; caf\u00e9 over"])
def test_the_order_is_that_of_a_plain_loop(index, query, side):
    words = {
        word: {TEXTS.index(text) for text in texts}
        for word, texts in tokens_of(index, query).items()
    }
    sides = ("promoted", "suppressed") if side == "both" else (side,)
    expected = plain_ranking(index, list(words.values()), sides)
    matches = index.search(query, top=1000, side=side)
    assert len(matches) == len(expected) > 10
    assert [match.score for match in matches] == pytest.approx(
        [row[0] / (2 * TOP * len(words)) for row in expected], abs=1e-6
    )
    found = [(match.side, match.block, match.neuron) for match in matches]
    assert found == [tuple(row[2:]) for row in expected]


def test_more_words_come_before_better_places(index):
    matches = index.search("guitar music", top=1000)
    wanted = {
        text: word for word, texts in tokens_of(index, "guitar music").items() for text in texts
    }
    counts = [len({wanted[token.text] for token in match.matched}) for match in matches]
    assert counts == sorted(counts, reverse=True)
    assert {1, 2} == set(counts)
    assert all(0 < match.score <= 1 for match in matches)


def test_the_matched_tokens_are_on_the_side_that_is_named(index):
    for match in index.search("guitar band", top=50):
        end = match.promotes if match.side == "promoted" else match.suppresses
        vector = index.vector(match.block, match.neuron)
        whole = vector.promotes if match.side == "promoted" else vector.suppresses
        ids = [one.token.id for one in whole]
        assert [ids.index(token.id) for token in match.matched] == sorted(
            ids.index(token.id) for token in match.matched
        )
        assert [token.id for token in end] == ids[:10]


@pytest.mark.parametrize(
    ("query", "space", "expected"),
    [
        ("guitar", "any", [" guitar", "guitar", " Guitar", ".guitar"]),
        ("GUITAR", "any", [" guitar", "guitar", " Guitar", ".guitar"]),
        ("guitar", "with", [" guitar", " Guitar"]),
        ("guitar", "without", ["guitar", ".guitar"]),
        ("guitar*", "any", [" guitar", "guitar", " Guitar", " guitars", ".guitar"]),
        ("cafe", "any", [" caf\u00e9", " cafe"]),
        ("caf\u00c9", "any", [" caf\u00e9", " cafe"]),
        ("uber", "any", [" \u00fcber"]),
        ("->", "any", ["->", " ->"]),
        ("->", "with", [" ->"]),
        ("\u5409\u4ed6", "any", ["\u5409\u4ed6"]),
        ("10", "any", [" 10"]),
        ("b", "any", ["<b>"]),
    ],
)
def test_words_match_tokens_whatever_the_case_accents_and_space(index, query, space, expected):
    assert tokens_of(index, query, space)[query] == expected


def test_special_tokens_are_not_words(index):
    assert tokens_of(index, "pad") == {}
    assert index.search("pad").missing == ["pad"]


def test_a_word_that_is_no_token_is_searched_by_its_beginning_and_the_result_says_so(index):
    matches = index.search("electronics")
    assert matches.pieces == {"electronics": "electro"}
    assert {token.text for match in matches for token in match.matched} == {" electro"}
    assert matches.notes == [
        "'electronics' is not a token of this model; searched for 'electro' instead, which gives "
        "partial matches, ranked last."
    ]
    assert all(match.partial and match.score <= 0.5 for match in matches)
    assert index.search("don't").pieces == {"don't": "don"}


def test_a_word_without_any_token_is_named_and_the_others_are_searched(index):
    matches = index.search("xylophone music")
    assert matches.missing == ["xylophone"]
    assert matches.notes == ["no token of this model begins a word with 'xylophone'."]
    assert [(m.name, m.score) for m in matches] == [
        (m.name, m.score) for m in index.search("music")
    ]
    nothing = index.search("xylophone")
    assert (list(nothing), nothing.missing) == ([], ["xylophone"])
    assert nothing.to_pandas().columns.tolist()[:2] == ["block", "neuron"]
    assert "no neuron" in nothing._repr_html_()


@pytest.mark.parametrize("query", ["", "   ", "\n\t"])
def test_an_empty_query_is_refused(index, query):
    with pytest.raises(BadSettings, match="the query is empty"):
        index.search(query)


@pytest.mark.parametrize("query", [" ".join(f"w{n}" for n in range(33)), "x" * 65])
def test_a_huge_query_is_refused(index, query):
    with pytest.raises(BadSettings, match="expected at most 32 words of 64 characters"):
        index.search(query)


@pytest.mark.parametrize(
    "query",
    [
        '"',
        "'",
        '""',
        "*",
        "**",
        "AND",
        "OR guitar",
        "NOT",
        "NEAR(guitar, 2)",
        "text:guitar",
        "^guitar",
        "guitar +",
        "-",
        "--",
        "(",
        ")",
        "a\0b",
        "\0",
        "\ud800",
        "%",
        "_",
        "__",
        "\\",
        ";",
        ",",
        "{}",
        "+*",
        "guitar\u200b",
        "\u0301",
        "1e9",
        "music'); DROP TABLE vectors; --",
    ],
)
def test_no_sign_of_a_query_is_taken_for_an_operator(index, query):
    matches = index.search(query)
    json.dumps(matches.to_dict(), allow_nan=False)
    assert index.search("guitar")  # the file is as it was


def test_words_count_once_whatever_their_case():
    assert split_query("Guitar guitar,music  MUSIC; band") == ["Guitar", "music", "band"]
    assert split_query(",") == [","]


def test_bad_choices_are_refused(index):
    for given in ({"side": "up"}, {"space": "maybe"}, {"top": 0}):
        with pytest.raises(BadSettings, match=next(iter(given))):
            index.search("guitar", **given)


def test_results_show_themselves(index):
    matches = index.search("guitar <b>", top=4)
    frame = matches.to_pandas()
    assert frame["block"].tolist() == [match.block for match in matches]
    assert set(frame["side"]) <= {"promoted", "suppressed"}
    assert matches.to_dict()["results"][0]["matched"][0].keys() == {"id", "text", "label", "kind"}
    page = matches._repr_html_()
    assert "<b>\u2423guitar</b>" in page or "guitar</b>" in page
    assert "&lt;b&gt;" in page
    assert repr(matches).startswith("Matches('guitar <b>': 4 neurons: L")
    shown = [line for line in str(matches).splitlines() if line.split()[:1] != []]
    names = [line.split()[0] for line in shown if line.startswith("L")]
    assert names == [match.name for match in matches]


def test_a_mistyped_word_brings_the_token_that_was_meant(index):
    matches = index.search("guittar")
    assert matches.meant["guittar"][0].strip().casefold() == "guitar"
    assert "did you mean" in " ".join(matches.notes)
    assert index.search("guitar").meant == {}


def test_beginnings_of_words_never_come_before_a_whole_word(index):
    matches = index.search("electronics don't guitar", top=1000)
    partial = [match.partial for match in matches]
    assert partial == sorted(partial)
    assert True in partial
    assert False in partial
    assert [match.score for match in matches] == sorted((m.score for m in matches), reverse=True)
    whole = {(m.block, m.neuron) for m in index.search("guitar", top=1000)}
    assert {(m.block, m.neuron) for m in matches if not m.partial} == whole
