"""Every error that holdfast raises on purpose; the ones most often caught are in `holdfast` itself, too.

Each also derives from a built-in exception, and :class:`HoldfastError` is the base of all.

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
