"""From a saved tree to the tree that the caller asked for: template, selection, comparison."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import OptionError, TreeMismatchError
from ..tree import Target, compare, describe_template, display, flatten, materialize, spell, unflatten
from .database import naming
from .reader import SavedLeaf, TreeReader

Select = str | Sequence[str]
"""Patterns of leaf paths such as ``"params/**"``: ``*``, ``?`` and ``[ab]`` match within one key, ``**`` matches any
number of whole keys."""


@dataclass(frozen=True, slots=True)
class LeafMetadata:
    """What is known of a saved leaf without reading it.

    Attributes:
        kind: What it was: ``"numpy"``, ``"jax"``, ``"torch"``, ``"key"``, ``"int"``, ``"str"``, ...
        shape: Its shape; ``()`` for a value that is no array.
        dtype: The name of its element type, or None for a value that is no array.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str | None

    def __str__(self) -> str:
        return self.kind if self.dtype is None else f"{self.dtype}{list(self.shape)}"


def load_tree(reader: TreeReader, *, like: Any = None, select: Select | None = None) -> Any:
    """Reads a tree.

    Args:
        reader: The saved tree.
        like: The template, or None for the saved containers with numpy arrays.
        select: Patterns of paths; leaves that match none are left out, and a template has none of them. None takes all.

    Returns:
        The tree; without the leaves that were not selected, and the containers that have none left.

    Raises:
        TreeMismatchError: Template and checkpoint differ, or a pattern matches nothing.
        DamagedCheckpointError: What is stored does not verify.
    """
    if like is None:
        chosen = _chosen(reader.leaves, select)
        leaves = [leaf for leaf, wanted in zip(reader.leaves, chosen, strict=True) if wanted]
        skeleton = reader.skeleton if select is None else reader.skeleton.select(chosen)
        return skeleton.build(_values(reader, leaves, [None] * len(leaves)))
    template = flatten(like)
    targets = describe_template(template.names, template.values)
    leaves = _matching(reader, targets, select)
    return unflatten(template.structure, _values(reader, leaves, targets))


def tree_metadata(reader: TreeReader) -> Any:
    """Returns the saved containers with a :class:`LeafMetadata` in the place of every leaf; no data is read."""
    return reader.skeleton.build(
        [
            LeafMetadata(
                leaf.saved.kind, leaf.saved.shape or (), None if leaf.saved.dtype is None else str(leaf.saved.dtype)
            )
            for leaf in reader.leaves
        ]
    )


def _values(reader: TreeReader, leaves: Sequence[SavedLeaf], targets: Sequence[Target | None]) -> list[Any]:
    arrays = reader.read(leaves)
    with naming(reader.location):
        return materialize(targets, [leaf.saved for leaf in leaves], arrays, [leaf.name for leaf in leaves])


def _matching(reader: TreeReader, targets: Sequence[Target], select: Select | None) -> list[SavedLeaf]:
    """Returns the saved leaf for every leaf of a template; raises one error for all that do not fit."""
    saved = {leaf.name: leaf for leaf in reader.leaves}
    chosen = {leaf.name for leaf, wanted in zip(reader.leaves, _chosen(reader.leaves, select), strict=True) if wanted}
    asked = {target.name for target in targets}
    differences = []
    for target in targets:
        leaf = saved.get(target.name)
        if leaf is not None and target.name in chosen:
            difference = compare(target, leaf.saved)
        else:
            expected = spell(target.kind, target.dtype, target.shape, target.variant)
            why = "not in the checkpoint" if leaf is None else "not selected"
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
    return [saved[target.name] for target in targets]


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
