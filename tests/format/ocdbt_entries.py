"""Databases made from entries, one key at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.engine.format import Database, Entries
from holdfast.engine.format.ocdbt_write import Rows, encode_database, shared_prefixes


def encode_entries(entries: Entries, **options: Any) -> tuple[bytes, bytes]:
    """Encodes a database that holds some entries."""
    return encode_database([rows_of(entries)] if entries.keys else [], **options)


def decode_database(manifest: bytes, read_node: Callable[[str, int, int], bytes], **options: Any) -> Entries:
    """Decodes a database whose nodes are read by their file, offset and length."""
    database = Database(manifest, **options)
    database.decode(lambda places: (read_node(*place) for place in places))
    return database.entries


def are_equal(one: Entries, other: Entries) -> bool:
    return (
        (one.keys, one.inline, one.files) == (other.keys, other.inline, other.files)
        and np.array_equal(one.file_ids, other.file_ids)
        and np.array_equal(one.offsets, other.offsets)
        and np.array_equal(one.lengths, other.lengths)
    )


def rows_of(entries: Entries) -> Rows:
    keys = entries.keys
    shared = shared_prefixes(keys)
    suffixes = [key[size:] for key, size in zip(keys, shared.tolist(), strict=True)]
    inline = [value for value in entries.inline if value is not None]
    outside = np.array([value is None for value in entries.inline], bool)
    lengths = entries.lengths.astype(np.int64)
    lengths[~outside] = [len(value) for value in inline]
    return Rows(
        key=keys.__getitem__,
        shared=shared,
        suffix_ends=np.cumsum([len(suffix) for suffix in suffixes], dtype=np.int64),
        text=b"".join(suffixes),
        outside=outside,
        lengths=lengths,
        file_ids=entries.file_ids,
        offsets=entries.offsets,
        inline=inline,
        files=entries.files,
    )
