"""The steps in a directory, and which one is the newest.

A step lies in a folder named ``<step>``, ``<prefix>_<step>`` or ``<prefix>-<step>``, and exists when its commit record
is there. The steps that share a prefix are a *series*. :func:`list_steps` is the one lister of such folders, and
:func:`newest_step` the one rule for the newest:

- within a series, the highest step, as clocks differ and jump;
- of several series, the one whose newest step was committed last, as their steps do not count the same updates.

A manager works on one series, which its ``step_prefix`` names. Everything that is given only a directory sees all of
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import CheckpointNotFoundError, DamagedCheckpointError, FormatVersionError
from ..format import RECORD, STEP_FOLDER, CheckpointRecord
from ..storage import REQUESTS, Entry, Location, max_concurrency, parallel_map
from .records import LATE, LateMetrics, has_record, read_record, with_late

_ATTEMPTS = 10  # reads of a record that a store lists but does not return
_MANY = 64  # number of steps from which their records are read on several threads


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One step of a directory."""

    step: int  # its number
    location: Location  # its folder
    series: str = ""  # what the folder's name begins with: ``""``, ``"ckpt_"`` or ``"ckpt-"``
    # The commit record; None if that is damaged, or if another library wrote the step.
    record: CheckpointRecord | None = None
    error: DamagedCheckpointError | FormatVersionError | None = None  # why the commit record cannot be used, or None


def series_of(prefix: str | None) -> str:
    """Return the series that a ``step_prefix`` names."""
    return "" if prefix is None else prefix if prefix.endswith("-") else f"{prefix}_"


def prefix_of(series: str) -> str | None:
    """Return the ``step_prefix`` that names a series."""
    return series if series.endswith("-") else series.removesuffix("_") or None


def series_and_step(folder: str) -> tuple[str, int] | None:
    """Return the series and the step that a folder name stands for, or None."""
    match = STEP_FOLDER.fullmatch(folder)
    return (match[1] or "", int(match[2])) if match else None


def step_folders(
    directory: Location, series: str | None = None, entries: Sequence[Entry] | None = None
) -> Iterator[StepEntry]:
    """Generate the folders with the name of a step, of one series or of all, committed or not; read nothing."""
    for entry in directory.entries() if entries is None else entries:
        named = series_and_step(entry.name) if entry.is_directory else None
        if named and series in (None, named[0]):
            yield StepEntry(named[1], directory / entry.name, named[0])


def list_steps(
    directory: Location,
    series: str | None = None,
    entries: Sequence[Entry] | None = None,
    *,
    late: LateMetrics | None = None,
) -> list[StepEntry]:
    """Return the steps of one series, or of all, with their commit records: by series, in ascending order.

    Folders without a record are left out: a save that never finished, or a folder of another program. A caller
    that lists a directory again and again passes ``late``, which remembers the metrics that were read before.
    """
    entries = directory.entries() if entries is None else entries
    folders = list(step_folders(directory, series, entries))
    names = {entry.name for entry in entries}
    # Several threads read thousands of small files, on a disk as well: they may not be in memory.
    threads = REQUESTS if len(folders) >= _MANY else max_concurrency(directory)
    found = [entry for entry in parallel_map(read_entry, folders, threads) if entry is not None]
    if LATE in names:
        late = late or LateMetrics(directory)
        late.refresh({entry.location.name for entry in found}.__contains__)
        found = [
            replace(entry, record=with_late(entry.record, added))
            if entry.record and (added := late.of(entry.location.name))
            else entry
            for entry in found
        ]
    return sorted(found, key=lambda entry: (entry.series, entry.step))


def newest_step(entries: Iterable[StepEntry], *, whole: bool = False) -> StepEntry | None:
    """Return the newest step by the rule of this module, or None.

    A damaged record has no time. Without ``whole``, it counts as the latest of several series, so that a caller that
    refuses damaged checkpoints does not silently get one of another series.
    """
    heads: dict[str, StepEntry] = {}
    for entry in entries:
        if not (whole and entry.error) and (entry.series not in heads or entry.step > heads[entry.series].step):
            heads[entry.series] = entry
    return max(heads.values(), key=_commit_order, default=None)


def _commit_order(entry: StepEntry) -> tuple[float, str]:
    return math.inf if entry.record is None else entry.record.time, entry.location.name


def _listed_record(location: Location) -> CheckpointRecord | None:
    """Read the commit record in a folder, None without one; a record that a store lists but withholds is damaged."""
    for _ in range(_ATTEMPTS):
        try:
            return read_record(location)
        except CheckpointNotFoundError:
            # TensorStore takes the answer of a proxy in the place of S3 for a missing object. The listing of a snapshot
            # may be older than the deletion of the step.
            if location.is_local or not has_record(location.snapshot()):
                return None
    raise DamagedCheckpointError(
        f"{location / RECORD}: the store lists this commit record, and has answered {_ATTEMPTS} times that there is no "
        "such object; look whether a proxy answers in the place of the store, or delete the step (holdfast rm)",
        unreadable=True,
    )


def read_entry(folder: StepEntry) -> StepEntry | None:
    """Add the commit record, or its damage, to the entry of a folder; None if there is no record."""
    try:
        record = _listed_record(folder.location)
    except (DamagedCheckpointError, FormatVersionError) as error:
        return replace(folder, error=error)
    if record is None:
        return None
    if record.step is None:  # hf.save wrote it: no retention rule may delete it
        return replace(folder, record=replace(record, step=folder.step, pinned=True))
    if record.step != folder.step:
        what = (
            f"{folder.location / RECORD}: written for step {record.step}, found in the directory of step "
            f"{folder.step}; give the step its name back, or load it by its own path"
        )
        return replace(folder, error=DamagedCheckpointError(what))
    return StepEntry(folder.step, folder.location, folder.series, record)
