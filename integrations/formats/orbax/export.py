"""Export copies of any checkpoint to Orbax, or make holdfast checkpoints readable by Orbax in place.

An :class:`OrbaxPlan` holds the arrays and the contents of the JSON files that represent a tree in Orbax's format.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ....engine.arrays import SavedLeaf, TreeSource
from ....engine.checkpoint import deleted_on_interrupt
from ....engine.distributed import Coordinator, run_on_primary
from ....engine.errors import CheckpointExistsError, OptionError, StorageError, UnsupportedLeafError
from ....engine.format import RECORD, storage_dtype
from ....engine.progress import Progress, Share
from ....engine.pytree import NAME_ONLY, Patterns, TreeDef, format_path, materialize
from ....engine.sources import (
    JSON,
    METRICS,
    TREE,
    CheckpointSource,
    NativeCheckpoint,
    find_checkpoint,
    find_steps,
    is_run,
    open_at,
    selected,
    shares_of,
    tree_to_convert,
)
from ....engine.steps import StepEntry
from ....engine.storage import Location, Place, as_location
from .checkpoint import COMMITTED, METRICS_FOLDER, ONLY_ITEM, RUN_METADATA, RUN_METADATA_FILE, UNFINISHED
from .tree import ARRAYS_FOLDER, CHECKPOINT_FILE, NONE, SCALAR, STRING, STRINGS_FILE, TREE_FILE, WITHOUT_DATA

TREE_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
JSON_HANDLER = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
_SEQUENCE, _MAPPING = 1, 2  # Orbax key types
# Don't use "jax.Array": without a template, Orbax restores leaves of this type only if target devices are given. With a
# template, either type can be restored as the other.
_ARRAY = "np.ndarray"
_EMPTY = {"list": "List", "tuple": "Tuple", "deque": "List", "namedtuple": NONE, "dataclass": NONE, "node": NONE}
_SCALARS = frozenset({"bool", "int", "float"})
_ARRAYS = frozenset({"numpy", "jax", "torch", "key", "numpy_scalar", "complex"})

_Keys = tuple[tuple[str, int], ...]  # the keys of a path, each with its key type
# A function that writes leaves of a tree to a folder under the given names, and reports progress in bytes.
WriteArrays = Callable[[Location, TreeSource, Mapping[str, SavedLeaf], Callable[[int], None]], None]


class OrbaxPlan:
    """A plan for storing a tree in Orbax. The constructor raises a single error that lists all unsupported leaves."""

    def __init__(self, source: TreeSource, *, in_place: bool) -> None:
        self.entries: dict[str, Any] = {}  # contents of ``tree_metadata`` in the ``_METADATA`` file
        self.arrays: dict[str, SavedLeaf] = {}  # leaves stored as arrays, keyed by Orbax name
        self.strings: dict[str, Any] = {}  # contents of the ``_strings.json`` file
        self.keys: dict[str, str] = {}  # PRNG implementations of typed keys, keyed by array name
        source.check_readable(source.leaves)
        self._source = source
        self._in_place = in_place
        self._leaves = iter(source.leaves)
        self._taken: dict[str, str] = {}
        self._problems: list[str] = []
        self._visit(source.tree.structure, ())
        folders = sorted(f"{name}/" for name in self.arrays)
        inside = [inner for folder, inner in itertools.pairwise(folders) if inner.startswith(folder)]
        self._problems += [f"{name[:-1]}: it would lie in the folder of another array" for name in inside]
        if not self.entries:
            self._problems.append("(root): Orbax does not save a tree without leaves")
        if self._problems:
            headline = f"{source.location} cannot be exported to Orbax; nothing was written. Leave out these leaves:"
            raise UnsupportedLeafError("\n  ".join([headline, *self._problems]))

    def files(self) -> dict[str, bytes]:
        """Map the path of each file, relative to the item's folder, to its contents. ``_METADATA`` comes last."""
        contents: dict[str, bytes] = {}
        if self.strings:
            contents[STRINGS_FILE] = json_file(self.strings)
        if self.keys:
            arrays = []
            for name, implementation in self.keys.items():
                shape = list(self.arrays[name].saved.shape or ())
                array = {"param_name": name, "write_shape": shape, "chunk_shape": shape}
                arrays.append({"array_metadata": {**array, "ext_metadata": {"random_key_impl": implementation}}})
            contents[f"{ARRAYS_FOLDER}/process_0"] = json_file({"array_metadatas": arrays})
        contents[TREE_FILE] = json_file(
            {
                "tree_metadata": self.entries,
                "use_ocdbt": True,
                "use_zarr3": True,
                "store_array_data_equal_to_fill_value": True,
                "custom_metadata": None,
            }
        )
        return contents

    def _visit(self, node: TreeDef | None, path: _Keys) -> None:
        if node is None:
            self._leaf(next(self._leaves), path)
            return
        if not node.children and path:
            self._entry(path, _EMPTY.get(node.kind, "Dict"), skip=True)
        keys = range(len(node.children)) if node.keys is None else node.keys
        key_type = _SEQUENCE if node.keys is None else _MAPPING
        for key, child in zip(keys, node.children, strict=True):
            self._visit(child, (*path, (str(key), key_type)))

    def _leaf(self, leaf: SavedLeaf, path: _Keys) -> None:
        name = ".".join(key for key, _ in path)
        other = self._taken.setdefault(name, leaf.name)
        try:
            if other != leaf.name:
                raise UnsupportedLeafError(f"Orbax would name it {name!r}, the name of {format_path(other)}")
            self._add(leaf, name, path)
        except UnsupportedLeafError as problem:
            self._problems.append(f"{format_path(leaf.name)}: {problem}")

    def _add(self, leaf: SavedLeaf, name: str, path: _Keys) -> None:
        saved = leaf.saved
        if saved.kind == "none":
            self._entry(path, NONE, skip=True)
        elif saved.kind in NAME_ONLY:
            self._entry(path, WITHOUT_DATA)
        elif saved.kind == "str":
            self._entry(path, STRING)
            self._string(leaf, name)
        elif saved.kind not in _SCALARS and saved.kind not in _ARRAYS and not saved.is_number_array:
            raise UnsupportedLeafError(f"Orbax cannot store leaves of kind {saved.kind}")
        else:
            self._entry(path, SCALAR if saved.kind in _SCALARS else _ARRAY)
            self.arrays[name] = self._array(leaf, name)

    def _string(self, leaf: SavedLeaf, name: str) -> None:
        (text,) = materialize([None], [leaf.saved], self._source.read_leaves([leaf]), [leaf.name])
        *outer, last = name.split("/")
        parent = self.strings
        for key in outer:
            parent = parent.setdefault(key, {})
            if not isinstance(parent, dict):
                raise UnsupportedLeafError("Orbax would store it inside another text")
        if "~" in name or "\0" in name or isinstance(parent.get(last), dict):
            raise UnsupportedLeafError(f"Orbax cannot store a text under the name {name!r}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UnsupportedLeafError("its text has lone surrogates, which JSON files cannot hold")
        parent[last] = text

    def _array(self, leaf: SavedLeaf, name: str) -> SavedLeaf:
        saved = leaf.saved
        if saved.dtype is None:  # an integer too large for any dtype
            raise UnsupportedLeafError(f"{saved.details.get('value')} does not fit 64 bits")
        if storage_dtype(saved.dtype).extra is not None or "torch_dtype" in saved.details:
            dtype = saved.details.get("torch_dtype", saved.dtype)
            raise UnsupportedLeafError(f"Orbax cannot read elements of type {dtype}")
        if self._in_place and name != leaf.name:
            raise UnsupportedLeafError(
                f"it is stored as {leaf.name!r}, but Orbax would look for {name!r}; export a copy, or save it "
                "under keys without '.', '/', '%' and control characters"
            )
        if self._in_place and "aggregate" in saved.details:
            raise UnsupportedLeafError(
                "it is aggregated with other leaves in one file, which Orbax does not read; export a copy instead"
            )
        if saved.kind == "key":
            self.keys[name] = str(saved.details.get("impl"))
        return leaf

    def _entry(self, path: _Keys, value_type: str, *, skip: bool = False) -> None:
        self.entries[str(tuple(key for key, _ in path))] = {
            "key_metadata": [{"key": key, "key_type": key_type} for key, key_type in path],
            "value_metadata": {"value_type": value_type, "skip_deserialize": skip},
        }


def checkpoint_document(handlers: str | Mapping[str, str], source: CheckpointSource) -> dict[str, bytes]:
    """Map the name of each checkpoint-level file to its contents. The file that marks a finished save comes last."""
    nanoseconds = int((time.time() if source.time is None else source.time) * 1e9)
    document = {
        "item_handlers": handlers if isinstance(handlers, str) else dict(handlers),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": nanoseconds,
        "commit_timestamp_nsecs": nanoseconds,
        "custom_metadata": dict(source.custom_metadata or {}),
    }
    return {CHECKPOINT_FILE: json_file(document), COMMITTED: b"Exported by holdfast\n"}


def json_file(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("utf-8")


def export_orbax(
    origin: Location,
    target: Location,
    step: int | None,
    item: str | None,
    select: Patterns | None,
    progress: Progress,
    write: WriteArrays,
) -> list[tuple[CheckpointSource, Location, int | None, Sequence[TreeSource]]]:
    """Export checkpoints to Orbax; return each checkpoint with the location of its copy, its step, and its trees."""
    # Export a single tree for use with a `StandardCheckpointer`, and steps for use with a `CheckpointManager`. Convert
    # integer keys to strings, because Orbax supports only string keys.
    managed = step is not None or is_run(origin)
    metadata: Mapping[str, Any] | None = None
    if not managed:
        entries = {target: StepEntry(0, origin)}
    elif step is not None:
        entries = {target / str(step): StepEntry(step, find_checkpoint(origin, step))}
    else:
        found_steps = find_steps(origin)
        metadata = found_steps.metadata()
        entries = {target / str(number): entry for number, entry in found_steps.by_step().items()}
        if not entries:
            find_checkpoint(origin)  # raises an error that names what is missing
    for copy in entries:
        _refuse_existing(copy)
    made: list[Location] = []
    done = []
    with deleted_on_interrupt(target, made):
        for (copy, entry), share in zip(entries.items(), shares_of(progress, [*entries.values()]), strict=True):
            made.append(copy)
            checkpoint = open_at(entry.location)
            trees = _export(checkpoint, copy, item, select, share, write, managed=managed)
            done.append((checkpoint, copy, entry.step if managed else None, trees))
        if metadata:
            document = {"custom_metadata": dict(metadata)}
            _write_files(target, {f"{RUN_METADATA}/{RUN_METADATA_FILE}": json_file(document)})
    return done


def _refuse_existing(target: Location) -> None:
    if target.exists():
        raise CheckpointExistsError(f"{target} exists already; choose another destination")


def add_orbax_metadata(
    source: Place, *, step: int | None = None, coordinator: Coordinator | None = None
) -> list[Location]:
    """Make holdfast checkpoints readable by Orbax in place, by adding Orbax metadata next to the data.

    No array is copied, and holdfast can still read the checkpoints. Orbax restores the items by name, with
    ``StandardCheckpointer().restore(path / "state")`` or ``CheckpointManager(run).restore(step,
    args=Composite(state=StandardRestore(template)))``.

    If all processes of a multi-process program call this function, process 0 does the work and the others wait.

    Args:
        source: A checkpoint, or a directory of steps.
        step: The step to make readable if the source is a directory of steps; None selects all steps.
        coordinator: Connects the processes, as for :func:`~holdfast.import_checkpoint`.

    Returns:
        The directories of the checkpoints.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        UnsupportedLeafError: Orbax cannot read some leaves in place; the error lists them all, and nothing is written.
        OptionError: The checkpoint was not written by holdfast.
        DamagedCheckpointError: The structure of the checkpoint fails verification.
        PeerFailedError: Process 0 failed; raised in the other processes.
    """
    origin = as_location(source)

    def work() -> list[str]:
        if step is not None:
            directories = [find_checkpoint(origin, step)]
        elif (origin / RECORD).exists():
            directories = [origin]
        else:
            directories = [entry.location for entry in find_steps(origin).entries] or [find_checkpoint(origin)]
        files = {directory: _metadata_files(open_at(directory)) for directory in directories}
        for directory, contents in files.items():
            _write_files(directory, contents)
        return [directory.url for directory in directories]

    return list(map(as_location, run_on_primary("add_orbax_metadata", [origin.url, step], work, coordinator)))


def _metadata_files(checkpoint: CheckpointSource) -> dict[str, bytes]:
    if not isinstance(checkpoint, NativeCheckpoint):
        raise OptionError(
            f"{checkpoint.location} is a checkpoint of {checkpoint.format}: only holdfast checkpoints can be made "
            "readable in place; export a copy"
        )
    items = checkpoint.record.items
    if archives := [name for name, saved in items.items() if saved.is_archive]:
        raise OptionError(
            f"{checkpoint.location}: {', '.join(archives)}: a zip file, in which Orbax finds no arrays; export a copy"
        )
    plans = {name: OrbaxPlan(checkpoint.tree(name), in_place=True) for name, item in items.items() if item.kind == TREE}
    folders = {name: saved.folder for name, saved in items.items() if saved.kind in (TREE, JSON)}
    return _files(checkpoint, folders, plans)


def _files(source: CheckpointSource, folders: Mapping[str, str], plans: Mapping[str, OrbaxPlan]) -> dict[str, bytes]:
    """Map the path of each file, except for array files, to its contents; ``folders`` maps each item to its folder."""
    files: dict[str, bytes] = {}
    handlers: dict[str, str] = {}
    for name, folder in folders.items():
        if name in plans:
            files |= {f"{folder}/{path}": content for path, content in plans[name].files().items()}
            handlers[folder] = TREE_HANDLER
        else:
            files[f"{folder}/metadata"] = json_file(source.value(name))
            handlers[folder] = JSON_HANDLER
    if source.metrics is not None and METRICS_FOLDER not in handlers:
        files[f"{METRICS_FOLDER}/{METRICS_FOLDER}"] = json_file(source.metrics)
        handlers[METRICS_FOLDER] = JSON_HANDLER
    return files | checkpoint_document(handlers, source)


def _export(
    source: CheckpointSource,
    target: Location,
    item: str | None,
    select: Patterns | None,
    share: Share,
    write: WriteArrays,
    *,
    managed: bool,
) -> Sequence[TreeSource]:
    wanted = _wanted(source, item if select is None else source.only_tree(item))
    trees = {
        name: selected(tree_to_convert(source, name), select) for name, item_kind in wanted.items() if item_kind == TREE
    }
    plans = {name: OrbaxPlan(tree, in_place=False) for name, tree in trees.items()}
    # Per-process items have names such as loader/0, but Orbax item names cannot contain a slash.
    folders = {name: ONLY_ITEM if managed and len(wanted) == 1 else name.replace("/", "_") for name in wanted}
    if len(set(folders.values())) != len(folders):
        raise OptionError(f"{source.location}: two items would have the same name in Orbax; name the item to export")
    is_one_tree = not managed and len(plans) == len(wanted) == 1
    if is_one_tree:
        (plan,) = plans.values()
        files = plan.files() | checkpoint_document(TREE_HANDLER, source)
    else:
        files = _files(source, folders, plans)
    share.expect(sum(leaf.nbytes for plan in plans.values() for leaf in plan.arrays.values()))
    with share, _finished(target) as folder:
        for name, plan in plans.items():
            destination = folder if is_one_tree else folder / folders[name]
            destination.make_directory()
            if plan.arrays:
                write(destination, trees[name], plan.arrays, share.advance)
        _write_files(folder, files)
    return [*trees.values()]


def _wanted(checkpoint: CheckpointSource, item: str | None) -> Mapping[str, str]:
    checkpoint.check_item(item)
    named = checkpoint.items if item is None else {item: checkpoint.items[item]}
    wanted = {name: item_kind for name, item_kind in named.items() if item_kind != METRICS}
    unknown = sorted(name for name, item_kind in wanted.items() if item_kind not in (TREE, JSON))
    if unknown or not wanted:
        raise OptionError(
            f"{checkpoint.location}: only trees and JSON can be converted, not {', '.join(unknown) or 'metrics'}; name "
            "the item to export"
        )
    return wanted


@contextlib.contextmanager
def _finished(target: Location) -> Iterator[Location]:
    """Yield a temporary directory to write to, and rename it to the target when it is complete, as Orbax does."""
    _refuse_existing(target)
    folder = target.parent / f"{target.name}{UNFINISHED}" if target.is_local else target
    folder.remove_tree()
    folder.make_directory()
    try:
        yield folder
        if target.is_local:
            folder.sync_directory()
            folder.rename(target.name)
    except BaseException:
        with contextlib.suppress(StorageError):
            folder.remove_tree()
        raise


def _write_files(folder: Location, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        file = folder / path
        file.parent.make_directory()
        file.write_bytes(content)
