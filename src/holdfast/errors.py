"""The errors that holdfast raises. `holdfast` itself also exports the errors that programs catch most often.

Every error derives from :class:`HoldfastError` and from a built-in exception.

>>> import holdfast as hf
>>> try:
...     hf.load("/tmp/no/such/checkpoint")
... except hf.errors.HoldfastError as error:
...     isinstance(error, FileNotFoundError)
True
"""

from .engine.errors import (
    BarrierTimeoutError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FormatVersionError,
    HoldfastError,
    InvalidLocationError,
    NotAllowedError,
    NoWholeCheckpointError,
    ObjectNotFoundError,
    OptionError,
    OwnershipError,
    PeerFailedError,
    SaveFailedError,
    StateError,
    StorageConflictError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageUnavailableError,
    TreeMismatchError,
    UnknownArgumentError,
    UnmatchedObjectsError,
    UnsupportedLeafError,
)

__all__ = [
    "BarrierTimeoutError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "DamagedCheckpointError",
    "FormatVersionError",
    "HoldfastError",
    "InvalidLocationError",
    "NoWholeCheckpointError",
    "NotAllowedError",
    "ObjectNotFoundError",
    "OptionError",
    "OwnershipError",
    "PeerFailedError",
    "SaveFailedError",
    "StateError",
    "StorageConflictError",
    "StorageError",
    "StorageFullError",
    "StoragePermissionError",
    "StorageUnavailableError",
    "TreeMismatchError",
    "UnknownArgumentError",
    "UnmatchedObjectsError",
    "UnsupportedLeafError",
]
