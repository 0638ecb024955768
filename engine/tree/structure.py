"""The containers of a tree, with their leaves taken out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .names import escape_first, escape_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Key = str | int
"""A key of a mapping or the name of an attribute. ``True`` and ``False`` are keys of their own in documents."""

MAX_DEPTH = 200
"""Containers inside containers. Deeper trees are errors: what walks them, JSON included, recurses."""

_LARGEST_KEY = 1 << 63  # integer keys are those of 64 bits


@dataclass(slots=True)
class Node:
    """One container.

    Attributes:
        kind: "dict", "ordered_dict", "default_dict", "counter", "mapping", "list", "tuple", "namedtuple", "dataclass"
            or "node" (a type that is registered with jax).
        keys: One key for each child, or None for the sequences "list" and "tuple".
        children: One for each child: its node, or None for a leaf.
        build: Makes the container from its children, in the order of `children`.
        label: What people want to know of it: the class's name, or the default factory's.
    """

    kind: str
    keys: list[Key] | None
    children: list[Node | None]
    build: Callable[[list[Any]], Any]
    label: str | None = None


class KeyProblem(ValueError):  # noqa: N818 - caught one level up, never seen by a user
    """A key that cannot be stored; its text says why."""


def plain_key(key: object) -> Key:
    """Gives the plain str, int or bool that equals a key.

    Raises:
        KeyProblem: The key is of another type.
    """
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bool | np.bool_):
        return bool(key)
    if isinstance(key, int | np.integer):
        number = int(key)
        if not -_LARGEST_KEY <= number < _LARGEST_KEY:
            raise KeyProblem("has an integer key that does not fit 64 bits; use a string")
        return number
    raise KeyProblem(f"has the key {key!r:.80} of type {type(key).__name__}; keys must be str or int")


def key_segments(keys: Sequence[object]) -> list[str]:
    """Gives the part that each key of one container adds to the names below it.

    All are different: where an int and a str key read the same (``1`` and ``"1"``), the str is escaped.

    Raises:
        KeyProblem: A key is neither str nor int, or two keys are the same.
    """
    segments: list[str] = []
    odd = False
    for key in keys:
        if type(key) is str:
            segments.append(key if key.isidentifier() and not key.endswith("__lock") else escape_key(key))
        else:
            odd = True
            plain = plain_key(key)
            segments.append(escape_key(plain) if isinstance(plain, str) else str(plain))
    if odd:
        taken = {segment for segment, key in zip(segments, keys, strict=True) if not isinstance(key, str)}
        for index, key in enumerate(keys):
            if isinstance(key, str) and segments[index] in taken:
                segments[index] = escape_first(str.__str__(key))
    if len(set(segments)) != len(segments):
        raise KeyProblem("has two keys that are the same once they are plain str or int")
    return segments


def unflatten(structure: Node | None, values: Sequence[Any]) -> Any:
    """Puts leaves into containers again.

    Args:
        structure: What `flatten` said of the tree; None is a tree that is one bare leaf.
        values: One value for each leaf, in the order of `flatten`.

    Returns:
        The tree, of the original container types.

    Raises:
        ValueError: The number of values is not the number of leaves.
    """
    remaining = iter(values)
    try:
        tree = next(remaining) if structure is None else _build(structure, remaining)
    except StopIteration:
        raise ValueError(f"the tree has more leaves than the {len(values)} values given") from None
    left = sum(1 for _ in remaining)
    if left:
        raise ValueError(f"the tree has {len(values) - left} leaves, {len(values)} values were given")
    return tree


def _build(node: Node, values: Any) -> Any:
    return node.build([next(values) if child is None else _build(child, values) for child in node.children])
