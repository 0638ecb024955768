"""Compressed chunks: as TensorStore's zarr3 driver stores them; anything else is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from holdfast.engine.errors import DamagedCheckpointError
from holdfast.engine.format import compress_chunks, crc32c, decompress, encode_array_metadata

WAVE = (np.arange(25_000) % 251).astype(np.float32).view(np.uint8)


def decompressed(data: bytes, nbytes: int) -> Any:
    return np.frombuffer(decompress(data, nbytes), np.uint8)


@pytest.mark.parametrize("level", [1, 3, 22])
@pytest.mark.parametrize("nbytes", [1, 1000, 100_000])
def test_round_trip(nbytes: int, level: int) -> None:
    chunks = [WAVE[:nbytes], WAVE[:nbytes][::-1].copy(), np.zeros(nbytes, np.uint8)]
    for chunk, stored in zip(chunks, compress_chunks(chunks, level), strict=True):
        frame, checksum = stored[:-4], int.from_bytes(stored[-4:], "little")
        assert checksum == crc32c(frame)
        assert nbytes < 1000 or len(frame) < nbytes
        np.testing.assert_array_equal(decompressed(frame, nbytes), chunk)
    assert compress_chunks([], level) == []


def test_tensorstore_reads_and_writes_the_same() -> None:
    values = WAVE.view("<f4").reshape(100, 250)
    rows = [values[start : start + 40].reshape(-1).view(np.uint8) for start in (0, 40)]
    context = ts.Context()
    store = ts.KvStore.open("memory://a/", context=context).result()
    store.write("zarr.json", encode_array_metadata((80, 250), "float32", (40, 250), 5)).result()
    for number, stored in enumerate(compress_chunks(rows, 5)):
        store.write(f"c/{number}/0", stored).result()
    array = ts.open({"driver": "zarr3", "kvstore": "memory://a/"}, open=True, context=context).result()
    np.testing.assert_array_equal(array.read().result(), values[:80])
    array.write(values[:80] + 1).result()
    found = [decompressed(store.read(f"c/{number}/0").result().value[:-4], 40_000) for number in range(2)]
    np.testing.assert_array_equal(np.concatenate(found).view("<f4").reshape(80, 250), values[:80] + 1)


def test_several_threads_at_once() -> None:
    chunks = [np.full(5000, number, np.uint8) for number in range(40)]
    stored = compress_chunks(chunks, 1)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda data: decompressed(data[:-4], 5000), stored))
    assert [set(chunk) for chunk in found] == [{number} for number in range(40)]


[FRAME] = (data[:-4] for data in compress_chunks([WAVE], 3))
[BOMB] = (data[:-4] for data in compress_chunks([np.zeros(64 << 20, np.uint8)], 3))
DAMAGED: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 1),
    "no_frame": (bytes(100), 100),
    "cut_off": (FRAME[:-1], WAVE.size),
    "other_magic": (b"\0" + FRAME[1:], WAVE.size),
    "longer_than_it_should_be": (FRAME, WAVE.size - 1),
    "bomb": (BOMB, 100),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_frames_without_the_chunk_are_refused(name: str) -> None:
    data, nbytes = DAMAGED[name]
    with pytest.raises(DamagedCheckpointError, match="its zstd frame"):
        decompressed(data, nbytes)
    np.testing.assert_array_equal(decompressed(FRAME, WAVE.size), WAVE)
