"""Handlers for pytrees, and for single arrays, which are stored as trees with a single leaf."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Never

from ..arrays import (
    AggregateHandler,
    HostTree,
    KnownTree,
    Layout,
    MsgpackHandler,
    Snapshot,
    StagingBuffer,
    TreePlan,
    TreeSource,
    TreeWriter,
    WrittenSteps,
)
from ..distributed import ProcessInfo
from ..errors import OptionError, UnsupportedLeafError, shortened
from ..foreign_arguments import refuse_unknown
from ..pytree import (
    Details,
    Flattened,
    FreshTypes,
    LeafRequest,
    Patterns,
    TreeDef,
    check_leaves,
    class_name,
    collection_paused,
    default_pinned_bytes,
    describe,
    describe_template,
    differing_replicas,
    escape_key,
    flatten,
    format_path,
    is_on_several_devices,
    loaded,
    shared_memory,
)
from ..storage import Location
from .args import Leaf, RestoreArgs, SaveArgs, aggregate, broadcast_prefix, cast, leaf_request
from .base import Files, PreparedCheckpointHandler, PreparedFiles, PreparedItem, refuse_arguments
from .registry import DEFAULT_REGISTRY, ExternalLeaves, TypeHandlerRegistry, restore_external

if TYPE_CHECKING:
    from ..arrays import SharedReads

_logger = logging.getLogger("holdfast")


class PyTreeCheckpointHandler(PreparedCheckpointHandler):
    """Saves pytrees whose leaves are arrays from any library, scalars, strings or bytes, or have a type handler.

    Args:
        layout: The sizes of chunks, segments and data files, and the compression of chunks.
        compression: The zstd level for chunks, which overrides ``layout``.
        chunk_bytes: The maximum size of a chunk in bytes, which overrides ``layout``.
        data_file_bytes: The maximum size of a data file in bytes, which overrides ``layout``.
        type_handler_registry: Handlers for leaves of user-defined types; None uses the default registry, to which
            ``register_type_handler`` adds handlers.
        aggregate_handler: The handler that stores leaves saved with ``SaveArgs(aggregate=True)``; None uses msgpack.
        pinned_bytes: The maximum pinned host memory, in bytes, for snapshots of GPU arrays. This memory is reused, and
            GPUs copy to it while the program continues. Saves block until arrays that do not fit have been copied.
            None uses half of the machine's memory, divided by the number of processes on it; 0 disables pinned memory.
        use_ocdbt: Must be true, because arrays are always stored in an OCDBT database. The argument exists only for
            compatibility with Orbax.
    """

    kind = "pytree"
    collective = True
    divides = True
    reuses = True
    verifies = True
    shares_reads = True

    def __init__(
        self,
        *,
        layout: Layout | None = None,
        compression: int | None = None,
        chunk_bytes: int | None = None,
        data_file_bytes: int | None = None,
        type_handler_registry: TypeHandlerRegistry | None = None,
        aggregate_handler: AggregateHandler | None = None,
        pinned_bytes: int | None = None,
        use_ocdbt: bool = True,
        **unknown: Never,
    ) -> None:
        refuse_unknown(type(self).__name__, unknown, PyTreeCheckpointHandler)
        if pinned_bytes is not None and (type(pinned_bytes) is not int or pinned_bytes < 0):
            raise OptionError(f"pinned_bytes={pinned_bytes!r} must be a number of bytes, 0 or more, or None")
        if not use_ocdbt:
            raise OptionError("use_ocdbt=False: holdfast always stores arrays in an OCDBT database; leave it out")
        given = {"compression": compression, "chunk_bytes": chunk_bytes, "data_file_bytes": data_file_bytes}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self.layout: Layout = dataclasses.replace(layout or Layout(), **changes)
        self._registry = DEFAULT_REGISTRY if type_handler_registry is None else type_handler_registry
        self._aggregate = aggregate_handler or MsgpackHandler()
        self._staging = StagingBuffer(default_pinned_bytes() if pinned_bytes is None else pinned_bytes)
        self._last: _LastTree | None = None  # properties of the last tree written
        self._snapshots = 0
        self._ignores_replicas = False  # True if the replicas of jax arrays no longer need to be compared

    @collection_paused()
    def prepare(
        self,
        item: Any,
        *,
        snapshot: bool,
        save_args: Any = None,
        layout: Layout | None = None,
        member: ProcessInfo | None = None,
        reuse: WrittenSteps | None = None,
        fresh: FreshTypes | None = None,
        **kwargs: Any,
    ) -> PreparedItem:
        """Prepare a tree to be written.

        Args:
            item: The tree.
            snapshot: Whether to copy mutable arrays. Immutable arrays, such as jax arrays, are referenced instead.
            save_args: A :class:`~holdfast.SaveArgs` for all leaves, or a prefix of the tree that holds a ``SaveArgs``
                for each leaf or subtree and may omit keys.
            layout: The sizes of chunks, segments and data files; None uses the handler's layout.
            member: The process whose share will be written; the snapshot may omit the data of other processes.
            reuse: The data files of earlier steps, which are reused for unchanged arrays.
            fresh: The leaf types of the run's initial state (see :func:`fresh_types`), for a restore with ``as_saved``.
            **kwargs: Must be empty.

        Returns:
            The prepared tree, which can be written into a folder.

        Raises:
            UnsupportedLeafError: A leaf cannot be saved; the error names every such leaf.
            OptionError: ``save_args`` does not match the tree.
        """
        refuse_arguments(self, kwargs, self.prepare)
        layout, process = layout or self.layout, member or ProcessInfo()
        self._snapshots += snapshot
        flat = None
        if snapshot and self._snapshots.bit_count() == 1 and not self._ignores_replicas and loaded("jax") is not None:
            flat = flatten(item, self._registry.leaf_types)
            self._ignores_replicas = _warn_of_replicas(flat)
        # A run saves similar trees, so cache their common properties unless SaveArgs or type handlers are used.
        recurs = snapshot and save_args is None and not self._registry.leaf_types
        key, last = (layout, process.index, process.count, fresh), self._last
        if recurs and last is not None and last.key == key:
            with self._staging.lock:
                copies = last.tree.snapshot(item)
            if copies is not None:
                tree = HostTree(last.tree.names, copies, last.tree.outline.structure, last.fresh)
                return TreeWriter(tree, layout, plan=last.plan, reuse=reuse)
        flat = flat or flatten(item, self._registry.leaf_types)
        args: list[SaveArgs | None] = [None] * len(flat.names)
        if save_args is not None:
            args = broadcast_prefix(save_args, flat.structure, SaveArgs, "save_args")
        external = ExternalLeaves(self._registry, flat.names, flat.values, args, snapshot=snapshot)
        later = self._staging.pinned_bytes if snapshot and save_args is None else 0
        leaves = _described(flat, external, later)
        if snapshot and self._snapshots == 1:
            _warn_of_shared_memory(flat.names, leaves)
        files: dict[str, bytes] = {}
        if save_args is not None:
            leaves = [
                leaf if arg is None or arg.dtype is None else cast(name, leaf, arg.dtype)
                for name, leaf, arg in zip(flat.names, leaves, args, strict=True)
            ]
            leaves, files = aggregate(flat.names, leaves, args, self._aggregate)
        given = [(name, arg) for name, arg in zip(flat.names, args, strict=True) if arg is not None]
        began = None if fresh is None else fresh.document(flat.names, leaves)
        writer = TreeWriter(
            HostTree(flat.names, leaves, flat.structure, began),
            layout,
            compression={name: arg.compression or None for name, arg in given if arg.compression is not None},
            chunk_bytes={name: arg.chunk_bytes for name, arg in given if arg.chunk_bytes is not None},
            reuse=reuse,
        )
        if snapshot:
            with self._staging.lock:
                copies = writer.take_snapshot(self._staging, process)
                if recurs:
                    last = _LastTree(key, KnownTree(flat, leaves, copies, self._staging), writer.plan, began)
                    writer.when_written = partial(self._keep, last, flat.structure, copies)
        return _PreparedTree(writer, external, files) if files or external.notes else writer

    def _keep(self, last: _LastTree, structure: TreeDef | None, copies: Snapshot) -> None:
        """Cache the properties of a tree for the next save, after the tree has been written."""
        try:
            last.tree.settle(structure, copies)
        except Exception as error:  # not fatal, because the tree has already been written
            _logger.warning("the next save will take as long as the first: its preparation failed: %s", repr(error))
        else:
            self._last = last

    @collection_paused()
    def restore(
        self,
        directory: Location,
        item: Any = None,
        *,
        files: Files | None = None,
        restore_args: Any = None,
        select: Patterns | None = None,
        transforms: Any = None,
        transforms_default_to_original: bool = True,
        torch_tensors: bool = False,
        as_saved: bool | Collection[str] = False,
        entries: Mapping[str, Any] | None = None,
        source: TreeSource | None = None,
        shared: SharedReads | None = None,
        cast: bool = False,
        subset: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Restore a tree.

        Args:
            directory: The item's folder.
            item: The template, which determines the containers, array libraries, dtypes and shardings of the result.
                Leaves that are ``...`` or a bare ``object()`` are restored as saved. The state dict of a torch
                optimizer that has not taken a step receives the saved values. None returns the saved containers with
                numpy arrays.
            files: The folder's files, as listed in the commit record.
            restore_args: A :class:`~holdfast.RestoreArgs` for all leaves, or a prefix of the template (of the saved
                tree if there is no template) that holds a ``RestoreArgs`` for each leaf or subtree and may omit keys.
                These arguments take precedence over the template.
            select: Patterns of paths; only matching leaves are read.
            transforms: Transformations from the saved tree to the template's tree, as for
                :func:`~holdfast.load_transformed`; they require a template.
            transforms_default_to_original: Whether keys that exist in both trees and have no transformation are
                restored from the saved tree instead of the template.
            torch_tensors: Whether a restore without a template returns torch tensors as tensors if the program has
                imported torch. Managers set this, because ``load_state_dict`` requires tensors.
            as_saved: Whether the template is the state with which a resumed run starts. If its types match the recorded
                types of the run's initial state (``fresh`` of :meth:`prepare`), leaves are restored with their saved
                types, and lists and dictionaries that have grown are restored completely; other types are an error. If
                no types were recorded, only the template determines the result. Without a template, jax arrays are
                restored as such if the program has imported jax; a list of root keys limits this to leaves below them.
            entries: Templates for some entries of a saved dictionary. A template is ignored if its entry was not saved.
                Entries for which no template is given are restored without one.
            source: A tree saved by another library, which is read instead of the tree in the folder.
            shared: The manager's shared reads, so that data needed by several processes is read only once.
            cast: Whether to cast leaves to the template's dtype if their dtype differs but is of the same kind, as for
                :func:`~holdfast.load`.
            subset: Whether to omit leaves that the template lacks, as for :func:`~holdfast.load`.
            **kwargs: Must be empty.

        Returns:
            The restored tree.

        Raises:
            TreeMismatchError: The template and the checkpoint differ; the error lists every leaf that differs.
            DamagedCheckpointError: The stored data does not match its checksums.
            OptionError: ``transforms`` is given without a template or with ``select``, ``restore_args`` does not match
                the tree, or a leaf requires a type handler that is not registered.
        """
        refuse_arguments(self, kwargs, self.restore)
        # Imported lazily because saving does not require the reading code.
        from ..arrays import TreeReader, load_entries, load_transformed_tree, load_tree, with_optimizer_states

        if transforms is not None and (item is None or item is ... or select is not None):
            raise OptionError("transforms= needs a template (item=) of the new tree, and excludes select=")
        # Open only the selected leaves if there is no template.
        alone = item is None and restore_args is None and not as_saved and source is None
        reader = source or TreeReader(directory, files, aggregate=self._aggregate, select=select if alone else None)
        select = None if alone else select
        external = reader.external()
        if entries is not None:
            saved = {leaf.name.partition(".")[0] for leaf in reader.leaves}
            item = {name: template for name, template in entries.items() if escape_key(name) in saved}
        if item is not None and item is not ... and transforms is None:
            item = with_optimizer_states(item, reader)
        template = None if item is None or item is ... else flat_template(item, self._registry)
        if template is not None and transforms is None:
            reader = reader.for_template(template.names)
        args: dict[str, RestoreArgs] = {}
        if restore_args is not None:
            names, structure = [leaf.name for leaf in reader.leaves], reader.tree.structure
            if template is not None:
                names, structure = template.names, template.structure
            given = broadcast_prefix(restore_args, structure, RestoreArgs, "restore_args")
            args = {name: arg for name, arg in zip(names, given, strict=True) if arg is not None}
        requestable = args.keys() if transforms is not None or not args else {leaf.name for leaf in reader.leaves}
        ordinary = requestable - external.keys()
        requests = {name: leaf_request(name, arg) for name, arg in args.items() if name in ordinary}
        if template is None or entries is not None:
            requests = {**_libraries(reader, torch_tensors, as_saved), **requests}
        if transforms is not None:
            to_original = transforms_default_to_original
            tree = load_transformed_tree(reader, transforms, item, default_to_original=to_original, requests=requests)
        else:
            began = reader.began() if as_saved and type(reader) is TreeReader else None
            options: dict[str, Any] = {"requests": requests, "began": began, "shared": shared}
            if template is not None and entries is not None:
                tree = load_entries(reader, template, **options)
            else:
                tree = load_tree(reader, like=template, select=select, cast=cast, subset=subset, **options)
        return restore_external(tree, directory, files, external, self._registry, args) if external else tree

    def structure(
        self, directory: Location, *, files: Files | None = None, source: TreeSource | None = None, **kwargs: Any
    ) -> Any:
        """Return the tree with each leaf replaced by its description, without reading data."""
        from ..arrays import TreeReader, tree_metadata

        return tree_metadata(source or TreeReader(directory, files, aggregate=self._aggregate))


def check_savable(item: Any) -> None:
    """Raise UnsupportedLeafError if the tree cannot be saved; abstract leaves are allowed."""
    flat = flatten(item, DEFAULT_REGISTRY.leaf_types)
    leaves = zip(flat.names, flat.values, strict=True)
    ours = {name: value for name, value in leaves if DEFAULT_REGISTRY.find(value) is None}
    check_leaves(list(ours), list(ours.values()))


def fresh_types(item: Any, roots: Collection[str] | None = None) -> FreshTypes:
    """Return the leaf types of a run's initial state, to pass as ``fresh``; ``roots`` lists the state's root keys."""
    check_savable(item)
    flat = flat_template(item, DEFAULT_REGISTRY)
    return FreshTypes(describe_template(flat.names, flat.values), roots, flat.structure)


def flat_template(item: Any, registry: TypeHandlerRegistry) -> Flattened:
    """Flatten a template, and replace bare objects and leaves that have a type handler with ``...``."""
    flat = flatten(item, registry.leaf_types)
    values = [... if type(value) is object or registry.find(value) is not None else value for value in flat.values]
    return Flattened(flat.names, values, flat.structure)


class _LastTree(NamedTuple):
    """Cached properties of the last tree, to be reused for a tree with the same structure and save options."""

    # Layout, process index, process count, and leaf types of the run's initial state.
    key: tuple[Layout, int, int, FreshTypes | None]
    tree: KnownTree
    plan: TreePlan
    fresh: Details | None  # see `HostTree.fresh`


def _libraries(reader: TreeSource, torch_tensors: bool, jax_below: bool | Collection[str]) -> dict[str, LeafRequest]:
    """Return requests that restore each array as an array of its original library, if that library is imported."""
    requests: dict[str, LeafRequest] = {}
    of_torch, of_jax = torch_tensors and loaded("torch"), jax_below and loaded("jax")
    roots = None if isinstance(jax_below, bool) else set(map(escape_key, jax_below))
    for name, saved in reader.leaves:
        if of_torch and saved.kind == "torch":
            requests[name] = LeafRequest(kind="torch")
        elif of_jax and saved.kind in {"jax", "key"} and (roots is None or name.partition(".")[0] in roots):
            requests[name] = LeafRequest(kind="jax", weak=saved.weak)
    return requests


def _warn_of_shared_memory(names: Sequence[str], leaves: Sequence[Leaf]) -> None:
    """Warn about jax arrays that share memory with mutable arrays of the tree."""
    if shared := shared_memory(names, leaves):
        pairs = [f"{format_path(name)} with {format_path(other)}" for name, other in shared]
        _logger.warning(
            "jax arrays share memory with arrays that can be changed in place, as after jax.device_put or dlpack: %s. "
            "Such a change also changes the jax array, and perhaps what is being saved: make it with "
            "jnp.array(..., copy=True)",
            shortened(pairs),
        )


def _warn_of_replicas(flat: Flattened) -> bool:
    """Warn about jax arrays whose replicas differ; return True if any differ, or if no array can have replicas."""
    arrays = {name: value for name, value in zip(flat.names, flat.values, strict=True) if is_on_several_devices(value)}
    try:
        differing = list(differing_replicas(arrays))
    except RuntimeError:  # for example, if device memory is too full for a copy of a key's data
        _logger.info("the replicas of jax arrays are not compared", exc_info=True)
        return False
    if differing:
        shown = [
            f"{format_path(name)} ({', '.join(f'{device.platform}:{device.id}' for device in others)} "
            f"unlike {written[0].platform}:{written[0].id})"
            for name, written, others in differing
        ]
        _logger.warning(
            "jax arrays that are declared the same on several devices hold other values on some of them: %s. A save "
            "writes the values of one device, and a restore gives them to all. Average them with jax.lax.pmean, or "
            "give them an axis that is sharded over the devices",
            shortened(shown),
        )
    return bool(differing) or not arrays


def _described(flat: Flattened, external: ExternalLeaves, pinned_bytes: int) -> list[Leaf]:
    """Describe the leaves; a leaf that has a type handler is represented by its ``tree.json`` entry."""
    notes = external.notes
    if not notes:
        return describe(flat.names, flat.values, pinned_bytes=pinned_bytes)
    others = [number for number in range(len(flat.names)) if number not in notes]
    names, values = [flat.names[number] for number in others], [flat.values[number] for number in others]
    described = iter(describe(names, values, pinned_bytes=pinned_bytes))
    return [notes[number] if number in notes else next(described) for number in range(len(flat.names))]


class _PreparedTree(PreparedFiles):
    """A tree with leaves that process 0 stores outside the tree's database."""

    def __init__(self, tree: TreeWriter, external: ExternalLeaves, files: Mapping[str, bytes]) -> None:
        super().__init__(files, tree)
        self._external = external

    def estimate_bytes(self) -> int | None:
        return None if self._external.notes else super().estimate_bytes()  # type handlers may need a path

    def write(self, folder: Location, member: ProcessInfo) -> bytes:
        if member.index == 0:
            self._files.update(self._external.write(folder))
        return super().write(folder, member)


class ArrayCheckpointHandler(PyTreeCheckpointHandler):
    """Saves a single array or number.

    The array is stored as a tree with one leaf, which ``holdfast.load`` and :class:`~holdfast.PyTreeCheckpointHandler`
    can also read. This handler takes the same arguments as :class:`~holdfast.PyTreeCheckpointHandler`.
    """

    def prepare(self, item: Any, *, snapshot: bool, save_args: Any = None, **kwargs: Any) -> PreparedItem:
        """Prepare an array to be written.

        Args:
            item: A numpy, jax or torch array, or a number.
            snapshot: Whether to copy the array if it is mutable.
            save_args: The :class:`~holdfast.SaveArgs` of the array.
            **kwargs: As for :meth:`PyTreeCheckpointHandler.prepare`.

        Returns:
            The prepared array, which can be written into a folder.

        Raises:
            UnsupportedLeafError: The item is not an array.
        """
        if flatten(item).structure is not None or item is None or isinstance(item, str | bytes):
            raise UnsupportedLeafError(
                f"ArrayCheckpointHandler saves one array, not a {class_name(item)}: use PyTreeCheckpointHandler"
            )
        return super().prepare(item, snapshot=snapshot, save_args=save_args, **kwargs)
