"""Checks of what was typed that need no model, made before anything slow is loaded.

In: the options of a command, each with the checks in its annotation, and their values.
Out: nothing, or an error in one line.

An option says how it is checked where it is declared: `Annotated[str, Option(...), text]`, and
`grouped` runs the checks of every command. They call the functions that validate later, too; what
only the loaded model can tell is left to those. No torch is imported here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from layerleap.errors import BadSettings, check_choice
from layerleap.extras import need
from layerleap.files import check_writable
from layerleap.models.facts import ModelFacts, facts_of

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass
class Arguments:
    """The values of a command by parameter, and what is known of its models."""

    values: Mapping[str, Any]
    models: list[ModelFacts] = field(default_factory=list)

    @property
    def model(self) -> ModelFacts:
        """The facts of the first model; nothing is known if there is none."""
        return self.models[0] if self.models else ModelFacts("")


@dataclass(frozen=True)
class Check:
    """How an option is checked; part of its annotation. Options left out are not checked."""

    run: Callable[[Any, Arguments], None]

    def __call__(self, value: Any, arguments: Arguments) -> None:
        """Raise an error in one line if the value cannot be used."""
        self.run(value, arguments)


def run_checks(kinds: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Run the checks of all parameters; those of models come first."""
    arguments = Arguments(values)
    checks = [
        (check, values.get(name))
        for name, kind in kinds.items()
        if get_origin(kind) is not None
        for check in get_args(kind)
        if isinstance(check, Check)
    ]
    for check, value in sorted(checks, key=lambda pair: pair[0] is not model):
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                check(item, arguments)


@Check
def model(name: str, arguments: Arguments) -> None:
    """The model is there; its configuration is kept for the other checks."""
    arguments.models.append(facts_of(name, arguments.values.get("revision")))


@Check
def text(source: str, arguments: Arguments) -> None:
    """The text, images or recordings are there, and their first record can be read."""
    from layerleap.stream.places import CHECKS

    if source != "generated":
        CHECKS[arguments.model.reads](source, arguments.values.get("field", "text"))


@Check
def task(source: str, arguments: Arguments) -> None:
    """The task is bundled, or its file is there and can be read."""
    from layerleap.stream.tasks.load import load, parse_labels

    labels = arguments.values.get("labels")
    how = {key: arguments.values.get(key) for key in ("template", "field", "label")}
    words = None if labels is None else parse_labels(labels)
    for name in filter(None, source.split(",")):
        load(name, labels=words, **{k: v for k, v in how.items() if v is not None})


@Check
def bank(name: str, arguments: Arguments) -> None:
    """The bank is there, and its card says that it belongs to a model of this shape."""
    from layerleap.maps.artifact import BANK

    if name != "default":
        _, card = BANK.read(name)
        BANK.check_shape(card, arguments.model)


@Check
def edit(spec: str, arguments: Arguments) -> None:
    """The edit can be read, and its block, neuron or head, or its layer and file, exist."""
    from layerleap.act.spelling import read_edit

    typed = read_edit(spec)
    if typed.kind != "state":
        part = {} if typed.kind == "site" else {typed.kind: typed.name}
        arguments.model.check_part(typed.block, **part)
        return
    arguments.model.check_layer(typed.block)
    if not Path(typed.name).is_file():
        raise BadSettings(
            f"{typed.name} is not a file; expected a direction, saved by `layerleap direction`"
        )


@Check
def address(name: str, arguments: Arguments) -> None:
    """The parameter's name can be read, and its block, neuron or head exists."""
    from layerleap.lens.vocabulary.addresses import parse_address

    place = parse_address(name)
    arguments.model.check_part(place.block, neuron=place.neuron, head=place.head)


@Check
def exit_rule(text: str, arguments: Arguments) -> None:
    """The rule is known and has its number, or the plan is there and fits the model."""
    from layerleap.act.spelling import read_plan, read_rule

    if not text.endswith(".json"):
        read_rule(text)
        return
    plan = read_plan(text)
    for layer in plan["layers"]:
        arguments.model.check_layer(layer)
    if plan["bank"] is not None:
        bank(plan["bank"], arguments)


@Check
def checked_layers(text: str, arguments: Arguments) -> None:
    """The layers are numbers, and exist."""
    from layerleap.act.spelling import read_layers

    for layer in read_layers(text):
        arguments.model.check_layer(layer)


@Check
def index(file: Path, arguments: Arguments) -> None:
    """The file is a finished concept index."""
    from layerleap.lens.vocabulary.store import read_about

    read_about(file)


@Check
def index_target(file: Path, arguments: Arguments) -> None:
    """The file can be written, and no other process is building it."""
    from layerleap.lens.vocabulary.store import check_not_building

    check_writable(file)
    check_not_building(file)


@Check
def query(words: str, arguments: Arguments) -> None:
    """There are words, and not too many."""
    from layerleap.lens.vocabulary.index_settings import split_query

    split_query(words)


@Check
def target_file(file: Path, arguments: Arguments) -> None:
    """The file can be written."""
    check_writable(file)


@Check
def bank_folder(folder: Path, arguments: Arguments) -> None:
    """A bank can be written there; one that is there already only makes way for --force."""
    from layerleap.maps.artifact import BANK, already_there

    if arguments.values.get("shard") is None:
        BANK.check_target(folder, replace=arguments.values["force"])
        return
    check_writable(folder)
    if folder.exists() and not arguments.values["force"]:
        raise already_there(folder, "file of statistics")


@Check
def model_folder(folder: Path, arguments: Arguments) -> None:
    """A fine-tuned model can be written there."""
    from layerleap.maps.artifact import TUNED_MODEL

    TUNED_MODEL.check_target(folder, replace=arguments.values["force"])


def report_folder(name: str, what: str) -> Check:
    """A report can be written there; `name` is the file that every one of them has."""

    @Check
    def check(folder: Path, arguments: Arguments) -> None:
        from layerleap.maps.artifact import already_there

        check_writable(folder, "folder")
        if (folder / name).is_file() and not arguments.values["force"]:
            raise already_there(folder, what)

    return check


@Check
def shard(text: str, arguments: Arguments) -> None:
    """The part exists."""
    from layerleap.stream.sampling import read_shard

    read_shard(text)


@Check
def solving(value: Any, arguments: Arguments) -> None:
    """Ridge and rank are possible for a model of this width."""
    from layerleap.maps.map_settings import check_solving, read_ridge

    ridge, rank = arguments.values.get("ridge"), arguments.values.get("rank")
    check_solving(None if ridge is None else read_ridge(ridge), rank, arguments.model.d_model)


def choice(noun: str, choices: Any) -> Check:
    """The value is one of these: a `Literal` or names."""
    return Check(lambda value, _: check_choice(value, choices, noun))


def share(noun: str) -> Check:
    """The number is a share of something: above 0 and below 1."""

    @Check
    def check(value: str | float, _: Arguments) -> None:
        try:
            number = float(value)
        except ValueError:
            return  # the parser of options refuses it
        if not 0 < number < 1:
            raise BadSettings(f"{noun} is {number}; expected a share between 0 and 1")

    return check


def at_least(noun: str, least: int) -> Check:
    """The number is not below `least`."""

    @Check
    def check(value: float, _: Arguments) -> None:
        if value < least:
            raise BadSettings(f"{noun} is {value}; expected {least} or more")

    return check


def extras(extra: str, *libraries: str) -> Check:
    """The optional libraries that this option needs are installed."""

    @Check
    def check(value: Any, _: Arguments) -> None:
        for name in libraries if value else ():
            need(name, extra)

    return check
