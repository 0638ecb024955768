"""Zip files for small folders. Files are stored uncompressed, in the order in which they were written.

Dates and extra fields are omitted, so the bytes depend only on the files. The archive comment names holdfast.

The format is specified at https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

from ..errors import DamagedCheckpointError

ARCHIVE = ".zip"  # file name suffix of zip files
ARCHIVE_LIMIT = 512 << 20  # maximum size in bytes of a zip file that is read into memory
ARCHIVE_FILES = 1 << 14  # maximum number of files per zip file

_COMMENT = b"saved by holdfast"
_VERSION = 20  # zip version needed to extract (2.0)
_UTF_8 = 0x800  # flag: file names are UTF-8
_DATE = 0x21  # 1980-01-01, the earliest date that zip can represent
# Local file header: signature, version, flags, method, time, date, CRC-32, size (twice), name and extra field lengths.
_FILE = struct.Struct("<4s5H3L2H")
# Directory entry: signature, version (twice), other header fields, comment length, disk, attributes (twice), offset.
_ENTRY = struct.Struct("<4s6H3L5H2L")
# End record: signature, disks (twice), entry counts (twice), directory size and offset, comment length.
_END = struct.Struct("<4s4H2LH")
_REGULAR = 0o100644 << 16  # attributes of a regular file


def is_inside(path: str) -> bool:
    """Return whether a path is relative and does not leave its directory."""
    return not ("\\" in path or "\0" in path) and {"", ".", ".."}.isdisjoint(path.split("/"))


def encode_archive(files: Mapping[str, bytes]) -> bytes:
    """Encode files, keyed by path, as a zip file; raise ValueError if there are too many."""
    if len(files) > ARCHIVE_FILES:
        raise ValueError(f"{len(files)} files; a holdfast zip file holds at most {ARCHIVE_FILES}")
    parts: list[bytes] = []
    entries: list[bytes] = []
    offset = 0
    for path, content in files.items():
        name = path.encode()
        facts = (_VERSION, _UTF_8, 0, 0, _DATE, zlib.crc32(content), len(content), len(content), len(name), 0)
        head = _FILE.pack(b"PK\3\4", *facts) + name
        entries.append(_ENTRY.pack(b"PK\1\2", 3 << 8 | _VERSION, *facts, 0, 0, 0, _REGULAR, offset) + name)
        parts += [head, content]
        offset += len(head) + len(content)
    directory, count = b"".join(entries), len(files)
    end = _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), offset, len(_COMMENT))
    return b"".join([*parts, directory, end, _COMMENT])


def offsets_in_archive(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the offset of each file's contents in a zip file. ``sizes`` lists the file sizes in bytes, in order."""
    offsets, end = {}, 0
    for path, size in sizes.items():
        offsets[path] = end + _FILE.size + len(path.encode())
        end = offsets[path] + size
    return offsets


def decode_archive(data: bytes, *, source: str) -> dict[str, bytes]:
    """Return the files in a zip file written by :func:`encode_archive`."""
    files: dict[str, bytes] = {}
    offset = 0
    while len(files) <= ARCHIVE_FILES and data[offset : offset + 4] == b"PK\3\4" and len(data) >= offset + _FILE.size:
        *_, size, length, _ = _FILE.unpack_from(data, offset)
        begin = offset + _FILE.size + length
        try:
            name = data[begin - length : begin].decode()
        except UnicodeDecodeError:
            break
        if not is_inside(name):
            raise DamagedCheckpointError(f"{source} holds a file with the path {name!r:.80}")
        files[name] = data[begin : begin + size]
        offset = begin + size
    # The files determine every byte of the zip file. If encoding them again gives the same bytes, all sizes and
    # checksums are correct, nothing is compressed, and the zip file contains nothing else.
    if len(files) > ARCHIVE_FILES or encode_archive(files) != data:
        raise DamagedCheckpointError(
            f"{source} is not a zip file written by holdfast: expected stored files one after another and nothing else"
        )
    return files


def is_our_archive(data: bytes) -> bool:
    """Return whether data begins and ends like a zip file written by holdfast."""
    return data[:2] == b"PK" and data.endswith(_COMMENT)
