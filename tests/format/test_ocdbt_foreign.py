"""Databases that TensorStore wrote, read by us."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tensorstore as ts
from tests.format.ocdbt_entries import decode_database

from holdfast.engine.errors import FormatVersionError
from holdfast.engine.format import Entries
from holdfast.engine.format.codecs import encode_varint
from holdfast.engine.format.ocdbt_read import MANIFEST_MAGIC, NODE_MAGIC
from holdfast.engine.format.ocdbt_write import encode_frame


def open_database(base: Any, context: Any, path: str = "", **config: Any) -> Any:
    spec = {"driver": "ocdbt", "base": f"memory://base/{path}", "config": config}
    return ts.KvStore.open(spec, context=context).result()


@pytest.fixture
def context() -> ts.Context:
    return ts.Context()


@pytest.fixture
def base(context: ts.Context) -> Any:
    """The memory in which databases lie."""
    return ts.KvStore.open("memory://base/", context=context).result()


def write(database: Any, values: dict[bytes, bytes]) -> None:
    """Writes all values as one version."""
    with ts.Transaction() as transaction:
        view = database.with_transaction(transaction)
        for key, value in values.items():
            view.write(key, value)


class Reader:
    """Decodes a database of a base store, and records the nodes that it read."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.nodes: list[bytes] = []

    def file(self, name: str) -> bytes:
        return bytes(self.base.read(name).result().value)

    def read_node(self, file: str, offset: int, length: int) -> bytes:
        node = self.file(file)[offset : offset + length]
        self.nodes.append(node)
        return node

    def entries(self) -> Entries:
        return decode_database(self.file("manifest.ocdbt"), self.read_node)

    def values(self) -> dict[bytes, bytes]:
        entries = self.entries()
        found = {}
        for i, (key, value) in enumerate(zip(entries.keys, entries.inline, strict=True)):
            if value is None:
                start = int(entries.offsets[i])
                value = self.file(entries.files[entries.file_ids[i]])[start : start + int(entries.lengths[i])]
            found[key] = value
        return found


def sample(count: int, seed: int = 0) -> dict[bytes, bytes]:
    """Values; about every second one is too large to lie inline (100 bytes)."""
    rng = random.Random(seed)
    return {f"params.layer{i:06d}/c/0".encode(): rng.randbytes(rng.choice([0, 3, 90, 101, 300])) for i in range(count)}


DATABASES: dict[str, tuple[dict[bytes, bytes], dict[str, Any]]] = {
    "empty": ({}, {}),
    "one": (sample(1), {}),
    "default": (sample(500), {}),
    "all outside": (sample(500), {"max_inline_value_bytes": 0}),
    "all inline": (sample(500), {"max_inline_value_bytes": 1 << 20}),
    "raw interior nodes": (sample(3000), {"max_decoded_node_bytes": 2000, "compression": None}),
    "zstd interior nodes": (sample(700), {"max_decoded_node_bytes": 500}),
    "6000": (sample(6000), {"max_inline_value_bytes": 50}),
    "zstd19": (sample(3000), {"max_inline_value_bytes": 1000, "compression": {"id": "zstd", "level": 19}}),
    # Values that look alike keep their lengths.
    "zeros": ({b"a": bytes(2), b"b": bytes(1), b"c": bytes(3)}, {}),
    "zeros of 4 bytes each": ({b"a": bytes(8), b"b": bytes(4), b"c": bytes(12)}, {}),
    "repeated": ({b"a": b"xy", b"b": b"xyxy", b"c": b""}, {}),
    "empty values": ({b"a": b"", b"b": b""}, {}),
}


@pytest.mark.parametrize(("values", "config"), DATABASES.values(), ids=DATABASES)
def test_databases_of_tensorstore(
    base: Any, context: ts.Context, values: dict[bytes, bytes], config: dict[str, Any]
) -> None:
    database = open_database(base, context, **config)
    if values:
        write(database, values)
    else:
        database.write(b"gone", b"").result()
        database.delete_range(ts.KvStore.KeyRange()).result()
    reader = Reader(base)
    assert reader.values() == values
    if "max_decoded_node_bytes" in config:
        assert len(reader.nodes) > 100
        if "compression" in config:
            assert len({node[14] for node in reader.nodes}) > 2, "nodes are of several heights"
    assert {node[13] for node in reader.nodes} <= {int(config.get("compression", True) is not None)}


@pytest.mark.parametrize("versions", [2, 15, 16, 17, 40, 300])
def test_the_newest_of_several_versions_is_read(base: Any, context: ts.Context, versions: int) -> None:
    """From 17 versions on, the manifest refers to version tree nodes for the older ones."""
    database = open_database(base, context)
    for i in range(versions):
        database.write(f"key{i % 7}".encode(), f"value {i}".encode() * (i % 3 * 20)).result()
    expected = {bytes(key): bytes(database.read(key).result().value) for key in database.list().result()}
    assert Reader(base).values() == expected


def test_paths_below_a_base_path(base: Any, context: ts.Context) -> None:
    """Databases of several processes, merged by reference: data files lie below the directory of each process."""
    merged = open_database(base, context)
    expected: dict[bytes, bytes] = {}
    with ts.Transaction() as transaction:
        for process in range(3):
            values = {f"p{process}".encode() + key: value for key, value in sample(200, process).items()}
            expected |= values
            part = open_database(base, context, f"process_{process}/", max_decoded_node_bytes=1000)
            write(part, values)
            part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    reader = Reader(base)
    assert reader.values() == expected
    files = reader.entries().files
    assert {path.split("/")[0] for path in files} == {"process_0", "process_1", "process_2"}


def test_base_paths_add_up(base: Any, context: ts.Context) -> None:
    """A table's paths are relative to the base path of the file that the table was read from."""

    def table(base: str, path: str) -> bytes:
        return b"".join(map(encode_varint, (1, len(base + path), len(base)))) + (base + path).encode()

    def numbers(*values: int) -> bytes:
        return b"".join(map(encode_varint, values))

    leaf = encode_frame(NODE_MAGIC, b"\0" + table("", "value") + numbers(1, 3) + b"key" + numbers(4, 1, 0, 1))
    child = numbers(0, 0, len(leaf), 1, len(leaf), 4)
    root = encode_frame(NODE_MAGIC, b"\1" + table("q/", "leaf") + numbers(1, 3, 0) + b"key" + child)
    version = numbers(1, 1) + b"\1" + numbers(0, 0, len(root), 1, len(root) + len(leaf), 4) + bytes(8) + b"\0"
    configuration = bytes(16) + numbers(0, 100, 1 << 23, 4, 0)
    manifest = encode_frame(MANIFEST_MAGIC, configuration + table("p/", "root") + version)

    for name, data in {"manifest.ocdbt": manifest, "p/root": root, "p/q/leaf": leaf, "p/q/value": b"-here-"}.items():
        base.write(name, data).result()
    reader = Reader(base)
    assert reader.entries().files == ["p/q/value"]
    assert reader.values() == {b"key": b"here"}
    assert open_database(base, context).read(b"key").result().value == b"here"


def test_numbered_manifests_are_refused_clearly(base: Any, context: ts.Context) -> None:
    write(open_database(base, context, manifest_kind="numbered"), sample(3))
    with pytest.raises(FormatVersionError, match="numbered manifests"):
        Reader(base).entries()
