"""Which of a trainer's metrics belong to the step that is being saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class MetricsLedger:
    """Tells fresh metrics from stale ones.

    ``trainer.callback_metrics`` holds the last value of every metric that was ever logged: 50 steps after a validation
    its ``val_loss`` is still there, although it was measured on other parameters. Ranked by it, the later checkpoint
    would pass for as good as the one that was validated. The ledger is shown the metrics whenever some may have been
    added, and notes at which step each came up.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, int]] = {}

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Notes which metrics are new.

        Args:
            step: The number of updates done.
            metrics: ``trainer.callback_metrics``.
        """
        for name, value in metrics.items():
            seen = self._seen.get(name)
            if seen is None or not _same_value(seen[0], value):
                self._seen[name] = (value, step)

    def of(self, step: int) -> dict[str, float]:
        """Returns the metrics of one step as numbers, fetched from their device."""
        return {name: float(value) for name, (value, at) in self._seen.items() if at == step}


def _same_value(one: Any, other: Any) -> bool:
    """Returns whether this is the very same logged value: the same memory, not the same number."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # Lightning hands out a new view at every access. As the one seen is kept, its memory is not used for another.
        return one.data_ptr() == other.data_ptr()
    return one is other
