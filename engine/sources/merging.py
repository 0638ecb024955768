"""Merges several checkpoints into one tree, taking each leaf from the first checkpoint whose pattern matches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from numpy.typing import NDArray

from ..arrays import SavedLeaf, TreeSource
from ..errors import OptionError
from ..pytree import Box, PathFilter, TreeDocument, flatten, format_path
from ..storage import Place, as_location
from .native import read_checkpoint
from .protocol import CheckpointSource, SingleTree

T = TypeVar("T")


def read_merged(places: Mapping[str, Place], item: str | None, read: Callable[[CheckpointSource], T]) -> T:
    """Open the checkpoints and read their merged tree, retrying if one of them is replaced in the meantime."""
    if not places:
        raise OptionError("the dictionary of patterns and checkpoints to load is empty")

    def read_next(opened: Sequence[CheckpointSource]) -> T:
        if len(opened) < len(places):
            location = as_location([*places.values()][len(opened)])
            return read_checkpoint(location, lambda checkpoint: read_next([*opened, checkpoint]))
        trees = [checkpoint.tree(checkpoint.only_tree(item)) for checkpoint in opened]
        first, nbytes = opened[0], sum(checkpoint.nbytes for checkpoint in opened)
        return read(SingleTree(first.format, first.location, _merged(list(places), trees), nbytes))

    return read_next([])


def _merged(patterns: Sequence[str], trees: Sequence[TreeSource]) -> MergedTree:
    filters = list(map(PathFilter, patterns))
    leaves: list[tuple[int, int]] = []  # for each leaf, the index of its tree and its position in that tree
    merged: Any = None
    for number, tree in enumerate(trees):
        paths = [leaf.name.split(".") for leaf in tree.leaves]
        filters[number].check(paths)
        if lost := tree.external():
            raise OptionError(f"{tree.location}: {format_path(next(iter(lost)))} needs a type handler; load it alone")
        chosen = [next((n for n, rule in enumerate(filters) if rule.chooses(path)), None) == number for path in paths]
        begin = len(leaves)
        leaves += [(number, position) for position, is_chosen in enumerate(chosen) if is_chosen]
        if begin < len(leaves):
            part = tree.tree.select(chosen).build(range(begin, len(leaves)))
            merged = part if merged is None else _joined(merged, part, "")
    flat = flatten(merged)
    return MergedTree(trees, [leaves[number] for number in flat.values], TreeDocument(flat.structure))


def _joined(tree: Any, other: Any, path: str) -> Any:
    if not (isinstance(tree, dict) and isinstance(other, dict)):
        raise OptionError(
            f"{path.rstrip('/') or '(root)'}: two checkpoints have it, but not both as containers with keys"
        )
    new = {key: _joined(tree[key], value, f"{path}{key}/") if key in tree else value for key, value in other.items()}
    return {**tree, **new}


class MergedTree(TreeSource):
    """A tree of leaves from several trees; ``picks`` holds each leaf's tree index and its position in that tree."""

    def __init__(self, trees: Sequence[TreeSource], picks: Sequence[tuple[int, int]], tree: TreeDocument) -> None:
        self.location = trees[0].location
        self.tree = tree
        self._trees, self._picks = trees, picks
        originals = [(trees[number], trees[number].leaves[position]) for number, position in picks]
        self._originals = {leaf.name: (source, leaf) for source, leaf in originals}
        self.leaves = [leaf for _, leaf in originals]
        self.unreadable = {
            leaf.name: source.unreadable[leaf.name] for source, leaf in originals if leaf.name in source.unreadable
        }

    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        return self._by_tree(leaves, lambda tree, part, _: tree.read_leaves(part))

    def read_boxes(self, leaves: Sequence[SavedLeaf], boxes: Sequence[Sequence[Box]]) -> list[list[NDArray[Any]]]:
        return self._by_tree(leaves, lambda tree, part, numbers: tree.read_boxes(part, [boxes[n] for n in numbers]))

    def _by_tree(
        self, leaves: Sequence[SavedLeaf], read: Callable[[TreeSource, list[SavedLeaf], list[int]], Sequence[Any]]
    ) -> list[Any]:
        results: list[Any] = [None] * len(leaves)
        for tree in self._trees:
            numbers = [number for number, leaf in enumerate(leaves) if self._originals[leaf.name][0] is tree]
            values = read(tree, [leaves[number] for number in numbers], numbers)
            for number, value in zip(numbers, values, strict=True):
                results[number] = value
        return results

    def chunks(self, leaf: SavedLeaf) -> tuple[int, ...]:
        return self._originals[leaf.name][0].chunks(leaf)

    def for_template(self, names: Sequence[str]) -> TreeSource:
        return MergedTree([tree.for_template(names) for tree in self._trees], self._picks, self.tree)
