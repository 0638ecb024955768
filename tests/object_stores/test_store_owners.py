"""One writer: without locks, the run that begins last writes, and the others fail before they commit."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.manager.runs import commit, reading, saved
from tests.object_stores.conftest import Held, Store, new_bucket, value_of
from tests.object_stores.s3_server import S3Server
from tests.object_stores.store_server import Request
from tests.processes.harness import Process, run_processes

import holdfast as hf

pytestmark = pytest.mark.xdist_group("stores")

AZURE = True

# The elements of a tree, and what the name of an object that its save writes matches.
SIZES = {"folder": 100_000, "zip file": 1000}
WRITES = {100_000: r"(PUT|POST).*run/2/state\.\w+/tree\.json", 1000: r"(PUT|POST).*run/2/state\.\w+\.zip"}


@pytest.fixture(params=SIZES.values(), ids=[*SIZES])
def size(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


def tree(size: int) -> dict[str, Any]:
    return {"w": np.arange(size, dtype=np.float32)}


def take_over(process: Process, environment: dict[str, str], url: str, step: int, size: int) -> list[int]:
    """Saves a step from another run."""
    assert process.count == 1
    os.environ.update(environment)
    return saved(url, step, items=lambda _: tree(size))


def test_the_older_run_finds_out_before_it_commits(store: Store, size: int) -> None:
    url = f"{store.url}/run"
    older = hf.CheckpointManager(url)
    commit(older, 1, tree(size))
    assert run_processes(take_over, 1, store.environment, url, 2, size, backend="none") == [[1, 2]]
    older.save(3, tree(size))
    with pytest.raises(hf.SaveFailedError, match=r"another manager has taken over .* process \d+ on ") as caught:
        older.wait_until_finished()
    assert isinstance(caught.value.__cause__, hf.errors.OwnershipError)
    for act in (lambda: older.save(4, tree(size)), lambda: older.delete(1), lambda: older.pin(1)):
        with pytest.raises(hf.errors.OwnershipError):
            act()
    older.close()
    assert reading(url).all_steps() == [1, 2]
    assert hf.verify(url).ok
    assert not any(key.startswith("run/3/") for key in store.stored())


@pytest.mark.parametrize("moment", ["while the tree is written", "in the very moment of the commit"])
def test_taken_over_in_the_middle_of_a_save(store: Store, size: int, moment: str) -> None:
    """The newer run deletes the files that the older one is writing; the older one's step never appears.

    A commit record that arrives when the data has been swept is taken back.
    """
    url = f"{store.url}/run"
    commits = "commit" in moment
    older = hf.CheckpointManager(url)
    commit(older, 1, tree(size))
    request = r"(PUT|POST).*run/2/checkpoint\.json" if commits else WRITES[size]
    saving = store.hold(request, lambda: older.save(2, tree(size)))
    assert run_processes(take_over, 1, store.environment, url, 5, size, backend="none") == [[1, 5]]
    saving.finish()
    with pytest.raises(hf.SaveFailedError, match="another save" if commits else "taken over"):
        older.wait_until_finished()
    older.close()
    assert (reading(url).all_steps(), hf.verify(url).ok) == ([1, 5], True)
    with hf.CheckpointManager(url) as run:
        run.acquire()
        assert run.all_steps() == [1, 5]
    assert not any(key.startswith("run/2/") for key in store.stored())


def test_a_store_that_is_silent_for_a_while_is_no_other_run(store: Store, size: int) -> None:
    # The last look at what is there, after the record is written: at the marker, or a list, which is the third one.
    last = (r"GET.*checkpoint\.partial", 0) if size == SIZES["folder"] else ("GET.*(prefix|startOffset)=run/2", 2)
    with hf.CheckpointManager(f"{store.url}/run") as run:
        commit(run, 1, tree(size))
        for pattern, skip in ((r"GET.*owner\.json", 0), last):
            fault = store.server.fail(pattern, times=1000, skip=skip, answer=store.server.error(503, "SlowDown"))
            with pytest.raises(hf.SaveFailedError) as caught:
                commit(run, 2, tree(size), force=True)
            assert isinstance(caught.value.__cause__, hf.errors.StorageUnavailableError)
            fault.times = 0
            commit(run, 2, tree(size), force=True)
            assert run.all_steps() == [1, 2]
            run.delete(2)
    assert hf.verify(f"{store.url}/run").ok


def older_run(process: Process, environment: dict[str, str], url: str, size: int) -> str:
    """Saves step 1, and step 2 when it is allowed to continue; returns how that ended."""
    assert process.count == 1
    os.environ.update(environment)
    with contextlib.suppress(hf.SaveFailedError), hf.CheckpointManager(url) as run:
        commit(run, 1, tree(size))
        hf.save(f"{url}-waits", {"a": 1})
        try:
            commit(run, 2, {"w": tree(size)["w"] + 1})
        except hf.HoldfastError as error:
            return f"{type(error).__name__}: {error}"
    return "it has saved"


def test_the_newer_run_goes_on_though_the_older_one_begins_to_save_the_same_step(store: Store, size: int) -> None:
    url = f"{store.url}/run"
    older = store.hold(
        r"(PUT|POST).*run-waits",
        lambda: run_processes(older_run, 1, store.environment, url, size, backend="none"),
    )
    newer = hf.CheckpointManager(url)
    assert np.array_equal(newer.restore(1)["w"], tree(size)["w"])
    saving = store.hold(WRITES[size], lambda: newer.save(2, tree(size)))
    [ended] = older.finish()
    saving.finish()
    newer.wait_until_finished()
    newer.save(3, tree(size))
    newer.close()
    assert "another manager has taken over" in ended
    assert newer.all_steps() == [1, 2, 3]
    assert np.array_equal(hf.load(f"{url}/2")["w"], tree(size)["w"])
    assert hf.verify(url).ok
    assert len(store.names("run/2/")) == 2, "the record and one tree"


def test_a_step_that_the_older_run_has_saved_meanwhile_is_replaced(
    store: Store, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{store.url}/run"
    with hf.CheckpointManager(url) as newer:  # which has no step yet
        assert run_processes(take_over, 1, store.environment, url, 2, size, backend="none") == [[2]]
        commit(newer, 2, {"w": tree(size)["w"] + 1})
    assert "step 2 was committed by another run" in caplog.text
    assert np.array_equal(hf.load(f"{url}/2")["w"], tree(size)["w"] + 1)
    assert hf.verify(url).ok


@pytest.fixture
def new_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A bucket of a service to which this process has never saved."""
    with S3Server() as server:
        yield new_bucket(server, monkeypatch)


def questions(store: Store) -> list[str]:
    """Returns the requests that find out whether the service honours conditions."""
    return [one.what for one in store.server.log if one.headers.get("if-none-match") and "partial" in one.what]


@pytest.mark.parametrize("refuses", [False, True], ids=["it ignores them", "it refuses them"])
def test_a_store_without_conditions(new_s3: Store, refuses: bool) -> None:
    """What is loaded is of one save, or there is nothing whole, and the next save puts that right."""
    new_s3.server.conditions = False
    if refuses:
        refusal = new_s3.server.error(501, "NotImplemented")
        new_s3.server.fail("", times=1000, answer=refusal, when=lambda request: "if-none-match" in request.headers)
    for turn in range(2):
        url = f"{new_s3.url}/{turn}"
        with ThreadPoolExecutor(3) as threads:  # three saves to one path at once
            _ = [threads.submit(hf.save, url, {"w": np.full(5000, value)}) for value in range(3)]
        with contextlib.suppress(hf.CheckpointNotFoundError, hf.DamagedCheckpointError):
            assert len(set(hf.load(url)["w"].tolist())) == 1
        hf.save(url, {"w": np.full(5000, 3)}, overwrite=True)
        assert value_of(url) == 3
    before = len(questions(new_s3))
    hf.save(f"{new_s3.url}/later", tree(1000))
    assert len(questions(new_s3)) == before


def test_each_service_is_asked_once(new_s3: Store) -> None:
    for number in range(2):
        hf.save(f"{new_s3.url}/{number}", tree(1000))
    assert questions(new_s3) == [f"PUT /{new_s3.bucket}/0/checkpoint.partial"]


def held_back(store: Store, url: str, value: int, size: int) -> Held:
    """Begins a save that waits with its record."""
    record = r"(PUT|POST).*\bckpt/checkpoint\.json"
    return store.hold(record, lambda: hf.save(url, {"w": np.full(size, value)}, overwrite=True))


@pytest.mark.parametrize("old", [True, False], ids=["replaced", "new"])
@pytest.mark.parametrize("both_wait", [True, False], ids=["both wait", "one waits"])
def test_the_record_that_arrives_first_counts(store: Store, size: int, old: bool, both_wait: bool) -> None:
    """Nothing of that save is removed; the record that arrives after it is refused."""
    url = f"{store.url}/ckpt"
    if old:
        hf.save(url, {"w": np.full(5000, 9)})
    first = held_back(store, url, 1, size)
    if both_wait:  # both are about to write their records
        second = held_back(store, url, 2, size)
        assert not isinstance(first.finish(), hf.HoldfastError)
        assert value_of(url) == 1
        refused, value = second, 1
    else:  # the first is overtaken after its last look
        hf.save(url, {"w": np.full(5000, 2)}, overwrite=True)
        refused, value = first, 2
    assert isinstance(refused.finish(), hf.errors.StorageConflictError)
    assert value_of(url) == value
    assert len(store.names("ckpt/")) == 2


def deletes(request: Request, name: str) -> bool:
    """Whether a request deletes objects with a name, alone or with others."""
    if request.method == "POST" and ("delete" in request.query or request.query.get("comp") == "batch"):
        return name.encode() in request.body
    return request.method == "DELETE" and name in request.what


def test_the_third_of_several_saves_removes_nothing_of_the_second(store: Store, size: int) -> None:
    """The third one has begun before the first was committed, and asks for the marker when it is that of the second."""
    url = f"{store.url}/ckpt"
    hf.save(url, {"w": np.full(5000, 9)})
    first = held_back(store, url, 1, size)
    third = store.hold(r"GET.*ckpt/checkpoint\.partial", lambda: hf.save(url, {"w": np.full(size, 3)}, overwrite=True))
    outcomes = {1: first.finish()}
    before = store.names("ckpt/")
    second = held_back(store, url, 2, size)
    [name] = store.names("ckpt/") - before - {"checkpoint.partial"}
    removes, may_remove = threading.Event(), threading.Event()
    store.server.fail("", when=lambda request: deletes(request, name), act=removes.set, after=may_remove)
    third.may_go_on.set()
    assert removes.wait(20)
    outcomes[2] = second.finish()
    may_remove.set()
    outcomes[3] = third.finish()
    failed = {value for value, found in outcomes.items() if isinstance(found, hf.HoldfastError)}
    assert all(isinstance(outcomes[value], hf.errors.StorageConflictError) for value in failed)
    assert value_of(url) in {2, 3} - failed


@pytest.mark.parametrize("old", [True, False], ids=["replaced", "new"])
@pytest.mark.parametrize("order", ["the marker", "the data"])
def test_a_run_sweeps_the_step_of_a_save_that_is_alive(store: Store, order: str, old: bool) -> None:
    """The save ends while the run is about to remove its marker, or its data."""
    url, folder = f"{store.url}/run", SIZES["folder"]
    saved(url, *((1, 2) if old else (2,)), items=lambda _: {"w": np.full(5000, 9)})
    save = store.hold(
        r"(PUT|POST).*run/1/checkpoint\.json",
        lambda: hf.save(f"{url}/1", {"w": np.full(folder, 1)}, overwrite=old),
    )
    name = "1/checkpoint.partial" if order == "the marker" else "tree.json"
    later = hf.CheckpointManager(url)
    acquires = store.hold("", later.acquire, when=lambda request: deletes(request, name))
    ended = save.finish()
    acquires.finish()
    later.close()
    failed = isinstance(ended, hf.errors.StorageConflictError)
    assert failed or not isinstance(ended, hf.HoldfastError)
    hf.CheckpointManager(url).acquire()  # which removes what is left
    if old or not failed:
        assert value_of(f"{url}/1") == (9 if failed else 1)
    assert len(store.names("run/1/")) == (2 if old or not failed else 0)


def test_a_checkpoint_is_replaced_at_any_request_of_a_load(store: Store, size: int) -> None:
    """Its folder or zip file is gone then, and the load reads the new one."""
    for number in itertools.count():
        url = f"{store.url}/{number}"
        hf.save(url, {"w": np.full(size, 1)})
        load = Held(partial(hf.load, url), arrives_at_end=True)
        fault = store.server.fail("GET", skip=number, act=load.arrived.set, after=load.may_go_on)
        load.start()
        assert load.arrived.wait(20)
        if fault.times:  # the load had no more requests
            break
        hf.save(url, {"w": np.full(size, 2)}, overwrite=True)
        assert set(load.finish()["w"].tolist()) == {2}
    assert number > 1
