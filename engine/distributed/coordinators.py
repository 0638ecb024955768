"""Coordinators: the processes of a program, and a small key-value store through which they reach each other.

A program is alone, or its processes are connected by ``jax.distributed`` or ``torch.distributed``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.25
_PAUSE_PER_PROCESS = 0.25e-3  # seconds; so all processes that wait ask a store that polls 4,000 times a second at most
_NO_DEADLINE = timedelta(days=20)  # as milliseconds, it fits into the integer that c10d waits for
_SECONDS_TO_END = 2.0  # for a wait that is given up
_IDLE_CONNECTIONS = 2  # each takes a file of the process that serves the store
_GIVEN_UP = b"holdfast: a process has given up waiting for this value"


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One of the processes that write a checkpoint.

    Attributes:
        index: The index of this process, from 0.
        count: The number of processes.
        token: Text that is unique to this save and the same on all processes: a part of the names of its files.
        awaited: Is set when the training loop that runs meanwhile begins to wait for the save; None: no loop runs
            meanwhile.
        shared: Whether all processes write to one place; if not, each host has its own.
    """

    index: int = 0
    count: int = 1
    token: str = ""
    awaited: threading.Event | None = None
    shared: bool = True


class Coordinator(Protocol):
    """The processes of one program, and a key-value store that they share.

    Keys are text, values are bytes. Any thread may call any method, and one that waits does not block the others.
    None is a collective operation on devices, so a background thread never delays a training step. `Rendezvous` builds
    broadcasts, gathers and barriers on it.

    A coordinator can be referred to weakly. All methods raise ConnectionError when the store is gone, usually with the
    process that kept it.
    """

    @property
    def process_index(self) -> int:
        """Return the index of this process, from 0."""

    @property
    def process_count(self) -> int:
        """Return the number of processes."""

    def put(self, key: str, value: bytes) -> None:
        """Store a value for all processes.

        Args:
            key: Names divided by slashes. No key may be another key followed by a slash and more, unless both are
                deleted together: some stores treat the shorter one as a folder.
            value: At most 512 KiB.
        """

    def get(self, key: str, timeout: float, *, waited: float = 0.0) -> bytes:
        """Wait for a value.

        Args:
            key: The key.
            timeout: How long to wait, in seconds.
            waited: How long the caller has waited for it before this call, in seconds. A store that has to be polled is
                asked less often the longer that is.

        Raises:
            TimeoutError: No process has stored it in that time.
        """

    def try_get(self, key: str) -> bytes | None:
        """Return a value without waiting, or None if it has not been stored."""

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return several values in one request or few, without waiting, or None if one of them has not been stored.

        Args:
            keys: At least one key, all with the same text before their last slash.
        """

    def delete(self, key: str) -> None:
        """Delete a value; a missing one is fine."""

    def give_up(self, key: str) -> None:
        """End the wait for a value for which `get` has raised, and which this process will not ask for again.

        Other processes may still wait for it. If the store continues no wait, there is nothing to do.
        """


class Alone:
    """The coordinator of a single process; it needs no initialization."""

    process_index = 0
    process_count = 1

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._values[key] = value

    def get(self, key: str, timeout: float, *, waited: float = 0.0) -> bytes:
        """Return a value, or raise TimeoutError at once, as no other process could store it."""
        if key not in self._values:
            raise TimeoutError(f"{key} was not stored, and there is no other process")
        return self._values[key]

    def try_get(self, key: str) -> bytes | None:
        """Return a value, or None if there is none."""
        return self._values.get(key)

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return all values, or None if there is none for one of the keys."""
        return [self._values[key] for key in keys] if self._values.keys() >= set(keys) else None

    def delete(self, key: str) -> None:
        """Delete a value; a missing one is fine."""
        self._values.pop(key, None)

    def give_up(self, key: str) -> None:
        """Do nothing: no call waits."""


class JaxCoordinator:
    """The processes of a jax program, and the key-value store of its coordination service."""

    # The service runs in process 0: jax aborts all others at once if that dies, and ``heartbeat_timeout_seconds`` after
    # the death of another one, unless ``jax_enable_recoverability`` is set.

    def __init__(self, client: Any, index: int, count: int) -> None:
        self.process_index = index
        self.process_count = count
        self._client = client

    def put(self, key: str, value: bytes) -> None:
        with _jax_error(key):
            self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str, timeout: float, *, waited: float = 0.0) -> bytes:
        try:
            with _jax_error(key):
                value: bytes = self._client.blocking_key_value_get_bytes(key, max(1, round(timeout * 1000)))
        except TimeoutError:
            late = self.try_get(key)  # the timeout may have been too short for any answer
            if late is None:
                raise
            return late
        return value

    def try_get(self, key: str) -> bytes | None:
        try:
            with _jax_error(key):
                value: bytes = self._client.key_value_try_get_bytes(key)
        except KeyError:
            return None
        return value

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        if len(keys) == 1:
            value = self.try_get(keys[0])
            return None if value is None else [value]
        folder = keys[0].rpartition("/")[0]
        with _jax_error(folder):
            found: dict[str, bytes] = dict(self._client.key_value_dir_get_bytes(folder))
        return [found[key] for key in keys] if found.keys() >= set(keys) else None

    def delete(self, key: str) -> None:
        with _jax_error(key):  # this also deletes all values whose keys continue after a slash
            self._client.key_value_delete(key)

    def give_up(self, key: str) -> None:
        """Do nothing: a wait of the service ends with its deadline."""


@contextlib.contextmanager
def _jax_error(key: str) -> Iterator[None]:
    """Turn errors of the client, RuntimeErrors whose text begins with a status, into Python's own."""
    try:
        yield
    except RuntimeError as error:
        status = str(error).partition(":")[0]
        if status == "NOT_FOUND":
            raise KeyError(key) from None
        if status == "DEADLINE_EXCEEDED":
            raise TimeoutError(f"no process stored {key} in time") from None
        raise ConnectionError(f"jax's coordination service: {error}") from error


def _prefixed(name: str, store: Any) -> Any:
    own = store.clone() if hasattr(store, "clone") else store  # since torch 2.8
    return sys.modules["torch.distributed"].PrefixStore(name, own)


def _is_polled(store: Any) -> bool:
    """Return whether waits of a store would poll, block the process group, or not end when they are given up."""
    while hasattr(store, "underlying_store"):  # those of prefixes
        store = store.underlying_store
    is_file = isinstance(store, sys.modules["torch.distributed"].FileStore)
    return is_file or not hasattr(store, "clone") or not getattr(store, "libuvBackend", True)


class TorchCoordinator:
    """The processes of a torch program, and the store through which they found each other."""

    # A wait of the store blocks its connection, and prints warnings when it times out. So it gets a thread and a
    # connection of its own, and continues for the next `get` of its key. Only a value ends it: `give_up` stores one
    # that all processes take for none.

    # torchrun keeps its store and what is in it when it starts the processes again. There, process 0 draws a name for
    # all keys of this start, and tells it to each process that asks, under a key that no earlier one has used. If it
    # ends before all have asked, it leaves the name and the time. Processes take only a name left after they began.

    def __init__(self, store: Any, index: int, count: int, is_current: Callable[[], bool] | None = None) -> None:
        self.process_index = index
        self.process_count = count
        self._shared: Any = store
        self._own: Any = None
        self._is_current = is_current  # whether these are still the processes of the program
        self._start = os.urandom(8).hex()
        self._telling: threading.Thread | None = None
        self._leaves = threading.Event()  # whether this process ends
        self._earlier = frozenset(_names)  # of earlier process groups of this process
        self._is_polled = _is_polled(store)
        self._waits: dict[str, Future[bytes]] = {}  # by key
        self._idle: list[Any] = []  # connections of waits that have ended
        _made.add(self)

    @property
    def _store(self) -> Any:
        """A connection that the process group does not block; made at the first call, which has a deadline."""
        shared = self._shared  # no lock: it would be held while a frozen process 0 does not answer
        if shared is not None:
            own = _prefixed("holdfast", shared)
            self._own = own if self._is_current is None else self._of_this_start(own, self._is_current)
            self._shared = None  # a reference would keep process 0 serving it when the process group is gone
        return self._own

    def _of_this_start(self, store: Any, is_current: Callable[[], bool]) -> Any:
        """Return the part of a store that earlier processes cannot have written to."""
        start, starts = self._start, _prefixed("starts", store)
        left = f"left/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
        if self.process_index == 0:
            starts.set(left, f"{start} 0")  # Not deleted: a process that has seen it would wait for it.
            others = set(range(1, self.process_count))
            arguments = (starts, start, left, others, lambda: is_current() and not self._leaves.is_set(), self._leaves)
            self._telling = threading.Thread(target=_tell_start, args=arguments, name="holdfast-start", daemon=True)
            self._telling.start()
        else:
            starts.append(_ASKED, f"{start} ")
            pauses = _growing_pauses()
            while not starts.check([start]):
                if (found := _left_name(starts, left, self._earlier)) is not None:
                    start = found
                    break
                if _ends.is_set():
                    raise ConnectionError("torch.distributed's store: this process ends before process 0 has begun")
                time.sleep(next(pauses))
            else:
                start = starts.get(start).decode()
            _names.add(start)
            starts.append(f"{_ANSWERED}{start}", f"{self.process_index} ")
        return sys.modules["torch.distributed"].PrefixStore(start, store)

    def new_store(self, name: str) -> Any:
        """Return another connection to the store, of which all keys begin with a name."""
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
            except TimeoutError:  # a look over the other connection, as that of the wait may be lost without a sign
                if (found := self.try_get(key)) is None:
                    raise TimeoutError(f"no process stored {key} within {timeout:g} s") from None
                self._waits.pop(key, None)
                return found
            finally:
                if wait.done():
                    self._waits.pop(key, None)
            if value != _GIVEN_UP:
                return value
        longest = max(_LONGEST_PAUSE, self.process_count * _PAUSE_PER_PROCESS)
        while (here := time.monotonic() - begin) < timeout:  # it polls, also where another process has given up
            pause = min(max((waited + here) / 16, _SHORTEST_PAUSE), longest)
            time.sleep(min(pause, timeout - here))
            if (value := self.try_get(key)) is not None:
                return value
        raise TimeoutError(f"no process stored {key} within {timeout:g} s")

    def _start_wait(self, key: str) -> Future[bytes]:
        """Return the wait for a key, which begins unless another thread has begun it."""
        from concurrent.futures import Future  # imported lazily: only programs of several processes need it

        made: Future[bytes] = Future()
        wait = self._waits.setdefault(key, made)
        if wait is made:
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
        except BaseException as error:  # raised by the calls that wait for it
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
        if self._telling is not None:  # Another process may need the name for what this one has stored.
            self._telling.join(_SECONDS_TO_END)

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


_ASKED, _ANSWERED = "asked", "answered/"  # keys of lists: the keys for answers, and the processes that have one


def _tell_start(
    starts: Any, start: str, left: str, others: set[int], goes_on: Callable[[], bool], leaves: threading.Event
) -> None:
    """Tell the name of this start to all processes that ask for it, until all others have it, or leave it to them."""
    told: set[bytes] = set()
    pauses = _growing_pauses()
    with contextlib.suppress(ConnectionError):  # The store, or this process, ends.
        while others and goes_on():
            with _in_store():
                asked = set(starts.get(_ASKED).split()) if starts.check([_ASKED]) else set()
                for key in asked - told:
                    starts.set(key.decode(), start)
                answered = f"{_ANSWERED}{start}"
                if starts.check([answered]):
                    others = others - {int(index) for index in starts.get(answered).split()}
            if asked != told:
                told, pauses = asked, _growing_pauses()
            leaves.wait(next(pauses))
        if others:
            with _in_store():
                starts.set(left, f"{start} {time.time()}")


def _left_name(starts: Any, left: str, earlier: frozenset[str]) -> str | None:
    """Return the name that process 0 of this start has left, if it has ended."""
    if not starts.check([left]):
        return None
    start, ended = starts.get(left).decode().split()
    return start if float(ended) > _process_began() and start not in earlier else None


def _process_began() -> float:
    """Return when this process began; where the system does not tell, when this module was imported."""
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
_calling: set[int] = set()  # the threads that are in a store, by their identifiers
_ends = threading.Event()  # whether this process calls no store any more
_imported = time.time()
_names: set[str] = set()  # those of starts that this process has been told


@contextlib.contextmanager
def _in_store() -> Iterator[None]:
    """Turn errors of a store into Python's own, and refuse calls once this process ends."""
    thread = threading.get_ident()
    _calling.add(thread)  # before the look at the event, so that no call that is not refused is missed
    try:
        if _ends.is_set():
            raise ConnectionError("torch.distributed's store: this process ends, and does not call it any more")
        yield
    except RuntimeError as error:
        raise ConnectionError(f"torch.distributed's store: {error}") from error
    finally:
        _calling.discard(thread)


# Python stops the threads that run when it ends, and one that is in torch's store then aborts the process. So all waits
# are given up first, and then the calls that are under way end.


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


# Ordinary exit functions run when the saves have ended, and when no thread can be started any more.
if (_register_early := getattr(threading, "_register_atexit", None)) is not None:
    _register_early(_end_waits)
atexit.register(_end_calls)
# A forked process has neither the waits nor the calls.
os.register_at_fork(after_in_child=_made.clear)
os.register_at_fork(after_in_child=_calling.clear)


def current_coordinator() -> Coordinator:
    """Return the coordinator of the processes of this program.

    It is ``jax.distributed``, if initialized with more than one process; otherwise ``torch.distributed``,
    if initialized with a world of more than one; otherwise `Alone`. The call imports,
    initializes and communicates nothing, so it is cheap.

    Returns:
        The coordinator: the same object as long as the connection lasts.
    """
    return _of_jax() or _of_torch() or _ALONE


def primary_host() -> str | None:
    """Return the name of the host of process 0, as the program has given it to jax or torch; None if it is unknown."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    address = getattr(state, "coordinator_address", None)
    return str(address).rpartition(":")[0].strip("[]") if address else os.environ.get("MASTER_ADDR")


def shares_machine() -> bool:
    """Return whether other processes of this program may run on this machine, by the environment of launchers."""
    return current_coordinator().process_count > 1 and os.environ.get("LOCAL_WORLD_SIZE") != "1"


def machine_identity() -> str:
    """Return text that is the same for all processes of a machine, those in containers included."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        import socket  # only systems other than Linux need it

        return socket.gethostname()


_ALONE = Alone()
_current: dict[str, tuple[Any, Any]] = {}  # by library: the client, or a reference to the group, and its coordinator


def _of_jax() -> JaxCoordinator | None:
    # jax's public functions for this would choose and start a backend.
    state: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    client = getattr(state, "client", None)
    if client is None or (state.num_processes or 1) < 2:
        _current.pop("jax", None)
        return None
    known, found = _current.get("jax", (None, None))
    is_known = known is client
    made: JaxCoordinator = found if is_known else JaxCoordinator(client, int(state.process_id), state.num_processes)
    _current["jax"] = client, made
    backends = sys.modules.get("jax._src.xla_bridge")
    if backends is not None and backends.backends_are_initialized():
        # Holders of arrays have the numbers of the backend, which may differ from those of the service (on TPUs).
        made.process_index = int(sys.modules["jax"].process_index())
    return made


def _of_torch() -> TorchCoordinator | None:
    distributed: Any = sys.modules.get("torch.distributed")
    initialized = getattr(distributed, "is_initialized", None)  # absent in builds without it
    if initialized is None or not initialized():
        _current.pop("torch", None)
        return None
    group = distributed.group.WORLD
    known, found = _current.get("torch", (None, None))
    made: TorchCoordinator | None = found
    if known is None or known() is not group:
        # No lock is needed: a second one, made by another thread meanwhile, would reach the same store.
        known = weakref.ref(group)
        made = _connect(distributed, known) if distributed.get_world_size() > 1 else None
        _current["torch"] = known, made
    return made


def _connect(distributed: Any, group: Callable[[], Any]) -> TorchCoordinator:
    store = distributed.distributed_c10d._get_default_store()
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and store.has_extended_api()
    return TorchCoordinator(
        store,
        int(distributed.get_rank()),
        int(distributed.get_world_size()),
        (lambda: distributed.is_initialized() and distributed.group.WORLD is group()) if is_kept else None,
    )
