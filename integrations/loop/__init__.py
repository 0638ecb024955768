"""The callback for any training loop, and the resume and preemption logic that it shares with other callbacks."""

from __future__ import annotations

from .announce import Ending, announce
from .callback import CheckpointCallback, StepOutcome
from .initial import HYPERPARAMETERS, Hyperparameters
from .preemption import WITHOUT_GRACE, PreemptionSignal, grace_check
from .resuming import all_steps, check_resume, resume_step, unfinished_neighbour, warn_of_misfits
from .states import LoopArguments, StateAdapter
from .stopping import AgreedStop, StepsAfterSignal, Stop, barrier_exit, stop_of
from .witnessing import IN_TRAINERS, Proof, Witness, why_not_comparable

__all__ = [
    "HYPERPARAMETERS",
    "IN_TRAINERS",
    "WITHOUT_GRACE",
    "AgreedStop",
    "CheckpointCallback",
    "Ending",
    "Hyperparameters",
    "LoopArguments",
    "PreemptionSignal",
    "Proof",
    "StateAdapter",
    "StepOutcome",
    "StepsAfterSignal",
    "Stop",
    "Witness",
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
