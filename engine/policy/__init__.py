"""When to save and what to keep: pure functions of a list of steps, without I/O and without a clock of their own."""

from __future__ import annotations

from .metrics import Metric, Mode, better, metric_name, metric_value
from .retention import (
    KeepAll,
    KeepBest,
    KeepLatest,
    KeepPeriod,
    KeepPinned,
    KeepSteps,
    KeepTimeInterval,
    KeepWithoutMetrics,
    Rule,
    StepInfo,
    best,
    reasons,
)
from .triggers import AtEnd, Decision, EverySeconds, EverySteps, Moment, OnBest, Trigger, decide

__all__ = [
    "AtEnd",
    "Decision",
    "EverySeconds",
    "EverySteps",
    "KeepAll",
    "KeepBest",
    "KeepLatest",
    "KeepPeriod",
    "KeepPinned",
    "KeepSteps",
    "KeepTimeInterval",
    "KeepWithoutMetrics",
    "Metric",
    "Mode",
    "Moment",
    "OnBest",
    "Rule",
    "StepInfo",
    "Trigger",
    "best",
    "better",
    "decide",
    "metric_name",
    "metric_value",
    "reasons",
]
