"""Arrays that have not changed are sent twice: the store copies their objects for the steps after these two."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from tests.cli.commands import flip_bits
from tests.equality import assert_same
from tests.events import heard
from tests.manager.runs import commit
from tests.object_stores.conftest import Store, wait_for_mirror
from tests.object_stores.store_server import Answer, Request

import holdfast as hf
from holdfast.engine.format import crc32c, extend

Tree = dict[str, Any]

FROZEN = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)  # 4 MiB
SMALL = 400_000  # bytes; the adapter and all documents of a step take less
LAYOUT = hf.Layout(upload_bytes=2 << 20)  # the frozen array takes several objects
STEPS = 6
AFTER_TWO = [False, False, True, True, True, True]


def tree(step: int) -> Tree:
    return {"frozen": FROZEN.copy(), "adapter": np.full(30_000, step, np.float32), "step": step}


def sent(store: Store) -> int:
    """Return the bytes of all bodies since the last call."""
    found = sum(len(request.body) for request in store.server.log if request.method in ("PUT", "POST"))
    store.server.log.clear()
    return found


def save(run: hf.CheckpointManager, step: int, items: Tree) -> dict[str, Any]:
    """Save a step, wait, and return the event."""
    events = heard(run)
    commit(run, step, items)
    return events[-1]


@contextlib.contextmanager
def manager(directory: str | Path, **options: Any) -> Iterator[hf.CheckpointManager]:
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler(layout=LAYOUT))
    with hf.CheckpointManager(directory, checkpointer, options=hf.CheckpointManagerOptions(**options)) as run:
        yield run


def check(directory: str, steps: list[int]) -> None:
    """Compare each step, alone."""
    with hf.CheckpointManager(directory) as run:
        assert run.all_steps() == steps
        for step in steps[:-1]:
            assert_same(run.restore(step), tree(step))
            run.delete(step)
    assert hf.verify(directory).ok
    assert_same(hf.load(directory), tree(steps[-1]))


def test_a_run_in_a_bucket(store: Store) -> None:
    """From the third save on, only what has changed is sent."""
    with manager(f"{store.url}/run", max_to_keep=4) as run:
        shares, sizes = [], []
        for step in range(STEPS):
            report = save(run, step, tree(step))
            sizes.append(sent(store))
            shares.append(report["shared_bytes"])
            assert report["bytes"] + report["shared_bytes"] > FROZEN.nbytes
    assert [size < SMALL for size in sizes] == AFTER_TWO
    assert [size >= FROZEN.nbytes for size in shares] == AFTER_TWO
    check(f"{store.url}/run", [2, 3, 4, 5])


def test_no_object_is_copied_from_the_step_before(store: Store, tmp_path: Path) -> None:
    """One that is damaged unseen must not take the newest step and the one to fall back to; with one step, none is."""
    far: dict[str, Any] = {"mirror": hf.Mirror(f"{store.url}/mirror", save_interval_steps=2, max_to_keep=9)}
    cases: dict[str, dict[str, Any]] = {"run": {"max_to_keep": 3}, "one": {"max_to_keep": 1}, "mirror": far}
    for name, options in cases.items():
        store.server.log.clear()
        with manager(tmp_path / "run" if options is far else f"{store.url}/{name}", **options) as run:
            for step in range(9):
                save(run, step, tree(step))
                if options is far and step % 2 == 0:
                    wait_for_mirror(run, step)
        copies = [what for what in store.server.sent() if what.endswith(" copy")]
        between = {max(steps) - min(steps) for steps in map(steps_of, copies)}
        assert between == {"run": {2}, "one": set(), "mirror": {4}}[name], name


def steps_of(what: str) -> set[int]:
    """Return the steps of the objects that a request names, by their keys: ``run/4/state/d/...``."""
    return {int(step) for step in re.findall(r"(?:run|one|mirror)/(\d+)/", what)}


TROUBLE: dict[str, Callable[[Store], object]] = {
    "the service cannot copy": lambda store: fail(store, Answer(501, b"<Error><Code>NotImplemented</Code></Error>")),
    "it takes a copy for an empty object": lambda store: fail(store, Answer(200)),
    "it answers an error with the status of success": lambda store: fail(store, store.server.error(200, "Busy")),
    "it takes a copy for an upload of nothing": lambda store: takes_copies_for_uploads(store),
    "it is busy": lambda store: fail(store, store.server.error(503, "SlowDown")),
    "some copies fail": lambda store: fail(store, store.server.error(503, "SlowDown"), times=3),
    "the objects are gone": lambda store: fail(store, store.server.error(404, "NoSuchKey")),
    "answers are lost": lambda store: store.server.fail(" copy$", how="reset", times=1000),
}


def takes_copies_for_uploads(store: Store) -> None:
    def upload(request: Request) -> bool:
        store.server.put(store.bucket, unquote(request.path).split("/", 2)[2], b"")
        return True

    store.server.fail(" copy$", times=1000, when=upload, answer=Answer(200, headers={"ETag": '"empty"'}))


def fail(store: Store, answer: Answer, times: int = 1000) -> None:
    store.server.fail(" copy$", answer=answer, times=times)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("trouble", TROUBLE.values(), ids=TROUBLE)
def test_what_is_not_copied_is_sent(store: Store, trouble: Callable[[Store], object]) -> None:
    trouble(store)
    with manager(f"{store.url}/run", max_to_keep=None) as run:
        for step in range(STEPS):
            save(run, step, tree(step))
    check(f"{store.url}/run", list(range(STEPS)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("copies", [True, False], ids=["the store copies", "it does not"])
def test_the_mirror_of_a_run_gets_them_once(store: Store, tmp_path: Path, copies: bool) -> None:
    if not copies:
        fail(store, Answer(501, b"<Error><Code>NotImplemented</Code></Error>"))
    mirror = f"{store.url}/mirror"
    with manager(tmp_path / "run", mirror=hf.Mirror(mirror, max_to_keep=STEPS), max_to_keep=2) as run:
        sizes, mirrored = [], heard(run, "mirrored")
        for step in range(STEPS):
            save(run, step, tree(step))
            wait_for_mirror(run, step)
            sizes.append(sent(store))
        # What the store copies counts: the same mix of bytes will take as long at a preemption.
        status = run.mirror_status()
        assert status is not None
        assert status.bytes_per_second is not None
        assert status.bytes_per_second * mirrored[-1]["seconds"] > FROZEN.nbytes
        assert (mirrored[-1]["bytes"] < SMALL) == copies
    assert [size < SMALL for size in sizes] == (AFTER_TWO if copies else [False] * STEPS)
    check(mirror, list(range(STEPS)))


@pytest.mark.parametrize("damage", [True, False], ids=["a file was damaged", "whole"])
def test_a_run_that_is_copied(store: Store, tmp_path: Path, damage: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    with manager(tmp_path / "run", max_to_keep=None) as run:
        for step in range(STEPS):
            save(run, step, tree(step))
    if damage:  # a copy that the store has is whole all the same
        flip_bits(tmp_path / "run" / "3")
    reports = hf.copy_checkpoint(tmp_path / "run", f"{store.url}/copy")
    assert sent(store) < 2 * FROZEN.nbytes + STEPS * SMALL
    assert sum(report.sent for report in reports) < 2 * FROZEN.nbytes + STEPS * SMALL
    check(f"{store.url}/copy", list(range(STEPS)))


class BlobHandler(hf.handlers.CheckpointHandler):
    """Bytes in one file, which has the same name in every step."""

    def save(self, directory: hf.storage.Location, item: Any, **kwargs: Any) -> None:
        (directory.path / "blob").write_bytes(item)

    def restore(self, directory: hf.storage.Location, item: Any = None, **kwargs: Any) -> bytes:
        return (directory / "blob").read_bytes()


def with_checksum_of(content: bytes, other: bytes) -> bytes:
    """Return bytes whose last four are chosen so that they have the CRC-32C of others, with which all bits go along."""
    start = crc32c(content[:-4])
    wanted = extend(start, bytes(4)) ^ crc32c(other)
    rows = [(extend(start, (1 << bit).to_bytes(4, "little")) ^ extend(start, bytes(4)), 1 << bit) for bit in range(32)]
    ending = 0
    for bit in range(32):  # Gauss's elimination; the last four bytes and the checksum determine each other
        at = next(number for number, (change, _) in enumerate(rows) if change >> bit & 1)
        change, bits = rows.pop(at)
        rows = [(one ^ change, two ^ bits) if one >> bit & 1 else (one, two) for one, two in rows]
        if wanted >> bit & 1:
            wanted, ending = wanted ^ change, ending ^ bits
    return content[:-4] + ending.to_bytes(4, "little")


def test_a_checksum_alone_does_not_tell_a_file(store: Store, tmp_path: Path) -> None:
    """Files of other items have one name in all steps: that their checksums are equal does not say that they are."""
    first, between = FROZEN.tobytes(), bytes(FROZEN.nbytes)
    last = with_checksum_of(between, first)
    assert crc32c(last) == crc32c(first)
    with hf.CheckpointManager(tmp_path / "run", hf.Checkpointer(BlobHandler())) as run:
        for step, content in enumerate((first, between, last)):
            run.save(step, content)
    hf.copy_checkpoint(tmp_path / "run", f"{store.url}/copy")
    with hf.CheckpointManager(f"{store.url}/copy", hf.Checkpointer(BlobHandler())) as run:
        assert [run.restore(step) == content for step, content in enumerate((first, between, last))] == [True] * 3
