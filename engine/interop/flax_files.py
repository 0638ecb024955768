"""Files in which Flax keeps whole states: ``flax.serialization.to_bytes`` and ``flax.training.checkpoints``."""

from __future__ import annotations

import re

from ..storage import Location
from .files import total_bytes
from .flax_msgpack import MsgpackTree, looks_like_msgpack
from .source import SingleTree, StepDirectories

FORMAT = "Flax"
_STEP = re.compile(r"checkpoint_([0-9]{1,18})")


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    """Opens a file; see :class:`~holdfast.engine.interop.source.Format`.

    Raises:
        DamagedCheckpointError: It begins like one, and is damaged.
    """
    if names or location.is_directory() or not looks_like_msgpack(location):
        return None
    match = _STEP.fullmatch(location.name)
    return SingleTree(
        format=FORMAT,
        location=location,
        source=MsgpackTree(location),
        nbytes=total_bytes(location),
        step=None if match is None else int(match[1]),
    )


def recognise_steps(location: Location, names: frozenset[str]) -> StepDirectories | None:
    """Finds the files ``checkpoint_<step>``; see :class:`~holdfast.engine.interop.source.Format`."""
    found = {int(match[1]): location / name for name in names if (match := _STEP.fullmatch(name)) is not None}
    files = {step: place for step, place in found.items() if not place.is_directory() and looks_like_msgpack(place)}
    return StepDirectories(FORMAT, dict(sorted(files.items()))) if files else None
