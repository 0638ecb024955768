"""Which checkpoints a path stands for: one of our own or of another library, or those of a directory of steps.

All interfaces see a directory through :func:`find_steps`: the steps that holdfast wrote, or else those that another
library wrote, and which of them is the newest. The rules for our own are those of ``engine/steps.py``; of another
library, the format decides which steps belong together, and the newest is the one that its writer noted, or else the
highest.

To add a format of another library, write a module in ``integrations/formats`` and add a line to the table ``_FORMATS``
below: the only place where the engine names what is built on it. The module is imported only when a name in a directory
matches one of its patterns; it imports what it needs itself (tensorstore, msgpack, a framework) when it reads. It
defines, for a location and what lies directly inside (nothing for a file):

- ``recognise(location, names)``, which returns the opened :class:`CheckpointSource`; None where there is none of this
  format; and raises DamagedCheckpointError where there is one that is damaged;
- ``recognise_steps(location, entries)``, if runs have steps, which returns :class:`FoundSteps`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from ..arrays import TreeReader, TreeSource, open_folder, read_checked, write_file
from ..clock import UNHEARD, Portion, Progress
from ..distributed import ProcessInfo
from ..errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HoldfastError,
    OptionError,
    UnsupportedLeafError,
    shortened_steps,
)
from ..format import (
    ARCHIVE,
    DOCUMENT_LIMIT,
    OWN_FOLDER,
    RECORD,
    CheckpointRecord,
    FileRecord,
    ItemRecord,
    decode_document,
    encode_document,
)
from ..handlers import (
    DEFAULT_REGISTRY,
    Files,
    JsonCheckpointHandler,
    PreparedItem,
    PyTreeCheckpointHandler,
    SizedItem,
    restore_external,
)
from ..pytree import EXTERNAL, Patterns
from ..steps import (
    StepEntry,
    has_changed,
    has_record,
    list_steps,
    newest_step,
    read_again,
    read_record,
    step_folders,
    stored_metadata,
)
from ..storage import Location, max_concurrency, parallel_map
from .protocol import JSON, NATIVE, TREE, CheckpointSource, FoundSteps

_logger = logging.getLogger("holdfast")

T = TypeVar("T")


class _Entry(NamedTuple):
    """A line of the table of formats."""

    module: str  # below ``integrations/formats``
    inside: tuple[str, ...] = ()  # patterns of names; a directory that holds one of them may be a checkpoint
    files: tuple[str, ...] = ()  # patterns of names; a file with such a name may be a checkpoint
    steps: tuple[str, ...] = ()  # patterns of names; a directory that holds one of them may be a run with steps
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
    # The error about files that only TensorFlow before 0.12 reads names their format.
    _Entry("tensorflow.checkpoint", inside=("checkpoint",), files=("*",), function="refuse_v1"),
)


def recognise(location: Location) -> CheckpointSource | None:
    """Open a checkpoint of another library; return None where there is none."""
    names = _names(location)
    for entry in _FORMATS:
        if _matches(names, entry.inside) if names else _matches((location.name,), entry.files):
            found: CheckpointSource | None = getattr(_module(entry), entry.function)(location, names)
            if found is not None:
                return found
    return None


def _recognise_steps(location: Location) -> FoundSteps:
    """Find the steps in a directory of another library's run."""
    entries = location.entries() if location.is_directory() else []
    for entry in _FORMATS:
        if _matches((one.name for one in entries), entry.steps):
            found: FoundSteps = _module(entry).recognise_steps(location, entries)
            if found.entries:
                return found
    return FoundSteps()


def _names(location: Location) -> frozenset[str]:
    return frozenset(entry.name for entry in (location.entries() if location.is_directory() else ()))


def _matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _module(entry: _Entry) -> ModuleType:
    return importlib.import_module(f"...integrations.formats.{entry.module}", __package__)


def find_steps(location: Location) -> FoundSteps:
    """Return the steps of a directory: our own, or else those of another library."""
    if location.exists() and not location.is_directory():
        raise CheckpointNotFoundError(f"{location}: this is a file; checkpoints are directories")
    entries = list_steps(location)
    if entries:
        return FoundSteps(NativeCheckpoint.format, tuple(entries), metadata=lambda: stored_metadata(location))
    return _recognise_steps(location)


def described_steps(location: Location) -> FoundSteps:
    """Return the steps of another library with records of their times, metrics and items, for a manager."""
    found = find_steps(location)
    if found.is_native:
        return FoundSteps()
    described = parallel_map(_described, found.entries, max_concurrency(location))
    return replace(found, entries=tuple(entry for entry in described if entry is not None))


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
        return replace(entry, error=error)
    except CheckpointNotFoundError:  # the run has deleted the step meanwhile
        return None
    return replace(entry, record=record)


def check_unclaimed(location: Location, series: str, *, begun: bool) -> None:
    """Refuse a directory that holds the steps of another run, and none of the run that is about to begin in it.

    ``begun`` says that a run of holdfast has begun here before: then files may come from a callback beside it, such as
    Lightning's ModelCheckpoint, which share no name with its steps. Single checkpoints, as ``hf.save``
    and the ``Checkpoint.save`` of a graph write them, are no run.
    """
    found = find_steps(location)
    steps = [one for one in found.entries if not found.is_native or one.record is None or _is_of_a_run(one.record)]
    newest = found.noted or newest_step(steps)
    if newest is None:
        return
    number = f"{len(steps)} checkpoint{'s' if len(steps) > 1 else ''}"
    if found.is_native:
        raise CheckpointExistsError(
            f"{location} holds {number} of another name, the newest {newest.location.name}; a run that saves "
            f"{series}<step> would not resume from them, and start from 0 beside them. Go on from them with "
            f"{_prefix_option(newest.series)}, or choose another directory (init_from={str(location)!r} of a callback "
            "takes their weights)"
        )
    what = f"{location} holds {number} of {found.format}, the newest {newest.location.name} of step {newest.step}"
    if begun and not newest.location.is_directory():
        _logger.warning("%s, and none of this run, which does not resume from them", what)
        return
    raise CheckpointExistsError(
        f"{what}; a run here would not resume from them, and start from 0 beside them. To resume from them, convert "
        f"them with `holdfast import {location} NEW` (hf.import_checkpoint) and give NEW as the directory; to begin "
        f"another run, choose another directory (init_from={str(location)!r} of a callback takes their weights)"
    )


def _is_of_a_run(record: CheckpointRecord) -> bool:
    return bool(record.reason) and not record.pinned  # hf.save gives no reason; Checkpoint.save keeps its own for good


def _prefix_option(series: str) -> str:
    if not series:
        return "no step_prefix"
    prefix = series.removesuffix("_") if series.endswith("_") else series
    graph = f" (a graph manager: checkpoint_name={prefix[:-1]!r})" if prefix == series else ""
    return f"step_prefix={prefix!r}{graph}"


def find_checkpoint(location: Location, step: int | None = None) -> Location:
    """Return the location of the checkpoint that a path stands for: its own, or that of one of its steps."""
    return location if step is None and not is_run(location) else _find_step(location, step).location


def read_checkpoint(location: Location, read: Callable[[CheckpointSource], T], step: int | None = None) -> T:
    """Open the checkpoint that a path stands for and read it; where a run replaces or deletes it meanwhile, again."""

    def look() -> CheckpointSource:
        if step is None:
            with contextlib.suppress(CheckpointNotFoundError):
                return NativeCheckpoint(location)
        return open_checkpoint(location.snapshot(), step)

    return read_again(location, look, read, methodcaller("has_changed"))


def open_checkpoint(location: Location, step: int | None = None) -> CheckpointSource:
    """Open the checkpoint that a path stands for."""
    if step is None:
        if has_record(location):
            return NativeCheckpoint(location)
        if location.name.endswith(ARCHIVE) and has_record(location.parent):
            raise CheckpointNotFoundError(f"{location}: no checkpoint here; {_as_part(location)}")
        if not is_ours(location) and (found := recognise(location)) is not None:
            return found
    entry = _find_step(location, step)
    if entry.error is not None:
        raise entry.error
    try:
        return open_at(entry.location)
    except CheckpointNotFoundError:
        if step is not None or entry.record is None:
            raise
    return open_checkpoint(location.snapshot())  # the run has deleted the step meanwhile; it may have saved a new one


def _find_step(location: Location, step: int | None) -> StepEntry:
    steps = find_steps(location)
    entry = steps.newest() if step is None else steps.step(step)
    if entry is not None:
        return entry
    if not location.exists():
        raise CheckpointNotFoundError(f"{location}: there is nothing at this path")
    known = f"it has no {RECORD} and no steps, and no checkpoint of a supported library was found"
    if steps.entries:
        known = f"it holds the steps {shortened_steps(sorted(one.step for one in steps.entries))}"
    elif (location.parent / RECORD).is_there():
        known = _as_part(location)
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointNotFoundError(f"{location}: {wanted} here; {known}")


def _as_part(location: Location) -> str:
    item = location.name.partition(".")[0]
    return f"it is a part of the checkpoint {location.parent}; load that, with item={item!r} for this part"


def open_at(location: Location) -> CheckpointSource:
    """Open the checkpoint at a location that :func:`find_checkpoint` returned."""
    if has_record(location):
        return NativeCheckpoint(location)
    return recognise(location) or NativeCheckpoint(location)  # the latter raises what is missing


def portions_of(progress: Progress, entries: Sequence[StepEntry]) -> Iterator[Portion]:
    """Yield the part that each of some checkpoints has in a call that reads all of them, by the bytes of its files."""
    sizes = [0 if progress is UNHEARD else _nbytes(entry) for entry in entries]
    progress.expect(sum(sizes))
    for size in sizes:
        yield Portion(progress, size)


def _nbytes(entry: StepEntry) -> int:
    if entry.record is not None:
        return entry.record.nbytes
    try:
        return open_at(entry.location).nbytes
    except HoldfastError:
        return 0  # it cannot be read, and the call itself raises why


def is_run(location: Location) -> bool:
    """Whether to search a path for steps: no checkpoint lies right here, or steps of ours do."""
    return not has_record(location) and not is_foreign(location)


def is_foreign(location: Location) -> bool:
    """Whether a checkpoint of another library lies here, damaged or not; never where holdfast wrote steps."""
    if is_ours(location):
        return False
    try:
        return recognise(location) is not None
    except DamagedCheckpointError:
        return True


def is_ours(location: Location) -> bool:
    """Whether holdfast wrote a checkpoint or a step here; other files may lie beside them."""
    if has_record(location):
        return True
    if not location.is_directory():
        return False
    return any(has_record(folder.location) for folder in step_folders(location))


# ---- checkpoints of our own


GRAPH = "graph.json"  # name of the file, beside the tree's own, with the objects and the edges between them
KIND = "graph"  # the kind of the document


class PreparedGraph:
    """A tree that is about to be written, its document, and what this process has of its own."""

    def __init__(self, tree: PreparedItem, document: Any, own: PreparedItem | None = None) -> None:
        self._tree = tree
        self._own = own
        self._files: dict[str, FileRecord] = {}
        try:
            self._document = encode_document(KIND, document)
        except ValueError as error:
            raise UnsupportedLeafError(f"this graph cannot be described: {error}; nothing was written") from error

    def estimate_bytes(self) -> int | None:
        size = self._tree.estimate_bytes() if isinstance(self._tree, SizedItem) and self._own is None else None
        return None if size is None else size + len(self._document)

    def write(self, folder: Location, member: ProcessInfo) -> bytes:
        if member.index == 0:
            self._files[GRAPH] = write_file(folder / GRAPH, self._document)
        fragment = self._tree.write(folder, member)
        if self._own is None:
            return fragment
        place = folder / OWN_FOLDER
        place.make_directory()
        return json.dumps([self._own.write(place, member).hex(), fragment.hex()]).encode()

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        own: Files = {}
        if self._own is not None:
            pairs = [[bytes.fromhex(part) for part in json.loads(fragment)] for fragment in fragments]
            shares, fragments = zip(*pairs, strict=True)
            files = self._own.merge(folder / OWN_FOLDER, shares)
            own = {f"{OWN_FOLDER}/{path}": known for path, known in files.items()}
        return {**self._tree.merge(folder, fragments), **own, **self._files}


class NativeTree(TreeReader):
    """A tree that holdfast wrote, with the document of its objects where it was saved as a graph."""

    def __init__(self, location: Location, files: Files | None = None, select: Patterns | None = None) -> None:
        super().__init__(location, files, select=select)

    def graph_document(self) -> Any:
        known = self.files.get(GRAPH)
        if known is None:
            return None
        place = self.location / GRAPH
        return decode_document(read_checked(place, known, limit=DOCUMENT_LIMIT), KIND, source=str(place))


class NativeCheckpoint(CheckpointSource):
    """A checkpoint that holdfast committed."""

    format = NATIVE

    def __init__(self, location: Location) -> None:
        self.location = location
        self.record: CheckpointRecord = read_record(location)
        self.parts = self.record.parts()  # an item with a share of each process is one part for each
        self.items = {name: item.kind for name, item in self.parts.items()}
        self.step = self.record.step
        self.reason = self.record.reason
        self._opened: dict[str, tuple[Location, Files]] = {}

    @property
    def time(self) -> float | None:
        return self.record.time

    @property
    def metrics(self) -> Mapping[str, Any] | None:
        return self.record.metrics

    @property
    def custom_metadata(self) -> Mapping[str, Any] | None:
        return self.record.custom_metadata

    @property
    def nbytes(self) -> int:
        return self.record.nbytes

    def has_changed(self) -> bool:
        return has_changed(self.location, self.record)

    def files(self, item: str) -> Mapping[str, FileRecord]:
        return self._open(item)[1]

    def _open(self, item: str) -> tuple[Location, Files]:
        """Return the folder of an item and its files; one that is a zip file is read once."""
        if item not in self._opened:
            saved = self.parts[item]
            folder, files = open_folder(self.location / saved.folder, saved.files)
            self._opened[item] = folder, files or {}
        return self._opened[item]

    def tree(self, item: str) -> TreeSource:
        return self.selected_tree(item, None)

    def selected_tree(self, item: str, select: Patterns | None) -> TreeSource:
        return NativeTree(*self._open(item), select)

    def value(self, item: str) -> Any:
        if self.parts[item].kind != JSON:
            raise OptionError(
                f"{self.location}: item {item!r} was written by a handler of your own; restore it with that handler "
                "(Checkpointer(handler).restore, or a CheckpointManager)"
            )
        folder, files = self._open(item)
        return JsonCheckpointHandler().restore(folder, files=files)

    def load(self, item: str, like: Any = None, select: Patterns | None = None) -> Any:
        if self.parts[item].kind != TREE:
            return super().load(item, like, select)
        kwargs: dict[str, Any] = {} if select is None else {"select": select}
        folder, files = self._open(item)
        return PyTreeCheckpointHandler().restore(folder, like, files=files, **kwargs)

    def complete(self, item: str, source: TreeSource, tree: Any) -> Any:
        numbers = source.numbers if isinstance(source, TreeReader) else range(len(source.leaves))
        pairs = zip(source.leaves, numbers, strict=True)
        kept = {leaf.name: number for leaf, number in pairs if leaf.saved.kind == EXTERNAL}
        return restore_external(tree, source.location, self.files(item), kept, DEFAULT_REGISTRY, {}) if kept else tree

    def items_to_load(self) -> list[str]:
        return list(self.items)
