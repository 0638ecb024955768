"""Small folders as one zip file: any tool opens them, and anything else than what holdfast writes is refused."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.format import decode_archive, encode_archive, is_our_archive
from holdfast.errors import DamagedCheckpointError

FILES = {
    "d/1a2b3c4d.0.0": bytes(range(200)),
    "d/index": b"index",
    "tree.json": b"{}",
    "größe": b"",
    "x": b"PK\3\4" * 30,
}
ARCHIVE = encode_archive(FILES)

paths = st.lists(st.text("abé🙂. ", min_size=1).filter(lambda name: name not in (".", "..")), min_size=1, max_size=3)


@given(st.dictionaries(paths.map("/".join), st.binary(max_size=100), max_size=5))
def test_files_come_back(files: dict[str, bytes]) -> None:
    data = encode_archive(files)
    found = decode_archive(data, source="x.zip")
    assert (found, list(found), is_our_archive(data)) == (files, list(files), True)
    with zipfile.ZipFile(io.BytesIO(data)) as other:
        assert other.testzip() is None
        assert {one.filename: other.read(one) for one in other.infolist()} == files


def python_writes(compression: int = zipfile.ZIP_STORED, comment: bytes = b"", name: str = "tree.json") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.comment = comment
        archive.writestr(name, b"a" * 1000)
    return file.getvalue()


def forged(path: bytes) -> bytes:
    """A zip file of one file with a path that holdfast does not write."""
    return encode_archive({"?" * len(path): b"1"}).replace(b"?" * len(path), path)


OTHERS: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "no zip file": lambda: b"{}",
    "cut": lambda: ARCHIVE[:-1],
    "longer": lambda: ARCHIVE + b"x",
    "twice": lambda: ARCHIVE + ARCHIVE,
    "something before": lambda: b"x" + ARCHIVE,
    "a flipped bit": lambda: ARCHIVE.replace(b"index", b"indey", 1),
    "another content": lambda: ARCHIVE.replace(bytes(range(200)), bytes(200)),
    "of Python": python_writes,
    "compressed": lambda: python_writes(zipfile.ZIP_DEFLATED, b"saved by holdfast"),
    "with a date": lambda: python_writes(comment=b"saved by holdfast"),
    "a path above": lambda: forged(b"../x"),
    "an absolute path": lambda: forged(b"/etc"),
    "a path of Windows": lambda: forged(b"a\\b!"),
    "an empty path": lambda: encode_archive({"": b"1"}),
    "a path that is no text": lambda: ARCHIVE.replace(b"tree.json", b"tree.\xff\xff\xff\xff"),
    "a long path that is no text": lambda: encode_archive({"a" * 40_000: b""}).replace(b"a" * 40_000, b"\xff" * 40_000),
    "two files of one path": lambda: encode_archive({"a": b"1", "b": b"2"}).replace(b"b2", b"a2"),
    "a size beyond its end": lambda: ARCHIVE[:18] + struct.pack("<2L", 1 << 31, 1 << 31) + ARCHIVE[26:],
    "a size before its end": lambda: ARCHIVE[:18] + struct.pack("<2L", 3, 3) + ARCHIVE[26:],
    "a longer name than there is": lambda: ARCHIVE[:26] + b"\xff\xff" + ARCHIVE[28:],
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_zip_files_are_refused(what: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"run/state\.zip"):
        decode_archive(OTHERS[what](), source="run/state.zip")


def test_files_that_share_their_bytes_are_refused() -> None:
    """As in a zip bomb: every entry of the directory names the same content."""
    content = bytes(1 << 16)
    once = encode_archive({"aaaa": content})
    begin = once.index(b"PK\1\2")
    entries = b"".join(once[begin : begin + 46] + f"{number:04}".encode() for number in range(1000))
    end = once[begin + 50 :][:8] + struct.pack("<2H2L", 1000, 1000, len(entries), begin) + once[begin + 50 :][20:]
    bomb = once[:begin] + entries + end
    assert len(zipfile.ZipFile(io.BytesIO(bomb)).infolist()) == 1000, "others open it"
    with pytest.raises(DamagedCheckpointError, match=r"not a zip file written by holdfast"):
        decode_archive(bomb, source="state.zip")


def test_too_many_files() -> None:
    with pytest.raises(ValueError, match="20000 files"):
        encode_archive({str(number): b"" for number in range(20_000)})


@pytest.mark.parametrize("data", [b"", b"PK", b"saved by holdfast", python_writes(), ARCHIVE + b"x"])
def test_zip_files_of_others_are_not_ours(data: bytes) -> None:
    assert not is_our_archive(data)
