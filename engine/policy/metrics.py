"""Metrics: how one number is taken out of what a training loop reports, and which of two numbers is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

Metric = str | Callable[[Mapping[str, Any]], Any]
"""A metric's name, with ``/`` between the names of nested mappings, or a function of all metrics of a step."""

Mode = Literal["max", "min"]
"""Whether larger or smaller values are better."""

_ABSENT = object()


def metric_value(metrics: Mapping[str, Any] | None, metric: Metric) -> float | None:
    """Returns one metric of a step as a number.

    Args:
        metrics: The metrics of one step, possibly nested; values are numbers or arrays of one element, of any library.
        metric: The metric's name, such as ``"val/loss"`` for the key ``"val/loss"`` or for ``"loss"`` inside ``"val"``,
            or a function of the metrics; a function that raises ``KeyError`` found no metric.

    Returns:
        The value, possibly infinite; None when it is missing, NaN or not a number.

    >>> metric_value({"val": {"loss": 0.5}}, "val/loss")
    0.5
    """
    if metrics is None:
        return None
    if isinstance(metric, str):
        return _number(_lookup(metrics, metric))
    try:
        return _number(metric(metrics))
    except KeyError:
        return None


def metric_name(metric: Metric) -> str:
    """Returns what a metric is called in messages: its name, or the function's name where it has one of its own."""
    if isinstance(metric, str):
        return metric
    name = getattr(metric, "__name__", "")
    return name if isinstance(name, str) and name.isidentifier() else "metric"


def better(value: float, other: float, mode: Mode) -> bool:
    """Returns whether a value is strictly better than another.

    Args:
        value: The value in question.
        other: The value that it must beat.
        mode: ``"max"`` when larger is better, ``"min"`` when smaller is.
    """
    return value > other if mode == "max" else value < other


def _lookup(metrics: Mapping[str, Any], name: str) -> Any:
    # A key may hold slashes itself, so every way of splitting the name is tried, longest key first.
    if name in metrics:
        return metrics[name]
    cut = name.rfind("/")
    while cut >= 0:
        inner = metrics.get(name[:cut])
        if isinstance(inner, Mapping):
            found = _lookup(inner, name[cut + 1 :])
            if found is not _ABSENT:
                return found
        cut = name.rfind("/", 0, cut)
    return _ABSENT


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float)):
        # An array of one element is a number, whatever its shape; `float` would warn about one of shape (1,). Errors of
        # the computation behind an array come out here, and must not pass for a missing metric.
        if math.prod(getattr(value, "shape", ())) != 1:
            return None
        item = getattr(value, "item", None)
        value = item() if callable(item) else value
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number
