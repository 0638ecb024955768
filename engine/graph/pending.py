"""What a save must not lose: values that were restored and have not found their objects, or not been given to them.

A save restores nothing: what an object has become since it was built is the program's, and is saved as it is or not at
all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..errors import StateError
from .paths import Path, shown
from .report import lines
from .restoration import Restoration

_logger = logging.getLogger("holdfast")


def check_restored(restorations: Sequence[Restoration]) -> None:
    """Makes sure that a save leaves nothing behind that a restore was asked for.

    Args:
        restorations: The restores of a checkpoint object, the first one first.

    Raises:
        StateError: Values wait for objects, or objects for their values, and nobody said that this is as intended.
    """
    lost: list[str] = []
    unrestored: list[str] = []
    for place, restoration in enumerate(restorations):
        if not restoration.outcome.unrestored():
            continue
        later = [other.wanted() for other in restorations[place + 1 :]]
        where = restoration.outcome.where

        def still(paths: list[Path], later: list[set[Path]] = later) -> list[Path]:
            return [path for path in paths if not any(path in wanted for wanted in later)]

        late = still(restoration.awaited())
        if restoration.outcome.partial:
            new = [shown(path) for path in late if path not in restoration.told]
            if new:
                what = "objects that were built since the restore from %s keep what the program gave them:\n%s"
                _logger.warning(what, where, "\n".join(lines("not restored", new)))
        else:
            waiting = set(late)
            unrestored += [f"{shown(path)} ({where})" for path in late]
            lost += [
                f"{shown(path)} ({where})" for path in still(restoration.outcome.unrestored()) if path not in waiting
            ]
        restoration.told.update(late)
    if lost or unrestored:
        raise StateError(
            "\n".join(
                [
                    "not everything that was restored has found its place, and nothing was written:",
                    *lines("values waiting for their objects, which a save would lose", lost),
                    *lines("objects that were built since the restore and have not got their values", unrestored),
                    "Build the objects and call try_complete() on the status that the restore returned, to take the "
                    "values of the checkpoint (a manager has the status of restore_or_initialize as manager.status); "
                    "call expect_partial() on it, to leave them behind and save what the program has",
                ]
            )
        )
