"""Metrics on their way from the device into a checkpoint's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def host_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metrics as Python numbers; all that are on a device are on their way before the first is waited for.

    Args:
        metrics: Numbers and one-element arrays of any library by name, possibly nested. Anything else, such as a
            confusion matrix, is left out.
    """
    _start_copies(metrics)
    return _numbers(metrics)


def _start_copies(metrics: Mapping[str, Any]) -> None:
    for value in metrics.values():
        if isinstance(value, Mapping):
            _start_copies(value)
        elif (start := getattr(value, "copy_to_host_async", None)) is not None:
            start()


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            numbers[str(name)] = _numbers(value)
        elif (number := _number(value)) is not None:
            numbers[str(name)] = number
    return numbers


def _number(value: Any) -> bool | int | float | None:
    if isinstance(value, (str, bytes)):  # float() would read them
        return None
    item = getattr(value, "item", None)
    try:
        value = item() if callable(item) else value
        return value if isinstance(value, (bool, int, float)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
