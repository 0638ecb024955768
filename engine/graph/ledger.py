"""Which restore wrote to a cell last: the one that was called last wins, in whatever order objects turn up."""

from __future__ import annotations

import itertools
import weakref

from .cells import Cell
from .paths import Path

_numbers = itertools.count(1)
_entries: dict[int, tuple[weakref.ref[object], dict[Path, int]]] = {}


def next_number() -> int:
    """Returns the number of a new restore, higher than those of all before."""
    return next(_numbers)


def last_restore(cell: Cell) -> int:
    """Returns the number of the restore that wrote to a cell last; 0 if none did."""
    entry = _entries.get(id(cell.anchor))
    if entry is None or entry[0]() is not cell.anchor:
        return 0
    return entry[1].get(cell.trail, 0)


def note_restore(cell: Cell, number: int) -> None:
    """Notes that a restore has written to a cell."""
    key = id(cell.anchor)
    entry = _entries.get(key)
    if entry is None or entry[0]() is not cell.anchor:
        entry = _entries[key] = (weakref.ref(cell.anchor, lambda gone: _forget(key, gone)), {})
    entry[1][cell.trail] = number


def _forget(key: int, gone: weakref.ref[object]) -> None:
    entry = _entries.get(key)
    if entry is not None and entry[0] is gone:
        del _entries[key]
