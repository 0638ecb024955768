"""The object stores that TensorStore reaches: how they are addressed, and what to say when they refuse.

Everything is taken from the environment variables that Amazon's and Google's own tools read, so that a URL says where
something is, and nothing says twice who asks.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any

from ..errors import (
    HoldfastError,
    ObjectNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    import tensorstore

RETRIES = 8
"""Attempts at one request; they take about two minutes before an unreachable service is given up."""

_context_lock = threading.Lock()


@functools.cache
def _new_context() -> tensorstore.Context:
    import tensorstore

    retries = {"max_retries": RETRIES}
    return tensorstore.Context({"s3_request_retries": retries, "gcs_request_retries": retries})


def shared_context() -> tensorstore.Context:
    """Returns the one TensorStore context of this process, by which ``memory://`` is the same store everywhere."""
    with _context_lock:
        return _new_context()


def store_spec(scheme: str, bucket: str) -> dict[str, Any]:
    """Returns TensorStore's JSON specification of a store.

    For S3, the environment variables that Amazon's own tools read give the rest: ``AWS_ENDPOINT_URL_S3`` or
    ``AWS_ENDPOINT_URL`` (another vendor's service), ``AWS_REGION`` or ``AWS_DEFAULT_REGION``, and the credentials.

    Args:
        scheme: ``"memory"``, ``"s3"`` or ``"gs"``.
        bucket: The bucket; empty for memory.
    """
    if scheme == "memory":
        return {"driver": "memory"}
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket}
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket}
    environment = os.environ
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if endpoint:
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
    elif region:
        spec["aws_region"] = region
    if "AWS_ACCESS_KEY_ID" in environment:
        # The default chain searches files and the network first, and complains about each that is not there.
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def store_settings(scheme: str, bucket: str) -> dict[str, Any]:
    """Returns all that decides which store a bucket is in: the specification, and what TensorStore looks up itself."""
    found = store_spec(scheme, bucket)
    if scheme == "gs":
        found["url"] = os.environ.get("TENSORSTORE_GCS_HTTP_URL", "")
    return found


def hint(scheme: str, spec: dict[str, Any], kind: type[HoldfastError]) -> str:
    """Returns what may help against an error of a store, or "".

    Args:
        scheme: The scheme of the store's URLs.
        spec: Its specification.
        kind: The error.
    """
    if scheme == "s3":
        return _s3_hint(spec, kind)
    if scheme != "gs":
        return ""
    if issubclass(kind, StoragePermissionError):
        return (
            "GOOGLE_APPLICATION_CREDENTIALS names a file of credentials, `gcloud auth application-default login` makes "
            "one; they have to allow to list, read, write and delete objects of this bucket"
        )
    if issubclass(kind, ObjectNotFoundError):
        return f"is there a bucket {spec['bucket']!r}? It has to be made before"
    if issubclass(kind, StorageUnavailableError):
        place = os.environ.get("TENSORSTORE_GCS_HTTP_URL")
        return f"asked {place}, as TENSORSTORE_GCS_HTTP_URL says" if place else "asked storage.googleapis.com"
    return ""


def _s3_hint(spec: dict[str, Any], kind: type[HoldfastError]) -> str:
    region = spec.get("aws_region")
    asked = f"asked {spec['endpoint']}, as AWS_ENDPOINT_URL says" if "endpoint" in spec else "asked Amazon"
    asked += f", region {region}" if region else ", no AWS_REGION set"
    if issubclass(kind, StoragePermissionError):
        who = (
            "the credentials of AWS_ACCESS_KEY_ID"
            if "aws_credentials" in spec
            else "the credentials that ~/.aws or this machine has, if any (AWS_ACCESS_KEY_ID is not set)"
        )
        return f"{asked}, with {who}; they have to allow to list, read, write and delete objects of this bucket"
    if issubclass(kind, ObjectNotFoundError):
        return f"{asked}; is there a bucket {spec['bucket']!r}? It has to be made before"
    return asked if issubclass(kind, StorageUnavailableError) else ""
