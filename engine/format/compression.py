"""zstd compression of the chunks of zarr arrays, by TensorStore and in its threads: Python has no zstd before 3.14.

A compressed chunk is what zarr's codecs ``[bytes, zstd, crc32c]`` make of it: one zstd frame, then the CRC-32C of the
frame. TensorStore runs these codecs for whole arrays; here it does so for arrays of one chunk a row, in memory.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import DamagedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import tensorstore
    from numpy.typing import NDArray

LEVELS = range(1, 23)
"""The levels of compression, from the fastest to the smallest."""

_BYTES = 1 << 60  # of an array in memory that is never filled
_next_row = itertools.count()


def compress_chunks(chunks: Sequence[NDArray[np.uint8]], level: int) -> list[bytes]:
    """Compresses chunks of one size, several at a time and without holding the interpreter.

    Args:
        chunks: The bytes of each, one axis. They must not change meanwhile; large ones are not copied.
        level: How hard to try, one of `LEVELS`.

    Returns:
        For each chunk its zstd frame and the CRC-32C of that, as they are stored.
    """
    if not chunks:
        return []
    import tensorstore as ts

    zstd = {"name": "zstd", "configuration": {"level": level, "checksum": False}}
    store, values = _open(len(chunks[0]), [zstd, {"name": "crc32c"}], ts.Context())
    written = [store[row].write(chunk, can_reference_source_data_indefinitely=True) for row, chunk in enumerate(chunks)]
    for future in written:
        future.result()
    stored = [values.read(_key(row)) for row in range(len(chunks))]
    return [bytes(future.result().value) for future in stored]


def decompress_chunk(data: bytes | NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Decompresses one chunk without holding the interpreter; several threads may do so at once.

    Args:
        data: Its zstd frame: what is stored, without the CRC-32C that follows the frame.
        out: Where the content goes: contiguous memory with one axis, exactly as long as the content is.

    Raises:
        DamagedCheckpointError: The bytes are no such frame, or its content is shorter or longer than `out`. No more
            memory than for `out` and the frame's window (at most 128 MiB) is taken to find out.
    """
    import tensorstore as ts

    store, values = _decoder(len(out))
    row = next(_next_row) % store.shape[0]
    key = _key(row)
    try:
        values.write(key, bytes(data)).result()
        ts.array(out).write(store[row]).result()
    except ValueError as error:
        raise DamagedCheckpointError(f"its zstd frame does not hold {len(out)} bytes ({error})") from error
    finally:
        values.write(key, None).result()


@lru_cache(maxsize=256)
def _decoder(nbytes: int) -> tuple[tensorstore.TensorStore, tensorstore.KvStore]:
    import tensorstore as ts

    return _open(nbytes, [{"name": "zstd"}], ts.Context())


def _open(
    nbytes: int, codecs: Sequence[dict[str, Any]], context: tensorstore.Context
) -> tuple[tensorstore.TensorStore, tensorstore.KvStore]:
    """Opens an array in memory of any number of rows, each one chunk; returns it and the store of the chunks."""
    import tensorstore as ts

    array = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "memory"},
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
            "metadata": {
                "zarr_format": 3,
                "node_type": "array",
                "shape": [_BYTES // max(1, nbytes), nbytes],
                "data_type": "uint8",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, max(1, nbytes)]}},
                "chunk_key_encoding": {"name": "default"},
                "fill_value": 0,
                "codecs": [{"name": "bytes"}, *codecs],
            },
        },
        open=True,
        assume_metadata=True,
        context=context,
    ).result()
    return array, ts.KvStore.open({"driver": "memory"}, context=context).result()


def _key(row: int) -> bytes:
    return b"c/%d/0" % row
