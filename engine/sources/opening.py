"""``hf.open``, which opens a checkpoint as a tree of array handles. Indexing a handle reads the selected elements."""

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
    """A context manager that returns the tree of an open checkpoint, and closes the checkpoint on exit.

    Attributes:
        tree: The saved containers, with an :class:`ArrayHandle` in place of each array and the saved values of all
            other leaves.
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
        """The number of bytes read so far, including the index and gaps between chunks.

        This is 0 for a format that is read through its own library, such as HDF5.
        """
        return sum(opened.bytes_read for opened in self._trees)

    def close(self) -> None:
        """Close the checkpoint. Its handles can no longer read, but arrays already read remain valid."""
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
    """Identifies the tree of a pickled handle, so that another process can open the tree."""

    location: Location  # location of the checkpoint
    item: str  # name of the item
    identity: str  # changes if the checkpoint is replaced
    is_stable: bool  # False if the identity is random, because the checkpoint has no fingerprint


class _OpenTree:
    """An open tree from which array handles read."""

    def __init__(self, checkpoint: CheckpointSource, item: str, tree: TreeSource) -> None:
        fingerprint = tree.fingerprint or _files_of(tree)
        identity = hashlib.blake2b(fingerprint.encode() or os.urandom(16), digest_size=16).hexdigest()
        self.format = checkpoint.format
        self.address = _Address(checkpoint.location, item, identity, bool(fingerprint))
        self._files = {} if tree.fingerprint else _identities(tree)
        self._reads: tuple[CheckpointSource, TreeSource] | None = checkpoint, tree
        self._bytes_read = 0  # final count, set by `close`

    @property
    def bytes_read(self) -> int:
        reads = self._reads  # a local reference, because another thread may close the tree
        return self._bytes_read if reads is None else reads[1].bytes_read

    def close(self) -> None:
        """Release the tree's memory and files, even if handles to it still exist."""
        self._bytes_read = self.bytes_read
        self._reads = None

    def opened(self, leaf: SavedLeaf, action: str) -> tuple[CheckpointSource, TreeSource]:
        """Return the checkpoint and its tree. After `close`, raise an error: "<leaf> cannot be <action>"."""
        if self._reads is None:
            raise StateError(
                f"{self.address.location}: {format_path(leaf.name)} cannot be {action}: the checkpoint is closed; "
                f"{'read' if action == 'read' else 'pickle it'} inside the with block, or open it again"
            )
        return self._reads

    @cached_property
    def leaves(self) -> dict[str, SavedLeaf]:
        return {} if self._reads is None else {leaf.name: leaf for leaf in self._reads[1].leaves}

    @contextlib.contextmanager
    def reading(self, leaf: SavedLeaf) -> Iterator[TreeSource]:
        """Yield the tree; raise an error if the checkpoint is closed, deleted or replaced."""
        checkpoint, tree = self.opened(leaf, "read")
        try:
            yield tree
        except (DamagedCheckpointError, ObjectNotFoundError) as error:
            if not checkpoint.has_changed():
                raise
            raise _replaced(checkpoint.location, checkpoint.format) from error
        # Files of other libraries do not show which checkpoint they belong to, so check that no file was replaced.
        now = _identities(tree) if self._files else {}
        if any(now.get(path, mark) != mark for path, mark in self._files.items()):
            raise _replaced(checkpoint.location, checkpoint.format)


def _replaced(location: Location, new_format: str) -> CheckpointNotFoundError:
    """Return the error for a handle whose checkpoint was replaced by a checkpoint in ``new_format``."""
    if new_format == NATIVE:
        return CheckpointNotFoundError(
            f"{location}: its run has deleted or replaced this checkpoint since it was opened; open it again, and pin "
            "steps that must be kept (holdfast pin)"
        )
    return CheckpointNotFoundError(
        f"{location}: since it was opened, another program has replaced this checkpoint or written to its files; open "
        f"it again; to keep it unchanged, make a copy first (`holdfast import` reads {new_format})"
    )


def _files_of(tree: TreeSource) -> str:
    """Return the paths, sizes and modification times of a tree's local files as text, or "" in an object store."""
    if not tree.location.is_local:
        return ""
    top, files = os.fspath(tree.location), tree.files_read
    below = (os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names)
    lines = [os.readlink(top) if os.path.islink(top) else ""]
    for path in sorted([*below] or [top] if files is None else map(os.fspath, files)):
        with contextlib.suppress(OSError):  # another program has removed the file
            status = os.stat(path)
            lines.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return "\n".join(lines)


def _identities(tree: TreeSource) -> dict[str, tuple[int, ...]]:
    """Return properties of a tree's files and folders that change when one of them is replaced."""
    identities = {}
    for path in [tree.location, *(tree.files_read or ())] if tree.location.is_local else ():
        with contextlib.suppress(OSError):  # an open file remains readable after it is deleted
            status = os.stat(path)
            times = (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else ()
            identities[os.fspath(path)] = status.st_dev, status.st_ino, *times
    return identities


@functools.lru_cache(maxsize=16)
def _reopened(address: _Address) -> _OpenTree:
    """Open the tree of a handle that was pickled in another process, and cache it for all tasks in this process."""
    location, item = address.location, address.item
    try:
        opened = read_checkpoint(location, lambda source: _OpenTree(source, item, source.tree(item)))
    except CheckpointNotFoundError as error:
        if location.is_local or location.is_remote:
            raise
        raise CheckpointNotFoundError(f"{error}; a process cannot access the memory of another one") from error
    if address.is_stable and opened.address != address:
        raise _replaced(location, opened.format)
    return opened


class ArrayHandle:
    """An array in an open checkpoint. Indexing reads the selected elements into a numpy array.

    Only the required chunks are read, and each of them is verified if the format has checksums. Any number of threads
    can read at the same time. A handle can be pickled while its checkpoint is open. The process that unpickles it opens
    the checkpoint again on the first read, and raises an error if the checkpoint was replaced. Replaced checkpoints of
    other libraries are detected by the sizes and modification times of their files; in object stores, only by the
    shapes and dtypes of their arrays.

    Attributes:
        shape: The shape of the array.
        dtype: The dtype of the elements.
        ndim: The number of axes.
        size: The number of elements.
        itemsize: The size of an element in bytes.
        nbytes: The total size of all elements in bytes.
        read_only: Always True, because handles cannot write.
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
        self._opened = opened  # None after unpickling in another process; the first read then opens the tree
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
        """Pickle the address of the array; the process that unpickles it opens the checkpoint on the first read."""
        if self._opened is not None:
            self._opened.opened(self._leaf, "pickled")
        try:
            pickle.dumps(self._address.location)
        except Exception as error:
            raise StateError(
                f"{self._address.location}: {self.path} cannot be pickled, because its file system cannot be "
                f"({error}); open the checkpoint by its URL"
            ) from error
        return type(self), (self._leaf, self._address, None, self.chunks)

    def __dask_tokenize__(self) -> tuple[str, ...]:
        """Return a tuple by which dask identifies the contents of the array."""
        location, item, identity, _ = self._address
        return "holdfast", str(location), item, self._leaf.name, identity

    @property
    def path(self) -> str:
        """The path of the array's leaf, such as ``params/dense/kernel``."""
        return format_path(self._leaf.name)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The shape of the chunks in which the array is read, or the shape of the array if the format has no chunks."""
        if self._chunks is None:
            with self._open().reading(self._leaf) as tree:
                self._chunks = tree.chunks(self._leaf)
        return self._chunks

    @property
    def cdata_shape(self) -> tuple[int, ...]:
        """The number of chunks along each axis, under the name that zarr uses."""
        return tuple(map(len, self._grid()))

    @property
    def sharding(self) -> str:
        """A description of the saved array's sharding over devices; ``""`` if it was not sharded."""
        return self._leaf.saved.sharding_text

    @property
    def nchunks(self) -> int:
        """The number of chunks."""
        return math.prod(self.cdata_shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.path} has no axes, so it has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Read the elements selected by integers, slices, ``...`` and ``None``, as in numpy."""
        with self._open().reading(self._leaf) as tree:
            (selected,) = selected_values(tree, [self._leaf], [index])
        return selected

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self.path} cannot become an array without a copy: it is read from a file")
        return np.asarray(self[...], dtype)

    def __iter__(self) -> Iterator[Any]:
        """Yield the elements along the first axis, reading all rows of a chunk together."""
        rows = self.chunks[0] if len(self) else 1
        for start in range(0, len(self), rows):
            yield from self[start : start + rows]

    def iter_chunks(self) -> Iterator[tuple[tuple[slice, ...], NDArray[Any]]]:
        """Yield the index and the elements of each chunk, in array order."""
        for index in itertools.product(*self._grid()):
            yield index, self[(*index, ...)]

    def to_jax(self, sharding: Any = None) -> Any:
        """Read the whole array as a JAX array.

        Args:
            sharding: A ``jax.sharding.Sharding``; each process reads the shards of its own devices. None puts the array
                on the default device.

        Returns:
            The array, which has a key dtype if typed PRNG keys were saved.
        """
        return self._as("jax", sharding)

    def to_torch(self) -> Any:
        """Read the whole array as a torch tensor in host memory."""
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
    """Return whether a leaf can be indexed, which is the case for all arrays except torch's complex32 tensors."""
    saved = leaf.saved
    return saved.dtype is not None and saved.kind in ARRAY_KINDS and saved.details.get("torch_dtype") != "complex32"


def open(path: Place, *, item: str | None = None, select: Patterns | None = None) -> OpenCheckpoint:  # noqa: A001
    """Open a checkpoint with a lazy handle for each array. Indexing a handle reads only the selected elements.

    >>> import tempfile, numpy as np
    >>> import holdfast as hf
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     report = hf.save(f"{directory}/ckpt", {"w": np.arange(20).reshape(4, 5), "step": 7})
    ...     with hf.open(f"{directory}/ckpt") as tree:
    ...         tree["step"], tree["w"].shape, tree["w"][1:3, ::2]
    (7, (4, 5), array([[ 5,  7,  9],
           [10, 12, 14]]))

    Args:
        path: A checkpoint or a directory of steps, in any format that :func:`~holdfast.load` supports.
        item: The item to open. None opens the only item, or a dictionary of all items if there are several.
        select: Patterns of leaf paths, such as ``"params/**"``. The tree contains only the matching leaves.

    Returns:
        A context manager that returns the tree: the saved containers, with an :class:`ArrayHandle` in place of each
        array. Without ``with``, use its ``tree`` attribute, and call its ``close`` method at the end.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or it has no such item.
        DamagedCheckpointError: The index or another small file fails its checks. Handles raise this error for damaged
            chunks.
        TreeMismatchError: A pattern does not match any leaf.
    """

    def opened(source: CheckpointSource) -> OpenCheckpoint:
        target = source.location.without_links()  # handles keep reading this target if a symlink is changed
        return OpenCheckpoint(source, item, select) if target == source.location else read_checkpoint(target, opened)

    return read_checkpoint(as_location(path), opened)


def load_parts(source: CheckpointSource, item: str | None, parts: Mapping[str, Any]) -> Any:
    """Load the elements selected by ``parts``, which maps leaf patterns to indexes; ``...`` selects whole leaves."""
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
                f"{source.location}: {format_path(leaf.name)}, which select={pattern!r} matches, is of kind "
                f"{leaf.saved.kind}, not an array that can be indexed; select it with the index ..."
            )
        indexes[leaf.name] = index
    indexed = [leaf for leaf in tree.leaves if leaf.name in indexes]
    selections = iter(selected_values(tree, indexed, [indexes[leaf.name] for leaf in indexed]))
    others = iter(leaf_values(tree, [leaf for leaf in tree.leaves if leaf.name not in indexes]))
    built = tree.tree.build([next(selections if leaf.name in indexes else others) for leaf in tree.leaves])
    return source.complete(name, tree, built)
