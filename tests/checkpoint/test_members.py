"""Several processes, simulated by threads, save and restore together."""

from __future__ import annotations

import enum
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.clocks import FakeClock
from tests.equality import assert_same
from tests.events import heard
from tests.manager.runs import commit, saved
from tests.processes.threads import together, unwrap

import holdfast as hf
from holdfast.engine.distributed.coordinators import Coordinator


def tree(seed: int = 0) -> dict[str, Any]:
    numbers = np.random.default_rng(seed)
    return {"w": numbers.normal(size=(300, 40)), "b": numbers.normal(size=40), "step": seed, "names": ["a", "b"]}


def large() -> Any:
    return np.random.default_rng(0).integers(256, size=1 << 25, dtype=np.uint8)


def manager(path: Path, coordinator: Coordinator, **options: Any) -> hf.CheckpointManager:
    options = {"barrier_timeout_secs": 10, **options}
    return hf.CheckpointManager(path, options=hf.CheckpointManagerOptions(**options), coordinator=coordinator)


def played(count: int, path: Path, work: Callable[[hf.CheckpointManager, int], Any], **options: Any) -> list[Any]:
    """Let threads that play processes work with a manager each; return their results, or raise the first error."""

    def run(coordinator: Coordinator) -> Any:
        with manager(path, coordinator, **options) as several:
            return work(several, coordinator.process_index)

    return unwrap(together(count, run))


def steps_of(path: Path) -> list[int]:
    return [found.step for found in hf.list_checkpoints(path)]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_saved_by_many_restored_by_many_and_by_one(tmp_path: Path, count: int) -> None:
    def run(coordinator: Coordinator) -> list[int]:
        items = {
            "state": hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()),
            "facts": hf.Checkpointer(hf.JsonCheckpointHandler()),
        }
        options = hf.CheckpointManagerOptions(max_to_keep=2, barrier_timeout_secs=10)
        with hf.CheckpointManager(tmp_path / "run", items, options, coordinator=coordinator) as several:
            for step in range(4):
                several.save(step, {"state": tree(step), "facts": {"process": coordinator.process_index}})
            several.wait_until_finished()
            assert_same(several.restore(3), {"state": tree(3), "facts": {"process": 0}})
        return [*several.all_steps(), save_a_path(tmp_path / "one", coordinator).bytes]

    results = unwrap(together(count, run))
    assert results == [[2, 3, results[0][-1]]] * count, "all are told the same size"
    assert_same(hf.load(tmp_path / "run", item="state"), tree(3))
    assert_same(hf.load(tmp_path / "one"), tree(5))
    assert hf.verify(tmp_path / "run").ok
    assert not [path for path in tmp_path.rglob("*") if "fragment" in path.name or "partial" in path.name]


class Watching:
    """A coordinator that notes what its process sends and waits for, and the fragments in a directory then."""

    def __init__(self, coordinator: Coordinator, directory: Path) -> None:
        self.coordinator, self.directory = coordinator, directory
        self.sent: dict[str, int] = {}
        self.fragments: set[str] = set()
        self.waits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.coordinator, name)

    def put(self, key: str, value: bytes) -> None:
        self.sent[key] = len(value)
        self.fragments |= {path.name for path in self.directory.rglob("fragment.*")}
        self.coordinator.put(key, value)

    def get(self, key: str, timeout: float, *, waited: float = 0.0) -> bytes:
        self.waits += 1
        return self.coordinator.get(key, timeout, waited=waited)


def test_what_process_0_sends_does_not_grow_with_the_number_of_processes(tmp_path: Path) -> None:
    def bytes_of_a_save(count: int) -> int:
        directory = tmp_path / str(count)

        def run(coordinator: Coordinator) -> int:
            watching = Watching(coordinator, directory)
            own = hf.handlers.PerProcessCheckpointHandler(coordinator=coordinator)
            handlers = {"state": hf.Checkpointer(hf.PyTreeCheckpointHandler()), "own": hf.Checkpointer(own)}
            with hf.CheckpointManager(directory, handlers, coordinator=watching) as several:
                several.acquire()
                watching.sent.clear()
                commit(several, 1, {"state": tree(), "own": {"position": coordinator.process_index}})
                return sum(watching.sent.values())

        return int(unwrap(together(count, run))[0])

    assert abs(bytes_of_a_save(8) - bytes_of_a_save(2)) <= 16  # digits of numbers
    assert [path.name for path in (tmp_path / "8").rglob("own/*")] == ["0-7.zip"]


@pytest.mark.parametrize(("chunk_bytes", "files"), [(1 << 20, 0), (4096, 1)])
def test_each_process_copies_what_it_writes_and_only_large_fragments_take_files(
    tmp_path: Path, chunk_bytes: int, files: int
) -> None:
    def run(coordinator: Coordinator) -> tuple[set[str], int]:
        watching, values, more = Watching(coordinator, tmp_path), large(), np.arange(3)
        handler = hf.PyTreeCheckpointHandler(chunk_bytes=chunk_bytes)
        saves = {"state": hf.AsyncCheckpointer(handler), "more": hf.AsyncCheckpointer(hf.ArrayCheckpointHandler())}
        with hf.CheckpointManager(tmp_path, saves, coordinator=watching) as several:
            several.save(1, {"state": values, "more": more})
            values[:] = 0
            more[:] = 0
        return watching.fragments, handler._staging.nbytes

    fragments, copied = zip(*unwrap(together(2, run)), strict=True)
    assert len(set.union(*fragments)) == files
    assert copied == (1 << 24, 1 << 24)
    np.testing.assert_array_equal(hf.load(tmp_path, item="state"), large())
    np.testing.assert_array_equal(hf.load(tmp_path, item="more"), np.arange(3))
    assert not list(tmp_path.rglob("fragment.*"))


class Disturbing(Watching):
    """A coordinator with which something happens before a key of this text is sent."""

    def __init__(self, coordinator: Coordinator, directory: Path, text: str, act: Callable[[], object]) -> None:
        super().__init__(coordinator, directory)
        self.text, self.act = text, act

    def put(self, key: str, value: bytes) -> None:
        if self.text in key:
            self.act()
        super().put(key, value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            Path.unlink, "what process 1 wrote cannot be read .*; do all processes see the same", id="missing"
        ),
        pytest.param(
            lambda path: path.write_bytes(path.read_bytes()[:-1]), r"process 1 wrote \d+ bytes, found \d+", id="shorter"
        ),
    ],
)
def test_a_fragment_that_process_0_cannot_read(tmp_path: Path, change: Callable[[Path], object], said: str) -> None:
    def act() -> None:
        [fragment] = tmp_path.rglob("fragment.1")
        change(fragment)

    def run(coordinator: Coordinator) -> None:
        if coordinator.process_index:
            coordinator = Disturbing(coordinator, tmp_path, "gather/written", act)
        saves = hf.Checkpointer(hf.PyTreeCheckpointHandler(chunk_bytes=4096))
        with hf.CheckpointManager(tmp_path, saves, coordinator=coordinator) as several:
            commit(several, 1, large())

    first, second = together(2, run)
    assert isinstance(first, hf.DamagedCheckpointError)
    assert re.search(f"fragment.1: {said}", str(first))
    assert isinstance(second, hf.errors.PeerFailedError)
    assert steps_of(tmp_path) == []


def test_a_step_stays_although_the_others_cannot_be_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def act() -> None:
        raise ConnectionError("the store is gone")

    def run(coordinator: Coordinator) -> Any:
        if coordinator.process_index == 0:
            coordinator = Disturbing(coordinator, tmp_path, "broadcast/committed", act)
        with manager(tmp_path, coordinator, barrier_timeout_secs=2) as several:
            several.save(1, tree(1))

    first, second = together(2, run)
    assert first is None
    assert isinstance(second, hf.SaveFailedError)
    assert "saved, but the other processes could not be told" in caplog.text
    assert_same(hf.load(tmp_path), tree(1))


def save_a_path(path: Path, coordinator: Coordinator) -> Any:
    one = hf.Checkpointer(hf.PyTreeCheckpointHandler(), coordinator=coordinator, barrier_timeout_secs=10)
    return one.save(path, tree(5))


def save_items(path: Path, coordinator: Coordinator) -> None:
    """Save an item that only process 0 has of each process."""
    handlers = {"state": hf.PyTreeCheckpointHandler(), "own": hf.handlers.PerProcessCheckpointHandler()}
    items = {name: hf.AsyncCheckpointer(handler) for name, handler in handlers.items()}
    if coordinator.process_index == 1:
        del items["own"]
    options = hf.CheckpointManagerOptions(barrier_timeout_secs=10)
    several = hf.CheckpointManager(path, items, options=options, coordinator=coordinator)
    commit(several, 1, {name: tree(1) for name in items})


SAVES: dict[str, tuple[Callable[[Path, Coordinator], object], Any, str]] = {
    "paths": (  # such as those with the time of the start in their names
        lambda path, one: save_a_path(path / str(one.process_index), one),
        (hf.errors.StateError, hf.errors.PeerFailedError),
        "process 1 saves to {place}, and process 0 to",
    ),
    "steps": (
        lambda path, one: commit(manager(path, one), one.process_index, tree(5)),
        hf.SaveFailedError,
        "process 1 saves to {place}",
    ),
    "items": (save_items, hf.HoldfastError, "process 1 saves the items ['state']"),
    "shapes": (
        lambda path, one: commit(
            manager(path, one), 1, {"same": np.zeros(2), "other": np.zeros(4 - one.process_index)}
        ),
        hf.SaveFailedError,
        "\n  other: process 0 has float64[4]",
    ),
}


@pytest.mark.parametrize("what", SAVES)
def test_saves_that_differ_are_refused(tmp_path: Path, what: str) -> None:
    save, kinds, said = SAVES[what]
    for error in together(2, lambda coordinator: save(tmp_path, coordinator)):
        assert isinstance(error, kinds)
        assert "process 1" in str(error)
        assert said.format(place=hf.storage.as_location(tmp_path / "1").url) in str(error)
    assert hf.list_checkpoints(tmp_path) == []
    left = list(tmp_path.iterdir())  # a manager leaves the files of its run
    assert [path for path in left if path.is_dir() or what == "paths"] == []


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


OWN_VALUES: dict[str, tuple[Any, Any, str]] = {
    "int": (10, 12, "process 0 has int 10, process 1 has int 12"),
    "float": (0.1, 0.1 + 2e-17, "process 0 has float 0.1, process 1 has float 0.10000000000000002"),
    "bool": (True, False, "process 0 has bool True, process 1 has bool False"),
    "number of numpy": (np.int64(3), np.int64(4), "process 0 has numpy_scalar 3"),
    "enumeration": (Level.LOW, Level.HIGH, "process 0 has int 1"),
    "text": ("a", "b", "process 0 has a value of kind str 'a', process 1 has a value of kind str 'b'"),
    "text of lines": ("a\nb", "a b", r"kind str 'a\nb'"),
    "long text": ("x" * 100_000, "x" * 99_999 + "y", "digest"),
    "bytes": (b"a", b"b", "kind bytes"),
    "None": (None, 1, "process 0 has a value of kind none, process 1 has int 1"),
    "huge number": (1 << 90, (1 << 90) + 1, "kind int"),
    "long list of numbers": ([0.5] * 100, [0.5] * 99 + [0.25], "count/99: process 0 has float 0.5"),
    "step that is an array": (np.array(7), np.array(8), "process 0 has int64 7, process 1 has int64 8"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("mine", "theirs", "message"), OWN_VALUES.values(), ids=OWN_VALUES)
@pytest.mark.parametrize("size", [4, 1 << 18], ids=["small", "large"])  # of large trees, each copies what it writes
def test_plain_values_that_differ_are_refused(tmp_path: Path, mine: Any, theirs: Any, message: str, size: int) -> None:
    """Processes at different steps: one has gone on from another checkpoint, or has missed an update.

    Arrays are not compared, which `hf.processes.check_replicas` does.
    """

    def run(several: hf.CheckpointManager, process: int) -> str:
        same = {"nan": float("nan"), "half": np.float16(0.5), "set": {"a", "b", "c"}, "none": None, "zero": -0.0}
        shared = {"w": np.full(size, process), "same": same}
        several.save(1, {**shared, "count": mine})
        several.save(2, {**shared, "count": theirs if process else mine})
        with pytest.raises(hf.SaveFailedError) as caught:
            several.wait_until_finished()
        several.save(3, {**shared, "count": theirs})
        return str(caught.value)

    for text in played(2, tmp_path, run):
        assert "\n  count" in text
        assert "same" not in text.partition("leaves, numbers")[2].partition("count")[0]
        assert message in text
        assert "hf.handlers.PerProcessCheckpointHandler" in text
    assert steps_of(tmp_path) == [1, 3]


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(hf.errors.StateError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    "option",
    [
        {"save_interval_steps": 3},
        {"save_interval_secs": 60},
        {"save_on_best": True, "best_fn": "a", "best_mode": "min"},
    ],
    ids=str,
)
def test_options_that_differ_are_told_at_the_start(tmp_path: Path, option: dict[str, Any]) -> None:
    def run(coordinator: Coordinator) -> str:
        own = option if coordinator.process_index == 1 else {}
        return refused(manager(tmp_path, coordinator, **{"save_interval_steps": 2, **own}).acquire)

    for text in unwrap(together(2, run)):
        assert f"\n  {next(iter(option))}: process 0 has" in text
        assert "and process 1 has" in text


@pytest.mark.parametrize("call", ["acquire", "restore_latest", "peek"])
def test_directories_that_differ_are_told_at_the_start(tmp_path: Path, call: str) -> None:
    """Such as those with the time of the start in their names; nobody waits until the barrier's timeout."""

    def run(coordinator: Coordinator) -> str:
        several = manager(tmp_path / f"12-00-0{coordinator.process_index // 2}", coordinator)
        return refused(getattr(several, call))

    for text in unwrap(together(3, run)):
        assert text.endswith("/12-00-00', and process 2 has " + repr(hf.storage.as_location(tmp_path / "12-00-01").url))
    assert list(tmp_path.iterdir()) == []


def test_a_leaf_that_one_process_cannot_save(tmp_path: Path) -> None:
    def run(several: hf.CheckpointManager, process: int) -> Any:
        several.save(1, tree(1))
        with pytest.raises(hf.HoldfastError) as caught:
            commit(several, 2, {**tree(2), "bad": object() if process == 1 else 1})
        commit(several, 3, tree(3))
        return caught.value, several.all_steps()

    results = played(3, tmp_path, run)
    assert isinstance(results[1][0], hf.errors.UnsupportedLeafError)
    for process in (0, 2):
        assert isinstance(results[process][0], hf.SaveFailedError)
        assert "process 1" in str(results[process][0])
        assert "bad" in str(results[process][0])
    assert [steps for _, steps in results] == [[1, 3]] * 3
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["1", "3"]


def test_a_process_that_does_not_come(tmp_path: Path) -> None:
    """The save fails after the timeout; the next one does not wait for that process again."""

    def run(several: hf.CheckpointManager, process: int) -> Any:
        commit(several, 1, tree(1))
        if process == 2:
            return None
        several.save(2, tree(2))
        with pytest.raises(hf.SaveFailedError, match=r"step 2 of .*process 2 of 3 did not reach"):
            several.save(3, tree(3)) if process else several.wait_until_finished()
        assert not several.is_saving_in_progress()
        return several.all_steps()

    assert played(3, tmp_path, run, barrier_timeout_secs=2)[:2] == [[1], [1]]
    assert steps_of(tmp_path) == [1]
    with hf.CheckpointManager(tmp_path) as alone:  # the next run removes what was left
        alone.save(2, tree(7))
    assert_same(hf.load(tmp_path), tree(7))


def test_time_is_that_of_process_0(tmp_path: Path) -> None:
    def run(coordinator: Coordinator) -> Any:
        clock = FakeClock()
        options = hf.CheckpointManagerOptions(save_interval_steps=None, save_interval_secs=100, barrier_timeout_secs=10)
        watching: Any = Watching(coordinator, tmp_path)
        several = hf.CheckpointManager(tmp_path, options=options, coordinator=watching, clock=clock)
        saved = []
        for step in range(1, 401):
            clock.sleep(1.0 if coordinator.process_index == 0 else 3.7)
            if several.save(step, {"x": np.zeros(3)}):
                saved.append(step)
        several.close()
        return saved, watching.waits

    results = unwrap(together(2, run))
    saved = results[0][0]
    assert results[1][0] == saved
    assert [later - earlier for earlier, later in zip([0, *saved], saved, strict=False)] == [100] * 4
    assert all(waits < 20 * len(saved) for _, waits in results)  # much less than one for each of the 400 steps


def test_the_best_is_that_of_process_0(tmp_path: Path) -> None:
    def run(several: hf.CheckpointManager, process: int) -> Any:
        for step, score in enumerate([0.9, 0.1, 0.8, 0.2] if process else [0.1, 0.5, 0.3, 0.9]):
            if several.should_save(step, metrics={"accuracy": score}):
                assert several.save(step, tree(step), metrics={"accuracy": score})
        several.wait_until_finished()
        return several.all_steps(), several.best_step(), several.metrics(3)

    options = {"save_interval_steps": None, "save_on_best": True}
    found = played(2, tmp_path, run, best_fn="accuracy", best_mode="max", **options)
    assert found == [([0, 1, 3], 3, {"accuracy": 0.9})] * 2


def test_metrics_pins_and_deletions_reach_all(tmp_path: Path) -> None:
    def run(several: hf.CheckpointManager, process: int) -> Any:
        for step in range(4):
            several.save(step, tree(step))
        several.record_metrics(3, {"accuracy": 0.5 if process == 0 else 0.1})
        several.wait_until_finished()
        several.record_metrics(1, {"accuracy": 0.7 if process == 0 else 0.2})
        several.pin(0)
        several.delete(2)
        several.save(4, tree(4))
        assert several.delete_after(3) == [4]
        several.wait_until_finished()
        return several.all_steps(), several.best_step(), several.metrics(3), several.why_kept(0)[-1]

    options = {"max_to_keep": 1, "best_fn": "accuracy", "best_mode": "max", "keep_latest": 4}
    results = played(2, tmp_path, run, **options)
    assert results[0] == results[1]
    assert results[0][:3] == ([0, 1, 3], 1, {"accuracy": 0.5})
    assert steps_of(tmp_path) == [0, 1, 3]


def test_what_one_process_finds_at_a_restore_concerns_all(tmp_path: Path) -> None:
    """All fall back where one finds damage, and all fail where one has a template that does not fit."""
    saved(tmp_path, 0, 1, 2, items=tree)

    class SeesDamage(hf.PyTreeCheckpointHandler):
        def restore(self, directory: hf.storage.Location, item: Any = None, **kwargs: Any) -> Any:
            if directory.parent.name == "2":
                raise hf.DamagedCheckpointError("a flipped bit")
            return super().restore(directory, item, **kwargs)

    def run(coordinator: Coordinator) -> Any:
        handler = SeesDamage() if coordinator.process_index == 1 else hf.PyTreeCheckpointHandler()
        with hf.CheckpointManager(tmp_path, hf.Checkpointer(handler), coordinator=coordinator) as several:
            restored = several.restore_latest()
            assert restored is not None
            with pytest.raises((hf.TreeMismatchError, hf.errors.PeerFailedError)) as caught:
                several.restore_latest({"only": 1} if coordinator.process_index == 1 else tree())
            assert isinstance(caught.value, hf.TreeMismatchError) == (coordinator.process_index == 1)
            assert isinstance(caught.value, hf.TreeMismatchError) or "process 1" in str(caught.value)
            return restored.step, restored.items["step"], restored.skipped, several.all_steps()

    assert unwrap(together(3, run)) == [(1, 1, ((2, "a flipped bit"),), [0, 1])] * 3


def test_a_step_that_one_process_has_not_seen_yet(tmp_path: Path) -> None:
    """Network file systems may show a directory as it was a minute ago."""
    turns = threading.Barrier(2)

    def run(coordinator: Coordinator) -> int:
        several = manager(tmp_path, coordinator) if coordinator.process_index else None
        turns.wait(30)
        if several is None:
            with manager(tmp_path, hf.processes.Alone()) as alone:
                alone.save(7, tree(7))
            several = manager(tmp_path, coordinator)
        turns.wait(30)
        restored = several.restore_latest()
        assert restored is not None
        return restored.step

    assert unwrap(together(2, run)) == [7, 7]


def test_a_directory_of_another_run_is_refused_everywhere(tmp_path: Path) -> None:
    def run(several: hf.CheckpointManager, process: int) -> None:
        errors = (hf.errors.OwnershipError, hf.errors.PeerFailedError)
        with pytest.raises(errors, match="process 7 on elsewhere"):
            several.acquire()

    with (tmp_path / "owner.json").open("w") as file:  # as another process holds it
        fcntl.flock(file, fcntl.LOCK_EX)
        print('{"pid": 7, "host": "elsewhere"}', file=file, flush=True)
        played(2, tmp_path, run)


def test_the_store_does_not_fill_up(tmp_path: Path) -> None:
    def run(coordinator: Any) -> Any:
        with manager(tmp_path, coordinator, max_to_keep=1) as several:
            sizes = []
            for step in range(12):
                commit(several, step, {"x": np.zeros(3)})
                sizes.append(len(coordinator.keys()))
            return sizes

    sizes = unwrap(together(2, run))[0]
    assert max(sizes[6:]) <= max(sizes[:6])


def test_each_process_shares_its_own_files(tmp_path: Path) -> None:
    """Unchanged arrays that several processes write together: every one links the files of its own chunks."""
    frozen = {name: np.random.default_rng(number).normal(size=(512, 1024)) for number, name in enumerate("abcd")}
    size = sum(array.nbytes for array in frozen.values())

    def run(several: hf.CheckpointManager, process: int) -> list[int]:
        events = heard(several)
        for step in range(6):
            commit(several, step, {"frozen": frozen, "adapter": np.full(1000, step)})
        return [event["shared_bytes"] for event in events]

    results = played(2, tmp_path, run, max_to_keep=4)
    assert [shared > 0.9 * size for shared in results[0]] == [False, False, True, True, True, True]
    owners = {path.name.split(".")[1] for path in (tmp_path / "5" / "state" / "d").iterdir() if "." in path.name}
    assert owners == {"0", "1"}
    links = {os.stat(path).st_ino for step in (2, 3, 4, 5) for path in (tmp_path / str(step)).rglob("d/*.0.0")}
    assert len(links) < 8, "process 0 wrote its share of the base anew"
    assert hf.verify(tmp_path).ok
    for step in (2, 3, 4):
        shutil.rmtree(tmp_path / str(step))
    restored = hf.load(tmp_path)
    assert all(np.array_equal(restored["frozen"][name], array) for name, array in frozen.items())
    assert (restored["adapter"] == 5).all()
