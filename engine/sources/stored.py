"""Trees in files of other libraries, with containers built from the key paths of the leaves.

Arrays are stored contiguously or in parts, and only requested leaves are read.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import zlib
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
from ..storage import DataReader, Location

# The keys from the root to a leaf: an int is a list index, a str is a dictionary key.
Path = tuple[str | int, ...]


class _Branch(dict[str | int, Any]):
    """A container under construction, which becomes a dictionary or a list."""


def nested(
    leaves: Iterable[tuple[Path, Any]], *, root_is_dict: bool = False, number: Callable[[int], str | int] = int
) -> Any:
    """Build nested dicts from paths and values; dicts whose keys are ``number(0)``, ``number(1)``, ... become lists."""
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
            raise DamagedCheckpointError(f"{list(path)} occurs twice")
        branch[path[-1]] = value
    if root_is_dict:
        return {key: _with_lists(child, number) for key, child in root.items()}
    return _with_lists(root, number)


def _with_lists(value: Any, number: Callable[[int], str | int]) -> Any:
    if not isinstance(value, _Branch):
        return value
    children = {key: _with_lists(child, number) for key, child in value.items()}
    numbers = [number(index) for index in range(len(children))]
    return [children[key] for key in numbers] if children and children.keys() == set(numbers) else children


def nested_tree(entries: Sequence[tuple[Path, Any]]) -> tuple[TreeDocument, list[int]]:
    """Build a tree document from paths and their leaf numbers or empty containers; list the numbers in tree order."""
    inside = [(path, value) for path, value in entries if path]
    root: Any = next((value for path, value in entries if not path), {})
    if inside and isinstance(root, int):
        raise DamagedCheckpointError("a leaf is the whole tree, but there are other leaves")
    flat = flatten(nested(inside) if inside else root)
    return TreeDocument(flat.structure), flat.values


def storage_name(path: Path) -> str:
    return join([str(key) for key in path])


# Key in the details of a None leaf that may represent a container without leaves.
OPTIONAL = "optional"


def without_leaves(source: TreeSource, left_out: set[str]) -> TreeSource:
    """Return a tree without the leaves in ``left_out`` and without the containers that become empty."""
    if not left_out:
        return source
    kept = {leaf.name: leaf for leaf in source.leaves if leaf.name not in left_out}
    return PartialTree(source, kept, source.tree.select([leaf.name in kept for leaf in source.leaves]))


def selected(source: TreeSource, select: Patterns | None) -> TreeSource:
    """Return a tree with only the leaves that match the patterns."""
    if select is None:
        return source
    names = [leaf.name for leaf in source.leaves]
    chosen = choose(names, select)
    return without_leaves(source, {name for name, is_chosen in zip(names, chosen, strict=True) if not is_chosen})


def rooted(source: TreeSource, root: str | None) -> TreeSource:
    """Return the subtree in the container ``root`` of a tree, such as ``model``."""
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
    """Omit leaves that were saved by name only; return the tree, and a line of text for each omitted leaf."""
    left_out = {leaf.name for leaf in source.leaves if leaf.saved.kind in NAME_ONLY}
    if left_out and source.tree.structure is None:
        raise UnsupportedLeafError(f"{source.location}: this was saved as a placeholder: it has no data")
    lines = [f"{format_path(name)} (saved as a placeholder: it has no data)" for name in sorted(left_out)]
    return without_leaves(source, left_out), lines


def without_unreadable(source: TreeSource) -> tuple[TreeSource, list[str]]:
    """Omit unreadable leaves; return the tree, and a line for each omitted leaf. Raise an error if no array is left."""
    left_out = source.unreadable
    lines = [f"{format_path(name)} ({why})" for name, why in sorted(left_out.items())]
    if left_out and not any(leaf.saved.dtype is not None and leaf.name not in left_out for leaf in source.leaves):
        raise UnsupportedLeafError(itemized(f"{source.location}: none of its arrays can be read:", lines))
    return without_leaves(source, set(left_out)), lines


Bytes = NDArray[np.uint8]


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides, counted in elements, describe C order without gaps."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


_logger = logging.getLogger("holdfast")

_DAMAGED = "%d bytes at offset %d do not have the checksum in the file"
_AMPLIFICATION = 16  # maximum ratio of array sizes to file sizes; the ratio exceeds 1 if arrays share memory
_PIECE = 16 << 20  # maximum number of bytes to read at once for a checksum
_SMALL = 64 << 20  # additional bytes of arrays that are accepted regardless of file sizes


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of an array that is stored contiguously in a file."""

    start: tuple[int, ...]  # index of the first element in the whole array
    shape: tuple[int, ...]  # number of elements along each axis
    file: str  # path of the file inside the tree's location; ``""`` if the location is the file itself
    offset: int  # offset of the first byte
    length: int  # number of bytes from the start of the first element to the end of the last
    dtype: np.dtype[Any]  # dtype of the stored elements, including their byte order
    strides: tuple[int, ...] | None = None  # stride along each axis, in elements; None for C order without gaps
    # A function that compares the bytes with a checksum, or None if the file has no checksum for exactly these bytes.
    is_intact: Callable[[Bytes], bool] | None = None
    # A function to apply to the elements after reading, such as complex conjugation, or None.
    finish: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    # A function that decodes the bytes to elements, for example by decompression, or None if the bytes are elements.
    decode: Callable[[Bytes], NDArray[Any]] | None = None
    # A larger part of the file that has a checksum, as (offset, length in bytes, CRC-32), or None.
    surrounding: tuple[int, int, int] | None = None

    def within(self, box: Box) -> StoredPart | None:
        """Return the part limited to a box, or all of it if it is encoded or has a checksum; None if it is outside."""
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
        """Return the elements in native byte order, as a view of ``data`` if possible."""
        if self.is_intact is not None and not self.is_intact(data):
            raise DamagedCheckpointError(_DAMAGED % (self.length, self.offset))
        if self.decode is not None:
            return self.decode(data)
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype.newbyteorder("="))
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self._strides(), strict=True))
        if len(data) != (last + 1) * self.dtype.itemsize or min(self.strides or (0,)) < 0:
            raise DamagedCheckpointError(f"{len(data)} bytes do not hold {self.dtype} elements of shape {self.shape}")
        elements: NDArray[Any] = data.view(self.dtype)
        if self.strides is None:
            elements = elements.reshape(self.shape)
        else:
            steps = [stride * self.dtype.itemsize for stride in self.strides]
            elements = np.lib.stride_tricks.as_strided(elements, self.shape, steps, writeable=False)
        elements = elements.astype(self.dtype.newbyteorder("="), copy=False)
        return elements if self.finish is None else self.finish(elements)


def crc32_of(reader: DataReader, offset: int, length: int) -> int:
    """Return the CRC-32 of a part of a file, reading it in pieces."""
    checksum = 0
    for start in range(offset, offset + length, _PIECE):
        checksum = zlib.crc32(reader.read(start, min(_PIECE, offset + length - start)).data, checksum)
    return checksum


class StoredArray:
    """An unread array in files of another library."""

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
        parts = self._parts()
        if len(parts) != 1:
            raise DamagedCheckpointError(f"expected an array in one part, found {len(parts)} parts")
        return parts[0]

    def parts(self) -> Sequence[StoredPart]:
        """Return the parts, after checking that they cover the array exactly once."""
        parts = self._parts()
        if math.prod(self.shape) != sum(math.prod(part.shape) for part in parts):
            raise DamagedCheckpointError(f"the parts do not hold as many elements as an array of shape {self.shape}")
        parts = [part for part in parts if 0 not in part.shape]
        for part in parts:
            ends = [first + size for first, size in zip(part.start, part.shape, strict=True)]
            if len(ends) != len(self.shape) or any(end > size for end, size in zip(ends, self.shape, strict=True)):
                raise DamagedCheckpointError(f"a part at {part.start} of shape {part.shape} lies outside {self.shape}")
        low = np.array([part.start for part in parts])
        high = low + np.array([part.shape for part in parts])
        for index in range(1, len(parts)):
            if np.any(np.all((low[index] < high[:index]) & (low[:index] < high[index]), axis=1)):
                raise DamagedCheckpointError(f"two parts overlap at {parts[index].start}")
        return parts


class Unreadable:
    """A leaf that is listed but not read, because reading it would require running code from the file."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what


class OtherTree(TreeSource):
    """A tree of another library, with one method that reads both whole arrays and boxes of arrays."""

    @abc.abstractmethod
    def _read(self, wanted: Sequence[tuple[SavedLeaf, Box | None]]) -> list[NDArray[Any] | None]:
        """Read a box of each leaf, or the whole array if the box is None."""

    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        return self._read([(leaf, None) for leaf in leaves])

    def read_boxes(self, leaves: Sequence[SavedLeaf], boxes: Sequence[Sequence[Box]]) -> list[list[NDArray[Any]]]:
        arrays = iter(self._read([(leaf, box) for leaf, wanted in zip(leaves, boxes, strict=True) for box in wanted]))
        return [[array for _ in wanted if (array := next(arrays)) is not None] for wanted in boxes]

    def for_template(self, names: Sequence[str]) -> TreeSource:
        # In flat formats and in state dicts of modules, layers/0/weight and layers.0.weight name the same leaf.
        source = super().for_template(names)
        ours = {".".join(split(leaf.name)): leaf for leaf in source.leaves}
        theirs = {".".join(split(name)): name for name in names}
        if len(ours) != len(source.leaves) or len(theirs) != len(names):
            return source
        equal = set(names)
        renamed = {
            leaf.name if leaf.name in equal else theirs.get(joined, leaf.name): leaf for joined, leaf in ours.items()
        }
        return source if len(renamed) != len(ours) else PartialTree(source, renamed, source.tree)


class StoredTree(OtherTree):
    """A tree of arrays in files, plain values and unreadable leaves."""

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
        self._intact: dict[tuple[str, tuple[int, int, int]], bool] = {}  # verified surroundings of parts, by file
        claimed = sum(value.nbytes for value in values.values() if isinstance(value, StoredArray))
        if claimed > _AMPLIFICATION * nbytes + _SMALL:
            raise DamagedCheckpointError(f"{location}: its arrays claim {claimed} bytes, but its files have {nbytes}")

    @classmethod
    def of(cls, location: Location, tree: Any, nbytes: int, **more: Any) -> Self:
        """Create the source for a tree whose leaves are :class:`StoredArray`, :class:`Unreadable` or plain values."""
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
            _logger.warning("%s: left out because they are not data: %s", self.location, ", ".join(self.left_out))
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
                raise DamagedCheckpointError(f"{self.location}: leaf {format_path(leaf.name)}: {error}") from error
            if box is not None:
                parts[index] = [inside for part in parts[index] if (inside := part.within(box)) is not None]
            if [part.shape for part in parts[index]] != [boxes[index].shape]:
                arrays[index] = np.zeros(boxes[index].shape, value.dtype)
        ranges = [
            Range(part.file, part.offset, part.length, index, number, len(pieces) == 1 and part.strides is None)
            for index, pieces in parts.items()
            for number, part in enumerate(pieces)
        ]
        problems: list[tuple[str, str]] = []

        def use(place: Range, data: Bytes) -> None:
            part = parts[place.array][place.chunk]
            try:
                array = part.array(data)
            except DamagedCheckpointError as error:
                failed(place, error)
                return
            whole_array = arrays[place.array]
            if whole_array is None:
                arrays[place.array] = _own(array, is_new=place.keep)
                return
            here, box = Box.at(part.start, part.shape), boxes[place.array]
            if (common := here.common(box)) is not None:
                whole_array[common.within(box)] = array[common.within(here)]

        def failed(place: Range, error: Exception) -> None:
            problems.append((format_path(wanted[place.array][0].name), f"{self.file(place.file)}: {error}"))

        with contextlib.ExitStack() as stack:
            paths = sorted({place.file for place in ranges})
            files = {path: stack.enter_context(self.file(path).open_data()) for path in paths}
            for place in ranges:
                surrounding = parts[place.array][place.chunk].surrounding
                if surrounding is not None and not self._is_intact(files[place.file], place.file, surrounding):
                    failed(place, DamagedCheckpointError(_DAMAGED % (surrounding[1], surrounding[0])))
            self._bytes_read += read_ranges(files, _apart(sorted(ranges)), use, failed)
        if problems:
            raise damaged_leaves(self.location, sorted(problems))
        return arrays

    def _is_intact(self, reader: DataReader, file: str, surrounding: tuple[int, int, int]) -> bool:
        """Verify, once, the checksum of a part of a file that contains the bytes of an array."""
        key = file, surrounding
        if key not in self._intact:
            offset, length, crc32 = surrounding
            self._intact[key] = crc32_of(reader, offset, length) == crc32
        return self._intact[key]

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    def check_files(self) -> list[Problem]:
        return [] if self._check is None else self._check()

    def verify(self, advance: Callable[[int], None] = NULL.advance) -> list[Problem]:
        return [*self.check_files(), *super().verify(advance)]

    def file(self, path: str) -> Location:
        """Return the location of a file, given its path in a :class:`StoredPart`."""
        return self.location / path if path else self.location


class FetchedArray(NamedTuple):
    """An array in a file that is read through another library."""

    path: Path
    name: str  # the array's name in the file
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    obstacle: str = ""  # reason why holdfast cannot read the array; empty if it can

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class FetchedTree(OtherTree):
    """A tree whose arrays are read one by one with the function that :meth:`opened` yields."""

    def __init__(self, location: Location, arrays: Sequence[FetchedArray]) -> None:
        self.location = location
        with naming(location):
            self.tree, order = nested_tree([(array.path, number) for number, array in enumerate(arrays)])
        self._arrays = {storage_name(array.path): array for array in arrays}
        self.unreadable = {name: array.obstacle for name, array in self._arrays.items() if array.obstacle}
        self.leaves = []
        for array in (arrays[index] for index in order):
            saved = not_read(array.obstacle) if array.obstacle else Saved({"kind": "numpy"}, array.dtype, array.shape)
            self.leaves.append(SavedLeaf(storage_name(array.path), saved))

    @abc.abstractmethod
    def opened(self) -> AbstractContextManager[Callable[[str, Box | None], NDArray[Any]]]:
        """Open the file and yield a function that reads an array by name, or only a box of it if one is given."""

    def _read(self, wanted: Sequence[tuple[SavedLeaf, Box | None]]) -> list[NDArray[Any] | None]:
        refuse_unreadable(self, [leaf for leaf, _ in wanted])
        arrays: list[NDArray[Any] | None] = []
        with self.opened() as fetch:
            for leaf, box in wanted:
                try:
                    array = fetch(self._arrays[leaf.name].name, box)
                except Exception as error:
                    raise damaged_leaves(self.location, [(format_path(leaf.name), str(error))]) from error
                if array.shape != (leaf.saved.shape if box is None else box.shape):
                    raise damaged_leaves(self.location, [(format_path(leaf.name), f"it has the shape {array.shape}")])
                dtype: Any = leaf.saved.dtype
                raw = array.dtype.kind == "V"  # the file format does not support this dtype
                # Do not copy the array: the library has just allocated it, and a copy would double the memory use.
                arrays.append(_own(np.asarray(array).view(dtype) if raw else np.asarray(array, dtype), is_new=True))
        return arrays


def refuse_unreadable(source: TreeSource, leaves: Sequence[SavedLeaf]) -> None:
    names = [leaf.name for leaf in leaves if leaf.name in source.unreadable]
    if names:
        headline = "these leaves are not data that holdfast reads; load the others with select=PATTERN:"
        lines = [f"{format_path(name)}: {source.unreadable[name]}" for name in names]
        raise UnsupportedLeafError(itemized(f"{source.location}: {headline}", lines))


def _apart(ranges: Sequence[Range]) -> list[Range]:
    """Mark ranges that overlap an earlier range in the same file for copying, because arrays must not share memory."""
    marked: list[Range] = []
    file, end = "", 0
    for place in ranges:
        end = end if place.file == file else 0
        marked.append(place._replace(keep=False) if place.offset < end else place)
        file, end = place.file, max(end, place.offset + place.length)
    return marked


def described(name: str, value: Any) -> tuple[Saved, StoredArray | Unreadable | NDArray[Any] | None]:
    """Return the description of a value, and the source of its data (None if the description contains the value)."""
    if isinstance(value, StoredArray):
        return Saved(value.details, value.dtype, value.shape), value
    if isinstance(value, Unreadable):
        return not_read(value.what), value
    (leaf,) = describe([name], [value])
    return Saved.of(leaf), None if isinstance(leaf, ValueLeaf) else leaf.pieces[0].array


def not_read(why: str) -> Saved:
    """Return the description of an unreadable leaf: a string leaf that contains the reason."""
    return Saved({"kind": "str", "value": f"({why}, which is not read)"})


def _own(array: NDArray[Any], *, is_new: bool) -> NDArray[Any]:
    """Return an aligned, writable array in C order that shares no memory; copy a new array only if necessary."""
    return np.require(array, requirements=["C", "A", "W"]) if is_new else np.array(array, order="C", copy=True)
