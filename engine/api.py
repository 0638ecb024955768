"""Save a tree to a path, load it back: the engine in two calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checkpointer import ITEM, Checkpointer, Place
from .commit import read_record
from .errors import CheckpointNotFoundError, DamagedCheckpointError, OptionError
from .handlers import CheckpointHandler, JsonCheckpointHandler, PyTreeCheckpointHandler
from .item import MANIFEST, ArrayDatabase, Layout, Select
from .record import RECORD, ItemRecord
from .report import SaveReport
from .steps import StepIndex
from .storage import Location, as_location

_HANDLERS: Mapping[str, type[CheckpointHandler]] = {
    "pytree": PyTreeCheckpointHandler,
    "json": JsonCheckpointHandler,
}


def save(path: Place, tree: Any, *, overwrite: bool = False, layout: Layout | None = None) -> SaveReport:
    """Saves a tree: atomic, durable and checksummed when this returns.

    Args:
        path: Where: a path or a URL; nothing may be there yet.
        tree: Containers (dict, list, tuple, namedtuple, dataclass, any type registered with jax) of numpy, jax and
            torch arrays, Python and numpy scalars, text, bytes and None.
        overwrite: Replace a checkpoint that is there; a crash leaves the old one or the new one, whole.
        layout: Sizes of chunks, segments and data files.

    Returns:
        What it cost.

    Raises:
        UnsupportedLeafError: A leaf cannot be saved; names every such leaf. Nothing was written.
        CheckpointExistsError: Something is there already.
        StorageError: The storage refused; nothing is left behind.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     report = save(f"{directory}/ckpt", {"w": np.arange(3), "step": 7})
    ...     load(f"{directory}/ckpt")
    {'w': array([0, 1, 2]), 'step': 7}
    """
    report = Checkpointer(PyTreeCheckpointHandler(layout=layout)).save(path, tree, force=overwrite)
    assert report is not None
    return report


def load(path: Place, *, like: Any = None, select: Select | None = None, item: str | None = None) -> Any:
    """Loads a checkpoint; needs neither the devices nor the frameworks it was saved from.

    Args:
        path: A checkpoint, or a directory of steps, of which the newest is loaded; or a folder of arrays that
            TensorStore wrote (zarr v3 in OCDBT), which gives a dictionary of them.
        like: A template. Its containers, array libraries and shardings decide what is returned, and its dtypes and
            shapes are checked. Leaves may be arrays or abstract, such as ``jax.ShapeDtypeStruct``. Without it the saved
            containers are returned with numpy arrays, namedtuples and dataclasses as dictionaries.
        select: Patterns of leaf paths such as ``"params/**"``; only leaves that match are read, and a template has just
            those.
        item: Which item, if the checkpoint has several; None loads the only one, or all of them into a dictionary.

    Returns:
        The tree, or a dictionary of items.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        DamagedCheckpointError: What is there does not verify.
        TreeMismatchError: Template and checkpoint differ; lists every leaf that does.
    """
    location = as_location(path)
    if (location / MANIFEST).exists() and not (location / RECORD).exists():
        return _load_arrays(location, like, select)
    location = find_checkpoint(location)
    items = read_record(location).items
    if item is not None and item not in items:
        raise CheckpointNotFoundError(f"{location}: no item {item!r}; it has {', '.join(sorted(items))}")
    only = (
        item if item is not None else ITEM if set(items) == {ITEM} else next(iter(items)) if len(items) == 1 else None
    )
    if only is not None:
        return _load_item(location, only, items[only], like, select)
    if like is not None or select is not None:
        raise OptionError(
            f"{location} has the items {', '.join(sorted(items))}: name one with item= to use like= or select="
        )
    return {name: _load_item(location, name, saved, None, None) for name, saved in items.items()}


def find_checkpoint(location: Location, step: int | None = None) -> Location:
    """Returns the checkpoint that a path stands for.

    Args:
        location: A checkpoint, or a directory of steps.
        step: Which step of such a directory; None is the newest.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    if step is None and (location / RECORD).exists():
        return location
    index = step_index(location)
    steps = sorted({*index.steps(), *index.damage})
    if step is None and steps:
        return index.location(steps[-1])
    if step is not None and step in steps:
        return index.location(step)
    if not location.exists():
        raise CheckpointNotFoundError(f"{location}: there is nothing at this path")
    known = f"it holds the steps {', '.join(map(str, steps))}" if steps else f"it has no {RECORD} and no steps"
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointNotFoundError(f"{location}: {wanted} here; {known}")


def step_index(location: Location) -> StepIndex:
    """Returns the steps of a directory, whatever prefix their names have.

    Raises:
        CheckpointNotFoundError: It is no directory.
    """
    if location.exists() and not location.is_directory():
        raise CheckpointNotFoundError(f"{location}: this is a file; checkpoints are directories")
    for entry in location.entries():
        prefix, underscore, number = entry.name.rpartition("_")
        if (
            entry.is_directory
            and underscore
            and prefix
            and number.isdigit()
            and (location / entry.name / RECORD).exists()
        ):
            return StepIndex(location, prefix)
    return StepIndex(location)


def _load_item(location: Location, name: str, saved: ItemRecord, like: Any, select: Select | None) -> Any:
    handler = _HANDLERS.get(saved.kind)
    if handler is None:
        raise OptionError(
            f"{location}: item {name!r} was written by a handler of your own; restore it with that handler "
            "(Checkpointer(handler).restore, or a CheckpointManager)"
        )
    if saved.kind == "json" and (like is not None or select is not None):
        raise OptionError(f"{location}: item {name!r} is JSON, not a tree of arrays: like= and select= do not apply")
    kwargs = {} if select is None else {"select": select}
    return handler().restore(location / saved.folder, like, files=saved.files, **kwargs)


def _load_arrays(location: Location, like: Any, select: Select | None) -> dict[str, Any]:
    """Loads a folder of arrays without a tree, such as TensorStore itself writes: a dictionary by their names."""
    if like is not None or select is not None:
        raise OptionError(f"{location} holds arrays without a tree: like= and select= do not apply")
    database = ArrayDatabase(location)
    names = database.names
    arrays, problems = database.read(names)
    if problems:
        raise DamagedCheckpointError(
            "\n".join([f"{location} is damaged:", *(f"  {p.leaf}: {p.file}: {p.what}" for p in problems)])
        )
    return dict(zip(names, arrays, strict=True))
