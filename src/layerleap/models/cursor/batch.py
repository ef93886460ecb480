"""Several texts in progress at once, in one cache, none of them visible to the others.

In: texts that were each begun alone, and the tokens that follow them, perhaps as trees.
Out: their states, from one reading of the weights for all texts.

Tokens lie in the cache in the order in which they came, whichever text they belong to. So nothing
is padded, and nothing moves when one text gets on faster than another. What the model's own mask
says about a key must depend only on how far back the key is, as it does if attention is causal,
windowed or biased by distance: it is then taken from the last row of the mask of a chain, and keys
of other texts are masked.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.cursor.axes import Arrange
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.cursor.tree import Tree
from layerleap.models.hooks.rows import Rows


class BatchCursor(Cursor):
    """Texts are known by number."""

    _owners: tuple[int, ...] = ()  # by key in the cache, the text that it belongs to
    _owned: tuple[int, ...] = ()  # and its position in that text
    _trees: Mapping[int, Tree] = {}  # of the last pass
    # By text, its number in the batch and the length of its prompt.
    _numbers: Mapping[int, tuple[int, int | None]] = {}

    def join(self, text: int, cursor: Cursor) -> None:
        """Add the text of another cursor of the same model, known here by number `text`."""
        if text in self._owners or cursor.waiting or not cursor.length:
            raise BadSettings(f"text {text} has joined already, or has not been run yet")
        for joint, other in zip(self.cache.layers, cursor.cache.layers, strict=True):
            assert other.keys is not None
            assert other.values is not None
            joint.update(other.keys, other.values)
        self.ids += cursor.ids
        self._owners += (text,) * cursor.length
        self._owned += tuple(range(cursor.length))
        self._numbers = {**self._numbers, text: (cursor.text, cursor.prompt)}

    def leave(self, text: int) -> None:
        """Forget a text, so that passes no longer have to skip its keys."""
        others = [n for n, owner in enumerate(self._owners) if owner != text]
        for layer in self.cache.layers:
            layer.gather(0, torch.tensor(others, dtype=torch.long, device=layer.device))
        self.ids = [self.ids[n] for n in others]
        self._owners = tuple(self._owners[n] for n in others)
        self._owned = tuple(self._owned[n] for n in others)

    def lengths(self) -> Counter[int]:
        """By text, how many of its tokens are kept."""
        return Counter(self._owners)

    def rows(self, n: int) -> Rows:
        """The nodes of all texts, for edits."""
        texts = self._for_nodes(n, {text: self._numbers[text][0] for text in self._trees})
        prompts = self._for_nodes(n, {text: self._numbers[text][1] or 0 for text in self._trees})
        is_known = all(self._numbers[text][1] is not None for text in self._trees)
        return Rows(
            torch.tensor(texts),
            torch.tensor(self._positions[-n:]),
            torch.tensor(prompts) if is_known else None,
        )

    def run_all(self, trees: Mapping[int, Tree]) -> dict[int, Tensor]:
        """One pass over what follows each text: states of the last layer, (node, d_model) each."""
        if self.length != len(self._owners):
            raise BadSettings("say which tokens of the last pass to keep before the next one")
        if unknown := trees.keys() - set(self._owners):
            raise BadSettings(f"text {min(unknown)} has not joined")
        self._trees = dict(trees)
        joint = _side_by_side(list(trees.values()))
        if len(joint) == 1 and not self._is_alone():
            # For a single token most models make no mask, and other texts would be visible.
            joint = _side_by_side([joint, joint])
        h = self.run(joint).h
        sizes = [len(tree) for tree in trees.values()]
        return dict(zip(trees, h[: sum(sizes)].split(sizes), strict=True))

    def keep_all(self, paths: Mapping[int, Sequence[int]]) -> None:
        """By text, keep one path of the tree that was just entered; texts left out keep none."""
        start, nodes, lengths = 0, list[int](), self.lengths()
        owners, owned = list(self._owners), list(self._owned)
        for text, tree in self._trees.items():
            path = paths.get(text, ())
            nodes += [start + node for node in path]
            owners += [text] * len(path)
            owned += range(lengths[text], lengths[text] + len(path))
            start += len(tree)
        entered = Tree.chain(self.ids[len(self._owners) :])  # only its tokens matter here
        self.keep(nodes, entered)
        self._owners, self._owned = tuple(owners), tuple(owned)

    def _is_alone(self) -> bool:
        return set(self._owners) <= self._trees.keys() and len(self._trees) == 1

    def _tree_positions(self, tree: Tree) -> list[int]:
        """Each node continues its own text."""
        lengths = self.lengths()
        starts = self._for_nodes(len(tree), {text: lengths[text] for text in self._trees})
        return [start + depth for start, depth in zip(starts, tree.depths, strict=True)]

    def _arrangement(self, tree: Tree) -> Arrange | None:
        if self._is_alone():
            return super()._arrangement(tree)
        texts = torch.tensor(self._for_nodes(len(tree), {text: text for text in self._trees}))
        visible = torch.cat([texts[:, None] == torch.tensor(self._owners), tree.visible()], 1)
        positions = torch.tensor([*self._owned, *self._tree_positions(tree)])
        return partial(_among_texts, visible, positions)

    def _for_nodes(self, n: int, values: Mapping[int, int]) -> list[int]:
        """The value of each text, for each of its new nodes; the last node may be repeated."""
        by_node = [values[text] for text, tree in self._trees.items() for _ in tree.ids]
        return by_node + by_node[-1:] * (n - len(by_node))


def _side_by_side(trees: Sequence[Tree]) -> Tree:
    """All trees as one, with the first nodes of each following its own text."""
    ids, parents = list[int](), list[int]()
    for tree in trees:
        start = len(ids)
        ids += tree.ids
        parents += [parent if parent < 0 else start + parent for parent in tree.parents]
    return Tree(tuple(ids), tuple(parents))


def _among_texts(
    visible: Tensor, positions: Tensor, value: Tensor, query: int | None, key: int | None
) -> Tensor:
    """An argument of a block, made for a chain, rearranged for tokens of several texts.

    `visible` is (query, key), True where a token may look; `positions` has the position of each key
    in its text, the queries last.
    """
    if key is None:  # follows from the positions that the model was given
        return value
    visible, positions = visible.to(value.device), positions.to(value.device)
    if query is None:
        return value.index_select(key, positions)
    rows = value.movedim((query, key), (-2, -1))
    if not torch.equal(rows[..., -2, :-1], rows[..., -1, 1:]):
        raise ModelRefused(
            "law 'distance' failed: what this model's mask says about a key depends on its "
            "position and not only on its distance, so texts cannot share a pass; decode them one "
            "by one"
        )
    n_queries, n_keys = visible.shape
    distance = positions[-n_queries:, None] - positions[None]
    arranged = rows[..., -1, :][..., (n_keys - 1 - distance).clamp(0, n_keys - 1)]
    masked = rows[..., :1, -1:]  # the first token does not see the last
    return torch.where(visible, arranged, masked).movedim((-2, -1), (query, key))
