"""Local steps: saved by every host with copies on others, and found again after hosts are lost."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.damage import flip
from tests.manager.runs import commit, newest_whole, opened
from tests.processes.threads import memory_coordinators, together, unwrap

import holdfast as hf
from holdfast.cli.main import main
from holdfast.engine.distributed import Coordinator
from holdfast.engine.format import OWNER
from holdfast.engine.manager import part_of_save
from holdfast.engine.manager.directory import RunDirectory
from holdfast.engine.manager.ownership import Ownership
from holdfast.engine.observer import Observer
from holdfast.engine.storage import Location
from holdfast.integrations.loop.resuming import resume_step

SIZE = 40_000  # elements
LARGE = 800_000  # of files that hosts send each other in several pieces


def tree(step: int, size: int = SIZE) -> dict[str, Any]:
    return {"w": np.arange(size, dtype=np.float32) * step, "small": np.full(3, step), "step": step}


def equal(found: Any, step: int, size: int = SIZE) -> bool:
    expected = tree(step, size)
    return found["step"] == step and all(np.array_equal(found[name], expected[name]) for name in ("w", "small"))


def trains(manager: hf.CheckpointManager, first: int, last: int, size: int = SIZE) -> None:
    for step in range(first, last + 1):
        manager.save(step, tree(step, size))
    manager.wait_until_finished()


@dataclass
class Hosts:
    """A program whose processes are threads, each process on a host of its own unless ``per_host`` says otherwise."""

    folder: Path
    count: int
    per_host: int = 1
    every: int = 2
    store: int = 10
    copies: int = 1
    size: int = SIZE
    store_name: str = "store"
    observer: Observer | None = None

    def place(self, host: int) -> Path:
        return self.folder / f"host{host}"

    def manager(self, coordinator: Coordinator, **options: Any) -> hf.CheckpointManager:
        host = coordinator.process_index // self.per_host
        local = hf.Local(self.place(host), every=self.every, copies=self.copies, host=f"host{host}")
        options = {"save_interval_steps": self.store, "barrier_timeout_secs": 20, "local": local, **options}
        return opened(self.folder / self.store_name, coordinator=coordinator, observer=self.observer, **options)

    def run(self, work: Callable[[hf.CheckpointManager], Any], **options: Any) -> list[Any]:
        def one(coordinator: Coordinator) -> Any:
            manager = self.manager(coordinator, **options)
            try:
                return work(manager)
            finally:
                stop(manager)

        return unwrap(together(self.count, one, timeout=60))

    def train(self, first: int, last: int) -> Hosts:
        self.run(lambda manager: trains(manager, first, last, self.size))
        return self

    def go_on(self, last: int) -> int:
        """Resumes and trains to a step, as a loop does; returns where it resumed."""

        def work(manager: hf.CheckpointManager) -> int:
            restored = manager.restore_latest()
            start = 0 if restored is None else restored.step
            assert restored is None or equal(restored.items, start, self.size)
            trains(manager, start + 1, last, self.size)
            return start

        (start,) = set(self.run(work))
        return int(start)

    def resume(self) -> tuple[int | None, int]:
        """Returns the step of a resume, and the bytes that all processes have taken from other hosts."""

        def work(manager: hf.CheckpointManager) -> tuple[int | None, int]:
            restored = manager.restore_latest()
            if restored is None:
                return None, 0
            assert equal(restored.items, restored.step, self.size)
            return restored.step, sum(peer.bytes_read for peer in internals(manager)._hosts.peers.values())

        found = self.run(work)
        (step,) = {step for step, _ in found}
        return step, sum(count for _, count in found)


def internals(manager: hf.CheckpointManager) -> Any:
    return manager._local


def stop(manager: hf.CheckpointManager) -> None:
    """Ends a manager as if the program were killed: nothing more is written, and nothing is removed."""
    internals(manager).close(finished=False)
    manager._steps.ownership.release()


def failure(manager: hf.CheckpointManager) -> str:
    """Returns the error of the last local save."""
    status = manager.local_status()
    assert status is not None
    assert status.error is not None
    return status.error


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The data files below the store that are opened."""
    opened: list[str] = []
    original = Location.open_data

    def open_data(self: Location, **arguments: Any) -> Any:
        if str(tmp_path / "store") in self.url:
            opened.append(self.url)
        return original(self, **arguments)

    monkeypatch.setattr(Location, "open_data", open_data)
    return opened


@pytest.mark.parametrize(
    ("count", "per_host", "size"),
    [
        *((count, per_host, LARGE) for count, per_host in ((1, 1), (2, 1), (2, 2), (3, 1), (4, 2))),
        (12, 1, SIZE),
        pytest.param(64, 1, SIZE, marks=pytest.mark.sweep),
    ],
)
def test_any_one_host_may_be_lost(tmp_path: Path, count: int, per_host: int, size: int, unread: list[str]) -> None:
    hosts = Hosts(tmp_path, count, per_host, store=4, size=size).train(1, 7)
    unread.clear()
    assert hosts.resume()[0] == 6
    for host in range(0, count // per_host, max(1, count // per_host // 2)) if count > per_host else []:
        kept = tmp_path / "kept"
        hosts.place(host).rename(kept)
        step, from_peers = hosts.resume()
        assert step == 6
        assert from_peers > 0
        shutil.rmtree(hosts.place(host), ignore_errors=True)
        kept.rename(hosts.place(host))
    assert unread == []
    hosts.train(7, 9)
    assert hosts.resume()[0] == 8


def test_another_number_of_processes_resumes(tmp_path: Path) -> None:
    Hosts(tmp_path, 3).train(1, 15)
    fewer = Hosts(tmp_path, 2)
    assert fewer.resume()[0] == 14, "the third host is gone, and its neighbour has its files"
    fewer.train(15, 16)
    hosts = Hosts(tmp_path, 3)
    assert hosts.resume()[0] == 16
    for host in (0, 1):
        shutil.rmtree(hosts.place(host))
    assert hosts.resume() == (10, 0), "no local step is whole"


def test_a_later_save_of_a_step_replaces_its_local_one(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 1)

    def work(manager: hf.CheckpointManager) -> None:
        trains(manager, 1, 10)
        commit(manager, 10, tree(11), force=True)
        assert manager.restore(10)["step"] == 11

    hosts.run(work)
    (restored,) = hosts.run(lambda manager: manager.restore_latest())
    assert restored.items["step"] == 11
    damage(tmp_path / "store" / "10", "state")
    assert hosts.resume()[0] == 8


def test_a_step_that_only_the_hosts_have(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 1).train(1, 15)

    def work(manager: hf.CheckpointManager) -> list[int]:
        """Nothing of the directory is changed by it, which has no record of it."""
        peek = manager.peek()
        assert peek is not None
        assert peek.step == manager.latest_step() == 14
        changes: list[Callable[[int], Any]] = [manager.pin, manager.unpin, manager.delete, manager.why_kept]
        changes.append(lambda step: manager.record_metrics(step, {"loss": 1.0}))
        for call in changes:
            with pytest.raises(hf.errors.CheckpointNotFoundError, match="no checkpoint of step 14"):
                call(14)
        return manager.all_steps()

    assert hosts.run(work) == [[10]]
    assert not (tmp_path / "store/14").exists()
    assert hosts.resume()[0] == 14
    local = hf.Local(hosts.place(0), every=2, copies=0, host="host0")
    options: dict[str, Any] = {"local": local, "save_interval_steps": 10, "save_at_end": False}
    for resume in (14, 12):
        with hf.CheckpointCallback(tmp_path / "store", resume=resume, **options) as callback:
            state, start = callback.restore_or_initialize(tree(0))
            assert start == resume
            assert equal(state, resume)
            assert equal(callback.manager.restore(14)["state"], 14)
    with hf.CheckpointManager(tmp_path / "store") as manager:  # without local steps
        manager.pin(10)
        assert manager.latest_step() == 10
    assert hosts.resume()[0] == 14, "nothing was saved without them"
    with hf.CheckpointManager(tmp_path / "store") as manager:
        manager.restore(10)
        manager.save(12, tree(12))
    assert hosts.resume()[0] == 12


def test_a_local_step_of_a_branch_that_was_left_is_refused_by_its_number(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 1).train(1, 15)

    def branch(manager: hf.CheckpointManager) -> None:
        manager.restore(10)
        commit(manager, 11, tree(11), force=True)  # no local step is due before the run is killed

    Hosts(tmp_path, 1, every=100).run(branch)
    assert hosts.resume()[0] == 11
    local = hf.Local(hosts.place(0), every=2, copies=0, host="host0")
    with hf.CheckpointCallback(tmp_path / "store", resume=14, local=local, save_interval_steps=10) as callback:
        expected = (
            rf"the hosts have step 14 in {hosts.place(0)}, but it does not count: since it was saved, the run has "
            "continued from an earlier step or without local steps, or steps of it were deleted; "
            "without a number, the run resumes from step 11"
        )
        with pytest.raises(hf.errors.CheckpointNotFoundError, match=expected):
            callback.restore_or_initialize(tree(0))
        with pytest.raises(hf.errors.CheckpointNotFoundError, match=expected):
            callback.manager.restore(14)


@pytest.mark.parametrize(("every", "found"), [(8, 16), (10, 20)])
@pytest.mark.parametrize("damaged", ["state", "record"])
def test_local_steps_stand_in_for_a_damaged_step_of_the_directory(
    tmp_path: Path, every: int, found: int, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = Hosts(tmp_path, 2, every=every).train(1, 21)
    assert hosts.resume() == (20, 0), "the newest step counts, wherever it is"
    damage(tmp_path / "store" / "20", damaged)
    shutil.rmtree(hosts.place(1))
    assert hosts.resume()[0] == found
    assert ("20 was damaged, and is that of the local places" in caplog.text) == (every == 10 and damaged == "state")
    hosts.every = 1
    assert hosts.go_on(found + 2) == found
    assert hosts.resume()[0] == found + 2, "the run that went past the damaged step"


def test_a_local_step_of_another_branch_does_not_stand_in(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2).train(1, 15)
    for host in (0, 1):
        hosts.place(host).rename(tmp_path / f"away{host}")
    assert hosts.go_on(20) == 10, "on other hosts"
    for host in (0, 1):
        shutil.rmtree(hosts.place(host))
        (tmp_path / f"away{host}").rename(hosts.place(host))
    damage(tmp_path / "store" / "20", "state")
    assert hosts.resume()[0] == 10


def test_what_cannot_be_read_on_one_host_does_not_count(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2).train(1, 15)
    copies = next(hosts.place(1).glob("*/copies"))
    (copies / "x").write_text("hello")
    assert hosts.resume()[0] == 14
    record = max(path for path in copies.iterdir() if path.is_dir()) / "checkpoint.json"
    record.chmod(0o600)
    os.truncate(record, 1 << 33)
    assert hosts.resume()[0] == 14


@pytest.mark.parametrize("which", ["the folder", "the folder of the run", "a link"])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, which: str) -> None:
    hosts = Hosts(tmp_path, 1).train(1, 15)
    place = hosts.place(0)
    if which == "the folder":
        place.chmod(0o777)
    elif which == "a link":
        (run,) = place.iterdir()
        run.rename(tmp_path / "elsewhere")
        run.symlink_to(tmp_path / "elsewhere")
    else:
        (run,) = place.iterdir()
        try:
            os.chown(run, 65534, 65534)
        except PermissionError:
            pytest.skip("only root gives files away")
    with pytest.raises(hf.errors.OptionError, match="another user may have put files there"):
        hosts.resume()


def test_a_run_that_was_superseded_saves_no_local_step(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 1)
    old = hosts.manager(memory_coordinators(1)[0])
    trains(old, 1, 12)
    owner = tmp_path / "store" / OWNER
    owner.rename(tmp_path / "before")
    owner.write_bytes((tmp_path / "before").read_bytes())  # a program on another node has taken over
    old.save_locally(14, tree(14))
    old.wait_until_finished()
    assert "another manager has taken over" in failure(old)
    stop(old)
    assert hosts.resume()[0] == 12


def test_what_earlier_starts_have_left_goes_before_the_first_local_save(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2).train(1, 9)
    for host in (0, 1):  # as if the program was killed in the save of step 10
        (run,) = hosts.place(host).iterdir()
        assert sorted(len(list((run / where).iterdir())) for where in ("own", "copies")) == [2, 2], "two are kept"
        left = run / "own" / "00000006.10.deadbeef"
        left.mkdir()
        (left / "data").write_bytes(bytes(1000))

    def work(manager: hf.CheckpointManager) -> set[str]:
        copies = next(hosts.place(1).glob("*/copies"))
        manager.processes.barrier("all have looked")
        if manager.processes.is_primary:  # the local save fails
            copies.rename(tmp_path / "copies")
            copies.write_text("in the way")
        manager.processes.barrier("copies are blocked")
        manager.save_locally(10, tree(10))
        manager.wait_until_finished()
        place = hosts.place(manager.processes.index)
        found = {one.name.split(".", 1)[1] for one in place.glob("*/own/*")}
        manager.processes.barrier("all have looked again")
        if manager.processes.is_primary:
            copies.unlink()
            (tmp_path / "copies").rename(copies)
        return found

    for found in hosts.run(work):
        assert "10.deadbeef" not in found
        assert not [name for name in found if name.startswith("6.")]
    assert hosts.resume()[0] == 8


def damage(step: Path, what: str) -> None:
    """Damages the data of a step of the directory, or its record."""
    flip(step / "checkpoint.json" if what == "record" else max(step.glob("state*/d/*"), key=lambda f: f.stat().st_size))


def newest(folder: Path) -> Path:
    (run,) = folder.iterdir()
    return max((run / "own").iterdir())


@pytest.mark.parametrize("name", ["d/index", "manifest.ocdbt", "tree.json", "d/*.0.*"])
def test_a_bit_is_flipped_and_the_copy_counts(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    hosts = Hosts(tmp_path, 2).train(1, 15)
    (file,) = (newest(hosts.place(0)) / "state").glob(name)
    flip(file, 8)
    step, from_peers = hosts.resume()
    assert step == 14
    assert from_peers > 0
    assert "1 files of the local step 14 are damaged on this host" in caplog.text
    for place in tmp_path.glob("host*/*/*"):
        for copy in max(place.iterdir()).glob("state/d/*.1.*"):
            flip(copy)
    assert hosts.resume()[0] == 12, "every copy is damaged"


def test_a_local_step_that_is_damaged_later_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hosts = Hosts(tmp_path, 1).train(1, 15)

    def work(manager: hf.CheckpointManager) -> tuple[int, list[int]]:
        flip(next((newest(hosts.place(0)) / "state" / "d").glob("*.0.*")))
        restored = newest_whole(manager)
        assert equal(restored.items, restored.step)
        return restored.step, [step for step, _ in restored.skipped]

    assert hosts.run(work) == [(12, [14])]
    assert "the local step 14 is damaged and passed over, on process 0" in caplog.text


def test_another_run_is_never_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hosts = Hosts(tmp_path, 2).train(1, 15)
    store, moved = tmp_path / "store", tmp_path / "moved"
    store.rename(moved)
    assert Hosts(tmp_path, 2, store_name="moved").resume() == (10, 0)
    assert "is left: it is of the same run in a directory at another path" in caplog.text
    store.symlink_to(moved)
    assert hosts.resume()[0] == 14
    store.unlink()
    moved.rename(store)
    shutil.copytree(store, tmp_path / "copy")
    copy = Hosts(tmp_path, 2, store_name="copy")
    assert copy.resume() == (10, 0), "a copy of the directory is another run"
    copy.train(11, 12)
    assert copy.resume()[0] == 12
    assert hosts.resume()[0] == 14
    shutil.rmtree(store)
    assert hosts.resume() == (None, 0)
    hosts.train(1, 3)
    assert hosts.resume()[0] == 2
    assert len(list(hosts.place(0).iterdir())) == 3, "the local steps of the other runs stay"


@pytest.mark.parametrize(("by", "left"), [("the run", 8), ("another manager", 8), ("a command", 12)])
def test_deleted_steps_do_not_come_back(tmp_path: Path, by: str, left: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the directory has no later step, as for the command."""
    hosts = Hosts(tmp_path, 2, store=4).train(1, 15)
    if by == "the run":
        hosts.run(lambda manager: manager.delete_after(left))
    elif by == "another manager":
        with hf.CheckpointManager(tmp_path / "store") as manager:
            manager.delete_after(left)
    else:
        assert main(["rollback", str(tmp_path / "store"), str(left), "--yes"]) == 0
        assert f"local steps of the hosts in {hosts.place(0)} no longer count" in capsys.readouterr().out
    assert hosts.resume() == (left, 0)
    hosts.train(left + 1, left + 2)
    assert hosts.resume()[0] == left + 2
    assert all(len(list(hosts.place(host).iterdir())) == 1 for host in (0, 1)), "those of before are removed"


def test_a_host_without_room_is_told_and_training_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hosts = Hosts(tmp_path, 2)

    def work(manager: hf.CheckpointManager) -> tuple[str, str]:
        """First a file is in the place of the folder of a host, and later in the place of its copies."""
        is_primary, place = manager.processes.is_primary, hosts.place(1)
        if is_primary:
            place.write_text("in the way")
        manager.processes.barrier("no folder")
        trains(manager, 1, 2)
        without_folder = failure(manager)
        manager.processes.barrier("both have failed")
        if is_primary:
            place.unlink()
        manager.processes.barrier("a folder")
        trains(manager, 3, 4)
        (run,) = place.iterdir()
        if is_primary:
            shutil.rmtree(run / "copies")
            (run / "copies").write_text("in the way")
        manager.processes.barrier("no room")
        for step in (6, 8, 10):
            trains(manager, step, step)
        without_room = failure(manager)
        assert manager.latest_step() == 10
        assert len(list(hosts.place(manager.processes.index).glob("*/own/*"))) <= 2, "failed saves do not pile up"
        manager.processes.barrier("both have looked")
        if is_primary:
            (run / "copies").unlink()
        manager.processes.barrier("room again")
        trains(manager, 11, 12)
        return without_folder, without_room

    for without_folder, without_room in hosts.run(work):
        assert "process 1" in without_folder
        assert "host host1" in without_room
    assert "the local save of step 6 failed; training continues, and its steps are in" in caplog.text
    assert hosts.resume()[0] == 12


def test_one_host_has_no_copies_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Hosts(tmp_path, 1).train(1, 2)
    assert "all processes are on one host, so that local steps have no copies" in caplog.text
    caplog.clear()
    Hosts(tmp_path, 1, copies=0).train(1, 2)
    assert caplog.text == ""


def test_a_run_that_ends_leaves_no_local_steps(tmp_path: Path) -> None:
    local = hf.Local(tmp_path / "memory", every=2, copies=0)
    for last, left in ((10, 0), (12, 1)):
        with opened(tmp_path / "store", save_interval_steps=10, local=local) as manager:
            for step in range(last - 9, last + 1):
                manager.save(step, tree(step))
        assert len(list((tmp_path / "memory").iterdir())) == left, "what the directory lacks stays"


@pytest.mark.parametrize("resume", ["auto", 20])
def test_peek_takes_the_copy_of_the_hosts_for_a_damaged_step_as_a_restore_does(tmp_path: Path, resume: Any) -> None:
    local = hf.Local(tmp_path / "memory", every=2, copies=0)
    with hf.CheckpointCallback(tmp_path / "run", save_interval_steps=10, local=local) as callback:
        callback.restore_or_initialize(tree(0), phase=0)
        for step in range(1, 22):
            callback.on_step(step, tree(step), phase=step)
        callback.manager.wait_until_finished()
        (tmp_path / "run" / "20" / "extras" / "tree.json").write_bytes(b"{")
        shutil.copytree(tmp_path / "memory", tmp_path / "kept", symlinks=True)
    shutil.rmtree(tmp_path / "run" / "21")
    shutil.rmtree(tmp_path / "memory", ignore_errors=True)
    (tmp_path / "kept").rename(tmp_path / "memory")

    with hf.CheckpointCallback(tmp_path / "run", local=local, resume=resume) as callback:
        found = callback.peek()
        assert found is not None
        assert (found.step, found.extras["phase"]) == (20, 20)
        state, step = callback.restore_or_initialize(tree(0), phase=0)
        assert step == 20
        assert equal(state, 20)


def test_a_host_that_cannot_listen_stops_all(tmp_path: Path) -> None:
    def one(coordinator: Coordinator) -> str:
        address = "203.0.113.7" if coordinator.process_index else None
        host = f"host{coordinator.process_index}"
        local = hf.Local(tmp_path / host, every=2, host=host, address=address)
        with pytest.raises(hf.errors.OptionError, match=r"local steps: host1: this host cannot listen") as caught:
            opened(tmp_path / "store", coordinator=coordinator, local=local)
        return str(caught.value)

    before = set(threading.enumerate())
    assert len(set(together(2, one))) == 1
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive(), "process 0 does not listen any more"


def test_two_processes_of_a_host_need_one_folder(tmp_path: Path) -> None:
    def one(coordinator: Coordinator) -> None:
        local = hf.Local(tmp_path / str(coordinator.process_index), every=2)
        with pytest.raises(hf.errors.OptionError, match=r"processes 0 and 1 are on one host, .* give them the same"):
            opened(tmp_path / "store", coordinator=coordinator, local=local)

    assert together(2, one) == [None, None]


def test_one_process_that_looks_at_an_older_step_does_not_change_which_are_due(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)

    def work(manager: hf.CheckpointManager) -> None:
        for step in range(1, 16):
            trains(manager, step, step)
            if step == 14 and manager.processes.is_primary:
                manager.restore(10)

    hosts.run(work)
    assert hosts.resume()[0] == 14


def test_processes_that_save_different_steps_are_refused(tmp_path: Path) -> None:
    def work(manager: hf.CheckpointManager) -> Any:
        manager.save(10, {"w": np.ones(3)})
        manager.save_locally(12 if manager.processes.is_primary else 14, {"w": np.ones(3)})
        manager.wait_until_finished()
        return manager.local_status()

    for status in Hosts(tmp_path, 2).run(work):
        assert status.step == 10
        assert "all processes must save the same steps" in status.error


@pytest.mark.parametrize("where", ["the save in the directory", "the loop"])
def test_a_process_that_fails_before_its_local_save_stops_the_others_at_once(tmp_path: Path, where: str) -> None:
    hosts = Hosts(tmp_path, 3)

    def broken_state() -> Any:
        raise ValueError("no state today")

    def work(manager: hf.CheckpointManager) -> Any:
        fails = manager.processes.index == 1
        step = 10 if where == "the save in the directory" else 12
        try:
            if step == 10:
                manager.save(step, {"w": object()} if fails else tree(step))
            else:
                with part_of_save(manager, step, locally=True):
                    manager.save_locally(step, broken_state() if fails else tree(step))
        except (ValueError, hf.errors.UnsupportedLeafError):
            assert fails
        with contextlib.suppress(hf.errors.SaveFailedError):  # that of the directory
            manager.wait_until_finished()
        status = manager.local_status()
        manager.save_locally(14, tree(14))
        return status

    first, _, third = hosts.run(work, barrier_timeout_secs=600)
    for status in (first, third):
        assert "process 1 failed: " in status.error
        assert ("object" if where == "the save in the directory" else "no state today") in status.error
    assert hosts.resume()[0] == 14


def test_after_a_local_save_that_has_missed_a_process_no_process_begins_another_one(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 3)

    def work(manager: hf.CheckpointManager) -> None:
        trains(manager, 2, 2)
        if manager.processes.index == 2:  # it does not come to the next step
            return
        manager.save(4, tree(4))
        with pytest.raises((hf.errors.BarrierTimeoutError, hf.errors.PeerFailedError), match=r"process 2 of 3 did not"):
            manager.save(6, tree(6))

    hosts.run(work, barrier_timeout_secs=2)
    assert hosts.resume()[0] == 2


# ---- which history counts, and from when


class NoCommit(Observer):
    """Ends every save in the directory of one step right before its commit."""

    def __init__(self, step: int) -> None:
        self.step = step

    def reached(self, point: Any, step: int | None) -> None:
        if point == "commit" and step == self.step:
            raise OSError("the program is killed here")


class Gate:
    """Holds the threads of saves before they note the history, once it is closed, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.closed = False
        original = Ownership.check

        def check(ownership: Ownership, **arguments: Any) -> None:
            if self.closed and threading.current_thread().name.startswith("holdfast"):
                self.reached.set()
                assert self.opened.wait(30)
            original(ownership, **arguments)

        monkeypatch.setattr(Ownership, "check", check)


@pytest.mark.parametrize("moment", ["after it", "after a look", "while it is under way"])
def test_a_local_save_counts_until_the_directory_has_the_step(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path, 1, observer=NoCommit(18))
    gate = Gate(monkeypatch)

    def work(manager: hf.CheckpointManager) -> None:
        trains(manager, 1, 17)
        gate.closed = moment == "while it is under way"
        manager.save(18, tree(18))
        if gate.closed:
            assert gate.reached.wait(30)
        else:
            manager.wait_until_finished()
        if moment == "after a look":
            manager.restore(10)
        manager.save(18, tree(18), force=True)
        gate.opened.set()
        with pytest.raises(hf.errors.SaveFailedError, match="killed here"):
            manager.wait_until_finished()
        internals(manager).background.join()

    hosts.run(work)
    assert hosts.resume()[0] == 18


@pytest.mark.parametrize(
    ("last", "moment"), [(16, "between local saves"), (18, "during a local save"), (18, "between two saves of a step")]
)
def test_a_look_at_an_older_step_leaves_no_local_step(
    tmp_path: Path, last: int, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path, 1, store=100)
    gate = Gate(monkeypatch)

    def work(manager: hf.CheckpointManager) -> None:
        manager.save(10, tree(10), force=True)
        trains(manager, 11, 18 if moment == "between two saves of a step" else 17)
        gate.closed = moment == "during a local save"
        if gate.closed:
            manager.save(18, tree(18))
            assert gate.reached.wait(30)
        manager.restore(10)
        gate.opened.set()
        gate.closed = False
        if moment == "between two saves of a step":
            assert not manager.save(18, tree(18)), "it is saved"
        manager.wait_until_finished()
        with monkeypatch.context() as patch:
            patch.setattr("holdfast.engine.checkpoint.commit.write_record", no_room)
            trains(manager, 18 if last == 16 else 19, last + 2)
        assert failure(manager)
        assert internals(manager).status().step == last

    hosts.run(work)
    assert hosts.resume()[0] == last


def no_room(*_: Any, **__: Any) -> None:
    raise OSError("no space left")


@pytest.mark.parametrize("restores", [False, True])
def test_a_run_that_goes_back_leaves_the_later_local_steps(tmp_path: Path, restores: bool) -> None:
    hosts = Hosts(tmp_path, 1, store=100)

    def work(manager: hf.CheckpointManager) -> None:
        trains(manager, 1, 9)
        manager.save(10, tree(10), force=True)
        trains(manager, 11, 18)
        if restores:
            manager.restore(10)
        shutil.copytree(newest(hosts.place(0)), tmp_path / newest(hosts.place(0)).name)  # a host that is away
        trains(manager, 11, 14)
        expected = hf.reports.LocalStatus(path=str(hosts.place(0)), step=14, hosts=1, copies_on=(), error=None)
        assert manager.local_status() == expected

    hosts.run(work)
    (away,) = tmp_path.glob("*.18.*")
    away.rename(newest(hosts.place(0)).parent / away.name)
    assert hosts.resume()[0] == 14


def test_after_a_resume_from_an_older_local_step_that_one_is_kept(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 1, store=100)

    def begin(manager: hf.CheckpointManager) -> None:
        manager.save(0, tree(0), force=True)
        trains(manager, 1, 18)

    def again(manager: hf.CheckpointManager) -> None:
        manager.restore(16)
        trains(manager, 17, 18)

    hosts.run(begin)
    hosts.run(again)
    flip(next((newest(hosts.place(0)) / "state" / "d").glob("*.0.*")))
    assert hosts.resume()[0] == 16


@pytest.mark.parametrize("how", ["delete", "delete_after"])
def test_a_local_save_under_way_does_not_bring_back_what_is_deleted(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path, 1).train(1, 20)
    gate = Gate(monkeypatch)
    deletes = getattr(RunDirectory, how)

    def delete(*arguments: Any) -> Any:
        found = deletes(*arguments)
        gate.opened.set()
        return found

    def work(manager: hf.CheckpointManager) -> None:
        manager.restore_latest()
        manager.save(21, tree(21))
        gate.closed = True
        manager.save(22, tree(22))
        assert gate.reached.wait(30)
        background = internals(manager).background
        join = background.join

        def wait() -> None:
            gate.opened.set()
            join()

        monkeypatch.setattr(background, "join", wait)
        monkeypatch.setattr(RunDirectory, how, delete)
        getattr(manager, how)(20 if how == "delete" else 10)

    hosts.run(work)
    assert hosts.resume()[0] == 10


def test_each_prefix_is_a_run_with_a_history_of_its_own(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 1)
    for prefix in ("gen", "ema"):
        hf.save(tmp_path / "store" / f"{prefix}_1", tree(1))
    hosts.run(lambda manager: trains(manager, 2, 18), step_prefix="gen")
    (found,) = hosts.run(lambda manager: manager.restore_latest(), step_prefix="ema")
    assert found.step == 1
    with opened(tmp_path / "store", step_prefix="ema") as manager:
        manager.save(5, tree(5), force=True)
    assert hosts.run(lambda manager: manager.latest_step(), step_prefix="gen") == [18]


@pytest.mark.parametrize(
    "bad", [{"custom_metadata": {"a": object()}}, {"metrics": {"loss": "bad"}}], ids=["a fact", "a metric"]
)
def test_processes_go_on_after_a_failure(tmp_path: Path, bad: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    hosts = Hosts(tmp_path, 2).train(1, 18)

    def work(manager: hf.CheckpointManager) -> None:
        manager.restore_latest()
        try:
            manager.save_locally(20, tree(20), **({} if manager.processes.is_primary else bad))
        except hf.errors.OptionError:
            assert not manager.processes.is_primary
        with pytest.raises(hf.errors.CheckpointNotFoundError, match="no checkpoint of step 16"):
            manager.restore(16)
        manager.save_locally(22, tree(22))
        manager.wait_until_finished()

    hosts.run(work, barrier_timeout_secs=5)
    assert "not all processes have said that they stopped" not in caplog.text
    assert hosts.resume()[0] == 22


def test_processes_that_see_different_steps_look_for_one_together(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2).train(1, 15)

    def work(manager: hf.CheckpointManager) -> int | None:
        if not manager.processes.is_primary:
            hf.save(tmp_path / "store" / "12", tree(12))
            manager.reload()
        manager.processes.barrier("one process sees step 12 in the directory")
        return resume_step(12, manager)

    assert hosts.run(work, barrier_timeout_secs=5) == [12, 12]


def test_an_older_local_step_is_restored_by_its_number_at_the_next_start(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2)

    def refused(manager: hf.CheckpointManager) -> None:
        trains(manager, 1, 15)
        place = hosts.place(manager.processes.index)
        expected = rf"the hosts have step 12 in {place}, where only a new start of the program reads it"
        with pytest.raises(hf.errors.CheckpointNotFoundError, match=expected):
            manager.restore(12)

    def restored(manager: hf.CheckpointManager) -> bool:
        found = manager.restore(12)
        manager.processes.barrier("both have read")
        return equal(found, 12)

    hosts.run(refused)
    shutil.rmtree(hosts.place(1))
    assert hosts.run(restored) == [True, True]
    assert hosts.resume()[0] == 14, "nothing was saved since"


def test_a_local_step_stands_in_for_a_named_damaged_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hosts = Hosts(tmp_path, 1).train(1, 20)
    damage(tmp_path / "store" / "20", "state")

    def work(manager: hf.CheckpointManager) -> None:
        assert equal(manager.restore(20), 20)
        trains(manager, 21, 22)

    hosts.run(work)
    assert "20 was damaged, and is that of the local places" in caplog.text
    assert hosts.resume()[0] == 22


def test_the_error_of_a_damaged_step_tells_several_processes_how_to_get_the_local_one(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 2).train(1, 20)
    store = tmp_path / "store"
    damage(store / "20", "state")

    def refused(manager: hf.CheckpointManager) -> None:
        with pytest.raises(hf.errors.DamagedCheckpointError) as caught:
            manager.restore(20)
        (note,) = [note for note in caught.value.__notes__ if "The hosts have step 20 in" in note]
        assert f"rename {store / '20'} to 20.damaged, and start the program again" in note

    hosts.run(refused)
    (store / "20").rename(store / "20.damaged")
    assert hosts.run(lambda manager: equal(manager.restore(20), 20)) == [True, True]


def test_a_local_step_of_before_the_run_continued_elsewhere_from_the_mirror_does_not_count(tmp_path: Path) -> None:
    mirror = str(tmp_path / "mirror")

    def work(manager: hf.CheckpointManager) -> int:
        restored = manager.restore_latest()
        start = 0 if restored is None else restored.step
        trains(manager, start + 1, 18 if start == 0 else 15)
        assert manager.finish_mirror()
        return start

    here = Hosts(tmp_path, 1)
    assert here.run(work, mirror=mirror) == [0]
    (tmp_path / "store").rename(tmp_path / "away")
    there = Hosts(tmp_path / "there", 1, store=5, store_name="../store")
    assert there.run(work, mirror=mirror) == [10]
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "away").rename(tmp_path / "store")
    assert here.run(lambda manager: manager.latest_step(), mirror=mirror) == [15]


def test_local_steps_count_after_this_run_has_fetched_a_newer_step_than_the_directory_has(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, 1)

    def work(manager: hf.CheckpointManager) -> None:
        trains(manager, 1, 20)
        assert manager.finish_mirror()
        manager.delete(20, mirror=False)
        manager.restore(20)
        trains(manager, 21, 22)

    hosts.run(work, mirror=str(tmp_path / "mirror"))
    assert hosts.resume()[0] == 22
