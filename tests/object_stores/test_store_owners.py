"""One writer: without locks, the run that begins last writes, and the others fail before they commit."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import numpy as np
import pytest
from tests.object_stores.conftest import Store
from tests.processes.harness import Process, run_processes

import holdfast as hf

TREE = {"w": np.arange(1000, dtype=np.float32)}


def take_over(process: Process, environment: dict[str, str], url: str, step: int) -> list[int]:
    """Saves a step from another run."""
    assert process.count == 1
    os.environ.update(environment)
    with hf.CheckpointManager(url) as run:
        run.save(step, TREE)
    return run.all_steps()


def taken_over(store: Store, url: str, request: str) -> hf.CheckpointManager:
    """Returns a run with step 1, in the middle of saving step 2: another run took over during one of its requests."""
    older = hf.CheckpointManager(url)
    older.save(1, TREE)
    older.wait_until_finished()
    arrived, go_on = threading.Event(), threading.Event()
    store.server.fail(request, act=arrived.set, after=go_on)
    older.save(2, TREE)
    assert arrived.wait(10)
    assert run_processes(take_over, 1, store.environment, url, 5, backend="none") == [[1, 5]]
    go_on.set()
    return older


def test_the_older_run_finds_out_before_it_commits(store: Store) -> None:
    url = f"{store.url}/run"
    older = hf.CheckpointManager(url)
    older.save(1, TREE)
    older.wait_until_finished()
    assert run_processes(take_over, 1, store.environment, url, 2, backend="none") == [[1, 2]]
    older.save(3, TREE)
    with pytest.raises(hf.SaveFailedError, match=r"another manager has taken over .* process \d+ on ") as caught:
        older.wait_until_finished()
    assert isinstance(caught.value.__cause__, hf.OwnershipError)
    for act in (lambda: older.save(4, TREE), lambda: older.delete(1), lambda: older.pin(1)):
        with pytest.raises(hf.OwnershipError):
            act()
    older.close()
    reader = hf.CheckpointManager(url, options=hf.CheckpointManagerOptions(read_only=True))
    assert reader.all_steps() == [1, 2]
    assert hf.verify(url).ok
    assert not any(key.startswith("run/3/") for key in store.stored())


def test_taken_over_in_the_middle_of_a_save(store: Store) -> None:
    """The newer run deletes the files that the older one is writing; the older one's step never appears."""
    url = f"{store.url}/run"
    older = taken_over(store, url, r"(PUT|POST).*run/2/state\.\w+/tree\.json")
    with pytest.raises(hf.SaveFailedError, match="taken over"):
        older.wait_until_finished()
    older.close()
    with hf.CheckpointManager(url) as run:
        run.acquire()
        assert run.all_steps() == [1, 5]
    assert hf.verify(url).ok
    assert not any(key.startswith("run/2/") for key in store.stored())


def test_a_store_that_is_silent_for_a_while_is_no_other_run(store: Store) -> None:
    with hf.CheckpointManager(f"{store.url}/run") as run:
        run.save(1, TREE)
        run.wait_until_finished()
        for pattern in (r"GET.*owner\.json", r"GET.*checkpoint\.partial"):
            fault = store.server.fail(pattern, times=1000, answer=store.server.error(503, "SlowDown"))
            run.save(2, TREE, force=True)
            with pytest.raises(hf.SaveFailedError) as caught:
                run.wait_until_finished()
            assert isinstance(caught.value.__cause__, hf.StorageUnavailableError)
            fault.times = 0
            run.save(2, TREE, force=True)
            run.wait_until_finished()
            assert run.all_steps() == [1, 2]
            run.delete(2)
    assert hf.verify(f"{store.url}/run").ok


def test_two_threads_save_to_one_path(store: Store) -> None:
    """What is loaded afterwards is of one of them, or there is nothing whole, and the next save puts that right.

    Without conditional writes, a save that is overtaken may take the commit of the other back.
    """
    for turn in range(4):
        url = f"{store.url}/{turn}"
        outcomes: list[Any] = []

        def work(value: int, url: str = url, outcomes: list[Any] = outcomes) -> None:
            try:
                outcomes.append(hf.save(url, {"w": np.full(5000, value)}))
            except hf.HoldfastError as error:
                outcomes.append(error)

        threads = [threading.Thread(target=work, args=(value,)) for value in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 3  # each of them is a report or an error of holdfast
        with contextlib.suppress(hf.CheckpointNotFoundError, hf.DamagedCheckpointError):
            assert len(set(hf.load(url)["w"].tolist())) == 1
        hf.save(url, {"w": np.full(5000, 3)}, overwrite=True)
        assert set(hf.load(url)["w"].tolist()) == {3}
        assert hf.verify(url).ok


def test_taken_over_in_the_very_moment_of_the_commit(store: Store) -> None:
    """The commit record arrives when another run has swept the data: it is taken back."""
    url = f"{store.url}/run"
    older = taken_over(store, url, r"(PUT|POST).*run/2/checkpoint\.json")
    with pytest.raises(hf.SaveFailedError, match="another save"):
        older.wait_until_finished()
    older.close()
    reader = hf.CheckpointManager(url, options=hf.CheckpointManagerOptions(read_only=True))
    assert (reader.all_steps(), hf.verify(url).ok) == ([1, 5], True)
