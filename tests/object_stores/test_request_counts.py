"""The number of requests of each operation: none is repeated, and independent ones run together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.manager.runs import commit, reading, saved
from tests.object_stores.conftest import Store, new_bucket, outcome
from tests.object_stores.s3_server import S3Server

import holdfast as hf
from holdfast.storage import as_location

LEAVES = {f"layer{number}": np.full((20, 50), number, np.float32) for number in range(50)}
LARGER = {name: np.tile(leaf, (2, 1)) for name, leaf in LEAVES.items()}
KEEP = hf.CheckpointManagerOptions(max_to_keep=2)


def counted(store: Store, action: Callable[[], Any]) -> tuple[int, dict[str, int]]:
    """Runs an action; returns its number of requests, and that of each kind."""
    store.server.log.clear()
    action()
    found = store.server.counts()
    return sum(found.values()), found


def test_one_small_checkpoint(store: Store) -> None:
    url = f"{store.url}/ckpt"
    found: list[Any] = []
    assert counted(store, lambda: found.append(outcome(lambda: hf.load(url))))[0] <= 10
    assert isinstance(found[0], hf.CheckpointNotFoundError)
    # The list of nothing, twice, the tree, the record, and another list.
    assert counted(store, lambda: hf.save(url, LEAVES)) == (5, {"LIST": 3, "PUT": 2})
    # The record and the tree.
    for read in (hf.load, partial(hf.load, like=LEAVES), partial(hf.load, select="layer7"), hf.describe):
        assert counted(store, partial(read, url)) == (2, {"GET": 2})
    assert counted(store, lambda: hf.verify(url))[0] == 3
    # As in the next test, with the tree in one object, and the old record before.
    assert counted(store, lambda: hf.save(url, LEAVES, overwrite=True))[0] == 12


def test_one_checkpoint(store: Store) -> None:
    url = f"{store.url}/ckpt"
    # Two lists, the lock, data, index, tree, manifest, a check of the lock, the record, another check of the lock.
    assert counted(store, lambda: hf.save(url, LARGER)) == (11, {"LIST": 2, "PUT": 6, "GET": 2, "DELETE": 1})
    # The record, manifest, index, tree, data.
    for read in (hf.load, partial(hf.load, like=LARGER), partial(hf.load, select="layer7")):
        assert counted(store, partial(read, url)) == (5, {"GET": 5})
    assert counted(store, lambda: hf.describe(url)) == (4, {"GET": 4})
    assert counted(store, lambda: hf.verify(url))[0] <= 14
    assert counted(store, lambda: hf.save(url, LARGER, overwrite=True))[0] <= 18


def test_the_first_save_to_a_service(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It marks the path, and asks with the marker whether the service honours conditions."""
    with S3Server() as server:
        new = new_bucket(server, monkeypatch)
        first = {"LIST": 2, "PUT": 4, "GET": 2, "DELETE": 1}
        assert counted(new, lambda: hf.save(f"{new.url}/1", LEAVES)) == (9, first)
        assert counted(new, lambda: hf.save(f"{new.url}/2", LEAVES)) == (5, {"LIST": 3, "PUT": 2})
    with S3Server() as server:
        new = new_bucket(server, monkeypatch)
        server.conditions = False
        hf.save(f"{new.url}/1", LEAVES)
        without = {"LIST": 2, "PUT": 3, "GET": 2, "DELETE": 1}
        assert counted(new, lambda: hf.save(f"{new.url}/2", LEAVES)) == (8, without)


@pytest.mark.parametrize("leaves", [LEAVES, LARGER], ids=["small", "larger"])
def test_a_run(store: Store, leaves: Any) -> None:
    url = f"{store.url}/run"
    is_small = leaves is LEAVES
    for number in range(40):
        store.server.buckets[store.bucket][f"other/{number}"] = store.server.put(store.bucket, "run2/x", b"")
    with hf.CheckpointManager(url, options=KEEP) as run:
        for step in (1, 2):
            commit(run, step, leaves)
        # As above, and two checks of the owner; the deletion marks, deletes the record, lists, and deletes the rest,
        # on S3 with one request for all.
        # Of small trees: the list, the record and the tree.
        assert counted(store, lambda: commit(run, 3, leaves))[0] <= (
            10 if is_small else 17 if store.url.startswith("s3") else 21
        )
    # A list, and each record.
    assert counted(store, lambda: hf.CheckpointManager(url, options=KEEP)) == (3, {"LIST": 1, "GET": 2})
    run = hf.CheckpointManager(url, options=KEEP)
    reads = 1 if is_small else 4
    assert counted(store, lambda: run.restore_latest(leaves)) == (reads, {"GET": reads})
    assert counted(store, lambda: hf.load(url))[0] <= 13
    assert counted(store, lambda: hf.list_checkpoints(url))[0] <= 9
    assert not any("other" in what or "run2" in what for what in store.server.sent())


def test_long_lists_come_in_pages(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{store.url}/run"
    saved(url, *range(8), items=lambda step: {"step": step})
    monkeypatch.setattr(type(store.server), "page", 7)
    requests, kinds = counted(store, lambda: hf.CheckpointManager(url))
    assert kinds["LIST"] == -(-len(store.stored("run/")) // 7)
    assert requests == kinds["LIST"] + 8
    assert reading(url).all_steps() == list(range(8))
    assert saved(url, 8, items=lambda step: {"step": step}, max_to_keep=2) == [7, 8]
    assert hf.verify(url).ok


def test_data_files_are_uploaded_and_read_at_the_same_time(store: Store) -> None:
    """Even with the default layout of a disk, whose files may be larger than an upload should be."""
    layout = hf.Layout(chunk_bytes=64 << 10, segment_bytes=64 << 10, upload_bytes=128 << 10)
    tree = {"w": np.arange(512 << 10, dtype=np.float32)}
    store.server.latency = 0.02
    store.server.most_at_once = 0
    hf.save(f"{store.url}/ckpt", tree, layout=layout)
    sizes = [len(one.body) for one in store.server.log if one.method in ("PUT", "POST") and ".0." in one.what]
    assert len(sizes) > 16
    assert max(sizes) <= 128 << 10
    assert store.server.most_at_once == 8
    store.server.most_at_once = 0
    assert np.array_equal(hf.load(f"{store.url}/ckpt")["w"], tree["w"])
    assert 8 < store.server.most_at_once <= 16


def test_ranges_that_are_near_are_read_together(store: Store) -> None:
    tree = {f"leaf{number:03}": np.full(2000, number, np.float32) for number in range(200)}
    hf.save(f"{store.url}/ckpt", tree)
    store.server.log.clear()
    hf.load(f"{store.url}/ckpt", select=["leaf000", "leaf100", "leaf150"])
    [data] = [one for one in store.server.log if ".0.0" in one.what]
    assert data.headers["range"].startswith("bytes=0-")
    store.server.log.clear()
    hf.load(f"{store.url}/ckpt", select="leaf150")
    [data] = [one for one in store.server.log if ".0.0" in one.what]
    first, last = map(int, data.headers["range"].removeprefix("bytes=").split("-"))
    assert last - first == 8003, "nothing else is read"


def test_verifying_does_not_fetch_data_twice(store: Store) -> None:
    tree = {"w": np.arange(500_000, dtype=np.float32)}
    hf.save(f"{store.url}/ckpt", tree)
    store.server.log.clear()
    assert hf.verify(f"{store.url}/ckpt").ok
    ranges = [one.headers.get("range", "all") for one in store.server.log if ".0.0" in one.what and one.method == "GET"]
    assert len(ranges) == 1, "what it holds"
    [key] = [key for key in store.stored() if ".0.0" in key]
    content = store.server.buckets[store.bucket][key].content
    for changed in (content + b"more", content[:-1], content[:100]):
        store.server.put(store.bucket, key, changed)
        assert not hf.verify(f"{store.url}/ckpt").ok


def test_a_service_that_deletes_one_object_at_a_time(s3: Store) -> None:
    """Single requests follow the one for all that failed or was refused; after a refusal, it is not sent again."""
    for number, (status, code) in enumerate([(500, "InternalError"), (501, "NotImplemented")]):
        hf.save(f"{s3.url}/{number}", LARGER)
        s3.server.fail(rf"POST /{s3.bucket}$", times=1, answer=s3.server.error(status, code))
        as_location(f"{s3.url}/{number}").remove_tree()
        assert s3.stored() == []
    hf.save(f"{s3.url}/later", LARGER)
    s3.server.log.clear()
    as_location(f"{s3.url}/later").remove_tree()
    assert (s3.stored(), s3.server.counts()) == ([], {"LIST": 1, "HEAD": 1, "DELETE": 5})
