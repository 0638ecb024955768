"""The identity of a run, which its directory and its mirror share, and the deletions that the mirror still lacks.

Both lie in ``options.json`` beside the retention rules. A directory without one gets one when a run acquires it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import DamagedCheckpointError, FormatVersionError, HoldfastError, ObjectNotFoundError, shortened_steps
from ..format import decode_document, encode_document
from ..storage import Location
from .options import CheckpointManagerOptions, options_document, options_from_document

OPTIONS = "options.json"  # name of the file that holds the retention options of the last run, and its identity
_LIMIT = 16 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Doomed:
    """Steps that were deleted in the directory explicitly, and that the mirror may still have."""

    steps: frozenset[int] = frozenset()
    after: int | None = None  # all later steps, too

    def __contains__(self, step: int) -> bool:
        return step in self.steps or (self.after is not None and step > self.after)

    def __bool__(self) -> bool:
        return bool(self.steps) or self.after is not None

    def __str__(self) -> str:
        listed = [f"step {shortened_steps(sorted(self.steps))}"] if self.steps else []
        return " and ".join(listed + ([] if self.after is None else [f"all steps after {self.after}"]))

    def plus(self, steps: Collection[int], after: int | None) -> Doomed:
        limits = [one for one in (self.after, after) if one is not None]
        return Doomed(self.steps.union(steps), min(limits, default=None))

    def minus(self, done: Doomed) -> Doomed:
        return Doomed(self.steps - done.steps, None if self.after == done.after else self.after)


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Which run a directory, or a mirror, belongs to."""

    run: str | None = None  # a token; None where the directory is new, or was written by holdfast 0.1
    directory: str | None = None  # in a mirror: the URL of the run's directory
    mirror: str | None = None  # in the run's directory: the URL of its mirror
    doomed: Mapping[str, Doomed] = field(default_factory=dict)  # by the series of the steps

    def with_doomed(self, series: str, doomed: Doomed) -> RunIdentity:
        others = {name: found for name, found in self.doomed.items() if name != series}
        return replace(self, doomed={**others, series: doomed} if doomed else others)


def new_run() -> str:
    """Return the token of a new run."""
    return os.urandom(16).hex()


def stored_options(location: Location) -> CheckpointManagerOptions | None:
    """Return the retention options of the last run on a directory, or None if they are unknown."""
    return stored_rules(location)[0]


def stored_rules(location: Location) -> tuple[CheckpointManagerOptions | None, str | None]:
    """Return the same, and the name of the function by which the run ranked its steps, if it used one."""
    try:
        document = _read(location)["options"]
        options, function = options_from_document(document), document.get("best_function")
    except (HoldfastError, KeyError, AttributeError):
        return None, None
    return options, function if isinstance(function, str) else None


def stored_identity(location: Location) -> RunIdentity:
    """Return the identity that is stored in a directory; one without a token where there is none."""
    try:
        found = _read(location).get("run")
    except (ObjectNotFoundError, DamagedCheckpointError, FormatVersionError):
        return RunIdentity()
    if not isinstance(found, dict):
        return RunIdentity()
    run, directory, mirror = (
        value if isinstance(value, str) else None for value in map(found.get, ("run", "directory", "mirror"))
    )
    doomed = found.get("doomed")
    listed = {name: _doomed(one) for name, one in doomed.items()} if isinstance(doomed, dict) else {}
    return RunIdentity(run, directory, mirror, {name: one for name, one in listed.items() if one})


def store_identity(location: Location, options: Mapping[str, Any], identity: RunIdentity) -> None:
    """Store the retention options of a run and its identity, in one file."""
    document = {
        "run": identity.run,
        "directory": identity.directory,
        "mirror": identity.mirror,
        "doomed": {
            name: {"steps": sorted(one.steps), "after": one.after} for name, one in sorted(identity.doomed.items())
        },
    }
    known = {name: value for name, value in document.items() if value}
    (location / OPTIONS).write_bytes(encode_document("options", {"options": dict(options), "run": known}))


def copy_options(source: Location, destination: Location) -> None:
    """Give a copy of a run the retention options of the original; its identity and its mirror stay its own."""
    options = stored_options(source)
    if options is not None:
        store_identity(destination, options_document(options), stored_identity(destination))


def _read(location: Location) -> dict[str, Any]:
    place = location / OPTIONS
    return decode_document(place.read_own(limit=_LIMIT), "options", source=str(place))


def _doomed(found: Any) -> Doomed:
    if not isinstance(found, dict):
        return Doomed()
    steps, after = found.get("steps"), found.get("after")
    return Doomed(
        frozenset(step for step in steps if isinstance(step, int)) if isinstance(steps, list) else frozenset(),
        after if isinstance(after, int) else None,
    )
