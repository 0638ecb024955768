"""What processes do together: tell, collect, and wait for each other, with a timeout for everything."""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from urllib.parse import quote

from ..errors import BarrierTimeoutError, PeerFailedError, told
from .cleaning import retire
from .coordinator import Coordinator
from .framing import announced, join, part_names, split

_logger = logging.getLogger("holdfast")

_FIRST_WAIT = 0.1  # seconds until a waiting process first asks whether another has failed
_LONGEST_WAIT = 1.0
_MESSAGE_LIMIT = 4000  # characters of an error that are passed on


class Group:
    """All processes of a program, about one thing that they do together, such as one save.

    Every process makes a group of the same name and then calls the same operations in the same order, from one thread
    at a time; only `fail` may come from anywhere at any time. A topic serves each operation once. Where an operation
    waits, it raises

    - `BarrierTimeoutError`, naming those who are missing, when ``timeout`` seconds have passed,
    - `PeerFailedError` within about a second after another process has called `fail`, and when the store that connects
      them is gone.

    Process 0 is the hub: a barrier costs each of the others one message to it and one back.

    Args:
        coordinator: Connects the processes.
        name: Belongs to this group alone, for as long as the program runs; see `next_group`.

    Attributes:
        name: As given.
        index: Which process this is.
        count: How many there are.
        coordinator: As given.
    """

    def __init__(self, coordinator: Coordinator, name: str) -> None:
        self.name = name
        self.coordinator = coordinator
        self.index = coordinator.process_index
        self.count = coordinator.process_count
        self._coordinator = coordinator
        self._prefix = quote(name, safe="")
        self._used: set[str] = set()
        self._stored: list[str] = []
        self._forgotten: set[str] = set()
        self._closed = False

    def send(self, topic: str, value: bytes) -> None:
        """Gives this process's value of a topic to those who `receive` it.

        Raises:
            PeerFailedError: The store is gone.
        """
        self._put(self._key("send", topic, self.index), value)

    def receive(self, topic: str, process: int, timeout: float) -> bytes:
        """Waits for what a process sends.

        Args:
            topic: What it is about; the other calls `send` with it.
            process: Which process.
            timeout: How long to wait, in seconds.

        Raises:
            BarrierTimeoutError: It did not send it in that time.
            PeerFailedError: A process failed.
        """
        self.check()
        key = self._key("send", topic, process, again=True)
        try:
            return self._get(key, process, _deadline(timeout))
        except TimeoutError:
            raise self._timeout(topic, timeout, [process]) from None

    def broadcast(self, topic: str, value: bytes | None, timeout: float) -> bytes:
        """Gives a value of process 0 to all.

        Args:
            topic: What it is about.
            value: On process 0, the value; on the others, it does not count.
            timeout: How long the others wait for it, in seconds.

        Returns:
            The value.

        Raises:
            BarrierTimeoutError: Process 0 did not get here in that time.
            PeerFailedError: A process failed.
        """
        self.check()
        key = self._key("broadcast", topic, 0)
        if self.index == 0:
            if value is None:
                raise ValueError(f"process 0 has to give the value of {topic!r}")
            self._put(key, value)
            return value
        try:
            return self._get(key, 0, _deadline(timeout))
        except TimeoutError:
            raise self._timeout(topic, timeout, [0]) from None

    def gather(self, topic: str, value: bytes, timeout: float) -> list[bytes] | None:
        """Gives the values of all to process 0, the only one that waits.

        Args:
            topic: What it is about.
            value: This process's.
            timeout: How long process 0 waits for the others, in seconds.

        Returns:
            On process 0, all values in the order of the processes; None on the others.

        Raises:
            BarrierTimeoutError: On process 0: not all of them got here in that time.
            PeerFailedError: A process failed.
        """
        self.check()
        key = self._key("gather", topic, self.index)
        if self.index:
            self._put(key, value)
            return None
        return [value, *self._collect("gather", topic, timeout, forget=True)]

    def all_gather(self, topic: str, value: bytes, timeout: float) -> list[bytes]:
        """Gives the values of all to all, in the order of the processes.

        Args:
            topic: What it is about.
            value: This process's.
            timeout: How long to wait for the others, in seconds.

        Raises:
            BarrierTimeoutError: Not all of them got here in that time.
            PeerFailedError: A process failed.
        """
        self.check()
        key = self._key("all_gather", topic, self.index)
        self._put(key, value)
        if self.index == 0:
            values = [value, *self._collect("all_gather", topic, timeout, forget=False)]
            lengths = json.dumps([len(each) for each in values]).encode()
            self._put(self._key("together", topic, 0), b"\n".join([lengths, b"".join(values)]))
            return values
        try:
            packed = self._get(self._key("together", topic, 0), 0, _deadline(timeout))
        except TimeoutError:
            missing = self._missing("all_gather", topic, range(self.count))
            raise self._timeout(topic, timeout, missing or [0]) from None
        head, _, rest = packed.partition(b"\n")
        values, begin = [], 0
        for length in json.loads(head):
            values.append(rest[begin : begin + length])
            begin += length
        return values

    def barrier(self, topic: str, timeout: float) -> None:
        """Waits until all processes are here.

        Args:
            topic: What they wait for, said in errors.
            timeout: How long to wait, in seconds.

        Raises:
            BarrierTimeoutError: Not all of them got here in that time.
            PeerFailedError: A process failed.
        """
        self.all_gather(topic, b"", timeout)

    def check(self) -> None:
        """Raises what the next operation that waits would raise if a process has failed already.

        Raises:
            PeerFailedError: A process failed.
        """
        if self.count == 1:
            return
        try:
            told = self._coordinator.try_get(f"{self._prefix}/failed")
        except ConnectionError as error:
            raise self._gone(error) from error
        if told is not None:
            facts = json.loads(told)
            process = int(facts["process"])
            message = f"{self.name}: process {process} failed: {facts['error']}: {facts['message']}"
            raise PeerFailedError(message, process)

    def fail(self, error: BaseException) -> None:
        """Tells all others that this process has given up, and why. Never raises."""
        failure = {"process": self.index, "error": type(error).__name__, "message": told(error)[:_MESSAGE_LIMIT]}
        try:
            self._coordinator.put(f"{self._prefix}/failed", json.dumps(failure).encode())
        except Exception as problem:
            _logger.debug("%s: the others could not be told of a failure: %s", self.name, problem)

    def close(self) -> None:
        """Ends this process's part in the group. Never waits, never raises.

        What the group has left in the store goes once all processes have closed it, at the latest when one of the
        next groups is closed.
        """
        if not self._closed:
            self._closed = True
            retire(self._coordinator, self._prefix, self._stored, self._forgotten)

    def _key(self, operation: str, topic: str, process: int, *, again: bool = False) -> str:
        key = f"{self._prefix}/{operation}/{quote(topic, safe='')}/{process}"
        if not again:
            if key in self._used:
                raise ValueError(f"{self.name}: {operation} of {topic!r} was done before; give it another topic")
            self._used.add(key)
        return key

    def _put(self, key: str, value: bytes) -> None:
        parts = split(value)
        names = part_names(key, len(value))
        try:
            for name, part in reversed(list(zip(names, parts, strict=True))):  # the first comes last: all is there then
                self._coordinator.put(name, part)
        except ConnectionError as error:
            raise self._gone(error) from error
        self._stored += names

    def _get(self, key: str, process: int, deadline: float) -> bytes:
        """Waits for a value. Raises TimeoutError at the deadline."""
        first = self._wait(key, deadline)
        try:
            names = part_names(key, announced(first))
            return join([first, *(self._wait(name, deadline) for name in names[1:])])
        except ValueError as error:
            raise PeerFailedError(f"{self.name}: what process {process} sent is damaged: {error}", process) from error

    def _wait(self, key: str, deadline: float) -> bytes:
        pause = _FIRST_WAIT
        while True:
            remaining = deadline - time.monotonic()
            try:
                return self._coordinator.get(key, max(min(pause, remaining), 0.001))
            except ConnectionError as error:
                raise self._gone(error) from error
            except TimeoutError:
                self.check()
                if remaining <= pause:
                    raise
            pause = min(2 * pause, _LONGEST_WAIT)

    def _collect(self, operation: str, topic: str, timeout: float, *, forget: bool) -> list[bytes]:
        """Waits for a value of each other process, on process 0."""
        deadline = _deadline(timeout)
        values = []
        for process in range(1, self.count):
            key = self._key(operation, topic, process)
            try:
                value = self._get(key, process, deadline)
            except TimeoutError:
                missing = self._missing(operation, topic, range(process, self.count))
                raise self._timeout(topic, timeout, missing or [process]) from None
            values.append(value)
            names = part_names(key, len(value))
            if forget:
                self._forget(names)
            else:
                self._stored += names
        return values

    def _forget(self, names: Sequence[str]) -> None:
        try:
            for name in names:
                self._coordinator.delete(name)
        except ConnectionError as error:
            raise self._gone(error) from error
        self._forgotten.update(names)

    def _missing(self, operation: str, topic: str, processes: Sequence[int]) -> list[int]:
        keys = {process: self._key(operation, topic, process, again=True) for process in processes}
        try:
            return [process for process, key in keys.items() if self._coordinator.try_get(key) is None]
        except ConnectionError as error:
            raise self._gone(error) from error

    def _gone(self, error: ConnectionError) -> PeerFailedError:
        message = (
            f"{self.name}: the store that connects the processes is gone, so process 0 or the launcher, which keep it, "
            f"must have ended; look at their logs ({error})"
        )
        return PeerFailedError(message, 0)

    def _timeout(self, topic: str, timeout: float, missing: Sequence[int]) -> BarrierTimeoutError:
        who = "process " if len(missing) == 1 else "processes "
        who += ", ".join(str(process) for process in missing[:20])
        if len(missing) > 20:
            who += f" and {len(missing) - 20} more"
        message = (
            f"{self.name}: {who} of {self.count} did not get to {topic!r} within {timeout:g} s; "
            "look at their logs, or allow more time if they are only slow"
        )
        return BarrierTimeoutError(message, missing)


def _deadline(timeout: float) -> float:
    return time.monotonic() + timeout


def next_group(coordinator: Coordinator, name: str) -> Group:
    """Makes a group whose name no other has had: the name and a number.

    Args:
        coordinator: Connects the processes, each of which has to make as many groups of one name as the others:
            before anything that can fail on one of them alone.
        name: What they are about.
    """
    with _lock:
        counts = _counts.setdefault(coordinator, {})
        counts[name] = number = counts.get(name, 0) + 1
    return Group(coordinator, f"{name}#{number}")


_counts: weakref.WeakKeyDictionary[Coordinator, dict[str, int]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
