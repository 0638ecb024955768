"""What groups leave behind in the store, and when it can go."""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

from .coordinator import Coordinator

_logger = logging.getLogger("holdfast")

_MOST_RETIRED = 64  # groups that one of the others never closed, as it died
_MOST_TOLD = 4000  # keys


def retire(coordinator: Coordinator, prefix: str, keys: Iterable[str], gone: set[str]) -> None:
    """Takes note that this process is done with a group. Process 0 deletes its keys once all others are, too.

    Args:
        coordinator: Connects the processes.
        prefix: Begins all keys of the group.
        keys: What this process knows to be in the store.
        gone: What is known to be deleted already.
    """
    try:
        if coordinator.process_index:
            told = json.dumps(list(keys)[:_MOST_TOLD]).encode()
            coordinator.put(f"{prefix}/left/{coordinator.process_index}", told)
            return
        pending = list(range(1, coordinator.process_count))
        with _lock:
            retired = _retired.setdefault(coordinator, [])
            retired.append(_Retired(prefix, [*keys, f"{prefix}/failed"], gone, pending))
            del retired[:-_MOST_RETIRED]
            # Those of former saves have been left by now, unlike this one's, for which the others get a moment.
            retired[:] = [group for group in retired if not group.sweep(coordinator)]
    except Exception as error:
        _logger.debug("%s: what it left in the store stays there: %s", prefix, error)


@dataclass(slots=True)
class _Retired:
    """A group that process 0 has closed, and perhaps others have not."""

    prefix: str
    keys: list[str]
    gone: set[str]
    pending: list[int] = field(default_factory=list)

    def sweep(self, coordinator: Coordinator) -> bool:
        """Deletes everything if all processes have left; says whether that is so."""
        while self.pending:
            key = f"{self.prefix}/left/{self.pending[-1]}"
            told = coordinator.try_get(key)
            if told is None:
                return False
            self.keys += [key, *json.loads(told)]
            self.pending.pop()
        for key in self.keys:
            if key not in self.gone:
                coordinator.delete(key)
        return True


_retired: weakref.WeakKeyDictionary[Coordinator, list[_Retired]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
