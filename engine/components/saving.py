"""A tree of components saved to a path, as one checkpoint."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Mapping
from typing import Any

from ..checkpointer import Place
from ..clock import SystemClock
from ..coordination import Coordinator
from ..errors import BarrierTimeoutError, OptionError, StorageError
from ..interop.once import done_once
from ..item import Layout
from ..metrics import plain_metrics
from ..record import CheckpointRecord
from ..storage import Location, as_location
from .pending import PendingTree
from .preparing import prepare


def save(
    root: Any,
    path: Place | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    layout: Layout | None = None,
    use_msgpack: bool = False,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    coordinator: Coordinator | None = None,
) -> str:
    """Saves a component and all below it: atomic, durable and checksummed when this returns.

    Args:
        root: The component.
        path: Where: a path or a URL; None makes a new temporary directory.
        state: The state to save in the place of the component's own; of its components only those that are in it.
        overwrite: Replace a tree of components that is there; a crash leaves the old one or the new one, whole.
        layout: Sizes of chunks and data files, and how chunks are compressed.
        use_msgpack: Keep all arrays of a component in one msgpack file, rather than in a database.
        step: The number of the step, for ``holdfast ls`` on a directory of several: ``runs/x/1200`` for step 1200.
        metrics: Metrics to keep with it: numbers by name.
        coordinator: How the processes of a program find each other, of which only process 0 saves; None finds out by
            itself.

    Returns:
        The path or URL, which can be given to everything that restores.

    Raises:
        UnsupportedLeafError: A state cannot be saved; names what. Nothing was written.
        CheckpointExistsError: Something is there already.
        StorageConflictError: Another save to the same path has begun since.
        StorageError: The storage refused; what was there before is whole.
        PeerFailedError: Process 0 of several could not save.
        BarrierTimeoutError: Process 0 of several does not save to this path.
    """
    location = None if path is None else as_location(path)
    numbers = plain_metrics(metrics)
    if step is not None and (type(step) is not int or step < 0):
        raise OptionError(f"step={step!r} must be a whole number, 0 or more")

    def work() -> str:
        place = _temporary() if location is None else location
        prepared = prepare(root, state=state, use_msgpack=use_msgpack, layout=layout)
        pending = PendingTree(place, prepared.states, overwrite=overwrite)
        try:
            pending.begin()
            items = prepared.write(pending.folders)
            record = CheckpointRecord(items=items, time=SystemClock().now(), step=step, metrics=numbers)
            pending.commit(record, prepared.descriptions)
        except BaseException as error:
            if isinstance(error, StorageError) and pending.lost:
                raise pending.conflict() from error
            pending.abort(error)
            raise
        return place.url

    where = "a temporary directory" if location is None else location.url
    try:
        return str(done_once(f"saving components to {where}", [], work, coordinator))
    except BarrierTimeoutError as error:
        message = f"{error}. Process 0 has to save there, too, or this one alone, with coordinator=hf.Alone()"
        raise BarrierTimeoutError(message, error.missing) from None


def _temporary() -> Location:
    return as_location(tempfile.gettempdir()) / f"holdfast-{uuid.uuid4().hex}"
