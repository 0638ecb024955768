"""Read RLlib checkpoint directories (checkpoint versions 1.1 to 2.1) without executing code from them.

A component's directory contains the state in ``state.pkl`` or ``state.msgpack`` (``metadata.json`` or, for algorithms,
``rllib_checkpoint.json`` may specify another name) and the pickled class and constructor arguments. Its subdirectories
contain the child components. See https://docs.ray.io/en/latest/rllib/checkpoints.html

This module reads a directory as a single tree, in which the states of the child components appear under their names.
Component trees, in contrast, are read directory by directory (``integrations/components/reading.py``).

Pickles are interpreted by :mod:`~holdfast.integrations.formats.torch.pickles`, which supports arrays and Python's plain
types; other objects are left out. In msgpack (https://github.com/msgpack/msgpack/blob/master/spec.md), numpy arrays
are maps as defined by the package msgpack-numpy: ``{b"nd": True, b"type": "<f4", b"shape": [2], b"data": ...}``
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from ...engine.arrays import naming, read_checked
from ...engine.errors import CheckpointNotFoundError, DamagedCheckpointError
from ...engine.forks import cached_property
from ...engine.format import array_of, decode_msgpack
from ...engine.pytree import escape_key
from ...engine.sources import FoundSteps, SingleTree, StoredTree, read_json, total_bytes
from ...engine.storage import Entry, Location
from .torch.files import without_objects
from .torch.objects import BUILDERS as _BUILDERS
from .torch.pickles import Builder, Name, unpickle

_DTYPE = re.compile(r"[<>|=]?[biufcSU][0-9]{1,9}|\?")


def decode_state(content: bytes) -> Any:
    return decode_msgpack(content, mapping=_numpy_value)


def _numpy_value(described: dict[Any, Any]) -> Any:
    """Convert a msgpack-numpy map to an array, scalar or complex number; return any other map unchanged."""
    if b"nd" in described:
        return _array(described)
    if b"complex" not in described:
        return described
    try:
        return complex(described[b"data"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"a complex number is not valid: {error!r}") from error


def _array(described: dict[Any, Any]) -> Any:
    name, data, shape = described.get(b"type"), described.get(b"data"), described.get(b"shape", [])
    name = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    is_plain = described.get(b"kind", b"") in (b"", "") and isinstance(name, str) and _DTYPE.fullmatch(name)
    dtype = np.dtype("V0")
    with contextlib.suppress(TypeError, ValueError):
        dtype = np.dtype(name if is_plain else "V0")
    if not dtype.itemsize:
        raise DamagedCheckpointError(f"a numpy array has the type {name!r:.80}, which is not plain data")
    is_array = described[b"nd"] is True
    array = array_of(shape if is_array else [], dtype, data)
    return array.copy() if is_array else array[()]


_logger = logging.getLogger("holdfast")

_METADATA = ("metadata.json", "rllib_checkpoint.json")
CONSTRUCTOR = "class_and_ctor_args.pkl"
_LIMIT = 1 << 34  # maximum size, in bytes, of a state file; the entire file is read into memory
_STEP = re.compile(r"checkpoint_([0-9]{1,18})")
_LEVELS = 32


class RLlibDirectory:
    """The directory of one component. ``path`` consists of escaped names and is relative to the opened directory."""

    def __init__(self, location: Location, path: tuple[str, ...] = ()) -> None:
        self.location = location
        self.path = path
        self.names = {entry.name: entry.is_directory for entry in location.entries()}
        files = [name for name in _METADATA if name in self.names]
        metadata = read_json(location / files[0]) if files else {}
        self.metadata: dict[str, Any] = metadata if isinstance(metadata, dict) else {}
        self.left_out: Sequence[str] = ()

    @cached_property
    def children(self) -> Mapping[tuple[str, ...], Self]:
        children: dict[tuple[str, ...], Self] = {}
        for name, is_directory in self.names.items():
            if is_directory and looks_like_rllib(self.location / name):
                if len(self.path) >= _LEVELS:
                    raise DamagedCheckpointError(f"{self.location}: components are nested too deeply")
                segment = escape_key(name)
                children[(segment,)] = type(self)(self.location / name, (*self.path, segment))
        return children

    def own_state(self, *, none: bool) -> Any:
        """Read the state without child components, and log omitted values. ``none`` allows None as a dictionary key."""
        self.left_out = left_out = list[str]()
        state = self._read_state(left_out, none)
        if left_out:
            file, lines = self.location / self._state_file(), "; ".join(left_out[:20])
            _logger.warning("%s: left out objects that are not data: %s", file, lines)
        return state

    def _read_state(self, left_out: list[str], none: bool) -> Any:
        file = self.location / self._state_file()
        content = read_checked(file, None, limit=_LIMIT)
        with naming(file):
            state = decode_state(content) if file.name.endswith(".msgpack") else unpickle(content, BUILDERS)
            state = without_objects(state, left_out, len(content), needed=(), none=none)
            if not isinstance(state, dict):
                raise DamagedCheckpointError("it is not a dictionary of data")
            return state

    def full_state(self, left_out: list[str], prefix: str = "") -> Any:
        """Read the state, including the states of all child components, and add omitted values to ``left_out``."""
        lines: list[str] = []
        state = self._read_state(lines, none=False)
        left_out += [f"{prefix}{line}" for line in lines]
        for child in self.children.values():
            name = child.location.name
            state[name] = child.full_state(left_out, f"{prefix}{name}/")
        return state

    def _state_file(self) -> str:
        base = self.metadata.get("state_file")
        bases = [base] if isinstance(base, str) and "/" not in base else []
        states = [name for name in self.names if _is_state(name)]
        chosen = [name for name in states for base in bases if name.rpartition(".")[0] == base] or states
        if len(chosen) > 1:
            # If the file format changes, RLlib keeps the old file, and there is no way to tell which file is newer.
            raise DamagedCheckpointError(
                f"{self.location} holds the states {', '.join(sorted(chosen))}, which were saved at different times; "
                "remove all but one"
            )
        if not chosen:
            raise CheckpointNotFoundError(f"{self.location}: there is no state file here")
        return chosen[0]


def looks_like_rllib(location: Location) -> bool:
    return any(_is_state(entry.name) for entry in location.entries() if not entry.is_directory)


def _is_state(name: str) -> bool:
    base, _, form = name.rpartition(".")
    return form in ("pkl", "msgpack") and (base == "state" or base.endswith("_state"))


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    """Build an array from the arguments of numpy's ``_frombuffer`` in protocol 5 pickles."""
    array = _BUILDERS[Name("numpy.core.multiarray", "_reconstruct")](None, (0,), b"b")
    array.set_state((1, shape, dtype, order == "F", bytes(data) if isinstance(data, bytes | bytearray) else data))
    return array


BUILDERS: dict[Name, Builder] = {
    **_BUILDERS,
    **{Name(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
    Name("collections", "deque"): lambda items=(), _length=None: list(items),
    Name("collections", "Counter"): lambda counts=None: OrderedDict(counts or {}),
}


def _tree(location: Location) -> StoredTree:
    left_out: list[str] = []
    state = RLlibDirectory(location).full_state(left_out)
    return StoredTree.of(location, state, total_bytes(location), left_out=left_out)


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    if not any(map(_is_state, names)) or names.isdisjoint((*_METADATA, CONSTRUCTOR)):
        return None
    match = _STEP.fullmatch(location.name)
    step = None if match is None else int(match[1])
    return SingleTree("RLlib", location, lambda: _tree(location), lambda: total_bytes(location), step)


def recognise_steps(location: Location, entries: Sequence[Entry]) -> FoundSteps:
    """Find the checkpoint directories that Ray Tune creates for a trial, such as ``checkpoint_000012``."""
    folders = [location / entry.name for entry in entries if entry.is_directory and _STEP.fullmatch(entry.name)]
    names = {folder: frozenset(file.name for file in folder.entries() if not file.is_directory) for folder in folders}
    checkpoints = [checkpoint for folder in folders if (checkpoint := recognise(folder, names[folder])) is not None]
    return FoundSteps.of("RLlib", {each.step: each.location for each in checkpoints if each.step is not None})
