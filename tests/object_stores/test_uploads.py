"""Uploads of data: in one request or in blocks, from memory that lasts, waits, is used again, or fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.object_stores.conftest import Store

import holdfast as hf
from holdfast.engine.storage import Segment, as_location, cloud

AZURE = True


def test_uploads_that_wait_hold_up_no_other_request(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "SINGLE_REQUEST_BYTES", 1 << 20)
    monkeypatch.setattr(cloud, "BLOCK_BYTES", 5 << 20)
    go_on = threading.Event()
    waiting = threading.Semaphore(0)

    def parts(number: int) -> Iterator[NDArray[np.uint8]]:
        yield np.full(6 << 20, number, np.uint8)
        waiting.release()
        go_on.wait()
        yield np.full(1 << 20, number, np.uint8)

    def upload(number: int) -> None:
        size = 7 << 20
        as_location(f"{store.url}/{number}").write_data(size, [Segment(0, size, lambda: parts(number))])

    with ThreadPoolExecutor(8) as threads:
        uploads = [threads.submit(upload, number) for number in range(8)]
        for _ in uploads:
            waiting.acquire()
        as_location(f"{store.url}/small").write_bytes(b"content")
        assert as_location(f"{store.url}/small").read_bytes() == b"content"
        go_on.set()
    for number in range(8):
        assert as_location(f"{store.url}/{number}").read_bytes() == bytes([number]) * (7 << 20)


@pytest.mark.parametrize("single", [1 << 30, 1 << 20], ids=["one request", "blocks"])
def test_memory_that_is_used_again(az: Store, single: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore would send the last content several times."""
    monkeypatch.setattr(cloud, "SINGLE_REQUEST_BYTES", single)
    monkeypatch.setattr(cloud, "BLOCK_BYTES", 5 << 20)
    place, size, memory = as_location(f"{az.url}/data"), 24 << 20, np.empty(1 << 20, np.uint8)

    def parts() -> Iterator[NDArray[np.uint8]]:
        for value in range(24):
            memory[:] = value
            yield memory

    place.write_data(size, [Segment(0, size, parts)])
    assert place.read_bytes() == b"".join(bytes([value]) * (1 << 20) for value in range(24))
    assert any("comp" in request.query for request in az.server.log) == (single < size)


def test_a_part_that_fails_in_blocks(az: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "SINGLE_REQUEST_BYTES", 1 << 20)

    def parts() -> Iterator[NDArray[np.uint8]]:
        yield np.zeros(8 << 20, np.uint8)
        raise KeyError("the leaf is gone")

    with pytest.raises(KeyError, match="the leaf is gone"):
        as_location(f"{az.url}/data").write_data(16 << 20, [Segment(0, 16 << 20, parts)])
    assert az.stored() == []


def test_lasting_parts_are_sent_from_where_they_are(az: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("obstore")
    sent: list[Any] = []
    put = obstore.put_async

    async def noted(client: Any, key: str, body: Any, **options: Any) -> Any:
        sent.append(body)
        return await put(client, key, body, **options)

    monkeypatch.setattr(obstore, "put_async", noted)
    weights = np.arange(1 << 20, dtype=np.float32)
    hf.save(f"{az.url}/ckpt", {"w": weights})
    assert any(np.shares_memory(part, weights) for body in sent if isinstance(body, list) for part in body)
    assert np.array_equal(hf.load(f"{az.url}/ckpt")["w"], weights)
