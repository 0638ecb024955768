"""Broadcasts, gathers, summaries and barriers on a coordinator's store, with a timeout for everything.

The store accepts only small values, so longer ones are stored in parts. Process 0 deletes the keys of a rendezvous once
all processes have closed it. Every call of a coordinator has a deadline: if the process that hosts the store is frozen,
it does not block the others for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import struct
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import google_crc32c

from ..errors import BarrierTimeoutError, PeerFailedError, describe_error, shortened
from ..forks import Lock
from .coordinators import SHARE, BoundedCoordinator, Coordinator

_logger = logging.getLogger("holdfast")

# Largest value that is stored under one key, in bytes: jax's service takes 4 MiB, a torch TCPStore 8 MiB.
PART_SIZE = 512 * 1024

_HEADER = struct.Struct("<QI")  # length of the value and its crc32c
_FIRST_PART = PART_SIZE - _HEADER.size
_FIRST_WAIT = 0.1  # seconds until a waiting process first checks whether another has failed
_LONGEST_WAIT = 1.0
_WAIT_PER_PROCESS = 1e-3  # seconds; so all processes that wait look for failures 1,000 times a second at most
_MOST_AT_ONCE = 256  # values that one request reads
# Timeouts to wait for process 0 if it may wait itself: with the time to end a wait, two in all.
_GATHERED = 2 - 1 / SHARE
_WHOLE_ROW = SHARE.bit_length() - 1  # the waits that such a one counts as, so that the next gets its share
_SILENCE = 600.0  # default for the seconds in which a store must answer
_MESSAGE_LIMIT = 4000  # characters of an error that the other processes get
_MOST_RETIRED = 64  # closed rendezvous that are remembered; a process that died never closed its own
_MOST_KEYS = 4000  # keys that a process reports for deletion

_missed_lock = Lock()  # separate, because the other lock is held during requests to the store
_missed: weakref.WeakKeyDictionary[Coordinator, _Misses] = weakref.WeakKeyDictionary()
_lock = Lock()  # protects the tables below
_counts: weakref.WeakKeyDictionary[Coordinator, dict[str, int]] = weakref.WeakKeyDictionary()
_retired: weakref.WeakKeyDictionary[Coordinator, list[_Retired]] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class _Misses:
    """The consecutive waits that have missed a process."""

    counts: Counter[int] = field(default_factory=Counter)  # by process
    until: float = 0.0  # a wait that begins later starts a new count

    def share(self) -> int:
        """Return the divisor of the timeout of the next wait."""
        return min(1 << max(self.counts.values(), default=0), SHARE)


def next_rendezvous(
    coordinator: Coordinator, name: str, limit: float = _SILENCE, within: Rendezvous | None = None
) -> Rendezvous:
    """Make a rendezvous whose name is ``name`` and a number; the store must answer within ``limit`` seconds."""
    with _lock:
        counts = _counts.setdefault(coordinator, {})
        counts[name] = number = counts.get(name, 0) + 1
    return Rendezvous(coordinator, f"{name}#{number}", limit, within)


class Rendezvous:
    """One joint action of all processes of a program, such as one save.

    Every process makes a rendezvous of the same name and calls the same operations in the same order, from one thread
    at a time; only `fail` may be called from any thread at any time. A topic serves each operation once. An operation
    that waits raises

    - `BarrierTimeoutError`, which names the missing processes, after ``timeout`` seconds. Each consecutive wait that
      misses a process halves this time, so that all of them together last less than twice as long as one. A wait that
      begins more than a timeout after the previous one has its full time again,
    - `PeerFailedError` within about a second (four with 4,096 processes) after another process has called `fail`, if
      the store is gone, and if it has not answered for ``limit`` seconds.

    A rendezvous ``within`` another one also ends when a process has called `fail` of the outer one.

    Process 0 is the hub: `summarize` costs every other process one message to it and one back. No process receives the
    values of all others, whose bytes would grow with the square of the number of processes.
    """

    def __init__(
        self, coordinator: Coordinator, name: str, limit: float = _SILENCE, within: Rendezvous | None = None
    ) -> None:
        self.name = name
        self._within = within
        self.coordinator = (
            coordinator if isinstance(coordinator, BoundedCoordinator) else BoundedCoordinator(coordinator, limit)
        )
        self.index = coordinator.process_index
        self.count = coordinator.process_count
        self._prefix = _quoted(name)
        self._used: set[str] = set()
        self._stored: list[str] = []
        self._deleted: set[str] = set()
        self._closed = False

    def broadcast(self, topic: str, value: bytes | None, timeout: float, *, gathered: bool = False) -> bytes:
        """Return the value of process 0, which may have waited for a process itself if it has ``gathered`` before."""
        self.check()
        key = self._key("broadcast", topic, 0)
        if self.index == 0:
            if value is None:
                raise ValueError(f"process 0 must give the value of {topic!r}")
            self._put(key, value)
            return value
        timeout, awaited = (_GATHERED * timeout, range(self.count)) if gathered else (timeout, range(1))
        with self._waiting(topic, timeout, awaited, lambda: [0], _WHOLE_ROW if gathered else 1) as deadline:
            return self._complete(key, self._wait(key, deadline), 0, deadline)

    def gather(self, topic: str, value: bytes, timeout: float) -> list[bytes] | None:
        """Return the values of all processes on process 0, the only one that waits, and None on the others."""
        self.check()
        key = self._key("gather", topic, self.index)
        if self.index:
            self._put(key, value)
            return None
        return [value, *self._collect("gather", topic, timeout, discard=True)]

    def summarize(self, topic: str, value: bytes, timeout: float, summary: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Call ``summary`` on process 0 with the values of all, in their order; return its result on all processes."""
        self.check()
        self._put(self._key("summarize", topic, self.index), value)
        key = self._key("summary", topic, 0)
        if self.index == 0:
            result = summary([value, *self._collect("summarize", topic, timeout, discard=False)])
            self._put(key, result)
            return result
        with self._waiting(topic, timeout, range(self.count), lambda: self._missing("summarize", topic)) as deadline:
            return self._complete(key, self._wait(key, deadline), 0, deadline)

    def barrier(self, topic: str, timeout: float) -> None:
        self.summarize(topic, b"", timeout, lambda _: b"")

    def check(self) -> None:
        """Raise PeerFailedError if another process has failed already."""
        if self.count == 1:
            return
        if self._within is not None and not self._within._closed:
            self._within.check()
        with self._connected():
            failure = self.coordinator.try_get(f"{self._prefix}/failed")
        if failure is not None:
            facts = json.loads(failure)
            process = int(facts["process"])
            message = f"{self.name}: process {process} failed: {facts['error']}: {facts['message']}"
            missed = facts["error"] == BarrierTimeoutError.__name__
            self._let_others_hear(process)
            raise PeerFailedError(message, process) from BarrierTimeoutError(facts["message"]) if missed else None

    def _let_others_hear(self, failed: int) -> None:
        """Wait on process 0, whose end may end the store, until the other processes know of a failure."""
        key = f"{self._prefix}/heard"
        with contextlib.suppress(Exception):  # the others wait for nothing, or have ended
            if self.index:
                self.coordinator.put(f"{key}/{self.index}", b"heard")
                return
            until = self.coordinator.monotonic() + _LONGEST_WAIT
            for process in range(1, self.count):
                if process != failed:
                    self.coordinator.get(f"{key}/{process}", max(until - self.coordinator.monotonic(), 0.001))

    def fail(self, error: BaseException) -> None:
        """Report to all other processes that this one failed, and why. Never raises."""
        failure = {
            "process": self.index,
            "error": type(error).__name__,
            "message": describe_error(error)[:_MESSAGE_LIMIT],
        }
        try:
            self.coordinator.put(f"{self._prefix}/failed", json.dumps(failure).encode())
        except Exception as problem:
            _logger.debug("%s: this failure could not be reported to the other processes: %s", self.name, problem)

    def close(self) -> None:
        """End the part of this process, without waiting or raising. Process 0 deletes the keys once all have closed."""
        if self._closed:
            return
        self._closed = True

        def work(coordinator: Coordinator) -> None:
            if self.index:
                key = _process_key(f"{self._prefix}/left", self.index)
                coordinator.put(key, json.dumps(self._stored[:_MOST_KEYS]).encode())
                return
            groups = itertools.groupby(range(1, self.count), key=_folder_end)
            pending = [[_process_key(f"{self._prefix}/left", process) for process in group] for _, group in groups]
            with _lock:
                retired = _retired.setdefault(coordinator, [])
                retired.append(_Retired([*self._stored, f"{self._prefix}/failed"], self._deleted, pending))
                del retired[:-_MOST_RETIRED]
                # The other processes have closed earlier rendezvous, and may still use this one.
                retired[:] = [rendezvous for rendezvous in retired if not rendezvous.sweep(coordinator)]

        try:
            self.coordinator.run(work)
        except Exception as error:
            _logger.debug("%s: its keys stay in the store: %s", self._prefix, error)

    @contextlib.contextmanager
    def _waiting(
        self, topic: str, timeout: float, awaited: range, missing: Callable[[], Sequence[int]], counts: int = 1
    ) -> Iterator[float]:
        """Yield the deadline of a block that waits for processes; count the ``missing`` ones, or clear the counts."""
        now = self.coordinator.monotonic()
        with _missed_lock:
            misses = _missed.setdefault(self.coordinator.unbounded, _Misses())
            if now > misses.until:
                misses.counts.clear()  # the program has continued: a slow process gets the full time again
            timeout /= misses.share()
        try:
            yield now + timeout
        except TimeoutError:
            absent = missing() or [0]
            now = self.coordinator.monotonic()
            with _missed_lock:
                misses.until = max(misses.until, now + timeout * misses.share())
                misses.counts.update([*absent] * counts)
            names = f"{'process' if len(absent) == 1 else 'processes'} {shortened(absent, 20)}"
            message = (
                f"{self.name}: {names} of {self.count} did not reach {topic!r} within {timeout:g} s; "
                "check their logs, or raise the timeout if they are only slow"
            )
            raise BarrierTimeoutError(message, absent) from None
        with _missed_lock:
            for process in misses.counts.keys() & awaited:
                del misses.counts[process]

    def _key(self, operation: str, topic: str, process: int) -> str:
        key = _process_key(f"{self._prefix}/{operation}/{_quoted(topic)}", process)
        if key in self._used:
            raise ValueError(f"{self.name}: {operation} of {topic!r} was done before; use another topic")
        self._used.add(key)
        return key

    def _put(self, key: str, value: bytes) -> None:
        parts = split_value(value)
        keys = part_keys(key, len(value))
        with self._connected():
            for part_key, part in reversed(list(zip(keys, parts, strict=True))):  # last the first, which is awaited
                self.coordinator.put(part_key, part)
        self._stored += keys

    def _complete(self, key: str, first: bytes, process: int, deadline: float) -> bytes:
        """Return the value whose first part is ``first``."""
        try:
            rest = part_keys(key, value_length(first))[1:]
            return join_parts([first, *(self._wait(part_key, deadline) for part_key in rest)])
        except ValueError as error:
            raise PeerFailedError(
                f"{self.name}: the value that process {process} sent is damaged: {error}", process
            ) from error

    def _wait(self, key: str, deadline: float) -> bytes:
        began = self.coordinator.monotonic()
        longest = min(max(_LONGEST_WAIT, self.count * _WAIT_PER_PROCESS), (deadline - began) / SHARE)
        pause = min(_FIRST_WAIT, longest)
        try:
            while True:
                now = self.coordinator.monotonic()
                remaining = deadline - now
                try:
                    with self._connected():
                        return self.coordinator.get(key, max(min(pause, remaining), 0.001), waited=now - began)
                except TimeoutError:
                    self.check()
                    if remaining <= pause:
                        raise
                pause = min(2 * pause, longest)
        except BaseException:
            self.coordinator.give_up(key)
            self._stored.append(key)  # the store may contain a value that ended the wait
            raise

    def _collect(self, operation: str, topic: str, timeout: float, *, discard: bool) -> list[bytes]:
        """Wait on process 0 for the values of all other processes."""
        awaited = [self._key(operation, topic, process) for process in range(1, self.count)]
        values: list[bytes] = []

        def missing() -> list[int]:
            first = len(values) + 1
            return self._missing(operation, topic, first) or [first]

        at_once = 1  # after a request that finds all its values, the next one asks for twice as many
        with self._waiting(topic, timeout, range(self.count), missing) as deadline:
            while len(values) < len(awaited):
                keys = awaited[len(values) : min(len(values) + at_once, _folder_end(len(values) + 1) - 1)]
                read = len(self._stored)
                with self._connected():
                    firsts = self.coordinator.try_get_all(keys)
                at_once = 1 if firsts is None else min(2 * at_once, _MOST_AT_ONCE)
                if firsts is None:
                    keys, firsts = keys[:1], [self._wait(keys[0], deadline)]
                for key, first in zip(keys, firsts, strict=True):
                    value = self._complete(key, first, len(values) + 1, deadline)
                    values.append(value)
                    self._stored += part_keys(key, len(value))
                if discard:
                    self._delete(self._stored[read:])
        return values

    def _delete(self, keys: Sequence[str]) -> None:
        def work(coordinator: Coordinator) -> None:
            for key in keys:
                coordinator.delete(key)

        with self._connected():
            self.coordinator.run(work)
        self._deleted.update(keys)

    def _missing(self, operation: str, topic: str, first: int = 0) -> list[int]:
        """Return the processes from ``first`` on whose values are missing, with few requests if they are few."""
        folder = f"{self._prefix}/{operation}/{_quoted(topic)}"
        keys = {_process_key(folder, process): process for process in range(first, self.count)}

        def search(coordinator: Coordinator, group: Sequence[str]) -> list[int]:
            if coordinator.try_get_all(group) is not None:
                return []
            if len(group) == 1:
                return [keys[group[0]]]
            half = len(group) // 2
            return search(coordinator, group[:half]) + search(coordinator, group[half:])

        with self._connected():
            groups = itertools.groupby(keys, key=lambda key: key.rpartition("/")[0])
            found = [self.coordinator.run(partial(search, group=list(group))) for _, group in groups]
            return list(itertools.chain.from_iterable(found))

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Raise PeerFailedError if the store is gone."""
        try:
            yield
        except ConnectionError as error:
            message = (
                f"{self.name}: the store that connects the processes is gone, so process 0 or the launcher, its "
                f"server, must have ended or be stopped ({error}); check their logs"
            )
            raise PeerFailedError(message, 0) from error


def missed_a_process(error: BaseException | None) -> bool:
    """Return whether an error means that a process, or the store, did not answer this process or another one."""
    if isinstance(error, PeerFailedError):
        return isinstance(error.__cause__, (BarrierTimeoutError, ConnectionError))
    return isinstance(error, BarrierTimeoutError)


@dataclass(slots=True)
class _Retired:
    """A rendezvous that process 0 has closed and some others have not."""

    keys: list[str]
    deleted: set[str]
    pending: list[list[str]]  # keys that the others store when they close it, by folder

    def sweep(self, coordinator: Coordinator) -> bool:
        """If all processes have closed it, delete all keys and return True."""
        while self.pending:
            reports = coordinator.try_get_all(self.pending[-1])
            if reports is None:
                return False
            self.keys += self.pending.pop()
            for keys in reports:
                self.keys += json.loads(keys)
        for key in self.keys:
            if key not in self.deleted:
                coordinator.delete(key)
        return True


def _quoted(text: str) -> str:
    from urllib.parse import quote  # imported lazily: only programs of several processes need it

    return quote(text, safe="")


def _process_key(folder: str, process: int) -> str:
    """Return the key for a value of one process; jax's service reads whole folders, so a folder has few keys."""
    return f"{folder}/{process // _MOST_AT_ONCE}/{process}"


def _folder_end(process: int) -> int:
    """Return the first process whose keys are in another folder."""
    return (process // _MOST_AT_ONCE + 1) * _MOST_AT_ONCE


def part_keys(key: str, length: int) -> list[str]:
    return [key, *(f"{key}/{number}" for number in range(1, 1 + -(-max(length - _FIRST_PART, 0) // PART_SIZE)))]


def split_value(value: bytes) -> list[bytes]:
    """Cut a value into parts of at most `PART_SIZE` bytes; the first begins with the header."""
    head = _HEADER.pack(len(value), google_crc32c.value(value)) + value[:_FIRST_PART]
    return [head, *(value[begin : begin + PART_SIZE] for begin in range(_FIRST_PART, len(value), PART_SIZE))]


def value_length(first: bytes) -> int:
    if len(first) < _HEADER.size:
        raise ValueError(f"expected a header of {_HEADER.size} bytes, found {len(first)} bytes")
    length: int = _HEADER.unpack_from(first)[0]
    return length


def join_parts(parts: list[bytes]) -> bytes:
    length, expected = _HEADER.unpack_from(parts[0])
    value = b"".join([parts[0][_HEADER.size :], *parts[1:]])
    if len(value) != length:
        raise ValueError(f"expected {length} bytes, found {len(value)}")
    if google_crc32c.value(value) != expected:
        raise ValueError("its checksum does not match")
    return value
