"""Trees whose leaves lie in files of other libraries: read when they are asked for, and only those."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, UnsupportedLeafError
from ..item import Problem, SavedLeaf
from ..item.extents import Range, read_ranges
from ..storage import Location
from ..tree import Saved, Skeleton, ValueLeaf, describe, display, flatten, split
from .stored_array import Bytes, StoredArray, StoredPart, Unreadable

logger = logging.getLogger("holdfast")

_AMPLIFICATION = 16  # times the bytes of the files: what views of shared memory may come to all together
_SMALL = 64 << 20  # bytes of arrays that are fine whatever the files' size


class StoredTree:
    """A tree whose leaves lie in files of another library; a `TreeSource`.

    Args:
        location: The file, or the directory of the files.
        skeleton: The containers.
        leaves: The leaves with what is known of each.
        values: For every leaf by its name: where it is stored, the array itself, or None where `leaves` says all.
        nbytes: Bytes of all files.
        check: Reads what has checksums in the files and says what is wrong; None where nothing has.
        left_out: What the files hold and the tree does not, one line each.

    Raises:
        DamagedCheckpointError: The arrays claim to be far larger than the files.
    """

    def __init__(
        self,
        location: Location,
        skeleton: Skeleton,
        leaves: Sequence[SavedLeaf],
        values: Mapping[str, StoredArray | Unreadable | NDArray[Any] | None],
        nbytes: int,
        *,
        check: Callable[[], list[Problem]] | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        self.location = location
        self.skeleton = skeleton
        self.leaves = list(leaves)
        self.left_out = tuple(left_out)
        self._values = values
        self._check = check
        claimed = sum(value.nbytes for value in values.values() if isinstance(value, StoredArray))
        if claimed > _AMPLIFICATION * nbytes + _SMALL:
            raise DamagedCheckpointError(f"{location}: its arrays claim {claimed} bytes, its files have {nbytes}")

    @classmethod
    def of(cls, location: Location, tree: Any, nbytes: int, **more: Any) -> StoredTree:
        """Takes a tree apart whose leaves are :class:`StoredArray`, :class:`Unreadable` and plain values.

        Raises:
            DamagedCheckpointError: As above, or the containers cannot be stored.
        """
        try:
            flat = flatten(tree)
        except UnsupportedLeafError as error:
            raise DamagedCheckpointError(f"{location}: {error}") from error
        leaves, values = [], {}
        for name, value in zip(flat.names, flat.values, strict=True):
            saved, values[name] = _described(name, value)
            leaves.append(SavedLeaf(name, saved))
        return cls(location, Skeleton(flat.structure), leaves, values, nbytes, **more)

    def read(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        """Reads some of :attr:`leaves`; see `TreeSource.read`."""
        self._refuse(leaves)
        if self.left_out and len(leaves) == len(self.leaves):
            logger.warning("%s: left out, as they are no data: %s", self.location, ", ".join(self.left_out))
        arrays: list[NDArray[Any] | None] = [self._in_memory(leaf) for leaf in leaves]
        wanted = {index: value for index, leaf in enumerate(leaves) if (value := self._stored(leaf)) is not None}
        parts: dict[int, Sequence[StoredPart]] = {}
        for index, value in wanted.items():
            with self._naming(leaves[index]):
                parts[index] = value.parts()
            if len(parts[index]) != 1:
                arrays[index] = np.zeros(value.shape, value.dtype)
        ranges = [
            Range(part.file, part.offset, part.length, index, number, len(found) == 1 and part.strides is None)
            for index, found in parts.items()
            for number, part in enumerate(found)
        ]
        problems: list[str] = []

        def use(wanted: Range, data: Bytes) -> None:
            part = parts[wanted.array][wanted.chunk]
            try:
                array = part.array(data)
            except DamagedCheckpointError as error:
                failed(wanted, error)
                return
            whole = arrays[wanted.array]
            if whole is None:
                arrays[wanted.array] = _own(array, data if wanted.keep else None)
            else:
                whole[tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))] = array

        def failed(wanted: Range, error: Exception) -> None:
            problems.append(f"{display(leaves[wanted.array].name)}: {self._file(wanted.file)}: {error}")

        with contextlib.ExitStack() as stack:
            files = {
                path: stack.enter_context(self._file(path).open_data()) for path in sorted({one.file for one in ranges})
            }
            read_ranges(files, _apart(sorted(ranges)), use, failed)
        if problems:
            raise DamagedCheckpointError("\n  ".join([f"{self.location} is damaged:", *sorted(problems)[:20]]))
        return arrays

    def named_like(self, names: Sequence[str]) -> StoredTree:
        """Returns the same tree with the names of a template, where joining keys by dots gives the same.

        So ``layers/0/weight`` stands for ``layers.0.weight``, and the other way round: formats without containers, and
        the state dicts of modules, do not tell one from the other.

        Args:
            names: The names of the template's leaves.
        """
        ours = {".".join(split(leaf.name)): leaf for leaf in self.leaves}
        theirs = {".".join(split(name)): name for name in names}
        if len(ours) != len(self.leaves) or len(theirs) != len(names):
            return self
        renamed = [
            SavedLeaf(theirs.get(joined, leaf.name), leaf.saved) if leaf.name not in names else leaf
            for joined, leaf in ours.items()
        ]
        if renamed == self.leaves or len({leaf.name for leaf in renamed}) != len(renamed):
            return self
        found = copy.copy(self)
        found.leaves = renamed
        found._values = {new.name: self._values[old.name] for new, old in zip(renamed, self.leaves, strict=True)}
        return found

    def verify(self) -> list[Problem]:
        """Reads everything and keeps nothing; returns what is wrong."""
        problems = [] if self._check is None else self._check()
        for leaf in self.leaves:
            try:
                if self._stored(leaf) is not None:
                    self.read([leaf])
            except DamagedCheckpointError as error:
                problems.append(Problem("", display(leaf.name), str(error)))
        return problems

    def _stored(self, leaf: SavedLeaf) -> StoredArray | None:
        value = self._values[leaf.name]
        return value if isinstance(value, StoredArray) else None

    def _in_memory(self, leaf: SavedLeaf) -> NDArray[Any] | None:
        value = self._values[leaf.name]
        return value.copy() if isinstance(value, np.ndarray) else None

    def _file(self, path: str) -> Location:
        return self.location / path if path else self.location

    def _refuse(self, leaves: Sequence[SavedLeaf]) -> None:
        lines = [
            f"  {display(leaf.name)}: {value.what}"
            for leaf in leaves
            if isinstance(value := self._values[leaf.name], Unreadable)
        ]
        if lines:
            raise UnsupportedLeafError(
                f"{self.location}: these leaves cannot be read, as that would run code of the file's choice; load the "
                "others with select=:\n" + "\n".join(lines[:20])
            )

    @contextlib.contextmanager
    def _naming(self, leaf: SavedLeaf) -> Any:
        try:
            yield
        except DamagedCheckpointError as error:
            if self.location.url in str(error):
                raise
            raise DamagedCheckpointError(f"{self.location}: leaf {display(leaf.name)}: {error}") from error


def _apart(ranges: Sequence[Range]) -> list[Range]:
    """Sees to it that no two arrays keep the same memory, where their bytes overlap in the file."""
    found: list[Range] = []
    file, end = "", 0
    for wanted in ranges:
        shared = wanted.file == file and wanted.offset < end
        found.append(wanted._replace(keep=False) if shared else wanted)
        end = max(end if wanted.file == file else 0, wanted.offset + wanted.length)
        file = wanted.file
    return found


def _described(name: str, value: Any) -> tuple[Saved, StoredArray | Unreadable | NDArray[Any] | None]:
    if isinstance(value, StoredArray):
        return Saved(value.details, value.dtype, value.shape), value
    if isinstance(value, Unreadable):
        return Saved({"kind": "str", "value": f"({value.what}, which is not read)"}), value
    (leaf,) = describe([name], [value])
    if isinstance(leaf, ValueLeaf):
        return Saved(leaf.details), None
    return Saved(leaf.details, leaf.dtype, leaf.shape), leaf.pieces[0].array


def _own(array: NDArray[Any], data: Bytes | None) -> NDArray[Any]:
    """Returns an array in memory that belongs to the caller, aligned and in C order."""
    if data is not None and array.flags.writeable and array.flags.aligned and array.flags.c_contiguous:
        return array
    return np.array(array, order="C", copy=True)
