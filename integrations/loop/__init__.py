"""The callback of any training loop, and what it shares with those of trainers: when to resume, preemption."""

from __future__ import annotations

from .announce import announce
from .callback import CheckpointCallback, StepOutcome
from .hyperparameters import Hyperparameters
from .objects import TensorVersions
from .preemption import WITHOUT_GRACE, GraceCheck, PreemptionSignal
from .resuming import all_steps, check_resume, resume_step, unfinished_neighbour, warn_of_misfits
from .states import LoopArguments, StateAdapter
from .stopping import AgreedStop, OwnStop, Stop, part

__all__ = [
    "WITHOUT_GRACE",
    "AgreedStop",
    "CheckpointCallback",
    "GraceCheck",
    "Hyperparameters",
    "LoopArguments",
    "OwnStop",
    "PreemptionSignal",
    "StateAdapter",
    "StepOutcome",
    "Stop",
    "TensorVersions",
    "all_steps",
    "announce",
    "check_resume",
    "part",
    "resume_step",
    "unfinished_neighbour",
    "warn_of_misfits",
]
