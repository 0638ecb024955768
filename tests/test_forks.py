"""What a forked process inherits: no lock that another thread held, no descriptor of one, and a collector that runs."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
MODULE_LOCKS = {"holdfast.engine.storage.lock._descriptors": "held during a fork by the thread that forks"}


def modules() -> list[Any]:
    """Returns the modules of the engine and of the loop."""
    names = [one.name for one in pkgutil.walk_packages(hf.__path__, "holdfast.")]
    return [
        importlib.import_module(name)
        for name in names
        if name.startswith(("holdfast.engine.", "holdfast.integrations.loop"))
    ]


def test_every_lock_of_a_module_is_free_in_a_child() -> None:
    raw = {
        f"{module.__name__}.{name}"
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, RAW)
    }
    assert raw == {*MODULE_LOCKS}


def test_every_lock_of_a_living_run_is_free_in_a_child(tmp_path: Path) -> None:
    gc.collect()
    before = {id(one) for one in gc.get_objects()}  # of the tests before
    local = hf.Local(tmp_path / "hosts", every=1)
    options = hf.CheckpointManagerOptions(mirror=str(tmp_path / "mirror"), local=local)
    with hf.CheckpointManager(tmp_path / "run", options=options) as run:
        run.save(1, {"w": np.arange(8.0)}, force=True)
        run.wait_until_finished()
        run.restore()
        ours = [
            one
            for one in gc.get_objects()
            if id(one) not in before and str(type(one).__module__).startswith("holdfast.") and hasattr(one, "__dict__")
        ]
        raw = {type(one).__name__ for one in ours for value in vars(one).values() if isinstance(value, RAW)}
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_lock_that_another_thread_holds(reentrant: bool) -> None:
    lock, held, done = Lock(reentrant=reentrant), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert in_child(lambda: lock.acquire(blocking=False))
        assert not lock.acquire(blocking=False)
    finally:
        done.set()
        thread.join()


def test_a_collector_that_another_thread_has_paused() -> None:
    held, done = threading.Event(), threading.Event()

    def pause() -> None:
        with collection_paused():
            held.set()
            done.wait()

    def collects_after_a_pause_of_its_own() -> bool:
        before = gc.isenabled()
        with collection_paused():
            paused = not gc.isenabled()
        return before and paused and gc.isenabled()

    thread = threading.Thread(target=pause)
    thread.start()
    held.wait()
    try:
        assert in_child(collects_after_a_pause_of_its_own)
    finally:
        done.set()
        thread.join()
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


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found
