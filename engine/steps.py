"""The committed steps of a directory: found once, then kept up to date by the manager that writes."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace

from .commit import read_record
from .errors import CheckpointNotFoundError, DamagedCheckpointError, FormatVersionError, HoldfastError
from .policy import StepInfo
from .record import RECORD, CheckpointRecord
from .storage import Location, at_once, several


class StepIndex:
    """The steps below a directory.

    Args:
        directory: The manager's directory.
        prefix: Steps live in ``<prefix>_<step>``, or in ``<step>`` without one. A prefix that ends in ``-`` brings its
            own separator: ``"ckpt-"`` gives ``ckpt-<step>``.
    """

    def __init__(self, directory: Location, prefix: str | None = None) -> None:
        self._directory = directory
        self._prefix = "" if prefix is None else prefix if prefix.endswith("-") else f"{prefix}_"
        self._pattern = re.compile(re.escape(self._prefix) + r"(0|[1-9][0-9]*)")
        self._lock = threading.Lock()
        self._records: dict[int, CheckpointRecord] = {}
        self._damage: dict[int, str] = {}
        self._newer: dict[int, str] = {}  # those of the damage that only a newer version of holdfast can read
        self._condemned: dict[int, tuple[CheckpointRecord, str]] = {}
        self._infos: tuple[StepInfo, ...] | None = None
        self.reload()

    def location(self, step: int) -> Location:
        """Returns the directory of a step, whether it exists or not."""
        return self._directory / f"{self._prefix}{step}"

    def directories(self) -> Iterator[tuple[int, Location]]:
        """Generates every directory whose name is that of a step, committed or not."""
        for entry in self._directory.entries():
            match = self._pattern.fullmatch(entry.name)
            if match and entry.is_directory:
                yield int(match[1]), self._directory / entry.name

    def reload(self, *, forget: bool = False) -> None:
        """Reads the directory anew.

        Args:
            forget: Whether steps that were condemned get another chance, instead of staying so until replaced.
        """
        records: dict[int, CheckpointRecord] = {}
        damage: dict[int, str] = {}
        newer: dict[int, str] = {}
        found = list(self.directories())
        for (step, _), record in zip(found, several(_read, found, at_once(self._directory)), strict=True):
            if record is None:
                continue  # a save that never finished, or somebody else's directory
            if isinstance(record, CheckpointRecord):
                records[step] = record
                continue
            damage[step] = str(record)
            if isinstance(record, FormatVersionError):
                newer[step] = damage[step]
        with self._lock:
            if forget:
                self._condemned.clear()
            for step, (condemned, what) in self._condemned.items():
                if records.get(step) == condemned:
                    del records[step]
                    damage[step] = what
            self._records, self._damage, self._newer, self._infos = records, damage, newer, None

    def add(self, step: int, record: CheckpointRecord) -> None:
        """Notes that a step has been committed, or its record replaced."""
        with self._lock:
            self._records[step] = record
            self._damage.pop(step, None)
            self._newer.pop(step, None)
            self._condemned.pop(step, None)
            self._infos = None

    def remove(self, step: int) -> None:
        """Notes that a step has been deleted."""
        with self._lock:
            self._records.pop(step, None)
            self._damage.pop(step, None)
            self._newer.pop(step, None)
            self._condemned.pop(step, None)
            self._infos = None

    def condemn(self, step: int, damage: str) -> None:
        """Notes that the data of a step is damaged: it is not listed any more, and may be replaced."""
        with self._lock:
            record = self._records.pop(step, None)
            if record is not None:
                self._condemned[step] = record, damage
            self._damage[step] = damage
            self._infos = None

    def steps(self) -> list[int]:
        """Returns the committed steps whose record verifies, in ascending order."""
        return [info.step for info in self.infos()]

    def infos(self) -> tuple[StepInfo, ...]:
        """Returns what retention knows of the committed steps, in ascending order."""
        with self._lock:
            if self._infos is None:
                self._infos = tuple(
                    StepInfo(step=step, time=record.time, metrics=record.metrics, pinned=record.pinned)
                    for step, record in sorted(self._records.items())
                )
            return self._infos

    def records(self) -> dict[int, CheckpointRecord]:
        """Returns the commit records by step, as they are now."""
        with self._lock:
            return dict(self._records)

    def find(self, step: int) -> CheckpointRecord | None:
        """Returns the commit record of a step, or None."""
        return self._records.get(step)

    def __contains__(self, step: object) -> bool:
        return step in self._records

    def record(self, step: int) -> CheckpointRecord:
        """Returns the commit record of a step, also of one that somebody else has committed in the meantime.

        Raises:
            CheckpointNotFoundError: There is no such step; names those that exist.
            DamagedCheckpointError: There is, but its record does not verify.
            FormatVersionError: There is, but a newer version of holdfast wrote it.
        """
        record = self._records.get(step)
        if record is None and step not in self._damage:
            record = self._look(step)
        if record is not None:
            return record
        if step in self._newer:
            raise FormatVersionError(self._newer[step])
        if step in self._damage:
            raise DamagedCheckpointError(self._damage[step])
        steps = self.steps()
        known = f"there are {_listed(steps)}" if steps else "there is none at all"
        raise CheckpointNotFoundError(f"{self._directory}: no checkpoint of step {step}; {known}")

    def _look(self, step: int) -> CheckpointRecord | None:
        """Looks for a step that was not there when the directory was read, or not seen, as on network file systems."""
        record = _read((step, self.location(step)))
        if isinstance(record, HoldfastError):
            raise record
        if record is not None:
            self.add(step, record)
        return record

    @property
    def damage(self) -> dict[int, str]:
        """Returns the steps whose record does not verify, each with what is wrong."""
        return dict(self._damage)


def _read(place: tuple[int, Location]) -> CheckpointRecord | DamagedCheckpointError | FormatVersionError | None:
    """Returns the record of a step, what is wrong with it, or None where there is none."""
    step, location = place
    try:
        record = read_record(location)
    except CheckpointNotFoundError:
        return None
    except (DamagedCheckpointError, FormatVersionError) as error:
        return error
    if record.step is None:  # what hf.save wrote is nobody's to delete but its owner's
        return replace(record, step=step, pinned=True)
    if record.step != step:
        return DamagedCheckpointError(
            f"{location / RECORD}: written for step {record.step}, found in the directory of step {step}"
        )
    return record


def _listed(steps: list[int]) -> str:
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:4], "...", *shown[-6:]])
