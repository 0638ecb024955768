"""Save a tree to a path, load it back: the engine in two calls."""

from __future__ import annotations

import logging
from typing import Any

from .checkpointer import Checkpointer, Place
from .errors import CheckpointNotFoundError, DamagedCheckpointError, OptionError
from .handlers import PyTreeCheckpointHandler
from .interop.native import NativeCheckpoint
from .interop.places import find_checkpoint as find_checkpoint
from .interop.places import open_checkpoint
from .interop.source import JSON, METRICS, TREE, CheckpointSource, as_reader, recognise
from .interop.templates import under_template
from .item import MANIFEST, ArrayDatabase, Layout, Select, load_tree
from .report import SaveReport
from .storage import Location, as_location
from .tree import collection_paused

_logger = logging.getLogger("holdfast")


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
        StorageConflictError: Another save to this path is under way.
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
        path: A checkpoint, or a directory of steps, of which the newest is loaded. It may be one of another library:
            Orbax, safetensors (a file, or a folder with an index), a file of ``torch.save`` or Lightning, a folder of
            torch.distributed.checkpoint, a msgpack file of Flax, TensorFlow's (a prefix such as ``dir/ckpt-5``). Or a
            folder of arrays that TensorStore wrote (zarr v3 in OCDBT), which gives a dictionary of them.
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
        UnsupportedLeafError: A file of another library holds objects that cannot be had without running code; names
            them. Nothing was run, and ``select=`` loads the rest.
    """
    location = as_location(path)
    checkpoint: CheckpointSource
    try:
        checkpoint = NativeCheckpoint(location)
    except CheckpointNotFoundError:
        location = location.snapshot()
        if (location / MANIFEST).is_there() and recognise(location) is None:
            return _load_arrays(location, like, select)
        checkpoint = open_checkpoint(location)
    items = checkpoint.items
    if item is not None and item not in items:
        raise CheckpointNotFoundError(f"{checkpoint.location}: no item {item!r}; it has {', '.join(sorted(items))}")
    wanted = [item] if item is not None else _wanted(checkpoint)
    if len(wanted) == 1:
        return _load_item(checkpoint, wanted[0], like, select)
    if like is not None or select is not None:
        raise OptionError(
            f"{checkpoint.location} has the items {', '.join(sorted(wanted))}: name one with item= to use like= or "
            "select="
        )
    return {name: _load_item(checkpoint, name, None, None) for name in wanted}


def _wanted(checkpoint: CheckpointSource) -> list[str]:
    """Returns the items that are loaded when none is named."""
    items = checkpoint.items
    if isinstance(checkpoint, NativeCheckpoint):
        return list(items)
    wanted = [name for name, kind in items.items() if kind in (TREE, JSON)]
    if not wanted:
        raise OptionError(
            f"{checkpoint.location}: none of the items of this {checkpoint.format} checkpoint is a tree or JSON: "
            + ", ".join(f"{name} ({kind})" for name, kind in sorted(items.items()))
        )
    skipped = [f"{name} ({kind})" for name, kind in items.items() if kind not in (TREE, JSON, METRICS)]
    if skipped:
        _logger.warning("%s: skipped items that holdfast does not read: %s", checkpoint.location, ", ".join(skipped))
    return wanted


def _load_item(checkpoint: CheckpointSource, name: str, like: Any, select: Select | None) -> Any:
    kind = checkpoint.items[name]
    if kind != TREE:
        if kind in (JSON, METRICS) and (like is not None or select is not None):
            raise OptionError(
                f"{checkpoint.location}: item {name!r} is JSON, not a tree of arrays: like= and select= do not apply"
            )
        return checkpoint.value(name)
    if isinstance(checkpoint, NativeCheckpoint):
        saved = checkpoint.parts[name]
        kwargs: dict[str, Any] = {} if select is None else {"select": select}
        return PyTreeCheckpointHandler().restore(checkpoint.location / saved.folder, like, files=saved.files, **kwargs)
    with collection_paused():
        source = under_template(checkpoint.tree(name), like)
        return load_tree(as_reader(source), like=like, select=select)


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
