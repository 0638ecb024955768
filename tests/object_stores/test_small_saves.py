"""Saves whose items are zip files have no marker: every race and lost request of such a save.

A save is a list, the zip file, the record, and another list. ``test_kills_over_http.py`` kills a run at any request; in
``test_store_owners.py``, runs take over from each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.manager.runs import saved
from tests.object_stores.conftest import Held, Store, outcome, value_of

import holdfast as hf
from holdfast.engine.format import encode_archive

pytestmark = pytest.mark.xdist_group("stores")

AZURE = True

# What the requests of a save match, in their order: how many like it come before, and a pattern. An empty list is asked
# for twice.
REQUESTS = {
    "the list": (0, "(prefix|startOffset)=(run/)?1/"),
    "the zip file": (0, r"(PUT|POST).*\b1/state\.\w+\.zip"),
    "the record": (0, r"(PUT|POST).*\b1/checkpoint\.json"),
    "the last list": (2, "(prefix|startOffset)=(run/)?1/"),
}
OURS = encode_archive({"tree.json": b"{}"})


def tree(value: int, size: int = 1000) -> dict[str, Any]:
    return {"w": np.full(size, value)}


def larger(value: int) -> dict[str, Any]:
    """A tree that is a folder, whose save has a marker."""
    return tree(value, 100_000)


def hold(store: Store, request: str, action: Callable[[], Any]) -> Held:
    """Begins a save that waits at one of its requests."""
    skip, pattern = REQUESTS[request]
    return store.hold(pattern, action, skip=skip)


RIVALS: dict[str, Callable[[str], Any]] = {
    "a small save": lambda url: hf.save(url, tree(2)),
    "a larger save": lambda url: hf.save(url, larger(2)),
    "a small save that replaces": lambda url: hf.save(url, tree(2), overwrite=True),
    "a larger save that replaces": lambda url: hf.save(url, larger(2), overwrite=True),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize(
    ("mine", "request_"), [*((tree, one) for one in REQUESTS), (larger, "the list"), (larger, "the record")]
)
def test_another_save_comes_between(store: Store, request_: str, rival: str, mine: Callable[[int], Any]) -> None:
    """While a save waits at a request, another one runs from beginning to end: one is committed, nothing is left."""
    url = f"{store.url}/1"
    save = hold(store, request_, lambda: hf.save(url, mine(1)))
    second = outcome(lambda: RIVALS[rival](url))
    first = save.finish()
    lost = (hf.errors.StorageConflictError, hf.CheckpointExistsError)
    committed = [value for value, one in ((1, first), (2, second)) if not isinstance(one, lost)]
    assert not [one for one in (first, second) if isinstance(one, hf.HoldfastError) and not isinstance(one, lost)]
    if request_ == "the last list" and "replaces" in rival:
        assert committed == [2], "the first save cannot tell that what it saved was replaced"
    else:
        assert len(committed) == 1
    assert value_of(url) == committed[-1]
    assert len(store.names("1/")) == 2, "the record and one tree"


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_run_takes_the_directory_meanwhile(store: Store, request_: str) -> None:
    """A run removes what it takes for left: then the save, which is not of that run, fails and leaves nothing."""
    url = f"{store.url}/run/1"
    save = hold(store, request_, lambda: hf.save(url, tree(1)))
    with hf.CheckpointManager(f"{store.url}/run") as run:
        run.acquire()
        report = save.finish()
        committed = not isinstance(report, hf.HoldfastError)
        assert committed or isinstance(report, hf.errors.StorageConflictError)
        assert committed is (request_ != "the record"), "nothing of it was there before, or all of it"
        assert value_of(url) == (1 if committed else None)
        assert store.names("run/1/") == ({"checkpoint.json", *store.names("run/1/")} if committed else set())
        run.reload()
        assert run.all_steps() == ([1] if committed else [])


def test_a_run_looked_before_the_record_and_removes_after_it(store: Store) -> None:
    """The run waits before it removes the zip file, and the save ends meanwhile: it fails, and nothing is left."""
    url = f"{store.url}/run/1"
    if url.startswith("az:"):
        pytest.skip("the server cannot hold a deletion, which comes in a batch")
    save = hold(store, "the record", lambda: hf.save(url, tree(1)))

    def acquire() -> list[int]:
        with hf.CheckpointManager(f"{store.url}/run") as run:
            run.acquire()
            return run.all_steps()

    taking = store.hold("DELETE", acquire)
    assert isinstance(save.finish(), hf.errors.StorageConflictError)
    assert taking.finish() == []
    assert value_of(url) is None
    assert not store.names("run/1/")


@pytest.mark.parametrize("then", ["a save", "a larger save", "a run"])
@pytest.mark.usefixtures("impatient")
def test_a_zip_file_that_arrives_late(store: Store, then: str) -> None:
    """Its sender has given up and removed nothing; the next save removes it."""
    url = f"{store.url}/run/1"
    never = store.server.error(500, "InternalError")
    store.server.fail(REQUESTS["the zip file"][1], times=1000, how="never", answer=never)
    with store.server.watch() as seen, pytest.raises(hf.errors.StorageUnavailableError, match="no answer"):
        hf.save(url, tree(1))
    late = next(one for one in seen if f"{store.bucket}" in one.what and ".zip" in one.what)
    store.server.reset()
    assert store.server.answer(late).status in (200, 201)
    [stray] = store.names("run/1/")
    assert value_of(url) is None
    if then == "a run":
        with hf.CheckpointManager(f"{store.url}/run") as run:
            run.acquire()
        assert store.names("run/1/") == set()
    else:
        hf.save(url, (tree if then == "a save" else larger)(2))
        assert value_of(url) == 2
        assert len(store.names("run/1/") - {stray}) == len(store.names("run/1/")) == 2


@pytest.mark.parametrize("then", ["replaced", "a run"])
def test_a_zip_file_of_a_save_that_lost_and_was_killed(store: Store, then: str) -> None:
    url = f"{store.url}/run/1"
    saved(f"{store.url}/run", 1, items=tree)
    store.server.put(store.bucket, "run/1/state.deadbeef.zip", OURS)
    store.server.put(store.bucket, "run/1/notes.deadbeef.zip", b"of someone else")
    assert value_of(url) == 1
    with hf.CheckpointManager(f"{store.url}/run") as run:
        run.save(1, tree(2), force=True) if then == "replaced" else run.acquire()
    assert "state.deadbeef.zip" not in store.names("run/1/")
    assert "notes.deadbeef.zip" in store.names("run/1/")
    assert value_of(url) == (2 if then == "replaced" else 1)
    assert len(store.names("run/1/")) == 3


def test_a_save_that_was_seen_to_lose_is_named_by_a_marker(store: Store) -> None:
    """It is killed before it can remove its zip file: the marker of the one that is committed explains that."""
    url = f"{store.url}/run/1"
    save = hold(store, "the last list", lambda: hf.save(url, tree(1)))
    store.server.put(store.bucket, "run/1/state.deadbeef.zip", OURS)
    assert not isinstance(save.finish(), Exception)
    assert {"checkpoint.partial", "state.deadbeef.zip"} < store.names("run/1/")
    assert value_of(url) == 1
    with hf.CheckpointManager(f"{store.url}/run") as run:
        run.acquire()
    assert len(store.names("run/1/")) == 2
    assert value_of(url) == 1


@pytest.mark.parametrize("content", [b"PK", b"", OURS + b"x", OURS[1:]])
def test_files_of_others_are_never_touched(store: Store, content: bytes) -> None:
    """A name like ours is not enough."""
    for name in ("state.deadbeef.zip", "weights.zip"):
        store.server.put(store.bucket, f"run/1/{name}", content)
    with hf.CheckpointManager(f"{store.url}/run") as run:
        run.acquire()
    with pytest.raises(hf.CheckpointExistsError, match="not empty and is not a checkpoint"):
        hf.save(f"{store.url}/run/1", tree(1))
    assert store.names("run/1/") == {"state.deadbeef.zip", "weights.zip"}


@pytest.mark.parametrize("number", range(3))
def test_a_deletion_that_is_interrupted(store: Store, number: int) -> None:
    """At each of its requests: the step is whole, or gone, and what is left of it is removed by the next run."""
    url = f"{store.url}/run"
    with hf.CheckpointManager(url) as run:
        for step in (1, 2):
            run.save(step, tree(step))
        run.wait_until_finished()
        refused = store.server.error(403, "AccessDenied")
        fault = store.server.fail("", skip=1 + number, times=1000, answer=refused)  # the owner is read before
        assert isinstance(outcome(lambda: run.delete(1)), hf.errors.StoragePermissionError)
        fault.times = 0
        assert value_of(f"{url}/1") == (1 if number < 2 else None)
    with hf.CheckpointManager(url) as run:
        run.acquire()
        assert run.all_steps() == ([1, 2] if number < 2 else [2])
        assert len(store.names("run/1/")) == (2 if number < 2 else 0)
        if number < 2:
            store.server.put(store.bucket, "run/1/notes.txt", b"of the user")
            run.delete(1)  # with all that lies there
            assert store.names("run/1/") == set()
