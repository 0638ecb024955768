"""A run is killed with SIGKILL at any request of a save, and of the deletion after it."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import numpy as np
import pytest
from tests.object_stores.conftest import Store
from tests.processes.harness import Process, run_outcomes, told

import holdfast as hf
from holdfast.engine.steps import read_record

pytestmark = pytest.mark.xdist_group("stores")

AZURE = True

SMALL = hf.Layout(chunk_bytes=32_768, segment_bytes=32_768, data_file_bytes=65_536)
EVERY, EVERY_SMALL = 18, 5
"""The client is killed at one request out of so many; 1 takes two minutes."""


# The columns of the array: of a tree that is a folder, and of one that is a zip file.
COLUMNS = {"folder": 500, "zip file": 100}


def tree(step: int, columns: int) -> dict[str, Any]:
    return {"w": np.full((180, columns), step, np.float32), "step": step}


def manager(url: str, **options: Any) -> hf.CheckpointManager:
    handler = hf.PyTreeCheckpointHandler(layout=SMALL)
    return hf.CheckpointManager(
        url, hf.AsyncCheckpointer(handler), hf.CheckpointManagerOptions(max_to_keep=2, **options)
    )


def train(process: Process, environment: dict[str, str], url: str, steps: list[int], columns: int) -> list[int]:
    """Saves steps, one after the other."""
    assert process.count == 1
    os.environ.update(environment)
    with manager(url) as run:
        for step in steps:
            run.save(step, tree(step, columns), force=True)
            run.wait_until_finished()
        return run.all_steps()


def check_all_whole(url: str, columns: int) -> list[int]:
    """Checks that every listed step is whole and holds the saved values."""
    reader = manager(url, read_only=True)
    for step in reader.all_steps():
        found = reader.restore(step)
        assert found["step"] == step
        assert np.array_equal(found["w"], tree(step, columns)["w"])
    assert hf.verify(url).ok
    return reader.all_steps()


def check_nothing_left(store: Store) -> None:
    """Checks that every object belongs to a step, or to the run."""
    wanted = {"run/owner.json", "run/options.json"}
    for step in manager(f"{store.url}/run", read_only=True).all_steps():
        record = read_record(hf.storage.as_location(f"{store.url}/run/{step}"))
        wanted.add(f"run/{step}/checkpoint.json")
        for item in record.items.values():
            wanted.update(f"run/{step}/{path}" for path in item.paths)
    assert set(store.stored("run/")) == wanted


def writer(store: Store) -> int:
    """Returns the process that owns the directory."""
    found: int = json.loads(store.server.buckets[store.bucket]["run/owner.json"].content)["pid"]
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize(
    ("steps", "done", "first"),
    [([3], True, 1), ([3], False, 5), ([2], True, 9), ([2], False, 13)],
    ids=["new step, done", "new step, not done", "replaced step, done", "replaced step, not done"],
)
def test_killed_in_the_middle(store: Store, kind: str, steps: list[int], done: bool, first: int) -> None:
    url, columns = f"{store.url}/run", COLUMNS[kind]
    every = EVERY if kind == "folder" else EVERY_SMALL
    with manager(url) as run:
        for step in (1, 2):
            run.save(step, tree(step, columns))
    before = dict(store.server.buckets[store.bucket])
    kills = 0
    for number in range((first + (store.url[0] == "g")) % every, 100, every):
        store.server.buckets[store.bucket] = dict(before)
        store.server.reset()
        store.server.fail(
            "",
            skip=number,
            answer=None if done else store.server.error(500, "InternalError"),
            when=lambda _: writer(store) != os.getpid(),
            act=lambda: os.kill(writer(store), signal.SIGKILL),
        )
        [outcome] = run_outcomes(train, 1, store.environment, url, steps, columns, backend="none")
        if outcome.status == 0:
            break
        kills += 1
        assert outcome.status == -signal.SIGKILL, told([outcome])
        store.server.reset()
        found = check_all_whole(url, columns)
        assert 2 in found
        with manager(url) as second:
            second.acquire()
            assert second.all_steps() == found
            check_nothing_left(store)
            second.save(4, tree(4, columns))
        assert 4 in check_all_whole(url, columns)
        check_nothing_left(store)
    assert kills * every > (17 if kind == "folder" else 8), "there are more requests than that"
