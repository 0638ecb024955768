"""Which values of a checkpoint a restore has restored, kept apart from it so that they are known when it is gone."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from .paths import Path, shown
from .report import lines

_logger = logging.getLogger("holdfast")


@dataclass(slots=True)
class Outcome:
    """Which values of a checkpoint were restored; outlives the restore, so that what never was can be told.

    Attributes:
        paths: The paths of all values, by their nodes.
        wanted: The nodes of those that shall be restored.
        where: Where they come from.
        restored: The nodes of those that were.
        partial: Whether it is as intended if some never are.
    """

    paths: dict[int, Path]
    wanted: set[int]
    where: str
    restored: set[int] = field(default_factory=set)
    partial: bool = False

    def left(self) -> list[int]:
        """Returns the nodes of the values that were not restored."""
        return [number for number in self.paths if number in self.wanted and number not in self.restored]

    def unrestored(self) -> list[Path]:
        """Returns the paths of the values that were not restored."""
        return [self.paths[number] for number in self.left()]

    def warn(self) -> None:
        """Tells what was never restored, once nothing can ask for it any more."""
        left = [] if self.partial else self.unrestored()
        if left:
            _logger.warning(
                "a checkpoint object is gone, and values of %s were never restored; say expect_partial() if that is "
                "as intended:\n%s",
                self.where,
                "\n".join(lines("not restored", [shown(path) for path in left])),
            )
