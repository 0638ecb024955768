"""A fake Google Cloud Storage: the part of the JSON API that TensorStore needs.

https://cloud.google.com/storage/docs/json_api/v1
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from tests.object_stores.store_server import Answer, Request, StoredObject, StoreServer, ranged

TOKEN = "a-token-for-tests"

_OBJECT = re.compile(r"/storage/v1/b/([^/]+)/o(?:/([^/]+))?")
_REWRITE = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")


class GcsServer(StoreServer):
    """Google Cloud Storage, with one token that allows everything."""

    def kind(self, request: Request) -> str:
        """Returns the method as S3 would call it, or ``LIST``."""
        if request.method == "POST":
            return "PUT"
        if request.method == "GET" and request.query.get("alt") == "json":
            return "HEAD"
        return "LIST" if request.method == "GET" and request.path.endswith("/o") else request.method

    def error(self, status: int, code: str) -> Answer:
        """Returns an error in the format of Google."""
        text = {"error": {"code": status, "message": f"{code} it is", "errors": [{"reason": code}]}}
        return _json(status, text)

    def answer(self, request: Request) -> Answer:
        """Answers a request."""
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return self.error(401 if "authorization" not in request.headers else 403, "forbidden")
        rewrite = _REWRITE.fullmatch(request.path)
        if rewrite is not None:
            return self._rewrite(*map(unquote, rewrite.groups()))
        match = _UPLOAD.fullmatch(request.path) if request.method == "POST" else _OBJECT.fullmatch(request.path)
        if match is None:
            return self.error(400, "invalid")
        bucket = unquote(match[1])
        if bucket not in self.buckets:
            return self.error(404, "notFound")
        if request.method == "POST":
            return self._upload(bucket, request)
        if match[2] is None:
            return self._list(bucket, request.query)
        key = unquote(match[2])
        found = self.buckets[bucket].get(key)
        if found is None:
            return self.error(404, "notFound")
        refused = self._condition(found, request.query)
        if refused is not None:
            return refused
        if request.method == "DELETE":
            del self.buckets[bucket][key]
            return Answer(204)
        if request.query.get("alt") == "json":
            return _json(200, _metadata(bucket, key, found))
        part = ranged(found.content, request.headers.get("range") if self.ranges else None)
        if part is None:
            return self.error(416, "requestedRangeNotSatisfiable")
        headers = {"x-goog-generation": str(found.generation), "x-goog-stored-content-length": str(len(found.content))}
        return Answer(part[0], part[1], headers | part[2])

    def _rewrite(self, bucket: str, key: str, target_bucket: str, target: str) -> Answer:
        found = self.buckets.get(bucket, {}).get(key)
        if found is None:
            return self.error(404, "notFound")
        self.put(target_bucket, target, found.content)
        return _json(200, {"kind": "storage#rewriteResponse", "objectSize": str(len(found.content)), "done": True})

    def _upload(self, bucket: str, request: Request) -> Answer:
        key = request.query["name"]
        refused = self._condition(self.buckets[bucket].get(key), request.query)
        if refused is not None:
            return refused
        return _json(200, _metadata(bucket, key, self.put(bucket, key, request.body)))

    def _condition(self, found: StoredObject | None, query: Mapping[str, str]) -> Answer | None:
        generation = str(0 if found is None else found.generation)
        if query.get("ifGenerationMatch", generation) != generation:
            return self.error(412, "conditionNotMet")
        return Answer(304) if query.get("ifGenerationNotMatch") == generation else None

    def _list(self, bucket: str, query: Mapping[str, str]) -> Answer:
        first, end = query.get("startOffset", ""), query.get("endOffset")
        after = query.get("pageToken", "")
        keys = [key for key in self.keys(bucket) if key >= first and key > after and (end is None or key < end)]
        size = min(self.page, int(query.get("maxResults", "1000")))
        found: dict[str, Any] = {"kind": "storage#objects"}
        if keys:  # Google omits the member where nothing is found
            found["items"] = [_metadata(bucket, key, self.buckets[bucket][key]) for key in keys[:size]]
        if len(keys) > size:
            found["nextPageToken"] = keys[size - 1]
        return _json(200, found)


def _metadata(bucket: str, key: str, found: StoredObject) -> dict[str, Any]:
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": key,
        "size": str(len(found.content)),
        "generation": str(found.generation),
        "metageneration": "1",
    }


def _json(status: int, document: Mapping[str, Any]) -> Answer:
    return Answer(status, json.dumps(document).encode(), {"Content-Type": "application/json; charset=UTF-8"})
