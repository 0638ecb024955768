"""TensorStore's OCDBT: an ordered database of keys and values in a few files, as one manifest and a B+tree.

Databases written here are read by TensorStore's ``ocdbt`` driver, and the other way round. The format is documented at
https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .ocdbt_entries import Entries as Entries
from .ocdbt_manifest import Root, decode_manifest, encode_manifest
from .ocdbt_nodes import Nodes, encode_leaves, encode_parents, join_levels
from .ocdbt_rows import Rows, rows_of
from .ocdbt_tree import TreeReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MANIFEST_NAME = "manifest.ocdbt"
"""The name of the manifest in the directory of a database."""

MEMORY_LIMIT = 1 << 30
"""Bytes that the nodes and entries of a database that is read may take in memory, unless told otherwise."""


def encode_database(
    entries: Entries, *, node_file: str, database_id: bytes, created_ns: int, node_limit: int = 1 << 20
) -> tuple[bytes, bytes]:
    """Encodes a database with one version, whose nodes are not compressed and lie in one file.

    Args:
        entries: What it holds.
        node_file: The path that the file with the nodes will have, relative to the directory of the database.
        database_id: 16 bytes that no other database has.
        created_ns: When it was made, in nanoseconds since 1970-01-01 UTC.
        node_limit: Bytes that a node should not pass; a node with one value, or two children, may.

    Returns:
        The content of ``manifest.ocdbt``, and the content of `node_file`; the latter is empty when there are no keys.

    Raises:
        ValueError: The entries cannot be stored.
    """
    entries.check()
    batches = [rows_of(entries)] if entries.keys else []
    return encode_rows(
        batches, node_file=node_file, database_id=database_id, created_ns=created_ns, node_limit=node_limit
    )


def encode_rows(
    batches: Iterable[Rows], *, node_file: str, database_id: bytes, created_ns: int, node_limit: int = 1 << 20
) -> tuple[bytes, bytes]:
    """Encodes a database from columns, a stretch at a time.

    Args:
        batches: Stretches of rows, in the order of their keys; each begins a node of its own.
        node_file: The path that the file with the nodes will have, relative to the directory of the database.
        database_id: 16 bytes that no other database has.
        created_ns: When it was made, in nanoseconds since 1970-01-01 UTC.
        node_limit: Bytes that a node should not pass; a node with one value, or two children, may.

    Returns:
        The content of ``manifest.ocdbt``, and the content of `node_file`; the latter is empty when there are no keys.
    """
    frames: list[bytes] = []
    leaves: list[Nodes] = []
    end = 0
    for rows in batches:
        nodes, leaf_level = encode_leaves(rows, node_limit, end)
        frames += nodes
        leaves.append(leaf_level)
        end += sum(map(len, nodes))
    if not leaves:
        return encode_manifest(None, database_id, created_ns), b""
    level = join_levels(leaves)
    while len(level.keys) > 1:
        parents, level = encode_parents(level, node_file, node_limit)
        frames += parents
    root = Root(
        height=level.height,
        file=node_file,
        base=b"",
        offset=int(level.offsets[0]),
        length=int(level.lengths[0]),
        key_count=int(level.key_counts[0]),
        tree_bytes=int(level.tree_bytes[0]),
        value_bytes=int(level.value_bytes[0]),
    )
    return encode_manifest(root, database_id, created_ns), b"".join(frames)


def decode_database(
    manifest: bytes,
    read_node: Callable[[str, int, int], bytes],
    *,
    source: str = MANIFEST_NAME,
    memory_limit: int = MEMORY_LIMIT,
) -> Entries:
    """Decodes the newest version of a database.

    Args:
        manifest: The content of ``manifest.ocdbt``.
        read_node: Reads a part of a file: (path relative to the directory of the database, offset, length) -> bytes.
            No path given to it is absolute or holds "..".
        source: What to call the manifest in error messages.
        memory_limit: Bytes that the nodes and entries may take in memory.

    Returns:
        What it holds. Every checksum was verified.

    Raises:
        DamagedCheckpointError: Something does not pass its checks.
        FormatVersionError: The database uses a part of the format that is not known here.
    """
    root = decode_manifest(manifest, source)
    return Entries() if root is None else TreeReader(read_node, memory_limit).read(root)
