"""The names in an object store as they were at one moment, so that looking around costs one request."""

from __future__ import annotations

from bisect import bisect_left

from .kvstore import KvStoreBackend


class KvStoreSnapshot(KvStoreBackend):
    """A store whose names below a key do not change any more; content is read as it is now.

    Args:
        store: The store.
        key: Below which the names are listed: now, and not again.
    """

    def __init__(self, store: KvStoreBackend, key: str) -> None:
        super().__init__(store.scheme, store.bucket, store.spec)
        self._store = store._store  # type: ignore[method-assign]  # opened once, for both
        self._prefix = f"{key}/" if key else ""
        self._known = [self._prefix + name for name in store.names(key)]
        self._others: dict[str, bool] = {}

    def is_there(self, key: str) -> bool:
        """Returns whether an object had this key."""
        if not key.startswith(self._prefix):  # the key itself, most of the time, and more than once
            if key not in self._others:
                self._others[key] = super().is_there(key)
            return self._others[key]
        at = bisect_left(self._known, key)
        return at < len(self._known) and self._known[at] == key

    def _names(self, key: str, prefix: str) -> list[str]:
        if not prefix.startswith(self._prefix):
            return super()._names(key, prefix)
        first = bisect_left(self._known, prefix)
        return self._known[first : bisect_left(self._known, f"{key}0") if key else None]
