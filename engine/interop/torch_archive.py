"""The zip archives that ``torch.save`` writes: where their records lie. Nothing is unpacked and nothing is run.

Records are stored without compression, one for the pickle (``data.pkl``) and one for each storage (``data/0``, ...),
below a folder whose name does not matter (``torch.serialization`` describes them).
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import Any, Literal, NamedTuple

from ..errors import DamagedCheckpointError
from ..storage import DataReader

ByteOrder = Literal["<", ">"]
ZIP_MAGIC = b"PK\x03\x04"
_PICKLE = "data.pkl"
_PICKLE_LIMIT = 512 << 20  # bytes
_RECORDS_LIMIT = 1 << 22
_BLOCK = 256 << 10  # bytes read around a small request, as the next one is likely to be near
_STEP = 16 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class Record(NamedTuple):
    """One record of an archive.

    Attributes:
        offset: Its first byte in the file.
        length: Its bytes.
        crc32: Its checksum; None where the writer took none.
    """

    offset: int
    length: int
    crc32: int | None


class NoArchive(DamagedCheckpointError):  # noqa: N818 - a kind of damage, unless the caller knows better
    """What is there is not even the beginning of an archive."""


class TorchArchive:
    """An archive inside a file.

    Args:
        reader: The open file; it is used only while this is made.
        offset: Where the archive begins in the file.
        length: Bytes of the archive; None for the rest of the file.

    Raises:
        DamagedCheckpointError: It is no whole archive of this kind.

    Attributes:
        pickle: The pickle that says what is in the archive.
        byte_order: ``"<"`` or ``">"``: that of the machine that wrote it.
        records: All records by their names, without the folder.
    """

    def __init__(self, reader: DataReader, offset: int = 0, length: int | None = None) -> None:
        window = _Window(reader, offset, reader.size - offset if length is None else length)
        if window.at(0, len(ZIP_MAGIC)) != ZIP_MAGIC:
            raise NoArchive("it does not begin as an archive of torch.save does")
        try:
            with zipfile.ZipFile(window) as archive:
                found = archive.infolist()
        except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, UnicodeDecodeError) as error:
            raise DamagedCheckpointError(f"it is no whole zip archive: {error}") from error
        if len(found) > _RECORDS_LIMIT or sum(one.file_size for one in found) > window.size:
            raise DamagedCheckpointError("its records are said to be larger than all of it")
        if any(one.filename.endswith("/constants.pkl") or "/code/" in one.filename for one in found):
            raise DamagedCheckpointError("it is a TorchScript archive, which holds code; save its state_dict() instead")
        self.records: dict[str, Record] = {}
        for one in found:
            _, _, name = one.filename.partition("/")
            if one.compress_type != zipfile.ZIP_STORED or one.flag_bits & 1 or one.compress_size != one.file_size:
                raise DamagedCheckpointError(f"record {one.filename!r:.200} is compressed or encrypted")
            if name in self.records:
                raise DamagedCheckpointError(f"record {one.filename!r:.200} is there twice")
            self.records[name] = _record(window, one)
        if _PICKLE not in self.records:
            raise DamagedCheckpointError(f"it holds no {_PICKLE}, as archives of torch.save do")
        self.pickle = self._small(window, _PICKLE, _PICKLE_LIMIT)
        order = self._small(window, "byteorder", 16) if "byteorder" in self.records else b"little"
        self.byte_order: ByteOrder = ">" if order == b"big" else "<"

    def _small(self, window: _Window, name: str, limit: int) -> bytes:
        record = self.records[name]
        if record.length > limit:
            raise DamagedCheckpointError(f"record {name} has {record.length} bytes, more than the {limit} allowed")
        content = window.at(record.offset - window.offset, record.length)
        if record.crc32 is not None and zlib.crc32(content) != record.crc32:
            raise DamagedCheckpointError(f"record {name} does not have the checksum noted for it")
        return content


def check_records(reader: DataReader, archive: TorchArchive) -> list[tuple[str, str]]:
    """Reads every record and compares it with its checksum.

    Returns:
        Name and what is wrong, for every record that is not whole.
    """
    problems = []
    for name, record in archive.records.items():
        checksum = 0
        try:
            for start in range(0, record.length, _STEP):
                data = reader.read(record.offset + start, min(_STEP, record.length - start))
                checksum = zlib.crc32(data.data, checksum)
        except DamagedCheckpointError as error:
            problems.append((name, str(error)))
            continue
        if record.crc32 is not None and checksum != record.crc32:
            problems.append((name, f"expected the checksum {record.crc32:08x}, found {checksum:08x}"))
    return problems


def _record(window: _Window, info: zipfile.ZipInfo) -> Record:
    """Finds where the bytes of a record begin: behind a header of its own, whose length only that header knows."""
    header = window.at(info.header_offset, _LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or header[:4] != ZIP_MAGIC:
        raise DamagedCheckpointError(f"record {info.filename!r:.200} does not begin where the archive says")
    _, name, extra = _LOCAL_HEADER.unpack(header)
    begin = info.header_offset + _LOCAL_HEADER.size + name + extra
    if begin + info.file_size > window.size:
        raise DamagedCheckpointError(f"record {info.filename!r:.200} ends after the archive")
    # Writers that take no checksums, to save time, leave a zero.
    return Record(window.offset + begin, info.file_size, info.CRC or None)


class _Window(io.RawIOBase):
    """A stretch of a file as Python's zipfile wants to see it."""

    def __init__(self, reader: DataReader, offset: int, size: int) -> None:
        super().__init__()
        self.offset = offset
        self.size = size
        self._reader = reader
        self._position = 0
        self._block = b""
        self._block_start = 0
        if offset + size > reader.size:
            raise DamagedCheckpointError(f"it is cut off: expected {offset + size} bytes, found {reader.size}")

    def at(self, position: int, count: int) -> bytes:
        """Returns the bytes from a position of the window on; fewer where it ends."""
        if position < 0:
            raise DamagedCheckpointError("a record begins before the archive")
        count = max(0, min(count, self.size - position))
        start = position - self._block_start
        if not 0 <= start <= start + count <= len(self._block):
            if count >= _BLOCK:
                return self._reader.read(self.offset + position, count).tobytes()
            self._block_start = position if self.size > _BLOCK else 0
            length = min(_BLOCK, self.size - self._block_start)
            self._block = self._reader.read(self.offset + self._block_start, length).tobytes()
            start = position - self._block_start
        return self._block[start : start + count]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError("a place before the archive")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        content = self.at(self._position, self.size if size < 0 else size)
        self._position += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)
