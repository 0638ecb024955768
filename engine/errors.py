"""Every error that holdfast raises on purpose.

::

    HoldfastError
    ├── CheckpointNotFoundError      (FileNotFoundError)   nothing saved at this path or step
    ├── CheckpointExistsError        (FileExistsError)     a save would replace something it must not
    ├── DamagedCheckpointError       (ValueError)          what is stored does not pass its own checks
    ├── FormatVersionError           (ValueError)          written by a newer holdfast, or not by holdfast
    ├── UnsupportedLeafError         (TypeError)           a leaf of a kind that cannot be saved, or loaded
    ├── TreeMismatchError            (ValueError)          template and checkpoint differ
    ├── UnmatchedObjectsError        (AssertionError)      objects and a checkpoint do not match as was asserted
    ├── SaveFailedError              (RuntimeError)        a background save failed; names the lost step
    ├── NoWholeCheckpointError       (RuntimeError)        checkpoints exist, but none of them is whole
    ├── OptionError                  (ValueError)          an option has a value that makes no sense
    │   └── UnknownArgumentError     (TypeError)           a handler is given an argument that it does not know
    ├── StateError                   (RuntimeError)        a call that the object's state does not allow
    ├── OwnershipError               (RuntimeError)        another run writes to this directory
    ├── NotAllowedError              (PermissionError)     a checkpoint names code that it may not use
    ├── BarrierTimeoutError          (TimeoutError)        other processes of this program did not answer in time
    ├── PeerFailedError              (RuntimeError)        another process of this program failed
    └── StorageError                 (OSError)             the file system or object store refused
        ├── ObjectNotFoundError      (FileNotFoundError)   no such file or object
        ├── StoragePermissionError   (PermissionError)     not allowed
        ├── StorageFullError                               no space, or a quota is used up
        ├── StorageConflictError                           somebody else changed the object meanwhile
        ├── StorageUnavailableError  (ConnectionError)     the service did not answer; trying again may help
        └── InvalidLocationError     (ValueError)          a path or URL that cannot be used

Each of them also derives from the built-in exception in brackets, so ``except FileNotFoundError`` works as expected.
"""

from __future__ import annotations

from collections.abc import Sequence


class HoldfastError(Exception):
    """Base class of every error that holdfast raises on purpose."""


class CheckpointNotFoundError(HoldfastError, FileNotFoundError):
    """There is no checkpoint at this path, or no such step in this directory."""


class CheckpointExistsError(HoldfastError, FileExistsError):
    """The destination holds something that a save must not replace."""


class DamagedCheckpointError(HoldfastError, ValueError):
    """Stored bytes do not pass their own checks: truncated, altered or missing."""


class FormatVersionError(HoldfastError, ValueError):
    """The file was written by a newer version of holdfast, or is not one of its files."""


class UnsupportedLeafError(HoldfastError, TypeError):
    """A leaf of the tree is of a kind that cannot be saved, and nothing was written; or cannot be loaded safely."""


class TreeMismatchError(HoldfastError, ValueError):
    """The template and the checkpoint differ.

    Attributes:
        differences: One line for every leaf that differs.
    """

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        self.differences = tuple(differences)
        super().__init__("\n".join([message, *(f"  {line}" for line in self.differences)]))


class UnmatchedObjectsError(HoldfastError, AssertionError):
    """Objects and a checkpoint do not match as a status was asked to assert.

    Attributes:
        report: What was matched and what was not.
    """

    def __init__(self, message: str, report: object = None) -> None:
        self.report = report
        super().__init__(message)


class SaveFailedError(HoldfastError, RuntimeError):
    """A save that ran in the background failed; its cause is chained.

    Attributes:
        step: The step that was not saved, or None for a save outside a manager.
    """

    def __init__(self, message: str, step: int | None = None) -> None:
        self.step = step
        super().__init__(message)


class NoWholeCheckpointError(HoldfastError, RuntimeError):
    """The directory holds checkpoints, but every one of them is damaged."""


class OptionError(HoldfastError, ValueError):
    """An option has a value that makes no sense."""


class UnknownArgumentError(OptionError, TypeError):
    """A handler is given an argument that it does not know."""


class StateError(HoldfastError, RuntimeError):
    """The object is not in a state that allows this call, such as a closed manager."""


class OwnershipError(HoldfastError, RuntimeError):
    """Another run owns the directory, or has taken it over."""


class NotAllowedError(HoldfastError, PermissionError):
    """A checkpoint names a class or function that it may not use; nothing was imported or called."""


class BarrierTimeoutError(HoldfastError, TimeoutError):
    """Other processes of this program did not answer in time; names them.

    Attributes:
        missing: The processes that did not answer.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        self.missing = tuple(missing)
        super().__init__(message)


class PeerFailedError(HoldfastError, RuntimeError):
    """Another process of this program failed at what all of them do together; says which one, and why.

    Attributes:
        process: The process that failed.
    """

    def __init__(self, message: str, process: int) -> None:
        self.process = process
        super().__init__(message)


class StorageError(HoldfastError, OSError):
    """The file system or object store refused an operation."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """No such file or object."""


class StoragePermissionError(StorageError, PermissionError):
    """The file system or object store does not allow the operation."""


class StorageFullError(StorageError):
    """No space is left, or a quota is used up."""


class StorageConflictError(StorageError):
    """Somebody else changed the object in the meantime."""


class StorageUnavailableError(StorageError, ConnectionError):
    """The storage service did not answer in time; trying again may help."""


class InvalidLocationError(StorageError, ValueError):
    """A path or URL that cannot be used as a location."""


def told(error: BaseException) -> str:
    """Returns an error's message with the notes that were added to it, for those who will not see the error itself."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
