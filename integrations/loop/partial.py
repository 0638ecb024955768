"""A partial restore of a state that has changed: leaves of the same path, also if a chain of optimizers has grown."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

from ...engine.arrays import TreeReader
from ...engine.errors import TreeMismatchError
from ...engine.handlers import Files, PyTreeCheckpointHandler
from ...engine.pytree import TreeDef, collection_paused, key_segments
from ...engine.sources import Misfits, load_fitting
from ...engine.storage import Location

_Place = tuple[str, TreeDef | None]  # the name of a container or leaf, and its definition; None for a leaf


class FittingHandler(PyTreeCheckpointHandler):
    """Restores the leaves that fit a template; the others keep the values of the template, and are listed."""

    def __init__(self, misfits: Misfits, compression: int | None) -> None:
        super().__init__(compression=compression)
        self._misfits = misfits

    def restore(self, directory: Location, item: Any = None, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Read the tree; if the template differs from it, read what fits."""
        try:
            return super().restore(directory, item, files=files, **kwargs)
        except TreeMismatchError:
            if item is None:
                raise
        with collection_paused():
            reader, flat = TreeReader(directory, files), self._template(item)
            pairs = _pairs(("", reader.tree.structure), ("", flat.structure))
            return load_fitting(reader, flat, pairs, self._misfits)[0]


def _pairs(saved: _Place, wanted: _Place) -> Iterator[tuple[str, str]]:
    """Generate the names of corresponding leaves of two trees.

    Entries of dictionaries and attributes correspond by their keys. Chains of optimizers are tuples that may have grown
    and may be nested differently: the states in them correspond by their order and by the names of their classes.
    """
    if _is_tuple(saved[1]) or _is_tuple(wanted[1]):
        ours, theirs = list(_parts(saved)), list(_parts(wanted))
        kinds = [_kind(part, len(saved[0])) for part in ours]
        others = [_kind(part, len(wanted[0])) for part in theirs]
        for mine, yours, count in SequenceMatcher(None, kinds, others, autojunk=False).get_matching_blocks():
            for index in range(count):
                yield from _entries(ours[mine + index], theirs[yours + index])
    else:
        yield from _entries(saved, wanted)


def _entries(saved: _Place, wanted: _Place) -> Iterator[tuple[str, str]]:
    (_, one), (_, other) = saved, wanted
    if one is None or other is None:
        if one is other:
            yield saved[0], wanted[0]
        return
    if _optax(one) != _optax(other):
        return  # They are states of two different transformations.
    found = dict(_children(saved))
    for segment, child in _children(wanted):
        if segment in found:
            yield from _pairs(found[segment], child)


def _children(place: _Place) -> Iterator[tuple[str, _Place]]:
    name, node = place
    assert node is not None
    prefix = f"{name}." if name else ""
    for segment, child in zip(key_segments(node.keys, len(node.children)), node.children, strict=True):
        yield segment, (prefix + segment, child)


def _is_tuple(node: TreeDef | None) -> bool:
    return node is not None and node.kind == "tuple"


def _parts(place: _Place) -> Iterator[_Place]:
    """Generate the parts of a tuple and of tuples in it, without those that hold no leaf."""
    if _is_tuple(place[1]):
        for _, child in _children(place):
            yield from _parts(child)
    elif place[1] is None or _has_leaves(place[1]):
        yield place


def _has_leaves(node: TreeDef) -> bool:
    return any(child is None or _has_leaves(child) for child in node.children)


def _kind(part: _Place, prefix: int) -> str:
    name, node = part
    return (None if node is None else _optax(node)) or name[prefix:]


def _optax(node: TreeDef) -> str | None:
    """Return the name of the class of a state of optax, otherwise None."""
    label = node.label or ""
    return label.rpartition(".")[2] if label.startswith("optax.") else None
