"""The index of a checkpoint is an OCDBT database: it has every key and value, for us and for TensorStore."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    key_order,
    metadata_keys,
)

Grid = tuple[int, ...]
Value = tuple[bytes | None, str, int, int]  # an inline value, or the file, offset and length of another one

FILES = [f"d/0123abcd.{process}.0" for process in range(300)]
CREATED = 1_700_000_000_000_000_000


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


def encoded(index: ArrayIndex, **options: Any) -> tuple[bytes, bytes]:
    return index.encode(node_file="d/index", database_id=bytes(range(16)), created_ns=CREATED, **options)


def keys_of_chunks(index: ArrayIndex) -> list[bytes]:
    return [key for name, grid in zip(index.names, index.grids, strict=True) for key in chunk_keys(name, grid)]


def expected_entries(index: ArrayIndex) -> dict[bytes, Value]:
    entries: dict[bytes, Value] = {
        key: (None, FILES[index.file_ids[i]], int(index.offsets[i]), int(index.lengths[i]))
        for i, key in enumerate(keys_of_chunks(index))
    }
    for name, content in zip(index.names, index.metadata, strict=True):
        entries[metadata_keys([name])[0]] = (content, "", 0, 0)
    return entries


def as_dict(entries: Entries) -> dict[bytes, Value]:
    places = zip(entries.file_ids.tolist(), entries.offsets.tolist(), entries.lengths.tolist(), strict=True)
    return {
        key: (value, "" if value is not None else entries.files[file], offset, length)
        for key, value, (file, offset, length) in zip(entries.keys, entries.inline, places, strict=True)
    }


def part(content: bytes, path: str, offset: int, length: int) -> bytes:
    return content[offset : offset + length]


def read_all(nodes: bytes, places: Sequence[NodePlace]) -> Iterator[bytes]:
    return (part(nodes, *place) for place in places)


def check(index: ArrayIndex, node_limit: int, **options: int) -> list[tuple[int, int]]:
    """Checks that the decoded index has what it was made from; the height and size of each node."""
    manifest, nodes = encoded(index, node_limit=node_limit, **options)
    found_nodes = []

    def read(path: str, offset: int, length: int) -> bytes:
        assert path == "d/index"
        # The size does not include the checksums behind the node.
        found_nodes.append((nodes[offset + 14], int.from_bytes(nodes[offset + 4 : offset + 12], "little")))
        return nodes[offset : offset + length]

    found = decode_database(manifest, read)
    assert found.keys == sorted(found.keys)
    assert as_dict(found) == expected_entries(index)
    checksums = dict(zip(found.keys, found.checksums.tolist(), strict=True))
    assert [checksums.pop(key) for key in keys_of_chunks(index)] == index.checksums.tolist()
    assert set(checksums.values()) <= {-1}  # of the metadata
    return found_nodes


ARRAYS: dict[str, dict[str, Grid]] = {
    "none": {},
    "root": {"": (13,)},
    "one": {"w": (1, 1)},
    "names_that_begin_alike": {"a": (2,), "a.b": (11,), "a-b": (3,), "ab": (1,), "a b": (12, 2), "é.ü": (2,)},
    "grids": {"scalar": (), "line": (120,), "plane": (12, 11), "cube": (2, 11, 3), "empty": (3, 0), "thin": (1, 101)},
    "many_alike": {f"layers.{i}.mlp.kernel": (8,) for i in range(300)} | {f"layers.{i}.bias": () for i in range(300)},
    "nested_prefixes": {"k" * length: () for length in range(1, 300)},
    "longest": {"x" * 65_500: (3,)},
}


@pytest.mark.parametrize("node_limit", [1, 3000, 1 << 20])
@pytest.mark.parametrize("name", ARRAYS)
def test_every_key_has_its_value(name: str, node_limit: int) -> None:
    index = make_index(ARRAYS[name])
    nodes = check(index, node_limit)
    if node_limit == 1:
        assert [height for height, _ in nodes].count(0) == len(expected_entries(index)), "every key has a leaf"
    elif node_limit == 1 << 20:
        assert len(nodes) == min(len(index.names), 1)
    assert encoded(index, node_limit=node_limit) == encoded(index, node_limit=node_limit)


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


@pytest.mark.parametrize("limit", [3000, 10_000, 50_000])
def test_nodes_keep_to_their_limit_with_many_files(limit: int) -> None:
    sizes = [size for _, size in check(make_index({f"layers.{i}.kernel": (300,) for i in range(20)}), limit)]
    assert max(sizes) <= limit
    assert len(sizes) < 1.5 * sum(sizes) / limit + 3, "nodes are not much smaller than their limit"


# ---- nodes are read when they are needed


@pytest.mark.parametrize("order", [["layers.250", "layers.1", "layers.7"], ["layers.1", "layers.7", "layers.250"]])
def test_nodes_read_in_any_order_give_sorted_entries(order: list[str]) -> None:
    index = make_index(ARRAYS["many_alike"])
    manifest, nodes = encoded(index, node_limit=2000)
    database = Database(manifest)
    sizes = []
    for name in order:
        database.decode(partial(read_all, nodes), [(name.encode(), f"{name}/".encode())])
        sizes.append(len(database.entries))
        assert database.entries.keys == sorted(database.entries.keys)
    assert sizes == sorted(set(sizes)), "each step reads further nodes"
    expected = expected_entries(index)
    assert as_dict(database.entries) == {key: expected[key] for key in database.entries.keys}
    database.decode(partial(read_all, nodes))
    assert as_dict(database.entries) == expected


def test_nodes_that_are_read_again_count_once() -> None:
    """Those before a read that fails are kept, and one that fails does not use up the limit of memory."""
    index = make_index(ARRAYS["many_alike"])
    manifest, nodes = encoded(index, node_limit=2000)
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
    manifest, nodes = encoded(index, node_limit=1 << 20)
    database = Database(manifest, memory_limit=1 << 20)
    with pytest.raises(DamagedCheckpointError, match="it lacks the checksums"):
        database.decode(lambda places: (node[:-4] for node in read_all(nodes, places)))
    database.decode(partial(read_all, nodes))
    assert as_dict(database.entries) == expected_entries(index)


def test_checksums_follow_every_node_or_none() -> None:
    manifest, nodes = encoded(make_index({f"layers.{i}.kernel": (300,) for i in range(20)}), node_limit=10_000)
    letters = [found.start() for found in re.finditer(re.escape(CHECKSUMS_MAGIC), nodes)]
    assert len(letters) > 3
    for position in letters:
        damaged = nodes[:position] + b"h" + nodes[position + 1 :]
        with pytest.raises(DamagedCheckpointError, match="checksums follow some nodes"):
            decode_database(manifest, partial(part, damaged))


# ---- TensorStore


@pytest.mark.parametrize("name", ["none", "root", "grids", "nested_prefixes", "longest"])
def test_tensorstore_knows_the_same_keys_and_adds_to_them(name: str) -> None:
    """That it reads the arrays is tested in ``tests/arrays/test_tensorstore.py``."""
    index = make_index(ARRAYS[name])
    context = ts.Context()
    store = ts.KvStore.open("memory://a/", context=context).result()
    manifest, nodes = encoded(index, node_limit=1)
    store.write("manifest.ocdbt", manifest).result()
    store.write("d/index", nodes).result()
    database = ts.KvStore.open("memory://a/|ocdbt:", context=context).result()
    expected, lengths = expected_entries(index), index.lengths.tolist()
    assert sorted(database.list().result()) == sorted(expected)
    for array, content in zip(index.names, index.metadata, strict=True):
        assert database.read(metadata_keys([array])[0]).result().value == content

    base: Any = database.base
    (version,) = ts.ocdbt.dump(base).result()["versions"]
    assert (version["generation_number"], version["commit_time"]) == (1, CREATED)
    if name != "none":
        assert version["root"]["statistics"] == {
            "num_keys": len(expected),
            "num_tree_bytes": len(nodes) - nodes.count(CHECKSUMS_MAGIC) * len(CHECKSUMS_MAGIC) - 4 * len(lengths),
            "num_indirect_value_bytes": sum(lengths),
        }
    database.write(b"new", b"added").result()
    assert database.read(b"new").result().value == b"added"
    assert sorted(database.list().result()) == sorted([*expected, b"new"])


def test_indexes_that_cannot_be_stored() -> None:
    nothing, none = np.zeros(0, np.int64), np.zeros(0, np.uint32)
    with pytest.raises(ValueError, match="other lengths"):
        ArrayIndex(["a"], [(2,)], [b""], FILES, nothing, nothing, nothing, none)
    for index, message in (
        (make_index({"a" * 65_530: (5,)}), "more than 65535 bytes"),
        (ArrayIndex(["a"], [(0,)], [bytes((1 << 20) + 1)], FILES, nothing, nothing, nothing, none), "1048576 bytes"),
        (replace(make_index({"a": (1,)}), files=["d" * 65_536]), "65536 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            encoded(index)
    with pytest.raises(ValueError, match="16 bytes"):
        make_index({}).encode(node_file="d/index", database_id=b"short", created_ns=0)
