"""Open checkpoints: trees with handles instead of arrays, which read the parts that an index selects."""

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
        names = [item] if item is not None else source.items_to_load()
        if select is not None:
            names = [source.only_tree(item)]
        trees = {
            name: self._tree(source, name, select) if source.items[name] == TREE else source.load(name)
            for name in names
        }
        self.tree: Any = trees if len(names) > 1 else trees[names[0]]

    @property
    def bytes_read(self) -> int:
        """Bytes read of its trees so far, including the index and gaps between chunks.

        0 for a format whose own library reads it, such as HDF5.
        """
        return sum(opened.bytes_read for opened in self._trees)

    def close(self) -> None:
        """Close the checkpoint: its handles cannot read any more; arrays that were read remain valid."""
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
        rest = iter(leaf_values(source, [leaf for leaf in source.leaves if not is_array(leaf)]))
        leaves = [ArrayHandle(leaf, opened.address, opened) if is_array(leaf) else next(rest) for leaf in source.leaves]
        return checkpoint.complete(item, source, source.tree.build(leaves))


class _Address(NamedTuple):
    """The address of a handle's tree, with which another process opens it."""

    location: Location  # the checkpoint
    item: str  # the name of the tree
    identity: str  # text that changes if another checkpoint replaces this one
    is_stable: bool  # whether the identity is the same for the same checkpoint; otherwise it is random


class _OpenTree:
    """A tree that handles read."""

    def __init__(self, checkpoint: CheckpointSource, item: str, tree: TreeSource) -> None:
        fingerprint = tree.fingerprint or _files_of(tree)
        identity = hashlib.blake2b(fingerprint.encode() or os.urandom(16), digest_size=16).hexdigest()
        self.format = checkpoint.format
        self.address = _Address(checkpoint.location, item, identity, bool(fingerprint))
        self._files = {} if tree.fingerprint else _identities(tree)
        self._reads: tuple[CheckpointSource, TreeSource] | None = checkpoint, tree
        self._bytes_read = 0  # the count at the time of `close`

    @property
    def bytes_read(self) -> int:
        reads = self._reads  # another thread may close it meanwhile
        return self._bytes_read if reads is None else reads[1].bytes_read

    def close(self) -> None:
        """Release the memory and the files of the tree, although its handles remain."""
        self._bytes_read = self.bytes_read
        self._reads = None

    def opened(self, leaf: SavedLeaf, action: str) -> tuple[CheckpointSource, TreeSource]:
        """Return the open checkpoint and its tree; if it is closed, the error says that a leaf cannot be ``action``."""
        if self._reads is None:
            raise StateError(
                f"{self.address.location}: {format_path(leaf.name)} cannot be {action}, as the checkpoint is closed; "
                f"{'read' if action == 'read' else 'pickle it'} inside of the with block, or open it again"
            )
        return self._reads

    @cached_property
    def leaves(self) -> dict[str, SavedLeaf]:
        """The leaves by their names."""
        return {} if self._reads is None else {leaf.name: leaf for leaf in self._reads[1].leaves}

    @contextlib.contextmanager
    def reading(self, leaf: SavedLeaf) -> Iterator[TreeSource]:
        """Yield the tree; raise an error if the checkpoint is closed or deleted, or its files were replaced."""
        checkpoint, tree = self.opened(leaf, "read")
        try:
            yield tree
        except (DamagedCheckpointError, ObjectNotFoundError) as error:
            if not checkpoint.has_changed():
                raise
            raise _replaced(checkpoint.location, checkpoint.format) from error
        # Files of other libraries do not show that they belong together.
        now = _identities(tree) if self._files else {}
        if any(now.get(path, mark) != mark for path, mark in self._files.items()):
            raise _replaced(checkpoint.location, checkpoint.format)


def _replaced(location: Location, new_format: str) -> CheckpointNotFoundError:
    """Return the error about a handle whose checkpoint another one, of ``new_format``, has replaced."""
    if new_format == NATIVE:
        return CheckpointNotFoundError(
            f"{location}: its run has deleted or replaced this checkpoint since it was opened; open it again, "
            "and pin a step that must stay (holdfast pin)"
        )
    return CheckpointNotFoundError(
        f"{location}: another program has replaced this checkpoint since it was opened, or written to its files; "
        f"open it again; of one that must stay, make a copy first (`holdfast import` reads {new_format})"
    )


def _files_of(tree: TreeSource) -> str:
    """Return names, sizes and times of the files of another library's tree; "" in a store."""
    if not tree.location.is_local:
        return ""
    top, files = os.fspath(tree.location), tree.files_read
    below = (os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names)
    lines = [os.readlink(top) if os.path.islink(top) else ""]
    for path in sorted([*below] or [top] if files is None else map(os.fspath, files)):
        with contextlib.suppress(OSError):  # another program has removed it
            status = os.stat(path)
            lines.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return "\n".join(lines)


def _identities(tree: TreeSource) -> dict[str, tuple[int, ...]]:
    """Return facts about the files and folders of a tree that change if another file or folder replaces one."""
    identities = {}
    for path in [tree.location, *(tree.files_read or ())] if tree.location.is_local else ():
        with contextlib.suppress(OSError):  # an open file that was deleted stays readable
            status = os.stat(path)
            times = (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else ()
            identities[os.fspath(path)] = status.st_dev, status.st_ino, *times
    return identities


@functools.lru_cache(maxsize=16)
def _reopened(address: _Address) -> _OpenTree:
    """Open the tree of a handle from another process; the tasks of this process share it."""
    location, item = address.location, address.item
    try:
        opened = read_checkpoint(location, lambda source: _OpenTree(source, item, source.tree(item)))
    except CheckpointNotFoundError as error:
        if location.is_local or location.is_remote:
            raise
        raise CheckpointNotFoundError(f"{error}; the memory of a process is not there in another one") from error
    if address.is_stable and opened.address != address:
        raise _replaced(location, opened.format)
    return opened


class ArrayHandle:
    """An array of an open checkpoint. An index reads the elements that it selects, into an array of numpy.

    Only the chunks that a selection needs are read, and each of them is compared with its checksum if the format has
    one. Any number of threads may read at the same time. A handle can be pickled while its checkpoint is open: another
    process opens the checkpoint again when it reads, and refuses a checkpoint that has replaced it. If another library
    wrote it, the sizes and times of its files show that; in an object store, nothing does, and its arrays only need the
    same shapes and types.

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
        """Pickle the address of the array; the process that reads it opens it again."""
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
        """Return names for dask, which are the same for the same bytes of the same checkpoint."""
        location, item, identity, _ = self._address
        return "holdfast", str(location), item, self._leaf.name, identity

    @property
    def path(self) -> str:
        """The path of its leaf, such as ``params/dense/kernel``."""
        return format_path(self._leaf.name)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The shape of the parts in which it is read; the shape of the array if the format has no chunks."""
        if self._chunks is None:
            with self._open().reading(self._leaf) as tree:
                self._chunks = tree.chunks(self._leaf)
        return self._chunks

    @property
    def cdata_shape(self) -> tuple[int, ...]:
        """The number of chunks along each axis; the name is zarr's."""
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
            (selected,) = selected_values(tree, [self._leaf], [index])
        return selected

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
        """Generate the index of every chunk and its elements, in the order of the array."""
        for index in itertools.product(*self._grid()):
            yield index, self[(*index, ...)]

    def to_jax(self, sharding: Any = None) -> Any:
        """Read the whole array as an array of jax.

        Args:
            sharding: A ``jax.sharding.Sharding``; each process reads the parts of its own devices. None puts the array
                on the default device.

        Returns:
            The array; typed keys if typed keys were saved.
        """
        return self._as("jax", sharding)

    def to_torch(self) -> Any:
        """Read the whole array as a tensor of torch in host memory."""
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
    """Return whether an index can select elements of a leaf, an array not of complex numbers of half precision."""
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
        target = source.location.without_links()  # handles keep it if a link is moved
        return OpenCheckpoint(source, item, select) if target == source.location else read_checkpoint(target, opened)

    return read_checkpoint(as_location(path), opened)


def load_parts(source: CheckpointSource, item: str | None, parts: Mapping[str, Any]) -> Any:
    """Load what an index selects from the arrays that match a pattern; ``...`` selects a whole array or other value."""
    name = source.only_tree(item)
    tree = source.selected_tree(name, list(parts))
    indexes = {}
    filters = [(pattern, PathFilter(pattern), index) for pattern, index in parts.items()]
    for leaf in tree.leaves:
        path = leaf.name.split(".")
        pattern, index = next((pattern, index) for pattern, rule, index in filters if rule.chooses(path))
        if index is ... or (isinstance(index, slice) and index == slice(None)):
            continue
        if not is_array(leaf):
            raise OptionError(
                f"{source.location}: {format_path(leaf.name)}, which select={pattern!r} names, is no array that an "
                f"index can select from, but of kind {leaf.saved.kind}; select it with the index ..."
            )
        indexes[leaf.name] = index
    indexed = [leaf for leaf in tree.leaves if leaf.name in indexes]
    selections = iter(selected_values(tree, indexed, [indexes[leaf.name] for leaf in indexed]))
    others = iter(leaf_values(tree, [leaf for leaf in tree.leaves if leaf.name not in indexes]))
    built = tree.tree.build([next(selections if leaf.name in indexes else others) for leaf in tree.leaves])
    return source.complete(name, tree, built)
