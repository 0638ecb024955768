"""Broadcasts, gathers, summaries and barriers with timeouts, based on a coordinator's key-value store.

The store accepts only small values, so longer values are split into parts. Process 0 deletes the keys of a rendezvous
after all processes have closed it. Every call to the coordinator has a deadline, so that the other processes do not
wait forever if the process that hosts the store is frozen.
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

# Maximum size, in bytes, of one key's value. jax's service would accept 4 MiB, and torch's TCPStore 8 MiB.
PART_SIZE = 512 * 1024

_HEADER = struct.Struct("<QI")  # length and CRC-32C of the value
_FIRST_PART = PART_SIZE - _HEADER.size
_FIRST_WAIT = 0.1  # seconds until a waiting process first checks whether another process has failed
_LONGEST_WAIT = 1.0
_WAIT_PER_PROCESS = 1e-3  # seconds; limits failure checks to 1,000 per second across all waiting processes
_MOST_AT_ONCE = 256  # maximum number of values per read request
# Factor that extends a timeout if process 0 itself may be waiting; it is 2 if the time to end the wait is included.
_GATHERED = 2 - 1 / SHARE
_WHOLE_ROW = SHARE.bit_length() - 1  # misses that a timed-out `_GATHERED` wait counts, to make the next timeout minimal
_SILENCE = 600.0  # default time limit, in seconds, for a response from the store
_MESSAGE_LIMIT = 4000  # maximum length, in characters, of an error message sent to the other processes
_MOST_RETIRED = 64  # maximum number of rendezvous kept until all processes have closed them; dead processes never do
_MOST_KEYS = 4000  # maximum number of keys that a process reports for deletion

_missed_lock = Lock()  # a separate lock, because `_lock` is held during store requests
_missed: weakref.WeakKeyDictionary[Coordinator, _Misses] = weakref.WeakKeyDictionary()
_lock = Lock()  # protects the tables below
_counts: weakref.WeakKeyDictionary[Coordinator, dict[str, int]] = weakref.WeakKeyDictionary()
_retired: weakref.WeakKeyDictionary[Coordinator, list[_Retired]] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class _Misses:
    """The number of consecutive waits that each process has missed."""

    counts: Counter[int] = field(default_factory=Counter)  # keyed by process index
    until: float = 0.0  # expiry time; a wait that begins later resets the counts

    def share(self) -> int:
        """Return the divisor for the timeout of the next wait."""
        return min(1 << max(self.counts.values(), default=0), SHARE)


def next_rendezvous(
    coordinator: Coordinator, name: str, limit: float = _SILENCE, within: Rendezvous | None = None
) -> Rendezvous:
    """Create a rendezvous named ``name`` plus a sequence number; see `Rendezvous` for the other arguments."""
    with _lock:
        counts = _counts.setdefault(coordinator, {})
        counts[name] = number = counts.get(name, 0) + 1
    return Rendezvous(coordinator, f"{name}#{number}", limit, within)


class Rendezvous:
    """One joint operation of all processes of a program, such as a save.

    Every process creates a rendezvous with the same name and calls the same methods in the same order, from one thread
    at a time. Only `fail` may be called from any thread at any time. A method may use each topic only once. Methods
    that wait raise

    - `BarrierTimeoutError`, which names the missing processes, after ``timeout`` seconds. Each consecutive wait that
      misses a process halves the timeout of the next, so these waits together take less than twice the timeout. A wait
      that begins more than one timeout after the previous one gets the full timeout again.
    - `PeerFailedError` within about a second (four seconds with 4,096 processes) after another process has called
      `fail`, and also if the store is unavailable or has not answered for ``limit`` seconds.

    A rendezvous created ``within`` another rendezvous also fails if a process calls `fail` on the outer rendezvous.

    Process 0 is the hub. In `summarize`, every other process sends it one message and receives one. Values are not
    distributed to all processes, because the traffic would grow with the square of the number of processes.
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
        """Return the value of process 0. Set ``gathered`` if process 0 may first wait for the other processes."""
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
        """On process 0, wait for the values of all processes and return them. On others, return None immediately."""
        self.check()
        key = self._key("gather", topic, self.index)
        if self.index:
            self._put(key, value)
            return None
        return [value, *self._collect("gather", topic, timeout, discard=True)]

    def summarize(self, topic: str, value: bytes, timeout: float, summary: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Call ``summary`` on process 0 with the values of all processes in order, and return its result on all."""
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
        """Raise PeerFailedError if another process has already failed."""
        if self._within is not None and not self._within._closed:
            self._within.check()
        with self._connected():
            failure = self.coordinator.try_get(f"{self._prefix}/failed")
        if failure is not None:
            facts = json.loads(failure)
            process = int(facts["process"])
            message = f"{self.name}: process {process} failed: {facts['error']}: {facts['message']}"
            missed = facts["error"] == BarrierTimeoutError.__name__
            if self.index == 0:  # let the others notice the failure first, because the store may end with process 0
                self.all_left(_LONGEST_WAIT)
            raise PeerFailedError(message, process) from BarrierTimeoutError(facts["message"]) if missed else None

    def fail(self, error: BaseException) -> None:
        """Report to all other processes why this process has failed. This method never raises an error."""
        failure = {
            "process": self.index,
            "error": type(error).__name__,
            "message": describe_error(error)[:_MESSAGE_LIMIT],
        }
        try:
            self.coordinator.put(f"{self._prefix}/failed", json.dumps(failure).encode())
        except Exception as problem:
            _logger.debug("%s: this failure could not be reported to the other processes: %s", self.name, problem)

    def leave(self, error: BaseException) -> None:
        """Close the rendezvous after a failure. Report the failure, unless another process has reported it already."""
        if not isinstance(error, PeerFailedError):
            self.fail(error)
        self.close()

    def close(self) -> None:
        """Leave the rendezvous without waiting or raising. Process 0 deletes the keys after all processes have left."""
        if self._closed:
            return
        self._closed = True

        def work(coordinator: Coordinator) -> None:
            if self.index:
                coordinator.put(self._left_key(self.index), json.dumps(self._stored[:_MOST_KEYS]).encode())
                return
            groups = itertools.groupby(range(1, self.count), key=_folder_end)
            pending = [list(map(self._left_key, group)) for _, group in groups]
            with _lock:
                retired = _retired.setdefault(coordinator, [])
                retired.append(_Retired([*self._stored, f"{self._prefix}/failed"], self._deleted, pending))
                del retired[:-_MOST_RETIRED]
                # This rendezvous may still be in use, but all processes may have closed earlier ones by now.
                retired[:] = [rendezvous for rendezvous in retired if not rendezvous.sweep(coordinator)]

        try:
            self.coordinator.run(work)
        except Exception as error:
            _logger.debug("%s: cannot delete its keys from the store: %s", self._prefix, error)

    def all_left(self, timeout: float) -> bool:
        """On process 0, wait until the other processes have closed the rendezvous; return whether all do so in time."""
        end = self.coordinator.monotonic() + timeout
        try:
            for process in range(1, self.count):
                key = self._left_key(process)
                try:
                    self.coordinator.get(key, max(0.01, end - self.coordinator.monotonic()))
                finally:
                    self.coordinator.give_up(key)
        except Exception:  # whether they have closed it is unknown
            return False
        return True

    def _left_key(self, process: int) -> str:
        return _process_key(f"{self._prefix}/left", process)

    @contextlib.contextmanager
    def _waiting(
        self, topic: str, timeout: float, awaited: range, missing: Callable[[], Sequence[int]], counts: int = 1
    ) -> Iterator[float]:
        """Yield a wait's deadline. On a timeout, count a miss for each missing process; otherwise, reset the counts."""
        now = self.coordinator.monotonic()
        with _missed_lock:
            misses = _missed.setdefault(self.coordinator.unbounded, _Misses())
            if now > misses.until:
                misses.counts.clear()  # the program has continued, so a slow process gets the full timeout again
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
                "check their logs, or raise the timeout if they are only slow. All processes must make this call, as "
                "often as the others: not under `if rank == 0`, and after torch's Join rather than in it"
            )
            raise BarrierTimeoutError(message, absent) from None
        with _missed_lock:
            for process in misses.counts.keys() & awaited:
                del misses.counts[process]

    def _key(self, operation: str, topic: str, process: int) -> str:
        key = _process_key(f"{self._prefix}/{operation}/{_quoted(topic)}", process)
        if key in self._used:
            raise ValueError(f"{self.name}: {operation} of {topic!r} was already done; use another topic")
        self._used.add(key)
        return key

    def _put(self, key: str, value: bytes) -> None:
        parts = split_value(value)
        keys = part_keys(key, len(value))
        with self._connected():
            for part_key, part in reversed(list(zip(keys, parts, strict=True))):  # write the first part last
                self.coordinator.put(part_key, part)
        self._stored += keys

    def _complete(self, key: str, first: bytes, process: int, deadline: float) -> bytes:
        """Read the other parts of a value whose first part is ``first``, and return the complete value."""
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
            self._stored.append(key)  # delete this key later, because give_up() may have stored a value under it
            raise

    def _collect(self, operation: str, topic: str, timeout: float, *, discard: bool) -> list[bytes]:
        """On process 0, wait for the values of all other processes."""
        awaited = [self._key(operation, topic, process) for process in range(1, self.count)]
        values: list[bytes] = []

        def missing() -> list[int]:
            first = len(values) + 1
            return self._missing(operation, topic, first) or [first]

        at_once = 1  # number of values per request; doubled after each request that finds all its values
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
        """Use bisection to find the processes, from ``first`` onwards, whose values are missing."""
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
            missing = [self.coordinator.run(partial(search, group=list(group))) for _, group in groups]
            return list(itertools.chain.from_iterable(missing))

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Raise PeerFailedError if the store cannot be reached."""
        try:
            yield
        except ConnectionError as error:
            message = (
                f"{self.name}: the store that connects the processes is gone, so its server (process 0 or the "
                f"launcher) must have ended, been stopped or called destroy_process_group ({error}); check their logs"
            )
            raise PeerFailedError(message, 0) from error


def missed_a_process(error: BaseException | None) -> bool:
    """Return whether an error, raised here or in another process, means that a process or the store did not answer."""
    if isinstance(error, PeerFailedError):
        return isinstance(error.__cause__, (BarrierTimeoutError, ConnectionError))
    return isinstance(error, BarrierTimeoutError)


@dataclass(slots=True)
class _Retired:
    """A rendezvous that process 0 has closed but that other processes may still use."""

    keys: list[str]
    deleted: set[str]
    pending: list[list[str]]  # keys that other processes write when they close the rendezvous; one list per folder

    def sweep(self, coordinator: Coordinator) -> bool:
        """If all processes have closed the rendezvous, delete all its keys and return True."""
        while self.pending:
            if (reports := coordinator.try_get_all(self.pending[-1])) is None:
                return False
            self.keys += self.pending.pop()
            for keys in reports:
                self.keys += json.loads(keys)
        for key in self.keys:
            if key not in self.deleted:
                coordinator.delete(key)
        return True


def _quoted(text: str) -> str:
    from urllib.parse import quote  # imported lazily because only multi-process programs need it

    return quote(text, safe="")


def _process_key(folder: str, process: int) -> str:
    """Return the key of a process's value. Folders contain few keys because jax's service reads whole folders."""
    return f"{folder}/{process // _MOST_AT_ONCE}/{process}"


def _folder_end(process: int) -> int:
    """Return the first process after ``process`` whose keys are in another folder."""
    return (process // _MOST_AT_ONCE + 1) * _MOST_AT_ONCE


def part_keys(key: str, length: int) -> list[str]:
    return [key, *(f"{key}/{number}" for number in range(1, 1 + -(-max(length - _FIRST_PART, 0) // PART_SIZE)))]


def split_value(value: bytes) -> list[bytes]:
    """Split a value into parts of at most `PART_SIZE` bytes; the first part begins with the header."""
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
