"""TensorFlow's checkpoints of the format before 0.12, "V1": recognised, and refused with the name of the format.

A checkpoint, or each shard of one, is a single table (see :mod:`.index`). Its first key is "", with a
``SavedTensorSlices`` of ``tensorflow/core/util/saved_tensor_slice.proto`` in which only ``meta`` is set.
"""

from __future__ import annotations

import re

from ....engine.errors import DamagedCheckpointError, FormatVersionError, StorageError
from ....engine.sources import first_bytes
from ....engine.storage import Location
from .checkpoint import STATE, ends_as_table, read_state

# An entry that shares nothing with the key before, has a key of no bytes, and a value that begins with field 1.
_BEGINS = re.compile(rb"\0\0[\x80-\xff]{0,4}[\0-\x7f]\x0a", re.DOTALL)
_BEGINNING = 8  # bytes
_NOTES = b"model_checkpoint_path:"


def recognise(location: Location, names: frozenset[str]) -> None:
    if not names:
        _refuse(location)
        if location.is_local and location.name and not location.exists():  # elsewhere, listing is not worth it
            _refuse_shards(location)
    elif STATE in names and _begins(location / STATE, len(_NOTES)) == _NOTES:
        newest = read_state(location).newest
        if newest:
            _refuse(location / newest)
            _refuse_shards(location / newest)


def _refuse_shards(prefix: Location) -> None:
    shard = re.compile(re.escape(prefix.name) + "-[0-9]{5,}-of-[0-9]{5,}")
    try:
        names = sorted(entry.name for entry in prefix.parent.entries() if shard.fullmatch(entry.name))
    except StorageError:
        return
    if names:
        _refuse(prefix.parent / names[0])


def _refuse(place: Location) -> None:
    if _BEGINS.match(_begins(place, _BEGINNING)) and ends_as_table(place):
        raise FormatVersionError(
            f"{place} is a TensorFlow checkpoint of the format before TensorFlow 0.12 (V1, a single table), which is "
            "not read. Restore it in TensorFlow with tf.compat.v1.train.Saver and save it again: that writes the "
            "format with .index and .data files"
        )


def _begins(place: Location, count: int) -> bytes:
    try:
        return first_bytes(place, count)
    except (StorageError, DamagedCheckpointError):  # the latter for what is not an ordinary file
        return b""
