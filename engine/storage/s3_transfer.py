"""Bulk data to and from S3: where the service is, and the signatures of requests.

Signatures: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
Copies: https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from .transfer import Part, Transfer

_EMPTY = hashlib.sha256(b"").hexdigest()


class S3Transfer(Transfer):
    """Requests for objects of one bucket of S3."""

    def __init__(self, url: str, verify: ssl.SSLContext | None, bucket: str, region: str) -> None:
        super().__init__(url, verify)
        self._bucket = bucket
        self._region = region

    @classmethod
    def open(cls, spec: Mapping[str, Any]) -> S3Transfer | None:
        """Return the client for TensorStore's specification of a store; None where only TensorStore can decide.

        Credentials have to be in the environment, and the address and the region have to be known without a request.
        """
        if "aws_credentials" not in spec or "aws_region" not in spec:
            return None
        bucket, region = spec["bucket"], spec["aws_region"]
        endpoint = spec.get("endpoint")
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

    def _authorized(self, method: str, target: str, headers: Mapping[str, str], digest: str) -> dict[str, str] | None:
        key_id, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        if not key_id or not secret:
            return None
        digest = digest or _EMPTY
        now = datetime.datetime.now(datetime.UTC)
        stamp = now.strftime("%Y%m%dT%H%M%SZ")
        signed = {"host": self._netloc, "x-amz-content-sha256": digest, "x-amz-date": stamp}
        signed |= {name: value for name, value in headers.items() if name != "content-length"}
        token = os.environ.get("AWS_SESSION_TOKEN")
        if token:
            signed["x-amz-security-token"] = token
        names = sorted(signed)
        canonical = [method, target, "", *(f"{name}:{signed[name]}" for name in names), "", ";".join(names), digest]
        scope = f"{stamp[:8]}/{self._region}/s3/aws4_request"
        text = ["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256("\n".join(canonical).encode()).hexdigest()]
        derived = f"AWS4{secret}".encode()
        for part in (stamp[:8], self._region, "s3", "aws4_request", "\n".join(text)):
            derived = hmac.digest(derived, part.encode(), "sha256")
        return {
            **signed,
            **headers,
            "authorization": f"AWS4-HMAC-SHA256 Credential={key_id}/{scope}, SignedHeaders={';'.join(names)}, "
            f"Signature={derived.hex()}",
        }
