"""Import other libraries' checkpoints into holdfast's format, and export checkpoints to other libraries' formats."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from numpy.typing import NDArray

from ...engine.arrays import HostTree, Layout, PartialTree, SavedLeaf, TreeSource, TreeWriter, batches, make_durable
from ...engine.checkpoint import ItemToSave, Save, deleted_on_interrupt
from ...engine.clock import SystemClock
from ...engine.distributed import Coordinator, ProcessInfo, run_on_primary
from ...engine.errors import CheckpointExistsError, DamagedCheckpointError, OptionError, UnsupportedLeafError, itemized
from ...engine.format import ITEM, CheckpointRecord
from ...engine.handlers import JsonCheckpointHandler, PreparedGraph, PreparedItem, PyTreeCheckpointHandler
from ...engine.manager import best_step_in
from ...engine.progress import NULL, Progress, Share
from ...engine.pytree import (
    EXTERNAL,
    NAME_ONLY,
    ArrayLeaf,
    Box,
    Patterns,
    Piece,
    TreeDef,
    ValueLeaf,
    format_path,
    whole,
)
from ...engine.sources import (
    JSON,
    METRICS,
    OPTIONAL,
    TREE,
    CheckpointSource,
    FoundSteps,
    NativeCheckpoint,
    find_checkpoint,
    find_steps,
    is_foreign,
    open_at,
    rooted,
    selected,
    shares_of,
    tree_to_convert,
    without_placeholders,
    without_unreadable,
)
from ...engine.steps import StepEntry, store_metadata
from ...engine.storage import Location, Place, as_location

ExportFormat = Literal["safetensors", "orbax", "torch", "dcp"]

_DIRECTORIES = {"orbax": "Orbax", "dcp": "torch.distributed.checkpoint"}  # export formats that write a directory
_SUFFIXES: dict[str, ExportFormat] = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".ckpt": "torch"}

_logger = logging.getLogger("holdfast")

_BATCH = 32 << 20  # bytes of leaf data read per batch
_KEPT = 8  # maximum number of cached batches: one per writer thread
_LARGE_BATCH = 256 << 20  # bytes of leaf data read per batch if the caller keeps all batches in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The result of converting one checkpoint.

    Attributes:
        source: The location of the original checkpoint.
        path: The location of the result.
        format: The library that wrote the source (imports) or that reads the result (exports).
        step: The step of the checkpoint, if it has one.
        leaves: The number of leaves with data in all trees, not counting None leaves that may be empty containers.
        bytes: The total size of the arrays in bytes.
        left_out: One line for each source leaf that is missing from the result, with the reason.
    """

    source: str
    path: str
    format: str
    step: int | None
    leaves: int
    bytes: int
    left_out: tuple[str, ...]


def import_checkpoint(
    source: Place,
    destination: Place,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    coordinator: Coordinator | None = None,
) -> list[Conversion]:
    """Convert another library's checkpoints to holdfast's format atomically, with checksums, and verify the result.

    A directory of steps becomes a directory of steps, with the metadata of the run and the metrics, times, and custom
    metadata of each step; any other source becomes a single checkpoint. Items keep their names, with one exception: if
    an Orbax manager saved a single item, ``default``, it is renamed to ``state``, so that managers and callbacks can
    resume from it. Only some of the arrays are held in memory at a time.

    If all processes of a multi-process program call this function, process 0 does the work and the others wait.

    Args:
        source: An Orbax, safetensors, torch, Lightning, torch.distributed.checkpoint, Flax, TensorFlow, Keras, numpy
            or RLlib checkpoint, or a directory of steps.
        destination: A path or URL that does not exist.
        overwrite: Replace an existing checkpoint, or existing steps with the same numbers.
        progress: Receives the total size of the sources in bytes, and then progress updates.
        coordinator: Connects the processes. None uses jax.distributed or torch.distributed if one of them is
            initialized; ``hf.processes.Alone()`` converts in this process alone.

    Returns:
        One entry for each checkpoint, in step order.

    Raises:
        CheckpointNotFoundError: The source contains no checkpoint from a supported library.
        CheckpointExistsError: The destination exists.
        DamagedCheckpointError: The source is damaged, or the result fails verification. Steps finished before the
            error are kept. (Ctrl-C, in contrast, deletes them, so that the call can be repeated.)
        UnsupportedLeafError: None of the source's arrays can be read.
        OptionError: The source is already a holdfast checkpoint.
        PeerFailedError: Process 0 failed; raised in the other processes.
    """
    origin, target = as_location(source), as_location(destination, writes=True)
    about = [origin.url, target.url, overwrite]

    def work() -> list[Conversion]:
        if not overwrite and (target.exists() and (not target.is_directory() or target.entries())):
            raise CheckpointExistsError(f"{target} exists already; choose another path, or pass overwrite=True")
        location = origin.without_links()  # resolve links now, so that a later change cannot mix two checkpoints
        foreign = is_foreign(location)
        found_steps = FoundSteps() if foreign or not location.is_directory() else find_steps(location)
        steps = {target / str(step): entry for step, entry in found_steps.by_step().items()}
        entries = steps or {target: StepEntry(0, location if foreign else find_checkpoint(location))}
        shares = shares_of(progress or NULL, [*entries.values()])
        done: list[Conversion] = []
        made: list[Location] = []
        with deleted_on_interrupt(target, made):
            for (result, entry), share in zip(entries.items(), shares, strict=True):
                if not overwrite:  # with overwrite, Ctrl-C must not delete the earlier checkpoint
                    made.append(result)
                step = entry.step if steps else None
                done.append(_import(open_at(entry.location), result, step, overwrite, share))
            if steps:
                store_metadata(target, found_steps.metadata())
        return done

    return _once("import_checkpoint", about, work, coordinator)


def format_of(name: str) -> ExportFormat | None:
    """Return the export format for the suffix of a file name; None if the suffix is unknown."""
    return _SUFFIXES.get(os.path.splitext(name)[1].lower())


def check_suffix(name: str) -> ExportFormat:
    """Return the export format for the suffix of a file name; raise OptionError if the suffix is unknown."""
    if (export_format := format_of(name)) is None:
        raise OptionError(
            f"{name}: the name does not determine the format: use one of {', '.join(_SUFFIXES)}, or --to orbax "
            "or --to dcp for a directory; with --to, the file may have any name"
        )
    return export_format


def export_checkpoint(
    source: Place,
    destination: Place,
    to: ExportFormat,
    *,
    step: int | Literal["best"] | None = None,
    item: str | None = None,
    select: Patterns | None = None,
    root: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    coordinator: Coordinator | None = None,
) -> list[Conversion]:
    """Write a checkpoint in another library's format.

    If all processes of a multi-process program call this function, process 0 does the work and the others wait.

    Args:
        source: A checkpoint of holdfast or another library, or a directory of steps.
        destination: A file for safetensors and torch, a directory for Orbax and DCP. It must not exist.
        to: ``"safetensors"`` writes one file, in which each name consists of the keys of a leaf's path, joined by dots.
            ``"torch"`` writes one file for ``torch.load(path, weights_only=True)``; it needs torch. ``"orbax"`` writes
            a directory for orbax-checkpoint, with all steps unless one is given. ``"dcp"`` writes a directory for
            torch.distributed.checkpoint, which can load it with or without sharding; it needs torch and a local disk,
            holds at most two arrays (or 256 MiB) in memory, and verifies the result.
        step: The step to export from a directory of steps: a number, or ``"best"`` as ranked by the run's ``best_fn``.
            None exports the newest step or, for Orbax, all steps.
        item: The item to export if there are several trees. None exports ``"state"`` if present; for Orbax, all items.
        select: Patterns of leaf paths, as for :func:`~holdfast.load`; only matching leaves are written.
        root: Write only the contents of this container, such as ``"model"``. Names and patterns are then relative to
            it, as the ``from_pretrained`` functions of other libraries expect. Not supported for Orbax.
        overwrite: Replace an existing file; not supported for directories.
        progress: Receives the total size of the sources in bytes, and then progress updates.
        coordinator: Connects the processes, as for :func:`import_checkpoint`.

    Returns:
        One entry for each exported checkpoint.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint, step, or item.
        CheckpointExistsError: The destination exists.
        UnsupportedLeafError: The format cannot store some leaves; the error lists them all, and nothing is written.
        OptionError: The format is unknown, ``root`` does not exist, the checkpoint has several trees but ``item`` is
            None, or the step is ``"best"`` but the run does not rank its checkpoints by a metric.
        DamagedCheckpointError: The source fails verification.
        PeerFailedError: Process 0 failed; raised in the other processes.
    """
    if to not in get_args(ExportFormat):
        raise OptionError(f"to={to!r} is not one of {', '.join(map(repr, get_args(ExportFormat)))}")
    if to in _DIRECTORIES and overwrite:
        raise OptionError(
            f"overwrite= does not apply to {_DIRECTORIES[to]}: remove the destination, or choose another path"
        )
    if to == "orbax" and root is not None:
        raise OptionError("root= does not apply to Orbax, which restores the whole tree: leave it out")
    origin, target = as_location(source), as_location(destination, writes=True)
    if format_of(target.name) not in (to, None):
        raise OptionError(f"to={to!r} does not fit {target}: other programs read a file of this name as another format")

    def work() -> list[Conversion]:
        chosen = best_step_in(origin) if step == "best" else step
        if to == "orbax":
            from .orbax.export import export_orbax

            exported = export_orbax(origin, target, chosen, item, select, progress or NULL, _write_arrays)
            done = []
            for original, copy, number, trees in exported:
                left_out = [line for tree in trees for line in tree.left_out]
                done.append(_conversion(original, copy, to, number, trees, left_out))
            return done
        checkpoint = open_at(find_checkpoint(origin, chosen).without_links())
        # Prefer the state item, because callbacks save extras in other items.
        named = ITEM if item is None and checkpoint.items.get(ITEM) == TREE else item
        inside = rooted(tree_to_convert(checkpoint, checkpoint.only_tree(named)), root)
        tree, left_out = without_placeholders(selected(inside, select))
        left_out += tree.left_out
        _write_file(tree, target, to, overwrite, progress or NULL)
        return [_conversion(checkpoint, target, to, checkpoint.step if chosen is None else chosen, [tree], left_out)]

    patterns = [select] if isinstance(select, str) or select is None else list(select)
    about = [origin.url, target.url, to, step, item, patterns, root, overwrite]
    return _once("export_checkpoint", about, work, coordinator)


def _once(
    name: str, about: list[Any], work: Callable[[], list[Conversion]], coordinator: Coordinator | None
) -> list[Conversion]:
    conversions = run_on_primary(name, about, lambda: [asdict(done) for done in work()], coordinator)
    return [Conversion(**{**fields, "left_out": tuple(fields["left_out"])}) for fields in conversions]


def _write_file(tree: TreeSource, target: Location, to: ExportFormat, overwrite: bool, progress: Progress) -> None:
    if external := [format_path(leaf.name) for leaf in tree.leaves if leaf.saved.kind == EXTERNAL]:
        raise UnsupportedLeafError(
            f"{tree.location}: {', '.join(external[:8])} cannot be exported: only their handlers read these leaves; "
            "leave them out of the tree. Nothing was written"
        )
    tree.check_readable(tree.leaves)  # without this check, an unreadable leaf would be written as a description
    nbytes = sum(leaf.nbytes for leaf in tree.leaves)
    progress.expect(nbytes)
    with Share(progress, nbytes, nbytes) as share:
        source = _InBatches(tree, share.advance)
        if to == "dcp":
            from .torch.dcp import export_dcp

            export_dcp(source, target)
        elif to == "torch":
            from .torch.files import export_torch

            export_torch(source, target, overwrite=overwrite)
        else:
            from .safetensors import export_safetensors

            export_safetensors(source, target, overwrite=overwrite)


class _InBatches(PartialTree):
    """A tree source that reads leaves in batches and reports progress after each batch."""

    def __init__(self, source: TreeSource, advance: Callable[[int], None]) -> None:
        super().__init__(source, {leaf.name: leaf for leaf in source.leaves}, source.tree)
        self._advance = advance

    def read_leaves(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        arrays = []
        for batch in batches(leaves, lambda leaf: leaf.nbytes, _LARGE_BATCH):
            arrays += super().read_leaves(batch)
            self._advance(sum(leaf.nbytes for leaf in batch))
        return arrays


def _import(
    checkpoint: CheckpointSource, target: Location, step: int | None, overwrite: bool, share: Share
) -> Conversion:
    if isinstance(checkpoint, NativeCheckpoint):
        raise OptionError(f"{checkpoint.location} is already a holdfast checkpoint; copy the directory")
    items: dict[str, ItemToSave] = {}
    trees: list[TreeSource] = []
    left_out: list[str] = []
    for name, item_kind in checkpoint.items.items():
        # An unnamed item gets the name that managers and callbacks expect.
        item = ITEM if name == checkpoint.unnamed and ITEM not in checkpoint.items else name
        if item_kind == TREE:
            tree = tree_to_convert(checkpoint, name)
            left_out += tree.left_out
            for without in (without_placeholders, without_unreadable):
                tree, lines = without(tree)
                left_out += lines
            trees.append(tree)
            items[item] = ItemToSave(TreeSourceHandler(share.advance), trees[-1])
        elif item_kind == JSON:
            items[item] = ItemToSave(JsonCheckpointHandler(), checkpoint.value(name))
        elif item_kind != METRICS:
            left_out.append(f"{name} (an item of kind {item_kind}, which holdfast does not read)")
    if not items:
        raise OptionError(f"{checkpoint.location}: none of its items can be read: {', '.join(left_out)}")
    save = Save(target, items, overwrite=overwrite)
    with share:
        # Count every byte twice: it is read from the source and, for verification, from the result.
        share.expect(2 * sum(leaf.nbytes for tree in trees for leaf in tree.leaves))
        with save.completing():
            record = CheckpointRecord(
                items=save.write() or {},
                time=SystemClock().now() if checkpoint.time is None else checkpoint.time,
                step=step,
                reason=f"imported from {checkpoint.format}",
                metrics=checkpoint.metrics,
                custom_metadata=checkpoint.custom_metadata,
            )
            save.commit(record)
        written = NativeCheckpoint(target)
        names = [name for name, item_kind in written.items.items() if item_kind == TREE]
        found = [(name, problem) for name in names for problem in written.tree(name).verify(share.advance)]
        if problems := [f"{name}: {problem.leaf or problem.file}: {problem.what}" for name, problem in found]:
            raise DamagedCheckpointError(itemized(f"{target} does not read back as written:", problems))
    return _conversion(checkpoint, target, checkpoint.format, step, trees, left_out)


def _conversion(
    checkpoint: CheckpointSource,
    target: Location,
    format_: str,
    step: int | None,
    trees: Sequence[TreeSource],
    left_out: Sequence[str],
) -> Conversion:
    """Describe a finished conversion, and warn about the leaves that it left out."""
    for line in left_out:
        _logger.warning("%s: left out: %s", checkpoint.location, line)
    # Don't count leaves that the result may lack: leaves without data, and None leaves that may be empty containers.
    all_leaves = (leaf for tree in trees for leaf in tree.leaves)
    leaves = [leaf for leaf in all_leaves if leaf.saved.kind not in NAME_ONLY and OPTIONAL not in leaf.saved.details]
    return Conversion(
        source=str(checkpoint.location),
        path=str(target),
        format=format_,
        step=step,
        leaves=len(leaves),
        bytes=sum(leaf.nbytes for leaf in leaves),
        left_out=tuple(left_out),
    )


def _write_arrays(
    folder: Location, source: TreeSource, arrays: Mapping[str, SavedLeaf], advance: Callable[[int], None]
) -> None:
    """Write the leaves in ``arrays`` under the names given by the keys, and wait until the files are durable."""
    stored = PartialTree(source, arrays, source.tree)
    loader = _Loader(stored, advance)
    writer = TreeWriter(HostTree(list(arrays), [_host_leaf(leaf, loader) for leaf in stored.leaves], None), Layout())
    make_durable(folder, writer.merge(folder, [writer.write(folder, ProcessInfo())], describes=False))


class TreeSourceHandler(PyTreeCheckpointHandler):
    """Saves the leaves of a `TreeSource`, holding only a few batches in memory at a time."""

    def __init__(self, advance: Callable[[int], None] = NULL.advance) -> None:
        super().__init__()
        self._advance = advance

    def prepare(self, item: Any, *, snapshot: bool, **kwargs: Any) -> PreparedItem:
        source: TreeSource = item
        source.read_leaves([leaf for leaf in source.leaves if leaf.saved.dtype is None])
        loader = _Loader(source, self._advance)
        # Save a leaf that may be either None or an empty container as an empty container. Such a leaf is usually an
        # empty optimizer state, which a template represents as a container.
        kept = [OPTIONAL not in leaf.saved.details for leaf in source.leaves]
        leaves = [leaf for leaf, stays in zip(source.leaves, kept, strict=True) if stays]
        structure = source.tree.structure
        if structure is not None and not all(kept):
            structure = _with_empties(structure, iter(kept))
        tree = HostTree([leaf.name for leaf in leaves], [_host_leaf(leaf, loader) for leaf in leaves], structure)
        writer = TreeWriter(tree, Layout())
        document = source.graph_document()
        return writer if document is None else PreparedGraph(writer, document)


class _Loader:
    """Reads leaves in batches on demand, and caches the last few batches."""

    def __init__(self, source: TreeSource, advance: Callable[[int], None]) -> None:
        self._source = source
        self._advance = advance
        arrays = sorted((leaf for leaf in source.leaves if leaf.saved.dtype is not None), key=lambda leaf: leaf.name)
        self._batches = list(batches(arrays, lambda leaf: leaf.nbytes, _BATCH))
        self._batch_of = {leaf.name: number for number, batch in enumerate(self._batches) for leaf in batch}
        self._loaded: dict[int, dict[str, NDArray[Any]]] = {}
        self._reading = threading.Lock()

    def array(self, name: str) -> NDArray[Any]:
        """Return the array of a leaf. This method is thread-safe: a lock lets only one thread read at a time."""
        number = self._batch_of[name]
        arrays = self._loaded.get(number)
        if arrays is None:
            with self._reading:  # a source may not be thread-safe
                arrays = self._loaded.get(number)
                if arrays is None:
                    batch = self._batches[number]
                    pairs = zip(batch, self._source.read_leaves(batch), strict=True)
                    arrays = self._loaded[number] = {leaf.name: array for leaf, array in pairs if array is not None}
                    self._advance(sum(leaf.nbytes for leaf in batch))
                    if len(self._loaded) > _KEPT:
                        del self._loaded[next(iter(self._loaded))]
        return arrays[name]


@dataclass(frozen=True, slots=True)
class _LaterPiece:
    """A lazy `Piece` that covers a whole array and requests the array from the loader on each access."""

    name: str
    box: Box
    loader: _Loader

    @property
    def start(self) -> tuple[int, ...]:
        return self.box.start

    @property
    def array(self) -> NDArray[Any]:
        return self.loader.array(self.name)


def _with_empties(node: TreeDef, kept: Iterator[bool]) -> TreeDef:
    """Replace each leaf whose flag in ``kept`` is False with an empty dictionary; ``kept`` is in leaf order."""
    empty = TreeDef("dict", [], [], dict)
    parts = [(None if next(kept) else empty) if part is None else _with_empties(part, kept) for part in node.children]
    return TreeDef(node.kind, node.keys, parts, node.build, node.label)


def _host_leaf(leaf: SavedLeaf, loader: _Loader) -> ArrayLeaf | ValueLeaf:
    saved = leaf.saved
    if saved.dtype is None or saved.shape is None:
        return ValueLeaf(saved.details)
    pieces: Sequence[Any] = [_LaterPiece(leaf.name, whole(saved.shape), loader)]
    return ArrayLeaf(saved.dtype, saved.shape, cast("list[Piece]", pieces), False, saved.details)
