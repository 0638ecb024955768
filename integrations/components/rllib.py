"""Directories that RLlib wrote, as components: their states, classes and constructor arguments."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ...engine.arrays import read_checked
from ...engine.errors import DamagedCheckpointError
from ..formats.rllib import BUILDERS, CONSTRUCTOR, RLlibDirectory
from ..formats.torch.files import without_objects
from ..formats.torch.pickles import Name, unpickle
from .constructor_spec import encode_spec
from .layout import Description

_SMALL = 16 << 20


class RLlibComponent(RLlibDirectory):
    @cached_property
    def description(self) -> Description:
        name, spec, obstacle = "", None, f"{self.location} has no {CONSTRUCTOR}"
        if CONSTRUCTOR in self.names:
            name, spec, obstacle = self._constructor()
        return Description(
            type=name or "unknown:unknown",
            constructor=spec,
            obstacle=obstacle,
            path=self.path,
            components=tuple(self.children),
            metadata=self.metadata,
        )

    def state(self, component: Any = None, *, packed: bool = False) -> Any:
        return super().state()

    def _constructor(self) -> tuple[str, dict[str, Any] | None, str]:
        """Return the name of the class, the constructor spec, and why there is none."""
        place, name = self.location / CONSTRUCTOR, ""
        try:
            content = read_checked(place, None, limit=_SMALL)
            found = unpickle(content, BUILDERS)
            kind = found.get("class") if isinstance(found, dict) else None
            given = found.get("ctor_args_and_kwargs") if isinstance(found, dict) else None
            name = f"{kind.module}:{kind.attribute}" if isinstance(kind, Name) else ""
            if not isinstance(given, tuple) or len(given) != 2:
                return name, None, f"{place} has no constructor arguments"
            args, kwargs = without_objects(list(given), [], len(content))
        except DamagedCheckpointError as error:  # states can be restored without it
            return name, None, f"{place} cannot be read: {error}"
        named = isinstance(kwargs, dict) and all(isinstance(key, str) and key.isidentifier() for key in kwargs)
        if not isinstance(args, list | tuple) or not named:
            return name, None, f"the arguments in {place} are not plain data"
        spec, _ = encode_spec(tuple(args), kwargs, lambda _: None, lambda _: None)
        return name, spec, ""
