"""Array metadata: what is written is read, and anything else is refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dtypes import ZARR_BUILT_IN, ZARR_EXTENDED

from holdfast.engine.errors import DamagedCheckpointError, FormatVersionError, HoldfastError
from holdfast.engine.format import (
    ArrayMetadata,
    decode_array_metadata,
    dtype_from_name,
    encode_array_metadata,
)

DATA_TYPES = [*ZARR_BUILT_IN, *ZARR_EXTENDED]


sizes = st.integers(0, 2**20)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(sizes, st.integers(1, 2**20)), max_size=2),
    st.sampled_from(DATA_TYPES),
    st.none() | st.integers(1, 22),
)
def test_metadata_round_trips(axes: list[tuple[int, int]], data_type: str, level: int | None) -> None:
    shape, chunk_shape = tuple(n for n, _ in axes), tuple(c for _, c in axes)
    found = decode_array_metadata(encode_array_metadata(shape, data_type, chunk_shape, level))
    assert found == ArrayMetadata(shape, data_type, chunk_shape, compression=level)
    assert found.dtype == dtype_from_name(data_type).newbyteorder("<")


WHOLE = json.loads(encode_array_metadata((4, 6), "float32", (2, 6)))
GZIP = {"name": "gzip", "configuration": {"level": 1}}
SHARDING = {"name": "sharding_indexed", "configuration": {}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codecs": [*WHOLE["codecs"], GZIP]}, "codecs .*gzip"),
        ({"codecs": [WHOLE["codecs"][1], WHOLE["codecs"][0]]}, "codecs .*crc32c.*bytes"),
        ({"codecs": WHOLE["codecs"][:1]}, "codecs"),
        ({"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "crc32c"}]}, "codecs .*big"),
        ({"codecs": [SHARDING]}, "codecs .*sharding_indexed"),
        ({"chunk_grid": WHOLE["chunk_grid"] | {"name": "rectilinear"}}, "chunk_grid .*rectilinear"),
        ({"chunk_key_encoding": {"name": "v2"}}, "chunk_key_encoding .*v2"),
        ({"data_type": "string"}, "data_type 'string'"),
        ({"data_type": "r16"}, "data_type 'r16'"),
        ({"zarr_format": 2}, "zarr_format 2"),
        ({"node_type": "group"}, "node_type 'group'"),
        ({"storage_transformers": [{"name": "x"}]}, "storage_transformers"),
        ({"novelty": {"name": "x"}}, "novelty"),
        ({"attributes": {"long": "x" * 5000}}, "attributes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_holdfast_did_not_write_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatVersionError, match=f"does not read zarr arrays with the {message}"):
        decode_array_metadata(json.dumps(WHOLE | changes).encode())


SHAPES: list[Any] = [None, [4, -1], [4, True], [4, 6.0], [4, 2**64], [2**31, 2**31], [4], [1] * 100]
DAMAGED: list[dict[str, Any]] = [
    *({"shape": shape} for shape in SHAPES),
    {"chunk_grid": None},
    {"chunk_grid": {"name": "regular"}},
    {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 6]}}},
    {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**40, 2**40]}}},
    {"chunk_grid": {"name": "regular", "configuration": 3}},
    {"data_type": 3},
    {"data_type": {}},
    {"codecs": "bytes"},
    {"codecs": [3]},
    {"codecs": [*WHOLE["codecs"][:1], {"name": "zstd", "configuration": {"level": "1"}}, "crc32c"]},
]
NOT_JSON = {
    "empty": b"",
    "cut off": b"{",
    "a list": b"[]",
    "no text": b"\xff",
    "a number": b"3",
    "deep": b"[" * 100_000,
    "long": b'"' + b"x" * (1 << 20) + b'"',
    "many digits": b'{"shape":' + b"9" * 5000 + b"}",
}
DAMAGED_TEXTS = {**{ascii(one): json.dumps(WHOLE | one).encode() for one in DAMAGED}, **NOT_JSON}


@pytest.mark.parametrize("text", DAMAGED_TEXTS.values(), ids=DAMAGED_TEXTS)
def test_damaged_metadata(text: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"zarr\.json is damaged"):
        decode_array_metadata(text)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-1, 9), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["name", "configuration"]), inner)
    ),
    max_leaves=5,
)


@given(st.sampled_from(sorted(WHOLE)), json_values)
def test_any_value_is_understood_or_refused(member: str, value: object) -> None:
    with contextlib.suppress(HoldfastError):
        decode_array_metadata(json.dumps(WHOLE | {member: value}).encode())
