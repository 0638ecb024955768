"""Find TensorFlow checkpoints by prefix, file or directory.

As in TensorFlow, a prefix such as ``dir/ckpt-5`` identifies a checkpoint; the path of one of its files works, too.
TensorFlow records the newest checkpoint of a directory in the file ``checkpoint``, which contains a
``CheckpointState`` message (``tensorflow/python/training/checkpoint_state.proto``) in text format. Its paths may come
from another machine, so only the last component of each is used, as a prefix in the same directory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ....engine.errors import CheckpointNotFoundError, DamagedCheckpointError, FormatVersionError, StorageError
from ....engine.sources import FoundSteps, SingleTree, first_bytes, last_bytes
from ....engine.storage import Entry, Location
from .index import MAGIC
from .tree import INDEX, BundleTree

STATE = "checkpoint"  # file in which TensorFlow lists the checkpoints of a directory
_STATE_LIMIT = 64 << 20  # maximum size, in bytes, of the state file
_NUMBERED = re.compile(r"(.+)-([0-9]{1,18})", re.DOTALL)
_LINE = re.compile(
    r"""^\s*(\w+)\s*:\s*(?:"((?:[^"\\\n]|\\.)*)"|'((?:[^'\\\n]|\\.)*)'|([-+0-9.eE]+))\s*$""", re.MULTILINE
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}

_logger = logging.getLogger("holdfast")


class CheckpointState(NamedTuple):
    """The newest checkpoint in a directory, and the time of each checkpoint in seconds since 1970-01-01 UTC."""

    newest: str | None = None
    times: Mapping[str, float] = {}


def number_of(prefix: str) -> int | None:
    match = _NUMBERED.fullmatch(prefix)
    return None if match is None else int(match[2])


def numbered(prefixes: Iterable[str], newest: str | None) -> dict[int, str]:
    """Map numbers to prefixes ``<name>-<number>``, using the newest checkpoint's name or else the most common one."""
    families: dict[str, dict[int, str]] = {}
    of_newest = ""
    for prefix in sorted(prefixes):
        match = _NUMBERED.fullmatch(prefix)
        if match is not None:
            families.setdefault(match[1], {}).setdefault(int(match[2]), prefix)
            of_newest = match[1] if prefix == newest else of_newest
    if not families:
        return {}
    chosen = of_newest or max(sorted(families), key=lambda name: len(families[name]))
    return dict(sorted(families[chosen].items()))


def read_state(directory: Location) -> CheckpointState:
    """Read the state file of a directory; return an empty state if the file is missing or unreadable."""
    file = directory / STATE
    try:
        text = file.read_bytes(limit=_STATE_LIMIT).decode("utf-8")
    except (DamagedCheckpointError, UnicodeDecodeError) as error:
        _logger.warning("%s cannot be read; the highest number counts as the newest: %s", file, error)
        return CheckpointState()
    except StorageError:
        return CheckpointState()
    values: dict[str, list[str]] = {}
    for match in _LINE.finditer(text):
        quoted = (match[2] or match[3] or "").encode()
        path = _ESCAPE.sub(_unescaped, quoted).decode("utf-8", "replace").replace("\\", "/")
        values.setdefault(match[1], []).append(match[4] or path.rpartition("/")[2])
    newest = values["model_checkpoint_path"][-1] if "model_checkpoint_path" in values else None
    if newest is None:
        _logger.warning("%s names no checkpoint; the highest number counts as the newest", file)
    names, times = values.get("all_model_checkpoint_paths", []), values.get("all_model_checkpoint_timestamps", [])
    pairs = zip(names, map(_seconds, times), strict=True) if len(names) == len(times) else ()
    return CheckpointState(newest, {name: time for name, time in pairs if time > 0})


def _unescaped(match: re.Match[bytes]) -> bytes:
    if match[1] or match[2]:
        return bytes([int(match[1] or match[2], 8 if match[1] else 16) & 255])
    return _LETTERS.get(match[3], match[3])


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


_DATA = re.compile(r"(.+)\.data-[0-9]{5,}-of-[0-9]{5,}", re.DOTALL)
_FORMAT = "TensorFlow"


def _checkpoint(prefix: Location) -> SingleTree:
    folder, name = prefix.parent, prefix.name

    def nbytes() -> int:
        return sum(entry.size or 0 for entry in folder.entries() if _prefix_of(entry.name) == name)

    def time() -> float | None:
        return read_state(folder).times.get(name) if (folder / STATE).exists() else None

    return SingleTree(_FORMAT, prefix, lambda: BundleTree.open(prefix), nbytes, number_of(name), time)


def _prefix_of(name: str) -> str:
    """Return the checkpoint prefix in the name of an index or data file, or "" for other file names."""
    match = _DATA.fullmatch(name)
    return match[1] if match else name.removesuffix(INDEX) if name.endswith(INDEX) else ""


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    if not names:
        return _recognise_prefix(location)
    if "saved_model.pb" in names:
        return _recognise_prefix(location / "variables" / "variables")
    prefixes = _prefixes(location, names)
    newest = _newest(location, names, prefixes)
    if newest is not None and number_of(newest) is None:
        return _checkpoint(location / newest)
    if not prefixes or numbered(prefixes, newest):
        return None
    if len(prefixes) > 1:
        raise CheckpointNotFoundError(
            f"{location} holds the TensorFlow checkpoints {', '.join(prefixes[:8])}: give the path of one, "
            f"such as {location / prefixes[0]}"
        )
    return _checkpoint(location / prefixes[0])


def recognise_steps(location: Location, entries: Sequence[Entry]) -> FoundSteps:
    names = frozenset(entry.name for entry in entries)
    prefixes = _prefixes(location, names)
    newest = _newest(location, names, prefixes)
    if newest is not None and number_of(newest) is None:
        return FoundSteps()
    steps = {number: location / name for number, name in numbered(prefixes, newest).items()}
    return FoundSteps.of(_FORMAT, steps, noted=None if newest is None else number_of(newest))


def _recognise_prefix(location: Location) -> SingleTree | None:
    """Open the checkpoint with this prefix or with a file at this path; None if there is no such checkpoint."""
    name, folder = location.name, location.parent
    prefix = _prefix_of(name) or ("" if location.exists() else name)
    if not prefix:
        return None
    index = folder / f"{prefix}{INDEX}"
    if not index.exists() or index.is_directory():
        return None
    names = [entry.name for entry in folder.entries()]
    return _checkpoint(folder / prefix) if _prefixes(folder, names, [prefix]) else None


def _newest(location: Location, names: frozenset[str], prefixes: list[str]) -> str | None:
    """Return the prefix of the checkpoint that TensorFlow recorded as the newest, or None if its files are missing."""
    newest = read_state(location).newest if prefixes and STATE in names else None
    return newest if newest in prefixes else None


def _prefixes(folder: Location, names: Iterable[str], wanted: Sequence[str] | None = None) -> list[str]:
    """Return the prefixes of the checkpoints in a directory; a damaged index is accepted if data files exist."""
    names = list(names)
    with_data = {match[1] for name in names if (match := _DATA.fullmatch(name))}
    if wanted is None:
        wanted = sorted(name.removesuffix(INDEX) for name in names if name.endswith(INDEX) and name != INDEX)
    return [name for name in wanted if name in with_data or ends_as_table(folder / f"{name}{INDEX}")]


def ends_as_table(file: Location) -> bool:
    """True if a file ends with the magic number that marks a checkpoint index."""
    try:
        return last_bytes(file, len(MAGIC)) == MAGIC
    except StorageError:
        return False


_NOTES = b"model_checkpoint_path:"
# The first entry of a V1 table has no shared key prefix, an empty key, and a value that begins with field 1, the
# ``meta`` of a ``SavedTensorSlices`` message (``tensorflow/core/util/saved_tensor_slice.proto``).
_FIRST_ENTRY = re.compile(rb"\0\0[\x80-\xff]{0,4}[\0-\x7f]\x0a", re.DOTALL)


def refuse_v1(location: Location, names: frozenset[str]) -> None:
    """Raise FormatVersionError if this is a V1 checkpoint (before TensorFlow 0.12): one table, or one per shard."""
    prefix = location
    try:
        if names:
            newest = read_state(location).newest if first_bytes(location / STATE, len(_NOTES)) == _NOTES else None
            if not newest:
                return
            prefix = location / newest
        shard = re.compile(re.escape(prefix.name) + "-[0-9]{5,}-of-[0-9]{5,}")
        # Don't list an object store, because that would be too expensive just to raise this error.
        beside = prefix.parent.entries() if names or (prefix.is_local and not prefix.exists()) else ()
        shards = sorted(entry.name for entry in beside if shard.fullmatch(entry.name))
        for file in (prefix, *(prefix.parent / name for name in shards[:1])):
            if file.is_there() and _FIRST_ENTRY.match(first_bytes(file, 8)) and ends_as_table(file):
                raise FormatVersionError(
                    f"{file} is a TensorFlow checkpoint in the format before TensorFlow 0.12 (V1, a single table), "
                    "which is not supported. Restore it in TensorFlow with tf.compat.v1.train.Saver and save it again: "
                    "that writes the format with .index and .data files"
                )
    except (StorageError, DamagedCheckpointError):  # the latter is raised if a path is not a regular file
        return
