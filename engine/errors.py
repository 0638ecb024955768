"""All errors that holdfast raises on purpose, and the exit statuses of programs.

::

    HoldfastError
    ├── CheckpointNotFoundError      (FileNotFoundError)   nothing saved at this path or step
    ├── CheckpointExistsError        (FileExistsError)     a save would replace data it must not
    ├── DamagedCheckpointError       (ValueError)          stored data fails its own checks
    ├── FormatVersionError           (ValueError)          written by a newer holdfast, or not by holdfast
    ├── UnsupportedLeafError         (TypeError)           a leaf of a kind that cannot be saved or loaded
    ├── TreeMismatchError            (ValueError)          template and checkpoint differ
    ├── UnmatchedObjectsError        (AssertionError)      objects and a checkpoint do not match as asserted
    ├── SaveFailedError              (RuntimeError)        a background save failed; names the lost step
    ├── NoWholeCheckpointError       (RuntimeError)        checkpoints exist, but none of them is whole
    ├── OptionError                  (ValueError)          an option has an invalid value
    │   └── UnknownArgumentError     (TypeError)           a handler or options dataclass does not know an argument
    ├── StateError                   (RuntimeError)        the object's state does not allow a call
    ├── OwnershipError               (RuntimeError)        another run writes to this directory
    ├── NotAllowedError              (PermissionError)     a checkpoint names code that is not allowed
    ├── BarrierTimeoutError          (TimeoutError)        other processes of this program did not answer in time
    ├── PeerFailedError              (RuntimeError)        another process of this program failed
    └── StorageError                 (OSError)             the file system or object store refused
        ├── ObjectNotFoundError      (FileNotFoundError)   no such file or object
        ├── StoragePermissionError   (PermissionError)     not allowed
        ├── StorageFullError                               no space, or a quota is used up
        ├── StorageConflictError                           another process changed the object meanwhile
        ├── StorageUnavailableError  (ConnectionError)     the service did not answer; retrying may help
        └── InvalidLocationError     (ValueError)          a path or URL that cannot be used

Each also derives from the built-in exception in parentheses, so ``except FileNotFoundError`` works as expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class HoldfastError(Exception):
    """Base class of all errors that holdfast raises on purpose."""


class CheckpointNotFoundError(HoldfastError, FileNotFoundError):
    """There is no checkpoint at this path, or no such step in this directory."""


class CheckpointExistsError(HoldfastError, FileExistsError):
    """The destination holds data that a save must not replace."""


class DamagedCheckpointError(HoldfastError, ValueError):
    """Stored bytes are truncated, altered or missing: they fail their own checks.

    Attributes:
        unreadable: Whether the file system failed to read some of them, so that a later attempt may succeed.
    """

    def __init__(self, message: str, *, unreadable: bool = False) -> None:
        self.unreadable = unreadable
        super().__init__(message)


class FormatVersionError(HoldfastError, ValueError):
    """The file was written by a newer version of holdfast, or is not a holdfast file."""


class UnsupportedLeafError(HoldfastError, TypeError):
    """A leaf cannot be saved, in which case nothing was written; or it cannot be loaded safely."""


class TreeMismatchError(HoldfastError, ValueError):
    """The template and the checkpoint differ.

    Attributes:
        differences: One line for each leaf that differs.
    """

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        self.differences = tuple(differences)
        super().__init__("\n".join([message, *(f"  {line}" for line in self.differences)]))


class UnmatchedObjectsError(HoldfastError, AssertionError):
    """An assertion on a restore status failed: objects and the checkpoint do not match.

    Attributes:
        report: The objects and values that matched, and those that did not.
    """

    def __init__(self, message: str, report: object = None) -> None:
        self.report = report
        super().__init__(message)


class SaveFailedError(HoldfastError, RuntimeError):
    """A background save failed; its cause is chained.

    Attributes:
        step: The step that was not saved; None outside a manager.
    """

    def __init__(self, message: str, step: int | None = None) -> None:
        self.step = step
        super().__init__(message)


class NoWholeCheckpointError(HoldfastError, RuntimeError):
    """The directory holds checkpoints, but all of them are damaged."""


class OptionError(HoldfastError, ValueError):
    """An option has an invalid value."""


class UnknownArgumentError(OptionError, TypeError):
    """A handler, a callback or an options dataclass was given an argument that it does not know."""


class StateError(HoldfastError, RuntimeError):
    """The object is not in a state that allows this call, such as a closed manager."""


class OwnershipError(HoldfastError, RuntimeError):
    """Another run owns the directory, or has taken it over."""


class NotAllowedError(HoldfastError, PermissionError):
    """A checkpoint names a class or function that is not allowed; nothing was imported or called."""


class BarrierTimeoutError(HoldfastError, TimeoutError):
    """Other processes of this program did not answer in time; the message names them.

    Attributes:
        missing: The processes that did not answer.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        self.missing = tuple(missing)
        super().__init__(message)


class PeerFailedError(HoldfastError, RuntimeError):
    """Another process of this program failed during a collective operation; the message says which one, and why.

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
    """Another process changed the object in the meantime."""


class StorageUnavailableError(StorageError, ConnectionError):
    """The storage service did not answer in time; retrying may help."""


class InvalidLocationError(StorageError, ValueError):
    """A path or URL that cannot be used as a location."""


def describe_error(error: BaseException) -> str:
    """Return an error's message and notes, for another process or a log that does not receive the error itself."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def difference(path: str, expected: object, found: object, origin: str = "program") -> str:
    """Describe how the saved value at a path differs from the value that the program or a template expects."""
    return f"{path}: expected {expected} ({origin}), found {found} (checkpoint)"


def shortened(values: Iterable[object], most: int = 8) -> str:
    """Join the first values with commas, and add the number of omitted ones."""
    shown = [str(value) for value in values]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def shortened_steps(steps: Iterable[int]) -> str:
    """Join steps with commas; if there are many, show only the first and last ones."""
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]])


def shortened_text(text: str) -> str:
    """Return a text, cut off if it is long."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def first_lines(lines: Sequence[str]) -> list[str]:
    """Return the first 20 lines, and a line with the number of omitted ones."""
    return [*lines[:20], f"and {len(lines) - 20} more"] if len(lines) > 20 else list(lines)


def itemized(headline: str, lines: Sequence[str]) -> str:
    """Return a headline followed by indented lines; if there are many, only the first ones."""
    return "\n  ".join([headline, *first_lines(lines)])


# ---- exit statuses of the command, and of a program that was preempted

DONE = 0
FAILED = 1
"""An error; for ``holdfast verify``: something is damaged."""
BAD_USAGE = 2
"""Arguments, a configuration, or a directory without checkpoints: running the same again will not help."""
PREEMPTED = 75
"""Preempted and saved: run the same command again (``EX_TEMPFAIL`` of ``sysexits.h``)."""
NO_PROGRESS = 93
"""``holdfast supervise``: restarts make no progress."""
INTERRUPTED = 130
"""Ctrl-C, as shells report it."""
