"""Is a run still the run that its checkpoints are from?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .problems import KeyPath, dotted

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Difference:
    """One key whose value is not what it was when the checkpoints were written.

    Attributes:
        key: The dotted key.
        before: The value stored with the checkpoints, as text.
        now: The value of the configuration, as text.
        identity: Whether the key makes the run what it is.
    """

    key: str
    before: str
    now: str
    identity: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.before} (checkpoints), {self.now} (now)"

    def allowed(self, keys: Sequence[str]) -> bool:
        """Returns whether the run may go on: the key changes nothing essential, or one of `keys` allows it."""
        return not self.identity or any(self.key == key or self.key.startswith(f"{key}.") for key in keys)


def differences(stored: dict[str, Any], resolved: dict[str, Any], identity: Sequence[str]) -> list[Difference]:
    """Compares the configuration stored with the checkpoints with the one at hand.

    Args:
        stored: Every key with its value, from the checkpoints.
        resolved: Every key with its value, now.
        identity: The top-level keys that make the run what it is.

    Returns:
        The keys that differ, in the order of the configuration; keys that only the checkpoints have come last.
    """
    before, now = dict(_flat(stored)), dict(_flat(resolved))
    keys = [*now, *(key for key in before if key not in now)]
    return [
        Difference(dotted(key), _shown(before.get(key, _MISSING)), _shown(now.get(key, _MISSING)), key[0] in identity)
        for key in keys
        if before.get(key, _MISSING) != now.get(key, _MISSING)
    ]


def _flat(values: dict[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, (*path, key))
        else:
            yield (*path, key), value


def _shown(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case _:
            return "nothing" if value is _MISSING else str(value)
