"""A save of thousands of processes, simulated: the real code in a thread for each, a store with latency, and deaths.

Each process is a thread that makes the save that a manager makes. Their coordinator is a dictionary, which counts the
bytes that leave process 0, where jax and torch keep the store. The object store is a dictionary, too: each request
takes a latency and the time of its bytes. All processes share the cores of this machine, so the time of a save says
little; that of the commit does: it begins when the last process has written its share, and all others only wait then.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import holdfast as hf
from holdfast.engine.checkpoint.save import ItemToSave, Save
from holdfast.engine.distributed import next_rendezvous
from holdfast.engine.format import CheckpointRecord
from holdfast.engine.storage import Location, Segment
from holdfast.engine.storage.object_store import ObjectStoreBackend, file_parts
from holdfast.handlers import PerProcessCheckpointHandler

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK = 4096
"""Bytes that each process has of every leaf."""

GENERATOR = 5056
"""Bytes of the state of a torch generator, which each process saves as its own."""

STACK = 256 * 1024
"""Bytes of the stack of each thread."""

SWITCH = 0.2
"""Seconds after which threads ask for Python's lock; thousands that ask more often take all processors for it."""

BESIDE = 32
"""Processes that write at the same time; thousands of threads would mostly wait for Python's lock."""

POINTS = {
    "before it knows the folders": ("get", "/broadcast/plan/"),
    "when it has written": ("put", "/gather/written/"),
    "before it learns of the commit": ("get", "/broadcast/committed/"),
}
"""Where a process may die: the call of its coordinator, and a part of the key."""


class SimulatedStore(ObjectStoreBackend):
    """An object store in memory whose requests take time.

    Args:
        latency: Seconds that each request takes.
        bandwidth: Bytes a second of each request.
    """

    def __init__(self, latency: float, bandwidth: float) -> None:
        super().__init__("simulated://store", is_remote=True)
        self.objects: dict[str, bytes] = {}
        self.requests = 0
        self.latency = latency
        self._bandwidth = bandwidth
        self._changes = threading.Lock()

    def _request(self, nbytes: int = 0) -> None:
        with self._changes:
            self.requests += 1
        time.sleep(self.latency + nbytes / self._bandwidth)

    def has_object(self, key: str) -> bool:
        self._request()
        return key in self.objects

    def object_size(self, key: str) -> int | None:
        self._request()
        found = self.objects.get(key)
        return None if found is None else len(found)

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        found = self.objects.get(key)
        if found is None:
            self._request()
            raise hf.errors.ObjectNotFoundError(f"cannot read {self.url(key)}: there is no such object")
        if byte_range is not None:
            if (byte_range.start or 0) >= max(1, len(found)):
                self._request()
                raise hf.DamagedCheckpointError(f"{self.url(key)} is shorter than expected")
            found = found[byte_range]
        self._request(len(found))
        return found

    def write_object(self, key: str, content: list[bytes]) -> None:
        data = content.pop()
        self._request(len(data))
        self.objects[key] = data

    def remove(self, key: str) -> None:
        self._request()
        self.objects.pop(key, None)

    def list_objects(self, key: str, *, itself: bool) -> list[str]:
        with self._changes:
            names = list(self.objects)
        found = sorted(name for name in names if name.startswith(f"{key}/") or (itself and name == key))
        for _ in range(0, len(found) + 1, 1000):  # services list that many names at a time
            self._request()
        return found

    def write_data(self, key: str, size: int, segments: Sequence[Segment], awaited: threading.Event | None) -> None:
        self.write_object(key, [b"".join(bytes(part) for part in file_parts(size, segments, sent=True))])

    def honours_conditions(self, key: str, data: bytes) -> bool:
        return True

    def read_generation(self, key: str) -> tuple[bytes | None, Any]:
        self._request()
        return self.objects.get(key), self.objects.get(key)

    def write_where(self, key: str, data: bytes | None, generation: Any) -> bool:
        self._request(len(data or b""))
        with self._changes:
            if self.objects.get(key) is not generation:
                return False
            if data is None:
                self.objects.pop(key, None)
            else:
                self.objects[key] = bytes(data)
            return True


class Died(BaseException):
    """A simulated process ends here, without another word."""


class Hub:
    """The key-value store of the simulated processes, and what it has seen of a save."""

    def __init__(self) -> None:
        self.primary_bytes_out = 0
        self.requests = 0
        self.written = 0.0  # when the last process had written its share
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[threading.Event]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, value: bytes) -> None:
        with self._lock:
            self.requests += 1
            if "/gather/written/" in key:
                self.written = time.monotonic()
            self._values[key] = value
            waiting = self._waiting.pop(key, ())
        for event in waiting:
            event.set()

    def get(self, key: str, process: int, event: threading.Event | None = None) -> bytes | None:
        """Return a value, or have ``event`` set when it is there."""
        with self._lock:
            self.requests += 1
            value = self._values.get(key)
            if value is None and event is not None:
                self._waiting.setdefault(key, []).append(event)
            if value is not None and process:
                self.primary_bytes_out += len(value)
            return value

    def delete(self, key: str) -> None:
        with self._lock:
            self.requests += 1
            self._values.pop(key, None)


class SimulatedCoordinator:
    """One process's connection to the hub; it may die at a point.

    Args:
        hub: The store of all processes.
        index: Of this process.
        count: The number of processes.
        dies_at: The point of :data:`POINTS` at which it dies; None: it lives.
        beside: Released when it has written its share.
    """

    def __init__(self, hub: Hub, index: int, count: int, dies_at: str | None, beside: threading.Semaphore) -> None:
        self.process_index = index
        self.process_count = count
        self._hub = hub
        self._point = None if dies_at is None else POINTS[dies_at]
        self._dead = False
        self._beside = beside

    def _call(self, method: str, key: str) -> None:
        if self._point is not None and self._point[0] == method and self._point[1] in key:
            self._dead = True
        if self._dead:
            raise Died

    def put(self, key: str, value: bytes) -> None:
        self._call("put", key)
        self._hub.put(key, value)
        if "/gather/written/" in key:
            self._beside.release()

    def get(self, key: str, timeout: float, *, waited: float = 0.0) -> bytes:
        self._call("get", key)
        event = threading.Event()
        value = self._hub.get(key, self.process_index, event)
        if value is None and event.wait(timeout):
            value = self._hub.get(key, self.process_index)
        if value is None:
            raise TimeoutError(f"no process stored {key} within {timeout:g} s")
        return value

    def try_get(self, key: str) -> bytes | None:
        self._call("try_get", key)
        return self._hub.get(key, self.process_index)

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        self._call("try_get", keys[0])
        found = [self._hub.get(key, self.process_index) for key in keys]
        return [value for value in found if value is not None] if None not in found else None

    def delete(self, key: str) -> None:
        self._call("delete", key)
        self._hub.delete(key)


@dataclass(frozen=True, slots=True)
class Protocol:
    """What a simulated save took.

    Attributes:
        processes: How many there were.
        commit_seconds: From the moment at which the last process had written its share until all knew of the commit.
        primary_bytes_out: Bytes that left process 0 in the save.
        coordinator_requests: Requests to the key-value store in the save.
        store_requests: Requests to the object store in the save.
        files: Objects of the checkpoint.
        record_bytes: Bytes of its commit record.
        died: Where one process died; "": none did.
        told: The error that process 0 raised, if one died.
    """

    processes: int
    commit_seconds: float
    primary_bytes_out: int
    coordinator_requests: int
    store_requests: int
    files: int
    record_bytes: int
    died: str = ""
    told: str = ""


def simulate(
    processes: int, leaves: int = 4, *, latency: float = 0.03, dies_at: str | None = None, timeout: float = 600.0
) -> Protocol:
    """Save once with simulated processes, the last of which may die.

    Args:
        processes: How many.
        leaves: How many leaves the tree has; every process writes a chunk of 4 KiB of each.
        latency: Of the object store, in seconds.
        dies_at: The point of :data:`POINTS` at which the last process dies; None: none dies.
        timeout: Seconds that processes wait for each other.

    Returns:
        What it took.
    """
    hub, store = Hub(), SimulatedStore(latency, bandwidth=100e6)
    tree = {f"leaf{number}": np.zeros(processes * CHUNK, np.uint8) for number in range(leaves)}
    errors: dict[int, BaseException] = {}

    beside = threading.Semaphore(BESIDE)
    coordinators = [
        SimulatedCoordinator(hub, index, processes, dies_at if index == processes - 1 else None, beside)
        for index in range(processes)
    ]

    def run(coordinator: SimulatedCoordinator) -> None:
        index = coordinator.process_index
        own = PerProcessCheckpointHandler(coordinator=coordinator)
        items = {
            "state": ItemToSave(hf.PyTreeCheckpointHandler(chunk_bytes=CHUNK), tree),
            "own": ItemToSave(own, {"generator": np.full(GENERATOR, index % 256, np.uint8)}),
        }
        rendezvous = next_rendezvous(coordinator, "save")
        try:
            save = Save(Location(store, "run/1"), items, overwrite=False, rendezvous=rendezvous, timeout=timeout)
            with save.completing():
                written = save.write()
                save.commit(None if written is None else CheckpointRecord(items=written, time=0.0, step=1))
        except (Died, hf.errors.BarrierTimeoutError, hf.errors.PeerFailedError) as error:
            errors[index] = error
            beside.release()

    size, interval = threading.stack_size(STACK), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in coordinators]
        for thread in threads:
            beside.acquire()
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.stack_size(size)
        sys.setswitchinterval(interval)
    ended = time.monotonic()
    objects = {key: data for key, data in store.objects.items() if key.startswith("run/1/")}
    return Protocol(
        processes=processes,
        commit_seconds=ended - hub.written,
        primary_bytes_out=hub.primary_bytes_out,
        coordinator_requests=hub.requests,
        store_requests=store.requests,
        files=len(objects),
        record_bytes=len(objects.get("run/1/checkpoint.json", b"")),
        died=dies_at or "",
        told="" if 0 not in errors else f"{type(errors[0]).__name__}: {errors[0]}",
    )
