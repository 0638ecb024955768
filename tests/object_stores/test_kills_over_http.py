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

AZURE = True

SMALL = hf.Layout(chunk_bytes=4096, segment_bytes=8192, data_file_bytes=16_384)
EVERY = 18
"""The client is killed at one request out of so many; 1 takes two minutes."""


def tree(step: int) -> dict[str, Any]:
    return {"w": np.full((180, 100), step, np.float32), "step": step}


def manager(url: str, **options: Any) -> hf.CheckpointManager:
    handler = hf.PyTreeCheckpointHandler(layout=SMALL)
    return hf.CheckpointManager(
        url, hf.AsyncCheckpointer(handler), hf.CheckpointManagerOptions(max_to_keep=2, **options)
    )


def train(process: Process, environment: dict[str, str], url: str, steps: list[int]) -> list[int]:
    """Saves steps, one after the other."""
    assert process.count == 1
    os.environ.update(environment)
    with manager(url) as run:
        for step in steps:
            run.save(step, tree(step), force=True)
            run.wait_until_finished()
        return run.all_steps()


def check_all_whole(url: str) -> list[int]:
    """Checks that every listed step is whole and holds the saved values."""
    reader = manager(url, read_only=True)
    for step in reader.all_steps():
        found = reader.restore(step)
        assert found["step"] == step
        assert np.array_equal(found["w"], tree(step)["w"])
    assert hf.verify(url).ok
    return reader.all_steps()


def check_nothing_left(store: Store) -> None:
    """Checks that every object belongs to a step, or to the run."""
    wanted = {"run/owner.json", "run/options.json"}
    for step in manager(f"{store.url}/run", read_only=True).all_steps():
        record = read_record(hf.storage.as_location(f"{store.url}/run/{step}"))
        wanted.add(f"run/{step}/checkpoint.json")
        for item in record.items.values():
            wanted.update(f"run/{step}/{item.folder}/{file}" for file in item.files)
    assert set(store.stored("run/")) == wanted


def writer(store: Store) -> int:
    """Returns the process that owns the directory."""
    found: int = json.loads(store.server.buckets[store.bucket]["run/owner.json"].content)["pid"]
    return found


@pytest.mark.parametrize(
    ("steps", "done", "first"),
    [([3], True, 1), ([3], False, 5), ([2], True, 9), ([2], False, 13)],
    ids=["new step, done", "new step, not done", "replaced step, done", "replaced step, not done"],
)
def test_killed_in_the_middle(store: Store, steps: list[int], done: bool, first: int) -> None:
    url = f"{store.url}/run"
    with manager(url) as run:
        for step in (1, 2):
            run.save(step, tree(step))
    before = dict(store.server.buckets[store.bucket])
    kills = 0
    for number in range((first + (store.url[0] == "g")) % EVERY, 100, EVERY):
        store.server.buckets[store.bucket] = dict(before)
        store.server.reset()
        store.server.fail(
            "",
            skip=number,
            answer=None if done else store.server.error(500, "InternalError"),
            when=lambda _: writer(store) != os.getpid(),
            act=lambda: os.kill(writer(store), signal.SIGKILL),
        )
        [outcome] = run_outcomes(train, 1, store.environment, url, steps, backend="none")
        if outcome.status == 0:
            break
        kills += 1
        assert outcome.status == -signal.SIGKILL, told([outcome])
        store.server.reset()
        found = check_all_whole(url)
        assert 2 in found
        with manager(url) as second:
            second.acquire()
            assert second.all_steps() == found
            check_nothing_left(store)
            second.save(4, tree(4))
        assert 4 in check_all_whole(url)
        check_nothing_left(store)
    assert kills * EVERY > 17, "there are more requests than that"
