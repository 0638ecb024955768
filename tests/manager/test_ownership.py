"""One writer for a directory: other processes are refused, newer managers of the same process take over."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.commands import error_of
from tests.manager.runs import HeldHandler, commit, opened, reading

import holdfast as hf
from holdfast.engine.observer import Observer, Point
from holdfast.engine.sources import discovery
from holdfast.engine.storage import FileLock, Helper, Location, as_location, locked_elsewhere

TREE = {"weights": np.arange(10)}

BEGINNING = """
import os, sys, time
import holdfast as hf
from holdfast.engine.checkpoint import commit_protocol
manager = hf.CheckpointManager(sys.argv[1])
manager.save(1, {"by": "the other process"})
manager.wait_until_finished()
"""
OWNER = f"""{BEGINNING}
print("ready", flush=True)
time.sleep(60)
"""

FORKING_OWNER = f"""{BEGINNING}
saved = hf.storage.as_location(sys.argv[1]) / "2"
save = commit_protocol(saved)(saved, ["item"], overwrite=False)
save.begin()
if os.fork() == 0:
    print("ready", os.getpid(), flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def other_process(directory: Path, program: str = OWNER) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", program, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            assert said.startswith("ready")
            yield process, said
        finally:
            process.kill()
            process.stdout.close()


def test_a_second_process_only_looks_until_the_first_is_killed(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path) as manager, reading(tmp_path) as reader:
        with other_process(tmp_path) as (process, _):
            for act in (
                manager.acquire,
                lambda: manager.save(2, TREE),
                lambda: manager.delete(1),
                lambda: manager.pin(1),
            ):
                manager.reload()
                with pytest.raises(hf.errors.OwnershipError, match=f"process {process.pid} on {socket.gethostname()}"):
                    act()
            assert manager.restore(1) == reader.restore(1) == {"by": "the other process"}, "reading is for everybody"
            assert not reader.should_save(2)
            with pytest.raises(hf.errors.StateError, match="read_only"):
                reader.save(2, TREE)
            assert sorted(os.listdir(tmp_path)) == ["1", "events.jsonl", "options.json", "owner.json"]
            process.send_signal(signal.SIGKILL)
            process.wait()
            commit(manager, 2, TREE)
        assert manager.all_steps() == [1, 2]
        assert reader.all_steps() == [1]
        reader.reload()
        assert reader.all_steps() == [1, 2]


def test_the_workers_of_a_killed_run_hold_neither_its_lock_nor_that_of_a_save(tmp_path: Path) -> None:
    with other_process(tmp_path, FORKING_OWNER) as (process, said):
        process.send_signal(signal.SIGKILL)
        process.wait()
        try:
            with hf.CheckpointManager(tmp_path) as manager:
                commit(manager, 2, TREE)
                assert manager.all_steps() == [1, 2]
        finally:
            os.kill(int(said.split()[1]), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["same path", "another path", "in memory"])
def test_the_newer_manager_takes_over(tmp_path: Path, kind: str) -> None:
    first, second = str(tmp_path / "run"), str(tmp_path / "run")
    if kind == "another path":
        (tmp_path / "run").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "run")
        second = str(tmp_path / "link")
    if kind == "in memory":
        first = second = f"memory://ownership/{uuid.uuid4().hex}"
    older, newer = hf.CheckpointManager(first), hf.CheckpointManager(second)
    older.save(1, TREE)
    commit(newer, 2, TREE)
    assert newer.all_steps() == [1, 2], "the save that was under way is waited for, and seen"
    for act in (lambda: older.save(3, TREE), older.acquire, lambda: older.record_metrics(1, {"loss": 1.0})):
        with pytest.raises(hf.errors.OwnershipError, match=r"another manager has taken over .* process \d+ on "):
            act()
    assert older.restore(1)["weights"].tolist() == TREE["weights"].tolist()
    older.close()
    newer.save(3, TREE)
    newer.close()
    assert newer.all_steps() == [1, 2, 3]


def in_a_thread(work: Callable[[], object]) -> Future[object]:
    return ThreadPoolExecutor(1).submit(work)


def test_a_step_committed_during_the_first_look_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager lists the directory before the first commit, and looks into its folders after it."""
    written, looks = threading.Event(), threading.Event()

    class HeldBack(Observer):
        def reached(self, point: Point, step: int | None) -> None:
            if point == "commit":
                written.set()
                assert looks.wait(30)

    earlier = hf.CheckpointManager(tmp_path, observer=HeldBack())
    earlier.save(1, TREE)
    assert written.wait(30)
    original = discovery.find_steps

    def find_steps(location: Location) -> discovery.FoundSteps:
        looks.set()
        earlier.wait_until_finished()
        return original(location)

    monkeypatch.setattr(discovery, "find_steps", find_steps)
    with hf.CheckpointManager(tmp_path) as later:
        assert later.all_steps() == [1]
        assert later.latest_step() == 1
    earlier.close()


def test_a_newer_manager_waits_for_a_save_that_another_thread_begins(tmp_path: Path) -> None:
    slow = HeldHandler()
    slow.snapshot.clear()
    older = hf.CheckpointManager(tmp_path, hf.AsyncCheckpointer(slow))
    older.acquire()
    saving = in_a_thread(lambda: older.save(1, TREE))
    assert slow.begun.wait(60)
    newer, acquired = hf.CheckpointManager(tmp_path), threading.Event()

    def go_on() -> None:
        newer.acquire()
        acquired.set()
        assert slow.writing.wait(60)
        commit(newer, 1, TREE, force=True)

    taking = in_a_thread(go_on)
    assert not acquired.wait(0.3), "the older manager is about to save"
    slow.snapshot.set()
    assert slow.writing.wait(60)
    slow.written.set()
    for thread in (saving, taking):
        thread.result()
    with pytest.raises(hf.errors.OwnershipError):
        older.save(2, TREE)
    older.close()
    newer.close()
    assert hf.verify(tmp_path).ok


CHANGES: dict[str, Callable[[hf.CheckpointManager], object]] = {
    "pin": lambda manager: manager.pin(1),
    "metrics": lambda manager: manager.record_metrics(1, {"loss": 1.0}),
    "delete": lambda manager: manager.delete(1),
    "save": lambda manager: manager.save(3, TREE, force=True),
    "save_locally": lambda manager: manager.save_locally(3, TREE),
    "close": lambda manager: manager.close(),
}


@pytest.mark.parametrize("follows", ["a newer manager", "a local save", "an end"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("event", ["saved", "saved_locally"])
def test_nothing_hangs_that_waits_for_a_save_whose_listener_changes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, change: str, follows: str
) -> None:
    local = hf.Local(tmp_path / "local", every=1, copies=0)
    older = opened(tmp_path / "run", local=local)
    assert older._local is not None
    saves = older._background if event == "saved" else older._local.background
    join, awaited, changed = saves.join, threading.Event(), threading.Event()

    def joined() -> None:
        awaited.set()
        join()

    def listen(found: dict[str, Any]) -> None:
        if found["event"] == event and not changed.is_set():
            assert awaited.wait(60)
            changed.set()
            CHANGES[change](older)

    older.events.add_listener(listen)
    older.save(1, TREE)
    monkeypatch.setattr(saves, "join", joined)

    def follow() -> None:
        if follows == "a newer manager":
            with hf.CheckpointManager(tmp_path / "run") as newer:
                newer.acquire()
        elif follows == "a local save":
            older.save_locally(2, TREE)
            older.wait_until_finished()

    for work in (follow, older.close):
        in_a_thread(work).exception(30)  # which may be any, but has to come
    assert changed.is_set()
    assert change == "delete" or 1 in hf.CheckpointManager(tmp_path / "run").all_steps()


def test_nothing_is_saved_after_another_thread_has_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = HeldHandler()
    manager = hf.CheckpointManager(tmp_path, hf.AsyncCheckpointer(slow))
    manager.save(1, TREE)
    assert slow.writing.wait(60)
    waiting = threading.Semaphore(0)
    real = Helper.join

    def join(thread: Helper, timeout: float | None = None) -> None:
        if thread.is_alive():
            waiting.release()
        real(thread, timeout)

    monkeypatch.setattr(Helper, "join", join)
    saving = in_a_thread(lambda: manager.save(2, TREE))
    assert waiting.acquire(timeout=60), "it waits for the first save"
    closing = in_a_thread(manager.close)
    assert waiting.acquire(timeout=60), "and so does the end"
    slow.written.set()
    closing.result()
    with pytest.raises(hf.errors.StateError):
        saving.result()
    assert not manager.is_saving_in_progress()
    assert not (tmp_path / "2").exists()


def test_locks_of_other_threads_are_asked_about_while_they_are_taken_and_released(tmp_path: Path) -> None:
    """The number of a descriptor belongs to another file as soon as another thread has closed it."""
    held = FileLock(as_location(tmp_path) / "held.json")
    held.acquire(os.O_RDWR | os.O_CREAT)
    ends, found = threading.Event(), set()

    def take_and_release(index: int) -> None:
        while not ends.is_set():
            locks = [FileLock(as_location(tmp_path) / f"{index}-{number}.json") for number in range(8)]
            for lock in locks:
                lock.acquire(os.O_RDWR | os.O_CREAT)
            for lock in locks:
                lock.release()

    threads = [threading.Thread(target=take_and_release, args=(index,)) for index in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(1000):
            found.add((held.is_current(), locked_elsewhere(as_location(tmp_path) / "held.json")))
    finally:
        ends.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        held.release()
    assert found == {(True, False)}


def test_a_new_file_with_the_number_of_a_lock_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of NFS gives that number again once another host has removed the file."""
    place = tmp_path / "owner.json"
    lock = FileLock(as_location(place))
    lock.acquire(os.O_RDWR | os.O_CREAT)
    place.unlink()
    place.touch()
    os.utime(place, (0, 0))
    monkeypatch.setattr(os.path, "samestat", lambda *_: True)
    assert not lock.is_current()
    lock.release()


def test_a_manager_that_is_closed_or_dropped_gives_its_directory_back(tmp_path: Path) -> None:
    places = [str(tmp_path / "closed"), str(tmp_path / "dropped")]
    managers = [hf.CheckpointManager(place) for place in places]
    for manager in managers:
        commit(manager, 1, TREE)
    managers[0].close()
    del manager, managers[1]
    program = "import sys, holdfast as hf; [hf.CheckpointManager(place).acquire() for place in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", program, *places], check=True)


def test_without_locks_the_older_finds_out_at_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    older = hf.CheckpointManager(tmp_path)
    commit(older, 1, TREE)
    (tmp_path / "owner.json").write_text('{"token": "of another", "pid": 1, "host": "elsewhere"}')
    with pytest.raises(hf.errors.OwnershipError, match="process 1 on elsewhere"):
        older.save(2, TREE)
    assert not (tmp_path / "2").exists()
    older.close()


def move(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def delete_owner(run: Path) -> None:
    (run / "owner.json").unlink()


@pytest.mark.parametrize(
    ("happens", "joined", "said"),
    [
        pytest.param(move, False, "the directory was moved or deleted", id="moved"),
        pytest.param(shutil.rmtree, False, "the directory was moved or deleted", id="deleted"),
        pytest.param(delete_owner, False, r"its owner\.json was moved or deleted", id="without its owner"),
        pytest.param(delete_owner, True, "", id="a second run joins"),
    ],
)
def test_a_run_without_its_directory(happens: Callable[[Path], None], joined: bool, said: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with hf.CheckpointManager(run) as manager:
        commit(manager, 5, TREE)
        happens(run)
        with contextlib.ExitStack() as stack:
            if joined:
                process, _ = stack.enter_context(other_process(run))
                said = f"another manager has taken over .* process {process.pid} on"
            left = sorted(tmp_path.rglob("*"))
            for act in (lambda: manager.save(6, TREE), lambda: manager.save(7, TREE), lambda: manager.pin(5)):
                with pytest.raises(hf.errors.OwnershipError, match=said):
                    act()
            assert sorted(tmp_path.rglob("*")) == left
        if happens is move:
            with pytest.raises(hf.errors.OwnershipError, match="Move it back, and this run continues"):
                manager.save(8, TREE)
            (tmp_path / "elsewhere").rename(run)
            commit(manager, 9, TREE)
            assert manager.all_steps() == [5, 9]
    if joined:
        assert hf.load(run / "1") == {"by": "the other process"}
        assert hf.verify(run).ok


def test_in_an_object_store_the_commit_notices(place: str) -> None:
    with hf.CheckpointManager(place, hf.PyTreeCheckpointer()) as manager:
        manager.save(1, TREE)
        (hf.storage.as_location(place) / "owner.json").remove()
        with pytest.raises(hf.errors.OwnershipError, match=r"its owner\.json was moved or deleted"):
            manager.save(2, TREE)
    assert hf.CheckpointManager(place).all_steps() == [1]


def test_nobody_saves_steps_into_the_run_of_another_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, single = tmp_path / "run", tmp_path / "single"
    hf.save(single, TREE)
    hf.save(tmp_path / "other" / "7", TREE)
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "weights.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with other_process(run) as (process, _):
        for name, act in (
            ("run/7", lambda: hf.save(run / "7", TREE)),
            ("run/1", lambda: hf.save(run / "1", TREE, overwrite=True)),
            ("run/eval_7", lambda: hf.save(run / "eval_7", TREE)),
            ("link/7", lambda: hf.save(tmp_path / "link" / "7", TREE)),
            ("run/7", lambda: hf.copy_checkpoint(single, run / "7")),
            ("run/7", lambda: hf.import_checkpoint(tmp_path / "weights.safetensors", run / "7")),
        ):
            with pytest.raises(hf.errors.OwnershipError, match=rf"{name}: a run is writing .*process {process.pid} on"):
                act()
        with pytest.raises(hf.errors.OwnershipError, match=rf"run: another run is writing .*process {process.pid} on"):
            hf.copy_checkpoint(tmp_path / "other", run)
        message = error_of(capsys, "cp", single, run / "8", status=1)
        assert f"run is writing to {run}" in message
        assert sorted(path.name for path in run.iterdir() if path.is_dir()) == ["1"]
        hf.save(run / "final", TREE)  # no step, and nothing that the run looks at
        process.kill()
        process.wait()
        hf.save(run / "7", TREE)
    with hf.CheckpointManager(run) as manager:
        manager.acquire()
        hf.save(run / "8", TREE)  # its own process may
        assert manager.all_steps() == [1, 7]
        manager.reload()
        assert manager.all_steps() == [1, 7, 8]
