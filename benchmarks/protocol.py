"""A save of thousands of processes, simulated: the real code in a thread for each, in simulated time, and its failures.

Each process is a thread that makes the save that a manager makes. Their coordinator is a dictionary, which counts the
bytes that leave process 0, where jax and torch keep the store. The object store is a dictionary, too: each request
takes a latency and the time of its bytes. Nobody waits for any of that: time is simulated (`virtual_time`), so that
each process computes as if it had a core of its own.

A fault is that of one process: it ends before one of its calls to either store, is slow, or is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

import holdfast as hf
from holdfast.engine.checkpoint.save import ItemToSave, Save
from holdfast.engine.distributed import BoundedCoordinator, Coordinator, next_rendezvous
from holdfast.engine.format import CheckpointRecord
from holdfast.engine.steps import read_record
from holdfast.engine.storage import Location, Segment
from holdfast.engine.storage.object_store import ObjectStoreBackend, file_parts
from holdfast.handlers import PerProcessCheckpointHandler

from .virtual_time import Actor, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

CHUNK = 4096
"""Bytes that each process has of every leaf."""

GENERATOR = 5056
"""Bytes of the state of a torch generator, which each process saves as its own."""

NETWORK = 0.5e-3
"""Seconds that a request to process 0 and its answer take on the network."""

LINK = 1.25e9
"""Bytes a second that the network of process 0 takes: 10 Gbit/s."""

SERVICE = 20e-6
"""Seconds that the key-value store in process 0 works for each request; it has one thread."""


Fault = Literal["dies", "slow", "cut off"]


@dataclass(slots=True)
class SimulatedProcess:
    """One process, and what happens to it.

    Attributes:
        index: Its number.
        fault: What happens to it; None: nothing.
        at_call: The number of its call, from 0, before which it dies, or from which on it is slow or cut off.
        slowness: How many times longer its requests to the object store take, once it is slow.
        calls: The names of its calls to the key-value store and to the object store.
        began_at: When that began to happen to it; None: it has not.
        ended_at: When its part of the save ended.
        error: The error with which it ended; None: with none.
        actor: Its thread.
    """

    index: int
    fault: Fault | None = None
    at_call: int = 0
    slowness: float = 100.0
    calls: list[str] = field(default_factory=list)
    began_at: float | None = None
    ended_at: float = 0.0
    error: BaseException | None = None
    actor: Actor = field(init=False)

    def call(self, name: str) -> None:
        """Note a call; raise Died at the one before which it dies, and at any other after that."""
        self.calls.append(name)
        if self.fault is not None and len(self.calls) > self.at_call and self.began_at is None:
            self.began_at = self.actor.now
        if self.suffers("dies"):
            raise Died

    def suffers(self, fault: Fault) -> bool:
        """Return whether a fault has begun."""
        return self.fault == fault and self.began_at is not None


class Died(BaseException):
    """Ends a simulated process at once, as SIGKILL ends a real one."""


class SimulatedStore(ObjectStoreBackend):
    """An object store in memory whose requests take time.

    Args:
        timeline: The simulation.
        latency: Seconds that each request takes.
        bandwidth: Bytes a second of each request.
        together: Bytes a second of all requests.
    """

    def __init__(self, timeline: Timeline, latency: float, bandwidth: float = 100e6, together: float = 100e9) -> None:
        super().__init__("simulated://store", is_remote=True)
        self.objects: dict[str, bytes] = {}
        self.requests = 0
        self.bytes_read = 0
        self._timeline = timeline
        self._latency = latency
        self._bandwidth = bandwidth
        self._together = together
        self._free = 0.0  # when it has transferred all that was asked for

    def _request(self, name: str, key: str, nbytes: int = 0) -> None:
        self.requests += 1
        actor = self._timeline.current
        if actor is None:  # a check of the result, outside of the simulation
            return
        process: SimulatedProcess = actor.owner
        process.call(f"{name} {key}")
        actor.count()
        self._free = max(self._free, actor.now) + nbytes / self._together
        seconds = self._latency + nbytes / self._bandwidth
        if process.suffers("slow"):
            seconds *= process.slowness
        actor.elapse(max(seconds, self._free - actor.now))

    def object_size(self, key: str) -> int:
        self._request("look for", key)
        if key not in self.objects:
            raise hf.errors.ObjectNotFoundError(f"cannot access {self.url(key)}: there is no such object")
        return len(self.objects[key])

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        found = self.objects.get(key, b"")[byte_range or slice(None)]
        self._request("read", key, len(found))
        if key not in self.objects:
            raise hf.errors.ObjectNotFoundError(f"cannot read {self.url(key)}: there is no such object")
        whole = self.objects[key]
        if byte_range is not None and (byte_range.start or 0) >= max(1, len(whole)):
            raise hf.DamagedCheckpointError(f"{self.url(key)} is shorter than expected")
        self.bytes_read += len(found)
        return found

    def write_bytes(self, key: str, data: bytes, *, atomic: bool) -> None:
        self._request("write", key, len(data))
        self.objects[key] = data

    def remove(self, key: str) -> None:
        self._request("remove", key)
        self.objects.pop(key, None)

    def list_objects(self, key: str, *, itself: bool) -> list[str]:
        self._request("list", key)
        found = sorted(name for name in self.objects if name.startswith(f"{key}/") or (itself and name == key))
        for _ in range(1000, len(found) + 1, 1000):  # services list that many names at a time
            self._request("list more of", key)
        return found

    def write_data(self, key: str, size: int, segments: Sequence[Segment]) -> None:
        self.write_bytes(key, b"".join(bytes(part) for part in file_parts(size, segments)), atomic=True)

    def honours_conditions(self, key: str, data: bytes | None) -> bool:
        return True

    def read_generation(self, key: str) -> tuple[bytes | None, Any]:
        self._request("read", key, len(self.objects.get(key, b"")))
        return self.objects.get(key), self.objects.get(key)

    def write_where(self, key: str, data: bytes | None, generation: Any) -> bool:
        self._request("write", key, len(data or b""))
        if self.objects.get(key) is not generation:
            return False
        if data is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = bytes(data)
        return True


class Hub:
    """The key-value store in process 0, and what it has seen of a save."""

    def __init__(self) -> None:
        self.primary_bytes_out = 0
        self.requests = 0
        self.most_bytes = 0  # that it has held
        self.written = 0.0  # when the last process had written its share
        self._bytes = 0
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[SimulatedProcess]] = {}
        self._gone = False
        self._free = 0.0  # when it has served all requests

    def serve(self, process: SimulatedProcess, received: int = 0) -> Actor:
        """Let a request and its bytes reach the store."""
        actor = process.actor
        self.requests += 1
        actor.elapse(NETWORK if process.index else 0.0)
        if self._gone:
            raise ConnectionError("connection reset by peer")
        actor.elapse(self._served(actor.now, received if process.index else 0) - actor.now)
        return actor

    def _served(self, now: float, nbytes: int) -> float:
        """Return when a request of so many bytes is served, after those before it."""
        self._free = max(self._free, now) + SERVICE + nbytes / LINK
        return self._free

    def put(self, process: SimulatedProcess, key: str, value: bytes) -> None:
        actor = self.serve(process, len(value))
        self._bytes += len(value) - len(self._values.get(key, b""))
        self.most_bytes = max(self.most_bytes, self._bytes)
        self._values[key] = value
        if "/gather/written/" in key:
            self.written = actor.now
        for other in self._waiting.pop(key, ()):
            other.actor.wake(self._sent(actor.now, other, value))

    def get(self, process: SimulatedProcess, key: str, timeout: float = 0.0) -> bytes | None:
        """Return a value, or None if it is not there in time."""
        actor = self.serve(process)
        value = self._values.get(key)
        if value is not None:
            actor.elapse(self._sent(actor.now, process, value) - actor.now)
            return value
        if timeout <= 0:
            return None
        self._waiting.setdefault(key, []).append(process)
        if not actor.wait(timeout):
            self._waiting[key].remove(process)
        if self._gone:
            raise ConnectionError("connection reset by peer")
        return self._values.get(key)

    def get_all(self, process: SimulatedProcess, keys: Sequence[str]) -> list[bytes] | None:
        self.serve(process)
        found = [self._values[key] for key in keys if key in self._values]
        return found if len(found) == len(keys) else None

    def delete(self, process: SimulatedProcess, key: str) -> None:
        self.serve(process)
        self._bytes -= len(self._values.pop(key, b""))

    def end(self, now: float) -> None:
        """Close all connections, as a process that dies does."""
        self._gone = True
        for processes in self._waiting.values():
            for process in processes:
                process.actor.wake(now + NETWORK)

    def _sent(self, now: float, process: SimulatedProcess, value: bytes) -> float:
        """Return when a value has arrived at a process, and count it if it has left process 0."""
        if not process.index:
            return now
        self.primary_bytes_out += len(value)
        return self._served(now, len(value)) + NETWORK / 2


class SimulatedCoordinator(BoundedCoordinator):
    """One process's connection to the hub, whose calls need no threads, as they end by themselves.

    Args:
        hub: The store of all processes.
        process: The process.
        count: The number of processes.
        limit: Seconds after which a call has failed if the hub cannot be reached.
    """

    def __init__(self, hub: Hub, process: SimulatedProcess, count: int, limit: float) -> None:
        self.unbounded = self
        self.process_index = process.index
        self.process_count = count
        self._hub = hub
        self._process = process
        self._limit = limit

    def put(self, key: str, value: bytes) -> None:
        self._call("put", key)
        self._hub.put(self._process, key, value)

    def get(self, key: str, timeout: float, *, waited: float = 0.0) -> bytes:
        self._call("get", key)
        value = self._hub.get(self._process, key, timeout)
        if value is None:
            raise TimeoutError(f"no process stored {key} within {timeout:g} s")
        return value

    def try_get(self, key: str) -> bytes | None:
        self._call("try to get", key)
        return self._hub.get(self._process, key)

    def try_get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        self._call("try to get", f"{keys[0]} and others")
        return self._hub.get_all(self._process, keys)

    def delete(self, key: str) -> None:
        self._call("delete", key)
        self._hub.delete(self._process, key)

    def give_up(self, key: str) -> None:
        """Nothing is left of a wait."""

    def run(self, work: Callable[[Coordinator], T], waits: float = 0.0) -> T:
        return work(self)

    def monotonic(self) -> float:
        actor = self._process.actor
        actor.count()
        return actor.now

    def _call(self, method: str, key: str) -> None:
        self._process.call(f"{method} {key.partition('/')[2]}")
        if self._process.suffers("cut off"):
            self._process.actor.elapse(self._limit)
            raise ConnectionError(f"it has not answered for {self._limit:g} s")


@dataclass(frozen=True, slots=True)
class Protocol:
    """What a simulated save took.

    Attributes:
        processes: How many there were.
        save_seconds: From the begin of the save until all knew of the commit, or had given up.
        commit_seconds: From the moment at which the last process had written its share.
        primary_bytes_out: Bytes that left process 0.
        coordinator_requests: Requests to the key-value store.
        coordinator_bytes: The most that this store has held, in the memory of process 0 or of the launcher.
        store_requests: Requests to the object store.
        files: Objects of the checkpoint.
        record_bytes: Bytes of its commit record.
    """

    processes: int
    save_seconds: float
    commit_seconds: float
    primary_bytes_out: int
    coordinator_requests: int
    coordinator_bytes: int
    store_requests: int
    files: int
    record_bytes: int


class Simulation:
    """Processes that save to one store.

    Args:
        count: How many processes there are.
        leaves: How many leaves the tree has; every process writes a chunk of 4 KiB of each.
        latency: Of the object store, in seconds.
        timeout: Seconds that processes wait for each other.
        measured: Whether processor time counts; if not, two runs are the same.
    """

    def __init__(
        self,
        count: int,
        leaves: int = 4,
        *,
        latency: float = 0.03,
        timeout: float = 600.0,
        measured: bool = True,
    ) -> None:
        self.count = count
        self.objects: dict[str, bytes] = {}
        self._tree = {f"leaf{number}": np.zeros(count * CHUNK, np.uint8) for number in range(leaves)}
        self._latency = latency
        self._timeout = timeout
        self._measured = measured

    def save(self, *afflicted: SimulatedProcess) -> tuple[Protocol, list[SimulatedProcess]]:
        """Save step 1, replacing what an earlier save has left, in new processes.

        Args:
            *afflicted: The processes to which something happens.

        Returns:
            What it took, and all processes.
        """
        timeline, hub = Timeline(measured=self._measured), Hub()
        store = SimulatedStore(timeline, self._latency)
        store.objects = self.objects
        processes = [SimulatedProcess(index) for index in range(self.count)]
        for one in afflicted:
            processes[one.index] = one
        for one in processes:
            one.actor = timeline.start(partial(self._take_part, one, hub, store), one)
        timeline.run()
        self.objects = store.objects
        ended = max(one.ended_at for one in processes)
        objects = {key: data for key, data in self.objects.items() if key.startswith("run/1/")}
        took = Protocol(
            processes=self.count,
            save_seconds=ended,
            commit_seconds=ended - hub.written,
            primary_bytes_out=hub.primary_bytes_out,
            coordinator_requests=hub.requests,
            coordinator_bytes=hub.most_bytes,
            store_requests=store.requests,
            files=len(objects),
            record_bytes=len(objects.get("run/1/checkpoint.json", b"")),
        )
        return took, processes

    def _take_part(self, process: SimulatedProcess, hub: Hub, store: SimulatedStore) -> None:
        coordinator = SimulatedCoordinator(hub, process, self.count, self._timeout)
        own = PerProcessCheckpointHandler(coordinator=coordinator)
        items = {
            "state": ItemToSave(hf.PyTreeCheckpointHandler(chunk_bytes=CHUNK), self._tree),
            "own": ItemToSave(own, {"generator": np.full(GENERATOR, process.index % 256, np.uint8)}),
        }
        rendezvous = next_rendezvous(coordinator, "save")
        try:
            save = Save(Location(store, "run/1"), items, overwrite=True, rendezvous=rendezvous, timeout=self._timeout)
            with save.completing():
                written = save.write()
                save.commit(None if written is None else CheckpointRecord(items=written, time=0.0, step=1))
        except (Died, hf.errors.HoldfastError) as error:
            process.error = error
        process.actor.count()
        process.ended_at = process.actor.now
        if process.suffers("dies") and process.index == 0:
            hub.end(process.ended_at)

    def found(self) -> bool:
        """Return whether the store has a checkpoint; fail if one of its files is missing or has another size."""
        store = SimulatedStore(Timeline(), self._latency)
        store.objects = self.objects
        location = Location(store, "run/1")
        try:
            record = read_record(location)
        except hf.errors.CheckpointNotFoundError:
            return False
        for item in record.items.values():
            for path, file in item.files.items():
                assert (location / item.folder / path).has_size(file.size), f"{item.folder}/{path} is damaged"
        return True
