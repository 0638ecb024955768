"""Trees in files of other libraries: containers made from the key paths of leaves, arrays that are parts of files.

Only the requested leaves are read.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..arrays import PartialTree, Problem, Range, SavedLeaf, TreeSource, damaged_leaves, naming, read_ranges
from ..errors import DamagedCheckpointError, OptionError, UnsupportedLeafError, itemized, shortened
from ..progress import NULL
from ..pytree import (
    MAX_DEPTH,
    NAME_ONLY,
    Box,
    Patterns,
    Saved,
    TreeDocument,
    ValueLeaf,
    choose,
    describe,
    flatten,
    format_path,
    join,
    split,
    whole,
)
from ..storage import Location

# The keys from the root to a leaf: int for a place in a list, str for a key of a dictionary.
Path = tuple[str | int, ...]


class _Branch(dict[str | int, Any]):
    """A container that may become a dictionary or a list."""


def nested(
    leaves: Iterable[tuple[Path, Any]], *, root_is_dict: bool = False, number: Callable[[int], str | int] = int
) -> Any:
    """Make the containers of values at these paths: lists where the keys are ``number(0)``, ``number(1)``, ..."""
    root = _Branch()
    for path, value in leaves:
        if len(path) >= MAX_DEPTH:
            raise DamagedCheckpointError(f"the tree is nested deeper than {MAX_DEPTH} levels at {path[0]!r:.200}")
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, _Branch())
            if not isinstance(branch, _Branch):
                raise DamagedCheckpointError(f"{list(path)} leads through a leaf")
        if path[-1] in branch:
            raise DamagedCheckpointError(f"{list(path)} is there twice")
        branch[path[-1]] = value
    if root_is_dict:
        return {key: _with_lists(child, number) for key, child in root.items()}
    return _with_lists(root, number)


def _with_lists(value: Any, number: Callable[[int], str | int]) -> Any:
    if not isinstance(value, _Branch):
        return value
    found = {key: _with_lists(child, number) for key, child in value.items()}
    numbers = [number(index) for index in range(len(found))]
    return [found[key] for key in numbers] if found and found.keys() == set(numbers) else found


def nested_tree(entries: Sequence[tuple[Path, Any]]) -> tuple[TreeDocument, list[int]]:
    """Make the containers that leaves, as numbers, and empty containers are in; return the numbers in their order."""
    inside = [(path, value) for path, value in entries if path]
    root: Any = next((value for path, value in entries if not path), {})
    if inside and isinstance(root, int):
        raise DamagedCheckpointError("a leaf is the whole tree, and there are other leaves")
    flat = flatten(nested(inside) if inside else root)
    return TreeDocument(flat.structure), flat.values


def storage_name(path: Path) -> str:
    return join([str(key) for key in path])


# Member of the details of a None for which the writer may have meant a container without leaves.
OPTIONAL = "optional"


def without_leaves(source: TreeSource, left_out: set[str]) -> TreeSource:
    """Return a tree without the leaves of these names, and without containers that have no other leaf."""
    if not left_out:
        return source
    kept = {leaf.name: leaf for leaf in source.leaves if leaf.name not in left_out}
    return PartialTree(source, kept, source.tree.select([leaf.name in kept for leaf in source.leaves]))


def selected(source: TreeSource, select: Patterns | None) -> TreeSource:
    """Return a tree with only the leaves that match patterns."""
    if select is None:
        return source
    names = [leaf.name for leaf in source.leaves]
    return without_leaves(source, {name for name, one in zip(names, choose(names, select), strict=True) if not one})


def rooted(source: TreeSource, root: str | None) -> TreeSource:
    """Return the content of one container of a tree, such as ``model``, with names that begin there."""
    if root is None:
        return source
    prefix = f"{root.strip('/')}/"
    depth = prefix.count("/")
    inside = [leaf for leaf in source.leaves if format_path(leaf.name).startswith(prefix)]
    if not inside:
        first = dict.fromkeys(format_path(leaf.name).partition("/")[0] for leaf in source.leaves)
        raise OptionError(f"root={root!r}: {source.location} has no such container; it has {shortened(list(first))}")
    tree = source.tree.below(inside[0].name.split(".")[:depth])
    return PartialTree(source, {leaf.name.split(".", depth)[depth]: leaf for leaf in inside}, tree)


def without_placeholders(source: TreeSource) -> tuple[TreeSource, list[str]]:
    """Leave out the leaves that were saved by their names alone; return a line for each."""
    left_out = {leaf.name for leaf in source.leaves if leaf.saved.kind in NAME_ONLY}
    if left_out and source.tree.structure is None:
        raise UnsupportedLeafError(f"{source.location}: this was saved as a placeholder: it has no data")
    lines = [f"{format_path(name)} (saved as a placeholder: it has no data)" for name in sorted(left_out)]
    return without_leaves(source, left_out), lines


def without_unreadable(source: TreeSource) -> tuple[TreeSource, list[str]]:
    """Leave out the leaves that cannot be read; return a line for each. A tree without any other array is an error."""
    left_out = source.unreadable
    lines = [f"{format_path(name)} ({why})" for name, why in sorted(left_out.items())]
    if left_out and not any(leaf.saved.dtype is not None and leaf.name not in left_out for leaf in source.leaves):
        raise UnsupportedLeafError(itemized(f"{source.location}: none of its arrays can be read:", lines))
    return without_leaves(source, set(left_out)), lines


Bytes = NDArray[np.uint8]


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements with these strides, counted in elements, lie in C order without gaps."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


_logger = logging.getLogger("holdfast")

_AMPLIFICATION = 16  # views of shared memory may claim at most so many times the bytes of the files
_SMALL = 64 << 20  # bytes of arrays that are accepted for files of any size


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Elements of an array that are one stretch of a file."""

    start: tuple[int, ...]  # index of its first element in the whole array, one number for each axis
    shape: tuple[int, ...]  # how many elements it has along each axis
    file: str  # the file's path inside the tree's location; ``""`` if that is the file
    offset: int  # first byte
    length: int  # bytes from the first element to the last
    dtype: np.dtype[Any]  # dtype of the stored elements, byte order included
    # Elements from one to the next along each axis; None for C order without gaps.
    strides: tuple[int, ...] | None = None
    # Returns whether bytes have the checksum in the file; None if the file has none for exactly these bytes.
    is_intact: Callable[[Bytes], bool] | None = None
    # A function of the elements that were read, such as a conjugation, or None.
    finish: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    # Returns the elements in stored bytes that are not the elements themselves, such as compressed ones.
    decode: Callable[[Bytes], NDArray[Any]] | None = None

    def within(self, box: Box) -> StoredPart | None:
        """Return the part of this one in a box; all of it where a checksum covers all, or it is compressed."""
        common = box.common(Box.at(self.start, self.shape))
        if common is None or self.is_intact is not None or self.decode is not None:
            return None if common is None else self
        strides = self._strides()
        steps = list(zip(common.start, common.stop, self.start, strides, strict=True))
        first = sum((low - origin) * stride for low, _, origin, stride in steps)
        last = sum((high - 1 - origin) * stride for _, high, origin, stride in steps)
        size = self.dtype.itemsize
        return replace(
            self,
            start=common.start,
            shape=common.shape,
            offset=self.offset + first * size,
            length=(last - first + 1) * size,
            strides=None if is_contiguous(common.shape, strides) else strides,
        )

    def _strides(self) -> tuple[int, ...]:
        return self.strides or tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def array(self, data: Bytes) -> NDArray[Any]:
        """Return the elements in this machine's byte order: a view of ``data`` where that is possible."""
        if self.is_intact is not None and not self.is_intact(data):
            raise DamagedCheckpointError(
                f"{self.length} bytes at offset {self.offset} do not have the checksum in the file"
            )
        if self.decode is not None:
            return self.decode(data)
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype.newbyteorder("="))
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self._strides(), strict=True))
        if len(data) != (last + 1) * self.dtype.itemsize or min(self.strides or (0,)) < 0:
            raise DamagedCheckpointError(f"{len(data)} bytes do not hold {self.dtype} elements of shape {self.shape}")
        elements = data.view(self.dtype)
        if self.strides is None:
            found: NDArray[Any] = elements.reshape(self.shape)
        else:
            steps = [stride * self.dtype.itemsize for stride in self.strides]
            found = np.lib.stride_tricks.as_strided(elements, self.shape, steps, writeable=False)
        if not found.dtype.isnative:
            found = found.astype(found.dtype.newbyteorder("="))
        return found if self.finish is None else self.finish(found)


class StoredArray:
    """An array in the files of another library, not read yet."""

    __slots__ = ("_parts", "details", "dtype", "shape")

    def __init__(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        details: Mapping[str, Any],
        parts: Callable[[], Sequence[StoredPart]],
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.details = dict(details)
        self._parts = parts

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self) -> StoredPart:
        found = self._parts()
        if len(found) != 1:
            raise DamagedCheckpointError(f"expected an array in one part, found {len(found)} parts")
        return found[0]

    def parts(self) -> Sequence[StoredPart]:
        """Return the parts that cover the array exactly once."""
        found = self._parts()
        if math.prod(self.shape) != sum(math.prod(part.shape) for part in found):
            raise DamagedCheckpointError(f"the parts do not hold as many elements as an array of shape {self.shape}")
        boxes = [part for part in found if 0 not in part.shape]
        for part in boxes:
            ends = [first + size for first, size in zip(part.start, part.shape, strict=True)]
            if len(ends) != len(self.shape) or any(end > size for end, size in zip(ends, self.shape, strict=True)):
                raise DamagedCheckpointError(f"a part at {part.start} of shape {part.shape} lies outside {self.shape}")
        if len(boxes) > 1:
            low = np.array([part.start for part in boxes])
            high = low + np.array([part.shape for part in boxes])
            for index in range(1, len(boxes)):
                if np.any(np.all((low[index] < high[:index]) & (low[:index] < high[index]), axis=1)):
                    raise DamagedCheckpointError(f"two parts overlap at {boxes[index].start}")
        return boxes


class Unreadable:
    """A leaf that only code of the file could make: it is listed, and reading it is refused."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what


class OtherTree(TreeSource):
    """A tree of another library, of which whole arrays and boxes of them are read in the same way."""

    @abc.abstractmethod
    def _read(self, wanted: Sequence[tuple[SavedLeaf, Box | None]]) -> list[NDArray[Any] | None]:
        """Read arrays, or boxes of them."""

    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        return self._read([(leaf, None) for leaf in leaves])

    def read_boxes(self, leaves: Sequence[SavedLeaf], boxes: Sequence[Sequence[Box]]) -> list[list[NDArray[Any]]]:
        found = iter(self._read([(leaf, box) for leaf, wanted in zip(leaves, boxes, strict=True) for box in wanted]))
        return [[array for _ in wanted if (array := next(found)) is not None] for wanted in boxes]

    def for_template(self, names: Sequence[str]) -> TreeSource:
        # Formats without containers, and state dicts of modules, do not tell layers/0/weight from layers.0.weight.
        source = super().for_template(names)
        ours = {".".join(split(leaf.name)): leaf for leaf in source.leaves}
        theirs = {".".join(split(name)): name for name in names}
        if len(ours) != len(source.leaves) or len(theirs) != len(names):
            return source
        kept = set(names)
        renamed = {
            leaf.name if leaf.name in kept else theirs.get(joined, leaf.name): leaf for joined, leaf in ours.items()
        }
        return source if len(renamed) != len(ours) else PartialTree(source, renamed, source.tree)


class StoredTree(OtherTree):
    """A tree whose leaves are arrays in files, plain values, and leaves that cannot be read."""

    def __init__(
        self,
        location: Location,
        tree: TreeDocument,
        leaves: Sequence[SavedLeaf],
        values: Mapping[str, StoredArray | Unreadable | NDArray[Any] | None],
        nbytes: int,
        *,
        check: Callable[[], list[Problem]] | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        self.location = location
        self.tree = tree
        self.leaves = leaves
        self.left_out = tuple(left_out)
        self.unreadable = {name: value.what for name, value in values.items() if isinstance(value, Unreadable)}
        self._values = values
        self._check = check
        self._bytes_read = 0
        claimed = sum(value.nbytes for value in values.values() if isinstance(value, StoredArray))
        if claimed > _AMPLIFICATION * nbytes + _SMALL:
            raise DamagedCheckpointError(f"{location}: its arrays claim {claimed} bytes, its files have {nbytes}")

    @classmethod
    def of(cls, location: Location, tree: Any, nbytes: int, **more: Any) -> Self:
        """Take a tree apart whose leaves are :class:`StoredArray`, :class:`Unreadable` and plain values."""
        try:
            flat = flatten(tree)
        except UnsupportedLeafError as error:
            raise DamagedCheckpointError(f"{location}: {error}") from error
        leaves, values = [], {}
        for name, value in zip(flat.names, flat.values, strict=True):
            saved, values[name] = described(name, value)
            leaves.append(SavedLeaf(name, saved))
        return cls(location, TreeDocument(flat.structure), leaves, values, nbytes, **more)

    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        if self.left_out and len(leaves) == len(self.leaves):
            _logger.warning("%s: left out, as they are not data: %s", self.location, ", ".join(self.left_out))
        return super().read_leaves(leaves)

    def _read(self, wanted: Sequence[tuple[SavedLeaf, Box | None]]) -> list[NDArray[Any] | None]:
        refuse_unreadable(self, [leaf for leaf, _ in wanted])
        arrays: list[NDArray[Any] | None] = [None] * len(wanted)
        parts: dict[int, Sequence[StoredPart]] = {}
        boxes: dict[int, Box] = {}
        for index, (leaf, box) in enumerate(wanted):
            value = self._values[leaf.name]
            if value is None or isinstance(value, Unreadable):
                continue
            boxes[index] = whole(value.shape) if box is None else box
            if isinstance(value, np.ndarray):
                arrays[index] = np.array(value[boxes[index].within(whole(value.shape))])
                continue
            try:
                parts[index] = value.parts()
            except DamagedCheckpointError as error:
                if self.location.url in str(error):
                    raise
                what = f"{self.location}: leaf {format_path(leaf.name)}: {error}"
                raise DamagedCheckpointError(what) from error
            if box is not None:
                parts[index] = [part for one in parts[index] if (part := one.within(box)) is not None]
            if [part.shape for part in parts[index]] != [boxes[index].shape]:
                arrays[index] = np.zeros(boxes[index].shape, value.dtype)
        ranges = [
            Range(part.file, part.offset, part.length, index, number, len(found) == 1 and part.strides is None)
            for index, found in parts.items()
            for number, part in enumerate(found)
        ]
        problems: list[tuple[str, str]] = []

        def use(wanted: Range, data: Bytes) -> None:
            part = parts[wanted.array][wanted.chunk]
            try:
                array = part.array(data)
            except DamagedCheckpointError as error:
                failed(wanted, error)
                return
            all_of_it = arrays[wanted.array]
            if all_of_it is None:
                arrays[wanted.array] = _own(array, is_new=wanted.keep)
                return
            here, box = Box.at(part.start, part.shape), boxes[wanted.array]
            common = here.common(box)
            if common is not None:
                all_of_it[common.within(box)] = array[common.within(here)]

        def failed(found: Range, error: Exception) -> None:
            problems.append((format_path(wanted[found.array][0].name), f"{self.file(found.file)}: {error}"))

        with contextlib.ExitStack() as stack:
            files = {
                path: stack.enter_context(self.file(path).open_data()) for path in sorted({one.file for one in ranges})
            }
            self._bytes_read += read_ranges(files, _apart(sorted(ranges)), use, failed)
        if problems:
            raise damaged_leaves(self.location, sorted(problems))
        return arrays

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    def verify(self, advance: Callable[[int], None] = NULL.advance) -> list[Problem]:
        return [*(() if self._check is None else self._check()), *super().verify(advance)]

    def file(self, path: str) -> Location:
        """Return the location of a file whose path a :class:`StoredPart` gives."""
        return self.location / path if path else self.location


class FetchedArray(NamedTuple):
    """An array that a library reads out of a file."""

    path: Path
    name: str  # in the file
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    obstacle: str = ""  # why holdfast does not read it, or empty

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class FetchedTree(OtherTree):
    """A tree whose arrays are read one by one, through :meth:`opened`."""

    def __init__(self, location: Location, arrays: Sequence[FetchedArray]) -> None:
        self.location = location
        with naming(location):
            self.tree, order = nested_tree([(one.path, number) for number, one in enumerate(arrays)])
        self._arrays = {storage_name(one.path): one for one in arrays}
        self.unreadable = {name: one.obstacle for name, one in self._arrays.items() if one.obstacle}
        self.leaves = []
        for one in (arrays[index] for index in order):
            saved = not_read(one.obstacle) if one.obstacle else Saved({"kind": "numpy"}, one.dtype, one.shape)
            self.leaves.append(SavedLeaf(storage_name(one.path), saved))

    @abc.abstractmethod
    def opened(self) -> AbstractContextManager[Callable[[str, Box | None], NDArray[Any]]]:
        """Open the file; yield what reads an array by its name, or a box of it, as far as the format can."""

    def _read(self, wanted: Sequence[tuple[SavedLeaf, Box | None]]) -> list[NDArray[Any] | None]:
        refuse_unreadable(self, [leaf for leaf, _ in wanted])
        found: list[NDArray[Any] | None] = []
        with self.opened() as fetch:
            for leaf, box in wanted:
                try:
                    array = fetch(self._arrays[leaf.name].name, box)
                except Exception as error:
                    raise damaged_leaves(self.location, [(format_path(leaf.name), str(error))]) from error
                if array.shape != (leaf.saved.shape if box is None else box.shape):
                    raise damaged_leaves(self.location, [(format_path(leaf.name), f"it has the shape {array.shape}")])
                dtype: Any = leaf.saved.dtype
                raw = array.dtype.kind == "V"  # the format of the file lacks this type
                # The library has made the array for this call: another copy would take its memory twice.
                found.append(_own(np.asarray(array).view(dtype) if raw else np.asarray(array, dtype), is_new=True))
        return found


def refuse_unreadable(source: TreeSource, leaves: Sequence[SavedLeaf]) -> None:
    names = [leaf.name for leaf in leaves if leaf.name in source.unreadable]
    if names:
        headline = f"{source.location}: these leaves are not data that holdfast reads; load the others with select=:"
        raise UnsupportedLeafError(
            itemized(headline, [f"{format_path(one)}: {source.unreadable[one]}" for one in names])
        )


def _apart(ranges: Sequence[Range]) -> list[Range]:
    """Mark arrays whose bytes overlap in the file to be copied, so that no two share memory."""
    found: list[Range] = []
    file, end = "", 0
    for wanted in ranges:
        shared = wanted.file == file and wanted.offset < end
        found.append(wanted._replace(keep=False) if shared else wanted)
        end = max(end if wanted.file == file else 0, wanted.offset + wanted.length)
        file = wanted.file
    return found


def described(name: str, value: Any) -> tuple[Saved, StoredArray | Unreadable | NDArray[Any] | None]:
    """Return the description of a value in a file, and what it is read from; None for what the description holds."""
    if isinstance(value, StoredArray):
        return Saved(value.details, value.dtype, value.shape), value
    if isinstance(value, Unreadable):
        return not_read(value.what), value
    (leaf,) = describe([name], [value])
    return Saved.of(leaf), None if isinstance(leaf, ValueLeaf) else leaf.pieces[0].array


def not_read(why: str) -> Saved:
    """Describe a leaf that cannot be read: it is listed as text that says why."""
    return Saved({"kind": "str", "value": f"({why}, which is not read)"})


def _own(array: NDArray[Any], *, is_new: bool) -> NDArray[Any]:
    """Return an array in memory that only the caller has, aligned and in C order; copy a new one only if needed."""
    return np.require(array, requirements=["C", "A", "W"]) if is_new else np.array(array, order="C", copy=True)
