"""The page and the debugger agree: tiny random models instead of the make-believe one."""

import pytest
from browsing import ran

from tiny_models import sentences, tiny

TEXT = "the+cat+sat+on+the+mat"


@pytest.fixture
def opened(tab, own_server):
    """The page of a tiny model."""

    def start(name, fragment="", index=None):
        from layerleap.act.debug.debugger import Debugger

        model = tiny(name)
        debugger = Debugger(model, index=index(model) if index else None)
        return tab(fragment, url=own_server(debugger).url)

    return start


def test_a_decoder_is_searched_edited_and_generated_from(opened, tmp_path):
    from layerleap.lens.vocabulary.build import index as build_index

    def index(model):
        path = tmp_path / "index"
        return build_index(model, path, top=5, text=sentences(20), n_texts=20, progress=False)

    page = opened("llama", f"p={TEXT}&q=cat", index)
    ran(page)
    page.click("#found [data-neuron] >> nth=0")
    page.wait_for_selector("#vector .neighbours li")
    page.wait_for_selector("#vector .ruler")
    page.click("#vector [data-edit]")
    page.click("#run")
    ran(page)
    page.click("#generate")
    page.wait_for_selector(".side.edited.done")
    assert page.locator(".side.plain .piece").count() == 20
    page.wait_for_selector(".updates tbody tr")
    shares = page.locator("#cell .legend .entry").all_inner_texts()
    total = sum(
        float(text.split(": ")[1].split()[0].replace("\N{MINUS SIGN}", "-")) for text in shares
    )
    assert total == pytest.approx(100, abs=2)  # each is rounded
    page.click("#vector [data-cluster]")
    page.wait_for_selector("#found h3:has-text('Cluster')")


def test_a_masked_model_answers_at_its_mask(opened):
    page = opened("bert")
    page.fill("#prompt-0", "the cat sat on ")
    page.locator("#prompt-0").press("End")
    page.click("#insert-mask")
    assert page.input_value("#prompt-0") == "the cat sat on <mask>"
    page.click("#run")
    ran(page)
    assert "<mask>" in page.locator("#grid-0 tbody .token").all_inner_texts()
    assert page.inner_text("#cell .bar .token") == "<mask>", "it is chosen first"
    assert page.is_disabled("#generate")
    assert "not a causal language model" in page.inner_text("#generation")


def test_a_mixture_of_experts_shows_layers_and_says_what_is_missing(opened):
    page = opened("mixtral", f"p={TEXT}")
    ran(page)
    page.wait_for_selector("#cell .stages")
    assert "mixture of experts" in page.inner_text("#cell")


def test_a_parallel_block_has_no_state_between_its_halves(opened):
    page = opened("gpt_neox", f"p={TEXT}")
    ran(page)
    page.wait_for_selector("#cell .stages")
    assert page.locator("#cell .stage h4").all_inner_texts() == ["Before", "After the FFN"]
    assert "so there is no state between them" in page.inner_text("#cell")


def test_a_classifier_shows_its_classes(opened):
    page = opened("bert_text", f"p={TEXT}")
    ran(page)
    assert page.locator("#grid-0 tbody td").last.inner_text().startswith("LABEL_")
    assert page.locator("#colour option").first.inner_text() == "top class"


def test_numbers_that_are_not_finite_are_shown_as_such(opened):
    page = opened("gpt_neox", f"p={TEXT}&edits=L1.N3=1e30&view=after")
    ran(page)
    page.wait_for_selector("#cell .stage .meter")
    assert page.locator("#cell .stage .meter").last.inner_text() == "\N{EN DASH}"
