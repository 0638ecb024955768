"""The steps in a directory, their commit records, and the metrics and run metadata stored with them.

A step's folder is named ``<step>``, ``<prefix>_<step>`` or ``<prefix>-<step>``, optionally with leading zeros
(:func:`step_folder` formats these names, and :func:`series_and_step` parses them). A step exists if its commit record
exists. The steps that share a prefix form a *series*: a manager uses the series of its ``step_prefix``, and functions
that take only a directory see all series. :func:`newest_step` defines the newest step:

- within a series, it is the highest step, because times are unreliable: clocks differ and may jump;
- across series, it is the most recently committed of the highest steps, because each series has its own numbering.

Another program, such as an evaluator, may add metrics to a step during the run. Each time, it adds a new file
``metrics/<step>.<token>.json`` to the directory instead of changing the run's files. The file identifies the
checkpoint, not just the step, so old metrics are ignored if the run goes back and replaces the checkpoint of the step.
Functions that read the steps of a directory merge these metrics into the commit records.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from .errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FormatVersionError,
    HoldfastError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
)
from .format import (
    DELETED,
    OWNER,
    PADDED,
    PARTIAL,
    RECORD,
    STEP_FOLDER,
    WITNESSES,
    CheckpointRecord,
    FileRecord,
    decode_document,
    decode_metrics,
    encode_document,
    encode_metrics,
)
from .storage import (
    REQUESTS,
    TEMPORARY_PREFIX,
    Entry,
    Location,
    is_strange,
    is_unreadable,
    max_concurrency,
    os_errors,
    parallel_map,
    unreadable_as_damage,
)

_logger = logging.getLogger("holdfast")

LATE = "metrics"  # name of the folder with metrics that were added after a step was saved
_LIMIT = 64 << 20  # size limit in bytes of a file with metrics or metadata


# The identity of the checkpoint to which metrics were added, the time of the addition, and the metrics.
Added = tuple[str, float, dict[str, Any]]


def write_late(directory: Location, folder: str, record: CheckpointRecord, metrics: dict[str, Any], now: float) -> None:
    """Add metrics to the checkpoint with this folder name and commit record."""
    document = {"checkpoint": record.identity, "time": now, "metrics": encode_metrics(metrics)}
    (directory / LATE).check_not_link()
    (directory / LATE).make_directory()
    (directory / LATE / f"{folder}.{os.urandom(8).hex()}.json").write_bytes(encode_document("metrics", document))


class LateMetrics:
    """A cache of the metrics added to a directory's steps. Metrics files never change, so each is read only once."""

    def __init__(self, directory: Location) -> None:
        self._directory = directory
        self._files: dict[str, dict[str, Added]] = {}  # keyed by step folder, then by file name

    def refresh(self, exists: Callable[[str], bool]) -> set[str]:
        """Read new metrics files of steps whose folders exist, and return the folders that have new files."""
        names = set(_names(self._directory))
        read = {name for folder in [*self._files] for name in self.files_of(folder)}
        self._forget(read - names)
        unread = [name for name in names - read if exists(_folder(name))]
        folder = self._directory / LATE
        contents = parallel_map(lambda name: _read(folder / name), unread, max_concurrency(self._directory))
        for name, content in zip(unread, contents, strict=True):
            if content is not None:  # an unreadable file is read again at the next call
                self._files.setdefault(_folder(name), {})[name] = content
        return {_folder(name) for name in unread}

    def of(self, folder: str) -> list[Added]:
        """Return the metrics added to the checkpoint in a folder, in no particular order."""
        return list(self._files.get(folder, {}).values())  # a copy, because another thread may refresh concurrently

    def files_of(self, folder: str) -> list[str]:
        """Return the names of the metrics files that have been read for the checkpoint in a folder."""
        return list(self._files.get(folder, ()))

    def remove_files(self, names: Sequence[str]) -> None:
        """Remove files whose metrics have been merged into the commit record."""
        if names:
            with contextlib.suppress(StorageError):
                self._remove(names)
                self._forget(names)

    def remove(self, folder: str) -> None:
        """Remove the metrics added to a deleted checkpoint, ignoring errors because leftover files are harmless."""
        with contextlib.suppress(StorageError):
            # In an object store, listing the folder would cost an extra request for each deletion.
            names = _names(self._directory) if self._directory.is_local else self.files_of(folder)
            self._remove(name for name in names if _folder(name) == folder)

    def remove_stray(self, listing: Location) -> None:
        """Remove the metrics of checkpoints that are missing from a listing of the directory."""
        folders = {entry.name for entry in listing.entries() if entry.is_directory}
        with contextlib.suppress(StorageError):
            stray = [entry.name for entry in (listing / LATE).entries() if _folder(entry.name) not in {"", *folders}]
            # Keep the metrics if a commit record exists after all, because the listing may be incomplete.
            self._remove(name for name in stray if not has_record(self._directory / _folder(name)))

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._files.get(_folder(name), {}).pop(name, None)

    def _remove(self, names: Iterable[str]) -> None:
        (self._directory / LATE).check_not_link()
        for name in names:
            (self._directory / LATE / name).remove()


def with_late(record: CheckpointRecord, added: Iterable[Added]) -> CheckpointRecord:
    """Return a commit record merged with the metrics added to its checkpoint. The latest value of a metric wins."""
    for identity, _, metrics in sorted(added, key=lambda addition: addition[1]):
        if identity == record.identity:
            record = record.with_metrics(metrics)
    return record


def _names(directory: Location) -> list[str]:
    folder = directory / LATE
    if not directory.is_local:
        return [entry.name for entry in folder.entries()]
    with os_errors(folder.url, "list"):  # listdir is fast because it does not stat the files
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            _warn_of_file(folder.url)
            return []


@cache  # the folder is listed at every save, but one warning is enough
def _warn_of_file(url: str) -> None:
    _logger.warning("%s: this is not a folder, so it holds no metrics; move it away", url)


def _folder(name: str) -> str:
    return name.removesuffix(".json").rpartition(".")[0] if name.endswith(".json") else ""


def _read(file: Location) -> Added | None:
    try:
        document = decode_document(file.read_bytes(limit=_LIMIT), "metrics", source=str(file))
        return str(document["checkpoint"]), float(document["time"]), decode_metrics(document["metrics"])
    except (HoldfastError, KeyError, TypeError, ValueError):
        return None


S = TypeVar("S")
T = TypeVar("T")

RECORD_LIMIT = 256 << 20  # size limit in bytes of a commit record; records are small: they list files, not leaves


def read_record(location: Location) -> CheckpointRecord:
    file = location / RECORD
    for left in reversed(range(attempts_at(location))):
        try:
            with unreadable_as_damage(file):
                data = file.read_bytes(limit=RECORD_LIMIT)
            return CheckpointRecord.decode(data, source=str(file))
        except ObjectNotFoundError as error:
            raise CheckpointNotFoundError(f"{location}: no checkpoint here (there is no {RECORD})") from error
        except DamagedCheckpointError:
            if not left:
                raise
    raise AssertionError


def attempts_at(location: Location) -> int:
    """Return how many times to read data before treating it as damaged: a network may corrupt a single response."""
    return 3 if location.is_remote else 1


def has_record(location: Location) -> bool:
    """Return whether a commit record exists, readable or not."""
    try:
        return (location / RECORD).is_there()
    except StorageError as error:
        if not is_unreadable(error):
            raise
        return True


MOST_CHANGES = 100  # maximum number of attempts to read a checkpoint that keeps changing


def read_steadily(location: Location, read: Callable[[CheckpointRecord], T]) -> T:
    """Read a checkpoint through its commit record, starting over if another process replaces it in the meantime."""
    return read_again(location, partial(read_record, location), read, partial(has_changed, location))


def read_again(location: Location, look: Callable[[], S], read: Callable[[S], T], changed: Callable[[S], bool]) -> T:
    """Call ``read`` with the result of ``look``, and start over if a concurrent change made the data seem damaged."""
    least = attempts_at(location)
    for attempt in range(1, MOST_CHANGES + 1):
        state = look()
        try:
            return read(state)
        except DamagedCheckpointError:
            if not changed(state) and attempt >= least:
                raise
    raise restless(location)


def restless(location: Location) -> DamagedCheckpointError:
    """Return the error for a location that changed every time it was read."""
    return DamagedCheckpointError(
        f"{location}: it was replaced each of {MOST_CHANGES} times that it was read; look which programs write there, "
        "or copy it to another place first"
    )


def has_changed(location: Location, record: CheckpointRecord) -> bool:
    """Return whether a checkpoint has definitely been replaced or deleted since its record was read."""
    try:
        return read_record(location).identity != record.identity
    except CheckpointNotFoundError:
        return True
    except HoldfastError:
        return False


# ---- the metadata of a run


METADATA = "metadata"  # name of the folder that holds the metadata
_FILE = "data.json"


def stored_metadata(location: Location) -> Mapping[str, Any] | None:
    """Return the metadata of the run, or None if there is none. If it is damaged, log a warning and return None."""
    file = location / METADATA / _FILE
    metadata: Mapping[str, Any] | None = None
    try:
        with unreadable_as_damage(file):
            content = file.read_bytes(limit=_LIMIT)
        metadata = decode_document(content, "json", source=str(file)).get("data")
    except (DamagedCheckpointError, FormatVersionError, StoragePermissionError) as error:
        _logger.warning("the facts about the run are not used: %s; remove the file if the run needs none", error)
    except ObjectNotFoundError:
        pass
    return metadata


def store_metadata(location: Location, metadata: Mapping[str, Any] | None) -> None:
    """Store the metadata of a run, if any. Log a warning if something else occupies its path."""
    if metadata is None:
        return
    (location / METADATA).check_not_link()
    try:
        (location / METADATA).make_directory()
        (location / METADATA / _FILE).write_bytes(encode_document("json", {"data": metadata}))
    except StorageError as error:
        if not is_strange(error):
            raise
        _logger.warning("the facts about the run are not stored; move away what lies in their place: %s", error)


# ---- the list of the steps


_ATTEMPTS = 10  # maximum number of attempts to read a commit record that a store lists but does not return
_MANY = 64  # minimum number of steps for reading commit records in several threads


class StepEntry(NamedTuple):
    step: int  # the step number
    location: Location  # the step's folder
    series: str = ""  # the prefix of the folder name: ``""``, ``"ckpt_"`` or ``"ckpt-"``
    # The commit record; None if it is damaged or the step was written by another library.
    record: CheckpointRecord | None = None
    error: DamagedCheckpointError | FormatVersionError | None = None  # why the commit record is unusable, or None


def series_of(prefix: str | None) -> str:
    """Convert a ``step_prefix`` to its series."""
    return "" if prefix is None else prefix if prefix.endswith("-") else f"{prefix}_"


def prefix_of(series: str) -> str | None:
    """Convert a series to its ``step_prefix``."""
    return series if series.endswith("-") else series.removesuffix("_") or None


def step_folder(series: str, step: int, width: int | None = None) -> str:
    """Return the folder name of a step, zero-padded to at least ``width`` digits."""
    return f"{series}{step:0{width or 1}}"


def series_and_step(folder: str) -> tuple[str, int] | None:
    """Parse a folder name into series and step; return None if it is not the name of a step folder."""
    match = None if folder.startswith(TEMPORARY_PREFIX) else STEP_FOLDER.fullmatch(folder)
    return (match[1] or "", int(match[2])) if match else None


def step_folders(
    directory: Location, series: str | None = None, entries: Sequence[Entry] | None = None, *, padded: bool = False
) -> Iterator[StepEntry]:
    """Yield step folders, committed or not; skip zero-padded names unless ``padded`` or the folder PADDED exists."""
    entries = directory.entries() if entries is None else entries
    padded = padded or any(entry.name == PADDED for entry in entries)
    for entry in entries:
        named = series_and_step(entry.name) if entry.is_directory else None
        if named and series in (None, named[0]) and (padded or entry.name == step_folder(*named)):
            yield StepEntry(named[1], directory / entry.name, named[0])


def list_steps(
    directory: Location,
    series: str | None = None,
    entries: Sequence[Entry] | None = None,
    *,
    late: LateMetrics | None = None,
) -> list[StepEntry]:
    """Return the committed steps of a series (all series if None). ``late`` caches the metrics added to steps."""
    entries = directory.entries() if entries is None else entries
    folders = list(step_folders(directory, series, entries, padded=True))
    names = {entry.name for entry in entries}
    # Use several threads to read many small files even from a disk, because the files may not be in the page cache.
    threads = REQUESTS if len(folders) >= _MANY else max_concurrency(directory)
    steps = [entry for entry in parallel_map(read_entry, folders, threads) if entry is not None]
    if LATE in names:
        late = late or LateMetrics(directory)
        late.refresh({entry.location.name for entry in steps}.__contains__)
        steps = [
            entry._replace(record=with_late(entry.record, added))
            if entry.record and (added := late.of(entry.location.name))
            else entry
            for entry in steps
        ]
    steps.sort(key=lambda entry: (entry.series, entry.step))
    for first, second in pairwise(steps):
        if first[::2] == second[::2]:
            raise CheckpointExistsError(
                f"{first.location} and {second.location.name} beside it are both step {first.step}, and nothing tells "
                "which of them counts: move one of them out of the directory"
            )
    return steps


def stray_folders(directory: Location, series: str | None, checkpoints: Iterable[StepEntry]) -> list[StepEntry]:
    """Return local step folders that contain files, but neither a commit record nor a save or deletion marker."""
    records = {entry.location.name for entry in checkpoints}
    # Skip object stores, where delayed requests may leave such files, and directories that no run has used.
    if not directory.is_local or not (records or (directory / OWNER).is_there()):
        return []
    folders = step_folders(directory, series, [entry for entry in directory.entries() if entry.name not in records])
    return [folder for folder in folders if _is_stray({entry.name for entry in folder.location.entries()})]


def _is_stray(names: set[str]) -> bool:
    return not {RECORD, PARTIAL, DELETED} & names and not all(map(WITNESSES.fullmatch, names))


def newest_step(entries: Iterable[StepEntry], *, whole: bool = False) -> StepEntry | None:
    """Return the newest step, as defined at the top of this module, or None. If ``whole``, ignore damaged steps."""
    heads: dict[str, StepEntry] = {}
    listed = list(entries)
    left = left_behind(entry.record for entry in listed)
    for entry in listed:
        passed_over = (whole and entry.error) or (entry.record is not None and was_left(entry.step, entry.record, left))
        if not passed_over and (entry.series not in heads or entry.step > heads[entry.series].step):
            heads[entry.series] = entry

    def order(entry: StepEntry) -> tuple[float, str]:
        return math.inf if entry.record is None else entry.record.time, entry.location.name

    return max(heads.values(), key=order, default=None)


LEFT_BEHIND = "holdfast.left_behind"  # metadata key for the [number, time] of each step that the run has abandoned


def left_behind(records: Iterable[CheckpointRecord | None]) -> list[Any]:
    """Return the number and time of each step that a run abandoned by going back; such a step is never the newest."""
    lists = [(record.custom_metadata or {}).get(LEFT_BEHIND) for record in records if record is not None]
    return [pair for listed in lists if isinstance(listed, list) for pair in listed]


def was_left(step: int, record: CheckpointRecord, left: Sequence[Any]) -> bool:
    return [step, record.time] in left


def _listed_record(location: Location) -> CheckpointRecord | None:
    """Return a folder's commit record, or None if there is none. A listed but missing record counts as damaged."""
    for _ in range(_ATTEMPTS):
        try:
            return read_record(location)
        except CheckpointNotFoundError:
            # A proxy's response may make TensorStore report an existing S3 object as missing, or the step may have been
            # deleted after the snapshot was taken.
            if location.is_local or not has_record(location.snapshot()):
                return None
    raise DamagedCheckpointError(
        f"{location / RECORD}: the store lists this commit record, and has answered {_ATTEMPTS} times that there is no "
        "such object; look whether a proxy answers in the place of the store, or delete the step (holdfast rm)",
        unreadable=True,
    )


def read_entry(folder: StepEntry) -> StepEntry | None:
    """Return a folder's entry with the commit record or, if that is unusable, the error; None if there is no record."""
    try:
        record = _listed_record(folder.location)
    except (DamagedCheckpointError, FormatVersionError) as error:
        return folder._replace(error=error)
    if record is None:
        return None
    if record.step is None:  # written by hf.save, so no retention policy may delete it
        return folder._replace(record=replace(record, step=folder.step, pinned=True))
    if record.step != folder.step:
        text = (
            f"{folder.location / RECORD}: written for step {record.step}, found in the directory of step "
            f"{folder.step}; give the step its name back, or load it by its own path"
        )
        return folder._replace(error=DamagedCheckpointError(text))
    return StepEntry(folder.step, folder.location, folder.series, record)


# ---- the files of a checkpoint


def shared_bytes(location: Location) -> int:
    """Return the total size in bytes of the files that a checkpoint shares with other steps through hard links."""
    return shared_by_links(files_of(location, read_record(location))) if has_record(location) else 0


def shared_by_links(listed: Iterable[tuple[str, FileRecord, Entry | None]]) -> int:
    return sum(entry.size or 0 for _, _, entry in listed if entry is not None and entry.links > 1)


def files_of(location: Location, record: CheckpointRecord) -> list[tuple[str, FileRecord, Entry | None]]:
    """Return the path, record and directory entry of each file in a commit record; a missing file's entry is None."""
    listed: list[tuple[str, FileRecord, Entry | None]] = []
    for item in record.items.values():
        paths = item.paths
        if location.is_local:
            entries = _local_files(location, paths)
        elif item.is_archive:
            entries = {entry.name: entry for entry in location.entries()}
        else:
            entries = _files(location / item.folder, f"{item.folder}/")
        listed += [(path, file, entries.get(path)) for path, file in paths.items()]
    return listed


def _local_files(folder: Location, files: Iterable[str]) -> dict[str, Entry]:
    """Return an entry for each file that exists; the entry has no size if the file's status cannot be read."""
    root, entries = os.fspath(folder), dict[str, Entry]()
    for file in files:
        try:
            status = os.stat(f"{root}/{file}")
            entries[file] = Entry(file, False, status.st_size, status.st_nlink, (status.st_dev, status.st_ino))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            entries[file] = Entry(file, False)
    return entries


def _files(folder: Location, prefix: str = "") -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for entry in folder.entries():
        if entry.is_directory:
            entries.update(_files(folder / entry.name, f"{prefix}{entry.name}/"))
        else:
            entries[prefix + entry.name] = entry
    return entries
