"""Copies of checkpoints: exact, verified on the way, and continued where they were interrupted."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.kinds import Components
from tests.clocks import Waiting
from tests.damage import flipped
from tests.earlier_versions.programs import __file__ as earlier
from tests.equality import assert_same
from tests.fixtures import StoredFiles
from tests.processes.harness import Process, run_outcomes

import holdfast as hf
from holdfast.engine.checkpoint import copying
from holdfast.engine.checkpoint.copying import BESIDE, Transfer, copied_step
from holdfast.engine.clock import bytes_per_second
from holdfast.engine.errors import FormatVersionError
from holdfast.engine.format import encode_document
from holdfast.engine.steps import read_record
from holdfast.engine.storage import Location, as_location

SMALL = hf.Layout(chunk_bytes=16_384, segment_bytes=65_536, data_file_bytes=1 << 20)
Files = Callable[[str], StoredFiles]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data files of a quarter of a MiB take the way of large ones, span by span and piece by piece."""
    monkeypatch.setattr(copying, "SMALL_BYTES", 1 << 16)
    monkeypatch.setattr(copying, "SPAN_BYTES", 1 << 17)
    monkeypatch.setattr(copying, "PIECE_BYTES", 12_288)  # ends in the middle of chunks, and of checksums


def tree(seed: int = 0) -> dict[str, Any]:
    numbers = np.random.default_rng(seed)
    return {
        "w": numbers.normal(size=(700, 700)).astype(np.float32),
        "small": [numbers.normal(size=3) for _ in range(200)],
        "text": "x",
        "step": seed,
    }


def save(place: str, seed: int = 0, **options: Any) -> str:
    hf.save(place, tree(seed), layout=SMALL, **options)
    return place


def several_items(place: str) -> None:
    checkpointers = {
        "state": hf.Checkpointer(hf.PyTreeCheckpointHandler(layout=SMALL)),
        "facts": hf.Checkpointer(hf.JsonCheckpointHandler()),
        "own": hf.Checkpointer(hf.handlers.PerProcessCheckpointHandler()),
    }
    with hf.CheckpointManager(f"{place}-run", checkpointers) as run:
        run.save(7, {"state": tree(), "facts": {"a": [1]}, "own": {"seed": np.arange(5)}}, metrics={"loss": 0.5})
    copy(f"{place}-run/7", as_location(place))


@pytest.fixture(params=["disk", "store"])
def target(request: pytest.FixtureRequest, tmp_path: Path, place: str) -> Location:
    return as_location(f"{tmp_path}/copy" if request.param == "disk" else f"{place}/copy")


KINDS: dict[str, Callable[[str], object]] = {
    "tree": save,
    "compressed": lambda place: hf.save(place, tree(), layout=replace(SMALL, compression=1)),
    "empty": lambda place: hf.save(place, {"nothing": np.zeros((0, 3)), "none": None}),
    "several items": several_items,
}


def contents(place: str, stored: Files) -> dict[str, bytes]:
    """Returns the content of the files by item, without the names of folders, and without the record."""
    record, files = read_record(as_location(place)), stored(place).read()
    return {
        f"{name}/{path}": files[f"{item.folder}/{path}"] for name, item in record.items.items() for path in item.files
    }


def assert_whole(copy: str, original: str, stored: Files) -> None:
    assert contents(copy, stored) == contents(original, stored)
    assert hf.verify(copy).ok


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_the_same_files_wherever_it_goes(tmp_path: Path, place: str, stored: Files, kind: str) -> None:
    original, there, back = f"{tmp_path}/original", f"{place}/there", f"{tmp_path}/back"
    KINDS[kind](original)
    (first,) = hf.copy_checkpoint(original, there)
    (second,) = hf.copy_checkpoint(there, back)
    for copy in (there, back):
        assert_whole(copy, original, stored)
        assert read_record(as_location(copy)).fingerprint == read_record(as_location(original)).fingerprint
    assert first.sent == first.bytes == second.sent == read_record(as_location(original)).nbytes
    assert not list(Path(back).glob("checkpoint.partial"))


def test_checkpoints_of_earlier_versions_are_copied(tmp_path: Path) -> None:
    copied = 0
    for source in (Path(earlier).parent / "v0_1_0").glob("*/"):
        with contextlib.suppress(hf.CheckpointNotFoundError):
            copied += len(hf.copy_checkpoint(source, tmp_path / source.name))
            assert hf.verify(tmp_path / source.name).ok
    assert copied


def test_a_tree_of_components_is_copied(tmp_path: Path) -> None:
    components = Components()
    components.save(f"{tmp_path}/a", 1)
    hf.copy_checkpoint(tmp_path / "a", tmp_path / "b")
    assert components.find(f"{tmp_path}/b") == 1
    with pytest.raises(hf.CheckpointExistsError, match="tree of components is not replaced"):
        hf.copy_checkpoint(save(f"{tmp_path}/c"), tmp_path / "b", overwrite=True)


def test_another_checkpoint_is_replaced_only_on_request(tmp_path: Path) -> None:
    original, other = save(f"{tmp_path}/original", 1), save(f"{tmp_path}/other", 2)
    with pytest.raises(hf.CheckpointExistsError, match=r"another checkpoint is there.*overwrite=True"):
        hf.copy_checkpoint(original, other)
    assert_same(hf.load(other), tree(2))
    hf.copy_checkpoint(original, other, overwrite=True)
    assert_same(hf.load(other), tree(1))
    (again,) = hf.copy_checkpoint(original, other)
    assert again.sent == 0


@pytest.mark.parametrize("remote", [False, True])
def test_a_damaged_byte_anywhere_is_refused(tmp_path: Path, place: str, stored: Files, remote: bool) -> None:
    original = save(f"{place}/original" if remote else f"{tmp_path}/original")
    files, target = stored(original), as_location(tmp_path / "copy")
    whole = files.read()
    large = max(whole, key=lambda path: len(whole[path]))
    damaged: list[tuple[str, bytes | None]] = []
    for path, position in [(path, 0) for path in whole] + [(large, at) for at in (20_000, 16_384, 16_387, 300_001)]:
        damaged.append((path, flipped(whole[path], position)))
    for path in set(whole) - {"checkpoint.json"}:
        damaged += [(path, whole[path][:-1]), (path, None)]
        if not remote:  # of an object, only the bytes that were saved are read
            damaged.append((path, whole[path] + b"x"))
    for path, found in damaged:
        if found is None:
            files.remove(path)
        else:
            files.write(path, found)
        with pytest.raises(hf.DamagedCheckpointError, match=path.rpartition("/")[2]):
            hf.copy_checkpoint(original, target)
        assert not target.exists(), path
        files.write(path, whole[path])
    hf.copy_checkpoint(original, target)
    assert hf.verify(target.url).ok


# ---- interrupted


class Interrupted(Exception):  # noqa: N818 - stands for any error that ends a copy
    """Ends a copy."""


class Ending(Transfer):
    """Ends a copy after so many pieces."""

    def __init__(self, count: int) -> None:
        super().__init__(None)
        self.count, self.pieces, self._numbers = count, 0, itertools.count(1)  # several threads take their turns

    def take(self, count: int) -> None:
        self.pieces = number = next(self._numbers)
        if number > self.count:
            raise Interrupted
        super().take(count)


def copy(original: str, target: Location, transfer: Transfer | None = None, **options: Any) -> None:
    source = as_location(original)
    with copied_step(source, target, read_record(source), transfer=transfer, **options):
        if isinstance(transfer, Ending):
            transfer.take(0)  # right before the commit


def calls(original: str, target: str) -> int:
    """Returns at how many points a copy may end."""
    counter = Ending(1 << 30)
    copy(original, as_location(target), counter)
    as_location(target).remove_tree()
    return counter.pieces


def test_a_copy_goes_on_where_it_was_interrupted(tmp_path: Path, target: Location, stored: Files, every: bool) -> None:
    original = save(f"{tmp_path}/original")
    record = read_record(as_location(original))
    total = calls(original, target.url)
    sent = []
    for count in range(0, total, 1 if every else total // 9):
        with pytest.raises(Interrupted):
            copy(original, target, Ending(count))
        with pytest.raises(hf.CheckpointNotFoundError):
            hf.load(target.url)
        transfer = Transfer()
        copy(original, target, transfer=transfer)
        sent.append(transfer.sent)
        assert transfer.done == record.nbytes
        assert_whole(target.url, original, stored)
        target.remove_tree()
    assert sent[0] == record.nbytes
    assert not target.is_local or sent == sorted(sent, reverse=True)  # uploads overtake each other
    assert sent[-1] < record.nbytes // 2


def test_a_file_that_was_torn_is_sent_again(tmp_path: Path, stored: Files) -> None:
    """A crash may leave a file of the right length whose bytes never arrived."""
    original, target = save(f"{tmp_path}/original"), as_location(tmp_path / "copy")
    with pytest.raises(Interrupted):
        copy(original, target, Ending(calls(original, f"{tmp_path}/x") - 1))
    torn = max(Path(target.url).rglob("d/*"), key=lambda one: one.stat().st_size)
    torn.write_bytes(bytes(torn.stat().st_size))
    transfer = Transfer()
    copy(original, target, transfer=transfer)
    assert transfer.sent == torn.stat().st_size
    assert_whole(target.url, original, stored)


@pytest.mark.parametrize("how", ["copied", "saved"])
def test_the_rest_of_another_checkpoint_is_not_used(
    tmp_path: Path, place: str, target: Location, stored: Files, how: str
) -> None:
    first = save(f"{tmp_path}/first", 1)
    with pytest.raises(Interrupted):
        copy(first, target, Ending(calls(first, f"{place}/x") - 1))
    if how == "saved":
        save(target.url, 2)
    else:
        (report,) = hf.copy_checkpoint(save(f"{tmp_path}/second", 2), target)
        assert report.sent == report.bytes
    assert_same(hf.load(target.url), tree(2))
    assert hf.verify(target.url).ok
    record = read_record(target)
    named = {f"{item.folder}/{path}" for item in record.items.values() for path in item.files}
    assert set(stored(target.url).read()) == {*named, "checkpoint.json"}


def copies(process: Process, source: str, destination: str) -> int:
    process.mark(type(as_location(source)), "write_data", "a data file is written", after=True)
    (report,) = hf.copy_checkpoint(source, destination)
    return report.sent


def test_killed_in_the_middle_of_a_copy(tmp_path: Path, stored: Files) -> None:
    layout = hf.Layout(chunk_bytes=1 << 20, segment_bytes=1 << 20, data_file_bytes=2 << 20)
    original, target = f"{tmp_path}/original", f"{tmp_path}/copy"
    hf.save(original, {"w": np.random.default_rng(0).normal(size=(1 << 20,))}, layout=layout)
    run_outcomes(copies, 1, original, target, kill=(0, "a data file is written"))
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load(target)
    (report,) = hf.copy_checkpoint(original, target)
    assert 0 < report.sent < report.bytes - (1 << 20)
    assert_whole(target, original, stored)


# ---- whole runs


def run(directory: str, steps: tuple[int, ...], **options: Any) -> None:
    made = hf.CheckpointManagerOptions(**options)
    with hf.CheckpointManager(directory, options=made, metadata={"who": "me"}) as manager:
        for step in steps:
            manager.save(step, {"w": np.full(9, step)}, metrics={"loss": 1 / step}, custom_metadata={"n": step})
        manager.wait_until_finished()
        manager.pin(2)


@pytest.mark.parametrize("prefix", [None, "a-"])
def test_a_run_is_copied_with_what_belongs_to_it(tmp_path: Path, place: str, prefix: str | None) -> None:
    """Later, only new steps and metrics follow."""
    options = hf.CheckpointManagerOptions(step_prefix=prefix)
    run(f"{tmp_path}/run", (1, 2), step_prefix=prefix)
    assert [one.step for one in hf.copy_checkpoint(tmp_path / "run", place)] == [1, 2]
    with hf.CheckpointManager(tmp_path / "run", options=options) as manager:
        manager.save(3, {"w": np.full(9, 3)}, metrics={"loss": 1 / 3})
    for step in (1, 3):
        hf.record_metrics(tmp_path / "run", step, {"late": 9}, step_prefix=prefix)
    done = hf.copy_checkpoint(tmp_path / "run", place)
    assert [(one.step, one.sent) for one in done] == [(1, 0), (2, 0), (3, done[2].bytes)]
    with hf.CheckpointManager(place, options=options) as manager:
        assert manager.all_steps() == [1, 2, 3]
        assert manager.metadata() == {"who": "me"}
        assert [manager.metrics(step) for step in (1, 3)] == [{"loss": 1, "late": 9}, {"loss": 1 / 3, "late": 9}]
        assert manager.custom_metadata(1) == {"n": 1}
        assert "pinned" in manager.why_kept(2)
        assert manager.restore()["w"].tolist() == [3] * 9


@pytest.mark.parametrize(
    ("file", "content", "error", "message"),
    [
        ("state/tree.json", b"{}", hf.DamagedCheckpointError, r"damaged steps were .* step 2: .*2/state/tree.json"),
        ("checkpoint.json", encode_document("checkpoint", {}, version=9), FormatVersionError, "step 2: .* version 9"),
    ],
    ids=["damaged", "newer version"],
)
def test_the_steps_of_a_run_that_can_be_read_are_copied(
    tmp_path: Path, stored: Files, place: str, file: str, content: bytes, error: type[Exception], message: str
) -> None:
    run(f"{tmp_path}/run", (1, 2, 3))
    stored(f"{tmp_path}/run/2").write(file, content)
    with pytest.raises(error, match=f"(?s){message}"):
        hf.copy_checkpoint(tmp_path / "run", place)
    assert [one.step for one in hf.list_checkpoints(place)] == [1, 3]


@pytest.mark.parametrize(
    ("source", "destination", "error"),
    [
        ("missing", "copy", hf.CheckpointNotFoundError),
        ("original", "original/inside", hf.errors.OptionError),
        ("original", "full", hf.CheckpointExistsError),
    ],
)
def test_what_cannot_be_copied(tmp_path: Path, source: str, destination: str, error: type[Exception]) -> None:
    save(f"{tmp_path}/original")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(error):
        hf.copy_checkpoint(tmp_path / source, tmp_path / destination)
    assert (tmp_path / "full" / "file").read_text() == "mine"


# ---- bandwidth and memory


def test_the_bandwidth_is_shared_by_all_threads(tmp_path: Path) -> None:
    time, original = Waiting(), save(f"{tmp_path}/original")
    nbytes = read_record(as_location(original)).nbytes
    copy(original, as_location(tmp_path / "copy"), Transfer(nbytes / 100, changed=time, now=lambda: time.now))
    assert time.now >= 99


@pytest.mark.parametrize(
    ("rate", "saves", "takes"),
    [
        (None, {}, 0),
        (None, {0: 7}, 7),
        (None, {0: 7.25}, 7.25),
        (None, {0: 1000}, 100),  # a save that does not end
        (8 * BESIDE, {}, 12.5),
        (8 * BESIDE, {0: 4, 9: 12}, 18.625),  # 4 in the first save, 40 until the next, 3 in that, and 53
        (8 * BESIDE, {0: 1000}, 100),
        (BESIDE / 8, {0: 1000}, 800),
    ],
)
def test_what_gives_way_goes_on_at_once_and_never_stops(
    rate: float | None, saves: dict[float, float], takes: float
) -> None:
    transfer: Transfer
    begins = {at: lambda: transfer.give_way(True) for at in saves}
    ends = {at: lambda: transfer.give_way(False) for at in saves.values()}
    time = Waiting({**begins, **ends})
    transfer = Transfer(rate, changed=time, now=lambda: time.now)
    transfer.give_way(0 in saves)
    for _ in range(100):
        transfer.take(int(BESIDE))
    assert time.now == pytest.approx(takes)


def test_the_measured_rate_is_that_of_a_copy_that_does_not_give_way() -> None:
    now = [0.0]
    transfer = Transfer(now=lambda: now[0])
    rates = []
    for gives_way, arrived in ((False, 0), (True, 500), (False, 3), (True, 100), (True, 7)):
        transfer.passed(arrived)
        transfer.give_way(gives_way)
        now[0] += 10
        rates.append(transfer.rate)
    assert rates == [None, 50, 25, 30, 30]


def test_nothing_waits_at_the_end() -> None:
    transfer: Transfer
    time = Waiting({5.0: lambda: transfer.end(Interrupted())})
    transfer = Transfer(1.0, changed=time, now=lambda: time.now)
    for _ in range(3):
        with pytest.raises(Interrupted):
            transfer.take(1000)
    assert time.now == 5


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        *(("50 MB/s", 5e7), ("1.5GiB", 1.5 * (1 << 30)), (1000, 1000.0), ("8k", 8000.0), ("77", 77.0)),
        *((wrong, None) for wrong in ("", "fast", "-1", 0, True, float("inf"), "5 TB", "1 MB/h")),
    ],
)
def test_rates(text: Any, rate: float | None) -> None:
    if rate is not None:
        assert bytes_per_second(text) == rate
    else:
        with pytest.raises(hf.errors.OptionError, match="is not a rate"):
            hf.copy_checkpoint("a", "b", max_bandwidth=text)


@pytest.mark.sweep
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    hf.save(tmp_path / "large", {f"w{n}": np.zeros(1 << 24, np.uint8) for n in range(80)})
    little_memory = request.getfixturevalue("little_memory")
    (report,) = hf.copy_checkpoint(tmp_path / "large", tmp_path / "copy")
    assert report.bytes > little_memory
