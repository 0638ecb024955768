"""Containers made from the key paths of leaves, for formats that say no more than that about their trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DamagedCheckpointError
from ..tree import Skeleton, from_document, join
from ..tree.structure import MAX_DEPTH, key_segments

Path = tuple[str | int, ...]
"""The keys from the root to a leaf: int for a place in a list, str for a key of a dictionary."""


@dataclass(slots=True)
class _Branch:
    children: dict[str | int, _Branch | int] = field(default_factory=dict)
    empty: str = "dict"


def nested_skeleton(paths: Sequence[Path], empties: Sequence[tuple[Path, str]] = ()) -> tuple[Skeleton, list[int]]:
    """Makes the containers that leaves at these paths are in.

    A container whose keys are the integers from 0 on is a list; every other one is a dictionary.

    Args:
        paths: The path of every leaf; all are different. A single leaf may have the path ``()``: it is the tree.
        empties: Where there are containers without leaves, each with its kind, ``"dict"``, ``"list"`` or ``"tuple"``.

    Returns:
        The skeleton, and for each of its leaves, in its order, the index of the leaf in ``paths``.

    Raises:
        DamagedCheckpointError: A path is there twice, leads through a leaf, or is longer than trees are deep.
    """
    root = _Branch()
    for index, path in enumerate(paths):
        if not path:
            if len(paths) > 1 or empties:
                raise DamagedCheckpointError("a leaf is said to be the whole tree, and there are others")
            return Skeleton(None), [0]
        _place(root, path, index)
    for path, kind in empties:
        if path:
            _place(root, path, _Branch(empty=kind))
        else:
            root.empty = kind
    order: list[int] = []
    document = _document(root, order)
    _, _, skeleton = from_document({"tree": document, "leaves": [{"kind": "numpy"}] * len(order)})
    return skeleton, order


def storage_name(path: Path) -> str:
    """Returns the storage name of the leaf at a path."""
    return join([str(key) for key in path])


def _place(root: _Branch, path: Path, what: _Branch | int) -> None:
    if len(path) >= MAX_DEPTH:
        raise DamagedCheckpointError(f"the tree is nested deeper than {MAX_DEPTH} levels at {path[0]!r}")
    branch = root
    for key in path[:-1]:
        inner = branch.children.setdefault(key, _Branch())
        if not isinstance(inner, _Branch):
            raise DamagedCheckpointError(f"{list(path)} leads through a leaf")
        branch = inner
    if path[-1] in branch.children:
        raise DamagedCheckpointError(f"{list(path)} is there twice")
    branch.children[path[-1]] = what


def _document(branch: _Branch, order: list[int]) -> dict[str, Any]:
    keys = list(branch.children)
    kind = branch.empty
    if keys:
        kind = "list" if set(keys) == set(range(len(keys))) and not any(isinstance(k, str) for k in keys) else "dict"
    if kind == "list":
        keys.sort()
    children: list[dict[str, Any] | None] = []
    for key in keys:
        child = branch.children[key]
        if isinstance(child, _Branch):
            children.append(_document(child, order))
        else:
            order.append(child)
            children.append(None)
    if kind != "dict":
        return {"type": kind, "children": children}
    segments = key_segments(keys)
    stored = [segment if isinstance(key, str) else key for segment, key in zip(segments, keys, strict=True)]
    return {"type": "dict", "keys": stored, "children": children}
