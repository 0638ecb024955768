"""Directories that RLlib wrote (versions 1.1 to 2.1 of its checkpoints), read without running anything.

Each component's directory holds its state, ``state.pkl`` or ``state.msgpack``, under a name that ``metadata.json``
(``rllib_checkpoint.json`` for algorithms) may give, and the pickled class and constructor arguments. Subdirectories are
the components below. See https://docs.ray.io/en/latest/rllib/checkpoints.html

Pickles are interpreted by :mod:`~holdfast.engine.formats.torch.pickles`, which knows arrays and Python's plain types;
all other objects are left out. In msgpack (https://github.com/msgpack/msgpack/blob/master/spec.md), arrays of numpy are
maps as the package msgpack-numpy defines them: ``{b"nd": True, b"type": "<f4", b"shape": [2], b"data": ...}``.
"""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import read_checked
from ..errors import CheckpointNotFoundError, DamagedCheckpointError
from ..format import array_of, decode_msgpack
from ..formats.torch.files import without_objects
from ..formats.torch.objects import BUILDERS
from ..formats.torch.pickles import Builder, Name, unpickle
from ..graph import Path
from ..pytree import escape_key
from ..storage import Location
from .constructor_spec import encode_spec
from .layout import Description

_DTYPE = re.compile(r"[<>|=]?[biufcSU][0-9]{1,9}|\?")


def decode_state(content: bytes) -> Any:
    return decode_msgpack(content, mapping=_numpy_value)


def _numpy_value(found: dict[Any, Any]) -> Any:
    """Return the array, scalar or complex number that a map of msgpack-numpy describes, or the map itself."""
    if b"nd" in found:
        return _array(found)
    if b"complex" not in found:
        return found
    try:
        return complex(found[b"data"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"a complex number is not valid: {error!r}") from error


def _array(found: dict[Any, Any]) -> Any:
    name, data, shape = found.get(b"type"), found.get(b"data"), found.get(b"shape", [])
    name = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    if found.get(b"kind", b"") not in (b"", "") or not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise DamagedCheckpointError(f"an array of numpy has the type {name!r:.80}, which is not plain data")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"an array of numpy has the type {name!r:.80}") from error
    if not dtype.itemsize:
        raise DamagedCheckpointError(f"an array of numpy has the type {name!r:.80}, which has no bytes")
    is_array = found[b"nd"] is True
    array = array_of(shape if is_array else [], dtype, data)
    return array.copy() if is_array else array[()]


_logger = logging.getLogger("holdfast")

_METADATA = ("metadata.json", "rllib_checkpoint.json")
_CLASS = "class_and_ctor_args.pkl"
_LIMIT = 1 << 34  # bytes of a state, all of which is held in memory
_SMALL = 16 << 20
_LEVELS = 32


class RLlibComponent:
    def __init__(self, location: Location, path: Path = ()) -> None:
        self.location = location
        self.path = path
        self._names = {entry.name: entry.is_directory for entry in location.entries()}
        self._metadata = self._read_metadata()

    @cached_property
    def children(self) -> Mapping[Path, RLlibComponent]:
        found: dict[Path, RLlibComponent] = {}
        for name, is_directory in self._names.items():
            if is_directory and looks_like_rllib(self.location / name):
                if len(self.path) >= _LEVELS:
                    raise DamagedCheckpointError(f"{self.location}: components are nested too deeply")
                segment = escape_key(name)
                found[(segment,)] = RLlibComponent(self.location / name, (*self.path, segment))
        return found

    @cached_property
    def description(self) -> Description:
        name, spec, obstacle = "", None, f"{self.location} has no {_CLASS}"
        if _CLASS in self._names:
            name, spec, obstacle = self._constructor()
        return Description(
            type=name or "unknown:unknown",
            constructor=spec,
            obstacle=obstacle,
            path=self.path,
            components=tuple(self.children),
            metadata=self._metadata,
        )

    def state(self) -> Any:
        place = self.location / self._state_file()
        content = read_checked(place, None, limit=_LIMIT)
        try:
            return decode_state(content) if place.name.endswith(".msgpack") else _plain(content, place)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{place}: {error}") from error

    def _state_file(self) -> str:
        base = self._metadata.get("state_file")
        bases = [base] if isinstance(base, str) and "/" not in base else []
        found = [name for name in self._names if _is_state(name)]
        named = [name for name in found for base in bases if name.rpartition(".")[0] == base]
        chosen = named or found
        if len(chosen) > 1:
            # RLlib leaves the old file in place when it saves in another form, and nothing says which one is newer.
            raise DamagedCheckpointError(
                f"{self.location} holds the states {', '.join(sorted(chosen))}, which were saved at different times; "
                "remove all but one"
            )
        if not chosen:
            raise CheckpointNotFoundError(f"{self.location}: there is no file of a state here")
        return chosen[0]

    def _read_metadata(self) -> dict[str, Any]:
        for name in _METADATA:
            if name in self._names:
                try:
                    found = json.loads(read_checked(self.location / name, None, limit=_SMALL))
                except (ValueError, RecursionError) as error:
                    raise DamagedCheckpointError(f"{self.location / name} is damaged: {error}") from error
                return found if isinstance(found, dict) else {}
        return {}

    def _constructor(self) -> tuple[str, dict[str, Any] | None, str]:
        """Return the name of the class, the constructor spec, and why there is none."""
        place = self.location / _CLASS
        content = read_checked(place, None, limit=_SMALL)
        try:
            found = unpickle(content, _BUILDERS)
            kind = found.get("class") if isinstance(found, dict) else None
            given = found.get("ctor_args_and_kwargs") if isinstance(found, dict) else None
            name = f"{kind.module}:{kind.attribute}" if isinstance(kind, Name) else ""
            if not isinstance(given, tuple) or len(given) != 2:
                return name, None, f"{place} has no constructor arguments"
            args, kwargs = without_objects(list(given), [], len(content))
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{place}: {error}") from error
        named = isinstance(kwargs, dict) and all(isinstance(key, str) and key.isidentifier() for key in kwargs)
        if not isinstance(args, list | tuple) or not named:
            return name, None, f"the arguments in {place} are not plain data"
        spec, _ = encode_spec(tuple(args), kwargs, lambda _: None, lambda _: None)
        return name, spec, ""


def looks_like_rllib(location: Location) -> bool:
    return any(_is_state(entry.name) for entry in location.entries() if not entry.is_directory)


def _is_state(name: str) -> bool:
    base, _, form = name.rpartition(".")
    return form in ("pkl", "msgpack") and (base == "state" or base.endswith("_state"))


def _plain(content: bytes, place: Location) -> Any:
    left_out: list[str] = []
    found = without_objects(unpickle(content, _BUILDERS), left_out, len(content), needed=())
    if left_out:
        _logger.warning("%s: left out objects that are not data: %s", place, "; ".join(left_out[:20]))
    if not isinstance(found, dict):
        raise DamagedCheckpointError("it is not a dictionary of data")
    return found


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    """Make an array as numpy's pickles of protocol 5 describe it."""
    array = BUILDERS[Name("numpy.core.multiarray", "_reconstruct")](None, (0,), b"b")
    array.set_state((1, shape, dtype, order == "F", bytes(data) if isinstance(data, bytes | bytearray) else data))
    return array


_BUILDERS: dict[Name, Builder] = {
    **BUILDERS,
    **{Name(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
    Name("collections", "deque"): lambda items=(), _length=None: list(items),
    Name("collections", "Counter"): lambda counts=None: OrderedDict(counts or {}),
}
