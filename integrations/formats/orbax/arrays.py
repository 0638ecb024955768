"""Use TensorStore to read zarr 2 and zarr 3 arrays from other libraries, in OCDBT databases or plain directories.

All arrays are opened concurrently and then read concurrently, with a limit on the bytes in flight.
"""

from __future__ import annotations

import bisect
import math
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from ....engine.arrays import naming
from ....engine.errors import (
    DamagedCheckpointError,
    HoldfastError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageConflictError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageUnavailableError,
)
from ....engine.format import MANIFEST_NAME, Database, Entries, NodePlace
from ....engine.pytree import Box
from ....engine.storage import Location, aligned_empty, explain_failure

if TYPE_CHECKING:
    import tensorstore

_CACHE = 64 << 20  # size, in bytes, of the cache for decoded B+tree nodes; all arrays share the cache
_UNDER_WAY = 1 << 30  # limit on the number of bytes that are read concurrently
_RATIO = 1 << 16  # maximum compression ratio of the supported compressors
_SMALL_CHUNK = 64 << 20  # chunks of up to this many bytes are accepted even in small arrays
_UNSTORED = 4 << 30  # allowance, in bytes, for chunks that are not stored because they contain only the fill value
_MANIFEST_LIMIT = 512 << 20  # maximum size, in bytes, of a manifest
_SPEC = re.compile(r" \[tensorstore_spec=.*", re.DOTALL)
_BODY = re.compile(r" \[(?:http_response_body|x-amzn-requestid)='(?:[^'\\]|\\.)*'\]")  # fields that repeat the message

# Errors of the storage itself, as opposed to errors of one array. The message of an error begins with a status code of
# Abseil, https://abseil.io/docs/cpp/guides/status-codes, but some messages mean something else than their status.
_STATUSES: dict[str, type[StorageError]] = {
    "ABORTED": StorageConflictError,
    "CANCELLED": StorageUnavailableError,
    "DEADLINE_EXCEEDED": StorageUnavailableError,
    "PERMISSION_DENIED": StoragePermissionError,
    "RESOURCE_EXHAUSTED": StorageFullError,
    "UNAUTHENTICATED": StoragePermissionError,
    "UNAVAILABLE": StorageUnavailableError,
}
_MESSAGES: tuple[tuple[str, type[StorageError]], ...] = (
    (
        "RequestTimeTooSkewed|ExpiredToken|InvalidToken|TokenRefreshRequired|AuthorizationHeaderMalformed"
        "|IllegalLocationConstraint|credentials from provider",
        StoragePermissionError,
    ),
    (r"All \d+ retry attempts failed|Malformed List response|Failed to parse response", StorageUnavailableError),
)


def directory_spec(location: Location) -> dict[str, Any]:
    """Return the TensorStore key-value store spec for a directory."""
    if location.is_local:
        return {"driver": "file", "path": f"{location.path}/"}
    scheme, _, rest = location.url.partition("://")
    if scheme not in ("memory", "s3", "gs"):
        raise InvalidLocationError(
            f"{location}: TensorStore, which reads Orbax arrays, does not support {scheme}://; use a "
            "disk, S3 or Google Cloud Storage, and copy the directory from or to it"
        )
    bucket, _, key = ("", "", rest) if scheme == "memory" else rest.partition("/")
    spec: dict[str, Any] = {"driver": "memory"} if scheme == "memory" else {"driver": "gcs", "bucket": bucket}
    key = unquote(key, errors="surrogateescape")
    return {**(_s3_spec(bucket) if scheme == "s3" else spec), "path": f"{key}/" if key else ""}


def _s3_spec(bucket: str) -> dict[str, Any]:
    """Return the TensorStore spec for an S3 bucket, using the endpoint and credentials that ``Location`` uses."""
    from ....engine.storage import aws_endpoint, aws_region, chosen_profile  # lazy, because this loads asyncio and ssl

    region, endpoint = aws_region(), aws_endpoint()
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket}
    if endpoint:
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
    elif region:
        spec["aws_region"] = region
    # If the environment has credentials, avoid the default chain, which tries files and the network first and logs a
    # warning for each miss. Pass the profile explicitly, because TensorStore 0.1.86 does not look it up.
    given = "AWS_ACCESS_KEY_ID" in os.environ
    spec["aws_credentials"] = {"type": "environment"} if given else {"type": "default", "profile": chosen_profile()}
    return spec


class Wanted(NamedTuple):
    """A request to read an array or one box of it."""

    name: str
    box: Box | None = None


class OpenedArrays:
    """Arrays that have been opened but not read. ``failed`` maps array names to the reasons why opening failed."""

    def __init__(self, location: Location, specs: dict[str, dict[str, Any]]) -> None:
        import tensorstore

        self._location = location
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE}})
        for file in location.glob("**/*") if location.url.startswith("memory://") else ():
            if file.is_there():  # TensorStore reads its own memory, so copy the objects there
                spec = directory_spec(file.parent)
                tensorstore.KvStore.open(spec, context=context).result().write(file.name, file.read_bytes()).result()
        opening = {name: tensorstore.open(spec, context=context, open=True, read=True) for name, spec in specs.items()}
        self._stores: dict[str, tensorstore.TensorStore] = {}
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.failed: dict[str, str] = {}
        for name, future in opening.items():
            try:
                store = future.result()
            except (ValueError, NotImplementedError, OSError) as error:
                self.failed[name] = reason(error, location)
                continue
            dtype = np.dtype(store.dtype.numpy_dtype)
            if dtype.hasobject or dtype.itemsize == 0:
                self.failed[name] = f"elements of type {store.dtype.name}, which holdfast does not read"
                continue
            self._stores[name], self.dtypes[name], self.shapes[name] = store, dtype, tuple(map(int, store.shape))

    def chunks(self, name: str) -> tuple[int, ...]:
        grid = self._stores[name].chunk_layout.read_chunk.shape or ()
        return tuple(size or length for size, length in zip(grid, self.shapes[name], strict=True))

    def check_sizes(self, wanted: Iterable[Wanted], stored: int, *, filled: bool) -> None:
        """Reject arrays that claim more bytes than their files can hold, before allocating memory."""
        total = 0
        for name, box in wanted:
            size = math.prod(self.shapes[name]) * self.dtypes[name].itemsize
            grid = self._stores[name].chunk_layout.write_chunk.shape or ()
            chunk = math.prod(length or 1 for length in grid) * self.dtypes[name].itemsize
            if chunk > max(_SMALL_CHUNK, 4 * size):  # TensorStore allocates whole chunks.
                raise DamagedCheckpointError(
                    f"{self._location}: the chunks of array {name!r} claim {chunk} bytes, but the array has {size}"
                )
            total += size if box is None else box.size * self.dtypes[name].itemsize
        limit = stored * _RATIO + (_UNSTORED if filled else 1 << 20)
        if stored and total > limit:
            raise DamagedCheckpointError(
                f"{self._location}: its arrays claim {total} bytes, but its files have {stored}"
            )

    def read(self, wanted: Mapping[int, Wanted], use: Callable[[int, NDArray[Any]], None]) -> list[tuple[str, str]]:
        """Read arrays or boxes concurrently, passing each to ``use`` with its key; return failures as (name, error)."""
        import tensorstore

        problems: list[tuple[str, str]] = []
        pending: deque[tuple[int, NDArray[Any], Any]] = deque()
        under_way = 0

        def finish() -> int:
            index, array, future = pending.popleft()
            try:
                future.result()
            except (ValueError, NotImplementedError, OSError) as error:
                problems.append((wanted[index].name, reason(error, self._location)))
            else:
                use(index, array)
            return array.nbytes

        for index, (name, box) in wanted.items():
            shape, dtype = self.shapes[name] if box is None else box.shape, self.dtypes[name]
            size = math.prod(shape) * dtype.itemsize
            while pending and under_way + size > _UNDER_WAY:
                under_way -= finish()
            array = aligned_empty(size).view(dtype).reshape(shape)
            store = self._stores[name]
            if box is not None and box.shape:
                parts = tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))
                store = store[parts][tensorstore.d[:].translate_to[0]]
            pending.append((index, array, tensorstore.array(array).write(store)))
            under_way += size
        while pending:
            finish()
        return problems


def reason(error: Exception, location: Location) -> str:
    """Return the reason why an array cannot be read; raise a storage error if the storage itself failed."""
    text = str(error)
    cls = next((cls for pattern, cls in _MESSAGES if re.search(pattern, text)), _STATUSES.get(text.partition(":")[0]))
    if cls is not None:
        raise explain_failure(cls, "read", location.url, _BODY.sub("", text)) from error
    return re.sub(r"^[A-Z_]+: ", "", _SPEC.sub("", text))


def gather(boxes: Sequence[Box]) -> list[Box]:
    """Return the regions to read: the bounding box if the boxes fill at least half of it, otherwise each box."""
    # Reading the bounding box avoids decoding a shared chunk once per box.
    wanted = list(dict.fromkeys(box for box in boxes if box.size))
    if len(wanted) < 2:
        return wanted
    start = tuple(min(box.start[axis] for box in wanted) for axis in range(len(wanted[0].start)))
    stop = tuple(max(box.stop[axis] for box in wanted) for axis in range(len(wanted[0].stop)))
    around = Box(start, stop)
    return [around] if 2 * sum(box.size for box in wanted) >= around.size else wanted


def cut(box: Box, regions: Sequence[Box], arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Cut a box out of the region that contains it; return an empty array if the box is empty."""
    for region, array in zip(regions, arrays, strict=True):
        if box.size and box.common(region) == box:
            return array[box.within(region)]
    return np.empty(box.shape, dtype)


class ProcessDatabases:
    """Per-process databases without a common index. Each database contains the shards that one process saved."""

    def __init__(self, folders: Sequence[Location]) -> None:
        self._first = folders[0]
        self._folders: dict[str, Location] = {}  # maps each key to the first folder that contains it
        for folder in folders:
            try:
                with naming(folder):
                    keys = read_database(folder).keys
            except ObjectNotFoundError as error:
                raise DamagedCheckpointError(f"{folder} is damaged: {error}") from error
            for key in keys:
                self._folders.setdefault(key.decode("utf-8", "surrogateescape"), folder)
        self._keys = sorted(self._folders)

    def spec(self, name: str) -> dict[str, Any]:
        """Return the TensorStore key-value store spec for the directory of an array."""
        begin, end = (bisect.bisect_left(self._keys, f"{name}{mark}") for mark in "/0")  # "0" follows "/" in ASCII
        # Begin with a layer for all keys; without it, TensorStore would return uninitialized memory for missing chunks.
        layers: list[dict[str, Any]] = [{"base": {"driver": "ocdbt", "base": directory_spec(self._first)}}]
        layers += [
            {"exact": key, "base": {"driver": "ocdbt", "base": directory_spec(self._folders[key]), "path": key}}
            for key in self._keys[begin:end]
            if self._folders[key] != self._first
        ]
        return {"driver": "kvstack", "layers": layers, "path": f"{name}/"}


def missing_files(location: Location, names: Collection[str]) -> dict[str, list[tuple[str, str]]]:
    """Return the missing or truncated OCDBT files of each array. (TensorStore's own errors name only a key.)"""
    if not names:
        return {}
    try:
        entries = read_database(location)
    except (HoldfastError, OSError) as error:
        return {name: [(MANIFEST_NAME, str(error))] for name in names}
    wanted = {f"{name}/".encode() if name else b"": name for name in names}
    needed: dict[str, dict[str, int]] = {}  # minimum size of each file in bytes, keyed by array, then by file
    for row, key in enumerate(entries.keys):
        cuts = (0, *(cut + 1 for cut, letter in enumerate(key) if letter == ord("/")))
        name = next((wanted[key[:cut]] for cut in cuts if key[:cut] in wanted), None)
        if name is not None and entries.inline[row] is None:
            file = entries.files[int(entries.file_ids[row])]
            ends = needed.setdefault(name, {})
            ends[file] = max(ends.get(file, 0), int(entries.offsets[row]) + int(entries.lengths[row]))
    sizes = {file: _size(location / file) for file in {file for ends in needed.values() for file in ends}}
    by_array: dict[str, list[tuple[str, str]]] = {}
    for name, ends in needed.items():
        for file, end in sorted(ends.items()):
            size, problem = sizes[file], f"it is truncated: expected at least {end} bytes, found {sizes[file]}"
            if isinstance(size, str) or size < end:
                by_array.setdefault(name, []).append((file, size if isinstance(size, str) else problem))
    return by_array


def _size(file: Location) -> float | str:
    """Return the size of a local file in bytes, infinity for a remote file, or the reason why opening it fails."""
    try:
        with file.open_data() as data:
            return data.size if file.is_local else math.inf
    except (HoldfastError, OSError) as error:
        return f"it is missing or cannot be opened ({error})"


def read_database(location: Location) -> Entries:
    def read(place: NodePlace) -> bytes:
        with (location / place.file).open_data() as file:
            return file.read(place.offset, place.length).tobytes()

    database = Database((location / MANIFEST_NAME).read_bytes(limit=_MANIFEST_LIMIT), checksums=False)
    database.decode(lambda places: map(read, places))
    return database.entries
