"""The OCDBT manifest: the configuration of a database, and where the root of each version lies.

https://google.github.io/tensorstore/kvstore/ocdbt/index.html#manifest-format
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..errors import FormatVersionError
from .cursor import INT64_MAX, Cursor
from .ocdbt_files import decode_files, encode_files
from .ocdbt_frames import MANIFEST_MAGIC, decode_frame, encode_frame
from .varint import encode_varint

_MISSING = (1 << 64) - 1
"""Offset and length of the root of an empty database."""
_INLINE_BYTES = 100
_NODE_BYTES = 8 << 20
_ARITY_LOG2 = 4
_SINGLE, _NUMBERED = 0, 1


@dataclass(frozen=True, slots=True)
class Root:
    """The root node of one version of a database.

    Attributes:
        height: Levels below the root.
        file: The file that holds it, relative to the directory of the database.
        base: The path, as bytes, that paths in the node are relative to.
        offset: Where it starts in the file, in bytes.
        length: Its size, in bytes.
        key_count: Keys in the tree.
        tree_bytes: Size of all nodes, in bytes.
        value_bytes: Size of all values in data files, in bytes.
    """

    height: int
    file: str
    base: bytes
    offset: int
    length: int
    key_count: int
    tree_bytes: int
    value_bytes: int


def encode_manifest(root: Root | None, database_id: bytes, created_ns: int) -> bytes:
    """Encodes the manifest of a database with one version.

    Args:
        root: Its root; None for an empty database.
        database_id: 16 bytes that no other database has.
        created_ns: When the version was made, in nanoseconds since 1970-01-01 UTC.

    Returns:
        The content of ``manifest.ocdbt``.
    """
    if len(database_id) != 16:
        raise ValueError(f"a database id has 16 bytes, not {len(database_id)}")
    if root is None:
        root = Root(0, "", b"", _MISSING, _MISSING, 0, 0, 0)
    configuration = (
        database_id,
        encode_varint(_SINGLE),
        encode_varint(_INLINE_BYTES),
        encode_varint(_NODE_BYTES),
        bytes([_ARITY_LOG2]),
        encode_varint(0),  # nodes are not compressed
    )
    versions = (
        encode_files([root.file]),
        encode_varint(1),  # one version,
        encode_varint(1),  # which is the first generation
        bytes([root.height]),
        encode_varint(0),
        encode_varint(root.offset),
        encode_varint(root.length),
        encode_varint(root.key_count),
        encode_varint(root.tree_bytes),
        encode_varint(root.value_bytes),
        struct.pack("<Q", created_ns),
        encode_varint(0),  # no older versions in nodes of their own
    )
    return encode_frame(MANIFEST_MAGIC, b"".join((*configuration, *versions)))


def decode_manifest(manifest: bytes, source: str) -> Root | None:
    """Decodes a manifest.

    Args:
        manifest: The content of ``manifest.ocdbt``.
        source: Its name, for error messages.

    Returns:
        The root of the newest version; None when that is empty.

    Raises:
        DamagedCheckpointError: The manifest does not pass its checks.
        FormatVersionError: The versions lie in numbered manifests.
    """
    cursor = decode_frame(MANIFEST_MAGIC, manifest, source)
    cursor.take(16)
    kind = cursor.varint()
    if kind == _NUMBERED:
        raise FormatVersionError(
            f"{source} belongs to an OCDBT database with numbered manifests, which holdfast does not read; "
            "copy it with TensorStore into a database with a single manifest"
        )
    if kind != _SINGLE:
        cursor.fail(f"manifest kind {kind} is not one of 0 (single) and 1 (numbered)")
    cursor.varints(2, (1 << 32) - 1)
    arity_log2 = cursor.byte()
    if not 1 <= arity_log2 <= 16:
        cursor.fail(f"its version tree has an arity of 2**{arity_log2}")
    compression = cursor.varint()
    if compression > 1:
        raise FormatVersionError(f"{source} names the compression method {compression}; known are 0 and 1 (zstd)")
    cursor.take(4 * compression)  # the level
    root = _decode_versions(cursor, 1 << arity_log2)
    cursor.finish()
    return root


def _decode_versions(cursor: Cursor, arity: int) -> Root | None:
    files = decode_files(cursor, b"")
    count = cursor.varint(arity)
    if not count:
        cursor.fail("it holds no version")
    generations = cursor.varints(count)
    if generations[0] < 1 or (generations[1:] <= generations[:-1]).any():
        cursor.fail("the generations of its versions are not increasing")
    heights = cursor.column(count)
    file_ids = cursor.varints(count, len(files) - 1)
    places = [cursor.wide_varints(count) for _ in range(2)]
    statistics = [int(cursor.wide_varints(count)[-1]) for _ in range(3)]
    cursor.take(8 * count)  # commit times
    older = cursor.varint(64)
    cursor.varints(older)  # generations
    cursor.varints(older, len(files) - 1)
    for _ in range(3):  # offsets, lengths, numbers of generations
        cursor.varints(older)
    cursor.take(9 * older)  # commit times and heights
    offset, length = (int(place[-1]) for place in places)
    if offset == length == _MISSING:
        if heights[-1] or statistics[0]:
            cursor.fail("its newest version has keys but no root")
        return None
    if offset + length > INT64_MAX:
        cursor.fail(f"its root lies at offset {offset}, where no file reaches")
    file = files[int(file_ids[-1])]
    return Root(int(heights[-1]), file.path, file.base, offset, length, *statistics)
