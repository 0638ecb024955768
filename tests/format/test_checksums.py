from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from holdfast.engine.format import crc32c, extend

if TYPE_CHECKING:
    from collections.abc import Callable

CHECK = b"123456789"


def test_known_values() -> None:
    assert crc32c(CHECK) == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def _read_only(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.uint8)


def _writable(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(data), np.uint8)


def _mapped(data: bytes) -> np.ndarray[Any, Any]:
    memory = mmap.mmap(-1, max(len(data), 1))
    memory[: len(data)] = data
    return np.frombuffer(memory, np.uint8)[: len(data)]


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, _read_only, _writable, _mapped])
@pytest.mark.parametrize("data", [b"", CHECK], ids=["empty", "check"])
def test_kinds_of_memory(make: Callable[[bytes], Any], data: bytes) -> None:
    assert crc32c(make(data)) == crc32c(data)
    assert extend(crc32c(b"before"), make(data)) == crc32c(b"before" + data)


def test_arrays_stay_writable() -> None:
    array = _writable(CHECK)
    crc32c(array)
    array[0] = 0
    assert array[0] == 0


def test_sliced_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        crc32c(np.zeros(8, np.uint8)[::2])


def test_extend_equals_one_pass() -> None:
    crc = 0
    for part in (CHECK[:3], CHECK[3:4], b"", CHECK[4:]):
        crc = extend(crc, part)
    assert crc == crc32c(CHECK)
