"""What a forked process inherits: no lock that another thread held, no descriptor of one, and a collector that runs."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pkgutil
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.descriptors import open_files

import holdfast as hf
from holdfast.engine.forks import Lock
from holdfast.engine.pytree import collection_paused
from holdfast.engine.storage import SaveLock, as_location
from holdfast.engine.storage.local import open_own

# Modules of the tests before have begun threads, and jax and Python warn of each fork then.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
RAW = (type(threading.Lock()), type(threading.RLock()))
# Objects with a lock of Python's own, which a child never meets: each is used within one call, or has a thread or
# connections without which it does nothing.
WITHIN_ONE_PROCESS = {
    "_SharedWork": "one call of parallel_map",
    "Helper": "a thread",
    "Save": "the save that a thread of the parent completes",
    "PeerServer": "a server of the parent",
    "PeerConnection": "a connection of the parent",
    "Rows": "the terminal of a command",
    "AgreedStop": "a thread of the parent",
}
COLLECTIONS = (dict, list, set, weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
# What each collection that a module keeps means to a child.
COORDINATOR = "of coordinators, which connect processes that know each other by number, and a child has none"
IN_A_CHILD = {
    "engine.manager.mirror._open": "each says which process it belongs to",
    "engine.manager.ownership._owners": "the locks in it are let go of, and the child opens runs of its own",
    "engine.storage.local._idle_blocks": "memory of its own in the child, too",
    "engine.storage.lock._held": "the child lets go of all of them",
    "engine.storage.cloud._loops": "says which process it belongs to, and a child is refused",
    "engine.storage.cloud._conditional": "what a service can do, which holds in a child, too",
    "engine.storage.fsspec_store._given": "the program has passed them, and may use them in the child",
    "engine.distributed.torch_store._made": "emptied",
    "engine.distributed.torch_store._calling": "emptied",
    "engine.distributed.coordinators._current": COORDINATOR,
    "engine.distributed.torch_store._names": COORDINATOR,
    "engine.distributed.coordinators._silent": COORDINATOR,
    "engine.distributed.rendezvous._missed": COORDINATOR,
    "engine.distributed.rendezvous._counts": COORDINATOR,
    "engine.distributed.rendezvous._retired": COORDINATOR,
    "engine.forks._locks": "all are made again",
    "engine.checkpoint.background._unraised": "errors of the parent, which it raises",
    "engine.checkpoint.background._running": "their threads have ended in the child, and waits for them with these",
    "engine.checkpoint.background._last_words": "functions that find nothing to say in a child",
    "engine.pytree.codec._classes": "facts of classes, which hold in a child, too",
    "engine.stateful._actors": "facts of the program's actors, which a child reaches as its parent does",
    "engine.pytree.torch_leaves._roots": "facts of meshes, which hold in a child, too",
    "engine.pytree.torch_leaves._meshes": "facts of meshes, which hold in a child, too",
    "integrations.loop.preemption._watchers": "their handlers are inherited, too, and a worker ignores the signals",
    "integrations.loop.preemption._started": "processes of the parent, which the child does not ask about",
    "integrations.loop.announce._open": "emptied",
}
# The modules with functions that remember their results, and of what these are.
FACTS = "facts of types, names, shardings and processors"
CACHING = {
    "engine.fingerprints": FACTS,
    "engine.format.zarr": FACTS,
    "engine.generators": FACTS,
    "engine.observer": "the observer of the process, and whether a rehearsal has left it out",
    "engine.pytree.device_replicas": FACTS,
    "engine.pytree.host_leaves": FACTS,
    "engine.pytree.jax_leaves": FACTS,
    "engine.pytree.sampling": FACTS,
    "engine.pytree.torch_leaves": FACTS,
    "engine.pytree.ways": FACTS,
    "engine.sources.opening": "handles that came from another process, which open their files again",
    "engine.steps": FACTS,
    "engine.storage.cloud": "stores, of which each call says that a child is refused",
    "engine.storage.folders": "the memory of the process, which the child has a copy of",
    "engine.storage.fsspec_store": "file systems, whose threads a child starts again",
    "integrations.loop.witnessing": FACTS,
}
# What a child does without each thread.
THREADS = {
    "holdfast-peers": "serves the parent's steps, which the parent goes on to do",
    "holdfast-peer": "serves the parent's steps, which the parent goes on to do",
    "store-requests": "a child is refused, with the way to start processes that can use the store",
    "fsspec-request": "ends with its request, for which a child's own call starts another one",
    "holdfast-start": "tells the other processes of the parent's start",
    "holdfast-wait": "waits for other processes of the parent",
    "holdfast-store": "ends with its call, for which a child's own call starts another one",
    "holdfast-preemption": "watches for the end of the parent's job",
}
MODULE_LOCKS = {"holdfast.engine.storage.lock._descriptors": "held during a fork by the thread that forks"}


def modules() -> list[Any]:
    """Returns the modules of the engine and of the loop."""
    names = [one.name for one in pkgutil.walk_packages(hf.__path__, "holdfast.")]
    return [
        importlib.import_module(name)
        for name in names
        if name.startswith(("holdfast.engine.", "holdfast.integrations.loop"))
    ]


def kept(kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """Returns what the modules keep of some kinds, by full name."""
    return {
        f"{module.__name__}.{name}": value
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, kinds)
    }


def test_every_lock_of_a_module_is_free_in_a_child() -> None:
    assert kept(RAW).keys() == MODULE_LOCKS.keys()


def test_no_property_has_a_lock() -> None:
    """Python 3.11 has one for all objects of a class, in ``functools.cached_property``."""
    classes = {value for value in kept(type).values() if is_ours(value)}
    raw = {
        f"{each.__qualname__}.{name}"
        for each in classes
        for name, attribute in vars(each).items()
        if not isinstance(attribute, Lock)
        and any(isinstance(value, RAW) for value in getattr(attribute, "__dict__", {}).values())
    }
    assert len(classes) > 300
    assert raw == set()


def is_ours(one: Any) -> bool:
    return str(one.__module__).startswith("holdfast.")


def test_every_collection_that_a_module_keeps_is_known() -> None:
    names = [name.removeprefix("holdfast.") for name in kept(COLLECTIONS)]
    assert {name for name in names if name.lower() == name and ".__" not in name} == {*IN_A_CHILD}


def test_every_cache_is_known() -> None:
    """What a function has remembered holds in a child, too: it is a fact of types and texts, or says whose it is."""
    caching = {
        module.__name__.removeprefix("holdfast.")
        for module in modules()
        for value in [*vars(module).values(), *methods(module)]
        if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == module.__name__
    }
    assert caching == {*CACHING}


def methods(module: Any) -> list[Any]:
    classes = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    return [value for one in classes for value in vars(one).values()]


def test_every_thread_is_known() -> None:
    """Each thread that a module starts has a name, which says in the table what a child does without it."""
    texts = [Path(module.__file__).read_text() for module in modules()]
    name = re.compile(r"""Thread\(.*?name=f?["']([\w-]+)["']""", re.DOTALL)
    assert {found for text in texts for found in name.findall(text)} == {*THREADS}
    assert sum(text.count("threading.Thread(") for text in texts) >= len(THREADS)


def test_a_child_of_a_living_run_has_no_lock_of_it(tmp_path: Path) -> None:
    """Neither of a file nor of Python, whether the run is on a disk or in a store."""
    gc.collect()
    before = {id(one) for one in gc.get_objects()}  # of the tests before
    local = hf.Local(tmp_path / "hosts", every=1)
    options = hf.CheckpointManagerOptions(mirror=str(tmp_path / "mirror"), local=local)
    in_store = f"memory://forks/{tmp_path.name}"
    with hf.CheckpointManager(tmp_path / "run", options=options) as run, hf.CheckpointManager(in_store) as other:
        for manager in (run, other):
            manager.save(1, {"w": np.arange(8.0)}, force=True)
            manager.wait_until_finished()
        run.restore()
        assert [name for name in open_files(locked=True) if name.startswith(str(tmp_path / "run"))]
        assert in_child(lambda: not open_files(locked=True))
        raw = {
            type(one).__name__
            for one in gc.get_objects()
            if id(one) not in before and is_ours(type(one)) and hasattr(one, "__dict__")
            if any(isinstance(value, RAW) for value in vars(one).values())
        }
    assert raw - {*WITHIN_ONE_PROCESS, "Lock"} == set()


def in_child(look: Any) -> bool:
    """Returns what a function returns in a forked process."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if look() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@contextmanager
def another_thread_within(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Lets another thread enter a context, and leave it at the end."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with context:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_lock_that_another_thread_holds(reentrant: bool) -> None:
    lock = Lock(reentrant=reentrant)
    with another_thread_within(lock):
        assert in_child(lambda: lock.acquire(blocking=False))
        assert not lock.acquire(blocking=False)


def test_a_collector_that_another_thread_has_paused() -> None:
    def collects_after_a_pause_of_its_own() -> bool:
        before = gc.isenabled()
        with collection_paused():
            paused = not gc.isenabled()
        return before and paused and gc.isenabled()

    with another_thread_within(collection_paused()):
        assert in_child(collects_after_a_pause_of_its_own)
    assert gc.isenabled()


def test_a_fork_while_another_thread_opens_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has no descriptor of it: the lock ends with the process that holds it."""
    opened, forked = threading.Event(), threading.Event()

    def opens(place: Any, flags: int) -> int:
        descriptor = open_own(place, flags)
        opened.set()
        forked.wait(0.5)  # the fork waits for this thread, unless it comes in between
        return descriptor

    monkeypatch.setattr("holdfast.engine.storage.lock.open_own", opens)
    lock = SaveLock(as_location(tmp_path) / "lock")
    thread = threading.Thread(target=lock.make)
    thread.start()
    opened.wait()
    try:
        assert in_child(lambda: not any(file.startswith(str(tmp_path)) for file in open_files()))
    finally:
        forked.set()
        thread.join()
        lock.release()
