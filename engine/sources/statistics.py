"""Numbers about the values of each leaf, taken in one pass over its data with bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import SavedLeaf, TreeSource, batches
from ..clock import UNHEARD, Portion, Progress
from ..errors import UnsupportedLeafError
from ..pytree import PathFilter, Patterns
from .comparison import leaf_path, slabs, trees_of
from .protocol import CheckpointSource

_BATCH = 32 << 20  # bytes of small leaves that are read together; a larger one is alone, and read in parts
_LEAST = 8 << 10  # bytes that a leaf counts as at least: a batch of tiny ones is not endless
_NO_NUMBERS = (UnsupportedLeafError, TypeError, ValueError)  # of elements such as those of opaque dtypes


@dataclass(frozen=True, slots=True)
class LeafStatistics:
    """The values of one leaf.

    Attributes:
        item: The item of the checkpoint that the leaf belongs to.
        path: Its path in the tree.
        size: How many elements it has.
        minimum: The least finite element; None if there is none.
        maximum: The greatest finite element; None if there is none.
        mean: The mean of the finite elements; None if there is none.
        deviation: The standard deviation of the finite elements; None if there is none.
        norm: The Euclidean norm of the finite elements; None if there is none.
        nan: How many elements are NaN.
        inf: How many elements are infinite.
    """

    item: str
    path: str
    size: int
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    deviation: float | None = None
    norm: float | None = None
    nan: int = 0
    inf: int = 0


def leaf_statistics(
    checkpoint: CheckpointSource, select: Patterns | None = None, progress: Progress = UNHEARD
) -> Iterator[LeafStatistics]:
    """Yield numbers about every leaf that holds numbers, in the order of the trees.

    Sums are taken in float64; means and deviations of the parts of an array are merged as in Chan, Golub and LeVeque,
    "Algorithms for computing the sample variance" (1983). Of complex elements, the absolute values count.

    Args:
        checkpoint: The checkpoint.
        select: Patterns of paths; only matching leaves are read.
        progress: Is told how many bytes there are to read, and as they are read.

    Raises:
        DamagedCheckpointError: Data is damaged.
        TreeMismatchError: A pattern matches no leaf.
    """
    chosen = PathFilter(select)
    trees = list(trees_of(checkpoint))
    chosen.check(leaf.name.split(".") for _, tree in trees for leaf in tree.leaves)
    wanted = [
        (item, tree, [leaf for leaf in tree.leaves if _has_numbers(leaf) and chosen.chooses(leaf.name.split("."))])
        for item, tree in trees
    ]
    progress.expect(sum(leaf.nbytes for _, _, leaves in wanted for leaf in leaves))
    for item, tree, leaves in wanted:
        for batch in batches(leaves, lambda leaf: max(leaf.nbytes, _LEAST), _BATCH):
            for leaf, found in zip(batch, _read(tree, batch, progress), strict=True):
                if found is not None:
                    yield found.report(item, leaf_path(item, leaf.name), math.prod(leaf.saved.shape or ()))


def _has_numbers(leaf: SavedLeaf) -> bool:
    return leaf.saved.dtype is not None and leaf.saved.shape is not None and leaf.saved.dtype.kind not in "SUOMm"


def _read(tree: TreeSource, batch: list[SavedLeaf], progress: Progress) -> list[_Running | None]:
    """Take the numbers of some leaves; None for one whose elements are no numbers."""
    if len(batch) == 1:
        return [_read_one(tree, batch[0], progress)]
    found = [_Running() for _ in batch]
    try:
        parts = tree.read_boxes(batch, [list(slabs(*_form(leaf))) for leaf in batch])
        for running, (part,) in zip(found, parts, strict=True):
            running.add(part)
    except _NO_NUMBERS:
        return [_read_one(tree, leaf, progress) for leaf in batch]
    progress.advance(sum(leaf.nbytes for leaf in batch))
    return list(found)


def _read_one(tree: TreeSource, leaf: SavedLeaf, progress: Progress) -> _Running | None:
    found = _Running()
    with Portion(progress, leaf.nbytes, leaf.nbytes) as portion:
        try:
            for box in slabs(*_form(leaf)):
                ((part,),) = tree.read_boxes([leaf], [[box]])
                found.add(part)
                portion.advance(part.nbytes)
        except _NO_NUMBERS:
            return None
    return found


def _form(leaf: SavedLeaf) -> tuple[tuple[int, ...], int]:
    assert leaf.saved.shape is not None
    assert leaf.saved.dtype is not None
    return leaf.saved.shape, leaf.saved.dtype.itemsize


class _Running:
    """Sums over the parts of one array."""

    def __init__(self) -> None:
        self._count = self._nan = self._inf = 0
        self._mean = self._squares = self._norm = 0.0  # squares: of the distances from the mean
        self._minimum, self._maximum = math.inf, -math.inf

    def add(self, part: NDArray[Any]) -> None:
        values = np.abs(part.astype(np.complex128)) if part.dtype.kind == "c" else part.astype(np.float64)
        finite = np.isfinite(values)
        if not finite.all():
            nan = int(np.isnan(values).sum())
            self._nan += nan
            self._inf += int(values.size - finite.sum()) - nan
            values = values[finite]
        if not values.size:
            return
        self._minimum = min(self._minimum, float(values.min()))
        self._maximum = max(self._maximum, float(values.max()))
        with np.errstate(over="ignore"):
            self._norm = math.hypot(self._norm, float(np.linalg.norm(values.reshape(-1))))
            mean = float(values.mean())
            squares = float(np.square(values - mean).sum())
        total = self._count + values.size
        distance = mean - self._mean
        self._squares += squares + distance * distance * self._count * values.size / total
        self._mean += distance * values.size / total
        self._count = total

    def report(self, item: str, path: str, size: int) -> LeafStatistics:
        if not self._count:
            return LeafStatistics(item, path, size, nan=self._nan, inf=self._inf)
        deviation = math.sqrt(self._squares / self._count)
        return LeafStatistics(
            item, path, size, self._minimum, self._maximum, self._mean, deviation, self._norm, self._nan, self._inf
        )
