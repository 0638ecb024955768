"""What survives a process that dies, or a power cut, before any system call of a save.

The system calls that change the file system are recorded. Their order is checked as it is, and they are cut off at each
one in turn: everything that had not been synced until then may be lost, and what is left must make sense.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.disk import Crash, Disk
from tests.checkpoint.kinds import TextFiles
from tests.equality import assert_same
from tests.manager.runs import commit

import holdfast as hf
from holdfast.engine.arrays import reuse


def tree(step: int, edition: int = 0) -> dict[str, Any]:
    weights = np.full(1500, step + edition / 10)
    return {"edition": edition, "weights": weights, "frozen": np.arange(20_000), "note": f"{step} {edition}"}


# ---- the order


def test_order_of_one_save_and_of_its_deletion(disk: Disk) -> None:
    run = disk.root / "new" / "run"
    told: list[int] = []
    with hf.CheckpointManager(run) as manager:
        manager.events.add_listener(lambda event: told.append(len(disk.calls)) if event["event"] == "saved" else None)
        commit(manager, 7, tree(7))
        calls = list(disk.calls)
        disk.calls.clear()
        manager.delete(7)
        assert disk.calls[:2] == [("rename", "new/run/7/checkpoint.deleted"), ("fsync", "new/run/7")]
        assert disk.calls[-2:] == [("unlink", "new/run/7/checkpoint.deleted"), ("rmdir", "new/run/7")]
    committed = calls.index(("rename", "new/run/7/checkpoint.json"))
    before, after = calls[:committed], calls[committed + 1 :]
    written = [path for name, path in before if name in ("create", "truncate") and path.startswith("new/run/7/")]
    names = {re.sub("^[0-9a-f]{8}", "*", Path(path).name) for path in written}
    assert names > {"*.0.0", "index", "tree.json", "manifest.ocdbt"}
    marker = "new/run/7/checkpoint.partial"
    marked = calls.index(("create", marker))
    first = min(i for i, call in enumerate(calls) if call[1].startswith("new/run/7/") and call[1] != marker)
    assert ("fsync", "new/run/7") in calls[marked:first], "the marker is not durable before what it marks"
    for path in set(written) - {marker}:
        last_change = max(i for i, call in enumerate(before) if call[1] == path and call[0] != "fsync")
        assert ("fsync", path) in before[last_change:], f"{path} is not synced before the record"
    named = {path for name, path in before if name in ("create", "mkdir")} - set(written[-1:])
    for path in named - {"new/run/owner.json", "new/run/events.jsonl"}:
        first = min(i for i, call in enumerate(before) if call[1] == path)
        assert ("fsync", str(Path(path).parent)) in before[first:], f"the name of {path} is not synced"
    record = written[-1]
    assert ".holdfast-" in record
    synced = before[before.index(("create", record)) + 1 :]
    assert {name for name, _ in synced} == {"fsync"}, "something changes between the last write and the record's name"
    assert {record, "new/run/7", "new/run"} < {path for _, path in synced}
    assert after[0] == ("fsync", "new/run/7"), "the record's own name is synced before anything else happens"
    assert ("unlink", marker) in after
    assert told[0] > committed + 1, "a save is told to be done that is not synced"


def test_nothing_is_synced_without_need(disk: Disk) -> None:
    """Each file and directory once; the checkpoint's directory for its marker, for its items and for its record."""
    hf.save(disk.root / "new", tree(7))
    synced = [re.sub("[0-9a-f]{8,}", "*", path) for name, path in disk.calls if name == "fsync"]
    once = [".", "new/.holdfast-*", "new/state", "new/state/d", "new/state/d/*.0.0"]
    once += ["new/state/d/index", "new/state/manifest.ocdbt", "new/state/tree.json"]
    assert sorted(synced) == sorted([*once, "new", "new", "new"])


NUMBERS, TEXTS, FACTS = {"w": np.arange(3000.0)}, {"inner/most/one": "first", "inner/most/two": "second"}, {"a": 1}
SURVIVORS: dict[str, tuple[hf.handlers.CheckpointHandler, Any, dict[str, Any]]] = {
    "a tree": (hf.PyTreeCheckpointHandler(), NUMBERS, {}),
    "aggregated leaves": (hf.PyTreeCheckpointHandler(), NUMBERS, {"save_args": hf.SaveArgs(aggregate=True)}),
    "json": (hf.JsonCheckpointHandler(), FACTS, {}),
    "shares": (hf.handlers.PerProcessCheckpointHandler(hf.PyTreeCheckpointHandler()), NUMBERS, {}),
    "files of a user": (TextFiles(), TEXTS, {}),  # its item has folders alone directly inside
}


def step_1(run: Path, items: Any) -> Any:
    return hf.CheckpointManager(run, items).restore(1)


@pytest.mark.parametrize(("handler", "item", "given"), SURVIVORS.values(), ids=SURVIVORS)
@pytest.mark.parametrize("how", ["by its handler", "saved", "copied", "in a manager"])
def test_an_item_survives_a_power_cut(
    disk: Disk, handler: hf.handlers.CheckpointHandler, item: Any, given: dict[str, Any], how: str
) -> None:
    """So do the files that a handler of ours calls durable, which a handler that calls it hands on as they are."""
    place = disk.root / "a" / "b" / "checkpoint"
    checkpointer = hf.Checkpointer(handler)
    items = {"one": checkpointer, "facts": hf.Checkpointer(hf.JsonCheckpointHandler())}
    restore: Callable[[], Any] = partial(checkpointer.restore, place)
    expected = item
    if how == "by its handler":
        folder = hf.storage.as_location(place)
        folder.make_directory()
        files = handler.save(folder, item, **given)
        if isinstance(handler, TextFiles):
            assert files is None
            return
        restore = partial(handler.restore, folder, files=files)
    elif how == "in a manager":
        with hf.CheckpointManager(place, items) as manager:
            manager.save(1, {"one": item, "facts": FACTS}, save_kwargs={"one": given})
        expected = {"one": item, "facts": FACTS}
        restore = partial(step_1, place, items)
    else:
        checkpointer.save(place, item, **given)
        if how == "copied":
            hf.copy_checkpoint(place, disk.root / "copied")
            restore = partial(checkpointer.restore, disk.root / "copied")
    disk.cut_power(None)
    assert repr(restore()) == repr(expected)


# ---- cut off at every call

OPTIONS = hf.CheckpointManagerOptions(max_to_keep=2)
State = dict[int, int]  # the edition of every step that is there


def save(step: int, edition: int = 0) -> Callable[[hf.CheckpointManager], object]:
    saved = tree(step, edition)
    return lambda manager: commit(manager, step, saved, metrics={"loss": step}, force=edition > 0)


# What a run does, each with the states that may be found after it was cut off in it, the last if not.
HISTORY: list[tuple[list[State], Callable[[hf.CheckpointManager], object]]] = [
    ([{}, {1: 0}], save(1)),
    ([{1: 0}, {1: 0, 2: 0}], save(2)),
    ([{1: 0, 2: 0}, {1: 0, 2: 0, 3: 0}, {2: 0, 3: 0}], save(3)),
    ([{2: 0, 3: 0}, {2: 0, 3: 1}], save(3, 1)),
    ([{2: 0, 3: 1}], lambda manager: manager.pin(2)),
    ([{2: 0, 3: 1}], lambda manager: manager.record_metrics(3, {"accuracy": 0.5})),
    ([{2: 0, 3: 1}, {2: 0, 3: 2}], save(3, 2)),
    ([{2: 0, 3: 2}, {2: 0}], lambda manager: manager.delete(3)),
    ([{2: 0}, {2: 0, 3: 3}], save(3, 3)),
    ([{2: 0, 3: 3}, {2: 0, 3: 3, 4: 0}], save(4)),  # shares a file with step 2
    ([{2: 0, 3: 3, 4: 0}, {2: 0, 3: 3, 4: 0, 5: 0}, {2: 0, 4: 0, 5: 0}], save(5)),  # and this one with step 3
]


def begin(root: Path) -> hf.CheckpointManager:
    return hf.CheckpointManager(root, options=OPTIONS, metadata={"name": "run"})


def live(root: Path, allowed: list[State]) -> bool:
    """Runs the history until it is cut off; leaves in ``allowed`` what may be found then. Returns whether it ended."""
    manager = begin(root)
    try:
        manager.acquire()
        for states, act in HISTORY:
            allowed[:] = states
            act(manager)
            allowed[:] = states[-1:]
        manager.close()
        return True
    except (Crash, hf.HoldfastError):
        with contextlib.suppress(hf.HoldfastError):  # what a process that is gone would not tell either
            manager.check_for_errors()
        with contextlib.suppress(hf.HoldfastError, Crash):
            manager.close()
        return False


def check(root: Path, allowed: list[State]) -> None:
    """What must be so after an interruption: to a reader, to the next run, and after that."""
    found = {summary.step: summary for summary in hf.list_checkpoints(root)}
    trees = {step: hf.load(root / str(step)) for step in found}
    state = {step: int(found["edition"]) for step, found in trees.items()}
    assert state in allowed
    assert [summary.damage for summary in found.values()] == [None] * len(found)
    with begin(root) as manager:
        assert manager.all_steps() == sorted(state)
        manager.acquire()
        assert manager.all_steps() == sorted(state)
        assert manager.metadata() == {"name": "run"}
        for step, edition in state.items():
            assert_same(trees[step], tree(step, edition))
        check_clean(root, state)
        manager.save(9, tree(9))
        assert manager.restore(9)["note"] == "9 0"


def check_clean(root: Path, state: State) -> None:
    """Nothing is there that belongs to no checkpoint, but for empty folders, which may be anybody's."""
    left = {path.name for path in root.iterdir() if not (path.is_dir() and not any(path.iterdir()))}
    assert left <= {str(step) for step in state} | {"owner.json", "options.json", "events.jsonl", "metadata"}
    for step in state:
        record = json.loads((root / str(step) / "checkpoint.json").read_bytes())
        files = {f"{item['folder']}/{path}" for item in record["items"].values() for path in item["files"]}
        present = {str(path.relative_to(root / str(step))) for path in (root / str(step)).rglob("*") if path.is_file()}
        assert present == files | {"checkpoint.json"}


@pytest.mark.parametrize(
    ("power", "first"),
    [
        pytest.param("stays", 0, id="the process dies"),
        pytest.param("all", 2, id="all that is not synced is lost"),
        pytest.param("some", 4, id="some that is not synced is lost"),
    ],
)
@pytest.mark.parametrize(
    "stride", [pytest.param(11, id="some calls"), pytest.param(1, id="every call", marks=pytest.mark.sweep)]
)
def test_cut_off_at_any_call(disk: Disk, monkeypatch: pytest.MonkeyPatch, power: str, first: int, stride: int) -> None:
    monkeypatch.setattr(reuse, "SMALLEST_FILE_BYTES", 1)
    generator = random.Random(0)
    for number in itertools.count(first if stride > 1 else 0, stride):
        root = disk.root / str(number)
        root.mkdir()
        disk.sync()
        disk.crash_at = number
        allowed: list[State] = [{}]
        ended = live(root, allowed)
        assert ended is not disk.crashed
        disk.recover()
        if power != "stays":
            disk.cut_power(None if power == "all" else generator)
        try:
            check(root, allowed)
        except BaseException as error:
            error.add_note(f"after call {number}, {disk.calls[number - 1 : number]}; allowed: {allowed}")
            raise
        if ended:
            break
    assert number > 200
    assert ("link", "5/state/d") in {(name, re.sub("/[^/]*$", "", path.partition("/")[2])) for name, path in disk.calls}
