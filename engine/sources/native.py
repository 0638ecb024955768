"""Opens the checkpoint at a path, whether it was written by holdfast or by another library."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

from ..arrays import TreeReader, TreeSource, naming, open_folder
from ..errors import CheckpointNotFoundError, DamagedCheckpointError, HoldfastError, OptionError
from ..format import OWN_FOLDER, CheckpointRecord, FileRecord, ItemRecord, own_shares
from ..progress import NULL, Progress, Share
from ..pytree import Patterns, format_path, unescape_key
from ..steps import MOST_CHANGES, StepEntry, has_changed, has_record, read_again, read_record, restless
from ..storage import Location, max_concurrency, parallel_map
from .discovery import NATIVE, FoundSteps, find_checkpoint, find_step, find_steps, is_ours, recognise
from .protocol import JSON, CheckpointSource

if TYPE_CHECKING:
    from ..handlers import Files

T = TypeVar("T")


class NativeCheckpoint(CheckpointSource):
    """A checkpoint written by holdfast."""

    format = NATIVE

    def __init__(self, location: Location) -> None:
        self.location = location
        self.record: CheckpointRecord = read_record(location)
        with naming(location):
            self.parts = self.record.parts()  # an item with one tree per process has several parts
        self.items = {name: item.kind for name, item in self.parts.items()}
        self.nbytes = self.record.nbytes
        self.step, self.reason = self.record.step, self.record.reason
        self.time, self.metrics = self.record.time, self.record.metrics
        self.custom_metadata = self.record.custom_metadata
        self._opened: tuple[str, Location, Files] | None = None  # the most recently opened item

    def has_changed(self) -> bool:
        return has_changed(self.location, self.record)

    def files(self, item: str) -> Mapping[str, FileRecord]:
        return self._open(item)[1]

    def _open(self, item: str) -> tuple[Location, Files]:
        """Return the folder and files of an item; the most recent item is cached, including its unpacked zip file."""
        if self._opened is None or self._opened[0] != item:
            self._opened = None
            saved = self.parts[item]
            folder, files = open_folder(self.location / saved.folder, saved.files)
            self._opened = item, folder, files or {}
        return self._opened[1:]

    def tree(self, item: str) -> TreeSource:
        return self.selected_tree(item, None)

    def selected_tree(self, item: str, select: Patterns | None) -> TreeSource:
        return TreeReader(*self._open(item), select=select)

    def value(self, item: str) -> Any:
        if self.parts[item].kind != JSON:
            raise OptionError(
                f"{self.location}: item {item!r} was written by a custom handler; restore it with that handler "
                "(Checkpointer(handler).restore, or a CheckpointManager)"
            )
        from ..handlers import JsonCheckpointHandler

        folder, files = self._open(item)
        return JsonCheckpointHandler().restore(folder, files=files)

    def _source_of(self, item: str) -> tuple[Location, Mapping[str, Any]]:
        folder, files = self._open(item)
        return folder, {"files": files}

    def complete(self, item: str, source: TreeSource, tree: Any) -> Any:
        if not (kept := source.external()):
            return tree
        from ..handlers import DEFAULT_REGISTRY, restore_external

        return restore_external(tree, source.location, self.files(item), kept, DEFAULT_REGISTRY, {})

    def items_to_load(self) -> list[str]:
        return list(self.items)


def trees_in(checkpoint: CheckpointSource, name: str) -> Iterator[tuple[str, TreeSource]]:
    """Yield the name and tree of an item, followed by the name and tree of each per-process part, if any."""
    tree = checkpoint.tree(name)
    yield name, tree
    for process, share in enumerate(own_shares(checkpoint.files(name) or {})):
        yield f"{name}/{OWN_FOLDER}/{process}", TreeReader(tree.location / share.folder, share.files)


def leaf_path(item: str, name: str) -> str:
    """Return the path of a leaf in the tree that :func:`trees_in` yields with the name ``item``."""
    if f"/{OWN_FOLDER}/" in item:  # in this case, the name begins with an object's escaped path, such as `data.train`
        first, *keys = name.split(".")
        name = ".".join([unescape_key(first), *keys])
    return format_path(name)


# ---- the checkpoint that a path refers to


def read_checkpoint(location: Location, read: Callable[[CheckpointSource], T], step: int | None = None) -> T:
    """Open and read the checkpoint that a path refers to, retrying if the checkpoint or a symlink to it is replaced."""

    def look() -> CheckpointSource:
        if step is None:
            with contextlib.suppress(CheckpointNotFoundError):
                return NativeCheckpoint(location)
        return open_checkpoint(location.snapshot(), step)

    for _ in range(MOST_CHANGES):
        target = location.is_local and os.path.realpath(location)
        result = read_again(location, look, read, methodcaller("has_changed"))
        if target == (location.is_local and os.path.realpath(location)):
            return result
    raise restless(location)


def open_checkpoint(location: Location, step: int | None = None) -> CheckpointSource:
    """Open the checkpoint that a path refers to, which may be a step in a directory."""
    if has_record(location) and (step is None or find_checkpoint(location, step) == location):
        return NativeCheckpoint(location)
    if step is None and not is_ours(location) and (source := recognise(location)) is not None:
        return source
    entry = find_step(location, step)
    if entry.error is not None:
        raise entry.error
    try:
        return open_at(entry.location)
    except CheckpointNotFoundError:
        if step is not None or entry.record is None:
            raise
    return open_checkpoint(location.snapshot())  # the run has deleted the step, and may have saved a new one


def open_at(location: Location) -> CheckpointSource:
    """Open the checkpoint at a location returned by :func:`find_checkpoint`."""
    if has_record(location):
        return NativeCheckpoint(location)
    return recognise(location) or NativeCheckpoint(location)  # without a commit record, the latter raises an error


def shares_of(progress: Progress, entries: Sequence[StepEntry]) -> Iterator[Share]:
    """Divide a call's progress among the checkpoints to read: yield a share for each, proportional to its size."""
    sizes = [0 if progress is NULL else _nbytes(entry) for entry in entries]
    progress.expect(sum(sizes))
    for size in sizes:
        yield Share(progress, size)


def _nbytes(entry: StepEntry) -> int:
    if entry.record is not None:
        return entry.record.nbytes
    try:
        return open_at(entry.location).nbytes
    except HoldfastError:
        return 0  # the same error is raised later, when the checkpoint is read


def described_steps(location: Location) -> FoundSteps:
    """Return another library's steps, with commit records that managers can use; return no steps for a holdfast run."""
    steps = find_steps(location)
    if steps.is_native:
        return FoundSteps()
    described = parallel_map(_described, steps.entries, max_concurrency(location))
    return steps._replace(entries=tuple(entry for entry in described if entry is not None))


def _described(entry: StepEntry) -> StepEntry | None:
    try:
        source = open_at(entry.location)
        record = CheckpointRecord(
            items={name: ItemRecord(name, kind, {}) for name, kind in source.items.items()},
            time=source.time or 0.0,
            step=entry.step,
            reason=source.reason,
            metrics=source.metrics,
            custom_metadata=source.custom_metadata,
        )
    except DamagedCheckpointError as error:
        return entry._replace(error=error)
    except CheckpointNotFoundError:  # the run has deleted the step in the meantime
        return None
    return entry._replace(record=record)
