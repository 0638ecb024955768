"""What is in a directory of checkpoints, and whether it is whole: data for people's and programs' eyes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .checkpointer import Place
from .directory import stored_options
from .errors import CheckpointNotFoundError, HoldfastError
from .interop.native import NativeCheckpoint
from .interop.places import open_at, open_checkpoint, step_index
from .interop.source import JSON, METRICS, TREE, recognise_steps
from .item import Problem, SavedLeaf, naming
from .policy import reasons
from .record import CheckpointRecord
from .storage import Location, as_location
from .tree import display, materialize

_LONGEST_VALUE = 60  # characters of a value that is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """One step of a directory.

    Attributes:
        step: The step.
        path: Its directory.
        time: When it was committed, in seconds since 1970-01-01 UTC; None if it is damaged.
        bytes: Bytes of all its files.
        metrics: The metrics stored with it, or None.
        reason: Why it was saved.
        kept: Why it is kept, as far as that is known.
        damage: What is wrong with it at first sight (its record, missing or truncated files), or None.
    """

    step: int
    path: str
    time: float | None
    bytes: int
    metrics: Mapping[str, Any] | None
    reason: str
    kept: tuple[str, ...]
    damage: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSummary:
    """One leaf of a checkpoint.

    Attributes:
        item: The item it belongs to.
        path: Its path in the tree, such as ``params/Dense_0/kernel``.
        kind: What it was: ``"jax"``, ``"numpy"``, ``"torch"``, ``"key"``, ``"int"``, ``"str"``, ...
        shape: Its shape; ``()`` for a value that is no array.
        dtype: The name of its element type, or None for a value that is no array.
        sharding: How it was spread over devices, or ``""``.
        bytes: Bytes of its elements.
        value: The value of a leaf that is no array, shortened; None for arrays.
    """

    item: str
    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str | None
    sharding: str
    bytes: int
    value: str | None


def list_checkpoints(directory: Place) -> list[CheckpointSummary]:
    """Lists the steps of a directory; reads only their records and looks at the sizes of their files.

    Args:
        directory: A manager's directory.

    Returns:
        The steps in ascending order, damaged ones among them.

    Raises:
        CheckpointNotFoundError: There is nothing at this path.
    """
    location = as_location(directory).snapshot()
    if not location.exists():
        raise CheckpointNotFoundError(f"{location}: there is nothing at this path")
    index = step_index(location)
    if not index.steps() and not index.damage:
        foreign = recognise_steps(location)
        if foreign is not None:
            return [_foreign_summary(step, place, foreign.format) for step, place in sorted(foreign.steps.items())]
    options = stored_options(location)
    kept = reasons(index.infos(), options.rules()) if options is not None else {}
    found = {step: _damaged_summary(step, index.location(step), what) for step, what in index.damage.items()}
    for step in index.steps():
        record = index.record(step)
        found[step] = CheckpointSummary(
            step=step,
            path=str(index.location(step)),
            time=record.time,
            bytes=record.nbytes,
            metrics=record.metrics,
            reason=record.reason,
            kept=kept.get(step, ()),
            damage=next((f"{p.file}: {p.what}" for p in _file_problems(index.location(step), record)), None),
        )
    return [found[step] for step in sorted(found)]


def _foreign_summary(step: int, place: Location, format_name: str) -> CheckpointSummary:
    try:
        checkpoint = open_at(place)
        metrics = checkpoint.metrics
    except HoldfastError as error:
        return _damaged_summary(step, place, str(error))
    return CheckpointSummary(
        step=step,
        path=str(place),
        time=checkpoint.time,
        bytes=checkpoint.nbytes,
        metrics=metrics,
        reason=f"written by {format_name}",
        kept=(),
        damage=None,
    )


def _damaged_summary(step: int, place: Location, what: str) -> CheckpointSummary:
    return CheckpointSummary(
        step=step, path=str(place), time=None, bytes=0, metrics=None, reason="", kept=(), damage=what
    )


def describe(path: Place, step: int | None = None) -> list[LeafSummary]:
    """Describes every leaf of a checkpoint without reading its data.

    Args:
        path: A checkpoint, or a directory of steps.
        step: Which step of such a directory; None is the newest.

    Returns:
        The leaves, item by item, in the order of the trees.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        DamagedCheckpointError: Its structure does not verify.
    """
    checkpoint = open_checkpoint(as_location(path).snapshot(), step)
    found: list[LeafSummary] = []
    for name, kind in checkpoint.items.items():
        if kind == TREE:
            reader = checkpoint.tree(name)
            with naming(reader.location):
                found.extend(_leaf_summary(name, leaf) for leaf in reader.leaves)
        elif isinstance(checkpoint, NativeCheckpoint):
            files = checkpoint.parts[name].files
            found.extend(_item_summary(name, kind, path=file, size=known.size) for file, known in files.items())
        else:
            value = _shortened(repr(checkpoint.value(name))) if kind in (JSON, METRICS) else None
            found.append(_item_summary(name, kind, value=value))
    return found


def _item_summary(item: str, kind: str, *, path: str = "", size: int = 0, value: str | None = None) -> LeafSummary:
    """Describes what is no leaf of a tree."""
    return LeafSummary(item=item, path=path, kind=kind, shape=(), dtype=None, sharding="", bytes=size, value=value)


def _file_problems(location: Location, record: CheckpointRecord) -> Iterator[Problem]:
    """Compares the sizes of a checkpoint's files with its record."""
    for item in record.items.values():
        sizes = _sizes(location / item.folder)
        for file, known in item.files.items():
            path = f"{item.folder}/{file}"
            if file not in sizes:
                yield Problem(path, "", "missing")
            elif sizes[file] not in (known.size, None):
                yield Problem(path, "", f"expected {known.size} bytes, found {sizes[file]}")


def _sizes(folder: Location, prefix: str = "") -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for entry in folder.entries():
        if entry.is_directory:
            found.update(_sizes(folder / entry.name, f"{prefix}{entry.name}/"))
        else:
            found[prefix + entry.name] = entry.size
    return found


def _leaf_summary(item: str, leaf: SavedLeaf) -> LeafSummary:
    saved = leaf.saved
    return LeafSummary(
        item=item,
        path=display(leaf.name),
        kind=saved.kind,
        shape=saved.shape or (),
        dtype=None if saved.dtype is None else str(saved.dtype),
        sharding=_sharding_text(saved.details.get("sharding")),
        bytes=leaf.nbytes,
        value=None if saved.dtype is not None else _value_text(leaf),
    )


def _value_text(leaf: SavedLeaf) -> str:
    """Writes a value that is no array as Python would, shortened."""
    (value,) = materialize([None], [leaf.saved], [None], [leaf.name])
    try:
        text = hex(value) if leaf.saved.kind == "int" else repr(value)
    except ValueError:  # a set of integers with thousands of digits
        text = leaf.saved.kind
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _sharding_text(sharding: Any) -> str:
    if not isinstance(sharding, dict):
        return ""
    if sharding.get("type") == "NamedSharding":
        mesh = sharding.get("mesh")
        axes = mesh.get("axes") if isinstance(mesh, dict) else None
        pairs = [axis for axis in axes if isinstance(axis, list) and len(axis) == 2] if isinstance(axes, list) else []
        shown = ", ".join(f"{name}={size}" for name, size in pairs)
        return f"{json.dumps(sharding.get('spec'))} over ({shown})"
    return str(sharding.get("device") or sharding.get("type") or "")
