"""What the callbacks of all training loops have in common: the callback itself, when to resume, preemption."""

from __future__ import annotations

from .announce import announce
from .callback import LoopArguments, LoopCallback, StepOutcome
from .preemption import PreemptionSignal
from .resuming import all_steps, check_resume
from .states import StateAdapter, is_deleted

__all__ = [
    "LoopArguments",
    "LoopCallback",
    "PreemptionSignal",
    "StateAdapter",
    "StepOutcome",
    "all_steps",
    "announce",
    "check_resume",
    "is_deleted",
]
