"""Finds the checkpoint or the directory of steps that a path refers to, written by holdfast or another library.

All interfaces list a directory with :func:`find_steps`, which returns the steps that holdfast wrote or, if there are
none, the steps of another library. ``engine/steps.py`` defines the rules for holdfast's steps. In other formats, the
format module groups the steps; the newest is the step that the writer recorded as the newest, or else the highest.

To add another library's format, write a module in ``integrations/formats`` and add a line to the table ``_FORMATS``
below, which is the only code in the engine that names packages built on the engine. The module is imported only when a
name in a directory matches one of its patterns, and must import its libraries (tensorstore, msgpack, a framework)
lazily. It defines two functions, which take a location and the names or entries directly inside it (none for a file):

- ``recognise(location, names)`` returns the opened :class:`CheckpointSource`, or None if the location is not a
  checkpoint of this format, and raises DamagedCheckpointError for a damaged checkpoint;
- ``recognise_steps(location, entries)`` returns :class:`FoundSteps`; it is required if the format has runs with steps.
"""

from __future__ import annotations

import fnmatch
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    OptionError,
    shortened,
    shortened_steps,
)
from ..format import ARCHIVE, RECORD, is_our_archive
from ..steps import (
    StepEntry,
    has_record,
    list_steps,
    newest_step,
    prefix_of,
    read_record,
    step_folders,
    stored_metadata,
)
from ..storage import DataReader, Location

if TYPE_CHECKING:
    from .protocol import CheckpointSource

_logger = logging.getLogger("holdfast")

NATIVE = "holdfast"  # format name of holdfast's own checkpoints


class FoundSteps(NamedTuple):
    """The steps in a directory, written by holdfast or another library."""

    format: str = ""  # name of the library that wrote the steps; ``""`` if there are none
    entries: tuple[StepEntry, ...] = ()  # all steps, including damaged ones, sorted by series and step
    noted: StepEntry | None = None  # the step that the writer recorded as the newest, or None
    metadata: Callable[[], Mapping[str, Any] | None] = lambda: None  # a function that reads the run's metadata

    @classmethod
    def of(
        cls,
        format: str,  # noqa: A002
        steps: Mapping[int, Location],
        *,
        noted: int | None = None,
        metadata: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> FoundSteps:
        """Return another library's steps, given their locations and the step that the writer recorded as the newest."""
        entries = {step: StepEntry(step, location) for step, location in sorted(steps.items())}
        return cls(format, tuple(entries.values()), None if noted is None else entries[noted], metadata)

    @property
    def is_native(self) -> bool:
        return self.format == NATIVE

    def newest(self, *, whole: bool = False) -> StepEntry | None:
        """Return the newest step or, if ``whole`` is true, the newest step whose commit record is intact."""
        return self.noted or newest_step(self.entries, whole=whole)

    def step(self, step: int) -> StepEntry | None:
        """Return a step, or None if it does not exist; raise OptionError if it exists in several series."""
        entries = [entry for entry in self.entries if entry.step == step]
        if len(entries) > 1:
            raise OptionError(
                f"{entries[0].location.parent}: step {step} exists more than once "
                f"({shortened(entry.location.name for entry in entries)}); give the path of one of them"
            )
        return entries[0] if entries else None

    def by_step(self) -> dict[int, StepEntry]:
        """Return the entries keyed by step in ascending order; raise OptionError if a step exists in several series."""
        steps = sorted({entry.step for entry in self.entries})
        return {step: entry for step in steps if (entry := self.step(step))}


class _Entry(NamedTuple):
    """A row in the table of formats."""

    module: str  # name of the module in ``integrations/formats``
    inside: tuple[str, ...] = ()  # name patterns: a directory that contains a match may be a checkpoint
    files: tuple[str, ...] = ()  # name patterns: a file that matches may be a checkpoint
    steps: tuple[str, ...] = ()  # name patterns: a directory that contains a match may be a run with steps
    function: str = "recognise"


_FORMATS: tuple[_Entry, ...] = (
    _Entry("tensorflow.checkpoint", inside=("*.index", "saved_model.pb"), files=("*",), steps=("*-[0-9]*.index",)),
    _Entry("orbax.checkpoint", inside=("*",), steps=("*[0-9]",)),
    _Entry("flax", files=("checkpoint", "checkpoint_[0-9]*", "*.msgpack"), steps=("checkpoint_[0-9]*",)),
    _Entry("orbax.tree", inside=("manifest.ocdbt",)),
    _Entry("rllib", inside=("*state.pkl", "*state.msgpack"), steps=("checkpoint_[0-9]*",)),
    _Entry("torch.dcp", inside=(".metadata", "*.distcp")),
    _Entry("safetensors", inside=("*.safetensors", "*.safetensors.index.json"), files=("*",)),
    _Entry("array_files", files=("*.npz", "*.keras", "*.h5", "*.hdf5")),
    _Entry("torch.files", files=("*",), steps=("*.ckpt",)),
    # This function refuses files from TensorFlow versions before 0.12, with an error that names their format.
    _Entry("tensorflow.checkpoint", inside=("checkpoint",), files=("*",), function="refuse_v1"),
)


def recognise(location: Location) -> CheckpointSource | None:
    """Open another library's checkpoint, or return None; raise an error for a part of a holdfast checkpoint."""
    if _is_our_archive(location):
        whole = _part_of(location) or "it is part of one, in a zip file; load the checkpoint that it belongs to"
        raise CheckpointNotFoundError(f"{location}: no checkpoint here; {whole}")
    names = frozenset(entry.name for entry in (location.entries() if location.is_directory() else ()))
    for entry in _FORMATS:
        if _matches(names, entry.inside) if names else _matches((location.name,), entry.files):
            source: CheckpointSource | None = getattr(_module(entry), entry.function)(location, names)
            if source is not None:
                return source
    return None


def _is_our_archive(location: Location) -> bool:
    """Return whether a file begins and ends like a zip file in which holdfast stores an item."""
    if not location.name.endswith(ARCHIVE) or not location.is_there() or location.is_directory():
        return False
    with location.open_data() as file:
        first, last = min(file.size, 64), max(0, file.size - 64)
        return is_our_archive(file.read(0, first).tobytes() + file.read(last, file.size - last).tobytes())


def _matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _module(entry: _Entry) -> ModuleType:
    return importlib.import_module(f"...integrations.formats.{entry.module}", __package__)


def find_steps(location: Location) -> FoundSteps:
    """Return the steps that holdfast wrote to a directory or, if there are none, the steps of another library."""
    if location.exists() and not location.is_directory():
        with location.open_data() as file:
            content = left_by_download(file) or "a file in no supported format; checkpoints are directories"
        raise CheckpointNotFoundError(f"{location}: this is {content}")
    entries = list_steps(location)
    if entries:
        return FoundSteps(NATIVE, tuple(entries), metadata=lambda: stored_metadata(location))
    listed = location.entries() if location.is_directory() else []
    names = [entry.name for entry in listed]
    for entry in _FORMATS:
        if _matches(names, entry.steps):
            steps: FoundSteps = _module(entry).recognise_steps(location, listed)
            if steps.entries:
                return steps
    return FoundSteps()


def left_by_download(file: DataReader) -> str:
    """Describe a file that a failed download left instead of a checkpoint, or return "" for other files."""
    content = file.read(0, min(64, file.size)).tobytes()
    if not content:
        return "an empty file"
    if content.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer instead of the file: fetch the file with `git lfs pull`"
    if content.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "an HTML page, such as an error or login page: download the file again"
    return ""


def check_unclaimed(location: Location, series: str, *, begun: bool) -> bool:
    """Return whether a run has no steps in its directory; raise CheckpointExistsError if only other runs have steps."""
    # If this run has ``begun``, files in another library's format may come from a second callback in the same program,
    # such as Lightning's ModelCheckpoint. Single checkpoints from hf.save or Checkpoint.save do not count as runs.
    all_steps = find_steps(location)
    if all_steps.is_native and any(entry.series == series for entry in all_steps.entries):
        return False
    # Checkpoints from hf.save have no recorded reason, and those from Checkpoint.save are pinned. Neither has a run.
    steps = [
        entry
        for entry in all_steps.entries
        if not all_steps.is_native or entry.record is None or (entry.record.reason and not entry.record.pinned)
    ]
    newest = all_steps.noted or newest_step(steps)
    if newest is None:
        return True
    number = f"{len(steps)} checkpoint{'s' if len(steps) > 1 else ''}"
    if all_steps.is_native:
        raise CheckpointExistsError(
            f"{location} holds {number} with another name, the newest {newest.location.name}; a run that saves "
            f"{series}<step> would not resume from them, but start from 0 next to them. Continue from them with "
            f"{_prefix_option(newest.series)}, or choose another directory (init_from={str(location)!r} of a callback "
            "takes their weights)"
        )
    content = (
        f"{location} holds {number} of {all_steps.format}, the newest {newest.location.name} of step {newest.step}"
    )
    if begun and not newest.location.is_directory():
        _logger.warning("%s, but none of this run, which does not resume from them", content)
        return True
    raise CheckpointExistsError(
        f"{content}; a run here would not resume from them, but start from 0 next to them. To resume from them, "
        f"convert them with `holdfast import {location} NEW` (hf.import_checkpoint) and use NEW as the directory; to "
        f"start a new run, choose another directory (init_from={str(location)!r} of a callback takes their weights)"
    )


def _prefix_option(series: str) -> str:
    prefix = prefix_of(series)
    if prefix is None:
        return "no step_prefix"
    graph = f" (a graph manager: checkpoint_name={prefix[:-1]!r})" if prefix == series else ""
    return f"step_prefix={prefix!r}{graph}"


def find_checkpoint(location: Location, step: int | None = None) -> Location:
    """Return the location of the checkpoint that a path refers to: either the path itself or one of its steps."""
    if step is None or not has_record(location) or _has_steps(location):
        return location if step is None and not is_run(location) else find_step(location, step).location
    recorded = read_record(location).step
    if recorded != step:
        which = "a checkpoint without a number" if recorded is None else f"the checkpoint of step {recorded}"
        raise CheckpointNotFoundError(
            f"{location}: this is {which}, not of step {step}: leave out the step, or give the directory of the run"
        )
    return location


def find_step(location: Location, step: int | None) -> StepEntry:
    steps = find_steps(location)
    entry = steps.newest() if step is None else steps.step(step)
    if entry is not None:
        return entry
    if not location.exists():
        raise CheckpointNotFoundError(f"{location}: there is nothing at this path")
    if steps.entries:
        content = f"it holds the steps {shortened_steps(sorted(entry.step for entry in steps.entries))}"
    else:
        nothing = f"it has no {RECORD} and no steps, and no checkpoint of a supported library was found"
        content = _part_of(location) or nothing
    missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointNotFoundError(f"{location}: {missing} here; {content}")


def _part_of(location: Location) -> str:
    """Return text that names the checkpoint to which an item or per-process tree belongs, or "" for other paths."""
    item = location.name.partition(".")[0]
    for checkpoint in (location.parent, location.parent.parent):
        if (checkpoint / RECORD).is_there():
            return f"it is part of the checkpoint {checkpoint}; load that with item={item!r} to get this part"
        item = f"{checkpoint.name.partition('.')[0]}/{item}"
    return ""


def is_run(location: Location) -> bool:
    """Return whether a path could be a directory of steps; False if it is itself a checkpoint (in any format)."""
    return not has_record(location) and not is_foreign(location)


def is_foreign(location: Location) -> bool:
    """Return whether a path is another library's checkpoint, even a damaged one, and not a holdfast checkpoint."""
    if is_ours(location):
        return False
    try:
        return recognise(location) is not None
    except DamagedCheckpointError:
        return True


def is_ours(location: Location) -> bool:
    """Return whether a path contains a checkpoint or step written by holdfast, possibly among other files."""
    return has_record(location) or (location.is_directory() and _has_steps(location))


def _has_steps(location: Location) -> bool:
    return any(has_record(folder.location) for folder in step_folders(location, padded=True))
