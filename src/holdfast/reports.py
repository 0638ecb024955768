"""What holdfast reports: the results of its functions and methods, and the progress of a long call."""

from __future__ import annotations

from .engine.arrays import (
    Problem,
)
from .engine.checkpoint import (
    SaveReport,
)
from .engine.clock import (
    Progress,
)
from .engine.inspection import (
    CheckpointSummary,
    LeafSummary,
)
from .engine.manager import (
    CopyReport,
    Decision,
    MirrorStatus,
)
from .engine.opening import (
    ArrayHandle,
    OpenCheckpoint,
)
from .engine.pytree import (
    LeafMetadata,
)
from .engine.verification import (
    CheckpointVerification,
    VerifyReport,
)
from .integrations.formats.convert import (
    Conversion,
)

__all__ = [
    "ArrayHandle",
    "CheckpointSummary",
    "CheckpointVerification",
    "Conversion",
    "CopyReport",
    "Decision",
    "LeafMetadata",
    "LeafSummary",
    "MirrorStatus",
    "OpenCheckpoint",
    "Problem",
    "Progress",
    "SaveReport",
    "VerifyReport",
]
