"""The index of many steps: a listing with it equals one without, after any change of the steps or of the index."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.clocks import TickingClock

import holdfast as hf
from holdfast.engine.checkpoint import sweep
from holdfast.engine.format import CheckpointRecord, crc32c
from holdfast.engine.manager import directory as directories
from holdfast.engine.steps import index as indexes
from holdfast.engine.steps import list_steps, read_record
from holdfast.engine.steps.index import INDEX, RecordIndex
from holdfast.engine.storage import Location, as_location

STEPS = range(1, 9)


@pytest.fixture(autouse=True)
def _index_of_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps have an index, and a record is noted as soon as the file system's clock has moved on."""
    monkeypatch.setattr(directories, "FEWEST", 2)
    monkeypatch.setattr(indexes, "_SETTLED", 0)


def tick(place: Path) -> None:
    """Return when the file system's clock has moved on."""
    probe = place.parent / "probe"
    probe.write_bytes(b"")
    before = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == before:
        os.utime(probe)


def writer(place: Path, **options: Any) -> hf.CheckpointManager:
    return hf.CheckpointManager(
        place,
        hf.Checkpointer(hf.JsonCheckpointHandler()),
        hf.CheckpointManagerOptions(**options),
        clock=TickingClock(1000.0),
    )


def save(run: hf.CheckpointManager, *steps: int, loss: float = 1.0) -> None:
    for step in steps:
        run.save(step, {"is": step}, metrics={"loss": loss}, force=True)
        tick(run.directory.path)


def fill(place: Path) -> Path:
    """Save steps, and have an owner that comes later note all of them."""
    with writer(place) as run:
        save(run, *STEPS)
    with writer(place) as run:
        run.acquire()
    return place


def listed(place: Path, *, index: bool = True) -> list[Any]:
    location = as_location(place)
    entries = [entry for entry in location.entries() if index or entry.name != INDEX]
    return [
        (one.series, one.step, one.location.name, one.record, one.error and str(one.error))
        for one in list_steps(location, None, entries)
    ]


def from_the_index(place: Path) -> list[int]:
    """Return the steps whose record the index has."""
    return [entry.step for entry in list_steps(as_location(place)) if entry.indexed]


def forged(place: Path, step: int, **changes: Any) -> bytes:
    return replace(read_record(as_location(place / str(step))), **changes).encode()


def noting(names: list[str], work: Callable[[Location], Any]) -> Callable[[Location], Any]:
    """Return a function that does the same, and notes the names of the folders."""

    def noted(place: Location) -> Any:
        names.append(place.name)
        return work(place)

    return noted


def test_a_reader_reads_no_record_that_the_index_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = fill(tmp_path / "run")
    read: list[str] = []
    monkeypatch.setattr(indexes, "read_record", noting(read, read_record))
    assert [entry.step for entry in list_steps(as_location(place))] == [*STEPS]
    assert read == []
    assert hf.list_checkpoints(place)[0].metrics == {"loss": 1.0}
    assert read == []
    with writer(place) as run:
        assert run.all_steps() == [*STEPS]
        save(run, 20, 21)
    assert from_the_index(place) == [*STEPS, 20]  # 21 was written too lately
    (place / INDEX).unlink()
    assert from_the_index(place) == []
    assert listed(place) == listed(place, index=False)


def test_small_runs_have_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "FEWEST", 3)
    with writer(tmp_path / "run", max_to_keep=2) as run:
        save(run, *STEPS)
    assert not (tmp_path / "run" / INDEX).exists()


def test_records_of_the_last_seconds_are_not_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two records of one tick may have the same stamp: only time tells that no other can follow."""
    monkeypatch.setattr(indexes, "_SETTLED", 3_000_000_000)
    place = fill(tmp_path / "run")
    assert from_the_index(place) == []
    monkeypatch.setattr(RecordIndex, "_stamp", lambda _self, name: (1, 2, 2, 3) if "/" in name else None)
    (place / "3" / "checkpoint.json").write_bytes(forged(place, 3, metrics={"loss": 9.0}))
    assert listed(place) == listed(place, index=False)


# ---- the index is damaged


def cut(at: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * at))


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def linked(path: Path) -> None:
    path.replace(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def huge(path: Path) -> None:
    os.truncate(path, 1 << 40)  # no memory would hold it


def line(document: Any, *head: Any) -> bytes:
    text = b"\t".join(json.dumps(part).encode() for part in (head, document))
    return b"%08x %s\n" % (crc32c(text), text)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": cut(0),
    "torn header": cut(0.001),
    "torn": cut(0.5),
    "torn at the end": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a flipped bit": flipped,
    "foreign": lambda path: path.write_text("steps: many\n"),
    "of a later version": lambda path: path.write_bytes(path.read_bytes().replace(b'"steps", 1', b'"steps", 2')),
    "a line of another program": lambda path: path.write_bytes(path.read_bytes() + b"hello\n"),
    "lines of other types": lambda path: path.write_bytes(path.read_bytes() + line({}, 1) + line(3, [1], [2], None)),
    "a nested line": lambda path: path.write_bytes(
        path.read_bytes() + b"%08x %s\n" % (crc32c(b"[" * 100000), b"[" * 100000)
    ),
    "huge": huge,
    "a directory": a_directory,
    "a link": linked,
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_index_changes_nothing_and_the_next_owner_writes_it_anew(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    place = fill(tmp_path / "run")
    damage(place / INDEX)
    elsewhere = (tmp_path / "elsewhere").read_bytes() if (tmp_path / "elsewhere").exists() else None
    assert listed(place) == listed(place, index=False)
    assert len(listed(place)) == len(STEPS)
    with writer(place) as run:
        save(run, 30, 31)
        assert run.all_steps() == [*STEPS, 30, 31]
    assert listed(place) == listed(place, index=False)
    if damage is not a_directory:
        assert from_the_index(place) == [*STEPS, 30]
    if elsewhere is not None:  # a link is replaced, never followed
        assert (tmp_path / "elsewhere").read_bytes() == elsewhere


def test_an_index_that_cannot_be_written_is_reported_once_and_needed_by_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = fill(tmp_path / "run")
    a_directory(place / INDEX)
    with writer(place) as run:
        save(run, 30, 31, 32)
        assert run.restore() == {"is": 32}
    assert [record.message for record in caplog.records if INDEX in record.message] == [
        f"{place / INDEX}: the index of steps is not written: cannot write {place / INDEX}: Is a directory"
    ]


@pytest.mark.parametrize("folder", ["../../elsewhere", "/etc", ""])
def test_a_hostile_index_leads_nowhere(tmp_path: Path, folder: str) -> None:
    place = fill(tmp_path / "run")
    lines = (place / INDEX).read_bytes().splitlines(keepends=True)
    head, document = (json.loads(part) for part in lines[3][9:].split(b"\t"))
    (place / INDEX).write_bytes(b"".join([*lines[:3], line(document, *head), *lines[4:]]))
    assert from_the_index(place) == [*STEPS]  # the test writes lines that count
    document["items"]["state"]["folder"] = folder
    (place / INDEX).write_bytes(b"".join([*lines[:3], line(document, *head), *lines[4:]]))
    assert listed(place) == listed(place, index=False)
    assert int(head[0]) not in from_the_index(place)


KILLED = """
import os, sys
import holdfast as hf
from holdfast.engine.manager import directory
from holdfast.engine.steps import index
directory.FEWEST, index._SETTLED, index._VOID = 2, 0, 0
real = os.replace
def replace(source, target):
    if str(target).endswith("steps.log"):
        if sys.argv[2] == "after":
            real(source, target)
        os._exit(9)
    real(source, target)
os.replace = replace
run = hf.CheckpointManager(sys.argv[1], hf.Checkpointer(hf.JsonCheckpointHandler()))
for step in range(40, 80):
    run.save(step, {"is": step}, force=True)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_the_index_is_written_anew(tmp_path: Path, when: str) -> None:
    place = fill(tmp_path / "run")
    os.truncate(place / INDEX, 100)
    before = (place / INDEX).read_bytes()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(place), when], check=False)
    assert done.returncode == 9
    assert ((place / INDEX).read_bytes() == before) is (when == "before")
    assert any(path.name.startswith(".holdfast-") for path in place.iterdir()) is (when == "before")
    assert listed(place) == listed(place, index=False)
    with writer(place) as run:
        run.acquire()
    assert from_the_index(place) == [one[1] for one in listed(place)]
    assert not any(path.name.startswith(".holdfast-") for path in place.iterdir())


def test_void_lines_are_dropped_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "_VOID", 4)
    with writer(tmp_path / "run", max_to_keep=3) as run:
        save(run, *range(60))
    lines = (tmp_path / "run" / INDEX).read_bytes().splitlines()
    assert 3 <= len(lines) <= 2 * 3 + 4 + 2
    assert from_the_index(tmp_path / "run") == [57, 58]


# ---- the steps change


def replaced(path: Path, content: bytes) -> None:
    status = path.stat()
    (path.parent / "new").write_bytes(content)
    os.utime(path.parent / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (path.parent / "new").replace(path)


def rewritten(path: Path, content: bytes) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("how", [replaced, rewritten])
def test_a_record_of_equal_size_and_time_under_the_same_name_is_seen(
    tmp_path: Path, how: Callable[[Path, bytes], None]
) -> None:
    place = fill(tmp_path / "run")
    record = place / "4" / "checkpoint.json"
    status = record.stat()
    how(record, forged(place, 4, metrics={"loss": 2.0}))
    assert (record.stat().st_size, record.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert hf.list_checkpoints(place)[3].metrics == {"loss": 2.0}
    assert writer(place, read_only=True).metrics(4) == {"loss": 2.0}
    content = bytearray(record.read_bytes())
    content[10] ^= 1
    how(record, bytes(content))
    assert hf.list_checkpoints(place)[3].damage is not None
    assert writer(place, read_only=True).all_steps() == [step for step in STEPS if step != 4]


def test_resume_reads_the_record_itself_where_the_disk_has_changed_it_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = fill(tmp_path / "run")
    stamps = {name: RecordIndex(as_location(place))._stamp(name) for name in (f"{n}/checkpoint.json" for n in STEPS)}
    monkeypatch.setattr(RecordIndex, "_stamp", lambda _self, name: stamps.get(name))
    flipped(place / "8" / "checkpoint.json")
    shutil.rmtree(place / "7")
    (place / "6" / "checkpoint.json").write_bytes(forged(place, 6, metrics={"loss": 5.0}))
    with writer(place) as run:
        assert run.all_steps() == [*STEPS][:6] + [8]
        assert run.restore() == {"is": 6}
        assert run.metrics(6) == {"loss": 5.0}
        assert "step 8 is damaged and passed over" in caplog.text
        run.delete(8)
    assert not (place / "8").exists()


def test_readers_beside_a_writer_see_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer appends to the index and writes it anew; readers list before and after, and write nothing."""
    monkeypatch.setattr(indexes, "_VOID", 1)
    place = fill(tmp_path / "run")
    readers = [writer(place, read_only=True) for _ in range(2)]
    with writer(place, max_to_keep=4) as run:
        for step in range(20, 40):
            save(run, step)
            before = RecordIndex(run.directory)._stamp(INDEX)
            for reader in readers[step % 2 :]:
                reader.reload()
                assert reader.all_steps() == run.all_steps()
                assert reader.metrics(step) == {"loss": 1.0}
            assert RecordIndex(run.directory)._stamp(INDEX) == before
    assert listed(place) == listed(place, index=False)


def test_a_copied_run_is_read_and_its_index_is_not_believed(tmp_path: Path) -> None:
    place = fill(tmp_path / "run")
    shutil.copytree(place, tmp_path / "copy")
    assert from_the_index(tmp_path / "copy") == []
    assert [one[1:4:2] for one in listed(tmp_path / "copy")] == [one[1:4:2] for one in listed(place)]


def test_an_owner_looks_only_into_folders_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = fill(tmp_path / "run")
    swept: list[str] = []

    monkeypatch.setattr(directories, "sweep", noting(swept, sweep))
    with writer(place) as run:
        run.acquire()
    assert swept == []
    (place / "3" / "checkpoint.partial").write_text("{}")
    (place / "5" / ".holdfast-0123").write_text("{}")
    with writer(place) as run:
        run.acquire()
    assert sorted(swept) == ["3", "5"]
    assert {path.name for step in (3, 5) for path in (place / str(step)).iterdir()} == {"checkpoint.json", "state"}


# ---- any sequence


def in_any_order() -> st.SearchStrategy[list[tuple[str, int, int]]]:
    names = (
        *("save", "save", "replace", "delete", "rm -r", "copy", "move", "metrics", "pin", "late", "edit", "rewrite"),
        *("owner", "tear", "foreign", "reload"),
    )
    return st.lists(st.tuples(st.sampled_from(names), st.integers(1, 6), st.integers(1, 6)), min_size=4, max_size=14)


@contextlib.contextmanager
def small_index() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexes, "_VOID", 1)
        yield


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(in_any_order())
def test_a_listing_with_the_index_equals_one_without(
    tmp_path_factory: pytest.TempPathFactory, story: list[tuple[str, int, int]]
) -> None:
    place = tmp_path_factory.mktemp("any") / "run"
    with small_index(), contextlib.ExitStack() as runs:
        run = runs.enter_context(writer(place))
        save(run, 1, 2, 3)
        for what, step, other in story:
            folder, target = place / str(step), place / str(other)
            with contextlib.suppress(hf.HoldfastError):  # the run has not noticed what was removed
                if what == "save":
                    save(run, max([*run.all_steps(), 10]) + 1, loss=float(step))
                elif what == "replace":
                    save(run, step, loss=float(other))
                elif what == "delete":
                    run.delete(step)
                elif what == "rm -r":
                    shutil.rmtree(folder, ignore_errors=True)
                elif what in ("copy", "move") and folder.exists() and step != other:
                    shutil.rmtree(target, ignore_errors=True)
                    shutil.copytree(folder, target) if what == "copy" else folder.replace(target)
                elif what == "metrics":
                    run.record_metrics(step, {"loss": float(other)})
                elif what == "pin":
                    run.pin(step)
                elif what == "late":
                    hf.record_metrics(place, step, {"loss": float(other)})
                elif what in ("edit", "rewrite") and (folder / "checkpoint.json").exists():
                    change = rewritten if what == "rewrite" else replaced
                    change(folder / "checkpoint.json", forged(place, step, time=float(other)))
                elif what == "owner":
                    run.close()
                    run = runs.enter_context(writer(place))
                    run.acquire()
                elif what == "tear" and (place / INDEX).exists():
                    os.truncate(place / INDEX, (place / INDEX).stat().st_size * other // 7)
                elif what == "foreign":
                    (place / INDEX).write_bytes(b"0" * step)
                elif what == "reload":
                    run.reload()
            with contextlib.suppress(hf.HoldfastError):
                run.wait_until_finished()
            tick(place)
            assert listed(place) == listed(place, index=False)
        run.reload()
        assert run.all_steps() == [one[1] for one in listed(place, index=False) if isinstance(one[3], CheckpointRecord)]
