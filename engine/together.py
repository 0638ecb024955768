"""What the processes of a program do together: process 0 decides, the others follow."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from .coordination import Coordinator, Group, current_coordinator, next_group


class Together:
    """The processes that save and load the same things.

    All of them call the same methods in the same order.

    Args:
        name: Tells what is done here from what is done elsewhere; the same on all of them.
        coordinator: How the processes find each other; None finds out by itself.
        timeout: How long to wait for others, in seconds.
    """

    def __init__(self, name: str, coordinator: Coordinator | None, timeout: float) -> None:
        self._coordinator = current_coordinator() if coordinator is None else coordinator
        self._name = name
        self.timeout = timeout

    @property
    def alone(self) -> bool:
        """Tells whether there is one process only."""
        return self._coordinator.process_count == 1

    @property
    def leads(self) -> bool:
        """Tells whether this is process 0, which writes what is written once."""
        return self._coordinator.process_index == 0

    def group(self, what: str) -> Group | None:
        """Returns the processes for something that they are about to do together; None where this one is alone.

        Args:
            what: What it is; the same on all of them.
        """
        if self.alone:
            return None
        return next_group(self._coordinator, f"{self._name}: {what}")

    def fail(self, what: str, error: BaseException) -> None:
        """Tells the others that this process cannot take part in what they are about to do together.

        Args:
            what: What it is.
            error: Why.
        """
        group = self.group(what)
        if group is not None:
            group.fail(error)

    def decide(self, what: str, work: Callable[[], Any]) -> Any:
        """Does something on process 0 and returns on every process what came of it.

        Args:
            what: What it is; the same on all of them.
            work: Does it, and returns what JSON can hold.

        Raises:
            PeerFailedError: On the other processes, if it failed on process 0.
        """
        group = self.group(what)
        if group is None:
            return work()
        with contextlib.closing(group):
            if not self.leads:
                return json.loads(group.broadcast("answer", None, self.timeout))
            try:
                found = work()
                group.broadcast("answer", json.dumps(found).encode(), self.timeout)
            except BaseException as error:
                group.fail(error)
                raise
            return found

    def share(self, what: str, value: Any) -> list[Any]:
        """Returns what every process has to say, in their order.

        Args:
            what: What it is about; the same on all of them.
            value: What this process says, as JSON can hold it.
        """
        group = self.group(what)
        if group is None:
            return [value]
        with contextlib.closing(group):
            return [json.loads(one) for one in group.all_gather("said", json.dumps(value).encode(), self.timeout)]
