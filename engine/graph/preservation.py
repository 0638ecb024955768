"""Checkpoints that are kept for good, one in every so many hours, once they are not among the newest any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..options import CheckpointManagerOptions
from ..policy import Rule, StepInfo

PRESERVED = "preserved for good"


@dataclass(frozen=True)
class KeepPreserved:
    """Keeps steps for good that were committed an interval or more after the one before that was.

    Only steps that are not among the newest any more are judged, the oldest first; what was deleted does not count.

    Attributes:
        seconds: The interval, in seconds.
        since: What the first is measured from, in seconds since 1970-01-01 UTC.
        newest: How many of the newest steps are not judged yet.
    """

    seconds: float
    since: float
    newest: int

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Returns the steps that are preserved."""
        kept: dict[int, str] = {}
        last = self.since
        for info in sorted(steps, key=lambda info: info.step)[: -self.newest]:
            if info.time - self.seconds >= last:
                kept[info.step] = PRESERVED
                last = info.time
        return kept


@dataclass(frozen=True, kw_only=True)
class KeeperOptions(CheckpointManagerOptions):
    """The options of a keeper's manager.

    Attributes:
        preserve_secs: The interval of what is kept for good, in seconds; None keeps nothing for good.
        preserve_since: What the first is measured from, in seconds since 1970-01-01 UTC.
    """

    preserve_secs: float | None = None
    preserve_since: float = 0.0

    def rules(self) -> tuple[Rule, ...]:
        """Returns what keeps a checkpoint."""
        rules = super().rules()
        if self.preserve_secs is None or self.max_to_keep is None:
            return rules
        return (*rules, KeepPreserved(self.preserve_secs, self.preserve_since, self.max_to_keep))

    def to_document(self) -> dict[str, Any]:
        """Returns the retention rules as JSON, for those who look at the directory later."""
        interval: Mapping[str, Any] = {} if self.preserve_secs is None else {"keep_time_interval": self.preserve_secs}
        return {**super().to_document(), **interval}
