"""Small folders as one zip file: their files, uncompressed, in the order in which they were written.

A zip file has no dates and no extra fields, so its files determine it. Its comment says that holdfast wrote it.

The format is https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

from ..errors import DamagedCheckpointError

ARCHIVE = ".zip"  # suffix of the names of zip files
ARCHIVE_LIMIT = 512 << 20  # bytes of the largest zip file that is read, into memory
ARCHIVE_FILES = 1 << 14  # maximum number of files in a zip file

_COMMENT = b"saved by holdfast"
_VERSION = 20  # of the format that a reader needs
_UTF_8 = 0x800  # flag: names are in UTF-8
_DATE = 0x21  # 1980-01-01, the earliest
# Signature, version, flags, method, time, date, CRC-32, size (twice), length of the name, length of extra fields.
_FILE = struct.Struct("<4s5H3L2H")
# Signature, version twice, and the same; then comment, disk, attributes (twice) and offset of the file.
_ENTRY = struct.Struct("<4s6H3L5H2L")
# Signature, disks (twice), numbers of entries (twice), size and offset of the entries, length of the comment.
_END = struct.Struct("<4s4H2LH")
_REGULAR = 0o100644 << 16  # attributes of a regular file


def is_inside(path: str) -> bool:
    """Return whether a path is relative and leads to a file below its directory."""
    return not ("\\" in path or "\0" in path) and {"", ".", ".."}.isdisjoint(path.split("/"))


def encode_archive(files: Mapping[str, bytes]) -> bytes:
    """Return the zip file of some files, by path; raise ValueError if there are too many."""
    if len(files) > ARCHIVE_FILES:
        raise ValueError(f"{len(files)} files; a zip file of ours holds up to {ARCHIVE_FILES}")
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
    """Return the offset of the content of each file in a zip file, given the sizes of its files in their order."""
    offsets, end = {}, 0
    for path, size in sizes.items():
        offsets[path] = end + _FILE.size + len(path.encode())
        end = offsets[path] + size
    return offsets


def decode_archive(data: bytes, *, source: str) -> dict[str, bytes]:
    """Return the files in a zip file that :func:`encode_archive` has made."""
    files: dict[str, bytes] = {}
    offset = 0
    while len(files) <= ARCHIVE_FILES and data[offset : offset + 4] == b"PK\3\4" and len(data) >= offset + _FILE.size:
        *_, size, length, _ = _FILE.unpack_from(data, offset)
        begin = offset + _FILE.size + length
        try:
            name = data[begin - length : begin].decode()
        except UnicodeDecodeError:
            break
        if name in files:
            break
        if not is_inside(name):
            raise DamagedCheckpointError(f"{source} holds a file with the path {name!r:.80}")
        files[name] = data[begin : begin + size]
        offset = begin + size
    # The files determine the zip file. So if it matches, all sizes and checksums are right, nothing is compressed, and
    # there is nothing else in it.
    if len(files) > ARCHIVE_FILES or encode_archive(files) != data:
        raise DamagedCheckpointError(
            f"{source} is not a zip file as holdfast writes them: stored files one after the other, and nothing else"
        )
    return files


def is_our_archive(data: bytes) -> bool:
    """Return whether data begins and ends like a zip file that holdfast writes."""
    return data[:2] == b"PK" and data.endswith(_COMMENT)
