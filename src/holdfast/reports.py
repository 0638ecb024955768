"""Report types: the results of functions and methods, and the progress of long calls."""

from .engine.arrays import Problem
from .engine.checkpoint import SaveReport
from .engine.inspection import CheckpointVerification, LeafSummary, VerifyReport
from .engine.listing import CheckpointSummary
from .engine.manager import CopyReport, Decision, LocalStatus, MirrorStatus, Moment, Restored, StepInfo
from .engine.progress import Progress
from .engine.pytree import LeafMetadata
from .engine.sources import ArrayHandle, OpenCheckpoint
from .integrations.formats.convert import Conversion
from .integrations.loop import Proof

__all__ = [
    "ArrayHandle",
    "CheckpointSummary",
    "CheckpointVerification",
    "Conversion",
    "CopyReport",
    "Decision",
    "LeafMetadata",
    "LeafSummary",
    "LocalStatus",
    "MirrorStatus",
    "Moment",
    "OpenCheckpoint",
    "Problem",
    "Progress",
    "Proof",
    "Restored",
    "SaveReport",
    "StepInfo",
    "VerifyReport",
]
