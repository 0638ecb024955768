"""Checkpoints that are open: handles in the place of arrays, which read the parts that an index selects."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import os
import pickle
import stat
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import SavedLeaf, TreeSource, leaf_as, leaf_values, selected_values
from ..errors import CheckpointNotFoundError, DamagedCheckpointError, ObjectNotFoundError, OptionError, StateError
from ..forks import cached_property
from ..pytree import ARRAY_KINDS, LeafRequest, PathFilter, Patterns, collection_paused, format_path
from ..storage import Location, Place, as_location
from .discovery import NATIVE
from .native import read_checkpoint
from .protocol import TREE, CheckpointSource


class OpenCheckpoint:
    """An open checkpoint; a context manager that gives the tree and closes the checkpoint at its end.

    Attributes:
        tree: The saved containers, with an :class:`ArrayHandle` in the place of every array. Values that are no arrays
            are as they were saved.
    """

    def __init__(self, source: CheckpointSource, item: str | None, select: Patterns | None) -> None:
        self._trees: list[_OpenTree] = []
        source.check_item(item)
        wanted = [item] if item is not None else source.items_to_load()
        if select is not None:
            wanted = [source.only_tree(item)]
        trees = {
            name: self._tree(source, name, select) if source.items[name] == TREE else source.load(name)
            for name in wanted
        }
        self.tree: Any = trees if len(wanted) > 1 else trees[wanted[0]]

    @property
    def bytes_read(self) -> int:
        """Bytes read of its trees so far, including the index and gaps between chunks.

        0 for a format whose own library reads it, such as HDF5.
        """
        return sum(opened.bytes_read for opened in self._trees)

    def close(self) -> None:
        """End the reading: handles of this checkpoint cannot read any more, arrays that were read stay valid."""
        for opened in self._trees:
            opened.close()

    def __enter__(self) -> Any:
        return self.tree

    def __exit__(self, *_: object) -> None:
        self.close()

    @collection_paused()
    def _tree(self, checkpoint: CheckpointSource, item: str, select: Patterns | None) -> Any:
        source = checkpoint.selected_tree(item, select)
        opened = _OpenTree(checkpoint, item, source)
        self._trees.append(opened)
        values = leaf_values(source, [leaf for leaf in source.leaves if not is_array(leaf)])
        rest = iter(values)
        leaves = [ArrayHandle(leaf, opened.address, opened) if is_array(leaf) else next(rest) for leaf in source.leaves]
        return checkpoint.complete(item, source, source.tree.build(leaves))


class _Address(NamedTuple):
    """What another process needs to open the tree of a handle."""

    location: Location  # the checkpoint
    item: str  # the name of the tree
    identity: str  # text that differs where another checkpoint is at the same path
    is_known: bool  # whether it is the same for the same checkpoint; otherwise it is random


class _OpenTree:
    """A tree that handles read."""

    def __init__(self, checkpoint: CheckpointSource, item: str, tree: TreeSource) -> None:
        found = tree.fingerprint or _files_of(tree)
        identity = hashlib.blake2b(found.encode() or os.urandom(16), digest_size=16).hexdigest()
        self.format = checkpoint.format
        self.address = _Address(checkpoint.location, item, identity, bool(found))
        self._files = {} if tree.fingerprint else _identities(tree)
        self._reads: tuple[CheckpointSource, TreeSource] | None = checkpoint, tree
        self._bytes_read = 0  # the count at the time of `close`

    @property
    def bytes_read(self) -> int:
        reads = self._reads  # another thread may close it meanwhile
        return self._bytes_read if reads is None else reads[1].bytes_read

    def close(self) -> None:
        """Let go of what the tree has in memory, and of its files, although its handles are kept."""
        self._bytes_read = self.bytes_read
        self._reads = None

    def opened(self, leaf: SavedLeaf, action: str) -> tuple[CheckpointSource, TreeSource]:
        """Return what is open; the error without says that ``action`` is impossible for a leaf."""
        if self._reads is None:
            raise StateError(
                f"{self.address.location}: {format_path(leaf.name)} cannot be {action}, as the checkpoint is closed; "
                f"{'read' if action == 'read' else 'pickle it'} inside of the with block, or open it again"
            )
        return self._reads

    @cached_property
    def leaves(self) -> dict[str, SavedLeaf]:
        """The leaves by their names."""
        reads = self._reads
        return {} if reads is None else {leaf.name: leaf for leaf in reads[1].leaves}

    @contextlib.contextmanager
    def reading(self, leaf: SavedLeaf) -> Iterator[TreeSource]:
        """Explain why a leaf cannot be read: the checkpoint is closed, or deleted by its run, or files are replaced."""
        checkpoint, tree = self.opened(leaf, "read")
        try:
            yield tree
        except (DamagedCheckpointError, ObjectNotFoundError) as error:
            if not checkpoint.has_changed():
                raise
            raise _replaced(checkpoint.location, checkpoint.format) from error
        # Files of other libraries do not tell that they belong together.
        now = _identities(tree) if self._files else {}
        if any(now.get(path, mark) != mark for path, mark in self._files.items()):
            raise _replaced(checkpoint.location, checkpoint.format)


def _replaced(location: Location, found: str) -> CheckpointNotFoundError:
    """Return the error about a handle of a checkpoint that another one has replaced; ``found`` is the format now."""
    if found == NATIVE:
        return CheckpointNotFoundError(
            f"{location}: its run has deleted or replaced this checkpoint since it was opened; open it again, "
            "and pin a step that must stay (holdfast pin)"
        )
    return CheckpointNotFoundError(
        f"{location}: another program has replaced this checkpoint since it was opened, or written to its files; "
        f"open it again; of one that must stay, make a copy first (`holdfast import` reads {found})"
    )


def _files_of(tree: TreeSource) -> str:
    """Return names, sizes and times of the files of another library that hold a tree; "" in a store."""
    if not tree.location.is_local:
        return ""
    top, files = os.fspath(tree.location), tree.files_read
    below = (os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names)
    found = [os.readlink(top) if os.path.islink(top) else ""]
    for path in sorted([*below] or [top] if files is None else map(os.fspath, files)):
        with contextlib.suppress(OSError):  # Another program has removed it.
            status = os.stat(path)
            found.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return "\n".join(found)


def _identities(tree: TreeSource) -> dict[str, tuple[int, ...]]:
    """Return what differs where another file, or another folder, has taken the place of one that is read."""
    found = {}
    for path in [tree.location, *(tree.files_read or ())] if tree.location.is_local else ():
        with contextlib.suppress(OSError):  # An open file that was deleted stays readable.
            status = os.stat(path)
            times = (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else ()
            found[os.fspath(path)] = status.st_dev, status.st_ino, *times
    return found


@functools.lru_cache(maxsize=16)
def _reopened(address: _Address) -> _OpenTree:
    """Open the tree of a handle that comes from another process; the tasks of this process share it."""
    location, item = address.location, address.item
    try:
        opened = read_checkpoint(location, lambda source: _OpenTree(source, item, source.tree(item)))
    except CheckpointNotFoundError as error:
        if location.is_local or location.is_remote:
            raise
        raise CheckpointNotFoundError(f"{error}; the memory of a process is not there in another one") from error
    if address.is_known and opened.address != address:
        raise _replaced(location, opened.format)
    return opened


class ArrayHandle:
    """An array of an open checkpoint. An index reads the elements that it selects, into an array of numpy.

    Only the chunks that a selection needs are read, and each of them is compared with its checksum if the format has
    one. Any number of threads may read at the same time. A handle can be pickled while its checkpoint is open: another
    process opens the checkpoint again when it reads, and refuses one that has replaced it. Of a checkpoint of another
    library, the sizes and times of its files show that; in an object store, nothing does, and its arrays only have to
    have the same shapes and types.

    Attributes:
        shape: Its shape.
        dtype: The type of its elements.
        ndim: The number of axes.
        size: The number of elements.
        itemsize: Bytes of an element.
        nbytes: Bytes of all elements.
        read_only: True: handles do not write.
    """

    ndim: int
    size: int
    itemsize: int
    nbytes: int
    read_only: bool = True

    def __init__(
        self,
        leaf: SavedLeaf,
        address: _Address,
        opened: _OpenTree | None = None,
        chunks: tuple[int, ...] | None = None,
    ) -> None:
        assert leaf.saved.shape is not None
        assert leaf.saved.dtype is not None
        self._leaf = leaf
        self._address = address
        self._opened = opened  # None: in another process, which opens it when it reads
        self._chunks = chunks
        self.shape: tuple[int, ...] = leaf.saved.shape
        self.dtype: np.dtype[Any] = leaf.saved.dtype
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.itemsize, self.nbytes = self.dtype.itemsize, leaf.nbytes

    def _open(self) -> _OpenTree:
        if self._opened is not None:
            return self._opened
        opened = _reopened(self._address)
        if opened.leaves.get(self._leaf.name) != self._leaf:
            raise _replaced(self._address.location, opened.format)
        return opened

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle where the array is; it is opened again where it is read."""
        if self._opened is not None:
            self._opened.opened(self._leaf, "pickled")
        try:
            pickle.dumps(self._address.location)
        except Exception as error:
            raise StateError(
                f"{self._address.location}: {self.path} cannot be pickled, as the file system that was passed cannot "
                f"({error}); open the checkpoint by a URL"
            ) from error
        return type(self), (self._leaf, self._address, None, self.chunks)

    def __dask_tokenize__(self) -> tuple[str, ...]:
        """Return what is the same for the same bytes of the same checkpoint, for the names of dask."""
        location, item, identity, _ = self._address
        return "holdfast", str(location), item, self._leaf.name, identity

    @property
    def path(self) -> str:
        """The path of its leaf, such as ``params/dense/kernel``."""
        return format_path(self._leaf.name)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The shape of the parts in which it is read; all of the array if the format has no chunks."""
        if self._chunks is None:
            with self._open().reading(self._leaf) as tree:
                self._chunks = tree.chunks(self._leaf)
        return self._chunks

    @property
    def cdata_shape(self) -> tuple[int, ...]:
        """The number of chunks along each axis, by the name that zarr gives it."""
        return tuple(map(len, self._grid()))

    @property
    def sharding(self) -> str:
        """How it was divided among devices, as text for users; ``""`` if it was not."""
        return self._leaf.saved.sharding_text

    @property
    def nchunks(self) -> int:
        """The number of chunks."""
        return math.prod(self.cdata_shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.path} has no axes, and so no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Read the elements that integers, slices, ``...`` and ``None`` select, as numpy does."""
        with self._open().reading(self._leaf) as tree:
            (found,) = selected_values(tree, [self._leaf], [index])
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self.path} cannot become an array without a copy: it is read from a file")
        return np.asarray(self[...], dtype)

    def __iter__(self) -> Iterator[Any]:
        """Generate the elements of the first axis; the rows of a chunk are read together."""
        rows = self.chunks[0] if len(self) else 1
        for start in range(0, len(self), rows):
            yield from self[start : start + rows]

    def iter_chunks(self) -> Iterator[tuple[tuple[slice, ...], NDArray[Any]]]:
        """Generate the place of every chunk, as an index, and its elements, in the order of the array."""
        for index in itertools.product(*self._grid()):
            yield index, self[(*index, ...)]

    def to_jax(self, sharding: Any = None) -> Any:
        """Read all of it as an array of jax.

        Args:
            sharding: A ``jax.sharding.Sharding``; each process reads the parts of its own devices. None puts the array
                on the default device.

        Returns:
            The array; typed keys for an array that was saved as such.
        """
        return self._as("jax", sharding)

    def to_torch(self) -> Any:
        """Read all of it as a tensor of torch in the memory of the host."""
        return self._as("torch")

    def _as(self, kind: str, sharding: Any = None) -> Any:
        with self._open().reading(self._leaf) as tree:
            return leaf_as(tree, self._leaf, LeafRequest(kind=kind, sharding=sharding))

    def _grid(self) -> list[list[slice]]:
        return [
            [slice(start, min(start + size, length)) for start in range(0, length, max(size, 1))]
            for length, size in zip(self.shape, self.chunks, strict=True)
        ]

    def __repr__(self) -> str:
        try:
            parts = f" in {self.nchunks} chunks"
        except StateError:
            parts = ", closed"
        return f"<ArrayHandle {self.path}: {self.dtype}{list(self.shape)}{parts}>"


def is_array(leaf: SavedLeaf) -> bool:
    """Whether a leaf is an array whose elements an index can select; complex numbers of half precision are not."""
    saved = leaf.saved
    return saved.dtype is not None and saved.kind in ARRAY_KINDS and saved.details.get("torch_dtype") != "complex32"


def open(path: Place, *, item: str | None = None, select: Patterns | None = None) -> OpenCheckpoint:  # noqa: A001
    """Open a checkpoint without reading its arrays: each becomes a handle that reads what an index selects.

    >>> import tempfile, numpy as np
    >>> import holdfast as hf
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     report = hf.save(f"{directory}/ckpt", {"w": np.arange(20).reshape(4, 5), "step": 7})
    ...     with hf.open(f"{directory}/ckpt") as tree:
    ...         tree["step"], tree["w"].shape, tree["w"][1:3, ::2]
    (7, (4, 5), array([[ 5,  7,  9],
           [10, 12, 14]]))

    Args:
        path: A checkpoint, or a directory of steps, as for :func:`~holdfast.load`; also of another library.
        item: Which item, if the checkpoint has several; None opens the only one, or all of them as a dictionary.
        select: Patterns of leaf paths such as ``"params/**"``; the tree has only the leaves that match.

    Returns:
        A context manager that gives the tree: the saved containers, with an :class:`ArrayHandle` in the place of every
        array. Without ``with``, its attribute ``tree`` has the tree and its method ``close`` ends the reading.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or no such item.
        DamagedCheckpointError: The index or another small file does not verify; handles raise it for the chunks that
            they read.
        TreeMismatchError: A pattern matches no leaf.
    """

    def opened(source: CheckpointSource) -> OpenCheckpoint:
        place = source.location.without_links()  # Handles stay there where a link is moved.
        return OpenCheckpoint(source, item, select) if place == source.location else read_checkpoint(place, opened)

    return read_checkpoint(as_location(path), opened)


def load_parts(source: CheckpointSource, item: str | None, parts: Mapping[str, Any]) -> Any:
    """Load what an index selects of the arrays that match a pattern; ``...`` is all of an array, or any other value."""
    name = source.only_tree(item)
    tree = source.selected_tree(name, list(parts))
    indexes = {}
    filters = [(pattern, PathFilter(pattern), index) for pattern, index in parts.items()]
    for leaf in tree.leaves:
        pattern, _, index = next(one for one in filters if one[1].chooses(leaf.name.split(".")))
        if index is ... or (isinstance(index, slice) and index == slice(None)):
            continue
        if not is_array(leaf):
            raise OptionError(
                f"{source.location}: {format_path(leaf.name)}, which select={pattern!r} names, is no array that an "
                f"index can select from, but of kind {leaf.saved.kind}; select it with the index ..."
            )
        indexes[leaf.name] = index
    cut = [leaf for leaf in tree.leaves if leaf.name in indexes]
    some = iter(selected_values(tree, cut, [indexes[leaf.name] for leaf in cut]))
    others = iter(leaf_values(tree, [leaf for leaf in tree.leaves if leaf.name not in indexes]))
    built = tree.tree.build([next(some if leaf.name in indexes else others) for leaf in tree.leaves])
    return source.complete(name, tree, built)
