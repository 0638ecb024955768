"""Functions that save a tree to a path and load it back, optionally into a template."""

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
    """Save a tree as an atomic, checksummed checkpoint, and return once it is durable.

    Args:
        path: The destination, as a path or URL; it must not exist unless ``overwrite`` is true.
        tree: Containers (dict, list, tuple, namedtuple, dataclass, any type registered with JAX) of numpy, JAX and
            torch arrays, Python and numpy scalars, text, bytes and None.
        overwrite: Whether to replace an existing checkpoint. A crash leaves either the old or the new one intact.
        layout: The sizes of chunks, segments and data files.

    Returns:
        A report on the save.

    Raises:
        UnsupportedLeafError: Some leaves cannot be saved; the message lists all of them. Nothing was written.
        CheckpointExistsError: The path already exists.
        StorageConflictError: Another save to this path is in progress.
        OwnershipError: The path is a step in a run directory that another process owns.
        StorageError: A storage operation failed; no partial checkpoint is left behind.

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
    """Save a tree in the background, and return as soon as the tree may be modified again.

    The checkpoint holds the values that the tree had when this function returned. Several saves to different paths may
    be in progress at once; each keeps a copy of its tree in memory. The program waits for all saves before it exits. An
    error that has not been retrieved from its Future by then is logged, and the exit status is nonzero.

    Args:
        path: The destination, as a path or URL; it must not exist unless ``overwrite`` is true.
        tree: The tree to save, as for :func:`save`.
        overwrite: Whether to replace an existing checkpoint. A crash leaves either the old or the new one intact.
        layout: The sizes of chunks, segments and data files.

    Returns:
        A Future that resolves to the report of the save once the checkpoint is durable. It cannot be cancelled. If the
        save fails, its exception is a ``SaveFailedError``, chained to the cause.

    Raises:
        UnsupportedLeafError: Some leaves cannot be saved; the message lists all of them. Nothing was written.
        CheckpointExistsError: The path already exists.

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
    """Load a checkpoint, or the newest step of a run, as numpy arrays in the saved containers."""


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
    """Load a checkpoint, even without the devices and frameworks that it was saved with.

    Args:
        path: A checkpoint, or a directory of steps, whose newest step is loaded. Other libraries' formats are also
            supported: Orbax, safetensors (a file, or a folder with an index), files written by ``torch.save`` or
            Lightning, torch.distributed.checkpoint folders, Flax msgpack files, TensorFlow (a prefix such as
            ``dir/ckpt-5``), the weights in a ``.keras`` or ``.h5`` file (with the extra ``keras``), ``.npz`` files,
            RLlib directories, and folders of arrays written by TensorStore (zarr v3 in OCDBT), which are loaded as
            dictionaries. To build one tree from several checkpoints, pass a dictionary that maps patterns to paths:
            ``{"encoder/**": "runs/a", "**": "runs/b"}``. Each leaf is read from the checkpoint of the first pattern
            that matches its path; containers that occur in several checkpoints become dictionaries.
        like: A template. Its containers, array libraries and shardings determine the result, and its dtypes and
            shapes are checked. Leaves may be arrays or abstract values such as ``jax.ShapeDtypeStruct``. A flax.nnx
            module, abstract or not, matches its ``nnx.state``, whether saved directly or as nested dicts; the result is
            a new module. Without a template, the saved containers are returned with numpy arrays; namedtuples and
            dataclasses become dictionaries.
        select: Patterns of leaf paths, such as ``"params/**"``. Only matching leaves are read, and a template must have
            exactly those leaves. This may also be a dictionary that maps patterns to basic numpy indexes, which select
            a part of each matching array: ``{"embedding/**": np.s_[:1000], "step": ...}``. The first pattern
            that matches a leaf applies, and only the required chunks are read.
        item: The item to load. None loads the only item, or a dictionary of all items if there are several.
        cast: Whether to cast leaves whose dtype differs from the template's: floats to floats, integers to integers,
            and complex to complex numbers. Floats are rounded; an integer or a finite float that the dtype cannot
            represent is an error. A log message (level INFO) lists the cast leaves.
        subset: Whether the template may lack leaves of the checkpoint; such leaves are not read.

    Returns:
        The tree, or a dictionary of items.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        DamagedCheckpointError: The stored data fails its checks.
        TreeMismatchError: The template and the checkpoint differ; the message lists every mismatched leaf.
        UnsupportedLeafError: Another library's file contains objects that can only be restored by running code; the
            message names them. No code was run, and ``select=`` can load the other leaves.
        IndexError: An index in ``select`` does not fit its array.
        OptionError: ``like`` or ``select`` is passed for several items; ``select`` with indexes is combined with
            ``like``, or has an index for a leaf that is not an array; ``cast`` or ``subset`` is passed without a
            template; or two checkpoints have values at the same path, and one of them is not a container with keys.
    """
    refuse_unknown("load", unknown, load)
    from .sources import read_checkpoint, read_merged  # imported lazily, because saves do not need it

    if like is None and (cast or subset):
        raise OptionError("cast=True and subset=True control how a template is filled: pass one with like=")
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
        A Future that resolves to the result or the exception of :func:`load`. It cannot be cancelled, and the program
        does not exit before it is done.
    """
    from concurrent.futures import Future  # imported lazily, because synchronous calls do not need it

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
                f"{checkpoint.location}: select= with indexes returns numpy arrays, so like= cannot be used with it; "
                "leave one of them out"
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
    r"""Load a checkpoint through :func:`apply_transformations`, reading only the leaves that the result needs.

    Args:
        path: A checkpoint, or a directory of steps, whose newest step is loaded, as for :func:`load`.
        transformations: A dictionary that maps keys to :class:`Transform` objects. ``value_fn`` receives a numpy array
            or a Python value. ``multi_value_fn`` receives the saved tree as mappings and sequences that read each
            leaf when it is accessed. Both receive read-only arrays, and their results must fit the new tree.
        new_tree: The template. Its containers, array libraries and shardings determine the result, and its dtypes
            and shapes are checked. ``...`` stands for the saved leaf. Leaves that keep their value from the new
            tree must be concrete; all others may be abstract values such as ``jax.ShapeDtypeStruct``.
        default_to_original: Whether keys without a transformation come from the checkpoint if it has them (True)
            or from the new tree (False).
        item: The item to load; required if the checkpoint has several trees.

    Returns:
        A tree with the containers of the new tree.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or no such item.
        DamagedCheckpointError: Required data fails its checks.
        OptionError: A transformation is invalid, or ``item`` is missing although there are several items.
        TreeMismatchError: Some keys cannot be filled from the checkpoint; the message lists all of them.

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
