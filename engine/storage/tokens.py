"""Credentials that end, such as access tokens: they are kept, and renewed before that."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from .transfer import tls_context

T = TypeVar("T")

_PAUSE = 60.0  # seconds until a missing token is requested again
_LONGEST = 1 << 20  # bytes of an answer


@dataclass
class _Kept(Generic[T]):
    value: T | None
    renewed_at: float  # the time of the next request, by time.monotonic()
    ends_at: float


class Renewed(Generic[T]):
    """Credentials by the settings that they come from; ``find`` returns new ones and the seconds until they end.

    They are renewed ``early`` seconds before their end; at half their time, if that is later.
    """

    def __init__(self, find: Callable[[], tuple[T, float]], early: float) -> None:
        self._find = find
        self._early = early
        self._lock = threading.Lock()
        self._known: dict[Hashable, _Kept[T]] = {}
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self) -> None:
        """Replace the lock in a forked process: a thread of the parent, which the child lacks, may hold it."""
        self._lock = threading.Lock()

    def get(self, settings: Hashable) -> T | None:
        """Return the credentials of these settings, None without any; those that have not ended outlast a failure."""
        with self._lock:
            kept = self._known.get(settings)
            now = time.monotonic()
            if kept is not None and now < kept.renewed_at:
                return kept.value
            try:
                value, seconds = self._find()
                found = _Kept[T](value, now + max(seconds - self._early, seconds / 2), now + seconds)
            except Exception:  # what it holds may be secret; TensorStore, which is asked next, explains what is missing
                lasting = kept is not None and now < kept.ends_at
                found = _Kept(kept.value if lasting and kept else None, now + _PAUSE, kept.ends_at if kept else now)
            self._known[settings] = found
            return found.value

    def forget(self, is_refused: Callable[[T], bool]) -> None:
        """Drop credentials that have ended early: the clock behind their end stands still while a machine sleeps."""
        with self._lock:
            self._known = {
                settings: kept
                for settings, kept in self._known.items()
                if kept.value is None or not is_refused(kept.value)
            }


def answer_of(request: urllib.request.Request, timeout: float) -> bytes:
    """Return the body of an answer; bypass proxies, as services of the machine are not behind one.

    The answer must begin within ``timeout`` seconds, and all of it arrive within as many more.
    """
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls_context())]
    with urllib.request.build_opener(*handlers).open(request, timeout=timeout) as response:
        deadline = time.monotonic() + timeout
        content = b""
        while part := response.read1():
            content += part
            if time.monotonic() > deadline or len(content) > _LONGEST:
                raise TimeoutError
    return content
