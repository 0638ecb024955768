"""Files that are sent in blocks: their parts may wait, as those of a copy that gives way, and hold up nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.object_stores.conftest import Store

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

    threads = [threading.Thread(target=upload, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for _ in threads:
        waiting.acquire()
    as_location(f"{store.url}/small").write_bytes(b"content")
    assert as_location(f"{store.url}/small").read_bytes() == b"content"
    go_on.set()
    for thread in threads:
        thread.join()
    for number in range(8):
        assert as_location(f"{store.url}/{number}").read_bytes() == bytes([number]) * (7 << 20)
