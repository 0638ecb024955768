"""Every error that holdfast raises on purpose; `holdfast` itself has those that programs catch most often.

Each also derives from a built-in exception, and :class:`HoldfastError` is the base of all.

>>> import holdfast as hf
>>> try:
...     hf.load("/tmp/no/such/checkpoint")
... except hf.errors.HoldfastError as error:
...     isinstance(error, FileNotFoundError)
True
"""

from .engine.errors import BarrierTimeoutError as BarrierTimeoutError
from .engine.errors import CheckpointExistsError as CheckpointExistsError
from .engine.errors import CheckpointNotFoundError as CheckpointNotFoundError
from .engine.errors import DamagedCheckpointError as DamagedCheckpointError
from .engine.errors import FormatVersionError as FormatVersionError
from .engine.errors import HoldfastError as HoldfastError
from .engine.errors import InvalidLocationError as InvalidLocationError
from .engine.errors import NotAllowedError as NotAllowedError
from .engine.errors import NoWholeCheckpointError as NoWholeCheckpointError
from .engine.errors import ObjectNotFoundError as ObjectNotFoundError
from .engine.errors import OptionError as OptionError
from .engine.errors import OwnershipError as OwnershipError
from .engine.errors import PeerFailedError as PeerFailedError
from .engine.errors import SaveFailedError as SaveFailedError
from .engine.errors import StateError as StateError
from .engine.errors import StorageConflictError as StorageConflictError
from .engine.errors import StorageError as StorageError
from .engine.errors import StorageFullError as StorageFullError
from .engine.errors import StoragePermissionError as StoragePermissionError
from .engine.errors import StorageUnavailableError as StorageUnavailableError
from .engine.errors import TreeMismatchError as TreeMismatchError
from .engine.errors import UnknownArgumentError as UnknownArgumentError
from .engine.errors import UnmatchedObjectsError as UnmatchedObjectsError
from .engine.errors import UnsupportedLeafError as UnsupportedLeafError

__all__ = [name for name in dir() if not name.startswith("_")]
