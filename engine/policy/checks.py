"""Checks of the values that rules and triggers are made of."""

from __future__ import annotations

import math
import operator
from typing import Any

from ..errors import OptionError


def whole_number(owner: object, field: str, value: Any) -> None:
    """Checks that a count or a number of steps is a whole number of at least 1.

    Args:
        owner: The rule or trigger, for the error message.
        field: The field's name, for the error message.
        value: What was given.

    Raises:
        OptionError: The value is something else.
    """
    try:
        valid = not isinstance(value, bool) and operator.index(value) >= 1
    except TypeError:
        valid = False
    if not valid:
        raise OptionError(f"{type(owner).__name__}: {field}={value!r}, expected a whole number of at least 1")


def positive_seconds(owner: object, value: Any) -> None:
    """Checks that a duration is a finite number of seconds above zero.

    Args:
        owner: The rule or trigger, for the error message.
        value: What was given.

    Raises:
        OptionError: The value is something else.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):
        raise OptionError(f"{type(owner).__name__}: seconds={value!r}, expected a number of seconds above zero")


def metric_and_mode(owner: object, metric: Any, mode: Any) -> None:
    """Checks that a metric is a name or a function, and a mode ``"max"`` or ``"min"``.

    Args:
        owner: The rule or trigger, for the error message.
        metric: What was given as the metric.
        mode: What was given as the mode.

    Raises:
        OptionError: One of them is something else.
    """
    name = type(owner).__name__
    if not (callable(metric) or (isinstance(metric, str) and metric)):
        raise OptionError(f"{name}: metric={metric!r}, expected the name of a metric or a function of the metrics")
    if mode not in ("max", "min"):
        raise OptionError(f"{name}: mode={mode!r}, expected 'max' or 'min'")
