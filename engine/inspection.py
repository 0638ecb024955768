"""Lists of the steps in a directory and of the leaves in a checkpoint, for programs and users, and verification."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .arrays import Problem, SavedLeaf, TreeReader, check_file, naming, open_folder
from .clock import UNHEARD, Portion, Progress
from .errors import CheckpointNotFoundError, DamagedCheckpointError, FormatVersionError, HoldfastError, shortened_text
from .format import RECORD, TREES, CheckpointRecord, FileRecord, ItemRecord, own_shares
from .manager import infos_of, reasons, retention_rules, stored_rules
from .pytree import materialize
from .sources import (
    JSON,
    METRICS,
    TREE,
    CheckpointSource,
    find_checkpoint,
    find_steps,
    is_run,
    leaf_path,
    open_at,
    portions_of,
    read_checkpoint,
    trees_in,
)
from .steps import StepEntry, has_changed, has_record, read_record
from .storage import Entry, Location, Place, as_location


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """One step of a directory.

    Attributes:
        step: The step.
        path: Its directory.
        time: When it was committed, in seconds since 1970-01-01 UTC; None if it is damaged.
        bytes: Bytes of all its files.
        shared_bytes: Bytes of those files that other steps have, too, by hard links: deleting this step alone does not
            free them, and a copy elsewhere takes them in full.
        added_bytes: Bytes of those files that no step before it in the list has: their sum is what all steps take on
            the disk.
        metrics: The metrics stored with it, or None.
        reason: Why it was saved.
        kept: Why it is kept, as far as that is known.
        damage: What is wrong with its record or the sizes of its files, or None.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSummary:
    """One leaf of a checkpoint.

    Attributes:
        item: The item it belongs to; ``state/own/1`` for what process 1 alone saved of its objects.
        path: Its path in the tree, such as ``params/Dense_0/kernel``.
        kind: Its kind when it was saved: ``"jax"``, ``"numpy"``, ``"torch"``, ``"key"``, ``"int"``, ``"str"``, ...
        shape: Its shape; ``()`` for a value that is no array.
        dtype: The name of its element type, or None for a value that is no array.
        sharding: How it was divided among devices, or ``""``.
        bytes: Bytes of its elements.
        value: The value of a leaf that is no array, shortened; None for arrays.
    """

    item: str
    path: str = ""
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str | None = None
    sharding: str = ""
    bytes: int = 0
    value: str | None = None


def list_checkpoints(directory: Place) -> list[CheckpointSummary]:
    """List the steps of a directory; reads only their records and the sizes of their files.

    Args:
        directory: A manager's directory, or a directory of steps of another library. Steps of several names, such as
            ``a-1`` and ``b-1``, are all listed.

    Returns:
        The steps, damaged ones included: by name, in ascending order.

    Raises:
        CheckpointNotFoundError: There is nothing at this path.
    """
    location = as_location(directory).snapshot()
    if not location.exists():
        raise CheckpointNotFoundError(f"{location}: there is nothing at this path")
    steps = find_steps(location)
    if not steps.is_native:
        return [_foreign_summary(entry, steps.format) for entry in steps.entries]
    # The options of the last run do not tell which of several series it wrote.
    several = len({entry.series for entry in steps.entries}) > 1
    options, function = (None, None) if several else stored_rules(location)
    infos = infos_of(steps.entries)
    # Only the run has the function that ranks its steps, and can tell why one is kept.
    kept = {} if options is None or function is not None else reasons(infos, retention_rules(options))
    seen: set[tuple[int, int]] = set()
    found = [_native_summary(entry, kept.get(entry.step, ()), seen) for entry in steps.entries]
    for entry, one in zip(steps.entries, found, strict=True):
        if one.damage and entry.record is not None and has_changed(entry.location, entry.record):
            return list_checkpoints(directory)  # a run has replaced or deleted the step meanwhile
    return found


def _native_summary(entry: StepEntry, kept: tuple[str, ...], seen: set[tuple[int, int]]) -> CheckpointSummary:
    """Describe a step; ``seen`` has the files of the steps before it that have several names, and gets its own."""
    record = entry.record
    if record is None:
        return CheckpointSummary(step=entry.step, path=str(entry.location), damage=str(entry.error))
    listed = _listed(entry.location, record)
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
        shared_bytes=_shared(listed),
        added_bytes=record.nbytes - again,
        metrics=record.metrics,
        reason=record.reason,
        kept=kept,
        damage=next((f"{p.file}: {p.what}" for p in _file_problems(listed)), None),
    )


def _foreign_summary(entry: StepEntry, format_name: str) -> CheckpointSummary:
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


def describe(path: Place, step: int | None = None) -> list[LeafSummary]:
    """Describe every leaf of a checkpoint without reading its data.

    Args:
        path: A checkpoint, or a directory of steps.
        step: Which step of such a directory; None is the newest.

    Returns:
        The leaves, item by item, in the order of the trees.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        DamagedCheckpointError: Its structure does not verify.
        OptionError: Checkpoints of several names have this step, such as ``a-1`` and ``b-1``.
    """
    return read_checkpoint(as_location(path), _leaf_summaries, step)


def _leaf_summaries(checkpoint: CheckpointSource) -> list[LeafSummary]:
    found: list[LeafSummary] = []
    for name, kind in checkpoint.items.items():
        if kind == TREE:
            for item, tree in trees_in(checkpoint, name):
                with naming(tree.location):
                    found.extend(_leaf_summary(item, leaf) for leaf in tree.leaves)
        elif (files := checkpoint.files(name)) is not None:
            found.extend(
                LeafSummary(item=name, path=file, kind=kind, bytes=known.size) for file, known in files.items()
            )
        else:
            value = shortened_text(repr(checkpoint.value(name))) if kind in (JSON, METRICS) else None
            found.append(LeafSummary(item=name, kind=kind, value=value))
    return found


def shared_bytes(location: Location, record: CheckpointRecord) -> int:
    """Return the bytes of those files of a checkpoint that have names elsewhere, too, as other steps share them."""
    return _shared(_listed(location, record))


def _shared(listed: Iterable[tuple[str, FileRecord, Entry | None]]) -> int:
    return sum(found.size or 0 for _, _, found in listed if found is not None and found.links > 1)


def _listed(location: Location, record: CheckpointRecord) -> list[tuple[str, FileRecord, Entry | None]]:
    """Return the path, the record and the entry of every file that a commit record names; None if it is missing."""
    listed: list[tuple[str, FileRecord, Entry | None]] = []
    for item in record.items.values():
        paths = item.paths
        if location.is_local:
            found = _local_files(location, paths)
        elif item.is_archive:
            found = {entry.name: entry for entry in location.entries()}
        else:
            found = _files(location / item.folder, f"{item.folder}/")
        listed += [(path, known, found.get(path)) for path, known in paths.items()]
    return listed


def _file_problems(listed: Iterable[tuple[str, FileRecord, Entry | None]]) -> Iterator[Problem]:
    """Compare the sizes of a checkpoint's files with its record."""
    for path, known, found in listed:
        if found is None:
            yield Problem(path, "", "missing")
        elif found.size not in (known.size, None):
            yield Problem(path, "", f"expected {known.size} bytes, found {found.size}")


def _local_files(folder: Location, files: Iterable[str]) -> dict[str, Entry]:
    """Return the files that exist; without a size where the system does not show it."""
    root, found = os.fspath(folder), dict[str, Entry]()
    for file in files:
        try:
            status = os.stat(f"{root}/{file}")
            found[file] = Entry(file, False, status.st_size, status.st_nlink, (status.st_dev, status.st_ino))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            found[file] = Entry(file, False)
    return found


def _files(folder: Location, prefix: str = "") -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in folder.entries():
        if entry.is_directory:
            found.update(_files(folder / entry.name, f"{prefix}{entry.name}/"))
        else:
            found[prefix + entry.name] = entry
    return found


def _leaf_summary(item: str, leaf: SavedLeaf) -> LeafSummary:
    saved = leaf.saved
    return LeafSummary(
        item=item,
        path=leaf_path(item, leaf.name),
        kind=saved.kind,
        shape=saved.shape or (),
        dtype=None if saved.dtype is None else str(saved.dtype),
        sharding=saved.sharding_text,
        bytes=leaf.nbytes,
        value=None if saved.dtype is not None else _value_text(leaf),
    )


def _value_text(leaf: SavedLeaf) -> str:
    """Write a value that is no array as Python would, shortened."""
    (value,) = materialize([None], [leaf.saved], [None], [leaf.name])
    try:
        text = hex(value) if leaf.saved.kind == "int" else repr(value)
    except ValueError:  # Python refuses to write integers with thousands of digits
        text = leaf.saved.kind
    return shortened_text(text)


# ---- verification: every byte is read and checked; problems are named file by file and leaf by leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointVerification:
    """The problems that were found by reading one checkpoint.

    Attributes:
        step: Its step, or None outside a manager's directory.
        path: Its directory.
        bytes: Bytes that were read and checked.
        problems: What is wrong; empty if it is whole.
    """

    step: int | None
    path: str
    bytes: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The problems that were found by reading checkpoints.

    Attributes:
        checkpoints: One entry for each: by name, in ascending order of steps.
    """

    checkpoints: tuple[CheckpointVerification, ...]

    @property
    def ok(self) -> bool:
        """Return whether all of them are whole."""
        return not any(checkpoint.problems for checkpoint in self.checkpoints)


def verify(path: Place, step: int | None = None, *, progress: Progress | None = None) -> VerifyReport:
    """Read a checkpoint, or all of a directory, and check every byte.

    Args:
        path: A checkpoint, or a directory of steps.
        step: Which step of such a directory; None is all of them.
        progress: Is told how many bytes there are to read, and as they are read.

    Returns:
        The problems, file by file and leaf by leaf.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        OptionError: Checkpoints of several names have this step, such as ``a-1`` and ``b-1``.
    """
    location = as_location(path).snapshot()
    progress = progress or UNHEARD
    if step is None and is_run(location):
        entries = find_steps(location).entries
        if entries:
            portions = portions_of(progress, entries)
            found = [_verify_listed(entry.location, entry.step, next(portions)) for entry in entries]
            return VerifyReport(checkpoints=tuple(one for one in found if one is not None))
    location = find_checkpoint(location, step)
    (portion,) = portions_of(progress, [StepEntry(0, location)])
    with portion:
        return VerifyReport(checkpoints=(_verify(location, step, portion),))


def _verify_listed(location: Location, step: int, portion: Portion) -> CheckpointVerification | None:
    """Verify a step of a directory; None if a run deletes it meanwhile, which removes the record first."""
    with portion:
        try:
            return _verify(location, step, portion)
        except CheckpointNotFoundError:
            return None


def _verify(location: Location, step: int | None, portion: Portion) -> CheckpointVerification:
    if not has_record(location):
        return _verify_foreign(location, step, portion)
    try:
        record = read_record(location)
        if step is not None and record.step not in (step, None):
            raise DamagedCheckpointError(f"it was written for step {record.step}")
        parts = record.parts()
    except (DamagedCheckpointError, FormatVersionError) as error:
        problems = [Problem(RECORD, "", str(error))]
        return CheckpointVerification(step=step, path=str(location), bytes=0, problems=tuple(problems))
    problems = []
    portion.work(record.nbytes)
    for name, item in parts.items():
        for problem in _verify_item(location / item.folder, item, portion.advance):
            leaf = problem.leaf if len(parts) == 1 or not problem.leaf else f"{name}: {problem.leaf}"
            problems.append(Problem(f"{item.folder}/{problem.file}".rstrip("/"), leaf, problem.what))
    problems += _verify_beside(location, record, parts)
    if problems and has_changed(location, record):
        read_record(location)  # raises CheckpointNotFoundError if it was deleted
        return _verify(as_location(location.url), step, portion)  # a new location has no snapshot of the listing
    step = record.step if step is None else step
    return CheckpointVerification(step=step, path=str(location), bytes=record.nbytes, problems=tuple(problems))


def _verify_beside(location: Location, record: CheckpointRecord, parts: Mapping[str, ItemRecord]) -> Iterator[Problem]:
    """Check the files of items that belong to none of the trees in them, such as the records of components."""
    read = {path for part in parts.values() for path in part.paths}
    for item in record.items.values():
        for path, known in item.paths.items():
            if path not in read and (problem := _digest_problem(location, path, known)):
                yield problem


def _verify_foreign(location: Location, step: int | None, portion: Portion) -> CheckpointVerification:
    """Read every item of a checkpoint of another library that holdfast can read."""
    problems: list[Problem] = []
    size = 0
    try:
        checkpoint = open_at(location)
        size = checkpoint.nbytes
        for name, kind in checkpoint.items.items():
            try:
                if kind == TREE:
                    tree = checkpoint.tree(name)
                    portion.work(sum(leaf.nbytes for leaf in tree.leaves))
                    found = tree.verify(portion.advance)
                    several = len(checkpoint.items) > 1
                    problems += [p._replace(leaf=f"{name}: {p.leaf}") if several and p.leaf else p for p in found]
                elif kind in (JSON, METRICS):
                    checkpoint.value(name)
            except DamagedCheckpointError as error:
                problems.append(Problem("", name, str(error)))
    except DamagedCheckpointError as error:
        problems.append(Problem("", "", str(error)))
    return CheckpointVerification(step=step, path=str(location), bytes=size, problems=tuple(problems))


def _verify_item(folder: Location, item: ItemRecord, advance: Callable[[int], None]) -> list[Problem]:
    if item.is_archive:
        advance(item.nbytes)
        advance = UNHEARD.advance
    try:
        folder, opened = open_folder(folder, item.files)
    except HoldfastError as error:
        return [Problem("", "", str(error))]
    files = opened or {}
    differ = (p for file, known in files.items() if (p := _digest_problem(folder, file, known, advance)) is not None)
    if item.kind != TREES:
        return list(differ)
    try:
        found = TreeReader(folder, files).verify(advance)
        for share in own_shares(files):
            below = TreeReader(folder / share.folder, share.files).verify(advance)
            found += [p for one in below if (p := one._replace(file=f"{share.folder}/{one.file}")) not in found]
    except HoldfastError as error:  # the structure is damaged: name the files that differ, or else report this error
        return list(differ) or [Problem("", "", str(error))]
    return found


def _digest_problem(
    folder: Location, file: str, known: FileRecord, advance: Callable[[int], None] = UNHEARD.advance
) -> Problem | None:
    try:
        check_file(folder / file, known)
    except HoldfastError as error:
        return Problem(file, "", str(error))
    advance(known.size)
    return None
