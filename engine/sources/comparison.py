"""Leaf-by-leaf comparison of two checkpoints and statistics of leaves, both in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..arrays import SavedLeaf, TreeSource, batches
from ..errors import UnsupportedLeafError, shortened_text
from ..generators import is_idle
from ..progress import NULL, Progress, Share
from ..pytree import Box, PathFilter, Patterns, materialize
from .native import leaf_path, trees_in
from .protocol import JSON, METRICS, TREE, CheckpointSource

_PART = 64 << 20  # maximum number of bytes of a leaf to read at a time

Difference = Literal["missing", "added", "type", "values", "unknown"]


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """A leaf that differs between two checkpoints."""

    item: str  # name of the leaf's item
    path: str  # path in the tree, such as ``params/Dense_0/kernel``; empty for an item that is not a tree
    kind: Difference  # "type" if the dtype or shape differs, "unknown" if holdfast cannot read the leaf
    detail: str  # human-readable description of the difference
    differing: int = 0  # number of differing elements; 0 if not applicable
    size: int = 0  # total number of elements
    greatest: float = math.nan  # largest absolute difference; NaN if any difference is NaN or elements are not numbers
    relative: float = math.nan  # ``greatest`` divided by the largest absolute value of any element
    first: tuple[int, ...] | None = None  # index of the first differing element

    @property
    def name(self) -> str:
        """The item and the path, joined by a slash."""
        return f"{self.item}/{self.path}" if self.path else self.item

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def compare_checkpoints(
    first: CheckpointSource,
    second: CheckpointSource,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    progress: Progress = NULL,
) -> Iterator[LeafDifference]:
    """Yield the leaves that differ between two checkpoints, in the item and leaf order of the first one.

    Random generators that no step has drawn from are not compared, because they differ between runs unless the program
    seeds them.

    Values are equal if their bits are equal. With a tolerance, elements are also equal if ``|a - b| <= atol + rtol *
    |a|``, and NaN equals NaN. Sharding, array libraries and metrics are not compared. ``progress`` counts the bytes of
    leaves in the first checkpoint.
    """
    trees, others = dict(trees_of(first)), dict(trees_of(second))
    progress.expect(sum(leaf.nbytes for tree in trees.values() for leaf in tree.leaves))
    values = {name: kind for name, kind in first.items.items() if kind not in (TREE, METRICS)}
    for name in [*trees, *values]:
        kind = values.get(name, TREE)
        if name not in (others if kind == TREE else second.items):
            yield LeafDifference(name, "", "missing", "the second checkpoint lacks this item")
            progress.advance(sum(leaf.nbytes for leaf in trees[name].leaves) if kind == TREE else 0)
        elif kind == TREE:
            yield from _compare_trees(name, trees[name], others[name], (rtol, atol), progress)
        elif kind == JSON and second.items[name] == JSON:
            expected, found = first.value(name), second.value(name)
            if repr(expected) != repr(found):
                yield LeafDifference(name, "", "values", f"expected {_short(expected)}, found {_short(found)}")
        else:
            files = first.files(name)
            has_checksums = files is not None and all(record.crc32c is not None for record in files.values())
            if not has_checksums or files != second.files(name):
                detail = f"an item of kind {kind!r} whose files differ or have no checksums"
                yield LeafDifference(name, "", "unknown", detail)
    compared = trees.keys() | values.keys()
    for name in [*others, *(name for name, kind in second.items.items() if kind not in (TREE, METRICS))]:
        if name not in compared:
            yield LeafDifference(name, "", "added", "the first checkpoint lacks this item")


def trees_of(checkpoint: CheckpointSource) -> Iterator[tuple[str, TreeSource]]:
    """Yield the name and tree of each tree item in a checkpoint, and of each per-process tree inside it."""
    for name, kind in checkpoint.items.items():
        if kind == TREE:
            yield from trees_in(checkpoint, name)


def _compare_trees(
    item: str, tree: TreeSource, other: TreeSource, tolerances: tuple[float, float], progress: Progress
) -> Iterator[LeafDifference]:
    others = {leaf.name: leaf for leaf in other.leaves if not is_idle(item, leaf.name)}
    for leaf in tree.leaves:
        if is_idle(item, leaf.name):
            progress.advance(leaf.nbytes)
            continue
        match = others.pop(leaf.name, None)
        path = leaf_path(item, leaf.name)
        if match is None:
            yield LeafDifference(item, path, "missing", f"expected {leaf.saved}, but the second checkpoint lacks it")
            progress.advance(leaf.nbytes)
            continue
        with Share(progress, leaf.nbytes, leaf.nbytes) as share:
            try:
                difference = _compare_leaves(item, path, (tree, leaf), (other, match), tolerances, share)
            except UnsupportedLeafError as error:
                difference = LeafDifference(item, path, "unknown", str(error))
        if difference is not None:
            yield difference
    for leaf in others.values():
        yield LeafDifference(
            item, leaf_path(item, leaf.name), "added", f"{leaf.saved}, which the first checkpoint lacks"
        )


def _compare_leaves(
    item: str,
    path: str,
    expected: tuple[TreeSource, SavedLeaf],
    found: tuple[TreeSource, SavedLeaf],
    tolerances: tuple[float, float],
    share: Share,
) -> LeafDifference | None:
    saved, other = expected[1].saved, found[1].saved
    if (saved.dtype, saved.shape, saved.variant) != (other.dtype, other.shape, other.variant):
        return LeafDifference(item, path, "type", f"expected {saved}, found {other}")
    if saved.dtype is None or saved.shape is None:
        value, other_value = (
            materialize([None], [leaf.saved], tree.read_leaves([leaf]), [leaf.name])[0]
            for tree, leaf in (expected, found)
        )
        if type(value) is type(other_value) and repr(value) == repr(other_value):
            return None
        return LeafDifference(item, path, "values", f"expected {_short(value)}, found {_short(other_value)}")
    difference = _Difference(*tolerances)
    for box in _slabs(saved.shape, saved.dtype.itemsize):
        part, other_part = (tree.read_boxes([leaf], [[box]])[0][0] for tree, leaf in (expected, found))
        difference.add(part, other_part, box)
        share.advance(part.nbytes)
    return difference.report(item, path, math.prod(saved.shape))


def _slabs(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Split an array along its first axis into boxes of limited size."""
    if not shape or math.prod(shape) * itemsize <= _PART:
        yield Box((0,) * len(shape), shape)
        return
    rows = max(1, _PART // max(1, math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], rows):
        stop = min(shape[0], start + rows)
        yield Box((start, *(0,) * (len(shape) - 1)), (stop, *shape[1:]))


class _Difference:
    """The difference between two arrays, accumulated over their parts."""

    def __init__(self, rtol: float, atol: float) -> None:
        self._tolerances = (rtol, atol)
        self._differing = 0
        self._first: tuple[int, ...] | None = None
        self._greatest = self._magnitude = 0.0
        self._values: tuple[Any, Any] = (None, None)

    def add(self, part: NDArray[Any], other: NDArray[Any], box: Box) -> None:
        different = _bits_differ(part, other)
        if not different.any():
            return
        if (numbers := _as_numbers(part, other)) is not None:
            a, b = numbers
            with np.errstate(all="ignore"):
                distance = np.abs(a - b)
                if any(self._tolerances):
                    rtol, atol = self._tolerances
                    close = (distance <= atol + rtol * np.abs(a)) | (a == b) | (np.isnan(a) & np.isnan(b))
                    different &= ~close
                    if not different.any():
                        return
                self._greatest = float(np.maximum(self._greatest, distance[different].max()))
                self._magnitude = float(np.fmax(self._magnitude, np.fmax.reduce(np.abs(a), axis=None)))
        else:
            self._greatest = math.nan
        if self._first is None:
            index = np.unravel_index(int(np.flatnonzero(different)[0]), different.shape) if different.shape else ()
            self._values = part[index], other[index]
            self._first = tuple(int(i) + low for i, low in zip(index, box.start, strict=True))
        self._differing += int(different.sum())

    def report(self, item: str, path: str, size: int) -> LeafDifference | None:
        if not self._differing:
            return None
        expected, found = self._values
        relative = self._greatest / self._magnitude if self._magnitude else math.nan
        where = f" at {list(self._first)}" if self._first else ""
        detail = f"{self._differing} of {size} elements differ" if size > 1 else "differs"
        by = "" if math.isnan(self._greatest) else f", by at most {self._greatest:.3g}"
        detail += f"{by}; the first{where}: expected {_short(expected)}, found {_short(found)}"
        return LeafDifference(
            item, path, "values", detail, self._differing, size, self._greatest, relative, self._first
        )


def _bits_differ(part: NDArray[Any], other: NDArray[Any]) -> NDArray[np.bool_]:
    if part.dtype.itemsize == 0 or part.size == 0:
        return np.zeros(part.shape, np.bool_)
    if part.dtype.char in "gG":  # long double elements have padding bytes
        return np.asarray(~((part == other) | ((part != part) & (other != other))))
    ours, theirs = (np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8) for array in (part, other))
    return np.asarray((ours != theirs).any(axis=1)).reshape(part.shape)


def _as_numbers(part: NDArray[Any], other: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]] | None:
    dtype = np.complex128 if part.dtype.kind == "c" else np.float64
    try:
        return part.astype(dtype), other.astype(dtype)
    except (TypeError, ValueError):
        return None


def _short(value: Any) -> str:
    text = repr(value.item() if isinstance(value, np.generic) and value.dtype.kind in "biufc" else value)
    return shortened_text(text)


# ---- statistics of leaf values, computed in one pass over the data


_BATCH = 32 << 20  # maximum total size in bytes of leaves that are read together
_LEAST = 8 << 10  # minimum size in bytes counted for a leaf, which limits the number of tiny leaves in a batch
_NO_NUMBERS = (UnsupportedLeafError, TypeError, ValueError)  # raised for elements that are not numbers (opaque dtypes)


@dataclass(frozen=True, slots=True)
class LeafStatistics:
    """Statistics of a leaf's finite elements (None if it has no finite elements), and counts of all other elements."""

    item: str  # name of the leaf's item
    path: str  # path in the tree
    size: int  # number of elements
    minimum: float | None = None  # smallest finite element
    maximum: float | None = None  # largest finite element
    mean: float | None = None
    deviation: float | None = None  # standard deviation
    norm: float | None = None  # Euclidean norm
    nan: int = 0  # number of NaN elements
    inf: int = 0  # number of infinite elements


def leaf_statistics(
    checkpoint: CheckpointSource, select: Patterns | None = None, progress: Progress = NULL
) -> Iterator[LeafStatistics]:
    """Yield statistics of each numeric leaf, in tree order.

    Small leaves are read in batches, and larger leaves are read in parts.

    Sums are computed in float64. Means and deviations of an array's parts are merged as in Chan, Golub and LeVeque,
    "Algorithms for computing the sample variance" (1983). Complex elements are replaced by their absolute values.
    """
    chosen = PathFilter(select)
    trees = list(trees_of(checkpoint))
    chosen.check(leaf.name.split(".") for _, tree in trees for leaf in tree.leaves)
    wanted = [
        (item, tree, [leaf for leaf in tree.leaves if _is_array(leaf) and chosen.chooses(leaf.name.split("."))])
        for item, tree in trees
    ]
    progress.expect(sum(leaf.nbytes for _, _, leaves in wanted for leaf in leaves))
    for item, tree, leaves in wanted:
        for batch in batches(leaves, lambda leaf: max(leaf.nbytes, _LEAST), _BATCH):
            for leaf, running in zip(batch, _read(tree, batch, progress), strict=True):
                if running is not None:
                    yield running.report(item, leaf_path(item, leaf.name), math.prod(leaf.saved.shape or ()))


def _is_array(leaf: SavedLeaf) -> bool:
    return leaf.saved.dtype is not None and leaf.saved.shape is not None and leaf.saved.dtype.kind not in "SUOMm"


def _read(tree: TreeSource, leaves: list[SavedLeaf], progress: Progress) -> list[_Running | None]:
    """Return running sums for several small leaves or one leaf of any size; None for a leaf that is not numeric."""
    sums = [_Running() for _ in leaves]
    slabs = [_slabs(leaf.saved.shape or (), np.dtype(leaf.saved.dtype).itemsize) for leaf in leaves]
    nbytes = sum(leaf.nbytes for leaf in leaves)
    with Share(progress, nbytes, nbytes) as share:
        try:
            for boxes in zip(*slabs, strict=True):
                parts = tree.read_boxes(leaves, [[box] for box in boxes])
                for running, (part,) in zip(sums, parts, strict=True):
                    running.add(part)
                    share.advance(part.nbytes)
        except _NO_NUMBERS:
            return [None] if len(leaves) == 1 else [_read(tree, [leaf], NULL)[0] for leaf in leaves]
    return [*sums]


class _Running:
    """Running sums over the parts of an array."""

    def __init__(self) -> None:
        self._count = self._nan = self._inf = 0
        self._mean = self._squares = self._norm = 0.0  # _squares: sum of squared distances from the mean
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
            if math.isinf(mean):  # the sum overflows, but the mean does not
                mean = float((values / values.size).sum())
            squares = float(np.square(values - mean).sum())
        total = self._count + values.size
        share, distance = values.size / total, mean - self._mean
        self._squares += squares + distance * distance * self._count * share
        self._mean = self._mean * (1 - share) + mean * share
        self._count = total

    def report(self, item: str, path: str, size: int) -> LeafStatistics:
        if not self._count:
            return LeafStatistics(item, path, size, nan=self._nan, inf=self._inf)
        deviation = math.sqrt(self._squares / self._count)
        return LeafStatistics(
            item, path, size, self._minimum, self._maximum, self._mean, deviation, self._norm, self._nan, self._inf
        )
