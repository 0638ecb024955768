"""The files of a TensorFlow checkpoint: an index, and data files beside it with the elements of the tensors.

The format is that of ``tensorflow/core/util/tensor_bundle`` ("V2"). A checkpoint is named by a prefix, ``dir/ckpt-5``;
its files are ``dir/ckpt-5.index`` and ``dir/ckpt-5.data-00000-of-00001``, with a number for each data file.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..digests import read_checked
from ..errors import DamagedCheckpointError, FormatVersionError, UnsupportedLeafError
from ..format import crc32c
from ..storage import Location
from .stored_array import Bytes, StoredArray, StoredPart
from .tensorflow_messages import (
    STRING,
    VARIANT,
    BundleEntry,
    BundleHeader,
    decode_entry,
    decode_header,
    slice_key,
)
from .tensorflow_table import masked, read_table
from .tensorflow_text import decode_texts

INDEX = ".index"
_INDEX_LIMIT = 1 << 30  # bytes
_SLICES = b"\0"  # what the keys of slices begin with


@dataclass(frozen=True, slots=True)
class BundlePart(StoredPart):
    """Elements that lie in one stretch of a data file.

    Attributes:
        checksum: The masked CRC-32C of these bytes.
    """

    checksum: int = 0

    def array(self, data: Bytes) -> NDArray[Any]:
        """Returns the elements; see `StoredPart.array`."""
        if masked(crc32c(data)) != self.checksum:
            raise DamagedCheckpointError(
                f"{self.length} bytes at offset {self.offset} do not have the checksum noted for them"
            )
        return StoredPart.array(self, data)


class Bundle:
    """A checkpoint whose index has been read, all of it.

    Args:
        prefix: The place of its files without what their names end in.

    Raises:
        DamagedCheckpointError: The index is missing, or does not verify.
        FormatVersionError: It is of a version that is not known.

    Attributes:
        prefix: The place.
        tensors: What the index says of each tensor, by name.
    """

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
        """Bytes of all its files."""
        return self._index_bytes + sum(self._sizes.values())

    def data_file(self, number: int) -> str:
        """Returns the name of a data file."""
        return f"{self.prefix.name}.data-{number:05d}-of-{self._header.shards:05d}"

    def array(self, name: str) -> StoredArray:
        """Returns a tensor of numbers, not read yet.

        Args:
            name: What it is called.

        Raises:
            UnsupportedLeafError: Its elements are no numbers, or of a type that is not known.
        """
        entry = self.tensors[name]
        if entry.dtype is None:
            raise UnsupportedLeafError(unknown_type(entry.kind))
        return StoredArray(entry.dtype, entry.shape, {"kind": "numpy"}, lambda: self._parts(name, entry))

    def is_text(self, name: str) -> bool:
        """Whether a tensor's elements are text, or messages, which are bytes as well."""
        return self.tensors[name].kind in (STRING, VARIANT)

    def check_texts(self) -> None:
        """Makes sure that all text together is not more than the files can hold, before all of it is read.

        Raises:
            DamagedCheckpointError: Several tensors share their bytes, which none do that TensorFlow has written.
        """
        sizes = [
            entry.size
            for name, entry in self.tensors.items()
            if self.is_text(name) and entry.offset + entry.size <= self._sizes.get(self.data_file(entry.shard), 0)
        ]
        if sum(sizes) > self.nbytes:
            raise DamagedCheckpointError(f"{self.prefix}: its text claims {sum(sizes)} of {self.nbytes} bytes")

    def texts(self, name: str) -> list[bytes]:
        """Reads a tensor of text.

        Args:
            name: What it is called.

        Returns:
            The elements in C order.

        Raises:
            DamagedCheckpointError: It does not verify.
        """
        entry = self.tensors[name]
        try:
            if entry.slices:
                raise DamagedCheckpointError("text does not lie in slices")
            return decode_texts(self._bytes(entry), entry, big_endian=self._header.big_endian)
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
                raise DamagedCheckpointError(f"{key!r:.200} is no name of a tensor: {error}") from error
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
        return BundlePart(
            start=start,
            shape=entry.shape,
            file=self.data_file(entry.shard),
            offset=entry.offset,
            length=entry.size,
            dtype=dtype.newbyteorder(">" if self._header.big_endian else "<"),
            finish=_check_bools if dtype.kind == "b" else None,
            checksum=entry.checksum,
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
            raise DamagedCheckpointError(f"{file} is missing: the checkpoint is not whole")
        if entry.size and entry.offset + entry.size > (size or 0):
            raise DamagedCheckpointError(
                f"{file} is cut off: expected {entry.size} bytes at offset {entry.offset}, the file has {size}"
            )

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """The lengths of the data files that there are, in bytes."""
        folder, found = self.prefix.parent, {}
        names = {self.data_file(entry.shard) for entry in (*self.tensors.values(), *self._slices.values())}
        for one in folder.entries():
            if one.name in names and not one.is_directory:
                size = one.size
                if size is None:
                    with (folder / one.name).open_data() as reader:
                        size = reader.size
                found[one.name] = size
        return found


def unknown_type(kind: int) -> str:
    """Says that elements cannot be read."""
    return f"elements of TensorFlow's type {kind}, which holdfast does not read"


def _check_bools(elements: NDArray[Any]) -> NDArray[Any]:
    if np.any(elements.view(np.uint8) > 1):
        raise DamagedCheckpointError("its elements are neither true nor false")
    return elements
