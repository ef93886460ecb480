"""The kinds of maps, by name: what a bank can load, and what lenses are called.

A kind in the package has a line at the end of this file. One from outside calls `register_kind`.
"""

from collections.abc import Iterable

from layerleap.errors import BadSettings, check_choice
from layerleap.maps.linear import LinearMap, LowRankMap, TunedMap
from layerleap.maps.map import IdentityMap, Map

KINDS: dict[str, type[Map]] = {}
PAPER_WORDS = {"id": "logit", "mat": "linear"}  # of "Jump to Conclusions"; not accepted here


def register_kind(kind: type[Map]) -> type[Map]:
    """Make a kind of map known by its name; usable as a decorator.

    Raises `BadSettings` if another class has this name. A class that is defined again, as in a
    notebook, replaces itself.
    """
    known = KINDS.get(kind.kind, kind)
    if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise BadSettings(
            f"there is a kind of map called {kind.kind!r} already: {known.__name__}; choose "
            "another name"
        )
    KINDS[kind.kind] = kind
    return kind


def kind_named(name: str) -> type[Map]:
    """The class of a kind; `BadSettings` names the known ones."""
    check_choice(name, tuple(KINDS), "kind of map")
    return KINDS[name]


def lens_title(name: str) -> str:
    """What people call a lens: the title of its kind, or the name that it was given."""
    return KINDS[name].title if name in KINDS else name


def leading_kind(kinds: Iterable[str]) -> str:
    """The kind that a bank of these is named after: the one registered last.

    So a bank whose maps were tuned, except where that was no improvement, is called tuned. Without
    any map states can only be read as they are.
    """
    order = list(KINDS)
    known = {kind_named(name).kind for name in kinds}
    return max(known, key=order.index, default=IdentityMap.kind)


def check_lens(name: str, known: Iterable[str]) -> None:
    """Refuse a lens that is not known; suggest ours for a name that the paper uses."""
    known = tuple(known)
    if name not in known and PAPER_WORDS.get(name) in known:
        raise BadSettings(f"lens {name!r} does not exist; did you mean {PAPER_WORDS[name]!r}?")
    check_choice(name, known, "lens")


def kind_by_tensors(names: Iterable[str], *, tuned: bool) -> str:
    """The kind of a map that was saved when banks did not say it, by the names of its tensors."""
    if "left" in names:
        return LowRankMap.kind
    return TunedMap.kind if tuned else LinearMap.kind


for known_kind in (IdentityMap, LinearMap, LowRankMap, TunedMap):
    register_kind(known_kind)
