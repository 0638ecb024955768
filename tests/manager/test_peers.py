"""The stream between hosts: what is sent is stored, what is stored is read, and nothing else is given away."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.engine.errors import StorageError, StorageUnavailableError
from holdfast.engine.manager.peers import Peer, PeerServer, own_address

TOKEN = "secret"
CONTENT = bytes(range(256)) * 12_000  # three frames


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PeerServer]:
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").write_bytes(b"not yours")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    found = PeerServer(str(tmp_path / "root"), TOKEN, "127.0.0.1")
    yield found
    found.close()


@pytest.fixture
def peer(server: PeerServer) -> Iterator[Peer]:
    found = Peer("host b", server.address, TOKEN, timeout=10)
    yield found
    found.close()


def read(peer: Peer, path: str, offset: int, length: int) -> bytes:
    memory = bytearray(length)
    peer.read(path, offset, memoryview(memory))
    return bytes(memory)


def write(peer: Peer, path: str, content: bytes) -> None:
    peer.write(path, len(content), lambda: [memoryview(content)])


@pytest.mark.parametrize("size", [0, 1, 4096, len(CONTENT)])
def test_what_is_sent_is_stored_and_read(peer: Peer, tmp_path: Path, size: int) -> None:
    write(peer, "run/7/state/d/x", CONTENT[:size])
    assert (tmp_path / "root/run/7/state/d/x").read_bytes() == CONTENT[:size]
    assert read(peer, "run/7/state/d/x", 0, size) == CONTENT[:size]
    assert read(peer, "run/7/state/d/x", size // 2, size - size // 2) == CONTENT[size // 2 : size]
    write(peer, "run/7/state/d/x", b"new")
    assert read(peer, "run/7/state/d/x", 0, 3) == b"new"


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("nothing", r"host b: .*No such file"),
        ("../outside", "is not the path of a file here"),
        ("run/../../outside", "is not the path of a file here"),
        ("/etc/passwd", "is not the path of a file here"),
        ("link", "host b: "),
        ("short", "ends at byte 5, before byte 8"),
    ],
)
def test_what_is_not_given(peer: Peer, tmp_path: Path, path: str, what: str) -> None:
    (tmp_path / "root" / "short").write_bytes(b"short")
    with pytest.raises(StorageError, match=what):
        read(peer, path, 0, 8)
    assert read(peer, "short", 1, 4) == b"hort", "the peer can still be asked"


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("../outside", "is not the path of a file here"),
        ("link", "host b: "),
        ("run\0x", "is not the path of a file here"),
        ("folder/x", "goes through a symbolic link"),
    ],
)
def test_nothing_is_written_outside_of_the_folder(peer: Peer, tmp_path: Path, path: str, what: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root" / "folder").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=what):
        write(peer, path, CONTENT)
    assert (tmp_path / "outside").read_bytes() == b"not yours"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    write(peer, "inside", b"yes")  # what was sent in vain was taken off the connection
    assert read(peer, "inside", 0, 3) == b"yes"


def test_another_token_is_sent_away(server: PeerServer, tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailableError, match=r"host b does not answer at 127\.0\.0\.1:"):
        write(Peer("host b", server.address, "guess", timeout=10), "x", b"content")
    assert not (tmp_path / "root/x").exists()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<III", 2, 1 << 31, 0) + b"{}",
        struct.pack("<III", 1 << 31, 0, 0),
        struct.pack("<III", 2, 0, 0) + b"{}",
        struct.pack("<III", 60_000, 0, 0),
        struct.pack("<III", 20, 1 << 19, 0),
    ],
    ids=["another protocol", "a huge body", "a huge head", "a wrong checksum", "a long head", "a body"],
)
def test_strangers_are_disconnected_before_memory_is_taken(server: PeerServer, sent: bytes) -> None:
    with socket.create_connection(server.address, 10) as stranger:
        stranger.sendall(sent)
        with contextlib.suppress(ConnectionResetError):  # the system tells that not all was read
            assert stranger.recv(1) == b"", "it is closed before anything more is read"


def test_a_connection_that_was_closed_is_made_anew(server: PeerServer, peer: Peer) -> None:
    write(peer, "x", b"content")
    for one in list(server._connections):
        one.shutdown(socket.SHUT_RDWR)
    assert read(peer, "x", 0, 7) == b"content"
    server.close()
    with pytest.raises(StorageUnavailableError, match="host b does not answer"):
        read(peer, "x", 0, 1)


def test_a_host_listens_where_the_others_reach_it() -> None:
    assert own_address("127.0.0.1") == own_address("localhost") == "127.0.0.1"
    assert own_address("no.such.host.invalid") == own_address(None)


def test_a_host_that_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = Peer("host b", silent.getsockname(), TOKEN, timeout=0.05)
        with pytest.raises(StorageUnavailableError, match=r"host b does not answer at .* \(timed out\)"):
            read(peer, "x", 0, 1)


def test_silent_strangers_are_few_and_have_one_deadline(tmp_path: Path) -> None:
    server = PeerServer(str(tmp_path), TOKEN, "127.0.0.1", timeout=0.2)
    strangers = [socket.create_connection(server.address) for _ in range(200)]
    assert sum(thread.name == "holdfast-peer" for thread in threading.enumerate()) <= 64
    peer = Peer("host b", server.address, TOKEN, timeout=20)
    write(peer, "x", b"hello")
    for one in strangers:
        one.close()
    peer.close()
    server.close()
