"""Damaged and hostile databases: each is refused with one of our errors, before memory is taken."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.format.memory import at_most
from tests.format.ocdbt_entries import are_equal, decode_database, encode_entries

from holdfast.engine.errors import DamagedCheckpointError, FormatVersionError, HoldfastError
from holdfast.engine.format import Entries, crc32c
from holdfast.engine.format.codecs import encode_varint, encode_varints
from holdfast.engine.format.ocdbt_read import MANIFEST_MAGIC, NODE_MAGIC, Root
from holdfast.engine.format.ocdbt_write import encode_frame, encode_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENTRIES = Entries(
    keys=[b"a/c/0", b"a/c/1", b"a/zarr.json"],
    inline=[None, None, b"{}"],
    files=["d/0", "d/1"],
    file_ids=np.array([0, 1, 0]),
    offsets=np.array([0, 200, 0]),
    lengths=np.array([100, 1000, 0]),
    checksums=np.array([-1, -1, -1]),
)


@dataclass
class Database:
    manifest: bytes
    nodes: bytes

    def decode(self, **options: Any) -> Entries:
        return decode_database(self.manifest, lambda _, start, size: self.nodes[start : start + size], **options)


OPTIONS: dict[str, Any] = {"node_file": "d/index", "database_id": bytes(16), "created_ns": 1}


@pytest.fixture(params=[1 << 20, 120], ids=["one-node", "two-leaves"])
def database(request: pytest.FixtureRequest) -> Database:
    return Database(*encode_entries(ENTRIES, **OPTIONS, node_limit=request.param))


def varints(*values: int) -> bytes:
    return b"".join(map(encode_varint, values))


def with_nodes(nodes: bytes, *, height: int = 0, length: int | None = None, offset: int = 0, keys: int = 1) -> Database:
    """A manifest whose root is the last `length` bytes of some nodes."""
    length = len(nodes) - offset if length is None else length
    return Database(encode_manifest(Root(height, "d/index", b"", offset, length, keys, 0, 0), bytes(16), 0), nodes)


def node(*fields: bytes) -> bytes:
    return encode_frame(NODE_MAGIC, b"".join(fields))


NO_FILES = b"\0"
INDEX_FILE = b"\1\7\0d/index"


def damages(content: bytes) -> Iterator[bytes]:
    """Generates the content with each bit flipped in turn, and cut off everywhere."""
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
    yield from (content[:size] for size in range(len(content)))


def test_every_flipped_bit_and_truncation_is_found(database: Database) -> None:
    assert are_equal(database.decode(), ENTRIES)
    for part in ("manifest", "nodes"):
        for damaged in damages(getattr(database, part)):
            with pytest.raises(DamagedCheckpointError):
                replace(database, **{part: damaged}).decode()


def reframed(frame: bytes, version: int, compression: int) -> bytes:
    changed = frame[:12] + bytes([version, compression]) + frame[14:-4]
    return changed + struct.pack("<I", crc32c(changed))


def last_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


DAMAGED, OTHER = DamagedCheckpointError, FormatVersionError
NAMED: dict[str, tuple[str, Callable[[bytes], bytes], type[Exception], str]] = {
    "appended": ("manifest", lambda content: content + b"\0", DAMAGED, r"expected \d+ bytes, found"),
    "end": ("manifest", lambda content: content[:-1] + b"\0\1", DAMAGED, r"^manifest\.ocdbt is damaged"),
    "a node": ("nodes", last_bit, DAMAGED, r"node at offset \d+ of d/index is damaged: .* checksum"),
    "newer version": ("manifest", lambda content: reframed(content, 1, 0), OTHER, "OCDBT"),
    "newer compression": ("manifest", lambda content: reframed(content, 0, 2), OTHER, "OCDBT"),
    "not compressed": ("manifest", lambda content: reframed(content, 0, 1), DAMAGED, r"manifest\.ocdbt .*zstd frame"),
}


@pytest.mark.parametrize("name", NAMED)
def test_errors_name_the_place(database: Database, name: str) -> None:
    """Newer formats are not called damaged."""
    part, change, error, message = NAMED[name]
    with pytest.raises(error, match=message):
        replace(database, **{part: change(getattr(database, part))}).decode()


CONFIGURATION = bytes(16) + varints(0, 100, 1 << 23) + b"\4\0"


def version(*numbers: int, generation: int = 1, after: bytes = b"\0") -> bytes:
    """The rest of a manifest, behind its files: the file, offset, length and statistics of the root of one version."""
    return varints(1, generation) + b"\0" + varints(*numbers) + bytes(8) + after


NO_ROOT = (0, 0, 0, 0, 0, 0)
HOSTILE_MANIFESTS = {
    "nothing": b"",
    "short-id": bytes(15),
    "kind": bytes(16) + varints(2, 100, 100) + b"\4\0",
    "arity-1": bytes(16) + varints(0, 100, 100) + b"\0\0",
    "arity-2**63": bytes(16) + varints(0, 100, 100) + b"\x3f\0",
    "files": CONFIGURATION + varints(2**62),
    "no-version": CONFIGURATION + NO_FILES + varints(0, 0),
    "versions": CONFIGURATION + NO_FILES + varints(2**40),
    "no-such-file": CONFIGURATION + NO_FILES + version(*NO_ROOT),
    "generation-0": CONFIGURATION + INDEX_FILE + version(*NO_ROOT, generation=0),
    "generations-not-sorted": CONFIGURATION + INDEX_FILE + varints(2, 2, 1) + b"\0\0" + bytes(12) + bytes(16) + b"\0",
    "offset": CONFIGURATION + INDEX_FILE + version(0, 2**63, 1, 0, 0, 0),
    "keys-without-root": CONFIGURATION + INDEX_FILE + version(0, 2**64 - 1, 2**64 - 1, 3, 0, 0),
    "older-versions": CONFIGURATION + INDEX_FILE + version(*NO_ROOT, after=varints(2**60)),
    "rest": CONFIGURATION + INDEX_FILE + version(*NO_ROOT, after=b"\0rest"),
}


@pytest.mark.parametrize("body", HOSTILE_MANIFESTS.values(), ids=HOSTILE_MANIFESTS)
def test_hostile_manifests(body: bytes) -> None:
    with at_most(), pytest.raises(DamagedCheckpointError):
        decode_database(encode_frame(MANIFEST_MAGIC, body), lambda *place: pytest.fail(f"{place} was read"))


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../other", "a/../../b", "a//b", "a/", "./a", "a\\b", "a\0b"], ids=ascii
)
def test_paths_cannot_leave_the_directory(path: str) -> None:
    table = varints(1, len(path), 0) + path.encode()
    manifest = encode_frame(MANIFEST_MAGIC, CONFIGURATION + table + version(0, 0, 30, 1, 0, 0))
    leaf = node(b"\0", table, varints(1, 1), b"k", varints(5, 1, 0, 0))
    for database in (Database(manifest, b""), with_nodes(leaf)):
        with pytest.raises(DamagedCheckpointError, match="leads out of the directory"):
            database.decode()


HOSTILE_LEAVES = {
    "nothing": (),
    "height": (b"\1", NO_FILES),
    "no-entries": (b"\0", NO_FILES, varints(0)),
    "entries": (b"\0", NO_FILES, varints(2**62)),
    "files": (b"\0", varints(2**62), bytes(100)),
    "many-files": (b"\0", varints(60_000_000), bytes(1000)),
    "path-prefix": (b"\0", varints(2, 9, 1, 1, 0, 0), b"ab", varints(1, 1), b"k", varints(0, 0)),
    "base-path": (b"\0", varints(1, 1, 2), b"a", varints(1, 1), b"k", varints(0, 0)),
    "base-path-prefix": (b"\0", varints(2, 1, 2, 0, 1, 0), b"ab", varints(1, 1), b"k", varints(0, 0)),
    "path-not-text": (b"\0", varints(1, 1, 0), b"\xff", varints(1, 1), b"k", varints(0, 0)),
    "path-too-long": (b"\0", varints(2, 60_000, 60_000, 6000, 0, 0), b"a" * 66_000, varints(1, 1), b"k", varints(0, 0)),
    "key-length": (b"\0", NO_FILES, varints(1, 2**40), b"k", varints(0, 0)),
    "key-too-long": (b"\0", NO_FILES, varints(2, 60_000, 60_000, 6000), b"a" * 66_000, varints(0, 0, 0, 0)),
    "key-missing": (b"\0", NO_FILES, varints(1, 65535), b"k", varints(0, 0)),
    "key-prefix": (b"\0", NO_FILES, varints(2, 2, 1, 1), b"ab", varints(0, 0, 0, 0)),
    "keys-not-sorted": (b"\0", NO_FILES, varints(2, 0, 1, 1), b"ba", varints(0, 0, 0, 0)),
    "keys-equal": (b"\0", NO_FILES, varints(2, 0, 1, 1), b"aa", varints(0, 0, 0, 0)),
    "value-kind": (b"\0", NO_FILES, varints(1, 1), b"k", varints(0, 2)),
    "no-such-file": (b"\0", NO_FILES, varints(1, 1), b"k", varints(1, 1, 0, 0)),
    "inline-value-size": (b"\0", NO_FILES, varints(1, 1), b"k", varints((1 << 20) + 1, 0), bytes((1 << 20) + 1)),
    "inline-value-missing": (b"\0", NO_FILES, varints(1, 1), b"k", varints(2**62, 0)),
    "offset": (b"\0", INDEX_FILE, varints(1, 1), b"k", varints(2**62, 1, 0, 2**62)),
    "length": (b"\0", INDEX_FILE, varints(1, 1), b"k", varints(2**64 - 1, 1, 0, 0)),
    "file-id": (b"\0", INDEX_FILE, varints(1, 1), b"k", varints(1, 1, 1, 0)),
    "rest": (b"\0", NO_FILES, varints(1, 1), b"k", varints(0, 0), b"rest"),
    "more-keys-than-announced": (b"\0", NO_FILES, varints(2, 0, 1, 1), b"ab", varints(0, 0, 0, 0)),
}


@pytest.mark.parametrize("fields", HOSTILE_LEAVES.values(), ids=HOSTILE_LEAVES)
def test_hostile_leaves(fields: tuple[bytes, ...]) -> None:
    with at_most(), pytest.raises(DamagedCheckpointError):
        with_nodes(node(*fields)).decode()


LEAF = node(b"\0", NO_FILES, varints(1, 1), b"k", varints(0, 0))
SIZE = len(LEAF)


HOSTILE_PARENTS = {
    "length": (varints(1, 1, 0), b"k", varints(0, 0, 2**62, 1, 1, 1)),
    "offset": (varints(1, 1, 0), b"k", varints(0, 2**62, 2**62, 1, 1, 1)),
    "file-id": (varints(1, 1, 0), b"k", varints(1, 0, SIZE, 1, 1, 1)),
    "prefix-longer-than-key": (varints(1, 1, 2), b"k", varints(0, 0, SIZE, 1, 1, 1)),
    "key-before-first": (varints(1, 1, 0), b"l", varints(0, 0, SIZE, 1, 1, 1)),
    "key-after-end": (varints(2, 0, 1, 1, 0, 0), b"ak", varints(0, 0, 0, 0, SIZE, SIZE, 1, 1, 1, 1, 1, 1)),
    "same-leaf-twice": (varints(2, 0, 1, 1, 0, 0), b"jk", varints(0, 0, 0, 0, SIZE, SIZE, 1, 1, 1, 1, 1, 1)),
    "rest": (varints(1, 1, 0), b"k", varints(0, 0, SIZE, 1, 1, 1), b"rest"),
    "itself": (varints(1, 1, 0), b"k", varints(0, SIZE, 40, 1, 1, 1)),
}


@pytest.mark.parametrize("fields", HOSTILE_PARENTS.values(), ids=HOSTILE_PARENTS)
def test_hostile_interior_nodes(fields: tuple[bytes, ...]) -> None:
    nodes = LEAF + node(b"\1", INDEX_FILE, *fields)
    with at_most(), pytest.raises(DamagedCheckpointError):
        with_nodes(nodes, height=1, offset=SIZE).decode()


def test_a_leaf_that_is_used_many_times_does_not_fill_the_memory() -> None:
    """Each level refers 64 times to the one below, so that a few KiB describe 64**6 keys."""
    nodes, previous, size, count = LEAF, 0, SIZE, 64
    for height in range(1, 7):
        columns = [np.full(count, value) for value in (0, previous, size, 1, 1, 1)]
        level = node(
            bytes([height]),
            INDEX_FILE,
            varints(count),
            bytes(count - 1) + b"\1" * 2 * count,
            bytes(range(count)),
            *map(encode_varints, columns),
        )
        previous, size = len(nodes), len(level)
        nodes += level
    assert len(nodes) < 10_000
    with at_most(), pytest.raises(DamagedCheckpointError, match="describes a database of more than"):
        with_nodes(nodes, height=6, offset=previous, keys=64**6).decode(memory_limit=2 << 20)


def test_shared_key_prefixes_do_not_fill_the_memory() -> None:
    """Many keys share all but one byte of a long key."""
    count = 50_000
    prefixes = encode_varints(np.full(count - 1, 60_000))
    suffixes = encode_varints(np.array([60_001] + [4] * (count - 1)))
    text = bytes(60_001) + b"".join(struct.pack(">I", n + (1 << 24)) for n in range(1, count))
    leaf = node(b"\0", NO_FILES, varints(count), prefixes, suffixes, text, bytes(2 * count))
    assert len(leaf) < 1 << 20
    with at_most(32 << 20), pytest.raises(DamagedCheckpointError, match="its keys take more than"):
        with_nodes(leaf, keys=count).decode()


def test_a_node_below_itself_and_a_missing_leaf_are_noticed() -> None:
    fields = (b"\1", INDEX_FILE, varints(1, 0, 0))
    loop = next(loop for size in range(100) if len(loop := node(*fields, varints(0, 0, size, 1, 1, 1))) == size)
    with pytest.raises(DamagedCheckpointError, match="expected a node of height 0, found 1"):
        with_nodes(loop, height=1).decode()
    with pytest.raises(DamagedCheckpointError, match="expected 2 sorted keys, found 1"):
        with_nodes(LEAF, keys=2).decode()


MANIFEST, NODES = encode_entries(ENTRIES, **OPTIONS)


@pytest.mark.parametrize(
    ("magic", "frame"), [(MANIFEST_MAGIC, MANIFEST), (NODE_MAGIC, NODES)], ids=["manifest", "node"]
)
@given(data=st.data())
def test_bytes_with_valid_checksums_never_break_the_decoder(magic: int, frame: bytes, data: st.DataObject) -> None:
    body = bytearray(frame[14:-4])
    for position in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=4)):
        body[position] = data.draw(st.integers(0, 255))
    changed = encode_frame(magic, bytes(body[: len(body) - data.draw(st.integers(0, 6))]))
    with contextlib.suppress(HoldfastError):
        (Database(changed, NODES) if magic == MANIFEST_MAGIC else with_nodes(changed, keys=3)).decode()


def test_a_large_file_may_describe_a_large_database() -> None:
    keys = [b"layers.%05d.kernel/c/%d" % (number // 10, number % 10) for number in range(20_000)]
    columns = (np.zeros(20_000, np.int64), np.arange(20_000) * 4096, np.full(20_000, 4096))
    entries = Entries(keys, [None] * 20_000, ["d/0"], *columns, np.full(20_000, -1))
    assert are_equal(Database(*encode_entries(entries, **OPTIONS)).decode(memory_limit=1 << 20), entries)
