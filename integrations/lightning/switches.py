"""What a program switches in its module while it trains, and no state dict holds."""

from __future__ import annotations

import json
from typing import Any

_Flags = dict[str, dict[str, bool]]


class ModuleSwitches:
    """Follows the switches of a module: ``requires_grad``, as finetuning callbacks set it, and the modes of its parts.

    What a program sets before it trains, a resumed one sets again, and its author may have changed it: only what was
    switched since training began, in this process or in one before, is saved.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._at_start = _flags(module)
        self._earlier: _Flags = {}

    def switched(self) -> str:
        """Return the switched flags as one leaf of a checkpoint; empty where there are none."""
        found = {
            kind: {
                name: flag
                for name, flag in flags.items()
                if self._at_start[kind].get(name) != flag or name in self._earlier.get(kind, ())
            }
            for kind, flags in _flags(self._module).items()
        }
        return json.dumps(found) if any(found.values()) else ""

    def restore(self, switched: str) -> None:
        """Set the flags that :meth:`switched` returned, of parts that are still there."""
        self._earlier = json.loads(switched) if switched else {}
        owners = {"requires_grad": dict(self._module.named_parameters())}
        parts = dict(self._module.named_modules())
        for kind, flags in self._earlier.items():
            for name, flag in flags.items():
                if (owner := owners.get(kind, parts).get(name)) is not None:
                    setattr(owner, kind, flag)


def _flags(module: Any) -> _Flags:
    parts = dict(module.named_modules())
    return {
        "requires_grad": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
        "training": {name: part.training for name, part in parts.items()},
        "track_running_stats": {  # of batch normalization
            name: part.track_running_stats for name, part in parts.items() if hasattr(part, "track_running_stats")
        },
    }
