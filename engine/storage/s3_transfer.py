"""Bulk data to and from S3: where the service is, and what its requests look like.

Copies: https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
Deletions: https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape

from .aws_credentials import aws_credentials, forget_credentials, signed_headers
from .transfer import Part, Transfer

LOOKUP_URL = "https://{}.s3.amazonaws.com/"
_WAIT = 5.0  # seconds for the region of a bucket
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_REFUSED = re.compile(
    rb"<Code>(ExpiredToken|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|SignatureDoesNotMatch)</Code>"
)
_EMPTY = hashlib.sha256(b"").hexdigest()


class S3Transfer(Transfer):
    """Requests for objects of one bucket of S3."""

    def __init__(self, url: str, verify: ssl.SSLContext | None, bucket: str, region: str) -> None:
        super().__init__(url, verify)
        self._bucket = bucket
        self._region = region

    @classmethod
    def open(cls, spec: Mapping[str, Any]) -> S3Transfer | None:
        """Return the client for TensorStore's specification of a store; None where only TensorStore can decide."""
        if aws_credentials() is None:
            return None
        bucket, endpoint = spec["bucket"], spec.get("endpoint")
        region = spec.get("aws_region") or ("." not in bucket and _bucket_region(bucket))
        if not region:
            return None
        if endpoint is None:
            if "." in bucket or not region.isascii() or region.startswith("cn-"):
                return None
            url = f"https://{bucket}.s3.{region}.amazonaws.com"
        else:
            url = f"{endpoint}/{bucket}"
        return cls._at(url, bucket, region)

    def _put_target(self, key: str) -> tuple[str, str]:
        return "PUT", self._get_target(key)

    def _get_target(self, key: str) -> str:
        return self._prefix + "/" + quote(key, safe="/-_.~", errors="surrogateescape")

    def _digest(self, parts: Callable[[], Iterator[Part]]) -> str:
        if self._verify is not None:
            return "UNSIGNED-PAYLOAD"  # over TLS, which notices a changed byte
        hasher = hashlib.sha256()
        for part in parts():
            hasher.update(part.data)
        return hasher.hexdigest()

    def _is_stored(self, answer: bytes, size: int) -> bool:
        return b"<Error>" not in answer  # some services answer an error with the status of success

    def _copy_request(self, key: str, target: str) -> tuple[str, str, dict[str, str]]:
        source = quote(f"{self._bucket}/{key}", safe="/-_.~", errors="surrogateescape")
        return "PUT", self._get_target(target), {"x-amz-copy-source": source}

    def _is_copied(self, answer: bytes) -> bool:
        return b"<CopyObjectResult" in answer  # an error may have the status of success

    def _removal(self, names: Sequence[str]) -> tuple[str, dict[str, str], bytes] | None:
        if not all(name.isprintable() for name in names):  # XML has no characters for some of the others
            return None
        objects = "".join(f"<Object><Key>{escape(name)}</Key></Object>" for name in names)
        body = f'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Quiet>true</Quiet>{objects}</Delete>'.encode()
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()  # the service asks for it
        headers = {"content-length": str(len(body)), "content-md5": digest, "content-type": "application/xml"}
        return f"{self._prefix or '/'}?delete", headers, body

    def _is_removed(self, answer: bytes) -> bool:
        return b"<DeleteResult" in answer and b"<Error>" not in answer

    def _refuses(self, status: int, answer: bytes) -> bool:
        return _REFUSED.search(answer) is not None

    def _forget(self, headers: Mapping[str, str]) -> bool:
        forget_credentials(headers["authorization"])
        return "AWS_ACCESS_KEY_ID" not in os.environ  # these do not change

    def _authorized(self, method: str, target: str, headers: Mapping[str, str], digest: str) -> dict[str, str] | None:
        found = aws_credentials()
        if found is None:
            return None
        digest = digest or _EMPTY
        named = {"host": self._netloc, "x-amz-content-sha256": digest, **headers}
        return signed_headers(method, target, named, digest, found, self._region, "s3")


@functools.cache
def _bucket_region(bucket: str) -> str | None:
    """Ask Amazon for the region of a bucket; that needs no credentials."""
    if urllib.request.getproxies().get("https"):
        return None
    try:
        with urllib.request.urlopen(
            urllib.request.Request(LOOKUP_URL.format(bucket), method="HEAD"), timeout=_WAIT
        ) as answer:
            return str(answer.headers["x-amz-bucket-region"])
    except urllib.error.HTTPError as error:
        return error.headers["x-amz-bucket-region"]
    except OSError:
        return None
