"""TensorFlow's checkpoints of the format before 0.12, "V1": told apart, and refused by name.

A checkpoint, or each shard of one, is a single table (see :mod:`.tensorflow_table`). The key "" stands first in it,
with a ``SavedTensorSlices`` of ``tensorflow/core/util/saved_tensor_slice.proto``, of which only ``meta`` is set.
"""

from __future__ import annotations

import re

from ..errors import DamagedCheckpointError, FormatVersionError, StorageError
from ..storage import Location
from .source import CheckpointSource, StepDirectories
from .tensorflow_places import STATE, read_state
from .tensorflow_table import MAGIC, looks_like_table

_BEGINS = re.compile(rb"\0\0[\x80-\xff]{0,4}[\0-\x7f]\x0a", re.DOTALL)
"""An entry that shares nothing with the key before, has a key of no bytes, and a value that begins with field 1."""
_BEGINNING = 8  # bytes
_NOTES = b"model_checkpoint_path:"


def recognise(location: Location, names: frozenset[str]) -> CheckpointSource | None:
    """Refuses a checkpoint of this format; see :class:`~holdfast.engine.interop.source.Format`.

    Raises:
        FormatVersionError: It is one.
    """
    if not names:
        _refuse(location)
        if location.is_local and location.name and not location.exists():  # elsewhere, listing is not worth it
            _refuse_shards(location)
    elif STATE in names and _begins(location / STATE, len(_NOTES)) == _NOTES:
        newest = read_state(location).newest
        if newest:
            _refuse(location / newest)
            _refuse_shards(location / newest)
    return None


def recognise_steps(_location: Location, _names: frozenset[str]) -> StepDirectories | None:
    """There are no directories of steps that could be read."""
    return None


def _refuse_shards(prefix: Location) -> None:
    shard = re.compile(re.escape(prefix.name) + "-[0-9]{5,}-of-[0-9]{5,}")
    try:
        names = sorted(entry.name for entry in prefix.parent.entries() if shard.fullmatch(entry.name))
    except StorageError:
        return
    if names:
        _refuse(prefix.parent / names[0])


def _refuse(place: Location) -> None:
    if _BEGINS.match(_begins(place, _BEGINNING)) and _ends_as_table(place):
        raise FormatVersionError(
            f"{place} is a TensorFlow checkpoint of the format before TensorFlow 0.12 (V1, a single table), which is "
            "not read. Restore it in TensorFlow with tf.compat.v1.train.Saver and save it again: that writes the "
            "format with .index and .data files"
        )


def _begins(place: Location, count: int) -> bytes:
    try:
        with place.open_data() as reader:
            return reader.read(0, min(count, reader.size)).tobytes()
    except (StorageError, DamagedCheckpointError):  # the latter says that this is no ordinary file
        return b""


def _ends_as_table(place: Location) -> bool:
    with place.open_data() as reader:
        size = reader.size
        return size > len(MAGIC) and looks_like_table(reader.read(size - len(MAGIC), len(MAGIC)).tobytes())
