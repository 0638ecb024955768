"""From a saved tree to the tree that the caller asked for: template, selection, comparison."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from ..errors import OptionError, TreeMismatchError
from ..tree import (
    Flattened,
    LeafMetadata,
    LeafRequest,
    Partition,
    Target,
    compare,
    compare_metadata,
    describe_template,
    display,
    flatten,
    materialize,
    metadata_of,
    partition,
    requested,
    spell,
    unflatten,
)
from .database import naming
from .reader import SavedLeaf, TreeReader

Select = str | Sequence[str]
"""Patterns of leaf paths such as ``"params/**"``: ``*``, ``?`` and ``[ab]`` match within one key, ``**`` matches any
number of whole keys."""


def load_tree(
    reader: TreeReader,
    *,
    like: Any = None,
    select: Select | None = None,
    requests: Mapping[str, LeafRequest] | None = None,
) -> Any:
    """Reads a tree.

    Of arrays that are spread over the devices of several processes, each process reads what its own devices hold.

    Args:
        reader: The saved tree.
        like: The template, or what `flatten` made of one; None for the saved containers with numpy arrays.
        select: Patterns of paths; leaves that match none are left out, and a template has none of them. None takes all.
        requests: What is asked for single leaves, by their storage names, before what the template says.

    Returns:
        The tree; without the leaves that were not selected, and the containers that have none left.

    Raises:
        TreeMismatchError: Template, requests and checkpoint differ, or a pattern matches nothing.
        OptionError: A request contradicts itself, or is for a leaf that there is not.
        DamagedCheckpointError: What is stored does not verify.
    """
    requests = requests or {}
    _check_names(requests, reader)
    if like is None:
        chosen = _chosen(reader.leaves, select)
        leaves = [leaf for leaf, wanted in zip(reader.leaves, chosen, strict=True) if wanted]
        skeleton = reader.skeleton if select is None else reader.skeleton.select(chosen)
        return skeleton.build(_values(reader, leaves, _requested(reader, leaves, requests)))
    template = like if isinstance(like, Flattened) else flatten(like)
    targets = describe_template(template.names, template.values)
    leaves, targets = _matching(reader, targets, select, requests)
    return unflatten(template.structure, _values(reader, leaves, targets))


def tree_metadata(reader: TreeReader) -> Any:
    """Returns the saved containers with a :class:`LeafMetadata` in the place of every leaf; no data is read."""
    return reader.skeleton.build([metadata_of(leaf.saved) for leaf in reader.leaves])


def _values(reader: TreeReader, leaves: Sequence[SavedLeaf], targets: Sequence[Target | None]) -> list[Any]:
    """Reads leaves, of those that are spread over devices only what is needed, and makes what is asked for."""
    cuts = _partitions(reader, leaves, targets)
    cutting = hasattr(reader, "read_boxes")  # checkpoints of other libraries are read leaf by leaf, and cut then
    if not cutting:
        cuts.clear()
    parts: dict[int, tuple[Partition, Sequence[NDArray[Any]]]] = {}
    if cuts:
        found = reader.read_boxes([leaves[index] for index in cuts], [cut.stored for cut in cuts.values()])
        parts = {index: (cut, pieces) for (index, cut), pieces in zip(cuts.items(), found, strict=True)}
    whole = iter(reader.read([leaf for index, leaf in enumerate(leaves) if index not in parts]))
    arrays = [None if index in parts else next(whole) for index in range(len(leaves))] if parts else list(whole)
    saved, names = [leaf.saved for leaf in leaves], [leaf.name for leaf in leaves]
    with naming(reader.location):
        return materialize(targets, saved, arrays, names, parts if cutting else None)


def _partitions(
    reader: TreeReader, leaves: Sequence[SavedLeaf], targets: Sequence[Target | None]
) -> dict[int, Partition]:
    """Returns the parts that are needed of leaves that are not needed as they are, by position."""
    cuts: dict[int, Partition] = {}
    problems = []
    for index, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        if target is None:
            continue
        try:
            cut = partition(target, leaf.saved)
        except ValueError as error:
            expected = spell(target.kind, target.dtype, target.shape, target.variant)
            problems.append(f"{display(leaf.name)}: {expected} cannot be spread as asked: {error}")
            continue
        if cut is not None:
            cuts[index] = cut
    if problems:
        raise TreeMismatchError(f"{reader.location}: {len(problems)} shardings do not fit their leaves:", problems)
    return cuts


def _check_names(requests: Mapping[str, LeafRequest], reader: TreeReader) -> None:
    unknown = sorted(requests.keys() - {leaf.name for leaf in reader.leaves}) if requests else []
    if unknown:
        raise OptionError(
            f"{reader.location}: requests are made for {', '.join(map(display, unknown[:8]))}, which are not in "
            "the checkpoint; name its leaves only"
        )


def _requested(
    reader: TreeReader, leaves: Sequence[SavedLeaf], requests: Mapping[str, LeafRequest]
) -> list[Target | None]:
    """Returns what is asked for where there is no template; raises one error for all that does not fit."""
    if not requests:
        return [None] * len(leaves)
    targets = [
        requested(leaf.name, requests[leaf.name], leaf.saved, None) if leaf.name in requests else None
        for leaf in leaves
    ]
    pairs = zip(leaves, targets, strict=True)
    found = [compare(target, leaf.saved) for leaf, target in pairs if target is not None]
    differences = [difference for difference in found if difference is not None]
    if differences:
        raise TreeMismatchError(
            f"{reader.location}: {len(differences)} of {len(requests)} requests do not fit the checkpoint:", differences
        )
    return targets


def _matching(
    reader: TreeReader, targets: Sequence[Target], select: Select | None, requests: Mapping[str, LeafRequest]
) -> tuple[list[SavedLeaf], list[Target]]:
    """Returns for every leaf of a template what was saved and what is asked; raises one error for all that differ."""
    saved = {leaf.name: leaf for leaf in reader.leaves}
    chosen = {leaf.name for leaf, wanted in zip(reader.leaves, _chosen(reader.leaves, select), strict=True) if wanted}
    asked = {target.name for target in targets}
    originals = targets
    if requests:
        targets = [
            requested(target.name, requests[target.name], saved[target.name].saved, target)
            if target.name in requests
            else target
            for target in targets
        ]
    differences = []
    for target, wanted in zip(targets, originals, strict=True):
        leaf = saved.get(target.name)
        if leaf is not None and target.name in chosen:
            difference = compare(target, leaf.saved)
            if difference is None and isinstance(wanted.template, LeafMetadata) and not target.resize:
                difference = compare_metadata(target.name, wanted.template, leaf.saved)
        else:
            expected = spell(target.kind, target.dtype, target.shape, target.variant)
            why = "not in the checkpoint" if leaf is None else "not selected"
            if leaf is None and any(name.startswith(f"{target.name}.") for name in saved):
                why = "a container in the checkpoint"
            difference = f"{display(target.name)}: expected {expected} (template), {why}"
        if difference is not None:
            differences.append(difference)
    for leaf in reader.leaves:
        if leaf.name in chosen and leaf.name not in asked:
            kept = spell(leaf.saved.kind, leaf.saved.dtype, leaf.saved.shape)
            differences.append(f"{display(leaf.name)}: not in the template, found {kept} (checkpoint)")
    if differences:
        raise TreeMismatchError(
            f"{reader.location}: template and checkpoint differ in {len(differences)} of "
            f"{len(asked | saved.keys())} leaves; make them agree, or load a part of the checkpoint with select=",
            differences,
        )
    return [saved[target.name] for target in targets], list(targets)


def _chosen(leaves: Sequence[SavedLeaf], select: Select | None) -> list[bool]:
    if select is None:
        return [True] * len(leaves)
    patterns = [select] if isinstance(select, str) else list(select) if isinstance(select, Sequence) else [select]
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(
            f"select={select!r} must be a pattern of paths such as 'params/**', or a list of such patterns"
        )
    paths = [display(leaf.name) for leaf in leaves]
    keys = [path.split("/") for path in paths]
    chosen = [False] * len(leaves)
    for pattern in patterns:
        parts = [None if key == "**" else re.compile(fnmatch.translate(key)) for key in pattern.split("/")]
        hits = [_matches(path, parts) for path in keys]
        if not any(hits):
            raise TreeMismatchError(
                f"select={pattern!r} matches no leaf; the checkpoint has {', '.join(map(repr, paths[:8]))}"
                + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")
            )
        chosen = [one or other for one, other in zip(chosen, hits, strict=True)]
    return chosen


def _matches(path: list[str], pattern: Sequence[re.Pattern[str] | None]) -> bool:
    """Whether a path, key by key, matches a pattern; None in it stands for any number of keys."""
    if not pattern:
        return not path
    head, rest = pattern[0], pattern[1:]
    if head is None:
        return any(_matches(path[start:], rest) for start in range(len(path) + 1))
    return bool(path) and head.fullmatch(path[0]) is not None and _matches(path[1:], rest)
