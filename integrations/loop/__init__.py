"""The callback for any training loop, and the rules of resuming and preemption that other callbacks share."""

from __future__ import annotations

from .announce import Ending, announce
from .callback import CheckpointCallback, StepOutcome
from .initial import Hyperparameters
from .preemption import WITHOUT_GRACE, PreemptionSignal, grace_check
from .resuming import all_steps, check_resume, resume_step, unfinished_neighbour, warn_of_misfits
from .states import LoopArguments, StateAdapter
from .stopping import AfterSignal, AgreedStop, Durations, Stop, agreed_steps_after_signal, barrier_exit, stop_of
from .witnessing import Proof, Witness, why_not_comparable

__all__ = [
    "WITHOUT_GRACE",
    "AfterSignal",
    "AgreedStop",
    "CheckpointCallback",
    "Durations",
    "Ending",
    "Hyperparameters",
    "LoopArguments",
    "PreemptionSignal",
    "Proof",
    "StateAdapter",
    "StepOutcome",
    "Stop",
    "Witness",
    "agreed_steps_after_signal",
    "all_steps",
    "announce",
    "barrier_exit",
    "check_resume",
    "grace_check",
    "resume_step",
    "stop_of",
    "unfinished_neighbour",
    "warn_of_misfits",
    "why_not_comparable",
]
