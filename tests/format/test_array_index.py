"""The index encoded from columns equals the index encoded from single keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.format.ocdbt_entries import decode_database

from holdfast.engine.errors import DamagedCheckpointError
from holdfast.engine.format import (
    CHECKSUMS_MAGIC,
    ArrayIndex,
    Database,
    Entries,
    NodePlace,
    chunk_keys,
    encode_array_metadata,
    key_order,
    metadata_keys,
)

Grid = tuple[int, ...]

FILES = [f"d/0123abcd.{process}.0" for process in range(300)]


def make_index(arrays: dict[str, Grid]) -> ArrayIndex:
    names = [list(arrays)[position] for position in key_order(list(arrays))]
    grids = [arrays[name] for name in names]
    total = sum(int(np.prod(grid)) for grid in grids)
    numbers = np.arange(total)
    return ArrayIndex(
        names=names,
        grids=grids,
        metadata=[f"{{{name}}}".encode() for name in names],
        files=FILES,
        file_ids=numbers * 7 % len(FILES),
        offsets=numbers * 64,
        lengths=numbers % 50_000 + 1,
        checksums=(numbers * 2_654_435_761 % (1 << 32)).astype(np.uint32),
    )


def expected_entries(index: ArrayIndex) -> dict[bytes, tuple[bytes | None, str, int, int]]:
    keys = [key for name, grid in zip(index.names, index.grids, strict=True) for key in chunk_keys(name, grid)]
    entries: dict[bytes, tuple[bytes | None, str, int, int]] = {
        key: (None, FILES[index.file_ids[i]], int(index.offsets[i]), int(index.lengths[i]))
        for i, key in enumerate(keys)
    }
    for name, content in zip(index.names, index.metadata, strict=True):
        entries[metadata_keys([name])[0]] = (content, "", 0, 0)
    return entries


def as_dict(entries: Entries) -> dict[bytes, tuple[bytes | None, str, int, int]]:
    places = zip(entries.file_ids.tolist(), entries.offsets.tolist(), entries.lengths.tolist(), strict=True)
    return {
        key: (value, "" if value is not None else entries.files[file], offset, length)
        for key, value, (file, offset, length) in zip(entries.keys, entries.inline, places, strict=True)
    }


def part(content: bytes, path: str, offset: int, length: int) -> bytes:
    return content[offset : offset + length]


def check(index: ArrayIndex, node_limit: int, **options: int) -> bytes:
    manifest, nodes = index.encode(
        node_file="d/index", database_id=bytes(16), created_ns=1, node_limit=node_limit, **options
    )
    found = decode_database(manifest, lambda _, offset, length: nodes[offset : offset + length])
    assert found.keys == sorted(found.keys)
    assert as_dict(found) == expected_entries(index)
    checksums = dict(zip(found.keys, found.checksums.tolist(), strict=True))
    chunks = [key for name, grid in zip(index.names, index.grids, strict=True) for key in chunk_keys(name, grid)]
    assert [checksums.pop(key) for key in chunks] == index.checksums.tolist()
    assert set(checksums.values()) <= {-1}  # of the metadata
    return nodes


ARRAYS: dict[str, dict[str, Grid]] = {
    "none": {},
    "root": {"": (13,)},
    "one": {"w": (1, 1)},
    "names_that_begin_alike": {"a": (2,), "a.b": (11,), "a-b": (3,), "ab": (1,), "a b": (12, 2), "é.ü": (2,)},
    "grids": {"scalar": (), "line": (120,), "plane": (12, 11), "cube": (2, 11, 3), "empty": (3, 0), "thin": (1, 101)},
    "many_alike": {f"layers.{i}.mlp.kernel": (8,) for i in range(300)} | {f"layers.{i}.bias": () for i in range(300)},
}


@pytest.mark.parametrize("node_limit", [200, 3000, 1 << 20])
@pytest.mark.parametrize("name", ARRAYS)
def test_every_key_has_its_value(name: str, node_limit: int) -> None:
    nodes = check(make_index(ARRAYS[name]), node_limit)
    assert len(nodes) < node_limit + 1000 or name not in ("one", "root")


@pytest.mark.parametrize("batch", [1, 50, 400])
def test_a_stretch_at_a_time(batch: int) -> None:
    check(make_index(ARRAYS["many_alike"] | ARRAYS["grids"]), 2000, batch=batch)


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1, max_size=4),
        st.lists(st.integers(0, 12), max_size=3).map(tuple),
        max_size=4,
    ),
    st.integers(100, 5000),
)
def test_any_arrays(arrays: dict[str, Grid], node_limit: int) -> None:
    check(make_index(arrays), node_limit)


@pytest.mark.parametrize("order", [["layers.250", "layers.1", "layers.7"], ["layers.1", "layers.7", "layers.250"]])
def test_nodes_read_in_any_order_give_sorted_entries(order: list[str]) -> None:
    index = make_index(ARRAYS["many_alike"])
    manifest, nodes = index.encode(node_file="d/index", database_id=bytes(16), created_ns=1, node_limit=2000)
    database = Database(manifest)
    sizes = []
    for name in order:
        ranges = [(name.encode(), f"{name}/".encode())]
        database.decode(lambda places: [part(nodes, *place) for place in places], ranges)
        sizes.append(len(database.entries))
        assert database.entries.keys == sorted(database.entries.keys)
    assert sizes == sorted(set(sizes))  # each step reads further nodes
    expected = expected_entries(index)
    assert as_dict(database.entries) == {key: expected[key] for key in database.entries.keys}
    database.decode(lambda places: [part(nodes, *place) for place in places])
    assert as_dict(database.entries) == expected


def test_nodes_that_are_read_again_count_once() -> None:
    """Those before a read that fails are kept, and one that fails does not use up the limit of memory."""
    index = make_index(ARRAYS["many_alike"])
    manifest, nodes = index.encode(node_file="d/index", database_id=bytes(16), created_ns=1, node_limit=2000)
    asked: list[int] = []

    def read(places: Sequence[NodePlace], *, damaged: int | None = None) -> Iterator[bytes]:
        for place in places:
            asked.append(place.offset)
            yield bytes(place.length) if place.offset == damaged else part(nodes, *place)

    Database(manifest).decode(read)
    last = asked[-1]
    database = Database(manifest, memory_limit=1 << 20)
    for _ in range(1000):
        with pytest.raises(DamagedCheckpointError, match="the node at offset"):
            database.decode(partial(read, damaged=last))
    asked.clear()
    database.decode(read)
    assert asked == [last]
    assert as_dict(database.entries) == expected_entries(index)


def test_a_node_that_is_read_again_raises_the_limit_again() -> None:
    """It has raised the limit of memory before its missing checksums are noticed."""
    index = make_index({f"layers.{number}.kernel": (300,) for number in range(200)})
    manifest, nodes = index.encode(node_file="d/index", database_id=bytes(16), created_ns=1, node_limit=1 << 20)
    database = Database(manifest, memory_limit=1 << 20)
    with pytest.raises(DamagedCheckpointError, match="it lacks the checksums"):
        database.decode(lambda places: [part(nodes, *place)[:-4] for place in places])
    database.decode(lambda places: [part(nodes, *place) for place in places])
    assert as_dict(database.entries) == expected_entries(index)


@given(st.sets(st.integers(0, 40)), st.lists(st.integers(-1, 41)))
def test_finding_keys(known: set[int], wanted: list[int]) -> None:
    keys = sorted(b"%02d" % number for number in known)
    expected = [keys.index(b"%02d" % number) if number in known else -1 for number in wanted]
    entries = Entries(keys, [], [], *[np.zeros(0, np.int64)] * 4)
    assert entries.find([b"%02d" % number for number in wanted]) == expected


def test_nodes_keep_to_their_limit_with_many_files() -> None:
    index = make_index({f"layers.{i}.kernel": (300,) for i in range(20)})
    manifest, nodes = index.encode(node_file="d/index", database_id=bytes(16), created_ns=1, node_limit=10_000)
    sizes: list[int] = []

    def read(path: str, offset: int, length: int) -> bytes:
        sizes.append(int.from_bytes(nodes[offset + 4 : offset + 12], "little"))  # without the checksums behind it
        return nodes[offset : offset + length]

    assert len(decode_database(manifest, read)) == 6020
    assert max(sizes) <= 10_000
    assert len(sizes) < 1.5 * len(nodes) / 10_000 + 3  # and use it


def test_checksums_follow_every_node_or_none() -> None:
    index = make_index({f"layers.{i}.kernel": (300,) for i in range(20)})
    manifest, nodes = index.encode(node_file="d/index", database_id=bytes(16), created_ns=1, node_limit=10_000)
    letters = [found.start() for found in re.finditer(re.escape(CHECKSUMS_MAGIC), nodes)]
    assert len(letters) > 3
    for position in letters:
        damaged = nodes[:position] + b"h" + nodes[position + 1 :]
        with pytest.raises(DamagedCheckpointError, match="checksums follow some nodes"):
            decode_database(manifest, partial(part, damaged))


def test_tensorstore_reads_it() -> None:
    context = ts.Context()
    values = np.arange(60 * 50, dtype=np.float32).reshape(60, 50)
    names = [f"layer{i}.kernel" for i in range(40)]
    names = [names[position] for position in key_order(names)]
    arrays = [values + i for i in range(40)]
    content: dict[str, Any] = {}
    file_ids, offsets = [], []
    for array in arrays:
        for number in range(60):  # one file a row
            path = f"d/0123abcd.{number}.0"
            file_ids.append(number)
            offsets.append(len(content.setdefault(path, bytearray())))
            content[path] += array[number].tobytes()
    metadata = encode_array_metadata((60, 50), "float32", (1, 50)).replace(b',{"name":"crc32c"}', b"")
    columns = (np.array(file_ids), np.array(offsets), np.full(2400, 200), np.zeros(2400, np.uint32))
    index = ArrayIndex(names, [(60, 1)] * 40, [metadata] * 40, list(content), *columns)
    manifest, nodes = index.encode(node_file="d/index", database_id=bytes(16), created_ns=1, node_limit=3000)
    store = ts.KvStore.open("memory://a/", context=context).result()
    for path, data in {**content, "d/index": nodes, "manifest.ocdbt": manifest}.items():
        store.write(path, bytes(data)).result()
    assert len(ts.KvStore.open("memory://a/|ocdbt:", context=context).result().list().result()) == 40 * 61
    for name, array in zip(names, arrays, strict=True):
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": "memory://a/", "path": f"{name}/"},
            "fill_missing_data_reads": False,
        }
        np.testing.assert_array_equal(ts.open(spec, open=True, context=context).result().read().result(), array)


def test_indexes_that_cannot_be_stored() -> None:
    nothing, none = np.zeros(0, np.int64), np.zeros(0, np.uint32)
    with pytest.raises(ValueError, match="other lengths"):
        ArrayIndex(["a"], [(2,)], [b""], FILES, nothing, nothing, nothing, none)
    for index, message in (
        (make_index({"a" * 65_530: (5,)}), "more than 65535 bytes"),
        (ArrayIndex(["a"], [(0,)], [bytes((1 << 20) + 1)], FILES, nothing, nothing, nothing, none), "1048576 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            index.encode(node_file="d/index", database_id=bytes(16), created_ns=1)
