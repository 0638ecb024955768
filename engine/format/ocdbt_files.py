"""The data file table, with which every OCDBT manifest and node begins.

https://google.github.io/tensorstore/kvstore/ocdbt/index.html#data-file-table-format
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .ocdbt_columns import shared_prefixes
from .ocdbt_entries import PATH_LIMIT, is_inside
from .varint import encode_varint, encode_varints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cursor import Cursor


_FILES_LIMIT = 1 << 17
_TABLE_LIMIT = 4 << 20
"""Files, and bytes of their paths together, that a table may have."""


class DataFile(NamedTuple):
    """A file that a manifest or node refers to.

    Attributes:
        path: Its path relative to the directory of the database.
        base: The part of `path`, as bytes, that paths in nodes read from this file are relative to.
    """

    path: str
    base: bytes


def encode_files(paths: Sequence[str]) -> bytes:
    """Encodes a table of files; paths are stored whole, and relative to the directory of the database.

    Args:
        paths: The paths, in the order of their indices.

    Returns:
        The table.

    Raises:
        ValueError: A path is longer than PATH_LIMIT.
    """
    encoded = [path.encode() for path in paths]
    longest = max(map(len, encoded), default=0)
    if longest > PATH_LIMIT:
        raise ValueError(f"the path of a data file has {longest} bytes; the limit is {PATH_LIMIT}")
    shared = shared_prefixes(encoded)
    suffixes = [path[size:] for path, size in zip(encoded, shared.tolist(), strict=True)]
    lengths = np.array([len(suffix) for suffix in suffixes], np.int64)
    bases = bytes(len(encoded))  # varints: no base path
    return b"".join(
        (encode_varint(len(encoded)), encode_varints(shared[1:]), encode_varints(lengths), bases, *suffixes)
    )


def decode_files(cursor: Cursor, base: bytes) -> list[DataFile]:
    """Decodes a table of files.

    Args:
        cursor: Where the table starts.
        base: The base path of the file that the table was read from.

    Returns:
        The files. A path that could lead out of the directory of the database is refused.

    Raises:
        DamagedCheckpointError: The table is not well-formed.
    """
    count = cursor.varint(_FILES_LIMIT)
    if not count:
        return []
    prefixes = [0, *cursor.varints(count - 1, PATH_LIMIT).tolist()]
    suffixes = cursor.varints(count, PATH_LIMIT).tolist()
    bases = cursor.varints(count, PATH_LIMIT).tolist()
    files: list[DataFile] = []
    previous, previous_base, total = b"", b"", 0
    for i in range(count):
        if prefixes[i] > len(previous):
            cursor.fail(f"path {i} of its file table shares {prefixes[i]} bytes with one of {len(previous)}")
        path = previous[: prefixes[i]] + cursor.take(suffixes[i])
        total += len(path)
        if len(base) + len(path) > PATH_LIMIT or total > _TABLE_LIMIT:
            cursor.fail("the paths of its file table are too long")
        if bases[i] > len(path):
            cursor.fail(f"path {i} of its file table is shorter than its base path")
        own_base = path[: bases[i]]
        if prefixes[i] > min(bases[i], len(previous_base)) and own_base != previous_base:
            cursor.fail(f"path {i} of its file table does not share the base path it announces")
        files.append(DataFile(_safe_path(cursor, base + path), base + own_base))
        previous, previous_base = path, own_base
    return files


def _safe_path(cursor: Cursor, path: bytes) -> str:
    try:
        text = path.decode()
    except UnicodeDecodeError:
        cursor.fail(f"the path {path!r} in its file table is not UTF-8")
    # The empty path is how an empty database refers to its missing root.
    if text and not is_inside(text):
        cursor.fail(f"the path {text!r} in its file table leads out of the directory")
    return text
