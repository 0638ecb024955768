"""What is stored of a checkpoint and of its run: the commit record, as readers see it, and the facts about the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..errors import CheckpointNotFoundError, DamagedCheckpointError, HoldfastError, ObjectNotFoundError, StorageError
from ..format import RECORD, CheckpointRecord, decode_document, encode_document
from ..storage import Location, is_unreadable, unreadable_as_damage

T = TypeVar("T")

RECORD_LIMIT = 256 << 20  # bytes; a record names files, not leaves


def read_record(location: Location) -> CheckpointRecord:
    """Read the commit record of a checkpoint."""
    place = location / RECORD
    for left in reversed(range(attempts_at(location))):
        try:
            with unreadable_as_damage(place):
                data = place.read_bytes(limit=RECORD_LIMIT)
            return CheckpointRecord.decode(data, source=str(place))
        except ObjectNotFoundError as error:
            raise CheckpointNotFoundError(f"{location}: no checkpoint here (there is no {RECORD})") from error
        except DamagedCheckpointError:
            if not left:
                raise
    raise AssertionError


def attempts_at(location: Location) -> int:
    """Return how often something has to be found damaged before it counts as that.

    What a network brings may be wrong once, such as the page of a proxy; what a disk holds stays as it is.
    """
    return 1 if location.is_local else 3


def has_record(location: Location) -> bool:
    """Whether a commit record lies here, perhaps one that the disk fails to read."""
    try:
        return (location / RECORD).is_there()
    except StorageError as error:
        if not is_unreadable(error):
            raise
        return True


def read_steadily(location: Location, read: Callable[[CheckpointRecord], T]) -> T:
    """Read a checkpoint by its record; where another process replaces it meanwhile, read the new one."""
    left = attempts_at(location)
    while True:
        record = read_record(location)
        try:
            return read(record)
        except DamagedCheckpointError:
            left -= 1
            if not (left or has_changed(location, record)):
                raise


def has_changed(location: Location, record: CheckpointRecord) -> bool:
    """Whether a checkpoint was replaced or deleted since its record was read, as far as that can be told."""
    try:
        return read_record(location).identity != record.identity
    except CheckpointNotFoundError:
        return True
    except HoldfastError:
        return False


# ---- the facts about a run, stored beside its steps


METADATA = "metadata"  # name of the folder
_FILE = "data.json"
_LIMIT = 64 << 20  # bytes


def stored_metadata(location: Location) -> Mapping[str, Any] | None:
    """Return the facts about the run in a directory, or None."""
    place = location / METADATA / _FILE
    try:
        content = place.read_bytes(limit=_LIMIT)
    except ObjectNotFoundError:
        return None
    found: Mapping[str, Any] | None = decode_document(content, "json", source=str(place)).get("data")
    return found


def store_metadata(location: Location, metadata: Mapping[str, Any] | None) -> None:
    """Store the facts about a run, if there are any."""
    if metadata is not None:
        (location / METADATA).check_not_link()
        (location / METADATA).make_directory()
        (location / METADATA / _FILE).write_bytes(encode_document("json", {"data": metadata}))
