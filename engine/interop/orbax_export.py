"""Checkpoints for Orbax: copies of any checkpoint that holdfast reads, and our own made readable where they are."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

from ..checkpointer import Place
from ..coordination import Coordinator
from ..errors import CheckpointExistsError, CheckpointNotFoundError, OptionError, StorageError
from ..format import encode_array_metadata, storage_dtype
from ..record import RECORD
from ..storage import Location, as_location
from ..storage.statuses import map_status
from .native import NativeCheckpoint
from .once import done_once
from .orbax import UNFINISHED
from .orbax_documents import JSON_HANDLER, TREE_HANDLER, OrbaxPlan, checkpoint_document, json_file, plan_orbax
from .places import find_checkpoint, is_run, open_at, open_checkpoint, step_locations
from .source import JSON, METRICS, TREE, CheckpointSource, TreeSource
from .tensorstore_arrays import directory_spec, new_context

_CHUNK = 16 << 20  # bytes
_AT_ONCE = 256 << 20  # bytes of arrays in memory
_ONLY_ITEM = "default"  # what Orbax's manager calls its item where there is one
_METRICS = "metrics"


def export_orbax(
    source: Place, destination: Place, *, step: int | None = None, item: str | None = None
) -> list[Location]:
    """Writes a copy of a checkpoint that Orbax restores.

    A single tree becomes what ``StandardCheckpointer().restore(destination)`` reads, several items a directory with
    one folder for each. A directory of steps becomes that of a ``CheckpointManager``, with the metrics of every step;
    a tree that is alone in its steps becomes the manager's only item.

    Without a template, Orbax restores numpy arrays; with one, arrays on the template's devices. Integer keys become
    strings, as Orbax has no others.

    Args:
        source: A checkpoint of holdfast or of another library, or a directory of steps.
        destination: Where; nothing may be there yet, and no such step in a directory of steps.
        step: Which step of a directory of steps; None is all of them.
        item: Which item; None is all of them.

    Returns:
        The directories of the checkpoints that were written.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint, step or item.
        UnsupportedLeafError: Leaves that Orbax cannot have; names them all. Nothing was written of this checkpoint.
        OptionError: An item is of a kind that cannot be converted.
        CheckpointExistsError: Something is at the destination.
        DamagedCheckpointError: The source does not verify.
    """
    origin, target = as_location(source), as_location(destination)
    if step is None and not is_run(origin):
        _export(open_checkpoint(origin), target, item, managed=False)
        return [target]
    places = {step: find_checkpoint(origin, step)} if step is not None else step_locations(origin)
    if not places:
        find_checkpoint(origin)  # says what is missing
    taken = [target / str(number) for number in places if (target / str(number)).exists()]
    if taken:
        raise CheckpointExistsError(f"{taken[0]}: something is there already; choose another destination")
    for number, place in places.items():
        _export(open_at(place), target / str(number), item, managed=True)
    return [target / str(number) for number in places]


def add_orbax_metadata(
    source: Place, *, step: int | None = None, coordinator: Coordinator | None = None
) -> list[Location]:
    """Makes checkpoints of holdfast readable for Orbax where they are: adds its metadata beside the data.

    No array is copied, and the checkpoints stay what they are for holdfast. Orbax finds the items under their names:
    ``StandardCheckpointer().restore(path / "state")``, or ``CheckpointManager(run).restore(step,
    args=Composite(state=StandardRestore(template)))``.

    In a program of several processes that all call this, process 0 does it and the others wait.

    Args:
        source: A checkpoint, or a directory of steps.
        step: Which step of such a directory; None is all of them.
        coordinator: How processes find each other. None takes jax.distributed or torch.distributed where one of them is
            initialized; ``hf.Alone()`` does it in this process alone.

    Returns:
        The directories of the checkpoints.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        UnsupportedLeafError: Leaves that Orbax cannot read where they are; names them all. Nothing was written.
        OptionError: The checkpoint was not written by holdfast.
        DamagedCheckpointError: The structure of the checkpoint does not verify.
        PeerFailedError: It failed on process 0; raised on the others.
    """
    origin = as_location(source)

    def work() -> list[str]:
        return [place.url for place in _add_metadata(origin, step)]

    return list(map(as_location, done_once("add_orbax_metadata", [origin.url, step], work, coordinator)))


def _add_metadata(origin: Location, step: int | None) -> list[Location]:
    if step is not None:
        places = [find_checkpoint(origin, step)]
    elif (origin / RECORD).exists():
        places = [origin]
    else:
        places = list(step_locations(origin).values()) or [find_checkpoint(origin)]
    files = {place: _metadata_files(open_at(place)) for place in places}
    for place, contents in files.items():
        _write_files(place, contents)
    return places


def _metadata_files(checkpoint: CheckpointSource) -> dict[str, bytes]:
    if not isinstance(checkpoint, NativeCheckpoint):
        raise OptionError(
            f"{checkpoint.location} is a checkpoint of {checkpoint.format}: only holdfast's own are made readable in "
            "place; export a copy"
        )
    files: dict[str, bytes] = {}
    handlers: dict[str, str] = {}
    for name, saved in checkpoint.record.items.items():
        if saved.kind == TREE:
            plan = plan_orbax(checkpoint.tree(name), in_place=True)
            files |= {f"{saved.folder}/{path}": content for path, content in plan.files().items()}
            handlers[saved.folder] = TREE_HANDLER
        elif saved.kind == JSON:
            files[f"{saved.folder}/metadata"] = json_file(checkpoint.value(name))
            handlers[saved.folder] = JSON_HANDLER
    if checkpoint.metrics is not None and _METRICS not in handlers:
        files[f"{_METRICS}/{_METRICS}"] = json_file(checkpoint.metrics)
        handlers[_METRICS] = JSON_HANDLER
    return files | checkpoint_document(handlers, checkpoint.time)


def _export(checkpoint: CheckpointSource, target: Location, item: str | None, *, managed: bool) -> None:
    wanted = _wanted(checkpoint, item)
    trees = {name: checkpoint.tree(name) for name, kind in wanted.items() if kind == TREE}
    plans = {name: plan_orbax(tree, in_place=False) for name, tree in trees.items()}
    values = {name: checkpoint.value(name) for name, kind in wanted.items() if kind == JSON}
    # Items of which every process has its own are called loader/0, which is no name of an item of Orbax.
    places = {name: _ONLY_ITEM if managed and len(wanted) == 1 else name.replace("/", "_") for name in wanted}
    if len(set(places.values())) != len(places):
        raise OptionError(f"{checkpoint.location}: two items would get the same name; name the item to export")
    with _finished(target) as folder:
        if not managed and len(plans) == 1 and not values:
            ((name, plan),) = plans.items()
            _write_tree(folder, trees[name], plan)
            _write_files(folder, checkpoint_document(TREE_HANDLER, checkpoint.time))
            return
        handlers: dict[str, str] = {}
        for name, plan in plans.items():
            _write_tree(folder / places[name], trees[name], plan)
            handlers[places[name]] = TREE_HANDLER
        for name, value in values.items():
            _write_files(folder, {f"{places[name]}/metadata": json_file(value)})
            handlers[places[name]] = JSON_HANDLER
        if checkpoint.metrics is not None and _METRICS not in handlers:
            _write_files(folder, {f"{_METRICS}/{_METRICS}": json_file(checkpoint.metrics)})
            handlers[_METRICS] = JSON_HANDLER
        _write_files(folder, checkpoint_document(handlers, checkpoint.time))


def _wanted(checkpoint: CheckpointSource, item: str | None) -> Mapping[str, str]:
    items = checkpoint.items
    if item is not None and item not in items:
        raise CheckpointNotFoundError(f"{checkpoint.location}: no item {item!r}; it has {', '.join(sorted(items))}")
    wanted = {name: kind for name, kind in items.items() if item in (None, name) and kind != METRICS}
    unknown = sorted(name for name, kind in wanted.items() if kind not in (TREE, JSON))
    if unknown or not wanted:
        raise OptionError(
            f"{checkpoint.location}: items that are no trees and no JSON cannot be converted: {', '.join(unknown)}; "
            "name the item to export"
        )
    return wanted


@contextlib.contextmanager
def _finished(target: Location) -> Iterator[Location]:
    """Gives a directory to write into, which gets its own name once it is complete, as Orbax does it."""
    if target.exists():
        raise CheckpointExistsError(f"{target}: something is there already; choose another destination")
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
        place = folder / path
        place.parent.make_directory()
        place.write_bytes(content)


def _write_tree(folder: Location, source: TreeSource, plan: OrbaxPlan) -> None:
    folder.make_directory()
    names = list(plan.arrays)
    start = 0
    while start < len(names):
        end, size = start, 0
        while end < len(names) and (end == start or size + plan.arrays[names[end]].nbytes <= _AT_ONCE):
            size += plan.arrays[names[end]].nbytes
            end += 1
        _write_arrays(folder, source, plan, names[start:end])
        start = end
    _write_files(folder, plan.files())


def _write_arrays(folder: Location, source: TreeSource, plan: OrbaxPlan, names: list[str]) -> None:
    """Writes arrays in one transaction: into few files, and durable when this returns."""
    import tensorstore

    stored = [name for name in names if name not in plan.numbers]
    arrays = dict(zip(stored, source.read([plan.arrays[name] for name in stored]), strict=True)) | plan.numbers
    context = new_context()
    base = directory_spec(folder)
    try:
        with tensorstore.Transaction() as transaction:
            opening = []
            for name in names:
                array = arrays[name]
                assert array is not None
                opening.append((array, _create(name, array, base, context, transaction)))
            copies = [
                store.result().write(_little(array), can_reference_source_data_indefinitely=True).copy
                for array, store in opening
            ]
            for copy in copies:
                copy.result()
    except (ValueError, NotImplementedError, OSError) as error:
        raise map_status(error, folder.url, "write") from error


def _create(name: str, array: NDArray[Any], base: dict[str, Any], context: Any, transaction: Any) -> Any:
    import tensorstore

    data_type = storage_dtype(array.dtype).data_type
    metadata = json.loads(encode_array_metadata(array.shape, data_type, _chunk_shape(array)))
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/" if name else ""},
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
    }
    return tensorstore.open(spec, create=True, context=context, transaction=transaction)


def _little(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _chunk_shape(array: NDArray[Any]) -> tuple[int, ...]:
    """Cuts along the first axes, so that chunks lie in one piece, until they are small enough."""
    shape = [max(size, 1) for size in array.shape]
    for axis, size in enumerate(shape):
        row = math.prod(shape[axis + 1 :]) * max(array.dtype.itemsize, 1)
        shape[axis] = min(size, max(1, _CHUNK // row))
        if shape[axis] > 1 or row <= _CHUNK:
            break
    return tuple(shape)
