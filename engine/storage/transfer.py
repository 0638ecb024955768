"""Bulk data to and from object stores without copies: one attempt at an upload, a ranged GET, or a copy by the service.

TensorStore's client gathers an object three times on its way and, for S3, hashes it on every attempt, several processor
seconds for a gigabyte. This one sends arrays from their own memory and receives into the memory that the caller keeps.
It explains no errors: a request that does not succeed at once (of a large file, after some repetitions) is repeated by
TensorStore, whose result counts.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import re
import select
import socket
import ssl
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

_logger = logging.getLogger("holdfast")

Part = NDArray[np.uint8]

STALLED = 120.0  # seconds without a byte after which an attempt has failed, as in TensorStore
_CONNECT = 20.0  # seconds
_IDLE = 5.0  # seconds that a connection may have been idle; services close them after some more
_SPARE = 16  # idle connections that are kept
_ATTEMPTS = 4  # failures in a row after which a bucket is left to TensorStore alone
_PAUSE = 60.0  # seconds for which it is left to TensorStore
_JOIN = 64 << 10  # bytes; shorter parts are joined before they are sent
_STEP = 256 << 10  # bytes sent or received between two checks of the clock
_ANSWER = 64 << 10  # bytes of the body of an answer to an upload that are read
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


_MISSING = (404, 416)  # statuses of a service that works: there is no such object, or it is shorter than it should be
_REFUSED = (400, 403, 404, 405, 411, 501)  # a service that lacks a request, or refuses it, still works
_DENIED = (400, 401, 403)  # a reason may be the credentials
_ANSWERED = (200, 206, *_MISSING)  # the same, and an object that is longer


# How a request ended: "busy", where it may succeed later; "ended", where other credentials may be found in the place of
# those that the service no longer accepts; "denied" to the only credentials there are; "failed" for any other reason.
Outcome = Literal["done", "busy", "ended", "denied", "failed"]


class Patience(NamedTuple):
    """How long to wait for a service."""

    timeout: float  # seconds after which the attempt has failed
    usual: float  # seconds to wait for the beginning of an answer before ``exceeded`` is called
    exceeded: Callable[[], None]


class Transfer:
    """Requests for objects of one bucket, from any number of threads; subclasses speak the protocol of a service.

    The target of each begins with ``url``. ``copies`` and ``removes`` tell whether the service makes copies, and
    deletes several objects at a time, as far as it is known.
    """

    def __init__(self, url: str, verify: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path.rstrip("/")
        self._netloc = parts.netloc
        self._verify = verify
        self.copies = True
        self.removes = True
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        weakref.finalize(self, _close_all, self._idle)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._failures = 0
        self._paused = 0.0  # end of the pause, by time.monotonic()

    @classmethod
    def _at(cls, url: str, *settings: Any) -> Self | None:
        """Return the client for a service; None where only TensorStore can reach it."""
        parts = urlsplit(url)
        try:
            usable = parts.scheme in ("http", "https") and parts.hostname and not parts.query and parts.port != 0
        except ValueError:
            return None
        if not usable or parts.username is not None or not parts.netloc.isascii():
            return None
        if urllib.request.getproxies().get(parts.scheme) and not urllib.request.proxy_bypass(parts.hostname or ""):
            return None
        try:
            return cls(url, tls_context() if parts.scheme == "https" else None, *settings)
        except OSError:
            return None

    # ---- the protocol of a service

    def _put_target(self, key: str) -> tuple[str, str]:
        """Return the method and the target of an upload."""
        raise NotImplementedError

    def _get_target(self, key: str) -> str:
        raise NotImplementedError

    def _digest(self, parts: Callable[[], Iterator[Part]]) -> str:
        """Return the digest of an upload that :meth:`_authorized` needs, or ""."""
        return ""

    def _authorized(self, method: str, target: str, headers: Mapping[str, str], digest: str) -> dict[str, str] | None:
        """Return all headers of a request; None without credentials."""
        raise NotImplementedError

    def _refuses(self, status: int, answer: bytes) -> bool:
        """Return whether the service does not accept the credentials of a request, or no longer."""
        return False

    def _forget(self, headers: Mapping[str, str]) -> bool:
        """Forget the credentials in these headers; return whether others may be found."""
        return False

    def _is_stored(self, answer: bytes, size: int) -> bool:
        """Return whether an answer with the status of success says that an object of this size was stored."""
        raise NotImplementedError

    def _copy_request(self, key: str, target: str) -> tuple[str, str, dict[str, str]]:
        """Return the method, the target and headers of the request for a copy."""
        raise NotImplementedError

    def _is_copied(self, answer: bytes) -> bool:
        """Return whether an answer with the status of success says that the copy was made."""
        raise NotImplementedError

    def _removal(self, names: Sequence[str]) -> tuple[str, dict[str, str], bytes] | None:
        """Return the target, headers and body of the POST that deletes objects; None where there is no such request."""
        return None

    def _is_removed(self, answer: bytes) -> bool:
        """Return whether an answer with the status of success says that all objects were deleted."""
        raise NotImplementedError

    # ---- requests

    def put(
        self,
        key: str,
        size: int,
        parts: Callable[[bool], Iterator[Part]],
        patience: Patience,
        *,
        again: Sequence[float] = (),
    ) -> Outcome:
        """Store an object; return "ended" only for credentials that have ended in two attempts, one after the other.

        ``parts`` generates its bytes, each time it is called, to send them or only to hash them; a part is used before
        the next one is requested. ``again`` has the seconds to wait before each repetition, where the service did not
        answer or was busy, or credentials that can be renewed had ended.
        """

        def receive(response: http.client.HTTPResponse, check: Callable[[], None]) -> bool:
            check()
            body = response.read(_ANSWER)
            return response.status in (200, 201, 204) and _is_whole(response) and self._is_stored(body, size)

        method, target = self._put_target(key)
        headers = {"content-length": str(size)}
        has_ended = False
        for pause in (*again, 0.0):
            found = self._attempt(method, target, headers, parts, receive, patience)
            if found not in ("busy", "ended") or (has_ended and found == "ended"):
                return found
            has_ended = found == "ended"
            time.sleep(pause)
        return "failed"  # credentials that have ended once may be renewed by the time of the next upload

    def get(
        self, key: str, offset: int, memory: Sequence[Part], patience: Patience, answered: Callable[[], None]
    ) -> bool:
        """Fill memory, one part after the other, with the bytes from ``offset`` on.

        ``answered`` is called when the answer begins. Returns whether the service sent exactly those bytes.
        """
        size = sum(part.size for part in memory)
        end = offset + size

        def receive(response: http.client.HTTPResponse, check: Callable[[], None]) -> bool:
            answered()
            # Some services send a range with the status of a whole object.
            found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
            if response.status not in (200, 206) or found is None or response.length != size:
                return False
            if (int(found[1]), int(found[2])) != (offset, end - 1) or response.headers.get("content-encoding"):
                return False
            for part in memory:
                done, view = 0, part.data
                while done < part.size:
                    check()
                    count = response.readinto(view[done : done + _STEP])
                    if not count:
                        return False
                    done += count
            return response.isclosed() or not response.read(1)

        headers = {"range": f"bytes={offset}-{end - 1}"}
        return self._attempt("GET", self._get_target(key), headers, None, receive, patience) == "done"

    def get_small(self, key: str, limit: int, patience: Patience) -> bytes | None:
        """Return all of an object; None if it is longer than ``limit`` bytes, or the service did not send it."""
        content = b""

        def receive(response: http.client.HTTPResponse, check: Callable[[], None]) -> bool:
            nonlocal content
            check()
            found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
            length = response.length
            if found is None or length is None or not 0 < length <= limit or response.headers.get("content-encoding"):
                return False
            if response.status not in (200, 206) or found.groups() != ("0", str(length - 1), str(length)):
                return False
            content = response.read(length)
            return len(content) == length and _is_whole(response)

        headers = {"range": f"bytes=0-{limit - 1}"}
        found = self._attempt("GET", self._get_target(key), headers, None, receive, patience, works=_ANSWERED)
        return content if found == "done" else None

    def remove(self, names: Sequence[str], patience: Patience) -> bool:
        """Delete up to 1,000 objects with one request; return whether the service said that all are gone."""
        request = self._removal(names) if self.removes else None
        if request is None:
            return False
        target, headers, body = request

        def parts(_: bool) -> Iterator[Part]:
            yield np.frombuffer(body, np.uint8)

        def receive(response: http.client.HTTPResponse, check: Callable[[], None]) -> bool:
            check()
            answer = response.read(_ANSWER)
            if response.status in _REFUSED:
                self.removes = False
            return response.status == 200 and _is_whole(response) and self._is_removed(answer)

        return self._attempt("POST", target, headers, parts, receive, patience, works=_REFUSED) == "done"

    def copy(self, key: str, target: str, patience: Patience) -> bool:
        """Let the service copy an object to another name; return whether it has confirmed the copy."""
        if not self.copies:
            return False

        def receive(response: http.client.HTTPResponse, check: Callable[[], None]) -> bool:
            check()
            body = response.read(_ANSWER)
            whole = _is_whole(response)
            if response.status in (403, 405, 501) or (response.status == 200 and whole and not body):
                self.copies = False  # it may not or cannot copy, or mistakes the request for an empty upload
                _logger.info("%s: the service does not copy objects", self._netloc)
            return response.status == 200 and whole and self._is_copied(body)

        method, path, headers = self._copy_request(key, target)
        headers["content-length"] = "0"
        works = {*range(400, 500), 501}  # a service that refuses a copy still works
        return self._attempt(method, path, headers, None, receive, patience, works) == "done"

    def _attempt(
        self,
        method: str,
        target: str,
        headers: dict[str, str],
        parts: Callable[[bool], Iterator[Part]] | None,  # of the body, as for :meth:`put`
        receive: Callable[[http.client.HTTPResponse, Callable[[], None]], bool],
        patience: Patience,
        works: Container[int] = _MISSING,
    ) -> Outcome:
        if time.monotonic() < self._paused:
            return "failed"
        known = "" if parts is None else self._digest(lambda: parts(False))
        deadline = time.monotonic() + patience.timeout

        def check() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError

        status = 0
        refused: Outcome | None = None  # what follows from a refusal of the credentials
        reused = True
        while reused:  # the service may have closed a connection that was idle
            authorized = self._all_headers(method, target, headers, known)
            if authorized is None:
                return "failed"
            try:
                connection, reused = self._connection(min(STALLED, patience.timeout))
            except (OSError, http.client.HTTPException):
                break
            status = 0
            done = False
            try:
                connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
                for name, value in authorized.items():
                    connection.putheader(name, value)
                connection.endheaders()
                if parts is not None:
                    _send(connection.sock, parts(True), check)
                _wait(connection.sock, patience)
                response = connection.getresponse()
                status = response.status
                if status in _DENIED and self._refuses(status, response.read(_ANSWER)):
                    refused = "ended" if self._forget(authorized) else "denied"
                    break
                done = receive(response, check)
            except TimeoutError:
                status = 0
                break
            except (OSError, http.client.HTTPException):
                if status:
                    status = 0  # the rest of the answer is missing
                    break
                continue
            finally:
                if done and connection.sock is not None:
                    self._keep(connection)
                else:
                    connection.close()
            if done or status in works:
                self._failures = 0
                return "done" if done else "failed"
            break
        self._failures += 1
        if self._failures >= _ATTEMPTS:
            self._failures, self._paused = 0, time.monotonic() + _PAUSE
            _logger.info("%s: requests for data failed; TensorStore takes over for %.0f s", self._netloc, _PAUSE)
        if refused is not None or status in (401, 403):
            return refused or "denied"
        return "busy" if status in (0, 408, 429) or status >= 500 else "failed"

    def _all_headers(self, method: str, target: str, headers: Mapping[str, str], digest: str) -> dict[str, str] | None:
        """Return all headers of a request; None without credentials, or with some that no header can hold."""
        with contextlib.suppress(UnicodeEncodeError):
            found = self._authorized(method, target, headers, digest)
            text = "".join([target, *(found or {}).values()])
            if text.isascii() and text.isprintable():  # http.client would put a value that is not into its error
                return found
        return None

    def _connection(self, timeout: float) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and whether it has been used before."""
        with self._lock:
            if self._process != os.getpid():  # the sockets are those of the parent
                _close_all(self._idle)
                self._process = os.getpid()
            while self._idle:
                since, connection = self._idle.pop()
                if time.monotonic() - since <= _IDLE and connection.sock is not None:
                    connection.sock.settimeout(timeout)
                    return connection, True
                connection.close()
        if self._verify is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=min(_CONNECT, timeout))
        else:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=min(_CONNECT, timeout), context=self._verify
            )
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sock.settimeout(timeout)
        except BaseException:
            connection.close()
            raise
        return connection, False

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _SPARE and self._process == os.getpid():
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()


def tls_context() -> ssl.SSLContext:
    """Return how services are verified: by the certificates that TensorStore uses, too."""
    certificates, folder = os.environ.get("TENSORSTORE_CA_BUNDLE"), os.environ.get("TENSORSTORE_CA_PATH")
    return ssl.create_default_context(cafile=certificates, capath=folder)


def _is_whole(response: http.client.HTTPResponse) -> bool:
    """Whether all of an answer was read; http.client says nothing of one that ends before its length."""
    return response.isclosed() and not response.length


def _close_all(idle: list[tuple[float, http.client.HTTPConnection]]) -> None:
    while idle:
        idle.pop()[1].close()


def _send(connection: socket.socket, parts: Iterable[Part], check: Callable[[], None]) -> None:
    """Send parts without a copy; short ones are joined."""
    short = bytearray()
    for part in parts:
        if part.size < _JOIN:
            short += part.data
            if len(short) < _STEP:
                continue
        if short:
            check()
            connection.sendall(short)
            short = bytearray()
        if part.size >= _JOIN:
            view = part.data
            for start in range(0, part.size, _STEP):
                check()
                connection.sendall(view[start : start + _STEP])
    if short:
        connection.sendall(short)


def _wait(connection: socket.socket, patience: Patience) -> None:
    """Wait for the beginning of an answer as long as is usual."""
    if patience.usual < patience.timeout:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(patience.usual * 1000):
            patience.exceeded()
