"""Locks and properties that a forked process, such as a data loader's worker, can safely inherit.

Only the forking thread exists in the child, so a lock that another thread held during the fork would stay locked
forever. Every lock that a child may use is therefore a :class:`Lock`, and cached properties use no locks.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

_T = TypeVar("_T")


class Lock:
    """A ``threading.Lock``, or an ``RLock`` if ``reentrant``, that is always unlocked in a newly forked process."""

    def __init__(self, *, reentrant: bool = False) -> None:
        self._make = threading.RLock if reentrant else threading.Lock
        self._lock = self._make()
        _locks.add(self)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class cached_property(Generic[_T]):  # noqa: N801 - named like functools.cached_property
    """``functools.cached_property`` without its lock, which all instances of a class share in Python 3.11."""

    def __init__(self, make: Callable[[Any], _T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> _T: ...
    def __get__(self, instance: object | None, owner: type) -> Self | _T:
        if instance is None:
            return self
        value: _T = vars(instance).setdefault(self._name, self._make(instance))
        return value


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _renew() -> None:
    for lock in list(_locks):
        lock._lock = lock._make()


os.register_at_fork(after_in_child=_renew)
