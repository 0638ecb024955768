"""Which restore wrote to a cell last: the one that was called last wins, in whatever order objects turn up."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from .cells import Cell
from .paths import Path

_numbers = itertools.count(1)
_entries: dict[int, tuple[weakref.ref[object], dict[Path, int]]] = {}
_proxies: weakref.WeakValueDictionary[int, Proxy] = weakref.WeakValueDictionary()


class Proxy:
    """Stands for an object that cannot be referred to weakly, and keeps it alive; whoever wants that keeps the proxy.

    Attributes:
        thing: The object.
    """

    __slots__ = ("__weakref__", "thing")

    def __init__(self, thing: Any) -> None:
        self.thing = thing


def proxy(thing: Any) -> Proxy:
    """Returns the one proxy of an object that there is as long as somebody keeps it."""
    found = _proxies.get(id(thing))
    if found is None or found.thing is not thing:
        found = _proxies[id(thing)] = Proxy(thing)
    return found


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
