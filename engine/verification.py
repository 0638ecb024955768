"""Verification of checkpoints: every byte is read and checked; problems are named file by file and leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .arrays import Problem, TreeReader, check_file
from .clock import UNHEARD, Portion, Progress
from .errors import CheckpointNotFoundError, DamagedCheckpointError, FormatVersionError, HoldfastError
from .format import RECORD, TREES, CheckpointRecord, ItemRecord, own_shares
from .sources import JSON, METRICS, TREE, find_checkpoint, find_steps, is_run, open_at, portions_of
from .steps import StepEntry, has_changed, has_record, read_record
from .storage import Location, Place, as_location


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
            problems.append(Problem(f"{item.folder}/{problem.file}", leaf, problem.what))
    problems += _verify_beside(location, record, parts)
    if problems and has_changed(location, record):
        read_record(location)  # raises CheckpointNotFoundError if it was deleted
        return _verify(as_location(location.url), step, portion)  # a new location has no snapshot of the listing
    step = record.step if step is None else step
    return CheckpointVerification(step=step, path=str(location), bytes=record.nbytes, problems=tuple(problems))


def _verify_beside(location: Location, record: CheckpointRecord, parts: Mapping[str, ItemRecord]) -> Iterator[Problem]:
    """Check the files of items that belong to none of the trees in them, such as the records of components."""
    read = {f"{part.folder}/{file}" for part in parts.values() for file in part.files}
    for item in record.items.values():
        for file in item.files:
            if f"{item.folder}/{file}" not in read and (problem := _digest_problem(location / item.folder, file, item)):
                yield problem._replace(file=f"{item.folder}/{file}")


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
    differ = (problem for file in item.files if (problem := _digest_problem(folder, file, item, advance)) is not None)
    if item.kind != TREES:
        return list(differ)
    try:
        found = TreeReader(folder, item.files).verify(advance)
        for share in own_shares(item.files):
            below = TreeReader(folder / share.folder, share.files).verify(advance)
            found += [p for one in below if (p := one._replace(file=f"{share.folder}/{one.file}")) not in found]
    except HoldfastError as error:  # the structure is damaged: name the files that differ, or else report this error
        return list(differ) or [Problem("", "", str(error))]
    return found


def _digest_problem(
    folder: Location, file: str, item: ItemRecord, advance: Callable[[int], None] = UNHEARD.advance
) -> Problem | None:
    try:
        check_file(folder / file, item.files[file])
    except HoldfastError as error:
        return Problem(file, "", str(error))
    advance(item.files[file].size)
    return None
