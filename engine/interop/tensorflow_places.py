"""Which TensorFlow checkpoints lie in a directory, and which of them is the newest.

TensorFlow notes that in a file called ``checkpoint``, the message ``CheckpointState`` of
``tensorflow/python/training/checkpoint_state.proto`` as text. The paths in it may be those of another machine: only
their last part counts, as the name of a checkpoint in the same directory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import DamagedCheckpointError, StorageError
from ..storage import Location
from .tensorflow_bundle import INDEX

STATE = "checkpoint"
"""Name of the file in which TensorFlow notes which checkpoints there are."""
_STATE_LIMIT = 64 << 20  # bytes
_NUMBERED = re.compile(r"(.+)-([0-9]{1,18})", re.DOTALL)
_LINE = re.compile(
    r"""^\s*(\w+)\s*:\s*(?:"((?:[^"\\\n]|\\.)*)"|'((?:[^'\\\n]|\\.)*)'|([-+0-9.eE]+))\s*$""", re.MULTILINE
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}

_logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What TensorFlow has noted.

    Attributes:
        newest: The name of the newest checkpoint; None if that is not known.
        times: When checkpoints were saved, in seconds since 1970-01-01 UTC, as far as that is known.
    """

    newest: str | None = None
    times: Mapping[str, float] = field(default_factory=dict)


def prefixes(names: Iterable[str]) -> list[str]:
    """Returns the names of the checkpoints in a directory, from those of all files."""
    return sorted(name.removesuffix(INDEX) for name in names if name.endswith(INDEX) and name != INDEX)


def number_of(prefix: str) -> int | None:
    """Returns the number at the end of a checkpoint's name, or None."""
    match = _NUMBERED.fullmatch(prefix)
    return None if match is None else int(match[2])


def numbered(found: Iterable[str], newest: str | None) -> dict[int, str]:
    """Returns the checkpoints with numbers: those called like the newest one, or like most of them.

    Args:
        found: The names of all checkpoints of a directory.
        newest: The newest of them, if that is known.
    """
    families: dict[str, dict[int, str]] = {}
    of_newest = ""
    for prefix in sorted(found):
        match = _NUMBERED.fullmatch(prefix)
        if match is not None:
            families.setdefault(match[1], {}).setdefault(int(match[2]), prefix)
            of_newest = match[1] if prefix == newest else of_newest
    if not families:
        return {}
    chosen = of_newest or max(sorted(families), key=lambda name: len(families[name]))
    return dict(sorted(families[chosen].items()))


def read_state(directory: Location) -> CheckpointState:
    """Reads what TensorFlow has noted in a directory; nothing if it has not, or if that cannot be read."""
    place = directory / STATE
    try:
        text = place.read_bytes(limit=_STATE_LIMIT).decode("utf-8")
    except (DamagedCheckpointError, UnicodeDecodeError) as error:
        _logger.warning("%s cannot be read, the highest number counts: %s", place, error)
        return CheckpointState()
    except StorageError:
        return CheckpointState()
    newest: str | None = None
    names: list[str] = []
    times: list[float] = []
    for match in _LINE.finditer(text):
        key, value = match[1], match[2] if match[2] is not None else match[3]
        if value is not None and key == "model_checkpoint_path":
            newest = _last_part(value)
        elif value is not None and key == "all_model_checkpoint_paths":
            names.append(_last_part(value))
        elif match[4] is not None and key == "all_model_checkpoint_timestamps":
            times.append(_seconds(match[4]))
    if newest is None:
        _logger.warning("%s names no checkpoint, the highest number counts", place)
    known = zip(names, times, strict=True) if len(names) == len(times) else ()
    return CheckpointState(newest, {name: time for name, time in known if time > 0})


def _last_part(text: str) -> str:
    return _ESCAPE.sub(_unescaped, text.encode()).decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]


def _unescaped(found: re.Match[bytes]) -> bytes:
    if found[1] or found[2]:
        return bytes([int(found[1] or found[2], 8 if found[1] else 16) & 255])
    return _LETTERS.get(found[3], found[3])


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
