"""Several texts under way at once, in one cache, each blind to the others.

In: a wrapped decoder whose tokens may branch, and of each text the tokens that follow.
Out: their states, from one reading of the weights for all texts.

Tokens lie in the cache in the order in which they came, whosever they are. So nothing is padded,
nothing moves when one text gets on faster than another, and each may be followed by a tree. What
the model's own mask says of a key depends on how far back it stands: it is taken from the last row
of the mask of a chain, and shut for keys of other texts.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from layerleap.errors import BadSettings
from layerleap.models.axes import Lay
from layerleap.models.tree import Tree
from layerleap.models.walk import Walk


class Abreast(Walk):
    """Texts are known by number, from 0 on; a text begins when it is first given tokens."""

    _owners: tuple[int, ...] = ()  # by key in the cache, the text that it belongs to
    _spots: tuple[int, ...] = ()  # and where it stands in that text
    _trees: Mapping[int, Tree] = {}  # of the last pass

    def length_of(self, text: int) -> int:
        """How many tokens of a text are kept."""
        return self._owners.count(text)

    def _for_nodes(self, tree: Tree, values: Mapping[int, int]) -> list[int]:
        """What each text has, for each of its new nodes."""
        found = [values[text] for text, own in self._trees.items() for _ in own.ids]
        return found + found[-1:] * (len(tree) - len(found))

    def run_all(self, trees: Mapping[int, Tree]) -> dict[int, Tensor]:
        """One pass over what follows each text: states of the last layer, (node, d_model) each.

        Args:
            trees: by text, what follows it; texts without new tokens are left out.
        """
        if self.length != len(self._owners):
            raise BadSettings("say which tokens of the last pass to keep before the next one")
        if not self.length and len(trees) > 1:  # no mask is made for a first pass
            raise BadSettings(f"{len(trees)} texts begin at once; the first one begins alone")
        self._trees = dict(trees)
        joint = _side_by_side(list(trees.values()))
        if len(joint) == 1 and self.length:
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
        start, nodes = 0, list[int]()
        owners, spots = list(self._owners), list(self._spots)
        for text, tree in self._trees.items():
            path, known = paths.get(text, ()), self.length_of(text)
            nodes += [start + node for node in path]
            owners += [text] * len(path)
            spots += range(known, known + len(path))
            start += len(tree)
        new = self.ids[len(self._owners) :]
        self.keep(nodes, Tree.chain(new))  # only its tokens are asked for
        self._owners, self._spots = tuple(owners), tuple(spots)

    def _places(self, tree: Tree) -> list[int]:
        """Each after its own text."""
        starts = self._for_nodes(tree, {text: self.length_of(text) for text in self._trees})
        return [start + depth for start, depth in zip(starts, tree.depths, strict=True)]

    def _lay_out(self, tree: Tree) -> Lay | None:
        if not self._owners:
            return super()._lay_out(tree)
        new = torch.tensor(self._for_nodes(tree, {text: text for text in self._trees}))
        seen = torch.cat([new[:, None] == torch.tensor(self._owners), tree.sees()], 1)
        places = torch.tensor([*self._spots, *self._places(tree)])
        return partial(_among, seen, places)


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
    n_queries, n_keys = seen.shape
    back = places[-n_queries:, None] - places[None]
    laid = rows[..., -1, :][..., (n_keys - 1 - back).clamp(0, n_keys - 1)]
    shut = rows[..., :1, -1:]  # the first token does not see the last
    return torch.where(seen, laid, shut).movedim((-2, -1), (query, key))
