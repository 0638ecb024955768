"""The on-disk language: pure functions, bytes in and bytes out, no input or output."""

from __future__ import annotations

from .array_index import ArrayIndex, key_order
from .checksums import checksums_of, crc32c, extend
from .compression import LEVELS, compress_chunks, decompress_chunk
from .cursor import Cursor
from .documents import DOCUMENT_LIMIT, decode_document, encode_document
from .dtypes import Stored, dtype_from_name, dtype_name, storage_dtype
from .ocdbt import MANIFEST_NAME, decode_database, encode_database
from .ocdbt_entries import Entries
from .varint import encode_varint, encode_varints
from .zarr import (
    METADATA_LIMIT,
    ArrayMetadata,
    chunk_keys,
    decode_array_metadata,
    decode_fill_value,
    encode_array_metadata,
    metadata_key,
)
from .zstd import content_limit, decompress

__all__ = [
    "DOCUMENT_LIMIT",
    "LEVELS",
    "MANIFEST_NAME",
    "METADATA_LIMIT",
    "ArrayIndex",
    "ArrayMetadata",
    "Cursor",
    "Entries",
    "Stored",
    "checksums_of",
    "chunk_keys",
    "compress_chunks",
    "content_limit",
    "crc32c",
    "decode_array_metadata",
    "decode_database",
    "decode_document",
    "decode_fill_value",
    "decompress",
    "decompress_chunk",
    "dtype_from_name",
    "dtype_name",
    "encode_array_metadata",
    "encode_database",
    "encode_document",
    "encode_varint",
    "encode_varints",
    "extend",
    "key_order",
    "metadata_key",
    "storage_dtype",
]
