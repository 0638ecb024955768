"""Numbered checkpoints in a directory: which there are, which is the newest, and waiting for the next.

Nothing is written down about that: the directory itself is looked at, so that it can be moved, copied and tidied up.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator

from ..checkpointer import Place
from ..errors import DamagedCheckpointError, OptionError
from ..interop.source import recognise, recognise_steps
from ..record import RECORD
from ..steps import StepIndex
from ..storage import Location, as_location

_logger = logging.getLogger("holdfast")
_NUMBERED = re.compile(r"(?:(.*)[-_])?(0|[1-9][0-9]*)", re.DOTALL)


def numbers_of(directory: Location, name: str) -> list[int]:
    """Returns the numbers that are taken by entries called ``<name>-<number>``, whatever they are.

    Args:
        directory: The directory.
        name: The beginning of the names.
    """
    pattern = re.compile(re.escape(name) + r"-(0|[1-9][0-9]*)")
    return [int(match[1]) for entry in directory.entries() if (match := pattern.fullmatch(entry.name))]


def latest_checkpoint(directory: Place) -> str | None:
    """Returns the path of the newest numbered checkpoint in a directory, or None.

    Of checkpoints with the same name that is the one with the highest number; of several names, the one that was
    committed last.

    Args:
        directory: Where numbered checkpoints are: those of ``Checkpoint.save`` or of a `CheckpointManager`, or those of
            another library.
    """
    location = as_location(directory)
    prefixes = {
        entry.name[: match.start(2)]
        for entry in location.entries()
        if entry.is_directory
        and (match := _NUMBERED.fullmatch(entry.name))
        and (location / entry.name / RECORD).is_there()
    }
    newest: list[tuple[float, str]] = []
    for prefix in prefixes:
        index = StepIndex(location, prefix or None) if not prefix.endswith("_") else StepIndex(location, prefix[:-1])
        for step, what in index.damage.items():
            _logger.warning("%s is damaged and passed over: %s", index.location(step), what)
        if infos := index.infos():
            newest.append((infos[-1].time, str(index.location(infos[-1].step))))
    return max(newest)[1] if newest else _latest_foreign(location)


def _latest_foreign(location: Location) -> str | None:
    """Returns the newest checkpoint that another library has numbered in a directory, or None."""
    try:
        if not location.is_directory():
            return None
        steps = recognise_steps(location)
        if steps is not None:
            return str(steps.steps[max(steps.steps) if steps.newest is None else steps.newest])
        found = recognise(location)  # TensorFlow's directories say themselves which one it is
    except DamagedCheckpointError as error:
        _logger.warning("%s is damaged and passed over: %s", location, error)
        return None
    return str(found.location) if found is not None and found.location != location else None


def locate(path: Place) -> Location:
    """Returns where the checkpoint is that a path stands for, as far as that is one of numbered ones.

    Args:
        path: A checkpoint of any kind, or a directory of numbered ones, of which the newest is meant.

    Raises:
        OptionError: It is a number.
    """
    if isinstance(path, int):
        raise OptionError(
            f"{path}: a number alone does not say which checkpoint is meant; give its path, such as "
            f"'directory/ckpt-{path}', or its directory for the newest"
        )
    location = as_location(path)
    if (location / RECORD).is_there() or (location.exists() and not location.is_directory()):
        return location
    newest = latest_checkpoint(location)
    return location if newest is None else as_location(newest)


def checkpoints_iterator(
    directory: Place,
    *,
    min_interval_secs: float = 0.0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    poll_secs: float = 1.0,
) -> Iterator[str]:
    """Generates every new checkpoint that turns up in a directory, for programs that evaluate what another one trains.

    Args:
        directory: Where numbered checkpoints are, or will be.
        min_interval_secs: How long to wait at least from one to the next, in seconds.
        timeout: How long to wait for a new one, in seconds; None waits for ever.
        timeout_fn: Called when that time is over; True ends the iteration, anything else waits again. None ends it.
        poll_secs: How long to wait before looking again, in seconds.

    Yields:
        The path of the newest checkpoint; those that came and were outdated in between are left out.
    """
    seen: str | None = None
    while True:
        began = time.monotonic()
        while (found := latest_checkpoint(directory)) is None or found == seen:
            left = float("inf") if timeout is None else began + timeout - time.monotonic()
            if left <= 0:
                if timeout_fn is None or timeout_fn():
                    return
                began = time.monotonic()
                continue
            time.sleep(min(poll_secs, left))
        seen = found
        offered = time.monotonic()
        yield found
        time.sleep(max(0.0, offered + min_interval_secs - time.monotonic()))
