"""Summarize the leaves of a checkpoint, and verify its data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from .arrays import FileCheck, Problem, SavedLeaf, TreeReader, naming, open_folder
from .errors import CheckpointNotFoundError, DamagedCheckpointError, FormatVersionError, HoldfastError, shortened_text
from .format import RECORD, TREES, FileRecord, ItemRecord, own_shares
from .progress import NULL, Progress, Share
from .pytree import decode_value
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
    read_checkpoint,
    shares_of,
    trees_in,
)
from .steps import StepEntry, has_changed, has_record, read_record, stray_folders
from .storage import Location, Place, as_location


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSummary:
    """A summary of one leaf of a checkpoint.

    Attributes:
        item: The item that contains the leaf, such as ``state``; ``state/own/1`` for objects that only process 1 saved.
        path: The path of the leaf in the tree, such as ``params/Dense_0/kernel``.
        kind: The kind of the saved leaf: ``"jax"``, ``"numpy"``, ``"torch"``, ``"key"``, ``"int"``, ``"str"``, ...
        shape: The shape of the array; ``()`` for a value that is not an array.
        dtype: The name of the dtype, or None for a value that is not an array.
        sharding: The sharding of the saved array across devices, or ``""`` if it has none.
        bytes: The total size of the elements in bytes.
        value: The value of a leaf that is not an array, truncated if it is long; None for arrays.
    """

    item: str
    path: str = ""
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str | None = None
    sharding: str = ""
    bytes: int = 0
    value: str | None = None


def describe(path: Place, step: int | None = None) -> list[LeafSummary]:
    """Describe every leaf of a checkpoint without reading its data.

    Args:
        path: A checkpoint, or a directory of steps.
        step: The step to describe in a directory of steps; None selects the newest step.

    Returns:
        A summary of each leaf, grouped by item and in tree order.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        DamagedCheckpointError: The structure of the checkpoint fails its checks.
        OptionError: The step is ambiguous because it exists with several prefixes, such as ``a-1`` and ``b-1``.
    """
    return read_checkpoint(as_location(path), _leaf_summaries, step)


def _leaf_summaries(checkpoint: CheckpointSource) -> list[LeafSummary]:
    summaries: list[LeafSummary] = []
    for name, item_kind in checkpoint.items.items():
        if item_kind == TREE:
            for item, tree in trees_in(checkpoint, name):
                with naming(tree.location):
                    summaries.extend(_leaf_summary(item, leaf) for leaf in tree.leaves)
        elif (files := checkpoint.files(name)) is not None:
            summaries.extend(
                LeafSummary(item=name, path=file, kind=item_kind, bytes=record.size) for file, record in files.items()
            )
        else:
            value = shortened_text(repr(checkpoint.value(name))) if item_kind in (JSON, METRICS) else None
            summaries.append(LeafSummary(item=name, kind=item_kind, value=value))
    return summaries


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
    value = decode_value(leaf.saved.details, leaf.name)
    try:
        text = hex(value) if leaf.saved.kind == "int" else repr(value)
    except ValueError:  # Python refuses to convert integers with thousands of digits to decimal text
        text = leaf.saved.kind
    return shortened_text(text)


_LISTINGS = 3  # maximum number of times to list steps; a run may delete all listed steps before they are read

# ---- verification, which checks every byte and reports problems by file and leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointVerification:
    """The result of verifying one checkpoint.

    Attributes:
        step: The step, or None outside a manager's directory.
        path: The directory of the checkpoint.
        bytes: The number of bytes read and checked.
        problems: The problems found; empty if the checkpoint is intact.
    """

    step: int | None
    path: str
    bytes: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The results of verifying one or more checkpoints.

    Attributes:
        checkpoints: One result per checkpoint, sorted by prefix and step.
        strays: Folders that are named like a step and contain files, but are not checkpoints; they are not verified.
    """

    checkpoints: tuple[CheckpointVerification, ...]
    strays: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if there is at least one checkpoint, and all of them are intact."""
        return bool(self.checkpoints) and not any(checkpoint.problems for checkpoint in self.checkpoints)


def verify(path: Place, step: int | None = None, *, progress: Progress | None = None) -> VerifyReport:
    """Read a checkpoint, or all checkpoints in a directory, and check every byte.

    Args:
        path: A checkpoint, or a directory of steps.
        step: The step to verify in a directory of steps; None verifies all steps.
        progress: An object that receives the number of bytes to read and the progress in bytes.

    Returns:
        A report of the problems in each checkpoint, by file and leaf.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        OptionError: The step is ambiguous because it exists with several prefixes, such as ``a-1`` and ``b-1``.
    """
    progress = progress or NULL
    for _ in range(_LISTINGS):
        location = as_location(path).snapshot()
        entries = find_steps(location).entries if step is None and is_run(location) else ()
        if not entries:
            break
        shares = shares_of(progress, entries)
        results = []
        for entry, share in zip(entries, shares, strict=True):
            with share, contextlib.suppress(CheckpointNotFoundError):  # a run may have deleted the step since
                results.append(_verify(entry.location, entry.step, share))
        if results:
            strays = stray_folders(location, None, entries)
            return VerifyReport(checkpoints=tuple(results), strays=tuple(str(entry.location) for entry in strays))
    location = find_checkpoint(location, step)
    (share,) = shares_of(progress, [StepEntry(0, location)])
    with share:
        return VerifyReport(checkpoints=(_verify(location, step, share),))


def _verify(location: Location, step: int | None, share: Share) -> CheckpointVerification:
    if not has_record(location):
        return _verify_foreign(location, step, share)
    try:
        record = read_record(location)
        if step is not None and record.step not in (step, None):
            raise DamagedCheckpointError(f"it was written for step {record.step}")
        parts = record.parts()
    except (DamagedCheckpointError, FormatVersionError) as error:
        problem = Problem(RECORD, "", str(error))
        return CheckpointVerification(step=step, path=str(location), bytes=0, problems=(problem,))
    problems = []
    share.expect(record.nbytes)
    for name, item in parts.items():
        for problem in _verify_item(location / item.folder, item, share.advance):
            leaf = problem.leaf if len(parts) == 1 or not problem.leaf else f"{name}: {problem.leaf}"
            problems.append(Problem(f"{item.folder}/{problem.file}".rstrip("/"), leaf, problem.what))
    # Also check each item's files outside its trees, such as the descriptions of components.
    read = {path for part in parts.values() for path in part.paths}
    others = ((path, file) for item in record.items.values() for path, file in item.paths.items() if path not in read)
    problems += [differing for path, file in others if (differing := _digest_problem(location, path, file)) is not None]
    if problems and has_changed(location, record):
        read_record(location)  # raises CheckpointNotFoundError if the checkpoint has been deleted
        return _verify(as_location(location.url), step, share)  # a new location, because the snapshot is outdated
    step = record.step if step is None else step
    return CheckpointVerification(step=step, path=str(location), bytes=record.nbytes, problems=tuple(problems))


def _verify_foreign(location: Location, step: int | None, share: Share) -> CheckpointVerification:
    problems: list[Problem] = []
    size = 0
    try:
        checkpoint = open_at(location)
        size = checkpoint.nbytes
        for name, item_kind in checkpoint.items.items():
            try:
                if item_kind == TREE:
                    tree = checkpoint.tree(name)
                    share.expect(sum(leaf.nbytes for leaf in tree.leaves))
                    damaged = tree.verify(share.advance)
                    several = len(checkpoint.items) > 1
                    problems += [p._replace(leaf=f"{name}: {p.leaf}") if several and p.leaf else p for p in damaged]
                elif item_kind in (JSON, METRICS):
                    checkpoint.value(name)
            except DamagedCheckpointError as error:
                problems.append(Problem("", name, str(error)))
    except DamagedCheckpointError as error:
        problems.append(Problem("", "", str(error)))
    return CheckpointVerification(step=step, path=str(location), bytes=size, problems=tuple(problems))


def _verify_item(folder: Location, item: ItemRecord, advance: Callable[[int], None]) -> list[Problem]:
    if item.is_archive:
        advance(item.nbytes)
        advance = NULL.advance
    try:
        folder, opened = open_folder(folder, item.files)
    except HoldfastError as error:
        return [Problem("", "", str(error))]
    files = opened or {}
    differ = (p for file, record in files.items() if (p := _digest_problem(folder, file, record, advance)) is not None)
    if item.kind != TREES:
        return list(differ)
    try:
        problems = TreeReader(folder, files).verify(advance)
        for share in own_shares(files):
            below = TreeReader(folder / share.folder, share.files).verify(advance)
            below = [problem._replace(file=f"{share.folder}/{problem.file}") for problem in below]
            problems += [problem for problem in below if problem not in problems]
    except HoldfastError as error:  # damaged structure: report the files that differ or, if there are none, the error
        return list(differ) or [Problem("", "", str(error))]
    return problems


def _digest_problem(
    folder: Location, file: str, record: FileRecord, advance: Callable[[int], None] = NULL.advance
) -> Problem | None:
    try:
        FileCheck(record).check(folder / file)
    except HoldfastError as error:
        return Problem(file, "", str(error))
    advance(record.size)
    return None
