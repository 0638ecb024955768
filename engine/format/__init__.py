"""The formats on disk, as pure functions from bytes and to bytes."""

from __future__ import annotations

from .archive import ARCHIVE, ARCHIVE_LIMIT, decode_archive, encode_archive, is_our_archive
from .codecs import (
    LEVELS,
    UINT64_MAX,
    ContentDigest,
    Cursor,
    checksums_of,
    compress_chunks,
    content_digest,
    crc32c,
    decompress,
    decompress_exactly,
    encode_varint,
    extend,
)
from .msgpack import ARRAY_EXTENSION, array_of, decode_array, decode_msgpack, encode_arrays
from .ocdbt_read import (
    CHECKSUMS_MAGIC,
    MANIFEST_NAME,
    Database,
    Entries,
    KeyRange,
    NodePlace,
    add_early_checksums,
    decode_database,
    is_inside,
)
from .ocdbt_write import NODE_LIMIT, ArrayIndex, key_order
from .record import (
    COMPONENT,
    COMPONENTS,
    DELETED,
    DOCUMENT_LIMIT,
    ITEM,
    OWN_FOLDER,
    OWNER,
    PARTIAL,
    PROCESSES,
    RECORD,
    STEP_FOLDER,
    TREES,
    CheckpointRecord,
    FileRecord,
    ItemRecord,
    decode_document,
    decode_metrics,
    encode_document,
    encode_metrics,
    own_item,
    own_shares,
    unsynced,
)
from .zarr import (
    ArrayMetadata,
    DType,
    Stored,
    chunk_keys,
    decode_array_metadata,
    dtype_from_name,
    dtype_name,
    encode_array_metadata,
    metadata_key,
    storage_dtype,
)
