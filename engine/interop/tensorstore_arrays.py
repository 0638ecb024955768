"""Arrays of other writers, read by TensorStore: zarr of both versions, in OCDBT databases or plain directories.

All arrays are opened at once and read at once, within a bound on the bytes that are under way.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from ..errors import (
    DamagedCheckpointError,
    HoldfastError,
    StorageConflictError,
    StorageFullError,
    StoragePermissionError,
    StorageUnavailableError,
)
from ..storage import Location, aligned_empty
from ..storage.statuses import map_status
from ..storage.stores import shared_context, store_spec
from ..tree import Box

if TYPE_CHECKING:
    import tensorstore

_CACHE = 64 << 20  # bytes of decoded B+tree nodes, which many arrays share
_UNDER_WAY = 1 << 30  # bytes of arrays that are being read at one time
_RATIO = 1 << 16  # no compressor in use makes less than one byte of so many
_SMALL_CHUNK = 64 << 20  # bytes of chunks that are fine whatever the array
_UNSTORED = 4 << 30  # bytes of arrays whose chunks need not be stored, as they hold the fill value
_SPEC = re.compile(r" \[tensorstore_spec=.*", re.DOTALL)
_ELSEWHERE = (StorageConflictError, StorageFullError, StoragePermissionError, StorageUnavailableError)


def directory_spec(location: Location) -> dict[str, Any]:
    """Returns TensorStore's specification of the key-value store that is a directory."""
    if location.is_local:
        return {"driver": "file", "path": f"{location.path}/"}
    scheme, _, rest = location.url.partition("://")
    bucket, _, key = ("", "", rest) if scheme == "memory" else rest.partition("/")
    key = unquote(key, errors="surrogateescape")
    return {**store_spec(scheme, bucket), "path": f"{key}/" if key else ""}


def new_context() -> tensorstore.Context:
    """Makes the TensorStore context of one opened checkpoint; what it caches goes with it."""
    import tensorstore

    return tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE}}, parent=shared_context())


class Wanted(NamedTuple):
    """What is to be read of an array.

    Attributes:
        name: Its name.
        box: Which elements; None are all of them.
    """

    name: str
    box: Box | None = None


class OpenedArrays:
    """Arrays whose metadata is read and whose data is not.

    Args:
        location: The directory, for messages.
        specs: TensorStore's specification of every array, by its name.

    Raises:
        DamagedCheckpointError: The metadata of an array is missing or cannot be read; names all such arrays.

    Attributes:
        dtypes: The element type of every array.
        shapes: The shape of every array.
    """

    def __init__(self, location: Location, specs: dict[str, dict[str, Any]]) -> None:
        import tensorstore

        self._location = location
        context = new_context()
        opening = {name: tensorstore.open(spec, context=context, open=True, read=True) for name, spec in specs.items()}
        self._stores: dict[str, tensorstore.TensorStore] = {}
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        problems = []
        for name, future in opening.items():
            try:
                store = future.result()
            except (ValueError, NotImplementedError, OSError) as error:
                problems.append((name, reason(error, location)))
                continue
            dtype = np.dtype(store.dtype.numpy_dtype)
            if dtype.hasobject or dtype.itemsize == 0:
                problems.append((name, f"elements of type {store.dtype.name}, which holdfast does not read"))
                continue
            self._stores[name], self.dtypes[name], self.shapes[name] = store, dtype, tuple(map(int, store.shape))
        if problems:
            raise damaged(location, problems)

    def check_sizes(self, wanted: Iterable[Wanted], stored: int, *, filled: bool) -> None:
        """Makes sure that arrays are not larger than their files can possibly hold, before memory is taken.

        Args:
            wanted: What will be read.
            stored: Bytes of all files; 0 where that is not known.
            filled: Whether chunks may be missing because they hold the fill value.

        Raises:
            DamagedCheckpointError: They are, or the chunks of one are far larger than itself.
        """
        total = 0
        for name, box in wanted:
            size = math.prod(self.shapes[name]) * self.dtypes[name].itemsize
            grid = self._stores[name].chunk_layout.write_chunk.shape or ()
            chunk = math.prod(length or 1 for length in grid) * self.dtypes[name].itemsize
            if chunk > max(_SMALL_CHUNK, 4 * size):  # TensorStore makes room for all of a chunk
                raise DamagedCheckpointError(
                    f"{self._location}: the chunks of the array {name!r} are said to have {chunk} bytes, itself {size}"
                )
            total += size if box is None else box.size * self.dtypes[name].itemsize
        limit = stored * _RATIO + (_UNSTORED if filled else 1 << 20)
        if stored and total > limit:
            raise DamagedCheckpointError(
                f"{self._location}: the arrays are said to have {total} bytes, but all files together have {stored}"
            )

    def read(self, wanted: Sequence[Wanted], use: Callable[[int, NDArray[Any]], None]) -> list[tuple[str, str]]:
        """Reads arrays or parts of them, many at a time.

        Args:
            wanted: Which.
            use: Takes the position of what is wanted and its elements, which are writable and nobody else's.

        Returns:
            The arrays that cannot be read, each with the reason.
        """
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

        for index, (name, box) in enumerate(wanted):
            shape, dtype = self.shapes[name] if box is None else box.shape, self.dtypes[name]
            size = math.prod(shape) * dtype.itemsize
            while pending and under_way + size > _UNDER_WAY:
                under_way -= finish()
            array = aligned_empty(size).view(dtype).reshape(shape)
            pending.append((index, array, self._start(name, box, array)))
            under_way += size
        while pending:
            finish()
        return problems

    def _start(self, name: str, box: Box | None, array: NDArray[Any]) -> Any:
        import tensorstore

        store = self._stores[name]
        if box is not None and box.shape:
            parts = tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))
            store = store[parts][tensorstore.d[:].translate_to[0]]
        return tensorstore.array(array).write(store)


def reason(error: Exception, location: Location) -> str:
    """Says why an array cannot be read, where its stored bytes are to blame.

    Args:
        error: What TensorStore raised.
        location: The directory.

    Returns:
        TensorStore's words, without its specification.

    Raises:
        StorageError: The storage is to blame: no permission, not reachable, no space.
    """
    mapped: HoldfastError = map_status(error, location.url, "read")
    if isinstance(mapped, _ELSEWHERE):
        raise mapped from error
    text = _SPEC.sub("", str(error))
    return re.sub(r"^[A-Z_]+: ", "", text)


def damaged(location: Location, problems: Sequence[tuple[str, str]]) -> DamagedCheckpointError:
    """Makes one error of all leaves that cannot be read.

    Args:
        location: The directory.
        problems: Every leaf, as people write it, with the reason.
    """
    lines = [f"  {leaf}: {what}" for leaf, what in problems]
    more = [f"  and {len(lines) - 20} more"] if len(lines) > 20 else []
    return DamagedCheckpointError(
        "\n".join(
            [
                f"{location} is damaged in {len({leaf for leaf, _ in problems})} of its leaves; load another step, or "
                "load the others with select=",
                *lines[:20],
                *more,
            ]
        )
    )
