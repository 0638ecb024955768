"""Saving a tree to a path, and loading it into its own structure or another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Never, TypeVar, overload

from .arrays import Layout
from .checkpoint import Checkpointer, SaveReport, start_save
from .errors import OptionError
from .foreign_arguments import refuse_unknown
from .handlers import PyTreeCheckpointHandler
from .pytree import collection_paused
from .storage import Helper, Place, as_location

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .pytree import Patterns
    from .sources import CheckpointSource

T = TypeVar("T")


def save(
    path: Place, tree: Any, *, overwrite: bool = False, layout: Layout | None = None, **unknown: Never
) -> SaveReport:
    """Save a tree; when this returns, the checkpoint is atomic, durable and checksummed.

    Args:
        path: The destination, a path or a URL; nothing may exist there yet.
        tree: Containers (dict, list, tuple, namedtuple, dataclass, any type registered with JAX) of numpy, JAX and
            torch arrays, Python and numpy scalars, text, bytes and None.
        overwrite: Replace an existing checkpoint; after a crash, either the old or the new one is there, whole.
        layout: Sizes of chunks, segments and data files.

    Returns:
        The report of the save.

    Raises:
        UnsupportedLeafError: Some leaves cannot be saved; the message names each of them. Nothing was written.
        CheckpointExistsError: Something exists at the path already.
        StorageConflictError: Another save to this path is in progress.
        OwnershipError: The path is a step in the directory of a run that another process owns.
        StorageError: The storage refused an operation; nothing is left behind.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     report = save(f"{directory}/ckpt", {"w": np.arange(3), "step": 7})
    ...     load(f"{directory}/ckpt")
    {'w': array([0, 1, 2]), 'step': 7}
    """
    refuse_unknown("save", unknown, save)
    with collection_paused():
        report = Checkpointer(PyTreeCheckpointHandler(layout=layout)).save(path, tree, force=overwrite)
    assert report is not None
    return report


def save_async(
    path: Place, tree: Any, *, overwrite: bool = False, layout: Layout | None = None, **unknown: Never
) -> Future[SaveReport]:
    """Save a tree in the background; this returns as soon as the tree may be modified again.

    The checkpoint holds the values at the time this returned. Several saves may be in progress, to different paths;
    each keeps a copy of its tree in memory. A program waits for them before it exits. If it has not taken an error
    from the Future by then, the error is logged, and the exit status is not zero.

    Args:
        path: The destination, a path or a URL; nothing may exist there yet.
        tree: As for :func:`save`.
        overwrite: Replace an existing checkpoint; after a crash, either the old or the new one is there, whole.
        layout: Sizes of chunks, segments and data files.

    Returns:
        A Future with the report of the save, which is then durable. It cannot be cancelled. Its error is a
        ``SaveFailedError``, chained to the cause of the failure.

    Raises:
        UnsupportedLeafError: Some leaves cannot be saved; the message names each of them. Nothing was written.
        CheckpointExistsError: Something exists at the path already.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     tree = {"w": np.arange(3)}
    ...     future = save_async(f"{directory}/ckpt", tree)
    ...     tree["w"] += 1
    ...     path = future.result().path
    ...     load(path)
    {'w': array([0, 1, 2])}
    """
    refuse_unknown("save_async", unknown, save_async)
    return start_save(PyTreeCheckpointHandler(layout=layout), path, tree, force=overwrite)


@overload
def load(
    path: Place | Mapping[str, Place],
    *,
    like: None = None,
    select: Patterns | Mapping[str, Any] | None = None,
    item: str | None = None,
) -> Any:
    """Load a checkpoint, or the newest step of a run, into the containers it was saved with, as numpy arrays."""


@overload
def load(
    path: Place | Mapping[str, Place],
    *,
    like: T,
    select: Patterns | None = None,
    item: str | None = None,
    cast: bool = False,
    subset: bool = False,
) -> T:
    """Load a checkpoint into the containers, array libraries and shardings of a template."""


def load(
    path: Place | Mapping[str, Place],
    *,
    like: Any = None,
    select: Patterns | Mapping[str, Any] | None = None,
    item: str | None = None,
    cast: bool = False,
    subset: bool = False,
    **unknown: Never,
) -> Any:
    """Load a checkpoint; needs neither the devices nor the frameworks that it was saved from.

    Args:
        path: A checkpoint, or a directory of steps, of which the newest is loaded. Other libraries' are supported:
            Orbax, safetensors (a file, or a folder with an index), files of ``torch.save`` or Lightning, folders of
            torch.distributed.checkpoint, Flax msgpack files, TensorFlow (a prefix such as ``dir/ckpt-5``), the
            weights in a ``.keras`` or ``.h5`` file (with the extra ``keras``), ``.npz`` files, RLlib directories; also
            a folder of arrays written by TensorStore (zarr v3 in OCDBT), which is loaded as a dictionary of them.
            A dictionary of patterns and such paths builds one tree from several checkpoints: ``{"encoder/**":
            "runs/a", "**": "runs/b"}``. Each leaf, identified by its own path, comes from the checkpoint of the first
            pattern that matches it; containers that several checkpoints share become dictionaries.
        like: A template. Its containers, array libraries and shardings determine the result, and its dtypes and
            shapes are checked. Leaves may be arrays or abstract, such as ``jax.ShapeDtypeStruct``. A flax.nnx module,
            abstract or not, gives a new module, and stands for its ``nnx.state`` and for dictionaries of it.
            Without a template, the saved containers are returned with numpy arrays, and namedtuples and dataclasses as
            dictionaries.
        select: Patterns of leaf paths such as ``"params/**"``; only matching leaves are read, and a template has just
            those. Or a dictionary from patterns to what to read from matching arrays, as an index of numpy's basic
            indexing: ``{"embedding/**": np.s_[:1000], "step": ...}``; the first pattern that matches a leaf applies.
            Only the chunks that a selection needs are read.
        item: The item to load, if the checkpoint has several; None loads the only one, or all into a dictionary.
        cast: Cast leaves whose dtype differs from the template: floats to floats, integers to integers, complex to
            complex numbers. Floats are rounded; an integer or a finite float that the dtype cannot hold is an error. A
            log message (level INFO) lists the cast leaves.
        subset: Whether the template may lack leaves of the checkpoint; such leaves are not read.

    Returns:
        The tree, or a dictionary of items.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        DamagedCheckpointError: The stored data fails its checks.
        TreeMismatchError: Template and checkpoint differ; the message lists every mismatched leaf.
        UnsupportedLeafError: Another library's file holds objects that only running code can restore; the
            message names them. Nothing was run, and ``select=`` loads the rest.
        IndexError: ``select`` has an index that does not fit its array.
        OptionError: There are several items and ``like`` or ``select`` are given; ``select`` has indexes and ``like``
            is given, or an index for a value that is not an array; ``cast`` or ``subset`` are given without a template;
            two checkpoints have a path that is not a container with keys in both.
    """
    refuse_unknown("load", unknown, load)
    from .sources import read_checkpoint, read_merged  # imported lazily: a save needs nothing that reads

    if like is None and (cast or subset):
        raise OptionError("cast=True and subset=True say how a template is filled: give one with like=")
    allowed = {"cast": cast, "subset": subset}
    if isinstance(path, Mapping):
        return read_merged(path, item, lambda checkpoint: _load(checkpoint, like, select, None, allowed))
    return read_checkpoint(as_location(path), lambda checkpoint: _load(checkpoint, like, select, item, allowed))


def load_async(
    path: Place | Mapping[str, Place],
    *,
    like: Any = None,
    select: Patterns | Mapping[str, Any] | None = None,
    item: str | None = None,
    cast: bool = False,
    subset: bool = False,
    **unknown: Never,
) -> Future[Any]:
    """Load a checkpoint in the background.

    Args:
        path: A checkpoint, as for :func:`load`.
        like: A template, as for :func:`load`; it must not change until the Future is done.
        select: What to load, as for :func:`load`.
        item: The item to load, as for :func:`load`.
        cast: Whether to cast leaves, as for :func:`load`.
        subset: Whether the template may lack leaves, as for :func:`load`.

    Returns:
        A Future with what :func:`load` returns, or with the error that it raises. It cannot be cancelled, and a program
        waits for it before it exits.
    """
    from concurrent.futures import Future  # imported lazily: a save does not need it

    refuse_unknown("load_async", unknown, load_async)
    arguments: dict[str, Any] = {"like": like, "select": select, "item": item, "cast": cast, "subset": subset}
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            tree = load(path, **arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(tree)

    Helper(work, "holdfast-load").start()
    return future


def _load(
    checkpoint: CheckpointSource,
    like: Any,
    select: Patterns | Mapping[str, Any] | None,
    item: str | None,
    allowed: Mapping[str, bool],
) -> Any:
    checkpoint.check_item(item)
    if isinstance(select, Mapping):
        if like is not None:
            raise OptionError(
                f"{checkpoint.location}: select= with indexes gives arrays of numpy, so that like= cannot be a "
                "template; leave one of them out"
            )
        from .sources import load_parts

        return load_parts(checkpoint, item, select)
    wanted = [item] if item is not None else checkpoint.items_to_load()
    if len(wanted) == 1:
        return checkpoint.load(wanted[0], like, select, **allowed)
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
    r"""Load what :func:`apply_transformations` would take from a checkpoint, without reading anything else.

    Args:
        path: A checkpoint, or a directory of steps, of which the newest is loaded; other libraries' are supported.
        transformations: :class:`Transform` objects by key. ``value_fn`` receives a numpy array or a Python
            value. ``multi_value_fn`` receives the saved tree as mappings and sequences that read a leaf when it is
            indexed. Functions receive read-only arrays; their results must fit the new tree.
        new_tree: The template: its containers, array libraries and shardings determine the result, and its dtypes
            and shapes are checked. ``...`` takes the saved leaf. Leaves that are kept need values; all others may be
            abstract, such as ``jax.ShapeDtypeStruct``.
        default_to_original: Whether keys that no transformation names come from the checkpoint if it has them (True)
            or from the new tree (False).
        item: The item to load, if the checkpoint has several trees.

    Returns:
        A tree with the containers of the new tree.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or no such item.
        DamagedCheckpointError: Required data fails its checks.
        OptionError: A transformation is invalid, or there are several items and none is named.
        TreeMismatchError: Some keys cannot be filled from the checkpoint; the message names all of them.

    >>> import tempfile, numpy as np
    >>> from holdfast import Transform, save
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     report = save(f"{directory}/ckpt", {"layer": {"w": np.arange(3)}, "step": 7})
    ...     load_transformed(f"{directory}/ckpt", {"dense": Transform(original_key="layer")}, {"dense": {"w": ...}})
    {'dense': {'w': array([0, 1, 2])}}
    """
    from .sources import read_checkpoint

    def read(checkpoint: CheckpointSource) -> Any:
        return checkpoint.load_transformed(
            checkpoint.only_tree(item), transformations, new_tree, default_to_original=default_to_original
        )

    return read_checkpoint(as_location(path), read)
