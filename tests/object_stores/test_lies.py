"""Answers that are lies, as of a faulty proxy, cost no checkpoint: what was not stored is sent again, or told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.manager.runs import commit, newest_whole, opened, reading, saved
from tests.object_stores.conftest import Store, is_whole, new_bucket
from tests.object_stores.lying_server import LyingServer
from tests.object_stores.store_server import Answer

import holdfast as hf

AZURE = True
ALWAYS = 1000
TREE: dict[str, Any] = {"w": np.arange(100_000, dtype=np.float32), "step": 3}  # a folder
SMALL: dict[str, Any] = {"w": np.arange(1000, dtype=np.float32), "step": 3}  # a zip file
FOLDER_OR_ZIP_FILE = pytest.mark.parametrize("tree", [TREE, SMALL], ids=["folder", "zip file"])


@pytest.fixture(scope="module")
def server() -> Iterator[LyingServer]:
    with LyingServer() as server:
        with pytest.MonkeyPatch.context() as patch:
            hf.save(f"{new_bucket(server, patch).url}/first", {})  # the first save asks whether conditions are honoured
        yield server


@pytest.fixture
def liar(server: LyingServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    yield new_bucket(server, monkeypatch)
    server.hidden.clear()
    server.reset()


@FOLDER_OR_ZIP_FILE
@pytest.mark.parametrize("way", ["answers_with_a_page", "answers_with_an_error"])
@pytest.mark.parametrize("pattern", [r"PUT .*(\.0\.\d+|\.zip)$", r"PUT .*(tree\.json|\.zip)$"], ids=["data", "tree"])
def test_what_was_not_stored_is_sent_again(
    server: LyingServer, liar: Store, way: str, pattern: str, tree: dict[str, Any]
) -> None:
    fault = getattr(server, way)(pattern)
    hf.save(f"{liar.url}/ckpt", tree)
    assert fault.times == 0
    assert is_whole(f"{liar.url}/ckpt", tree)


@FOLDER_OR_ZIP_FILE
@pytest.mark.parametrize("old", [True, False], ids=["replaced", "new"])
@pytest.mark.parametrize("way", ["answers_with_a_page", "answers_with_an_error"])
def test_a_record_that_is_never_stored(
    server: LyingServer, liar: Store, way: str, old: bool, tree: dict[str, Any]
) -> None:
    url = f"{liar.url}/ckpt"
    if old:
        hf.save(url, SMALL)
    getattr(server, way)(r"PUT .*checkpoint\.json", ALWAYS)
    with pytest.raises(hf.errors.StorageUnavailableError):
        hf.save(url, tree, overwrite=old)
    server.reset()
    if old:
        assert is_whole(url, SMALL)
    else:
        with pytest.raises(hf.CheckpointNotFoundError):
            hf.load(url)
    hf.save(url, tree, overwrite=old)
    assert is_whole(url, tree)


@FOLDER_OR_ZIP_FILE
@pytest.mark.parametrize("times", [3, ALWAYS], ids=["some times", "for ever"])
def test_a_record_that_is_called_a_conflict_with_itself(
    server: LyingServer, liar: Store, tree: dict[str, Any], times: int
) -> None:
    """A request that was repeated meets its own object: time and again, and for ever, which is told soon."""
    fault = server.refuses_its_own(r"PUT .*checkpoint\.json", times)
    if times == ALWAYS:
        with pytest.raises(hf.errors.StorageConflictError, match="ConditionalRequestConflict"):
            hf.save(f"{liar.url}/ckpt", tree)
        assert times - fault.times <= 5
        server.reset()
    hf.save(f"{liar.url}/ckpt", tree, overwrite=times == ALWAYS)
    assert fault.times == 0 or times == ALWAYS
    assert is_whole(f"{liar.url}/ckpt", tree)


def test_a_key_that_no_list_can_have_is_named(liar: Store) -> None:
    hf.save(f"{liar.url}/run/1", SMALL)
    liar.server.put(liar.bucket, "run//x", b"")
    with pytest.raises(hf.errors.InvalidLocationError, match=r"cannot list .*run//x.*empty path segment"):
        hf.list_checkpoints(f"{liar.url}/run")


def a_run(url: str, tree: dict[str, Any], steps: int = 2, **options: Any) -> hf.CheckpointManager:
    run = opened(url, **options)
    for step in range(1, steps + 1):
        commit(run, step, tree)
    return run


DELETIONS: dict[str, Callable[[hf.CheckpointManager], object]] = {
    "a deletion": lambda run: run.delete(1),
    "a rollback": lambda run: run.delete_after(0),
    "retention": lambda run: run.save(3, SMALL),
}


@FOLDER_OR_ZIP_FILE
@pytest.mark.parametrize("delete", DELETIONS.values(), ids=DELETIONS)
def test_a_list_that_lacks_a_name_while_a_step_is_deleted(
    server: LyingServer, liar: Store, delete: Callable[[hf.CheckpointManager], object], tree: dict[str, Any]
) -> None:
    a_run(f"{liar.url}/first", tree, 1).close()
    for number in range(len(server.keys(liar.bucket, "first/1/"))):  # each object of the step in turn
        url = f"{liar.url}/run{number}"
        run = a_run(url, tree, max_to_keep=2)
        shows = server.hides(server.keys(liar.bucket, f"run{number}/1/")[number])
        delete(run)
        run.close()
        shows()
        assert server.keys(liar.bucket, f"run{number}/1/") == []


def test_metrics_of_a_step_that_a_list_lacks_stay(server: LyingServer, liar: Store) -> None:
    url = f"{liar.url}/run"
    a_run(url, SMALL).close()
    hf.record_metrics(url, 1, {"loss": 1.0})
    shows = [server.hides(key) for key in server.keys(liar.bucket, "run/1/")]
    a_run(url, SMALL, 0).save(3, SMALL)
    for show in shows:
        show()
    assert hf.CheckpointManager(url).metrics(1) == {"loss": 1.0}


def test_a_garbled_answer_is_no_takeover(server: LyingServer, liar: Store) -> None:
    url = f"{liar.url}/run"
    with a_run(url, SMALL, 1) as run:
        owner = server.buckets[liar.bucket]["run/owner.json"].content
        garbled = [owner[:byte] + bytes([owner[byte] ^ 1]) + owner[byte + 1 :] for byte in range(len(owner))]
        for step, content in enumerate(garbled[::7], 2):
            server.garbles(r"GET .*owner\.json", content, 2)
            assert commit(run, step, SMALL)
            server.reset()
        server.garbles(r"GET .*owner\.json", garbled[20], ALWAYS)
        with pytest.raises(hf.HoldfastError, match=r"owner\.json: this file was damaged"):
            commit(run, step + 1, SMALL)
        server.reset()
        run.save(step + 2, SMALL)
    assert hf.verify(url).ok


# ---- one wrong answer of any store

WRONG = {"a page": b"<html><body>busy</body></html>", "nothing": b"", "zeros": bytes(5000)}


def restored(url: str) -> tuple[int, float]:
    """Returns the newest step as a run resumes from it."""
    found = newest_whole(reading(url))
    assert not found.skipped
    return found.step, float(found.items["w"].sum())


def loaded(url: str) -> tuple[int, float]:
    """Returns the same step as anyone loads it."""
    tree = hf.load(f"{url}/2")
    return tree["step"], float(tree["w"].sum())


def two_steps(store: Store) -> str:
    saved(f"{store.url}/run", 1, 2, items=lambda step: {"w": np.full(5000, step), "step": step})
    return f"{store.url}/run"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("read", [restored, loaded])
@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_costs_no_step(store: Store, body: bytes, read: Callable[[str], tuple[int, float]]) -> None:
    url = two_steps(store)
    before = len(store.server.log)
    assert read(url) == (2, 10_000.0)
    for number in range(len(store.server.log) - before):
        status = 206 if "range" in store.server.log[before + number].headers else 200
        headers = {"Content-Range": f"bytes 0-{len(body) - 1}/{len(body)}"} if status == 206 and body else {}
        store.server.fail("GET ", skip=number, answer=Answer(status, body, headers))
        assert read(url) == (2, 10_000.0), store.server.log[before + number].what


def test_a_record_that_is_listed_and_never_given_is_a_damaged_step(store: Store) -> None:
    url = two_steps(store)
    store.server.fail("GET .*2/checkpoint.json", answer=store.server.error(404, "NoSuchKey"), times=1000)

    first, second = hf.list_checkpoints(url)

    assert first.damage is None
    assert "2/checkpoint.json: the store lists this commit record, and has answered 10 times" in str(second.damage)
    assert "holdfast rm" in str(second.damage)
