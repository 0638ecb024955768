"""Msgpack: what is read is what the library reads, and all that hold arrays in it refuse the same damage."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.format.memory import at_most

import holdfast as hf
from holdfast.engine.arrays import MsgpackHandler
from holdfast.engine.format import decode_array, decode_msgpack, encode_arrays
from holdfast.integrations.formats.flax import decode_flax
from holdfast.integrations.formats.rllib import decode_state

msgpack: Any = importlib.import_module("msgpack")  # it has no types
READERS: dict[str, Callable[[bytes], Any]] = {
    "aggregates": MsgpackHandler().deserialize,
    "Flax": decode_flax,
    "RLlib": decode_state,
}
KEYS = st.text(max_size=40) | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | KEYS | st.text(min_size=250, max_size=260),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(KEYS, inner, max_size=20),
    max_leaves=40,
)


@settings(max_examples=50)
@given(VALUES)
def test_any_value_is_read_as_the_library_reads_it(value: Any) -> None:
    packed = msgpack.packb(value)
    assert decode_msgpack(packed) == value == msgpack.unpackb(packed, strict_map_key=False)


@given(st.integers(-128, 127).filter(lambda kind: kind != -1), st.binary(max_size=70))
def test_extensions_of_every_width(kind: int, data: bytes) -> None:
    packed = msgpack.Packer(autoreset=False)
    packed.pack_ext_type(kind, data)
    assert decode_msgpack(packed.bytes(), extension=lambda *found: found) == (kind, data, 1)
    with pytest.raises(hf.DamagedCheckpointError, match="unknown type 0x"):
        decode_msgpack(packed.bytes())


@settings(max_examples=50)
@given(VALUES, st.data())
def test_a_value_that_is_cut_off_or_followed_by_more(value: Any, data: st.DataObject) -> None:
    packed = msgpack.packb(value)
    end = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(hf.DamagedCheckpointError, match="cut off"):
        decode_msgpack(packed[:end])
    with pytest.raises(hf.DamagedCheckpointError, match="1 bytes follow"):
        decode_msgpack(packed + b"\xc0")


NESTED = b"".join(b"\xdd" + struct.pack(">I", 6_000) for _ in range(150)) + b"\xc0" * 6_000
CLAIMS = {
    "nested lists": NESTED,
    "a list": b"\xdd\xff\xff\xff\xff",
    "a dictionary": b"\xdf\xff\xff\xff\xff\xa1a",
    "text": b"\xdb\xff\xff\xff\xff",
    "bytes": b"\xc6\xff\xff\xff\xff",
    "a timestamp": msgpack.packb(msgpack.Timestamp(1)),
    "deep lists": b"\x91" * 5000 + b"\xc0",
    "deep dictionaries": b"\x81\xa1a" * 5000 + b"\xc0",
}


@pytest.mark.parametrize("content", CLAIMS.values(), ids=CLAIMS)
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_few_bytes_take_no_memory(reader: Callable[[bytes], Any], content: bytes) -> None:
    with at_most(), pytest.raises(hf.DamagedCheckpointError):
        reader(content)


def test_tuples_in_tuples_of_flax_are_bounded() -> None:
    content = b"\x90"
    for _ in range(3000):
        content = msgpack.packb(msgpack.ExtType(4, b"\x91" + content))
    with pytest.raises(hf.DamagedCheckpointError, match="nested too deeply"):
        decode_flax(content)


FORGED: dict[str, tuple[Any, Any, Any]] = {
    "too few bytes": ([100], "<f4", b"12345678"),
    "too many bytes": ([1], "<f4", b"12345678"),
    "huge": ([1 << 40, 1 << 40], "<f4", b""),
    "negative": ([-1, -2], "<f4", b"12345678"),
    "fractions": ([1.5], "<f4", b"1234"),
    "booleans": ([True], "<f4", b"1234"),
    "text": ("2", "<f4", b"12345678"),
    "a longer axis than numpy has": ([1 << 63], "|S0", b""),
    "no sizes": (None, "<f4", b"1234"),
    "too many axes": ([1] * 70, "<f4", b"1234"),
    "objects": ([1], "O", b"12345678"),
    "no dtype": ([1], 7, b"12345678"),
    "an unknown dtype": ([1], "float77", b"12345678"),
    "text for bytes": ([2], "<i1", "ab"),
    "a list for bytes": ([2], "<i1", [1, 2]),
}


def as_extension(*parts: Any) -> bytes:
    return bytes(msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(parts))}))


def as_map(shape: Any, dtype: Any, data: Any) -> bytes:
    return bytes(msgpack.packb({"a": {b"nd": True, b"type": dtype, b"shape": shape, b"data": data}}))


@pytest.mark.parametrize("parts", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("reader", READERS)
def test_all_readers_refuse_the_same_arrays(reader: str, parts: tuple[Any, Any, Any]) -> None:
    content = (as_map if reader == "RLlib" else as_extension)(*parts)
    with pytest.raises((hf.DamagedCheckpointError, hf.errors.FormatVersionError)):
        READERS[reader](content)


def test_all_readers_read_the_same_array() -> None:
    expected = np.arange(6, dtype="<f4").reshape(2, 3)
    content = (list(expected.shape), "float32", expected.tobytes())
    for name, read in READERS.items():
        found = read(as_map(content[0], "<f4", content[2]) if name == "RLlib" else as_extension(*content))["a"]
        np.testing.assert_array_equal(found, expected, strict=True)
    with pytest.raises(hf.DamagedCheckpointError, match="expected its shape, dtype and bytes"):
        decode_flax(as_extension(*content[:2]))


def test_what_is_written_is_what_flax_reads() -> None:
    serialization = pytest.importorskip("flax.serialization")
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "half": np.ones(3, ml_dtypes.bfloat16),
        "none": np.zeros((0, 3), np.int8),
        "scalar": np.array(1.5),
    }
    found = serialization.msgpack_restore(encode_arrays(arrays))
    ours = decode_msgpack(encode_arrays(arrays), extension=lambda code, data, depth: decode_array(data))
    assert found.keys() == ours.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
        np.testing.assert_array_equal(ours[name], array, strict=True)
