"""A session written down: its state with what it was made with, and Python that reproduces it."""

from typing import Any

import layerleap

HEAD = '''"""Made by layerleap {version}; the model's fingerprint was {fingerprint}."""

import layerleap as ll
'''


def exported(model: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """`json` for programs and `python` for people.

    Args:
        model: as the page knows it.
        state: the page's. Only these of its keys matter here, and only if they are what they
            should be: `ids`, `prompt`, `lens`, `edits`, `watch`, `selected` and `new_tokens`.
    """
    made_with = {key: model.get(key) for key in ("name", "class", "fingerprint")}
    whole = {"format": 1, "layerleap": layerleap.__version__, "model": made_with, "state": state}
    return {"json": whole, "python": snippet(model, state)}


def snippet(model: dict[str, Any], state: dict[str, Any]) -> str:
    """Python for what the page shows. All that is taken from the state is written as a literal."""
    edits = _list(state.get("edits"), str)
    head = HEAD.format(version=layerleap.__version__, fingerprint=model["fingerprint"])
    dominant = _dominant(state)
    lines = [head, _load(model), _prompt(state), _bank(model, state), ""]
    lines.append("print(ll.Lens(model, bank).read(prompt).to_pandas())  # what every layer says")
    lines += dominant
    if edits:
        lines += [
            "",
            f"edits = [ll.edits.parse_edit(edit) for edit in {edits!a}]",
            "effect = ll.effect(model, prompt, edits, bank=bank)  # what they change, and where",
            "print(effect.to_pandas())",
        ]
        if dominant:
            lines += ["with model.edit(*edits):", *(f"    {line}" for line in dominant)]
    if model.get("can_generate"):
        lines += ["", *_generation(state, bool(edits))]
    return "\n".join(lines) + "\n"


def _load(model: dict[str, Any]) -> str:
    """A model that was made in memory is called by its class, which cannot be loaded."""
    if model["name"] == model.get("class"):
        return (
            "model = ll.load(my_model, tokenizer=my_tokenizer)  # it was made in memory: build it "
            "here first"
        )
    return f"model = ll.load({model['name']!a})"


def _prompt(state: dict[str, Any]) -> str:
    """Ids rather than text: text cut into tokens again may give other ones."""
    text, ids = state.get("prompt"), _list(state.get("ids"), int)
    text = text if isinstance(text, str) else ""
    return f"prompt = {ids}  # {text!a}" if ids else f"prompt = {text!a}"


def _bank(model: dict[str, Any], state: dict[str, Any]) -> str:
    """The bank of the page's lens: the numbers of another one would be others."""
    if state.get("lens") not in ("mat", "tuned"):
        return "bank = None  # the logit lens"
    source = model.get("bank")
    if source == "default":
        return "bank = ll.default_bank(model)"
    if source is None:
        return "bank = my_bank  # the page's was made in memory: fit or load it here first"
    return f"bank = ll.ShortcutBank.from_pretrained({source!a})"


def _dominant(state: dict[str, Any]) -> list[str]:
    """The neurons at work in the selected cell, and the watched token in its stages."""
    chosen, watched = state.get("selected"), state.get("watch")
    place = chosen if isinstance(chosen, dict) else {}
    layer, position = place.get("layer"), place.get("position")
    if type(layer) is not int or type(position) is not int or layer < 1:
        return []
    watch = watched.get("id") if isinstance(watched, dict) else None
    where = f"prompt, {position}, blocks=[{layer}]"
    where += f", watch={watch}" if type(watch) is int else ""
    return [f"print(ll.neurons(model, bank=bank).dominant({where}).to_pandas())"]


def _generation(state: dict[str, Any], is_edited: bool) -> list[str]:
    given = state.get("new_tokens")
    count = given if type(given) is int and given > 0 else 20
    sides = ["", ", edits=edits"] if is_edited else [""]
    return [
        f'print(ll.generate(model, prompt{side}, decoder="transformers", max_new_tokens={count}))'
        for side in sides
    ]


def _list(value: Any, kind: type) -> list[Any]:
    """The value, if it is a list of such things."""
    is_fine = isinstance(value, list) and all(type(each) is kind for each in value)
    return list(value) if is_fine else []
