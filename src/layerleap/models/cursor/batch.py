"""Several texts under way at once, in one cache, each blind to the others.

In: texts that were each begun alone, and the tokens that follow them, perhaps as trees.
Out: their states, from one reading of the weights for all texts.

Tokens lie in the cache in the order in which they came, whosever they are. So nothing is padded,
and nothing moves when one text gets on faster than another. What the model's own mask says of a
key must depend only on how far back it stands, as it does if attention is causal, windowed or
biased by distance: it is then taken from the last row of the mask of a chain, and shut for keys of
other texts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.cursor.axes import Placement
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.cursor.tree import Tree


class BatchCursor(Cursor):
    """Texts are known by number."""

    _owners: tuple[int, ...] = ()  # by key in the cache, the text that it belongs to
    _spots: tuple[int, ...] = ()  # and where it stands in that text
    _trees: Mapping[int, Tree] = {}  # of the last pass

    def join(self, text: int, walk: Cursor) -> None:
        """Take in what another walk holds, as a text of its own.

        Args:
            text: its number.
            walk: over the same model, nothing of it waiting.
        """
        if text in self._owners or walk.waiting or not walk.length:
            raise BadSettings(f"text {text} is here already, or has not been run yet")
        for own, other in zip(self.cache.layers, walk.cache.layers, strict=True):
            assert other.keys is not None
            assert other.values is not None
            own.update(other.keys, other.values)
        self.ids += walk.ids
        self._owners += (text,) * walk.length
        self._spots += tuple(range(walk.length))

    def leave(self, text: int) -> None:
        """Forget a text: others need no longer look past its keys."""
        places = [n for n, owner in enumerate(self._owners) if owner != text]
        for layer in self.cache.layers:
            layer.gather(0, torch.tensor(places, dtype=torch.long, device=layer.device))
        self.ids = [self.ids[n] for n in places]
        self._owners = tuple(self._owners[n] for n in places)
        self._spots = tuple(self._spots[n] for n in places)

    def lengths(self) -> Counter[int]:
        """By text, how many of its tokens are kept."""
        return Counter(self._owners)

    def run_all(self, trees: Mapping[int, Tree]) -> dict[int, Tensor]:
        """One pass over what follows each text: states of the last layer, (node, d_model) each.

        Args:
            trees: by text, what follows it; texts without new tokens are left out.
        """
        if self.length != len(self._owners):
            raise BadSettings("say which tokens of the last pass to keep before the next one")
        if unknown := trees.keys() - set(self._owners):
            raise BadSettings(f"text {min(unknown)} has not joined")
        self._trees = dict(trees)
        joint = _side_by_side(list(trees.values()))
        if len(joint) == 1 and not self._is_alone():
            # For one token alone most models make no mask, and other texts would be seen.
            joint = _side_by_side([joint, joint])
        h = self.run(joint).h
        sizes = [len(tree) for tree in trees.values()]
        return dict(zip(trees, h[: sum(sizes)].split(sizes), strict=True))

    def keep_all(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Of the trees that were just entered, keep one path each; all else is forgotten.

        Args:
            paths: by text, nodes of its tree from the text so far on; none for those left out.
        """
        start, nodes, known = 0, list[int](), self.lengths()
        owners, spots = list(self._owners), list(self._spots)
        for text, tree in self._trees.items():
            path = paths.get(text, ())
            nodes += [start + node for node in path]
            owners += [text] * len(path)
            spots += range(known[text], known[text] + len(path))
            start += len(tree)
        entered = Tree.chain(self.ids[len(self._owners) :])  # only its tokens are asked for
        self.keep(nodes, entered)
        self._owners, self._spots = tuple(owners), tuple(spots)

    def _is_alone(self) -> bool:
        return set(self._owners) <= self._trees.keys() and len(self._trees) == 1

    def _places(self, tree: Tree) -> list[int]:
        """Each after its own text."""
        known = self.lengths()
        starts = self._for_nodes(tree, {text: known[text] for text in self._trees})
        return [start + depth for start, depth in zip(starts, tree.depths, strict=True)]

    def _lay_out(self, tree: Tree) -> Placement | None:
        if self._is_alone():
            return super()._lay_out(tree)
        new = torch.tensor(self._for_nodes(tree, {text: text for text in self._trees}))
        seen = torch.cat([new[:, None] == torch.tensor(self._owners), tree.sees()], 1)
        places = torch.tensor([*self._spots, *self._places(tree)])
        return partial(_among, seen, places)

    def _for_nodes(self, tree: Tree, values: Mapping[int, int]) -> list[int]:
        """What each text has, for each of its new nodes."""
        found = [values[text] for text, own in self._trees.items() for _ in own.ids]
        return found + found[-1:] * (len(tree) - len(found))


def _side_by_side(trees: Sequence[Tree]) -> Tree:
    """As one tree, whose first nodes follow each its own text."""
    ids, parents = list[int](), list[int]()
    for tree in trees:
        start = len(ids)
        ids += tree.ids
        parents += [parent if parent < 0 else start + parent for parent in tree.parents]
    return Tree(tuple(ids), tuple(parents))


def _among(
    seen: Tensor, places: Tensor, value: Tensor, query: int | None, key: int | None
) -> Tensor:
    """An argument of a block, made for a chain, laid out for tokens among those of other texts.

    Args:
        seen: (query, key) True where a token may look.
        places: by key, where it stands in its text; the last ones are the queries.
        value: as the model made it.
        query: the dimension that counts queries.
        key: that which counts keys.
    """
    if key is None:  # follows from the positions that the model was given
        return value
    seen, places = seen.to(value.device), places.to(value.device)
    if query is None:
        return value.index_select(key, places)
    rows = value.movedim((query, key), (-2, -1))
    if not torch.equal(rows[..., -2, :-1], rows[..., -1, 1:]):
        raise ModelRefused(
            "law 'distance' failed: what this model's mask says of a key depends on where it "
            "stands, and not only on how far back, so texts cannot share a pass; decode them one "
            "by one"
        )
    n_queries, n_keys = seen.shape
    back = places[-n_queries:, None] - places[None]
    laid = rows[..., -1, :][..., (n_keys - 1 - back).clamp(0, n_keys - 1)]
    shut = rows[..., :1, -1:]  # the first token does not see the last
    return torch.where(seen, laid, shut).movedim((-2, -1), (query, key))
