"""A tree saved to a path, loaded back into its own structure or another one, or opened to read parts of its arrays."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Never, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from .arrays import Layout, SavedLeaf, TreeSource, leaf_as, leaf_values, selected_values
from .checkpoint import Checkpointer, SaveReport
from .errors import CheckpointNotFoundError, DamagedCheckpointError, ObjectNotFoundError, OptionError, StateError
from .handlers import PyTreeCheckpointHandler
from .peer_names import refuse_unknown
from .pytree import ARRAY_KINDS, LeafRequest, PathFilter, Patterns, collection_paused, format_path
from .sources import TREE, CheckpointSource, read_checkpoint
from .storage import Place, as_location

T = TypeVar("T")


def save(
    path: Place, tree: Any, *, overwrite: bool = False, layout: Layout | None = None, **unknown: Never
) -> SaveReport:
    """Save a tree: atomic, durable and checksummed when this returns.

    Args:
        path: Where: a path or a URL; nothing may be there yet.
        tree: Containers (dict, list, tuple, namedtuple, dataclass, any type registered with jax) of numpy, jax and
            torch arrays, Python and numpy scalars, text, bytes and None.
        overwrite: Replace a checkpoint that is there; a crash leaves the old one or the new one, whole.
        layout: Sizes of chunks, segments and data files.

    Returns:
        The report of the save.

    Raises:
        UnsupportedLeafError: A leaf cannot be saved; names every such leaf. Nothing was written.
        CheckpointExistsError: Something is there already.
        StorageConflictError: Another save to this path is under way.
        OwnershipError: The path is that of a step in the directory of a run that another process keeps.
        StorageError: The storage refused; nothing is left behind.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     report = save(f"{directory}/ckpt", {"w": np.arange(3), "step": 7})
    ...     load(f"{directory}/ckpt")
    {'w': array([0, 1, 2]), 'step': 7}
    """
    refuse_unknown("save", unknown, save)
    report = Checkpointer(PyTreeCheckpointHandler(layout=layout)).save(path, tree, force=overwrite)
    assert report is not None
    return report


@overload
def load(
    path: Place, *, like: None = None, select: Patterns | Mapping[str, Any] | None = None, item: str | None = None
) -> Any: ...


@overload
def load(path: Place, *, like: T, select: Patterns | None = None, item: str | None = None) -> T: ...


def load(
    path: Place, *, like: Any = None, select: Patterns | Mapping[str, Any] | None = None, item: str | None = None
) -> Any:
    """Load a checkpoint; needs neither the devices nor the frameworks it was saved from.

    Args:
        path: A checkpoint, or a directory of steps, of which the newest is loaded. It may be one of another library:
            Orbax, safetensors (a file, or a folder with an index), a file of ``torch.save`` or Lightning, a folder of
            torch.distributed.checkpoint, a msgpack file of Flax, TensorFlow's (a prefix such as ``dir/ckpt-5``), the
            weights in a ``.keras`` or ``.h5`` file (with the extra ``keras``), a ``.npz`` file, a directory of RLlib.
            Or a folder of arrays that TensorStore wrote (zarr v3 in OCDBT), which gives a dictionary of them.
        like: A template. Its containers, array libraries and shardings decide what is returned, and its dtypes and
            shapes are checked. Leaves may be arrays or abstract, such as ``jax.ShapeDtypeStruct``. A module of
            flax.nnx, abstract or not, gives a new module, and stands for its ``nnx.state`` and for dictionaries of it.
            Without a template the saved containers are returned with numpy arrays, namedtuples and dataclasses as
            dictionaries.
        select: Patterns of leaf paths such as ``"params/**"``; only leaves that match are read, and a template has just
            those. Or a dictionary of patterns and what to read of the arrays that match, as an index of numpy's basic
            indexing: ``{"embedding/**": np.s_[:1000], "step": ...}``; the first pattern that matches a leaf counts.
            Only the chunks that a selection needs are read.
        item: Which item, if the checkpoint has several; None loads the only one, or all of them into a dictionary.

    Returns:
        The tree, or a dictionary of items.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        DamagedCheckpointError: The stored data does not verify.
        TreeMismatchError: Template and checkpoint differ; lists every leaf that does.
        UnsupportedLeafError: A file of another library holds objects that only running code can restore; names
            them. Nothing was run, and ``select=`` loads the rest.
        IndexError: ``select`` has an index that does not fit its array.
        OptionError: There are several items and ``like`` or ``select`` are given; ``select`` has indexes beside a
            template, or an index for a value that is no array.
    """
    return read_checkpoint(as_location(path), lambda checkpoint: _load(checkpoint, like, select, item))


def _load(
    checkpoint: CheckpointSource, like: Any, select: Patterns | Mapping[str, Any] | None, item: str | None
) -> Any:
    checkpoint.check_item(item)
    if isinstance(select, Mapping):
        if like is not None:
            raise OptionError(
                f"{checkpoint.location}: select= with indexes gives arrays of numpy, so that like= cannot be a "
                "template; leave one of them out"
            )
        return load_parts(checkpoint, item, select)
    wanted = [item] if item is not None else checkpoint.items_to_load()
    if len(wanted) == 1:
        return checkpoint.load(wanted[0], like, select)
    if like is not None or select is not None:
        raise OptionError(
            f"{checkpoint.location} has the items {', '.join(sorted(wanted))}: name one with item= to use like= or "
            "select="
        )
    return {name: checkpoint.load(name) for name in wanted}


def load_transformed(
    path: Place,
    transformations: Any,
    new_tree: Any,
    *,
    default_to_original: bool = True,
    item: str | None = None,
) -> Any:
    r"""Load what :func:`apply_transformations` would take from a checkpoint, and read nothing else of it.

    Args:
        path: A checkpoint, or a directory of steps, of which the newest is loaded; also of another library.
        transformations: :class:`Transform` objects by their keys. ``value_fn`` is given a numpy array or a Python
            value. ``multi_value_fn`` is given the saved tree as mappings and sequences that read a leaf when it is
            indexed. Functions get read-only arrays; their results must fit the new tree.
        new_tree: The template: its containers, array libraries and shardings decide what is returned, and its dtypes
            and shapes are checked. ``...`` takes the saved leaf. Leaves that are kept need values; all others may be
            abstract, such as ``jax.ShapeDtypeStruct``.
        default_to_original: Whether keys that no transformation names come from the checkpoint where it has them (True)
            or from the new tree (False).
        item: Which item, if the checkpoint has several trees.

    Returns:
        A tree of the new tree's containers.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or no such item.
        DamagedCheckpointError: Data that is needed does not verify.
        OptionError: A transformation makes no sense, or there are several items and none is named.
        TreeMismatchError: Keys cannot be filled from the checkpoint; names all of them.

    >>> import tempfile, numpy as np
    >>> from holdfast import Transform, save
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     report = save(f"{directory}/ckpt", {"layer": {"w": np.arange(3)}, "step": 7})
    ...     load_transformed(f"{directory}/ckpt", {"dense": Transform(original_key="layer")}, {"dense": {"w": ...}})
    {'dense': {'w': array([0, 1, 2])}}
    """

    def read(checkpoint: CheckpointSource) -> Any:
        return checkpoint.load_transformed(
            checkpoint.only_tree(item), transformations, new_tree, default_to_original=default_to_original
        )

    return read_checkpoint(as_location(path), read)


# ---- checkpoints that are open


class OpenCheckpoint:
    """An open checkpoint; a context manager that gives the tree and closes the checkpoint at its end.

    Attributes:
        tree: The saved containers, with an :class:`ArrayHandle` in the place of every array. Values that are no arrays
            are as they were saved.
    """

    def __init__(self, source: CheckpointSource, item: str | None, select: Patterns | None) -> None:
        self._source = source
        self._is_closed = False
        self._trees: list[TreeSource] = []
        source.check_item(item)
        wanted = [item] if item is not None else source.items_to_load()
        if select is not None:
            wanted = [source.only_tree(item)]
        trees = {name: self._tree(name, select) if source.items[name] == TREE else source.load(name) for name in wanted}
        self.tree: Any = trees if len(wanted) > 1 else trees[wanted[0]]

    @property
    def bytes_read(self) -> int:
        """Bytes read of its trees so far, those of the index and of gaps between chunks included.

        0 for a format whose own library reads it, such as HDF5.
        """
        return sum(tree.bytes_read for tree in self._trees)

    def close(self) -> None:
        """End the reading: handles of this checkpoint cannot read any more, arrays that were read stay valid."""
        self._is_closed = True

    def __enter__(self) -> Any:
        return self.tree

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @collection_paused()
    def _tree(self, item: str, select: Patterns | None) -> Any:
        source = self._source.selected_tree(item, select)
        self._trees.append(source)
        values = leaf_values(source, [leaf for leaf in source.leaves if not is_array(leaf)])
        rest = iter(values)
        leaves = [ArrayHandle(self, source, leaf) if is_array(leaf) else next(rest) for leaf in source.leaves]
        return self._source.complete(item, source, source.tree.build(leaves))

    @contextlib.contextmanager
    def _reading(self, leaf: SavedLeaf) -> Iterator[None]:
        """Explain why a handle cannot read: the checkpoint is closed, or its run has deleted it."""
        if self._is_closed:
            raise StateError(
                f"{self._source.location}: {format_path(leaf.name)} cannot be read, as the checkpoint is closed; read "
                "inside of the with block, or open it again"
            )
        try:
            yield
        except (DamagedCheckpointError, ObjectNotFoundError) as error:
            if not self._source.has_changed():
                raise
            raise CheckpointNotFoundError(
                f"{self._source.location}: its run has deleted or replaced this checkpoint since it was opened; open "
                "it again, and pin a step that must stay (holdfast pin)"
            ) from error


class ArrayHandle:
    """An array of an open checkpoint. An index reads the elements that it selects, into an array of numpy.

    Only the chunks that a selection needs are read, and each of them is compared with its checksum where the format has
    one. Any number of threads may read at the same time.

    Attributes:
        shape: Its shape.
        dtype: The type of its elements.
    """

    def __init__(self, opened: OpenCheckpoint, source: TreeSource, leaf: SavedLeaf) -> None:
        assert leaf.saved.shape is not None
        assert leaf.saved.dtype is not None
        self._opened = opened
        self._source = source
        self._leaf = leaf
        self.shape: tuple[int, ...] = leaf.saved.shape
        self.dtype: np.dtype[Any] = leaf.saved.dtype

    @property
    def path(self) -> str:
        """The path of its leaf, such as ``params/dense/kernel``."""
        return format_path(self._leaf.name)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The shape of the parts in which it is read; all of the array where the format has no chunks."""
        return self._source.chunks(self._leaf)

    @property
    def sharding(self) -> str:
        """How it was divided among devices, as text for users; ``""`` if it was not."""
        return self._leaf.saved.sharding_text

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def nchunks(self) -> int:
        """The number of chunks."""
        return math.prod(map(len, self._grid()))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.path} has no axes, and so no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Read the elements that integers, slices, ``...`` and ``None`` select, as numpy does."""
        with self._opened._reading(self._leaf):
            (found,) = selected_values(self._source, [self._leaf], [index])
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
        with self._opened._reading(self._leaf):
            return leaf_as(self._source, self._leaf, LeafRequest(kind=kind, sharding=sharding))

    def _grid(self) -> list[list[slice]]:
        return [
            [slice(start, min(start + size, length)) for start in range(0, length, max(size, 1))]
            for length, size in zip(self.shape, self.chunks, strict=True)
        ]

    def __repr__(self) -> str:
        return f"<ArrayHandle {self.path}: {self.dtype}{list(self.shape)} in {self.nchunks} chunks>"


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
    return read_checkpoint(as_location(path), lambda source: OpenCheckpoint(source, item, select))


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
