"""A fake Azure Blob Storage: the part of its REST API that obstore needs; signatures and conditions are checked.

https://learn.microsoft.com/en-us/rest/api/storageservices/blob-service-rest-api
"""

from __future__ import annotations

import base64
import email.utils
import hmac
import re
from collections.abc import Mapping
from urllib.parse import unquote
from xml.sax.saxutils import escape

from tests.object_stores.store_server import Answer, Request, StoredObject, StoreServer, ranged

ACCOUNT = "anaccount"
KEY = base64.b64encode(b"a key for tests and for nothing else").decode()

_SIGNED = (
    "content-encoding", "content-language", "content-length", "content-md5", "content-type", "date",
    "if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range",
)  # fmt: skip
_INNER = re.compile(rb"Content-ID: (\d+)\r\n\r\nDELETE (\S+) HTTP/1.1\r\n")


class AzureServer(StoreServer):
    """Azure Blob Storage, with one account and its key."""

    scheme = "az"

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[str, bytes] = {}

    def environment(self) -> dict[str, str]:
        account = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
        return {**account, "AZURE_STORAGE_ENDPOINT": self.url, "AZURE_ALLOW_HTTP": "true"}

    def kind(self, request: Request) -> str:
        """Returns the method, ``LIST``, or ``DELETE`` for a batch, which obstore uses for nothing else."""
        if request.query.get("comp") == "batch":
            return "DELETE"
        return "LIST" if request.query.get("comp") == "list" else request.method

    def error(self, status: int, code: str) -> Answer:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} it is.</Message></Error>"
        return Answer(status, text.encode(), {"x-ms-error-code": code})

    def answer(self, request: Request) -> Answer:
        if request.headers.get("authorization") != f"SharedKey {ACCOUNT}:{_signature(request)}":
            return self.error(403, "AuthenticationFailed")
        container, _, key = unquote(request.path).lstrip("/").partition("/")
        if container not in self.buckets:
            return self.error(404, "ContainerNotFound")
        if not key:
            return (
                self._batch(request) if request.query.get("comp") == "batch" else self._list(container, request.query)
            )
        found = self.buckets[container].get(key)
        if request.method == "PUT":
            return self._put(container, key, found, request)
        if found is None:
            return self.error(404, "BlobNotFound")
        part = ranged(found.content, request.headers.get("range"))
        if part is None:
            return self.error(416, "InvalidRange")
        return Answer(part[0], part[1], part[2] | _described(found))

    def _put(self, container: str, key: str, found: StoredObject | None, request: Request) -> Answer:
        if request.query.get("comp") == "block":
            self.blocks[request.query["blockid"]] = request.body
            return Answer(201)
        if found is not None and request.headers.get("if-none-match") == "*":
            return self.error(409, "BlobAlreadyExists")
        if request.headers.get("if-match", tag := _described(found)["ETag"] if found else "") != tag:
            return self.error(412, "ConditionNotMet")
        content = request.body
        if request.query.get("comp") == "blocklist":
            content = b"".join(
                self.blocks.pop(name) for name in re.findall(r">([^<>\s]+)</", content.decode()) if name in self.blocks
            )
        return Answer(201, b"", _described(self.put(container, key, content)))

    def _list(self, container: str, query: Mapping[str, str]) -> Answer:
        after = query.get("marker", "")
        keys = [key for key in self.keys(container, query.get("prefix", "")) if key > after]
        blobs = "".join(self._blob(key, self.buckets[container][key]) for key in keys[: self.page])
        marker = keys[self.page - 1] if len(keys) > self.page else ""
        text = (
            f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker>{escape(marker)}</NextMarker></EnumerationResults>"
        )
        return Answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _blob(self, key: str, found: StoredObject) -> str:
        facts = {**_described(found), "Content-Length": str(len(found.content)), "Content-Type": "x/y"}
        properties = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in facts.items())
        return f"<Blob><Name>{escape(key)}</Name><Properties>{properties}</Properties></Blob>"

    def _batch(self, request: Request) -> Answer:
        parts = []
        for number, path in _INNER.findall(request.body):
            container, _, key = unquote(path.decode()).lstrip("/").partition("/")
            gone = self.buckets[container].pop(key, None)
            status = "404 The specified blob does not exist." if gone is None else "202 Accepted"
            parts.append(
                "--answer\r\nContent-Type: application/http\r\n"
                f"Content-ID: {number.decode()}\r\n\r\nHTTP/1.1 {status}\r\nx-ms-version: 2023-11-03\r\n\r\n\r\n"
            )
        body = "".join(parts) + "--answer--"
        return Answer(202, body.encode(), {"Content-Type": "multipart/mixed; boundary=answer"})


def _described(found: StoredObject) -> dict[str, str]:
    return {"ETag": f'"{found.generation}"', "Last-Modified": email.utils.formatdate(0, usegmt=True)}


def _signature(request: Request) -> str:
    """Returns the signature of a request.

    https://learn.microsoft.com/en-us/rest/api/storageservices/authorize-with-shared-key
    """
    headers = {**request.headers, "content-length": request.headers.get("content-length", "").lstrip("0")}
    own = sorted(name for name in headers if name.startswith("x-ms-"))
    lines = [request.method, *(headers.get(name, "") for name in _SIGNED), *(f"{name}:{headers[name]}" for name in own)]
    lines.append(f"/{ACCOUNT}{request.path}")
    lines += [f"{name}:{request.query[name]}" for name in sorted(request.query)]
    return base64.b64encode(hmac.digest(base64.b64decode(KEY), "\n".join(lines).encode(), "sha256")).decode()
