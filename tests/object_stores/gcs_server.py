"""A fake Google Cloud Storage: what obstore needs of the XML API, which is that of S3, and TensorStore of the JSON API.

https://cloud.google.com/storage/docs/xml-api/overview
https://cloud.google.com/storage/docs/json_api/v1
"""

from __future__ import annotations

import email.utils
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from tests.object_stores.s3_server import S3Server
from tests.object_stores.store_server import Answer, Request, StoredObject, ranged

TOKEN = "a-token-for-tests"

_OBJECT = re.compile(r"/storage/v1/b/([^/]+)/o(?:/([^/]+))?")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")


class GcsServer(S3Server):
    """Google Cloud Storage, with one token that allows everything."""

    scheme = "gs"
    copy_source = "x-goog-copy-source"

    def environment(self) -> dict[str, str]:
        return {"TENSORSTORE_GCS_HTTP_URL": self.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": TOKEN}

    def refusal(self, request: Request) -> Answer | None:
        if request.headers.get("authorization") == f"Bearer {TOKEN}":
            return None
        return self.error(401 if "authorization" not in request.headers else 403, "forbidden")

    def condition(self, old: StoredObject | None, request: Request) -> Answer | None:
        generation = str(0 if old is None else old.generation)
        if request.headers.get("x-goog-if-generation-match", generation) != generation:
            return self.error(412, "PreconditionFailed")
        return None

    def described(self, found: StoredObject) -> dict[str, str]:
        own = {"x-goog-generation": str(found.generation), "Last-Modified": email.utils.formatdate(0, usegmt=True)}
        return super().described(found) | own

    def answer(self, request: Request) -> Answer:
        if not request.path.startswith(("/storage/v1/", "/upload/")):
            return super().answer(request)
        refused = self.refusal(request)
        if refused is not None:
            return refused
        match = _UPLOAD.fullmatch(request.path) if request.method == "POST" else _OBJECT.fullmatch(request.path)
        if match is None:
            return self.error(400, "invalid")
        bucket = unquote(match[1])
        if bucket not in self.buckets:
            return self.error(404, "notFound")
        if request.method == "POST":
            return self._upload(bucket, request)
        if match[2] is None:
            return self._names(bucket, request.query)
        key = unquote(match[2])
        found = self.buckets[bucket].get(key)
        if found is None:
            return self.error(404, "notFound")
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

    def _upload(self, bucket: str, request: Request) -> Answer:
        key = request.query["name"]
        return _json(200, _metadata(bucket, key, self.put(bucket, key, request.body)))

    def _names(self, bucket: str, query: Mapping[str, str]) -> Answer:
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
