"""Small folders as one zip file: its files as they are, one after the other, in the order in which they were written.

The files are stored, not compressed, without dates and extra fields, so that a zip file is determined by its files. A
comment at its end says that holdfast wrote it.

The format is https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

from ..errors import DamagedCheckpointError

ARCHIVE = ".zip"  # what the names of such files end with
ARCHIVE_LIMIT = 512 << 20  # bytes of the largest one that is read; it is in memory then
ARCHIVE_FILES = 1 << 14  # maximum number of files in one

_COMMENT = b"saved by holdfast"
_VERSION = 20  # of the format that a reader needs
_UTF_8 = 0x800  # flag: names are in UTF-8
_DATE = 0x21  # 1980-01-01, the first that there is
# Signature, version, flags, method, time, date, CRC-32, size (twice), length of the name, length of extra fields.
_FILE = struct.Struct("<4s5H3L2H")
# Signature, version twice, and the same; then comment, disk, attributes (twice) and where the file begins.
_ENTRY = struct.Struct("<4s6H3L5H2L")
# Signature, disks (twice), numbers of entries (twice), size and place of the entries, length of the comment.
_END = struct.Struct("<4s4H2LH")
_REGULAR = 0o100644 << 16  # attributes of a regular file


def is_inside(path: str) -> bool:
    """Whether a path is relative and leads to a file below its directory."""
    parts = path.split("/")
    return not ("\\" in path or "\0" in path or "" in parts or "." in parts or ".." in parts)


def encode_archive(files: Mapping[str, bytes]) -> bytes:
    """Return the zip file of some files by their paths; raise ValueError if there are too many."""
    if len(files) > ARCHIVE_FILES:
        raise ValueError(f"{len(files)} files; a zip file of ours holds up to {ARCHIVE_FILES}")
    parts: list[bytes] = []
    entries: list[bytes] = []
    place = 0
    for path, content in files.items():
        name = path.encode()
        facts = (_VERSION, _UTF_8, 0, 0, _DATE, zlib.crc32(content), len(content), len(content), len(name), 0)
        head = _FILE.pack(b"PK\3\4", *facts) + name
        entries.append(_ENTRY.pack(b"PK\1\2", 3 << 8 | _VERSION, *facts, 0, 0, 0, _REGULAR, place) + name)
        parts += [head, content]
        place += len(head) + len(content)
    directory = b"".join(entries)
    count = len(files)
    end = _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), place, len(_COMMENT))
    return b"".join([*parts, directory, end, _COMMENT])


def places_in_archive(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return where the content of each file begins in the zip file of files of these sizes, in their order."""
    places, end = {}, 0
    for path, size in sizes.items():
        places[path] = end + _FILE.size + len(path.encode())
        end = places[path] + size
    return places


def decode_archive(data: bytes, *, source: str) -> dict[str, bytes]:
    """Return the files in a zip file that :func:`encode_archive` has made."""
    files: dict[str, bytes] = {}
    place = 0
    while len(files) <= ARCHIVE_FILES and data[place : place + 4] == b"PK\3\4" and len(data) >= place + _FILE.size:
        *_, size, length, _ = _FILE.unpack_from(data, place)
        begin = place + _FILE.size + length
        try:
            name = data[begin - length : begin].decode()
        except UnicodeDecodeError:
            break
        if name in files:
            break
        if not is_inside(name):
            raise DamagedCheckpointError(f"{source} holds a file with the path {name!r:.80}")
        files[name] = data[begin : begin + size]
        place = begin + size
    # A zip file is determined by its files: so all sizes and checksums are right, nothing is compressed, no two files
    # have the same name, and there is nothing else in it.
    if len(files) > ARCHIVE_FILES or encode_archive(files) != data:
        raise DamagedCheckpointError(
            f"{source} is not a zip file as holdfast writes them: stored files one after the other, and nothing else"
        )
    return files


def is_our_archive(data: bytes) -> bool:
    """True if data begins and ends as a zip file that holdfast writes."""
    return data[:2] == b"PK" and data.endswith(_COMMENT)
