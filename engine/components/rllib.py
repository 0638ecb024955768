"""Directories that RLlib wrote (versions 1.1 to 2.1 of its checkpoints), read without running anything.

Each component's directory holds its state, ``state.pkl`` or ``state.msgpack``, under a name that ``metadata.json``
(``rllib_checkpoint.json`` for algorithms) may tell, and the pickled class and constructor arguments. Pickles are taken
apart by :mod:`~holdfast.engine.interop.unpickling`, which knows arrays and Python's plain types; what else they hold is
left out. Sub-directories are the components below. See
https://docs.ray.io/en/latest/rllib/checkpoints.html
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ..digests import read_checked
from ..errors import CheckpointNotFoundError, DamagedCheckpointError
from ..interop.pickled import Name
from ..interop.torch_files import without_objects
from ..interop.torch_objects import BUILDERS
from ..interop.unpickling import Builder, unpickle
from ..storage import Location
from ..tree import escape_key
from .description import Description
from .msgpack_state import decode_state
from .names import Path
from .recipes import encode_recipe

_logger = logging.getLogger("holdfast")

_METADATA = ("metadata.json", "rllib_checkpoint.json")
_CLASS = "class_and_ctor_args.pkl"
_LIMIT = 1 << 34  # bytes of a state, all of which is held in memory
_SMALL = 16 << 20
_LEVELS = 32


class RLlibComponent:
    """A component that RLlib wrote.

    Args:
        location: Its directory.
        path: Its path from where the checkpoint was opened.
    """

    def __init__(self, location: Location, path: Path = ()) -> None:
        self.location = location
        self.path = path
        self._names = {entry.name: entry.is_directory for entry in location.entries()}
        self._metadata = self._read_metadata()

    @cached_property
    def children(self) -> Mapping[Path, RLlibComponent]:
        """The components below it by their paths from it."""
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
        """What is said of it; the class is only a name."""
        name, recipe, obstacle = "", None, f"{self.location} has no {_CLASS}"
        if _CLASS in self._names:
            name, recipe, obstacle = self._constructor()
        return Description(
            type=name or "unknown:unknown",
            recipe=recipe,
            obstacle=obstacle,
            path=self.path,
            components=tuple(self.children),
            metadata=self._metadata,
        )

    def state(self) -> Any:
        """Reads its own state; what is neither array nor plain data is left out, and logged."""
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
            # RLlib leaves the old file in place when it saves in another form, and cannot tell which one is newer.
            raise DamagedCheckpointError(
                f"{self.location} holds the states {', '.join(sorted(chosen))}, which were saved at different times; "
                "remove all but one"
            )
        if not chosen:
            raise CheckpointNotFoundError(f"{self.location}: there is no state here")
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
        """Returns the name of the class, the recipe, and why there is none."""
        place = self.location / _CLASS
        content = read_checked(place, None, limit=_SMALL)
        try:
            found = unpickle(content, _BUILDERS)
            kind = found.get("class") if isinstance(found, dict) else None
            given = found.get("ctor_args_and_kwargs") if isinstance(found, dict) else None
            name = f"{kind.module}:{kind.attribute}" if isinstance(kind, Name) else ""
            if not isinstance(given, tuple) or len(given) != 2:
                return name, None, f"{place} does not say what it was made with"
            args, kwargs = without_objects(list(given), [], len(content))
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{place}: {error}") from error
        if not isinstance(args, list | tuple) or not isinstance(kwargs, dict) or not all(map(_is_name, kwargs)):
            return name, None, f"the arguments in {place} are no plain data"
        recipe, _ = encode_recipe(tuple(args), kwargs, lambda _: None, lambda _: None)
        return name, recipe, ""


def looks_like_rllib(location: Location) -> bool:
    """Whether a directory is one that RLlib wrote."""
    return any(_is_state(entry.name) for entry in location.entries() if not entry.is_directory)


def _is_state(name: str) -> bool:
    base, _, form = name.rpartition(".")
    return form in ("pkl", "msgpack") and (base == "state" or base.endswith("_state"))


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier()


def _plain(content: bytes, place: Location) -> Any:
    """Returns the data that a pickle holds."""
    left_out: list[str] = []
    found = without_objects(unpickle(content, _BUILDERS), left_out, len(content), needed=())
    if left_out:
        _logger.warning("%s: left out what is no data: %s", place, "; ".join(left_out[:20]))
    if not isinstance(found, dict):
        raise DamagedCheckpointError("it is no dictionary of data")
    return found


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    """Makes an array as numpy's pickles of protocol 5 describe it."""
    array = BUILDERS[Name("numpy.core.multiarray", "_reconstruct")](None, (0,), b"b")
    array.set_state((1, shape, dtype, order == "F", bytes(data) if isinstance(data, bytes | bytearray) else data))
    return array


_BUILDERS: dict[Name, Builder] = {
    **BUILDERS,
    **{Name(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
    Name("collections", "deque"): lambda items=(), _length=None: list(items),
    Name("collections", "Counter"): lambda counts=None: OrderedDict(counts or {}),
}
