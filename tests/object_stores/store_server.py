"""The HTTP server of the fake object stores: runs in a thread, counts its requests and fails on demand.

A store answers requests with :class:`Answer`; how an answer goes over the wire, or fails to, is decided here. Where an
answer is lost on its way, the store has done what it was asked, as a real one might have.
"""

from __future__ import annotations

import contextlib
import http
import re
import socket
import socketserver
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self
from urllib.parse import parse_qsl, unquote

How = Literal["whole", "reset", "cut", "never"]


@dataclass(frozen=True)
class Request:
    """One request."""

    method: str
    path: str  # as it was sent, without the query
    query: Mapping[str, str]
    headers: Mapping[str, str]  # by names in lower case
    body: bytes = field(repr=False)

    @property
    def what(self) -> str:
        """The decoded path, or the prefix of a list, in a form that faults and counts can match."""
        ranges = "".join(
            f" {name}={self.query[name]}" for name in ("prefix", "startOffset", "name") if name in self.query
        )
        source = self.headers.get("x-amz-copy-source") or self.headers.get("x-goog-copy-source")
        copied = f" from {unquote(source)} copy" if source else ""
        return f"{self.method} {unquote(self.path)}{ranges}{copied}"


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Fault:
    """A fault of some of the requests."""

    pattern: str  # a regular expression, which a request's ``what`` has to contain
    times: int = 1  # how often it goes wrong
    answer: Answer | None = None  # what is answered instead of doing what was asked
    after_doing: Answer | None = None  # what is answered after that was done
    how: How = "whole"  # how the answer goes over the wire; reset: as when a machine goes down; cut: an orderly end
    skip: int = 0  # how many matching requests go well before
    when: Callable[[Request], bool] | None = None  # a request counts only if this says so
    act: Callable[[], object] | None = None  # called when it happens
    after: threading.Event | None = None  # is set before anything is done or answered


@dataclass
class StoredObject:
    """One object, with the number of the write that made it."""

    content: bytes
    generation: int


class StoreServer:
    """A fake object store; subclasses speak a protocol."""

    page = 1000  # how many keys one answer to a list may have
    scheme: str  # of the URLs of its buckets

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, StoredObject]] = {}  # the objects by bucket and key
        self.log: list[Request] = []  # in the order in which they came
        self.latency = 0.0  # seconds that pass before a request is looked at, as over a network
        self.ranges = True  # whether parts of objects can be had; otherwise it is always all of them
        self.conditions = True  # whether conditions of writes are honoured
        self.most_at_once = 0
        self._at_once = 0
        self._generation = 1000
        self._faults: list[Fault] = []
        self._lock = threading.RLock()
        self._closing = threading.Event()
        store = self

        class Handler(_Handler):
            server_store = store

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: object, client_address: object) -> None:
                """Logs nothing: killed clients leave broken connections, which the tests expect."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._has_ended = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._has_ended = True
        host, port = self._server.server_address[:2]
        socket.create_connection((str(host), port)).close()  # the thread waits for one
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        """Waits for connections without waking up between them, as a server lasts as long as all tests."""
        while not self._has_ended:
            self._server.handle_request()

    def reset(self) -> None:
        """Forgets requests and faults, and releases those that wait for an answer; objects stay."""
        self._closing.set()
        with self._lock:
            self._closing = threading.Event()
            self._faults.clear()
            self.log.clear()
            self.latency, self.most_at_once, self.ranges, self.conditions = 0.0, 0, True, True

    def fail(self, pattern: str, **how: object) -> Fault:
        """Adds a fault; see :class:`Fault` for the arguments."""
        fault = Fault(pattern, **how)  # type: ignore[arg-type]  # each test names what it needs
        with self._lock:
            self._faults.append(fault)
        return fault

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Returns the keys of a bucket in order."""
        return sorted(key for key in self.buckets[bucket] if key.startswith(prefix))

    def counts(self) -> dict[str, int]:
        """Returns the number of requests of each kind, such as ``{"PUT": 3}``; lists are ``LIST``."""
        with self._lock:
            return dict(Counter(self.kind(request) for request in self.log))

    def sent(self) -> list[str]:
        """Returns the subjects of all requests, in order."""
        with self._lock:
            return [request.what for request in self.log]

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[Request]]:
        """Yields the requests that arrive while the block runs; the list is complete when it ends."""
        seen: list[Request] = []
        before = len(self.log)
        yield seen
        with self._lock:
            seen += self.log[before:]

    # ---- for subclasses

    def environment(self) -> dict[str, str]:
        """Returns the variables with which a process finds the server."""
        raise AssertionError("each protocol says")

    def kind(self, request: Request) -> str:
        """Returns the kind of a request."""
        raise AssertionError("each protocol says")

    def answer(self, request: Request) -> Answer:
        """Answers a request; called by one thread at a time."""
        raise AssertionError("each protocol says")

    def error(self, status: int, code: str) -> Answer:
        """Returns the answer for an error, in the form of the protocol."""
        raise AssertionError("each protocol says")

    def put(self, bucket: str, key: str, content: bytes) -> StoredObject:
        """Stores an object."""
        self._generation += 1
        made = self.buckets[bucket][key] = StoredObject(content, self._generation)
        return made

    # ---- the wire

    def handle(self, request: Request) -> tuple[Answer, How]:
        """Chooses the answer to a request and its fault, if any."""
        with self._lock:
            self.log.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            latency = self.latency
        try:
            if latency:
                time.sleep(latency)
            with self._lock:
                fault = self._fault(request)
                if fault is not None and fault.act is not None:
                    fault.act()
            if fault is not None and fault.after is not None:
                fault.after.wait()
            with self._lock:
                answer = self.answer(request) if fault is None or fault.answer is None else fault.answer
                if fault is not None and fault.after_doing is not None:
                    answer = fault.after_doing
                return answer, "whole" if fault is None else fault.how
        finally:
            with self._lock:
                self._at_once -= 1

    def wait_for_nothing(self) -> None:
        """Returns when the server ends, or is reset."""
        self._closing.wait()

    def _fault(self, request: Request) -> Fault | None:
        for fault in self._faults:
            if fault.times and re.search(fault.pattern, request.what) and (fault.when is None or fault.when(request)):
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None


class _Handler(socketserver.StreamRequestHandler):
    """One connection. The parser of headers in the standard library is that of mail, and takes longer than the rest."""

    server_store: StoreServer

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            while (line := self.rfile.readline()) and self._answer(line):
                pass

    def _answer(self, line: bytes) -> bool:
        """Answers one request; returns whether another one may follow."""
        method, target, _ = line.decode("latin-1").split()
        fields = iter(lambda: self.rfile.readline().decode("latin-1").strip(), "")
        headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in fields)}
        if headers.get("expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = int(headers.get("content-length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client has gone; a request that is not whole is not carried out
            return False
        path, _, query = target.partition("?")
        request = Request(method, path, dict(parse_qsl(query, keep_blank_values=True)), headers, body)
        answer, how = self.server_store.handle(request)
        if how == "never":
            self.server_store.wait_for_nothing()
            return False
        content = answer.body if method != "HEAD" else b""
        lines = {"Content-Length": str(len(answer.body)), **answer.headers}
        head = [f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}"]
        head += [f"{name}: {value}" for name, value in lines.items()]
        message = "\r\n".join([*head, "", ""]).encode("latin-1") + content
        if how != "whole":
            message = message[: len(message) - max(1, len(content) // 2)]
        self.wfile.write(message)
        if how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        return how == "whole" and headers.get("connection", "").lower() != "close"


def ranged(content: bytes, header: str | None) -> tuple[int, bytes, dict[str, str]] | None:
    """Returns a range of an object, with its status and headers; None if the object ends before the range begins."""
    if header is None:
        return 200, content, {}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if match is None or match[0] == "bytes=-":
        return 200, content, {}  # invalid ranges are ignored, RFC 9110 section 14.2
    first = int(match[1]) if match[1] else max(0, len(content) - int(match[2]))
    last = min(int(match[2]), len(content) - 1) if match[1] and match[2] else len(content) - 1
    if first > last:
        return None
    return 206, content[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
