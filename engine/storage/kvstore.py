"""S3, Google Cloud Storage and the memory of this process, by way of TensorStore and the clients for bulk data.

Services, regions and credentials come from the environment variables that Amazon's and Google's own tools read; a URL
only names the bucket and the object.
"""

from __future__ import annotations

import errno
import functools
import io
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import (
    DamagedCheckpointError,
    HoldfastError,
    ObjectNotFoundError,
    StorageConflictError,
    StoragePermissionError,
    StorageUnavailableError,
)
from . import object_store
from .backend import FileIdentity, Segment
from .object_store import BY_NAME, GARBLED, UNKNOWN_SIZE, ObjectStoreBackend, file_parts, time_limit
from .status import check_header, hidden_address

if TYPE_CHECKING:
    import numpy as np
    import tensorstore
    from numpy.typing import NDArray

    from .transfer import Patience, Transfer

_logger = logging.getLogger("holdfast")

_LIST_PAGE = 1000  # names that stores list at a time

LARGE_UPLOAD_BYTES = 256 << 20  # bytes of a file whose upload is repeated before TensorStore has all of it in memory
UPLOAD_PAUSES = (1.0, 5.0, 20.0)  # seconds to wait before each repetition

_CONFLICTS = 5  # answers that ask to repeat a conditional request, S3's 409, after which it has failed

# The environment variables whose values go into headers.
_CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "gs": ("GOOGLE_AUTH_TOKEN_FOR_TESTING",),
}
_context_lock = threading.Lock()
_conditional: dict[str, bool] = {}  # whether each service honours conditions


@functools.cache
def _new_context() -> tensorstore.Context:
    import tensorstore

    retries = {"max_retries": object_store.RETRIES}
    return tensorstore.Context({"s3_request_retries": retries, "gcs_request_retries": retries})


def shared_context() -> tensorstore.Context:
    """Return the TensorStore context of this process; with it, ``memory://`` is the same store everywhere."""
    with _context_lock:
        return _new_context()


@functools.cache
def _missing() -> bytes:
    """Return TensorStore's generation of an object that does not exist."""
    import tensorstore

    store = tensorstore.KvStore.open({"driver": "memory"}, context=tensorstore.Context()).result()
    generation: bytes = store.read("nothing").result().stamp.generation
    return generation


def store_spec(scheme: str, bucket: str) -> dict[str, Any]:
    """Return TensorStore's JSON specification of a store.

    For S3 it includes the service (``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL``), the region (``AWS_REGION`` or
    ``AWS_DEFAULT_REGION``), both also as ``~/.aws`` has them, and the source of the credentials.
    """
    if scheme == "memory":
        return {"driver": "memory"}
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket}
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket}
    from .aws_credentials import aws_endpoint, aws_region, chosen_profile

    region, endpoint = aws_region(), aws_endpoint("s3")
    if endpoint:
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
    elif region:
        spec["aws_region"] = region
    # The default chain searches files and the network first, and logs a warning for each that is missing. TensorStore
    # 0.1.86 finds no profile whose name it is not told.
    given = {"type": "environment"}
    spec["aws_credentials"] = (
        given if "AWS_ACCESS_KEY_ID" in os.environ else {"type": "default", "profile": chosen_profile()}
    )
    return spec


def open_backend(scheme: str, bucket: str) -> KvStoreBackend:
    """Return the backend of a bucket: the same object for the same settings."""
    gcs_url = os.environ.get("TENSORSTORE_GCS_HTTP_URL", "") if scheme == "gs" else ""  # TensorStore reads it itself
    return _open_backend(scheme, bucket, json.dumps(store_spec(scheme, bucket)), gcs_url)


@functools.lru_cache(maxsize=64)
def _open_backend(scheme: str, bucket: str, spec: str, gcs_url: str) -> KvStoreBackend:  # noqa: ARG001 - in the key
    return KvStoreBackend(scheme, bucket, json.loads(spec))


class KvStoreBackend(ObjectStoreBackend):
    """A bucket of S3 or Google Cloud Storage, or the memory of this process."""

    def __init__(self, scheme: str, bucket: str, spec: dict[str, Any]) -> None:
        super().__init__(f"{scheme}://{bucket}", is_remote=scheme != "memory")
        self.scheme = scheme
        self.bucket = bucket
        self.spec = spec
        self._lock = threading.Lock()
        self._opened: tensorstore.KvStore | None = None
        self._bulk: Transfer | None = None

    def has_object(self, key: str) -> bool:
        answer = self.request(key, "access", lambda: self._store().read(key, byte_range=slice(0, 0)))
        return bool(answer.state == "value")

    def honours_conditions(self, key: str, data: bytes | None) -> bool:
        # Each service is asked once; one that ignores conditions writes the data again.
        service = self.spec.get("endpoint", "") if self.scheme == "s3" else ""
        if self.scheme == "s3" and service not in _conditional:
            if data is None:
                return False
            try:
                # If the first one succeeds, the object may have been missing.
                found = not all(self.write_where(key, data, None) for _ in range(2))
            except StorageUnavailableError:
                raise
            except HoldfastError:
                found = False
            if not found:
                _logger.info("%s: no conditional writes here; two saves to one path are not kept apart", self._root)
            _conditional[service] = found
        return self.scheme != "s3" or _conditional[service]

    def read_generation(self, key: str) -> tuple[bytes | None, bytes]:
        answer = self.request(key, "read", lambda: self._store().read(key), UNKNOWN_SIZE)
        return answer.value if answer.state == "value" else None, answer.stamp.generation

    def write_where(self, key: str, data: bytes | None, generation: bytes | None) -> bool:
        known = _missing() if generation is None else generation
        nbytes = len(data or b"")
        for attempt in itertools.count(1):
            try:
                stamp = self.request(key, "write", lambda: self._store().write(key, data, if_equal=known), nbytes)
                return bool(stamp.generation)  # unknown, which is empty, after a refusal
            except StorageConflictError:
                if attempt == _CONFLICTS:
                    raise
            time.sleep(0.05 * attempt)
        raise AssertionError

    def remove(self, key: str) -> None:
        self.request(key, "remove", lambda: self._store().write(key, None))

    def remove_together(self, names: Sequence[str]) -> bool:
        transfer = self._transfer()
        return transfer is not None and transfer.remove(names, self._patience(names[0], "remove", 0))

    def write_data(self, key: str, size: int, segments: Sequence[Segment], awaited: threading.Event | None) -> None:
        transfer = self._transfer()
        if transfer is not None:
            parts = functools.partial(file_parts, size, segments)
            patience = self._patience(key, "write", size)
            again = UPLOAD_PAUSES if size > LARGE_UPLOAD_BYTES else ()
            outcome = transfer.put(key, size, parts, patience, again=again)
            if outcome == "done":
                return
            if outcome in ("denied", "ended"):
                self._check_access(key, is_denied=outcome == "denied")
        # TensorStore takes a value as a whole, and copies it twice. The stream returns its bytes without a copy,
        # because they have their final length from the start.
        stream = io.BytesIO(bytes(size))
        for part in file_parts(size, segments, sent=True):
            stream.write(part.data)
        content = [stream.getvalue()]
        del stream
        self.write_object(key, content)

    def _check_access(self, key: str, *, is_denied: bool) -> None:
        """Raise the error of wrong credentials, which a read of nothing meets as a second upload would."""
        try:
            self.request(key, "write", lambda: self._store().read(key, byte_range=slice(0, 1)))
        except DamagedCheckpointError:
            pass
        except StoragePermissionError as error:
            # A role that may not list is denied a look for what is not there, and may write it with a new token.
            if is_denied or "AccessDenied" not in str(error):
                raise

    def can_share(self) -> bool:
        transfer = self._transfer()
        return transfer is not None and transfer.copies

    def share(self, key: str, target: str, known: FileIdentity) -> FileIdentity:
        transfer = self._transfer()
        if transfer is None or not transfer.copy(key, target, self._patience(key, "copy", UNKNOWN_SIZE)):
            raise OSError(errno.EAGAIN, "the service did not copy it", self.url(key))
        return BY_NAME

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        length = UNKNOWN_SIZE if byte_range is None else byte_range.stop - byte_range.start
        answer = self.request(key, "read", lambda: self._store().read(key, byte_range=byte_range), length)
        if answer.state != "value":
            raise ObjectNotFoundError(f"cannot read {self.url(key)}: there is no such object")
        value: bytes = answer.value
        return value

    def read_small(self, key: str, limit: int) -> bytes | None:
        transfer = self._transfer()
        return None if transfer is None else transfer.get_small(key, limit, self._patience(key, "read", limit))

    def read_into(
        self, key: str, offset: int, memory: Sequence[NDArray[np.uint8]], answered: Callable[[], None]
    ) -> bool:
        transfer = self._transfer()
        size = sum(part.size for part in memory)
        if transfer is None or not size:
            return False
        return transfer.get(key, offset, memory, self._patience(key, "read", size), answered)

    def write_object(self, key: str, content: list[bytes]) -> None:
        # TensorStore copies the bytes, so the list releases its own.
        self.request(key, "write", lambda: self._store().write(key, content.pop()), len(content[0]))

    def _store(self) -> tensorstore.KvStore:
        for name in _CREDENTIALS.get(self.scheme, ()):  # TensorStore 0.1.86 prints the header
            check_header(self._root, name, os.environ.get(name, ""))
        if self.scheme == "s3":
            from .aws_credentials import check_profile

            check_profile()
        with self._lock:
            if self._opened is None:
                import tensorstore

                # TensorStore would otherwise ask for an object before each conditional write of it.
                extra = {"use_conditional_write": True} if self.scheme == "s3" else {}
                self._opened = tensorstore.KvStore.open(self.spec | extra, context=shared_context()).result()
            return self._opened

    def _transfer(self) -> Transfer | None:
        """Return the client for bulk data, if this store has one."""
        if not self.is_remote:
            return None
        bulk = self._bulk
        if bulk is None:
            from .gcs_transfer import GcsTransfer
            from .s3_transfer import S3Transfer

            # Without the lock, as this waits for a network, and a process that is forked then would keep it locked for
            # good. Two threads may both make a client; either one is fine.
            bulk = self._bulk = (S3Transfer if self.scheme == "s3" else GcsTransfer).open(self.spec)
        return bulk

    def _patience(self, key: str, action: str, nbytes: int) -> Patience:
        from .transfer import Patience

        return Patience(time_limit(nbytes), object_store.WARN_AFTER, lambda: self.warn(key, action))

    def list_objects(self, key: str, *, itself: bool) -> list[str]:
        import tensorstore

        prefix = key if itself or not key else f"{key}/"
        span = tensorstore.KvStore.KeyRange(prefix, f"{key}0" if key else "")  # "0" follows "/"
        names: list[bytes] = self.request(key, "list", lambda: self._store().list(span), attempts=GARBLED)
        if self.scheme == "gs" and (not names or len(names) >= _LIST_PAGE):
            # TensorStore 0.1.86 returns an empty list where Google refuses to list, but reports the refusal of a read.
            self.request(key, "list", lambda: self._store().read(f"{prefix}.", byte_range=slice(0, 0)))
        return sorted(name.decode("utf-8", "surrogateescape") for name in names)

    def _advice(self, kind: type[HoldfastError]) -> str:
        if self.scheme == "memory":
            return ""
        if self.scheme == "s3":
            from .aws_credentials import described_credentials, described_endpoint

            endpoint, region = self.spec.get("endpoint"), self.spec.get("aws_region")
            asked = f"asked {hidden_address(endpoint)}, {described_endpoint('s3')}" if endpoint else "asked Amazon"
            asked += f", region {region}" if region else ", no AWS_REGION set"
            source = described_credentials()
        else:
            url = os.environ.get("TENSORSTORE_GCS_HTTP_URL")
            asked = (
                f"asked {hidden_address(url)}, the value of TENSORSTORE_GCS_HTTP_URL"
                if url
                else "asked storage.googleapis.com"
            )
            source = (
                "the credentials in the file that GOOGLE_APPLICATION_CREDENTIALS names, or those that "
                "`gcloud auth application-default login` makes"
            )
        if issubclass(kind, StoragePermissionError):
            return f" ({asked}, with {source}; they must allow listing, reading, writing and deleting objects)"
        if issubclass(kind, ObjectNotFoundError):
            return f" ({asked}; is there a bucket {self.bucket!r}? Create it first)"
        return f" ({asked})" if issubclass(kind, StorageUnavailableError) else ""
