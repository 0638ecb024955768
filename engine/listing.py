"""Functions that list the steps in a directory, without importing array code, which would slow down ``holdfast ls``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointNotFoundError, HoldfastError
from .format import RECORD, FileRecord
from .manager import infos_of, reasons, retention_rules, stored_rules
from .sources import find_steps
from .steps import StepEntry, files_of, has_changed, shared_by_links, stray_folders
from .storage import Entry, Place, as_location

_STRAY = f"no {RECORD}: not a checkpoint, and left alone until `holdfast rm` deletes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """A summary of one step in a directory.

    Attributes:
        step: The step number.
        path: The directory of the step.
        time: The commit time, in seconds since 1970-01-01 UTC; None if the step is damaged.
        bytes: The total size of the step's files in bytes.
        shared_bytes: The size in bytes of files that other steps share through hard links. Deleting only this step
            does not free these bytes, but a copy of the step contains them.
        added_bytes: The size in bytes of files that no earlier step in the list contains. Summed over
            all steps, this is the disk space that the steps occupy.
        metrics: The metrics stored with the step, or None.
        reason: The reason why the step was saved.
        kept: The reasons why the step is kept, if they are known.
        damage: The problem with the commit record or the file sizes, or None.
    """

    step: int
    path: str
    time: float | None = None
    bytes: int = 0
    shared_bytes: int = 0
    added_bytes: int = 0
    metrics: Mapping[str, Any] | None = None
    reason: str = ""
    kept: tuple[str, ...] = ()
    damage: str | None = None


def list_checkpoints(directory: Place) -> list[CheckpointSummary]:
    """List the steps in a directory, reading only their commit records and file sizes.

    Args:
        directory: A manager's directory, or another library's directory of steps. Steps with
            different prefixes, such as ``a-1`` and ``b-1``, are all listed.

    Returns:
        The steps, including damaged steps and folders without a commit record, sorted by prefix and step.

    Raises:
        CheckpointNotFoundError: The directory does not exist.
    """
    location = as_location(directory).snapshot()
    if not location.exists():
        raise CheckpointNotFoundError(f"{location}: there is nothing at this path")
    steps = find_steps(location)
    if steps.entries and not steps.is_native:
        return [_foreign_summary(entry, steps.format) for entry in steps.entries]
    # If steps have different prefixes, it is unknown to which prefix the stored options apply.
    several = len({entry.series for entry in steps.entries}) > 1
    options, function = (None, None) if several else stored_rules(location)
    infos = infos_of(steps.entries)
    # A function that ranks the steps exists only in the run's program, so the reasons to keep steps are then unknown.
    kept = {} if options is None or function is not None else reasons(infos, retention_rules(options))
    seen: set[tuple[int, int]] = set()
    summaries = [_native_summary(entry, kept.get(entry.step, ()), seen) for entry in steps.entries]
    for entry, summary in zip(steps.entries, summaries, strict=True):
        if summary.damage and entry.record is not None and has_changed(entry.location, entry.record):
            return list_checkpoints(directory)  # a run has replaced or deleted the step in the meantime
    strays = stray_folders(location, None, steps.entries)
    series = {str(entry.location): entry.series for entry in (*steps.entries, *strays)}
    summaries += [CheckpointSummary(step=entry.step, path=str(entry.location), damage=_STRAY) for entry in strays]
    return sorted(summaries, key=lambda summary: (series[summary.path], summary.step))


def _native_summary(entry: StepEntry, kept: tuple[str, ...], seen: set[tuple[int, int]]) -> CheckpointSummary:
    """Summarize a step, and add its hard-linked files to ``seen``, which contains the files of earlier steps."""
    record = entry.record
    if record is None:
        return CheckpointSummary(step=entry.step, path=str(entry.location), damage=str(entry.error))
    listed = files_of(entry.location, record)
    again = 0
    for _, _, file in listed:
        if file is not None and file.links > 1 and file.identity is not None:
            again += (file.size or 0) if file.identity in seen else 0
            seen.add(file.identity)
    return CheckpointSummary(
        step=entry.step,
        path=str(entry.location),
        time=record.time,
        bytes=record.nbytes,
        shared_bytes=shared_by_links(listed),
        added_bytes=record.nbytes - again,
        metrics=record.metrics,
        reason=record.reason,
        kept=kept,
        damage=next(_file_problems(listed), None),
    )


def _foreign_summary(entry: StepEntry, format_name: str) -> CheckpointSummary:
    from .sources import open_at  # imported lazily, because the import takes longer than listing native steps

    try:
        checkpoint = open_at(entry.location)
        metrics = checkpoint.metrics
    except HoldfastError as error:
        return CheckpointSummary(step=entry.step, path=str(entry.location), damage=str(error))
    return CheckpointSummary(
        step=entry.step,
        path=str(entry.location),
        time=checkpoint.time,
        bytes=checkpoint.nbytes,
        added_bytes=checkpoint.nbytes,
        metrics=metrics,
        reason=f"written by {format_name}",
    )


def _file_problems(listed: Iterable[tuple[str, FileRecord, Entry | None]]) -> Iterator[str]:
    for path, record, entry in listed:
        if entry is None:
            yield f"{path}: missing"
        elif entry.size not in (record.size, None):
            yield f"{path}: expected {record.size} bytes, found {entry.size}"
