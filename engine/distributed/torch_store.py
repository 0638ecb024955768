"""The coordinator for torch programs, which uses the store that ``torch.distributed`` was initialized with."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future

_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.25
_PAUSE_PER_PROCESS = 0.25e-3  # seconds; limits polling of a store to 4,000 requests per second across all processes
_NO_DEADLINE = timedelta(days=20)  # small enough to fit the integer type that c10d uses for timeouts in milliseconds
_SECONDS_TO_END = 2.0  # time limit, in seconds, for an abandoned wait to end
_IDLE_CONNECTIONS = 2  # maximum number of idle connections; each uses a file descriptor of the hosting process
_GIVEN_UP = b"holdfast: a process has given up waiting for this value"


def _prefixed(name: str, store: Any) -> Any:
    connection = store.clone() if hasattr(store, "clone") else store  # clone is available since torch 2.8
    return sys.modules["torch.distributed"].PrefixStore(name, connection)


def _is_polled(store: Any) -> bool:
    """Return whether to poll a store, because its built-in waits poll too, block the process group, or never end."""
    while hasattr(store, "underlying_store"):  # a PrefixStore wraps another store
        store = store.underlying_store
    is_file = isinstance(store, sys.modules["torch.distributed"].FileStore)
    return is_file or not hasattr(store, "clone") or not getattr(store, "libuvBackend", True)


class TorchCoordinator:
    """The processes of a torch program and the store that connects them."""

    # A wait blocks its connection to the store and prints warnings on a timeout. Each wait therefore has its own thread
    # and connection, and later `get` calls for the same key continue that wait. Only a value ends a wait, so `give_up`
    # stores a value that all processes ignore.

    # torchrun keeps its store and all values when it restarts the processes. At each start, process 0 therefore chooses
    # a random name as the prefix of the keys that are used until the next start. It sends the name to each process that
    # requests it, under a key that the requester chooses. When process 0 ends before all processes have the name, it
    # stores the name and the current time. Processes accept the stored name only if they were started before that time.

    def __init__(self, store: Any, index: int, count: int, is_current: Callable[[], bool] | None = None) -> None:
        self.process_index = index
        self.process_count = count
        self._shared: Any = store
        self._connection: Any = None
        self._is_current = is_current  # returns whether this is still the program's process group
        self._start = os.urandom(8).hex()
        self._announcer: threading.Thread | None = None
        self._leaves = threading.Event()  # set when this process is ending
        self._earlier = frozenset(_names)  # names that this process received when it joined earlier process groups
        self._is_polled = _is_polled(store)
        self._waits: dict[str, Future[bytes]] = {}  # pending waits, by key
        self._idle: list[Any] = []  # connections of finished waits, for reuse
        _made.add(self)

    @property
    def _store(self) -> Any:
        """A connection that the process group cannot block. It is opened in the first call, which has a deadline."""
        shared = self._shared  # no lock is used, because it would stay locked if process 0 froze
        if shared is not None:
            store = _prefixed("holdfast", shared)
            self._connection = store if self._is_current is None else self._of_this_start(store, self._is_current)
            self._shared = None  # a reference would keep the server in process 0 alive after the process group ends
        return self._connection

    def _of_this_start(self, store: Any, is_current: Callable[[], bool]) -> Any:
        """Return a view of the store that hides values stored before the processes were last started."""
        start, starts = self._start, _prefixed("starts", store)
        left = f"left/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
        if self.process_index == 0:
            starts.set(left, f"{start} 0")  # not deleted, because a process between check() and get() would block
            arguments = (starts, start, left, self.process_count, is_current, self._leaves)
            self._announcer = threading.Thread(target=_announce, args=arguments, name="holdfast-start", daemon=True)
            self._announcer.start()
        else:
            starts.append(_ASKED, f"{start} ")
            pauses = _growing_pauses()
            while not starts.check([start]):
                if (name := _left_name(starts, left, self._earlier)) is not None:
                    start = name
                    break
                if _ends.is_set():
                    raise ConnectionError("torch.distributed's store: this process is ending before process 0 starts")
                time.sleep(next(pauses))
            else:
                start = starts.get(start).decode()
            _names.add(start)
            starts.append(f"{_ANSWERED}{start}", f"{self.process_index} ")
        return sys.modules["torch.distributed"].PrefixStore(start, store)

    def new_store(self, name: str) -> Any:
        """Return another connection to the store, with a prefix for all its keys."""
        return _prefixed(name, self._store)

    def put(self, key: str, value: bytes) -> None:
        with _in_store():
            self._store.set(key, value)

    def get(self, key: str, timeout: float, *, waited: float = 0.0) -> bytes:
        begin = time.monotonic()
        wait = self._waits.get(key)
        if wait is None and (value := self.try_get(key)) is not None:
            return value
        if not self._is_polled:
            wait = wait or self._start_wait(key)
            try:
                value = wait.result(timeout)
            except TimeoutError:  # use another connection, because the wait's connection may have been lost silently
                if (late := self.try_get(key)) is None:
                    raise TimeoutError(f"no process stored {key} within {timeout:g} s") from None
                self._waits.pop(key, None)
                return late
            finally:
                if wait.done():
                    self._waits.pop(key, None)
            if value != _GIVEN_UP:
                return value
        longest = max(_LONGEST_PAUSE, self.process_count * _PAUSE_PER_PROCESS)
        while (elapsed := time.monotonic() - begin) < timeout:  # poll, even after another process has ended the wait
            pause = min(max((waited + elapsed) / 16, _SHORTEST_PAUSE), longest)
            time.sleep(min(pause, timeout - elapsed))
            if (value := self.try_get(key)) is not None:
                return value
        raise TimeoutError(f"no process stored {key} within {timeout:g} s")

    def _start_wait(self, key: str) -> Future[bytes]:
        """Return the wait for a key; start it unless another thread has done so."""
        from concurrent.futures import Future  # imported lazily because only multi-process programs need it

        new: Future[bytes] = Future()
        wait = self._waits.setdefault(key, new)
        if wait is new:
            threading.Thread(target=self._wait, args=(key, wait), name="holdfast-wait", daemon=True).start()
        return wait

    def _wait(self, key: str, wait: Future[bytes]) -> None:
        try:
            with _in_store():
                try:
                    connection = self._idle.pop()
                except IndexError:
                    connection = self._store.clone()
                connection.wait([key], _NO_DEADLINE)
                value = connection.get(key) if key in self._waits else _GIVEN_UP
            if len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(connection)
            wait.set_result(value)
        except BaseException as error:  # the waiting calls raise it again
            wait.set_exception(error)

    def give_up(self, key: str) -> None:
        wait = self._waits.pop(key, None)
        if wait is None or wait.done():
            return
        try:
            with _in_store():
                self._store.compare_set(key, "", _GIVEN_UP.decode())
        finally:
            with contextlib.suppress(TimeoutError):
                wait.exception(_SECONDS_TO_END)

    def give_up_all(self) -> None:
        with contextlib.suppress(ConnectionError):
            for key in list(self._waits):
                self.give_up(key)
        self._leaves.set()
        if self._announcer is not None:  # other processes may need the name to read the values of this process
            self._announcer.join(_SECONDS_TO_END)

    def try_get(self, key: str) -> bytes | None:
        with _in_store():
            if not self._store.check([key]):
                return None
            value: bytes = self._store.get(key)
        return None if value == _GIVEN_UP else value

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        with _in_store():
            if not self._store.check([*keys]):
                return None
            if self._store.has_extended_api():
                values: list[bytes] = self._store.multi_get([*keys])
            else:
                values = [self._store.get(key) for key in keys]
        return None if _GIVEN_UP in values else values

    def delete(self, key: str) -> None:
        with _in_store():
            self._store.delete_key(key)


_ASKED, _ANSWERED = "asked", "answered/"  # keys of two lists: requests for the name, processes that have it


def _announce(
    starts: Any, start: str, left: str, count: int, is_current: Callable[[], bool], leaves: threading.Event
) -> None:
    """Send the random name of this start to each process that requests it; on exit, store it for the others."""
    others, told = set(range(1, count)), set[bytes]()
    pauses = _growing_pauses()
    with contextlib.suppress(ConnectionError):  # the store or this process is ending
        while others and is_current() and not leaves.is_set():
            with _in_store():
                asked = set(starts.get(_ASKED).split()) if starts.check([_ASKED]) else set()
                for key in asked - told:
                    starts.set(key.decode(), start)
                answered = f"{_ANSWERED}{start}"
                if starts.check([answered]):
                    others -= {int(index) for index in starts.get(answered).split()}
            if asked != told:
                told, pauses = asked, _growing_pauses()
            leaves.wait(next(pauses))
        if others:
            with _in_store():
                starts.set(left, f"{start} {time.time()}")


def _left_name(starts: Any, left: str, earlier: frozenset[str]) -> str | None:
    """Return the name that process 0 stored on exit; None if it still runs, or if the name is from an earlier start."""
    if not starts.check([left]):
        return None
    start, ended = starts.get(left).decode().split()
    return start if float(ended) > _process_began() and start not in earlier else None


def _process_began() -> float:
    """Return the start time of this process or, if the system does not report it, the import time of this module."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _imported


def _growing_pauses() -> Iterator[float]:
    pause = _SHORTEST_PAUSE
    while True:
        yield pause
        pause = min(1.2 * pause, _LONGEST_PAUSE)


_made: weakref.WeakSet[TorchCoordinator] = weakref.WeakSet()
_calling: set[int] = set()  # identifiers of the threads that are in a store call
_ends = threading.Event()  # set when this process stops making store calls
_imported = time.time()
_names: set[str] = set()  # names chosen by process 0, one per start, that this process has received


@contextlib.contextmanager
def _in_store() -> Iterator[None]:
    """Convert store errors to built-in exceptions, and refuse calls when this process is ending."""
    thread = threading.get_ident()
    _calling.add(thread)  # before the check, so that `_end_calls` waits for every call that is not refused
    try:
        if _ends.is_set():
            raise ConnectionError("torch.distributed's store: this process is ending and no longer calls it")
        yield
    except RuntimeError as error:
        raise ConnectionError(f"torch.distributed's store: {error}") from error
    finally:
        _calling.discard(thread)


# Python stops all threads at exit, and stopping a thread inside torch's store aborts the process. Therefore, the exit
# handlers first end all waits, and then wait for the running calls.


def _end_waits() -> None:
    for coordinator in list(_made):
        thread = threading.Thread(target=coordinator.give_up_all, name="holdfast-store", daemon=True)
        thread.start()
        thread.join(_SECONDS_TO_END)


def _end_calls() -> None:
    _ends.set()
    deadline = time.monotonic() + _SECONDS_TO_END
    while _calling and time.monotonic() < deadline:
        time.sleep(_SHORTEST_PAUSE)


# Ordinary exit handlers run only after all saves have ended, when Python can no longer start threads.
if (_register_early := getattr(threading, "_register_atexit", None)) is not None:
    _register_early(_end_waits)
atexit.register(_end_calls)
# A forked child does not inherit the waits and calls of its parent.
os.register_at_fork(after_in_child=_made.clear)
os.register_at_fork(after_in_child=_calling.clear)
