"""Copy a checkpoint, or a run with all its steps, to another location."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..checkpoint import CopiedFiles, Transfer, copied_step, copy_witness, write_record
from ..clock import Rate, SystemClock, bytes_per_second
from ..distributed import Coordinator, run_on_primary
from ..errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FormatVersionError,
    HoldfastError,
    OptionError,
    itemized,
)
from ..format import CheckpointRecord
from ..progress import NULL, Progress, Share
from ..steps import (
    StepEntry,
    list_steps,
    read_record,
    read_steadily,
    step_folders,
    store_metadata,
    stored_metadata,
)
from ..storage import Location, Place, as_location
from .ownership import Ownership, copy_options


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """The result of copying one checkpoint.

    Attributes:
        source: The path or URL of the original.
        path: The path or URL of the copy.
        step: The checkpoint's step, or None if it was not saved by a manager.
        bytes: The total size of the checkpoint's files in bytes.
        sent: The number of bytes transferred, excluding files that already existed or were copied within the store.
    """

    source: str
    path: str
    step: int | None
    bytes: int
    sent: int


def copy_checkpoint(
    source: Place,
    destination: Place,
    *,
    overwrite: bool = False,
    max_bandwidth: Rate | None = None,
    progress: Progress | None = None,
    coordinator: Coordinator | None = None,
) -> list[CopyReport]:
    """Copy a checkpoint, or a run with all its steps, between directories and object stores.

    Files are copied unchanged, and every byte is verified against the saved checksums. A copy is committed only after
    all of its files are durable, so an interrupted call leaves no checkpoint, and a repeated call transfers only the
    missing files. Memory use does not grow with the size of the checkpoint if the destination is a disk, S3 with
    credentials in the environment, or Google Cloud Storage with user or machine credentials. Otherwise, uploading
    a file needs up to three times the file's size in memory. If several processes call this function, process 0 copies
    the files while the other processes wait.

    Args:
        source: The path or URL of a holdfast checkpoint or of a run's directory.
        destination: The path or URL of the copied checkpoint or run. A run's metadata and options are copied with its
            steps; steps that already exist at the destination are not copied again.
        overwrite: Whether to replace a different checkpoint at the destination.
        max_bandwidth: The maximum rate, in bytes per second or as text such as ``"50 MB/s"``; None for no limit.
        progress: Receives the total and the completed number of bytes. Files that already exist count as completed.
        coordinator: Connects the processes. None uses jax.distributed or torch.distributed if one of them is
            initialized; ``hf.processes.Alone()`` ignores other processes.

    Returns:
        One report for each checkpoint, in ascending order of steps.

    Raises:
        CheckpointNotFoundError: The source contains no holdfast checkpoint.
        CheckpointExistsError: The destination contains another checkpoint, or other files.
        DamagedCheckpointError: The source is damaged; the message names the files. Intact steps are still copied.
        FormatVersionError: The source, or a step of it, was written by a newer version. Other steps are still copied.
        OwnershipError: A run is writing to the destination.
        StorageError: The source cannot be read, or the destination cannot be written.
        PeerFailedError: Raised on the other processes if the copy failed on process 0.

    >>> import tempfile, numpy as np
    >>> import holdfast as hf
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     report = hf.save(f"{directory}/a", {"w": np.arange(3)})
    ...     copied = hf.copy_checkpoint(f"{directory}/a", f"{directory}/b")
    ...     hf.load(f"{directory}/b")
    {'w': array([0, 1, 2])}
    """
    origin, target = as_location(source), as_location(destination, writes=True)
    rate = None if max_bandwidth is None else bytes_per_second(max_bandwidth, name="max_bandwidth")

    def work() -> list[dict[str, Any]]:
        return list(map(asdict, _Copy(overwrite, rate, progress or NULL).run(origin, target)))

    reports = run_on_primary("copy_checkpoint", [origin.url, target.url, overwrite], work, coordinator)
    return [CopyReport(**report) for report in reports]


@dataclass(frozen=True, slots=True)
class _Copy:
    overwrite: bool
    rate: float | None  # maximum rate in bytes per second
    progress: Progress
    copied: CopiedFiles = field(default_factory=CopiedFiles)

    def run(self, source: Location, destination: Location) -> list[CopyReport]:
        if source.overlaps(destination):
            raise OptionError(f"{destination}: a copy of {source} cannot lie there; choose a place outside of it")
        try:
            record = read_record(source)
        except CheckpointNotFoundError:
            if steps := list_steps(source):
                return self._copy_steps(source, destination, steps)
            raise
        self.progress.expect(record.nbytes)
        with Share(self.progress, record.nbytes, record.nbytes) as share:
            return [self._copy_one(source, destination, share)]

    def _copy_one(self, source: Location, destination: Location, share: Share) -> CopyReport:
        def copy(record: CheckpointRecord) -> CopyReport:
            transfer = Transfer(self.rate, advance=share.advance)
            there = found_at(destination)
            if there is not None and there.fingerprint == record.fingerprint:
                follow(destination, there, record)
                copy_witness(source, destination, again=True)
            elif there is not None and not self.overwrite:
                raise CheckpointExistsError(
                    f"{destination}: another checkpoint is there; choose another path, or replace it (overwrite=True)"
                )
            else:
                with copied_step(
                    source, destination, record, overwrite=self.overwrite, transfer=transfer, copied=self.copied
                ):
                    pass  # no checks are needed before the commit
            return CopyReport(
                source=str(source), path=str(destination), step=record.step, bytes=record.nbytes, sent=transfer.sent
            )

        return read_steadily(source, copy)

    def _copy_steps(self, source: Location, destination: Location, steps: list[StepEntry]) -> list[CopyReport]:
        ownership = Ownership(destination, SystemClock())
        ownership.take()
        done, unreadable = [], list[tuple[int, HoldfastError]]()
        there = {(folder.series, folder.step): folder.location.name for folder in step_folders(destination)}
        sizes = [0 if entry.record is None else entry.record.nbytes for entry in steps]
        self.progress.expect(sum(sizes))
        try:
            for entry, nbytes in zip(steps, sizes, strict=True):
                with Share(self.progress, nbytes, nbytes) as share:
                    try:
                        if entry.error is not None:
                            raise entry.error
                        ownership.check()
                        target = destination / there.get((entry.series, entry.step), entry.location.name)
                        done.append(self._copy_one(entry.location, target, share))
                        # Unlike the copied record, ``entry.record`` includes metrics that other programs have added.
                        if (copied := found_at(target)) is not None and entry.record is not None:
                            follow(target, copied, replace(copied, metrics=entry.record.metrics))
                    except CheckpointNotFoundError:  # the run has since deleted the step
                        continue
                    except (DamagedCheckpointError, FormatVersionError) as error:
                        unreadable.append((entry.step, error))
            store_metadata(destination, stored_metadata(source))
            copy_options(source, destination)
        finally:
            ownership.release()
        if unreadable:
            is_damaged = any(isinstance(error, DamagedCheckpointError) for _, error in unreadable)
            what = "damaged" if is_damaged else "unreadable"
            title = f"{source}: {what} steps were not copied; the {len(done)} others were:"
            problems = [f"step {step}: {error}" for step, error in unreadable]
            raise (DamagedCheckpointError if is_damaged else FormatVersionError)(itemized(title, problems))
        return done


def found_at(location: Location) -> CheckpointRecord | None:
    """Return the commit record at a location, or None if it is missing or damaged."""
    with contextlib.suppress(CheckpointNotFoundError, DamagedCheckpointError, FormatVersionError):
        return read_record(location)
    return None


def follow(location: Location, record: CheckpointRecord, original: CheckpointRecord) -> CheckpointRecord:
    """Update a copy's metrics and pinned flag to match the original, and return the copy's commit record."""
    changed = replace(record, metrics=original.metrics, pinned=original.pinned)
    if changed != record:
        location.check_not_link()
        write_record(location, changed)
    return changed
