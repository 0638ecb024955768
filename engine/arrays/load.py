"""Load a saved tree according to a template, a selection of leaves, and requests for individual leaves."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from itertools import compress, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError, TreeMismatchError, itemized
from ..pytree import (
    Box,
    Flattened,
    GrowthProblem,
    LeafMetadata,
    LeafRequest,
    LeafTemplate,
    LeafType,
    Partition,
    Patterns,
    TreeDef,
    as_saved,
    castable,
    choose,
    compare,
    compare_metadata,
    describe_template,
    flatten,
    format_path,
    in_saved_order,
    joined_names,
    leaf_names,
    loaded,
    materialize,
    metadata_of,
    new_leaf,
    partition,
    regrown,
    tensor_like,
    unflatten,
    wanted_parts,
    with_request,
)
from .database import naming
from .shared_reads import SharedReads
from .source import SavedLeaf, TreeSource

_logger = logging.getLogger("holdfast")


def load_tree(
    source: TreeSource,
    *,
    like: Any = None,
    select: Patterns | None = None,
    requests: Mapping[str, LeafRequest] | None = None,
    # Leaf types of the run's initial state. If they are given, the template is the initial state of a resumed run, and
    # all leaves, including those later added to lists and dictionaries, are restored with their saved types.
    began: Mapping[str, LeafType] | None = None,
    shared: SharedReads | None = None,  # if given, all processes call `load_tree` together, and read shared data once
    cast: bool = False,
    subset: bool = False,
) -> Any:
    """Read a tree as :func:`~holdfast.load` does. For sharded arrays, read only the shards of this process."""
    requests = requests or {}
    unknown = sorted(requests.keys() - {leaf.name for leaf in source.leaves}) if requests else []
    if unknown:
        raise OptionError(
            f"{source.location}: cannot request {', '.join(map(format_path, unknown[:8]))}, which the checkpoint does "
            "not have; request only leaves that it has"
        )
    leaves = source.leaves
    if select is not None:
        leaves = list(compress(leaves, choose([leaf.name for leaf in leaves], select)))
    template = like if like is None or isinstance(like, Flattened) else flatten(like)
    if template is not None:
        names = _saved_names(template.names, [leaf.name for leaf in leaves], subset=subset)
        if subset:
            wanted = set(names)
            leaves = [leaf for leaf in leaves if leaf.name in wanted]
    source.check_readable(leaves)  # check first, because a template mismatch would hide that leaves are unreadable
    selected = {leaf.name: leaf for leaf in leaves} if template is not None or select is not None else {}
    if template is None:
        tree = source.tree if select is None else source.tree.select([leaf.name in selected for leaf in source.leaves])
        asked = _requested(source, leaves, requests)
        return tree.build(made_values(source, leaves, asked, read_parts(source, leaves, asked, shared)))
    targets = describe_template(names, template.values)
    structure, differs = template.structure, dict[str, str]()
    if began is not None:
        structure, targets, differs = _resumed(source, structure, targets, selected, began)
    if cast:
        targets = _cast(source, targets)
    leaves, targets = _matching(source, targets, selected, requests, differs)
    return unflatten(structure, made_values(source, leaves, targets, read_parts(source, leaves, targets, shared)))


def load_entries(
    source: TreeSource,
    templates: Flattened,
    *,
    requests: Mapping[str, LeafRequest],
    began: Mapping[str, LeafType] | None = None,
    shared: SharedReads | None = None,
) -> Any:
    """Read a dictionary: entries with a template like :func:`load_tree`, and all others as they were saved."""
    roots = {name.partition(".")[0] for name in templates.names}
    has_template = [leaf.name.partition(".")[0] in roots for leaf in source.leaves]
    others = [leaf for leaf, is_typed in zip(source.leaves, has_template, strict=True) if not is_typed]
    targets = _requested(source, others, requests)
    values = iter(made_values(source, others, targets, read_parts(source, others, targets, shared)))
    tree = source.tree.build([... if is_typed else next(values) for is_typed in has_template])
    if not roots:
        return tree
    names = {leaf.name for leaf in source.leaves}
    paths = [format_path(root) if root in names else f"{format_path(root)}/**" for root in sorted(roots)]
    return {**tree, **load_tree(source, like=templates, select=paths, began=began, shared=shared)}


def _resumed(
    source: TreeSource,
    structure: TreeDef | None,
    targets: Sequence[LeafTemplate],
    selected: Mapping[str, SavedLeaf],
    began: Mapping[str, LeafType],
) -> tuple[TreeDef | None, list[LeafTemplate], dict[str, str]]:
    """Return a resumed state's containers and leaf templates, and an error message for each mismatched leaf name."""
    made = {target.name: target for target in targets}
    differs: dict[str, str] = {}
    for name, target in made.items():
        if name in selected:
            resumed = as_saved(target, selected[name].saved, began.get(name))
            if isinstance(resumed, str):
                differs[name] = resumed
            else:
                made[name] = resumed
    if structure is not None and [*made] != [*selected]:
        saved = source.tree.select([leaf.name in selected for leaf in source.leaves]).structure
        asked = set(structure.segments)  # the template may lack root keys that the checkpoint has
        try:
            if made.keys() == {name for name in began if name.partition(".")[0] in asked} != selected.keys():
                structure = regrown(structure, saved)
            if selected.keys() == {*leaf_names(structure)}:
                structure = in_saved_order(structure, saved)
                made = {name: made.get(name) or new_leaf(name, selected[name].saved) for name in leaf_names(structure)}
        except GrowthProblem as problem:
            raise TreeMismatchError(f"{source.location}: the state has grown:", [str(problem)]) from None
    return structure, list(made.values()), differs


def _cast(source: TreeSource, targets: Sequence[LeafTemplate]) -> list[LeafTemplate]:
    """Enable casting in templates whose dtype is of the same kind as the saved dtype; log the leaves to be cast."""
    saved = {leaf.name: leaf.saved for leaf in source.leaves}
    targets = [castable(target, saved.get(target.name)) for target in targets]
    lines = [
        f"{format_path(target.name)} from {saved[target.name].dtype} to {target.dtype}"
        for target in targets
        if target.cast
    ]
    if lines:
        _logger.info("%s", itemized(f"{source.location}: cast because of cast=True:", lines))
    return targets


def _saved_names(names: list[str], saved: list[str], *, subset: bool) -> list[str]:
    """Return the saved name of each template leaf, even if it differs in wrapper keys or joins nested keys by dots."""
    if set(names) == set(saved):
        return names
    joined, wanted = dict(zip(joined_names(saved), saved, strict=True)), joined_names(names)
    alike = joined.keys() >= {*wanted} if subset else joined.keys() == {*wanted}
    if alike and len(joined) == len(saved) and len(set(wanted)) == len(names):
        return [joined[name] for name in wanted]
    return names


def leaf_values(source: TreeSource, leaves: Sequence[SavedLeaf]) -> list[Any]:
    """Read leaves as they were saved, as numpy arrays and Python values."""
    return made_values(source, leaves, [None] * len(leaves), (source.read_leaves(leaves), {}))


def leaf_as(source: TreeSource, leaf: SavedLeaf, request: LeafRequest) -> Any:
    """Read a leaf in the requested form, such as a jax array with a sharding."""
    target = _requested(source, [leaf], {leaf.name: request})
    (value,) = made_values(source, [leaf], target, read_parts(source, [leaf], target))
    return value


def selected_values(source: TreeSource, leaves: Sequence[SavedLeaf], indexes: Sequence[Any]) -> list[Any]:
    """Return the elements of each array that its index selects, reading only the chunks that contain them."""
    selections, dtypes = [], []
    for leaf, index in zip(leaves, indexes, strict=True):
        assert leaf.saved.shape is not None
        assert leaf.saved.dtype is not None
        dtypes.append(leaf.saved.dtype)
        try:
            selections.append(Selection(index, leaf.saved.shape, source.chunks(leaf)))
        except IndexError as error:
            raise IndexError(f"{source.location}: {format_path(leaf.name)}: {error}") from None
    parts = source.read_boxes(leaves, [selection.boxes for selection in selections])
    return [selection.combine(boxes, dtype) for selection, boxes, dtype in zip(selections, parts, dtypes, strict=True)]


def tree_metadata(source: TreeSource) -> Any:
    """Return the saved containers with a :class:`LeafMetadata` for each leaf; no data is read."""
    return source.tree.build([metadata_of(leaf.saved) for leaf in source.leaves])


def with_optimizer_states(template: Any, source: TreeSource) -> Any:
    """Fill the empty state dicts of torch optimizers in a template with templates for the saved states."""
    return _with_states(template, (), cache(lambda: source.tree.build(list(map(_tensor_template, source.leaves)))))


def _with_states(value: Any, keys: tuple[Any, ...], saved: Callable[[], Any]) -> Any:
    """Fill the empty optimizer states in a value; ``keys`` is the path of the corresponding value in the saved tree."""
    if type(value) not in (dict, list, tuple):
        return value
    is_fresh = type(value) is dict and value.keys() == {"state", "param_groups"} and value["state"] == {}
    if is_fresh and type(value["param_groups"]) is list:
        state = reduce(_entry, (*keys, "state"), saved())
        return {**value, "state": state} if isinstance(state, Mapping) and state else value
    pairs = value.items() if type(value) is dict else enumerate(value)
    children = [_with_states(child, (*keys, key), saved) for key, child in pairs]
    return dict(zip(value, children, strict=True)) if type(value) is dict else type(value)(children)


def _entry(value: Any, key: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(key)
    return value[key] if isinstance(value, list | tuple) and isinstance(key, int) and key < len(value) else None


def _tensor_template(leaf: SavedLeaf) -> Any:
    """Return the template for a leaf: a meta tensor for an array, or else ``...`` to load the leaf as it was saved."""
    if loaded("torch") is None or leaf.saved.kind not in ("torch", "numpy", "jax"):
        return ...
    return ... if (like := tensor_like(leaf.saved)) is None else like


def _requested(
    source: TreeSource, leaves: Sequence[SavedLeaf], requests: Mapping[str, LeafRequest]
) -> list[LeafTemplate | None]:
    """Convert the request for each leaf to a template; raise one error that lists all unsatisfiable requests."""
    if not requests:
        return [None] * len(leaves)
    targets = [
        with_request(leaf.name, requests[leaf.name], leaf.saved, None) if leaf.name in requests else None
        for leaf in leaves
    ]
    pairs = zip(leaves, targets, strict=True)
    compared = [compare(target, leaf.saved) for leaf, target in pairs if target is not None]
    if differences := [difference for difference in compared if difference is not None]:
        raise TreeMismatchError(
            f"{source.location}: {len(differences)} of {len(requests)} requests do not fit the checkpoint:", differences
        )
    return targets


def _matching(
    source: TreeSource,
    targets: Sequence[LeafTemplate],
    selected: Mapping[str, SavedLeaf],
    requests: Mapping[str, LeafRequest],
    differs: Mapping[str, str],
) -> tuple[list[SavedLeaf], list[LeafTemplate]]:
    """Apply requests to template leaves, and find their saved leaves; raise one error that lists all differences."""
    saved = {leaf.name: leaf for leaf in source.leaves}
    asked = {target.name for target in targets}
    containers: set[str] = set()
    if not asked <= saved.keys():
        containers = {name[: end.start()] for name in saved for end in re.finditer(r"\.", name)}
    merged: list[LeafTemplate] = []
    differences: list[str] = []
    for original in targets:
        name, target = original.name, original
        if name in requests:
            target = with_request(name, requests[name], saved[name].saved, original)
        merged.append(target)
        if name in selected:
            difference = differs.get(name) or compare(target, saved[name].saved)
            if difference is None and isinstance(original.leaf, LeafMetadata) and not target.resize:
                difference = compare_metadata(name, original.leaf, saved[name].saved)
        else:
            why = "not selected" if name in saved else "not in the checkpoint"
            why = "a container in the checkpoint" if name in containers else why
            difference = f"{format_path(name)}: expected {target} (template), {why}"
        if difference is not None:
            differences.append(difference)
    differences += [
        f"{format_path(name)}: not in the template, found {leaf.saved} (checkpoint)"
        for name, leaf in selected.items()
        if name not in asked
    ]
    if differences:
        raise TreeMismatchError(
            f"{source.location}: template and checkpoint differ in {len(differences)} of {len(asked | saved.keys())} "
            "leaves; make them agree, or load part of the checkpoint with select= or subset=True",
            differences,
        )
    return [saved[target.name] for target in merged], merged


# Data for `materialize`: the arrays read in full, and for the others, the partition and parts, keyed by leaf index.
PartsRead = tuple[list[NDArray[Any] | None], dict[int, tuple[Partition, list[NDArray[Any]]]]]


def made_values(
    source: TreeSource, leaves: Sequence[SavedLeaf], targets: Sequence[LeafTemplate | None], read: PartsRead
) -> list[Any]:
    """Convert the data that was read into the values that the templates require."""
    with naming(source.location):
        return materialize(targets, [saved for _, saved in leaves], read[0], [name for name, _ in leaves], read[1])


def read_parts(
    source: TreeSource,
    leaves: Sequence[SavedLeaf],
    targets: Sequence[LeafTemplate | None],
    shared: SharedReads | None = None,
) -> PartsRead:
    """Read leaves; for sharded arrays, read only the parts that their templates need."""
    cuts = _partitions(source, leaves, targets)
    if shared is None and not cuts:
        return source.read_leaves(leaves), {}
    read: dict[int, list[NDArray[Any]]] = {}
    if shared is not None:
        wanted = [wanted_parts(target, leaf.saved) for leaf, target in zip(leaves, targets, strict=True)]
        read = shared.read(source, leaves, wanted, {index: cut.stored for index, cut in cuts.items()})
    alone = [index for index in cuts if index not in read]
    if alone:
        boxes = [cuts[index].stored for index in alone]
        read |= zip(alone, source.read_boxes([leaves[index] for index in alone], boxes), strict=True)
    parts = {index: (cut, read.pop(index)) for index, cut in cuts.items()}
    arrays: dict[int, NDArray[Any] | None] = {index: pieces[0] for index, pieces in read.items()}
    others = [index for index in range(len(leaves)) if index not in parts and index not in read]
    arrays |= zip(others, source.read_leaves([leaves[index] for index in others]), strict=True)
    return [arrays.get(index) for index in range(len(leaves))], parts


def _partitions(
    source: TreeSource, leaves: Sequence[SavedLeaf], targets: Sequence[LeafTemplate | None]
) -> dict[int, Partition]:
    """Return the partition of each leaf that is needed only in part, keyed by leaf index."""
    cuts: dict[int, Partition] = {}
    problems = []
    for index, target in enumerate(targets):
        try:
            if target is not None and (cut := partition(target, leaves[index].saved)) is not None:
                cuts[index] = cut
        except ValueError as error:
            problems.append(f"{format_path(leaves[index].name)}: {target} cannot be sharded as requested: {error}")
    if problems:
        raise TreeMismatchError(f"{source.location}: {len(problems)} shardings do not fit their leaves:", problems)
    return cuts


# ---- basic indexing of arrays that have not been read: https://numpy.org/doc/stable/user/basics.indexing.html


class Selection:
    """A basic index into an array (integers, slices, an ellipsis, ``None``), and the ``boxes`` to read for it."""

    def __init__(self, index: Any, shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
        index = index if isinstance(index, tuple) else (index,)
        for entry in index:
            if not (entry is None or entry is ... or isinstance(entry, slice) or _is_integer(entry)):
                raise IndexError(
                    f"expected integers, slices, ... and None, found {type(entry).__name__}; read a slice around the "
                    "elements, and index the resulting array"
                )
        if (count := sum(entry is not None and entry is not ... for entry in index)) > len(shape):
            raise IndexError(f"too many indices: the array has {len(shape)} axes, but the index has {count}")
        if sum(entry is ... for entry in index) > 1:
            raise IndexError("an index can have only one ellipsis (...)")
        self._like = np.broadcast_to(np.int8(0), shape)[index]  # has the result's shape; raises if the index is invalid
        entries = [entry for entry in index if entry is not None]
        position = next((number for number, entry in enumerate(entries) if entry is ...), len(entries))
        entries[position : position + 1] = [slice(None)] * (len(shape) - count)
        ranges = [
            range(size)[entry] if isinstance(entry, slice) else range(entry % size, entry % size + 1)
            for entry, size in zip(entries, shape, strict=True)
        ]
        self._shape = tuple(map(len, ranges))
        # A run of several indices has a step of at most one chunk, so every chunk that overlaps its box is needed.
        runs = list(map(_runs, ranges, chunks))
        slices = [[slice(None)] if len(some) == 1 else [slice(n, n + 1) for n in range(len(some))] for some in runs]
        self._runs, self._slices = list(product(*runs)), list(product(*slices))
        self.boxes = [Box(tuple(map(min, box)), tuple(max(run) + 1 for run in box)) for box in self._runs]

    def combine(self, parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> Any:
        """Select the elements from the boxes that were read; return a numpy scalar if the index has only integers."""
        cuts = [
            part[tuple(slice(None, None, run.step) for run in runs)]
            for part, runs in zip(parts, self._runs, strict=True)
        ]
        if len(cuts) == 1 and cuts[0].size == parts[0].size:
            elements = np.ascontiguousarray(cuts[0])
        else:
            elements = np.empty(self._shape, dtype)
            for slices, cut in zip(self._slices, cuts, strict=True):
                elements[slices] = cut
        elements = elements.reshape(self._like.shape)
        return elements if isinstance(self._like, np.ndarray) else elements[()]


def _is_integer(entry: Any) -> bool:
    return hasattr(entry, "__index__") and not isinstance(entry, bool | np.bool_) and np.ndim(entry) == 0


def _runs(selected: range, chunk: int) -> list[range]:
    """Return the selected indices of an axis as one run, or as one run per index if the step is longer than a chunk."""
    if abs(selected.step) <= chunk:
        return [selected] if selected else []
    return [range(number, number + 1) for number in selected]
