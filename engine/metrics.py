"""Metrics as they are stored: nested dictionaries of plain numbers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from .errors import OptionError


def plain_metrics(metrics: Mapping[str, Any] | None, path: str = "") -> dict[str, Any] | None:
    """Turns metrics into plain numbers, fetching those that are still on a device.

    Args:
        metrics: Numbers or arrays of one element, of any library, possibly nested; None where there are none.
        path: Where in the metrics this is, for messages.

    Returns:
        The same with Python numbers.

    Raises:
        OptionError: Something in it is no number.
    """
    if metrics is None:
        return None
    if not isinstance(metrics, Mapping):
        raise OptionError(f"metrics must be a dictionary of numbers, not {type(metrics).__name__}")
    found: dict[str, Any] = {}
    for key, value in metrics.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            found[str(key)] = plain_metrics(value, f"{name}/")
        elif type(value) is int or isinstance(value, bool):
            found[str(key)] = int(value)
        else:
            try:
                found[str(key)] = float(value)
            except (TypeError, ValueError) as error:
                raise OptionError(f"metric {name!r} is not a number but {value!r:.60}") from error
    return found


class LateMetrics:
    """The metrics of the step that is being saved; more may come until its record is written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step: int | None = None
        self._metrics: dict[str, Any] | None = None

    def open(self, step: int, metrics: dict[str, Any] | None) -> None:
        """Begins a step with the metrics that are known already."""
        with self._lock:
            self._step, self._metrics = step, metrics

    def add(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Adds metrics of a step; returns False when it is too late, or another step's turn."""
        with self._lock:
            if step != self._step:
                return False
            self._metrics = {**(self._metrics or {}), **metrics}
            return True

    def peek(self) -> dict[str, Any] | None:
        """Returns the metrics that are known so far."""
        with self._lock:
            return self._metrics

    def close(self) -> dict[str, Any] | None:
        """Returns all metrics of the step, which from now on takes no more."""
        with self._lock:
            self._step = None
            return self._metrics
