"""What holdfast reports: the results of its functions and methods, and the progress of a long call."""

from .engine.arrays import Problem as Problem
from .engine.checkpoint import SaveReport as SaveReport
from .engine.clock import Progress as Progress
from .engine.inspection import CheckpointVerification as CheckpointVerification
from .engine.inspection import LeafSummary as LeafSummary
from .engine.inspection import VerifyReport as VerifyReport
from .engine.listing import CheckpointSummary as CheckpointSummary
from .engine.manager import CopyReport as CopyReport
from .engine.manager import Decision as Decision
from .engine.manager import LocalStatus as LocalStatus
from .engine.manager import MirrorStatus as MirrorStatus
from .engine.manager import Moment as Moment
from .engine.manager import Restored as Restored
from .engine.manager import StepInfo as StepInfo
from .engine.pytree import LeafMetadata as LeafMetadata
from .engine.sources import ArrayHandle as ArrayHandle
from .engine.sources import OpenCheckpoint as OpenCheckpoint
from .integrations.formats.convert import Conversion as Conversion
from .integrations.loop import Proof as Proof

__all__ = [name for name in dir() if not name.startswith("_")]
