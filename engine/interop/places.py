"""Which checkpoint a path stands for: one of our own or of another library, or the newest of a directory of steps."""

from __future__ import annotations

import re

from ..errors import CheckpointNotFoundError, DamagedCheckpointError
from ..record import RECORD
from ..steps import StepIndex
from ..storage import Location
from .native import NativeCheckpoint
from .source import CheckpointSource, StepDirectories, recognise, recognise_steps

_NUMBERED = re.compile(r"(.+[_-])(?:0|[1-9][0-9]*)", re.DOTALL)
"""Names of steps with a prefix, which ends in ``_``, or in ``-`` as `holdfast.graph` writes them."""

_NUMBER = re.compile("[0-9]+$")


def open_checkpoint(location: Location, step: int | None = None) -> CheckpointSource:
    """Opens the checkpoint that a path stands for.

    Args:
        location: A checkpoint, or a directory of steps.
        step: Which step of such a directory; None is the newest.

    Returns:
        The checkpoint, with all that is known before its trees are read.

    Raises:
        CheckpointNotFoundError: There is none.
        DamagedCheckpointError: There is one, and what says what it holds cannot be read.
        FormatVersionError: A newer version of holdfast wrote it.
    """
    if step is None and not is_ours(location):
        found = recognise(location)
        if found is not None:
            return found
    place = find_checkpoint(location, step)
    found = open_at(place)
    if place is not location:  # by itself, a step may be loaded under any name
        _check_name(found, place)
    return found


def _check_name(found: CheckpointSource, place: Location) -> None:
    number = _NUMBER.search(place.name)
    if isinstance(found, NativeCheckpoint) and number and found.step not in (int(number[0]), None):
        raise DamagedCheckpointError(
            f"{place}: written for step {found.step}, found in the directory of step {number[0]}; a step keeps its "
            "name: give it back, or load it by its own path"
        )


def open_at(location: Location) -> CheckpointSource:
    """Opens the checkpoint at a place that :func:`find_checkpoint` has returned; see :func:`open_checkpoint`."""
    if (location / RECORD).is_there():
        return NativeCheckpoint(location)
    return recognise(location) or NativeCheckpoint(location)  # the latter says what is missing


def find_checkpoint(location: Location, step: int | None = None) -> Location:
    """Returns where the checkpoint lies that a path stands for.

    Args:
        location: A checkpoint, or a directory of steps.
        step: Which step of such a directory; None is the newest.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    if step is None and not is_run(location):
        return location
    _, places, newest = _steps(location)
    if places and step is None:
        return places[max(places) if newest is None else newest]
    if step is not None and step in places:
        return places[step]
    if not location.exists():
        raise CheckpointNotFoundError(f"{location}: there is nothing at this path")
    known = (
        f"it holds the steps {', '.join(map(str, sorted(places)))}"
        if places
        else f"it has no {RECORD} and no steps, and no checkpoint of another library that is known was found"
    )
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointNotFoundError(f"{location}: {wanted} here; {known}")


def step_locations(location: Location) -> dict[int, Location]:
    """Returns where the steps of a directory lie, in ascending order; damaged ones are among them.

    Raises:
        CheckpointNotFoundError: It is no directory.
    """
    return dict(_steps(location).steps)


def _steps(location: Location) -> StepDirectories:
    index = step_index(location)
    steps = sorted({*index.steps(), *index.damage})
    if steps:
        return StepDirectories(NativeCheckpoint.format, {step: index.location(step) for step in steps})
    found = recognise_steps(location)
    return StepDirectories("", {}) if found is None else found._replace(steps=dict(sorted(found.steps.items())))


def step_index(location: Location) -> StepIndex:
    """Returns the steps that holdfast wrote into a directory, whatever prefix their names have.

    Raises:
        CheckpointNotFoundError: It is no directory.
    """
    if location.exists() and not location.is_directory():
        raise CheckpointNotFoundError(f"{location}: this is a file; checkpoints are directories")
    for entry in location.entries():
        match = _NUMBERED.fullmatch(entry.name)
        if match and entry.is_directory and (location / entry.name / RECORD).is_there():
            return StepIndex(location, match[1].removesuffix("_"))
    return StepIndex(location)


def is_run(location: Location) -> bool:
    """Whether a path is to be searched for steps: no checkpoint lies right here, or steps of ours do."""
    return not (location / RECORD).is_there() and not is_foreign(location)


def is_foreign(location: Location) -> bool:
    """Whether a checkpoint of another library lies here, damaged or not; never where we wrote steps."""
    if is_ours(location):
        return False
    try:
        return recognise(location) is not None
    except DamagedCheckpointError:
        return True


def is_ours(location: Location) -> bool:
    """Whether holdfast wrote a checkpoint or a step here; whatever lies beside them does not count."""
    if (location / RECORD).is_there():
        return True
    if not location.is_directory():
        return False
    return any(
        entry.is_directory and entry.name[-1:].isdigit() and (location / entry.name / RECORD).is_there()
        for entry in location.entries()
    )
