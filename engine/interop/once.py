"""Work that process 0 does for all processes of a program that asked for it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from ..coordination import Coordinator
from ..errors import StateError
from ..together import Together

_MEETING = 600.0  # seconds until process 0 has to have begun
_WORK = 7 * 24 * 3600.0  # seconds; that process 0 fails or dies is known within seconds, so this may be long


def done_once(what: str, about: Sequence[Any], work: Callable[[], Any], coordinator: Coordinator | None) -> Any:
    """Does something on process 0, while the others wait for what comes of it.

    Process 0 waits for nobody, so that a program may as well ask for the work on this process only.

    Args:
        what: What it is, for errors; the same on all processes.
        about: What it is done with, as JSON can hold it; has to be the same on all of them.
        work: Does it, and returns what JSON can hold.
        coordinator: Connects the processes; None finds out by itself.

    Returns:
        What came of it, on every process.

    Raises:
        PeerFailedError: On the other processes, if it failed on process 0.
        BarrierTimeoutError: On the other processes, if process 0 was not asked to do it.
        StateError: On a process that asks for something else than process 0.
    """
    group = Together("conversion", coordinator, _MEETING).group(what)
    if group is None:
        return work()
    with contextlib.closing(group):
        if group.index == 0:
            try:
                group.broadcast("about", json.dumps(about).encode(), _MEETING)
                found = work()
                group.broadcast("result", json.dumps(found).encode(), _WORK)
            except BaseException as error:
                group.fail(error)
                raise
            return found
        theirs = json.loads(group.broadcast("about", None, _MEETING))
        if theirs != json.loads(json.dumps(about)):
            raise StateError(
                f"{what}: process {group.index} was asked for {about}, and process 0 for {theirs}; all processes have "
                "to ask for the same, or each works alone, with coordinator=hf.Alone()"
            )
        return json.loads(group.broadcast("result", None, _WORK))
