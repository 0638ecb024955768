"""A mirror: committed steps arrive there in the background, and a run resumes from the newest step of both places."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.clocks import FakeClock
from tests.fixtures import StoredFiles
from tests.manager.runs import commit, newest_whole, opened

import holdfast as hf
from holdfast.components import Checkpointable, ComponentCheckpointHandler
from holdfast.engine.checkpoint import PendingCheckpoint, copying
from holdfast.engine.checkpoint import save as saves
from holdfast.engine.format import CheckpointRecord, decode_document, encode_document
from holdfast.engine.manager import mirror as mirrors
from holdfast.engine.manager import stored_identity
from holdfast.engine.manager.directory import RunDirectory
from holdfast.engine.storage import Location, as_location

Files = Callable[[str], StoredFiles]


def tree(step: int) -> dict[str, Any]:
    return {"w": np.full(1000, step, np.float32), "step": step}


def manager(directory: object, mirror: Any, **options: Any) -> hf.CheckpointManager:
    return opened(directory, mirror=mirror, **options)


def mirrored(directory: object, mirror: Any, *steps: int, **options: Any) -> None:
    """Saves steps by a manager of its own, each of which arrives in the mirror."""
    with manager(directory, mirror, **options) as run:
        sends(run, *steps)


def sends(run: hf.CheckpointManager, *steps: int) -> None:
    """Saves steps, each of which arrives in the mirror."""
    for step in steps:
        run.save(step, tree(step))
        arrives(run, step)


def steps(place: object) -> list[int | None]:
    return [one.step for one in hf.list_checkpoints(str(place))] if as_location(str(place)).exists() else []


def arrives(run: hf.CheckpointManager, step: int | None) -> None:
    """Waits until a step is in the mirror."""
    wait_until(run, lambda status: status.step == step and status.copying is None)


def wait_until(run: hf.CheckpointManager, holds: Callable[[hf.reports.MirrorStatus], bool]) -> None:
    mirror = run._mirror
    assert mirror is not None
    with mirror._wake:  # which the thread notifies of all that it does
        assert mirror._wake.wait_for(lambda: holds(mirror.status()), 60), mirror.status()


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(mirrors, "DELETION_WAIT", 5.0)


@pytest.fixture
def given_way() -> threading.Event:
    """Set once a copy gives way."""
    return threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, given_way: threading.Event) -> Iterator[threading.Event]:
    """What copies wait for before each piece; open at the end."""
    found, take = threading.Event(), copying.Transfer.take

    def waits(self: copying.Transfer, count: int) -> None:
        while not found.wait(0.01) and self.ended is None:
            pass
        if self.gives_way:
            given_way.set()
        take(self, count)

    monkeypatch.setattr(copying.Transfer, "take", waits)
    yield found
    found.set()


class Broken:
    """A mirror whose requests fail on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
        self.error: type[hf.errors.StorageError] | None = None
        for name in ("entries", "write_bytes", "write_data", "read_bytes"):
            monkeypatch.setattr(Location, name, self._failing(name, getattr(Location, name), prefix))

    def _failing(self, name: str, method: Callable[..., Any], prefix: str) -> Callable[..., Any]:
        def call(place: Location, *args: Any, **kwargs: Any) -> Any:
            error = self.error  # which the test may clear meanwhile
            is_spared = error is hf.errors.StorageFullError and not name.startswith("write")
            if error is not None and place.url.startswith(prefix) and not is_spared:
                raise error(f"cannot {name} {place.url}: broken")
            return method(place, *args, **kwargs)

        return call


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, place: str) -> Broken:
    return Broken(monkeypatch, place)


# ---- there and back


@pytest.mark.parametrize("prefix", [None, "ckpt"])
def test_a_new_machine_goes_on_from_the_mirror_with_everything(tmp_path: Path, place: str, prefix: str | None) -> None:
    options = hf.CheckpointManagerOptions(mirror=place, step_prefix=prefix)
    with hf.CheckpointManager(tmp_path / "run", options=options, metadata={"who": "me"}) as run:
        run.save(1, tree(1))
        run.save(2, tree(100))
        arrives(run, 2)
        run.save(2, tree(2), metrics={"loss": 1.0}, custom_metadata={"a": 1}, force=True)
        run.record_metrics(2, {"late": 2})
        run.pin(2)
    assert hf.verify(place).ok
    shutil.rmtree(tmp_path / "run")
    with hf.CheckpointManager(tmp_path / "run", options=options) as again:
        assert again.latest_step() == 2
        assert again.metadata() == {"who": "me"}
        assert again.metrics(2) == {"loss": 1.0, "late": 2}
        assert again.custom_metadata(2) == {"a": 1}
        assert "pinned" in again.why_kept(2)
        assert again.restore()["w"][0] == 2
        again.save(3, tree(3))
    assert steps(tmp_path / "run") == [2, 3]
    assert hf.verify(tmp_path / "run").ok


def test_the_newest_of_both_places_counts(tmp_path: Path, place: str) -> None:
    mirrored(tmp_path / "one", place, 10)
    shutil.copytree(tmp_path / "one", tmp_path / "older")
    mirrored(tmp_path / "one", place, 20)
    with manager(tmp_path / "older", place) as run:
        assert run.all_steps() == [10, 20]
        run.save(30, tree(30))
    with manager(tmp_path / "older", f"{place}-other") as run:  # an empty mirror
        run.acquire()
        assert run.latest_step() == 30
    assert steps(f"{place}-other") == [30]
    as_location(f"{place}-other").remove_tree()


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        ("state/tree.json", "step 2 was damaged, and is that of the mirror now"),
        ("checkpoint.json", "fetching step 2 from the mirror"),
    ],
)
def test_a_damaged_step_is_taken_from_the_mirror(
    tmp_path: Path, place: str, stored: Files, caplog: pytest.LogCaptureFixture, damaged: str, said: str
) -> None:
    caplog.set_level("INFO", "holdfast")
    mirrored(tmp_path / "run", place, 1, 2)
    stored(f"{tmp_path}/run/2").write(damaged, b"{")

    with manager(tmp_path / "run", place) as run:
        restored = newest_whole(run)
    assert (restored.step, restored.items["w"][0]) == (2, 2)
    assert said in caplog.text
    assert hf.verify(tmp_path / "run").ok


def test_a_step_that_appears_while_it_is_fetched(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mirrored(tmp_path / "run", place, 1)
    (tmp_path / "run" / "1").rename(tmp_path / "aside")

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        (tmp_path / "aside").rename(tmp_path / "run" / "1")
        return copying.copied_step(*args, **kwargs)

    monkeypatch.setattr("holdfast.engine.manager.directory.copied_step", overtaken)
    with manager(tmp_path / "run", place) as run:
        assert newest_whole(run).step == 1


def test_a_look_at_a_damaged_step_takes_it_from_the_mirror_as_a_restore_does(tmp_path: Path, place: str) -> None:
    run = tmp_path / "run"
    with hf.CheckpointCallback(run, save_interval_steps=1, mirror=place) as callback:
        callback.restore_or_initialize(tree(0), phase=0)
        for step in (1, 2):
            callback.on_step(step, tree(step), phase=step)
            arrives(callback.manager, step)
    resumes: list[Any] = ["auto", 2]
    for resume in resumes:
        (file,) = (run / "2").glob("extras*/tree.json")
        file.write_bytes(b"{}")
        with hf.CheckpointCallback(run, mirror=place, resume=resume) as callback:
            found = callback.peek()
            assert found is not None
            assert (found.step, found.extras["phase"]) == (2, 2)
            with pytest.raises(hf.CheckpointNotFoundError, match="no checkpoint of step 7; there are 1, 2"):
                callback.manager.peek(["extras"], step=7)


def test_damage_there_is_passed_over(
    tmp_path: Path, place: str, stored: Files, caplog: pytest.LogCaptureFixture
) -> None:
    mirrored(tmp_path / "run", place, 1, 2)
    shutil.rmtree(tmp_path / "run")
    files = stored(f"{place}/2")
    (path,) = (path for path in files.read() if path.endswith("tree.json"))
    files.write(path, b"{}")
    with manager(tmp_path / "run", place) as run:
        assert run.all_steps() == [1]
    assert "step 2 cannot be fetched" in caplog.text


def test_fetching_one_step(tmp_path: Path, place: str, broken: Broken, caplog: pytest.LogCaptureFixture) -> None:
    with manager(tmp_path / "run", hf.Mirror(place, max_to_keep=5), max_to_keep=1) as run:
        sends(run, 1, 2, 3)
        run.wait_until_finished()
        assert run.all_steps() == [3]
        assert run.restore(1)["w"][0] == 1
        assert not run.fetch(7)
        with pytest.raises(hf.CheckpointNotFoundError):
            run.restore(7)
        run.delete(1, mirror=False)
        broken.error = hf.errors.StorageUnavailableError
        with pytest.raises(hf.CheckpointNotFoundError, match="no checkpoint of step 1; there are 3"):
            run.restore(1)
        broken.error = None
    assert "the mirror failed, and" in caplog.text


# ---- which steps, and for how long


def follows(run: hf.CheckpointManager, newest_there: dict[int, int], clock: FakeClock) -> None:
    """Saves steps, six minutes apart, after each of which the mirror has a certain newest step."""
    for step, newest in newest_there.items():
        commit(run, step, tree(step), metrics={"score": {1: 9.0, 2: 1.0, 3: 5.0}.get(step, 2.0)})
        arrives(run, newest)
        clock.sleep(360)


def test_the_interval_and_the_limit_of_the_mirror_are_its_own(tmp_path: Path, place: str) -> None:
    mirror = hf.Mirror(place, save_interval_steps=10, max_to_keep=2)
    with manager(tmp_path / "run", mirror, max_to_keep=3) as run:
        follows(run, {1: 1, 5: 1, 9: 1, 13: 13, 17: 13, 21: 21, 25: 21, 29: 21, 33: 33, 37: 33, 41: 41}, FakeClock())
    assert (steps(tmp_path / "run"), steps(place)) == ([33, 37, 41], [33, 41])


def test_the_interval_may_be_a_time_and_the_last_step_arrives_at_the_end(tmp_path: Path, place: str) -> None:
    clock = FakeClock()
    with manager(tmp_path / "run", hf.Mirror(place, save_interval_secs="10m"), clock=clock) as run:
        follows(run, {1: 1, 2: 1, 3: 3, 4: 3}, clock)
    assert steps(place) == [1, 3, 4]


def test_without_limits_of_its_own_the_rules_of_the_run_hold(tmp_path: Path, place: str) -> None:
    with manager(tmp_path / "run", place, max_to_keep=2, best_fn="score", best_mode="max") as run:
        follows(run, {1: 1, 2: 2, 3: 3, 4: 4}, FakeClock())
    assert steps(tmp_path / "run") == steps(place) == [1, 3, 4]


def test_a_slow_mirror_skips_steps_and_delays_no_save(tmp_path: Path, place: str, gate: threading.Event) -> None:
    with manager(tmp_path / "run", place, max_to_keep=1) as run:
        run.save(1, tree(1))
        wait_until(run, lambda status: status.copying == 1)
        for step in range(2, 8):
            commit(run, step, tree(step))
        assert run.all_steps() == [1, 7]  # the copied one is held
        assert run.why_kept(1) == ("being copied to the mirror",)
        assert steps(place) == []
        gate.set()
        arrives(run, 7)
    assert steps(place) == [7]
    assert steps(tmp_path / "run") == [7]


@pytest.mark.parametrize("end", ["it is saved", "it fails", "it cannot begin", "the run ends"])
def test_a_copy_gives_way_to_a_save(
    tmp_path: Path,
    place: str,
    gate: threading.Event,
    given_way: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    monkeypatch.setattr(copying, "BESIDE", 1e-3)  # bytes a second: nothing arrives beside a save
    second, saving = threading.Event(), threading.Event()
    write = saves.Save.write

    def completes(save: saves.Save, *rest: Any) -> Any:
        if second.is_set():
            assert saving.wait(60)
            if end == "it fails":
                raise hf.errors.StorageFullError("full")
        return write(save, *rest)

    monkeypatch.setattr(saves.Save, "write", completes)
    with manager(tmp_path / "run", place) as run:
        run.save(1, tree(1))
        wait_until(run, lambda status: status.copying == 1)
        second.set()
        if end == "it cannot begin":
            with pytest.raises(hf.errors.UnsupportedLeafError):
                run.save(2, {"w": object()})
            gate.set()
        else:
            run.save(2, tree(2))
            gate.set()  # not before the save has begun, or the copy may be done by then
            assert given_way.wait(60)
            assert steps(place) == []
        if end == "the run ends":
            assert run.finish_mirror()
            assert steps(place) == [1]
            saving.set()
        else:
            saving.set()
            if end == "it fails":
                with pytest.raises(hf.SaveFailedError, match="full"):
                    run.wait_until_finished()
            arrives(run, 2 if end == "it is saved" else 1)


def test_what_is_deleted_on_purpose_does_not_come_back(tmp_path: Path, place: str) -> None:
    with manager(tmp_path / "run", place) as run:
        sends(run, 1, 2, 3)
        run.wait_until_finished()
        run.delete(3)
        assert steps(place) == [1, 2]
        run.delete_after(1)
        assert steps(place) == [1]
    with manager(tmp_path / "run", place) as run:
        assert run.all_steps() == [1]


@pytest.mark.parametrize("again", [False, True], ids=["with the mirror down", "by a manager without the mirror"])
def test_what_the_mirror_could_not_delete_stays_deleted(
    tmp_path: Path, place: str, broken: Broken, caplog: pytest.LogCaptureFixture, again: bool
) -> None:
    with manager(tmp_path / "run", hf.Mirror(place, max_to_keep=5), max_to_keep=1) as run:
        sends(run, 1, 2, 3)
        commit(run, 1, tree(1), force=True)
        if not again:
            broken.error = hf.errors.StorageUnavailableError
            run.delete_after(1)
    if again:
        with hf.CheckpointManager(tmp_path / "run") as run:
            run.delete_after(1)
    else:
        assert "all steps after 1 of" in caplog.text
        assert "are still in this mirror" in caplog.text
    broken.error = None
    assert steps(place)[-1] == 3

    with manager(tmp_path / "run", hf.Mirror(place, max_to_keep=5), max_to_keep=1) as run:
        assert run.latest_step() == 1
        assert not run.fetch(3)
        run.save(2, tree(200))
        arrives(run, 2)
    assert steps(place)[-1] == 2
    assert hf.load(f"{place}/2")["step"] == 200
    shutil.rmtree(tmp_path / "run")
    with manager(tmp_path / "run", place) as run:
        assert run.latest_step() == 2


@pytest.mark.parametrize("today", [True, False], ids=["with a digest", "by an earlier version"])
@pytest.mark.parametrize(("method", "argument"), [("delete", 3), ("delete_after", 2)])
def test_a_step_deleted_and_saved_again(tmp_path: Path, place: str, method: str, argument: int, today: bool) -> None:
    options = tmp_path / "run" / "options.json"
    mirrored(tmp_path / "run", place, 2, 3)
    with hf.CheckpointManager(tmp_path / "run") as run:
        getattr(run, method)(argument)
    if not today:
        document = decode_document(options.read_bytes(), "options", source="")
        del document["run"]["doomed"][""]["records"]
        options.write_bytes(encode_document("options", document))
    deleted = options.read_bytes()
    with hf.CheckpointManager(tmp_path / "run") as run:
        run.save(3, tree(300))
    assert hf.load(f"{place}/3")["step"] == 3
    with manager(tmp_path / "run", place) as run:
        run.record_metrics(2, {"loss": 1.0})
        assert run.finish_mirror(60)
    assert hf.load(f"{place}/3")["step"] == 300
    if today:  # a backup of the file brings the tombstone back, when only the mirror has the step whole
        options.write_bytes(deleted)
        (tmp_path / "run" / "3" / "checkpoint.json").write_bytes(b"")
        with manager(tmp_path / "run", place) as run:
            run.record_metrics(2, {"loss": 1.0})
            wait_until(run, lambda _: not stored_identity(as_location(tmp_path / "run")).tombstones)
            assert run.restore()["step"] == 300
    shutil.rmtree(tmp_path / "run")
    with manager(tmp_path / "run", place) as run:
        assert run.restore()["step"] == 300


def test_a_listing_from_before_a_deletion_brings_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirrored(tmp_path / "run", tmp_path / "mirror", 1, 3)
    with hf.CheckpointManager(tmp_path / "run") as run:
        run.delete_after(1)

    run = manager(tmp_path / "run", tmp_path / "mirror")
    listed, deleted = threading.Event(), threading.Event()
    read, write = Location.read_bytes, Location.write_bytes

    def read_bytes(place: Location, *args: Any, **kwargs: Any) -> bytes:
        found = read(place, *args, **kwargs)
        if place.url.startswith(f"{tmp_path}/mirror/3/"):
            if threading.current_thread() is threading.main_thread():
                listed.set()
                deleted.wait(1)  # It cannot be, as long as this listing is under way.
            else:
                listed.wait(1)
        return found

    def write_bytes(place: Location, *args: Any, **kwargs: Any) -> None:
        write(place, *args, **kwargs)
        if listed.is_set() and place.url == f"{tmp_path}/run/options.json":  # nothing is to be deleted any more
            deleted.set()

    monkeypatch.setattr(Location, "read_bytes", read_bytes)
    monkeypatch.setattr(Location, "write_bytes", write_bytes)
    with run:
        assert not run.fetch(3)
        arrives(run, 1)


def test_others_see_the_mirror_while_its_remains_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirrored(tmp_path / "run", tmp_path / "mirror", 1)
    sweeps, seen = threading.Event(), threading.Event()
    acquire = RunDirectory.acquire

    def acquires(self: RunDirectory, *args: Any, **kwargs: Any) -> list[int]:
        if self.location.url == str(tmp_path / "mirror"):
            sweeps.set()
            assert seen.wait(60)
        return acquire(self, *args, **kwargs)

    monkeypatch.setattr(RunDirectory, "acquire", acquires)
    with manager(tmp_path / "run", tmp_path / "mirror") as run:
        run.save(2, tree(2))
        assert sweeps.wait(60)
        assert run.restore(1)["step"] == 1
        assert not run.fetch(5), "the mirror is looked at"
        seen.set()
        arrives(run, 2)


def without_identity(directory: Location) -> None:
    """Makes a directory one of an earlier version, which knew no identities."""
    options = directory / "options.json"
    content = decode_document(options.read_bytes(), "options", source="")
    options.write_bytes(encode_document("options", {"options": content["options"]}))


@pytest.mark.parametrize("of_before", [False, True], ids=["with identities", "a directory without one"])
def test_the_mirror_of_another_run_is_refused(tmp_path: Path, place: str, of_before: bool) -> None:
    for name, step in (("a", 5), ("b", 3)):
        mirrored(tmp_path / name, f"{place}/{name}", step)
    if of_before:
        without_identity(as_location(tmp_path / "b"))
    with pytest.raises(hf.errors.OptionError, match=rf"belongs to another run, that in {tmp_path}/a, and"):
        manager(tmp_path / "b", f"{place}/a")

    assert steps(tmp_path / "b") == [3]
    assert steps(f"{place}/a") == [5]
    with manager(tmp_path / "b", f"{place}/b") as run:
        assert run.latest_step() == 3


def test_a_foreign_mirror_that_could_not_be_read_at_first_gets_nothing(
    tmp_path: Path, place: str, broken: Broken, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        mirrored(tmp_path / name, f"{place}/{name}", 1)
    broken.error = hf.errors.StorageUnavailableError
    with manager(tmp_path / "b", f"{place}/a") as run:
        commit(run, 2, tree(2))
        broken.error = None
        run.save(3, tree(3))
        wait_until(run, lambda status: "another run" in (status.error or ""))
    assert "this run copies nothing there" in caplog.text
    assert steps(f"{place}/a") == [1]


@pytest.mark.parametrize(
    "spoilt",
    [
        {"doomed": {"": 3}, "branches": {"": 3}},
        {"doomed": {"": {"records": [[1], ["1", False, None, None]]}}, "branches": {"": [["a", 1]]}},
        {"doomed": {"": {"steps": ["3"], "after": None}}, "branches": 3},
        {"doomed": 3},
    ],
)
def test_tombstones_that_cannot_be_read_delete_nothing(tmp_path: Path, place: str, spoilt: dict[str, Any]) -> None:
    mirrored(tmp_path / "run", place, 1, 3)
    options = tmp_path / "run" / "options.json"
    document = decode_document(options.read_bytes(), "options", source="")
    document["run"] |= spoilt
    options.write_bytes(encode_document("options", document))
    mirrored(tmp_path / "run", place, 4)
    assert steps(place) == [1, 3, 4]


@pytest.mark.parametrize("which", ["both", "directory", "mirror"])
def test_directories_and_mirrors_without_identity_get_one(tmp_path: Path, place: str, which: str) -> None:
    mirrored(tmp_path / "run", place, 1)
    if which != "mirror":
        without_identity(as_location(tmp_path / "run"))
    if which != "directory":
        without_identity(as_location(place))

    mirrored(tmp_path / "run", place, 2)

    ours, theirs = stored_identity(as_location(tmp_path / "run")), stored_identity(as_location(place))
    assert ours.run == theirs.run is not None


def test_a_new_machine_takes_the_identity(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    mirrored(tmp_path / "run", place, 1)
    known = stored_identity(as_location(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "lost")
    mirrored(tmp_path / "run", place, 2)
    assert stored_identity(as_location(tmp_path / "run")) == known
    assert "continues the run of its mirror" not in caplog.text

    with manager(tmp_path / "elsewhere", place) as run:
        assert run.latest_step() == 2
    assert f"continues the run of its mirror {place}, which was saved in {tmp_path / 'run'}" in caplog.text
    hf.copy_checkpoint(tmp_path / "run", tmp_path / "copy")
    copy = stored_identity(as_location(tmp_path / "copy"))
    assert (copy.run, copy.mirror) == (None, None), "a copy changes nothing in the mirror of the original"


def test_a_save_that_is_overtaken_while_it_is_copied(tmp_path: Path, place: str, gate: threading.Event) -> None:
    with manager(tmp_path / "run", place) as run:
        run.save(1, tree(1))
        wait_until(run, lambda status: status.copying == 1)
        commit(run, 1, tree(100), force=True)
        gate.set()
    assert hf.load(f"{place}/1")["step"] == 100
    assert hf.verify(place).ok


def test_interrupted_copies_go_on_or_are_removed(tmp_path: Path, place: str, gate: threading.Event) -> None:
    with manager(tmp_path / "run", hf.Mirror(place, wait_secs=0.1)) as run:
        run.save(1, tree(1))
        wait_until(run, lambda status: status.copying == 1)
    assert as_location(f"{place}/1").exists()  # its marker
    assert steps(place) == []
    gate.set()
    mirrored(tmp_path / "run", place, 2)
    assert steps(place)[-1] == 2
    assert hf.verify(place).ok
    for folder in as_location(place).entries():
        assert not as_location(f"{place}/{folder.name}/checkpoint.partial").exists()


LAYOUT = hf.Layout(chunk_bytes=4096, segment_bytes=4096, data_file_bytes=40_000, upload_bytes=16_384)


class Part(Checkpointable):
    def __init__(self) -> None:
        self.w = np.arange(10_000.0)


@pytest.mark.parametrize("in_store", [True, False])
@pytest.mark.parametrize(
    ("handler", "item", "arguments"),
    [
        (hf.PyTreeCheckpointHandler(layout=LAYOUT), tree(0) | {"v": np.arange(10_000.0)}, {}),
        (hf.PyTreeCheckpointHandler(), np.arange(10_000.0), {"layout": LAYOUT}),
        (hf.handlers.PerProcessCheckpointHandler(hf.PyTreeCheckpointHandler(layout=LAYOUT)), np.arange(99_000.0), {}),
        (ComponentCheckpointHandler(layout=LAYOUT), Part(), {}),
    ],
    ids=["tree", "asked for", "per process", "components"],
)
def test_data_files_that_will_be_uploaded_are_small(
    tmp_path: Path, place: str, in_store: bool, handler: Any, item: Any, arguments: dict[str, Any]
) -> None:
    mirror = place if in_store else str(tmp_path / "mirror")
    with opened(tmp_path / "run", hf.AsyncCheckpointer(handler), mirror=mirror) as run:
        commit(run, 1, item, save_kwargs=arguments)
        sizes = [file.stat().st_size for file in (tmp_path / "run").rglob("d/*.*")]
        arrives(run, 1)
    assert (max(sizes) > LAYOUT.upload_bytes) is not in_store
    assert hf.verify(mirror).ok


# ---- trouble


@pytest.mark.parametrize(
    "error", [hf.errors.StorageUnavailableError, hf.errors.StorageFullError, hf.errors.StoragePermissionError]
)
def test_trouble_is_told_once_and_tried_again(
    tmp_path: Path, place: str, broken: Broken, caplog: pytest.LogCaptureFixture, error: type[hf.errors.StorageError]
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    with manager(tmp_path / "run", place) as run:
        sends(run, 1)
        broken.error = error
        for step in (2, 3):
            commit(run, step, tree(step))
            wait_until(run, lambda status: status.error is not None)
        assert run.all_steps() == [1, 2, 3]
        broken.error = None
        arrives(run, 3)
        wait_until(run, lambda status: status.error is None)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "the mirror failed, and it is tried again; training continues" in warnings[0]
    assert "the mirror works again" in caplog.text
    assert steps(place) == [1, 3]


def test_what_failed_copies_leave_does_not_pile_up(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tried = PendingCheckpoint.commit, []

    def refused(pending: PendingCheckpoint, record: CheckpointRecord) -> None:
        if pending.location.url.startswith(as_location(place).url) and record.step != 4:
            tried.append(record.step)
            raise hf.errors.StorageFullError("full")
        real(pending, record)

    monkeypatch.setattr(PendingCheckpoint, "commit", refused)
    with manager(tmp_path / "run", place) as run:
        for step in (1, 2, 3, 4):
            commit(run, step, tree(step))
            wait_until(run, lambda status, step=step: step in (*tried, status.step) and status.copying is None)  # type: ignore[misc]
            folders = [entry.name for entry in as_location(place).entries() if entry.is_directory]
            assert [folder for folder in folders if folder.isdigit()] == [str(step)]
    assert steps(place) == [4]


def test_the_end_says_what_lacks(tmp_path: Path, place: str, broken: Broken, caplog: pytest.LogCaptureFixture) -> None:
    with manager(tmp_path / "run", place) as run:
        sends(run, 1)
        broken.error = hf.errors.StorageFullError
        run.save(2, tree(2))
    assert f"step 2 is in {tmp_path}/run/2, and not in the mirror {place}, where the newest is step 1" in caplog.text
    assert f"holdfast cp {tmp_path}/run/2 {place}/2" in caplog.text


def test_only_a_run_with_steps_begins_while_the_mirror_is_down(
    tmp_path: Path, place: str, broken: Broken, caplog: pytest.LogCaptureFixture
) -> None:
    broken.error = hf.errors.StorageUnavailableError
    with pytest.raises(hf.errors.StorageUnavailableError) as caught:
        manager(tmp_path / "run", place)
    assert "take the option mirror away" in "".join(caught.value.__notes__)
    broken.error = None
    mirrored(tmp_path / "run", place, 1)
    broken.error = hf.errors.StorageUnavailableError
    with manager(tmp_path / "run", place) as run:
        assert run.latest_step() == 1
        commit(run, 2, tree(2))
        broken.error = None
        arrives(run, 2)
    assert "its steps are not considered" in caplog.text
    assert steps(place) == [1, 2]


def test_damage_is_not_copied(tmp_path: Path, place: str, stored: Files, caplog: pytest.LogCaptureFixture) -> None:
    with manager(tmp_path / "run", None) as run:
        run.save(1, tree(1))
    stored(f"{tmp_path}/run/1").write("state/tree.json", b"{}")
    with manager(tmp_path / "run", place) as run:
        run.acquire()
    assert steps(place) == []
    assert "step 1 is damaged, and is not copied" in caplog.text


def test_a_mirror_that_is_taken_is_left_alone(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    with manager(tmp_path / "run", place) as run:
        sends(run, 1)
        (as_location(place) / "owner.json").write_bytes(b'{"token": "another"}')  # as 0.1 does on another machine
        run.save(2, tree(2))
        wait_until(run, lambda status: status.error is not None)
    assert "another run writes there, so that this one copies nothing more" in caplog.text
    assert steps(place) == [1]
    assert steps(tmp_path / "run") == [1, 2]


def test_a_preemption_begins_only_what_fits(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    with manager(tmp_path / "run", hf.Mirror(place, save_interval_steps=1000)) as run:
        sends(run, 1)
        run._mirror._rate = 1.0  # type: ignore[union-attr]  # byte a second
        commit(run, 2, tree(2))  # is not due
        assert not run.finish_mirror(30.0)
        assert "bytes are missing there" in caplog.text
        assert run.finish_mirror(30.0) is False


def test_the_mirror_is_another_place_and_readers_have_none(tmp_path: Path, place: str) -> None:
    for directory, mirror in (("a", "a"), ("a", "a/b"), ("a/b", "a")):
        with pytest.raises(hf.errors.OptionError, match="must not contain each other"):
            manager(tmp_path / directory, str(tmp_path / mirror))
    reader = manager(tmp_path / "run", place, read_only=True)
    assert reader.mirror_status() is None
    assert reader.finish_mirror()
