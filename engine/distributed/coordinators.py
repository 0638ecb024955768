"""Coordinators, which represent the processes of a program and the key-value store that connects them.

A program has one process, or several that are connected by ``jax.distributed`` or ``torch.distributed``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .torch_store import TorchCoordinator

T = TypeVar("T")

_SECOND_CHANCE = 1.0  # timeout in seconds for a store that did not answer the previous call, and for `give_up`
SHARE = 8  # largest number by which a timeout is divided after earlier timeouts

_silent: weakref.WeakSet[Coordinator] = weakref.WeakSet()  # coordinators whose store did not answer the last call


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One of the processes that write a checkpoint.

    Attributes:
        index: The index of this process, from 0.
        count: The number of processes.
        token: A string that is unique to this save and the same on all processes. It is part of the file names.
        awaited: An event that is set when a training loop starts to wait for the save. None means that no training
            loop runs during the save.
        shared: Whether all processes write to the same directory; if not, each host writes to its own directory.
    """

    index: int = 0
    count: int = 1
    token: str = ""
    awaited: threading.Event | None = None
    shared: bool = True


class Coordinator(Protocol):
    """The processes of a program and the key-value store that they share.

    Keys are strings, and values are bytes. Any thread may call any method, and no waiting call blocks another. No
    method is a collective operation on devices, so calls from a background thread never delay a training step.
    `Rendezvous` implements broadcasts, gathers and barriers on top of these methods.

    Coordinators support weak references. All methods raise ConnectionError if the store is unavailable, usually because
    the process that hosted it has ended.
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
            key: Names separated by slashes. A key must not be the parent path of another key unless both are deleted
                together, because some stores treat it as a folder.
            value: At most 512 KiB.
        """

    def get(self, key: str, timeout: float, *, waited: float = 0.0) -> bytes:
        """Wait for a value.

        Args:
            key: The key.
            timeout: Maximum time to wait, in seconds.
            waited: Time, in seconds, for which the caller has already waited for this value. The longer the time, the
                less often the store is polled.

        Raises:
            TimeoutError: No process has stored the value within ``timeout``.
        """

    def try_get(self, key: str) -> bytes | None:
        """Return a value without waiting, or None if it has not been stored."""

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return several values in one or a few requests, without waiting; None if any of them has not been stored.

        Args:
            keys: At least one key. All keys must be equal up to the last slash.
        """

    def delete(self, key: str) -> None:
        """Delete a value if it exists."""

    def give_up(self, key: str) -> None:
        """End the wait for a value after `get` has raised an error, if this process will not request the value again.

        Other processes may still wait for the value. This is a no-op for stores whose waits end on their own.
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
        """Return a value. If it is missing, raise TimeoutError at once, because no other process can store it."""
        if key not in self._values:
            raise TimeoutError(f"{key} was not stored, and there is no other process")
        return self._values[key]

    def try_get(self, key: str) -> bytes | None:
        """Return a value, or None if it has not been stored."""
        return self._values.get(key)

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return several values, or None if any of them has not been stored."""
        return [self._values[key] for key in keys] if self._values.keys() >= set(keys) else None

    def delete(self, key: str) -> None:
        """Delete a value if it exists."""
        self._values.pop(key, None)

    def give_up(self, key: str) -> None:
        """Do nothing, because calls never wait."""


class JaxCoordinator:
    """The processes of a jax program and the key-value store of jax's coordination service."""

    # The service runs in process 0. If process 0 dies, jax aborts all other processes at once. If another process dies,
    # jax aborts the rest after ``heartbeat_timeout_seconds``, unless ``jax_enable_recoverability`` is set.

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
                return bytes(self._client.blocking_key_value_get_bytes(key, max(1, round(timeout * 1000))))
        except TimeoutError:
            late = self.try_get(key)  # the timeout may have been too short for any response
            if late is None:
                raise
            return late

    def try_get(self, key: str) -> bytes | None:
        try:
            with _jax_error(key):
                return bytes(self._client.key_value_try_get_bytes(key))
        except KeyError:
            return None

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        if len(keys) == 1:
            value = self.try_get(keys[0])
            return None if value is None else [value]
        folder = keys[0].rpartition("/")[0]
        with _jax_error(folder):
            values: dict[str, bytes] = dict(self._client.key_value_dir_get_bytes(folder))
        return [values[key] for key in keys] if values.keys() >= set(keys) else None

    def delete(self, key: str) -> None:
        with _jax_error(key):  # the service also deletes all keys below this one
            self._client.key_value_delete(key)

    def give_up(self, key: str) -> None:
        """Do nothing, because a wait in the service ends at its deadline."""


@contextlib.contextmanager
def _jax_error(key: str) -> Iterator[None]:
    """Convert the client's RuntimeErrors, whose text begins with a status, to more specific built-in exceptions."""
    try:
        yield
    except RuntimeError as error:
        status = str(error).partition(":")[0]
        if status == "NOT_FOUND":
            raise KeyError(key) from None
        if status == "DEADLINE_EXCEEDED":
            raise TimeoutError(f"no process stored {key} in time") from None
        raise ConnectionError(f"jax's coordination service: {error}") from error


class BoundedCoordinator:
    """A coordinator whose calls raise ConnectionError if its store does not answer for ``limit`` seconds.

    If the process that hosts the store is stopped or its machine is unreachable, connections stay open, and clients
    such as torch's wait without a deadline. Each call therefore runs in a thread that is abandoned at the deadline.
    After that, further calls wait for at most a second each, until the store answers one of them.
    """

    def __init__(self, coordinator: Coordinator, limit: float) -> None:
        self.unbounded = coordinator
        self.process_index = coordinator.process_index
        self.process_count = coordinator.process_count
        self._limit = limit
        self._again = min(limit / SHARE, _SECOND_CHANCE)

    def put(self, key: str, value: bytes) -> None:
        self.run(lambda store: store.put(key, value))

    def get(self, key: str, timeout: float, *, waited: float = 0.0) -> bytes:
        return self.run(lambda store: store.get(key, timeout, waited=waited), timeout)

    def try_get(self, key: str) -> bytes | None:
        return self.run(lambda store: store.try_get(key))

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        return self.run(lambda store: store.try_get_all(keys))

    def delete(self, key: str) -> None:
        self.run(lambda store: store.delete(key))

    def give_up(self, key: str) -> None:
        """End the wait for a value, unless the store has failed to answer the last call."""
        if self.unbounded not in _silent:
            with contextlib.suppress(ConnectionError, DeadlinePassedError):
                call_within(self._again, self._answered, lambda store: store.give_up(key))

    def monotonic(self) -> float:
        """Return the current time, in seconds, of the clock used for deadlines."""
        return time.monotonic()

    def run(self, work: Callable[[Coordinator], T], waits: float = 0.0) -> T:
        """Call ``work``, which may make several store calls, with one deadline; ``waits`` is added to the limit."""
        limit = self._again if self.unbounded in _silent else self._limit
        try:
            return call_within(waits + limit, lambda: self._answered(work))
        except DeadlinePassedError:
            _silent.add(self.unbounded)
            raise ConnectionError(
                f"it has not answered for {limit:g} s: its process is stopped, or its machine is unreachable"
            ) from None

    def _answered(self, work: Callable[[Coordinator], T]) -> T:
        try:
            return work(self.unbounded)
        finally:
            _silent.discard(self.unbounded)


class DeadlinePassedError(Exception):
    """A call did not return in time, and its thread was abandoned."""


def call_within(seconds: float, work: Callable[..., T], *inputs: Any) -> T:
    """Call a function in a thread, because it may never return; raise DeadlinePassedError after ``seconds``."""
    from concurrent.futures import Future  # imported lazily because only multi-process programs need it

    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(work(*inputs))
        except BaseException as error:  # the waiting thread raises it again
            answer.set_exception(error)

    threading.Thread(target=call, name="holdfast-store", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():  # the function has raised a TimeoutError itself, or has just returned
            return answer.result()
        raise DeadlinePassedError(f"no answer for {seconds:g} s") from None


def current_coordinator() -> Coordinator:
    """Return the coordinator that connects the processes of this program.

    The coordinator uses ``jax.distributed`` or ``torch.distributed``, whichever has been initialized with more than one
    process; ``jax.distributed`` takes precedence. If neither has, the coordinator is `Alone`. The call is cheap: it
    does not import or initialize anything, and does not communicate.

    Returns:
        The coordinator. Repeated calls return the same object as long as the connection lasts.
    """
    return _of_jax() or _of_torch() or _ALONE


def primary_host() -> str | None:
    """Return the host name of process 0, as passed to jax or torch; None if it is unknown."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    address = getattr(state, "coordinator_address", None)
    return str(address).rpartition(":")[0].strip("[]") if address else os.environ.get("MASTER_ADDR")


def shares_machine() -> bool:
    """Return whether other processes of this program may run on this machine, according to the launcher."""
    return current_coordinator().process_count > 1 and os.environ.get("LOCAL_WORLD_SIZE") != "1"


def machine_identity() -> str:
    """Return a string that is the same for all processes on a machine, including processes in containers."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        import socket  # imported lazily because Linux does not need it

        return socket.gethostname()


_ALONE = Alone()
_current: dict[str, tuple[Any, Any]] = {}  # for each library: client (or weak reference to the group), coordinator


def _of_jax() -> JaxCoordinator | None:
    # jax's public functions are avoided because they would select and start a backend.
    state: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    client = getattr(state, "client", None)
    if client is None or (state.num_processes or 1) < 2:
        _current.pop("jax", None)
        return None
    previous, coordinator = _current.get("jax", (None, None))
    if previous is not client:
        coordinator = JaxCoordinator(client, int(state.process_id), state.num_processes)
        _current["jax"] = client, coordinator
    backends = sys.modules.get("jax._src.xla_bridge")
    if backends is not None and backends.backends_are_initialized():
        # Arrays use the backend's process indices. On TPUs, these may differ from the service's indices.
        coordinator.process_index = int(sys.modules["jax"].process_index())
    return coordinator  # type: ignore[no-any-return]


def _of_torch() -> TorchCoordinator | None:
    distributed: Any = sys.modules.get("torch.distributed")
    initialized = getattr(distributed, "is_initialized", None)  # absent in torch builds without distributed support
    if initialized is None or not initialized():
        _current.pop("torch", None)
        return None
    group = distributed.group.WORLD
    reference, coordinator = _current.get("torch", (None, None))
    if reference is None or reference() is not group:
        # No lock is needed, because a coordinator that another thread creates at the same time uses the same store.
        reference = weakref.ref(group)
        coordinator = _connect(distributed, reference) if distributed.get_world_size() > 1 else None
        _current["torch"] = reference, coordinator
    return coordinator  # type: ignore[no-any-return]


def _connect(distributed: Any, group: Callable[[], Any]) -> TorchCoordinator:
    store = distributed.distributed_c10d._get_default_store()
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and store.has_extended_api()
    return TorchCoordinator(
        store,
        int(distributed.get_rank()),
        int(distributed.get_world_size()),
        (lambda: distributed.is_initialized() and distributed.group.WORLD is group()) if is_kept else None,
    )
