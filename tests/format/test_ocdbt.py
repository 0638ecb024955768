"""Databases that we write, read by us and by TensorStore."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.format.ocdbt_entries import are_equal, decode_database, encode_entries

from holdfast.engine.format import Entries
from holdfast.engine.format.ocdbt_read import NODE_MAGIC

DATABASE_ID = bytes(range(16))
CREATED = 1_700_000_000_000_000_000
NODE_FILE = "d/index"

Value = bytes | tuple[str, int, int]


def make_entries(values: dict[bytes, Value]) -> Entries:
    """Entries of a dict: key -> the value, or (file, offset, length)."""
    items = sorted(values.items())
    files = sorted({value[0] for _, value in items if isinstance(value, tuple)})
    places = [
        (files.index(value[0]), value[1], value[2]) if isinstance(value, tuple) else (0, 0, 0) for _, value in items
    ]
    columns = np.array(places, np.int64).reshape(-1, 3)
    return Entries(
        keys=[key for key, _ in items],
        inline=[value if isinstance(value, bytes) else None for _, value in items],
        files=files,
        file_ids=columns[:, 0],
        offsets=columns[:, 1],
        lengths=columns[:, 2],
        checksums=np.full(len(items), -1),
    )


def values_of(entries: Entries) -> dict[bytes, Value]:
    """The dict that entries stand for."""
    columns = zip(entries.file_ids.tolist(), entries.offsets.tolist(), entries.lengths.tolist(), strict=True)
    return {
        key: (entries.files[file], offset, length) if value is None else value
        for key, value, (file, offset, length) in zip(entries.keys, entries.inline, columns, strict=True)
    }


def many(count: int, *, files: int = 2) -> dict[bytes, Value]:
    """As many keys as a tree of `count` // 2 arrays has, with values in data files of 1000 bytes."""
    values: dict[bytes, Value] = {}
    for i in range(count):
        name = f"params.layers_{i // 8:05d}.attention.{'qkvo'[i // 2 % 4]}.kernel"
        if i % 2:
            values[f"{name}/c/0/0".encode()] = (f"d/{i % files:02d}", i * 7 % 900, i % 100)
        else:
            values[f"{name}/zarr.json".encode()] = f'{{"zarr_format":3,"shape":[{i},3]}}'.encode()
    return values


def encode(entries: Entries, node_limit: int = 1 << 20) -> tuple[bytes, bytes]:
    return encode_entries(
        entries, node_file=NODE_FILE, database_id=DATABASE_ID, created_ns=CREATED, node_limit=node_limit
    )


def decode(manifest: bytes, nodes: bytes) -> Entries:
    def read_node(file: str, offset: int, length: int) -> bytes:
        assert file == NODE_FILE
        return nodes[offset : offset + length]

    return decode_database(manifest, read_node)


def open_database(manifest: bytes, nodes: bytes, data: dict[str, bytes]) -> Any:
    """The same database, opened by TensorStore in memory."""
    context = ts.Context()
    base = ts.KvStore.open("memory://base/", context=context).result()
    for name, content in {**data, "manifest.ocdbt": manifest, NODE_FILE: nodes}.items():
        base.write(name, content).result()
    return ts.KvStore.open({"driver": "ocdbt", "base": "memory://base/"}, context=context).result()


def frame_heights(nodes: bytes) -> list[int]:
    """The height of each node of a node file, which must consist of nodes without gaps."""
    heights, offset = [], 0
    while offset < len(nodes):
        assert int.from_bytes(nodes[offset : offset + 4]) == NODE_MAGIC
        heights.append(nodes[offset + 14])
        offset += int.from_bytes(nodes[offset + 4 : offset + 12], "little")
    assert offset == len(nodes)
    return heights


DATA = {f"d/{i:02d}": bytes((i + k) % 251 for k in range(1000)) for i in range(40)}


DATABASES: dict[str, tuple[dict[bytes, Value], int, int | None]] = {
    "empty": ({}, 1 << 20, 0),
    "one": ({b"a": b""}, 1 << 20, 1),
    "empty key": ({b"": b"the empty key"}, 1 << 20, 1),
    "two outside": ({b"a": ("d/00", 5, 0), b"b": ("d/01", 0, 1000)}, 1 << 20, 1),
    "one node": (many(300, files=40), 1 << 20, 1),
    "two levels": (many(300), 4096, 2),
    "small leaves": (many(300), 700, 3),
    "one key a leaf": (many(60, files=40), 1, 6),
    "20000": (many(20_000), 1 << 16, 2),
    "nested prefixes": ({b"k" * n: bytes([n % 256]) * n for n in range(1, 500)}, 2000, None),
    "every byte": ({bytes([n]): b"v" for n in range(256)}, 300, None),
    "longest": ({b"x" * 65535: b"v" * (1 << 20), b"y": ("d/00", 0, 1)}, 1 << 20, 2),
}


@pytest.mark.parametrize(("values", "node_limit", "levels"), DATABASES.values(), ids=DATABASES)
def test_tensorstore_reads_what_we_write(values: dict[bytes, Value], node_limit: int, levels: int | None) -> None:
    manifest, nodes = encode(make_entries(values), node_limit)
    heights = frame_heights(nodes)
    if levels is not None:
        assert len(set(heights)) == levels
    assert values_of(decode(manifest, nodes)) == values

    database = open_database(manifest, nodes, DATA)
    assert sorted(database.list().result()) == sorted(values)
    for key in sorted(values)[:: max(1, len(values) // 200)]:
        value = values[key]
        expected = value if isinstance(value, bytes) else DATA[value[0]][value[1] : value[1] + value[2]]
        assert database.read(key).result().value == expected
    absent = database.read(b"params.layers_0000").result()
    assert absent.state == "missing"


def test_nodes_respect_their_limit() -> None:
    for limit in (500, 5000, 50_000):
        _, nodes = encode(make_entries(many(2000, files=40)), limit)
        offset = 0
        while offset < len(nodes):
            length = int.from_bytes(nodes[offset + 4 : offset + 12], "little")
            assert length <= limit
            offset += length
        assert len(nodes) / len(frame_heights(nodes)) > limit / 4  # and are not much smaller


def test_tensorstore_can_add_to_what_we_write() -> None:
    values = many(300)
    manifest, nodes = encode(make_entries(values), 1000)
    database = open_database(manifest, nodes, DATA)
    database.write(b"params.layers_00010.new", b"added").result()
    database.write(next(iter(values)), None).result()
    assert database.read(b"params.layers_00010.new").result().value == b"added"
    assert len(database.list().result()) == len(values)


def test_tensorstore_agrees_with_the_statistics() -> None:
    values = many(300)
    manifest, nodes = encode(make_entries(values), 1000)
    database = open_database(manifest, nodes, {})
    dumped = ts.ocdbt.dump(database.base).result()
    (version,) = dumped["versions"]
    assert version["root"]["statistics"] == {
        "num_keys": len(values),
        "num_tree_bytes": len(nodes),
        "num_indirect_value_bytes": sum(value[2] for value in values.values() if isinstance(value, tuple)),
    }
    assert version["generation_number"] == 1
    assert version["commit_time"] == CREATED


def test_encoding_is_reproducible() -> None:
    entries = make_entries(many(300))
    assert encode(entries, 1000) == encode(entries, 1000)


keys = st.one_of(
    st.binary(max_size=6), st.builds(lambda n, s: b"prefix" * n + s, st.integers(0, 4), st.binary(max_size=3))
)
places = st.tuples(st.sampled_from(["d/0", "d/1", "p/q/é"]), st.integers(0, 2**62), st.integers(0, 2**61))


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(keys, st.one_of(st.binary(max_size=20), places), max_size=40), st.integers(1, 400))
def test_round_trip(values: dict[bytes, Value], node_limit: int) -> None:
    entries = make_entries(values)
    decoded = decode(*encode(entries, node_limit))
    assert values_of(decoded) == values
    assert are_equal(decode(*encode(decoded, node_limit)), decoded)


ONE = make_entries({b"a": ("d/00", 1, 2), b"b": b"x"})


def test_a_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="65536 bytes"):
        encode(replace(ONE, files=["d" * 65536]))


def test_the_database_id_has_16_bytes() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        encode_entries(ONE, node_file=NODE_FILE, database_id=b"short", created_ns=0)
