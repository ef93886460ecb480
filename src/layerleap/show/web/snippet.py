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
            should be: `prompt`, `ids`, `second`, `second_ids`, `lens`, `edits`, `watch`, `pinned`,
            `selected`, `vector`, `query`, `side`, `space` and `new_tokens`.
    """
    made_with = {key: model.get(key) for key in ("name", "class", "fingerprint")}
    whole = {"format": 1, "layerleap": layerleap.__version__, "model": made_with, "state": state}
    return {"json": whole, "python": snippet(model, state)}


def snippet(model: dict[str, Any], state: dict[str, Any]) -> str:
    """Python for what the page shows. All that is taken from the state is written as a literal."""
    edits = _list(state.get("edits"), str)
    prompts = _prompts(state)
    head = HEAD.format(version=layerleap.__version__, fingerprint=model["fingerprint"])
    lines = [head, _load(model), *prompts.values(), _bank(model, state), ""]
    if edits:
        lines += [f"edits = [ll.edits.parse_edit(edit) for edit in {edits!a}]", ""]
    for name in prompts:
        lines += _grid(name, bool(edits))
    cell = _cell(state, list(prompts))
    lines += cell
    if edits and cell:
        lines += ["with model.edit(*edits):", *(f"    {line}" for line in cell)]
    lines += ["", *_concepts(model, state)]
    if model.get("can_generate"):
        lines += _generation(state, bool(edits))
    return "\n".join(lines) + "\n"


def _load(model: dict[str, Any]) -> str:
    """A model that was made in memory is called by its class, which cannot be loaded."""
    if model["name"] == model.get("class"):
        return (
            "model = ll.load(my_model, tokenizer=my_tokenizer)  # it was made in memory: build it "
            "here first"
        )
    return f"model = ll.load({model['name']!a})"


def _prompts(state: dict[str, Any]) -> dict[str, str]:
    """By name, the line that defines each; ids, as text cut into tokens again may give others."""
    lines = {}
    for name, ids_key in (("prompt", "ids"), ("second", "second_ids")):
        text, ids = state.get(name), _list(state.get(ids_key), int)
        text = text if isinstance(text, str) else ""
        if name == "prompt" or text:
            lines[name] = f"{name} = {ids}  # {text!a}" if ids else f"{name} = {text!a}"
    return lines


def _bank(model: dict[str, Any], state: dict[str, Any]) -> str:
    """The bank of the page's lens: the numbers of another one would be others."""
    if state.get("lens", "logit") == "logit":
        return "bank = None  # the logit lens"
    source = model.get("bank")
    if source == "default":
        return "bank = ll.default_bank(model)"
    if source is None:
        return "bank = my_bank  # the page's was made in memory: fit or load it here first"
    return f"bank = ll.ShortcutBank.from_pretrained({source!a})"


def _grid(name: str, is_edited: bool) -> list[str]:
    """What every layer says of one prompt, and where it settles; what edits change."""
    lines = [
        f"print(ll.Lens(model, bank).read({name}).to_pandas())  # what every layer says",
        f"print(ll.Lens(model, bank).saturation({name}).to_pandas())  # from where on it stays",
    ]
    if is_edited:
        lines += [
            f"effect = ll.effect(model, {name}, edits, bank=bank)  # what they change, and where",
            "print(effect.to_pandas())",
        ]
    return lines


def _cell(state: dict[str, Any], prompts: list[str]) -> list[str]:
    """The selected cell: the neurons at work, the watched token, and the paths of pinned ones."""
    layer, position, grid = _values(state.get("selected"), "layer", "position", "grid")
    if type(layer) is not int or type(position) is not int:
        return []
    name = prompts[-1] if grid == 1 else prompts[0]
    watch = _token(state.get("watch"))
    lines = []
    if layer >= 1:
        where = f"{name}, {position}, blocks=[{layer}]"
        where += f", watch={watch}" if watch is not None else ""
        lines.append(f"print(ll.neurons(model, bank=bank).dominant({where}).to_pandas())")
    pinned = state.get("pinned")
    tokens = [watch, *map(_token, pinned if isinstance(pinned, list) else [])]
    if followed := list(dict.fromkeys(token for token in tokens if token is not None)):
        lines += [
            f"states = model.capture({name}).states  # the paths of tokens over the layers",
            "lens = ll.Lens(model, bank)",
            f"rows = [lens.logits(h[0, {position}][None], layer) for layer, h in states.items()]",
            f"print([row[0].softmax(-1)[{followed}].tolist() for row in rows])",
        ]
    return lines


def _concepts(model: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """The vector that is open, and the search."""
    lines = []
    query = state.get("query")
    block, neuron = _values(state.get("vector"), "block", "neuron")
    is_ready = bool(model.get("index", {}).get("ready"))
    if type(block) is int and type(neuron) is int:
        name = f"L{block}.N{neuron}"
        lines.append(f'print(ll.weights(model).read("{name}").to_pandas())  # value and keys')
        if is_ready:
            lines.append(f"print(ll.index(model).vector({block}, {neuron}).range)")
            lines.append(f"print(ll.index(model).neighbours({block}, {neuron}, top=8))")
    if is_ready and isinstance(query, str) and query.strip():
        options = "".join(
            f", {key}={value!a}"
            for key in ("side", "space")
            if isinstance(value := state.get(key), str)
        )
        lines.append(f"print(ll.search(model, {query!a}, top=30{options}).to_pandas())")
    return lines


def _generation(state: dict[str, Any], is_edited: bool) -> list[str]:
    count = state.get("new_tokens")
    count = count if type(count) is int and count > 0 else 20
    return [
        f'print(ll.generate(model, prompt{side}, decoder="transformers", max_new_tokens={count}))'
        for side in ("", ", edits=edits")[: 1 + is_edited]
    ]


def _token(value: Any) -> int | None:
    """The id of a token of the page, if it is one."""
    [token] = _values(value, "id")
    return token if type(token) is int else None


def _values(value: Any, *keys: str) -> list[Any]:
    """What a dictionary has under these keys; None for all of them if it is something else."""
    return [value.get(key) if isinstance(value, dict) else None for key in keys]


def _list(value: Any, kind: type) -> list[Any]:
    """The value, if it is a list of such things."""
    is_fine = isinstance(value, list) and all(type(item) is kind for item in value)
    return value if is_fine else []
