"""The files of a TensorFlow checkpoint: an index, and data files beside it with the elements of the tensors.

The format is that of ``tensorflow/core/util/tensor_bundle`` ("V2"). A checkpoint is named by a prefix, ``dir/ckpt-5``;
its files are ``dir/ckpt-5.index`` and ``dir/ckpt-5.data-00000-of-00001``, with a number for each data file.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....engine.arrays import read_checked
from ....engine.errors import DamagedCheckpointError, FormatVersionError, UnsupportedLeafError
from ....engine.format import Cursor, crc32c, extend
from ....engine.sources import StoredArray, StoredPart, entry_size
from ....engine.storage import Location
from .index import (
    STRING,
    VARIANT,
    BundleEntry,
    BundleHeader,
    decode_entry,
    decode_header,
    masked,
    read_table,
    read_varint,
    slice_key,
)

MOST_LEAVES = 1 << 16  # elements of a tensor that may become leaves of their own
_CHECKSUM_BYTES = 4
_PADDING = 4  # times the bytes of the text: the most that an array of elements padded to the longest may take
_SMALL = 1 << 20  # bytes of such an array that are always accepted


def as_leaves(texts: list[bytes], entry: BundleEntry) -> Any:
    """Return text as one leaf, or as lists of leaves: variants, and text that numpy's arrays of bytes cannot hold."""
    shape = entry.shape
    if not shape:
        return texts[0]
    longest = max(map(len, texts), default=0)
    fits = max(longest, 1) * len(texts) <= _PADDING * sum(map(len, texts)) + _SMALL
    if not texts or (entry.kind != VARIANT and fits and not any(text.endswith(b"\0") for text in texts)):
        return np.array(texts, f"S{max(longest, 1)}").reshape(shape)
    if len(texts) > MOST_LEAVES:
        raise UnsupportedLeafError(f"{len(texts)} pieces of text that no array of numpy can hold")
    return _nested(texts, shape)


def as_objects(texts: list[bytes], shape: tuple[int, ...]) -> bytes | NDArray[Any]:
    """Return text as TensorFlow does: bytes, or an array of objects that are bytes."""
    if not shape:
        return texts[0]
    found = np.empty(len(texts), object)
    found[:] = texts
    return found.reshape(shape)


def _texts(data: bytes, entry: BundleEntry, order: Any) -> list[bytes]:
    """Decode a tensor of text: the lengths with a checksum, then the text."""
    if not data and not entry.count:
        return []
    cursor = Cursor(data, "its text")
    lengths = cursor.wide_varints(entry.count)
    noted = cursor.take(_CHECKSUM_BYTES)
    if any(lengths >> np.uint64(32)):
        fixed = b"".join(int(length).to_bytes(8 if length >> 32 else 4, order) for length in lengths.tolist())
    else:
        fixed = lengths.astype(np.dtype(np.uint32).newbyteorder(order)).tobytes()
    crc = crc32c(fixed)
    if masked(crc).to_bytes(_CHECKSUM_BYTES, order) != noted:
        raise DamagedCheckpointError("the lengths of its text do not have the checksum in the file")
    if masked(extend(extend(crc, noted), data[cursor.position :])) != entry.checksum:
        raise DamagedCheckpointError("its text does not have the checksum in the file")
    found = [cursor.take(length) for length in lengths.tolist()]
    cursor.finish()
    return found


def _variants(data: bytes, entry: BundleEntry, order: Any) -> list[bytes]:
    """Decode messages, each with its length in front and a checksum of everything so far behind it."""
    found, position, crc = [], 0, 0
    for _ in range(entry.count):
        length, position = read_varint(data, position)
        if length > len(data) - position - _CHECKSUM_BYTES:
            raise DamagedCheckpointError(f"a variant claims {length} bytes of {len(data)}")
        found.append(data[position : position + length])
        position += length
        noted = data[position : position + _CHECKSUM_BYTES]
        position += _CHECKSUM_BYTES
        crc = extend(extend(crc, length.to_bytes(8, order)), found[-1])
        if masked(crc).to_bytes(_CHECKSUM_BYTES, order) != noted:
            raise DamagedCheckpointError("a variant does not have the checksum in the file")
        crc = extend(crc, noted)
    if position != len(data) or (data and masked(crc) != entry.checksum):
        raise DamagedCheckpointError("its variants do not have the checksum in the file")
    return found


def _nested(texts: list[bytes], shape: tuple[int, ...]) -> Any:
    if len(shape) == 1:
        return texts
    step = math.prod(shape[1:])
    return [_nested(texts[first * step : (first + 1) * step], shape[1:]) for first in range(shape[0])]


INDEX = ".index"
_INDEX_LIMIT = 1 << 30  # bytes
_SLICES = b"\0"  # the first byte of the keys of slices


class Bundle:
    """A checkpoint whose index has been read; its tensors are the entries by name."""

    def __init__(self, prefix: Location) -> None:
        self.prefix = prefix
        self.tensors: dict[str, BundleEntry] = {}
        self._slices: dict[bytes, BundleEntry] = {}
        place = prefix.parent / f"{prefix.name}{INDEX}"
        content = read_checked(place, None, limit=_INDEX_LIMIT)
        try:
            self._header = self._read(read_table(content))
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{place} is damaged: {error}") from error
        except FormatVersionError as error:
            raise FormatVersionError(f"{place}: {error}") from error
        self._index_bytes = len(content)

    @functools.cached_property
    def nbytes(self) -> int:
        return self._index_bytes + sum(self._sizes.values())

    def data_file(self, number: int) -> str:
        return f"{self.prefix.name}.data-{number:05d}-of-{self._header.shards:05d}"

    def array(self, name: str) -> StoredArray:
        """Return a tensor of numbers without reading it."""
        entry = self.tensors[name]
        if entry.dtype is None:
            raise UnsupportedLeafError(unknown_type(entry.kind))
        return StoredArray(entry.dtype, entry.shape, {"kind": "numpy"}, lambda: self._parts(name, entry))

    def is_text(self, name: str) -> bool:
        """Whether the elements of a tensor are text or messages, which are bytes as well."""
        return self.tensors[name].kind in (STRING, VARIANT)

    def check_texts(self) -> None:
        """Refuse text of more bytes than the files have, before it is read."""
        sizes = [
            entry.size
            for name, entry in self.tensors.items()
            if self.is_text(name) and entry.offset + entry.size <= self._sizes.get(self.data_file(entry.shard), 0)
        ]
        if sum(sizes) > self.nbytes:
            raise DamagedCheckpointError(f"{self.prefix}: its text claims {sum(sizes)} of {self.nbytes} bytes")

    def texts(self, name: str) -> list[bytes]:
        entry = self.tensors[name]
        try:
            if entry.slices:
                raise DamagedCheckpointError("text cannot be stored in slices")
            decode = _variants if entry.kind == VARIANT else _texts
            return decode(self._bytes(entry), entry, "big" if self._header.big_endian else "little")
        except DamagedCheckpointError as error:
            file = self.prefix.parent / self.data_file(entry.shard)
            raise DamagedCheckpointError(f"{file}: tensor {name!r:.200}: {error}") from error

    def _read(self, entries: Sequence[tuple[bytes, bytes]]) -> BundleHeader:
        if not entries or entries[0][0]:
            raise DamagedCheckpointError("it has no header")
        header = decode_header(entries[0][1])
        for key, value in entries[1:]:
            try:
                entry = decode_entry(value, header)
                if key.startswith(_SLICES):
                    self._slices[key] = entry
                else:
                    self.tensors[key.decode("utf-8")] = entry
            except UnicodeDecodeError as error:
                raise DamagedCheckpointError(f"{key!r:.200} is not the name of a tensor: {error}") from error
            except DamagedCheckpointError as error:
                raise DamagedCheckpointError(f"tensor {key.decode('utf-8', 'replace')!r:.200}: {error}") from error
        return header

    def _parts(self, name: str, entry: BundleEntry) -> list[StoredPart]:
        if not entry.slices:
            return [self._part(entry, (0,) * len(entry.shape))]
        found = []
        for one in entry.slices:
            start, shape = one.box(entry.shape)
            stored = self._slices.get(slice_key(name.encode(), one))
            if stored is None or stored.slices or (stored.kind, stored.shape) != (entry.kind, shape):
                raise DamagedCheckpointError(f"its slice at {list(start)} of shape {list(shape)} is missing")
            found.append(self._part(stored, start))
        return found

    def _part(self, entry: BundleEntry, start: tuple[int, ...]) -> StoredPart:
        dtype = entry.dtype
        assert dtype is not None
        self._check_range(entry)
        return StoredPart(
            start=start,
            shape=entry.shape,
            file=self.data_file(entry.shard),
            offset=entry.offset,
            length=entry.size,
            dtype=dtype.newbyteorder(">" if self._header.big_endian else "<"),
            finish=_check_bools if dtype.kind == "b" else None,
            is_intact=lambda data: masked(crc32c(data)) == entry.checksum,
        )

    def _bytes(self, entry: BundleEntry) -> bytes:
        self._check_range(entry)
        if not entry.size:
            return b""
        with (self.prefix.parent / self.data_file(entry.shard)).open_data() as reader:
            return reader.read(entry.offset, entry.size).tobytes()

    def _check_range(self, entry: BundleEntry) -> None:
        file = self.data_file(entry.shard)
        size = self._sizes.get(file)
        if size is None and entry.size:
            raise DamagedCheckpointError(f"{file} is missing: the checkpoint is incomplete")
        if entry.size and entry.offset + entry.size > (size or 0):
            raise DamagedCheckpointError(
                f"{file} is cut off: expected {entry.size} bytes at offset {entry.offset}, the file has {size}"
            )

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """The sizes of the data files that exist, in bytes."""
        folder, found = self.prefix.parent, {}
        names = {self.data_file(entry.shard) for entry in (*self.tensors.values(), *self._slices.values())}
        for entry in folder.entries():
            if entry.name in names and not entry.is_directory:
                found[entry.name] = entry_size(folder, entry)
        return found


def unknown_type(kind: int) -> str:
    return f"elements of TensorFlow's type {kind}, which holdfast does not read"


def _check_bools(elements: NDArray[Any]) -> NDArray[Any]:
    if np.any(elements.view(np.uint8) > 1):
        raise DamagedCheckpointError("its elements are neither true nor false")
    return elements
