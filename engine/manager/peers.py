"""Transfer files between the hosts of a program. Each host serves a folder, and stores files sent by other hosts.

A server listens on its host's address. Every message is a frame: the lengths of its JSON head and its body, the crc32c
of both, and then the head and the body themselves. The server checks lengths before it allocates memory, requires the
program's token at the start of a connection, rejects paths outside the folder, and limits all waiting times.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from ..errors import (
    DamagedCheckpointError,
    StorageError,
    StoragePermissionError,
    StorageUnavailableError,
)
from ..storage import Buffer, DataReader, aligned_empty, open_own

_logger = logging.getLogger("holdfast")

PIECE = 1 << 20  # maximum size, in bytes, of a frame's body

_FRAME = struct.Struct("<III")  # lengths of head and body, and the crc32c of both
_HEAD = 64 << 10  # maximum size, in bytes, of a frame's head
PATIENCE = 30.0  # timeout in seconds for a peer to send or accept the next bytes
_STRANGERS = 64  # maximum number of unauthenticated connections; further ones have to wait
_HELLO = 1 << 10  # maximum size, in bytes, of the head of a connection's first frame, which contains the token
_IDLE = 300.0  # seconds after which an idle connection is closed
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class PeerServer:
    """Serves the files below a folder to peers that present the token, and stores the files that they send."""

    def __init__(self, root: str, token: str, host: str, *, timeout: float = PATIENCE) -> None:
        self._root = root
        self._token = token
        self._timeout = timeout
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._strangers = threading.Semaphore(_STRANGERS)
        self._closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=512)
        except OSError as error:
            raise StorageUnavailableError(
                f"this host cannot listen on its address {host}: {error}; name one that the other hosts reach with "
                "Local(address=...)"
            ) from error
        self.address = host, int(self._listener.getsockname()[1])  # host and port at which peers reach the server
        threading.Thread(target=self._accept, name="holdfast-peers", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            ended = [self._listener, *self._connections]
        for connection in ended:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._strangers.release()  # wakes the accept thread, which then finds that the listener is closed

    def _accept(self) -> None:
        while True:
            self._strangers.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener was closed
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="holdfast-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                if not self._knows_token(connection):
                    return
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while True:
                    connection.settimeout(_IDLE)
                    asked, _ = _receive(connection)
                    connection.settimeout(self._timeout)
                    self._answer(connection, asked)
        except Exception as error:  # the peer has disconnected or is not authorized
            _logger.debug("a connection between hosts has ended: %s", error or type(error).__name__)
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _knows_token(self, connection: socket.socket) -> bool:
        """Return whether the connection presents the token before the deadline for unauthenticated peers."""
        try:
            hello, _ = _receive(connection, memoryview(b""), deadline=time.monotonic() + self._timeout)
            return hmac.compare_digest(str(hello.get("token")).encode(), self._token.encode())
        finally:
            self._strangers.release()

    def _answer(self, connection: socket.socket, asked: Mapping[str, Any]) -> None:
        writes = asked.get("do") == "write"
        size = int(asked["size"]) if writes else 0
        pieces = _pieces(connection, size)
        try:
            path = self._place(asked)
            if writes:
                _store(path, size, pieces)
                _send(connection, {"size": size})
                return
            with open(open_own(path, os.O_RDONLY), "rb", buffering=0) as file:
                for part in _read(file.fileno(), int(asked["offset"]), int(asked["length"])):
                    _send(connection, {}, part)
        except (OSError, ValueError) as error:
            for _ in pieces:  # drain the input, because the peer reads the reply only after sending all pieces
                pass
            _send(connection, {"error": str(error)[:4000] or type(error).__name__})

    def _place(self, asked: Mapping[str, Any]) -> str:
        """Return the path of a requested file; raise ValueError if it is not below the root."""
        names = str(asked.get("path")).split("/")
        path = os.path.join(self._root, *names)
        if not {"", ".", ".."}.isdisjoint(names) or any("\0" in name for name in names):
            raise ValueError(f"{asked.get('path')!r} is not the path of a file here")
        if os.path.realpath(os.path.dirname(path)) != os.path.join(os.path.realpath(self._root), *names[:-1]):
            raise ValueError(f"{asked.get('path')!r} goes through a symbolic link")
        return path


class Peer:
    """A thread-safe client of another host's server, with a separate connection for each concurrent request."""

    def __init__(self, name: str, address: tuple[str, int], token: str, *, timeout: float = PATIENCE) -> None:
        self._name = name
        self._address = address
        self._token = token
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self.bytes_read = 0

    def read(self, path: str, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with a range of a file; raise StorageError if the host cannot provide it."""
        asked = {"do": "read", "path": path, "offset": offset, "length": len(memory)}

        def work(connection: socket.socket) -> None:
            _send(connection, asked)
            filled = 0
            while filled < len(memory):
                filled += len(self._reply(connection, memory[filled:]))

        self._do(work)
        with self._lock:
            self.bytes_read += len(memory)

    def write(self, path: str, size: int, pieces: Callable[[], Iterable[memoryview]]) -> None:
        """Send a file of ``size`` bytes to the host; raise StorageError if the host cannot store it."""

        def work(connection: socket.socket) -> None:
            _send(connection, {"do": "write", "path": path, "size": size})
            for piece in pieces():
                for start in range(0, len(piece), PIECE):
                    _send(connection, {}, piece[start : start + PIECE])
            self._reply(connection)

        self._do(work)

    def _reply(self, connection: socket.socket, memory: memoryview | None = None) -> memoryview:
        """Return the body of the next frame; raise StorageError if the peer reports an error."""
        head, body = _receive(connection, memory)
        if "error" in head:
            raise StorageError(f"{self._name}: {head['error']}")
        return body

    def close(self) -> None:
        with self._lock:
            ended, self._idle = self._idle, []
        for connection in ended:
            connection.close()

    def _do(self, work: Callable[[socket.socket], None]) -> None:
        """Call ``work`` with a pooled or new connection; retry with a new one if the pooled one has been closed."""
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        try:
            connection = kept or self._connect()
            try:
                work(connection)
            except BaseException:
                connection.close()
                raise
        except (OSError, EOFError) as error:
            if isinstance(error, StorageError):
                raise
            if kept is not None and not isinstance(error, TimeoutError):
                self.close()
                self._do(work)
                return
            host, port = self._address
            raise StorageUnavailableError(
                f"{self._name} does not answer at {host}:{port} ({error or type(error).__name__})"
            ) from error
        with self._lock:
            self._idle.append(connection)

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, self._timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _send(connection, {"token": self._token})
        return connection


class RemoteReader(DataReader):
    """Reads ranges of a file from the first host that can provide them."""

    def __init__(self, path: str, size: int, holders: Sequence[tuple[Peer, str]]) -> None:
        self._path = path
        self._size = size
        self._holders = holders

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int, buffer: Buffer | None = None) -> NDArray[np.uint8]:
        memory = aligned_empty(length) if buffer is None else buffer.view(length)
        errors = []
        for peer, path in self._holders:
            try:
                peer.read(path, offset, memory.data)
            except (StorageError, DamagedCheckpointError) as error:
                errors.append(str(error))
                continue
            return memory
        raise DamagedCheckpointError(f"{self._path} of a local step: {'; '.join(errors)}", unreadable=True)

    def close(self) -> None:
        return


def check_private(path: str, *, shared: bool) -> None:
    """Raise StoragePermissionError if the folder exists and another user of the host can add or replace files in it."""
    # A shared folder, such as /dev/shm, may belong to root, and may be writable by all if its sticky bit is set.
    owners = {os.geteuid(), 0} if shared else {os.geteuid()}
    try:
        status = os.lstat(path)
        is_link = stat.S_ISLNK(status.st_mode)
        if is_link and shared and status.st_uid in owners:  # for example, a link to a disk mounted elsewhere
            status, is_link = os.stat(path), False
    except FileNotFoundError:
        return
    writable = shared and status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    if is_link or not stat.S_ISDIR(status.st_mode) or status.st_uid not in owners or writable:
        shown = "a symbolic link" if is_link else f"of user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}"
        raise StoragePermissionError(
            f"{path}: local steps must lie in a folder of user {os.geteuid()} to which no other user can write, and "
            f"this is {shown}: another user may have put files there. Remove it, or name another folder in Local(...)"
        )


def own_address(towards: str | None) -> str:
    """Return this host's address on the route to ``towards``, or to the internet if None, without sending packets."""
    address = "127.0.0.1"
    for target in (towards, "192.0.2.1"):  # a documentation-only address, which no host has
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            if target is not None:
                probe.connect((target, 9))
                address = str(probe.getsockname()[0])
        # On process 0's host, the host's own name often resolves to a loopback address, which other hosts cannot reach.
        if not address.startswith("127.") or towards in _LOOPBACK:
            break
    return address


def _send(connection: socket.socket, head: Mapping[str, Any], body: memoryview | bytes = b"") -> None:
    encoded = json.dumps(head).encode()
    crc = google_crc32c.extend(google_crc32c.value(encoded), bytes(body))
    connection.sendall(_FRAME.pack(len(encoded), len(body), crc) + encoded)
    if body:
        connection.sendall(body)


def _receive(
    connection: socket.socket, memory: memoryview | None = None, *, deadline: float | None = None
) -> tuple[dict[str, Any], memoryview]:
    """Return the head and body of the next frame, using ``memory`` for the body if given."""
    head_size, body_size, crc = _FRAME.unpack(_exactly(connection, memoryview(bytearray(_FRAME.size)), deadline))
    limit = PIECE if memory is None else min(PIECE, len(memory))
    if head_size > (_HEAD if deadline is None else _HELLO) or body_size > limit:
        raise DamagedCheckpointError(f"a peer announced {head_size} and {body_size} bytes, more than {limit}")
    encoded = bytes(_exactly(connection, memoryview(bytearray(head_size)), deadline))
    body = memoryview(bytearray(body_size)) if memory is None else memory[:body_size]
    _exactly(connection, body, deadline)
    if google_crc32c.extend(google_crc32c.value(encoded), bytes(body)) != crc:
        raise DamagedCheckpointError("what a peer sent does not match its checksum")
    return json.loads(encoded), body


def _exactly(connection: socket.socket, memory: memoryview, deadline: float | None = None) -> memoryview:
    filled = 0
    while filled < len(memory):
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        count = connection.recv_into(memory[filled:])
        if not count:
            raise EOFError("the connection was closed")
        filled += count
    return memory


def _pieces(connection: socket.socket, size: int) -> Iterator[memoryview]:
    left = size
    while left > 0:
        _, body = _receive(connection)
        if not 0 < len(body) <= left:
            raise DamagedCheckpointError(f"a peer sent {len(body)} bytes where {left} were left")
        left -= len(body)
        yield body


def _store(path: str, size: int, pieces: Iterator[memoryview]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # detects a full disk before the data is transferred
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _read(descriptor: int, offset: int, length: int) -> Iterator[bytes]:
    if offset < 0 or length < 0:
        raise ValueError(f"bytes {offset} to {offset + length} are no range")
    end = offset + length
    while offset < end:
        part = os.pread(descriptor, min(PIECE, end - offset), offset)
        if not part:
            raise DamagedCheckpointError(f"the file ends at byte {offset}, before byte {end}")
        yield part
        offset += len(part)
