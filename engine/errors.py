"""Exceptions that holdfast raises deliberately, and exit statuses of its command-line tool and of preempted programs.

::

    HoldfastError
    ├── CheckpointNotFoundError      (FileNotFoundError)   nothing saved at this path or step
    ├── CheckpointExistsError        (FileExistsError)     a save would replace data that it must keep
    ├── DamagedCheckpointError       (ValueError)          stored data fails its own checks
    ├── FormatVersionError           (ValueError)          written by a newer holdfast, or not by holdfast
    ├── UnsupportedLeafError         (TypeError)           a leaf cannot be saved or loaded
    ├── TreeMismatchError            (ValueError)          template and checkpoint differ
    ├── UnmatchedObjectsError        (AssertionError)      objects and a checkpoint do not match
    ├── SaveFailedError              (RuntimeError)        a background save failed; names the lost step
    ├── NoWholeCheckpointError       (RuntimeError)        checkpoints exist, but all of them are damaged
    ├── OptionError                  (ValueError)          an option has an invalid value
    │   └── UnknownArgumentError     (TypeError)           a handler, callback or options class got an unknown argument
    ├── StateError                   (RuntimeError)        the object's state does not allow a call
    ├── OwnershipError               (RuntimeError)        another run writes to this directory
    ├── NotAllowedError              (PermissionError)     a checkpoint names code that is not allowed
    ├── BarrierTimeoutError          (TimeoutError)        other processes of this program did not answer in time
    ├── PeerFailedError              (RuntimeError)        another process of this program failed
    └── StorageError                 (OSError)             a file system or object store operation failed
        ├── ObjectNotFoundError      (FileNotFoundError)   no such file or object
        ├── StoragePermissionError   (PermissionError)     the operation is not permitted
        ├── StorageFullError                               no space left, or a quota exceeded
        ├── StorageConflictError                           another process changed the object concurrently
        ├── StorageUnavailableError  (ConnectionError)     the service did not answer; retrying may help
        └── InvalidLocationError     (ValueError)          a path or URL that cannot be used

Each class also derives from the built-in exception in parentheses, so ``except FileNotFoundError`` works as expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class HoldfastError(Exception):
    """Base class of all exceptions that holdfast raises deliberately."""


class CheckpointNotFoundError(HoldfastError, FileNotFoundError):
    """There is no checkpoint at this path, or no such step in this directory."""


class CheckpointExistsError(HoldfastError, FileExistsError):
    """The destination holds data that a save must not replace."""


class DamagedCheckpointError(HoldfastError, ValueError):
    """Stored data is truncated, altered or missing, and therefore fails its checks.

    Attributes:
        unreadable: Whether the file system failed to read some of the data, in which case a retry may succeed.
    """

    def __init__(self, message: str, *, unreadable: bool = False) -> None:
        self.unreadable = unreadable
        super().__init__(message)


class FormatVersionError(HoldfastError, ValueError):
    """The file was written by a newer version of holdfast, or is not a holdfast file."""


class UnsupportedLeafError(HoldfastError, TypeError):
    """A leaf cannot be saved or loaded safely; a save that raises this error has not written anything."""


class TreeMismatchError(HoldfastError, ValueError):
    """The template and the checkpoint differ.

    Attributes:
        differences: One line for each leaf that differs.
    """

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        self.differences = tuple(differences)
        super().__init__("\n".join([message, *(f"  {line}" for line in self.differences)]))


class UnmatchedObjectsError(HoldfastError, AssertionError):
    """An assertion on a restore status failed because the objects and the checkpoint do not match.

    Attributes:
        report: The objects and values that matched, and those that did not.
    """

    def __init__(self, message: str, report: object = None) -> None:
        self.report = report
        super().__init__(message)


class SaveFailedError(HoldfastError, RuntimeError):
    """A background save failed; the cause is chained to this exception.

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
    """A handler, a callback or an options dataclass received an unknown argument."""


class StateError(HoldfastError, RuntimeError):
    """The object's state does not allow this call, for example because a manager is closed."""


class OwnershipError(HoldfastError, RuntimeError):
    """Another run owns the directory, or has taken it over."""


class NotAllowedError(HoldfastError, PermissionError):
    """A checkpoint names a class or function that is not allowed; nothing was imported or called."""


class BarrierTimeoutError(HoldfastError, TimeoutError):
    """Other processes of this program did not answer in time; the message names them.

    Attributes:
        missing: The indexes of the processes that did not answer.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        self.missing = tuple(missing)
        super().__init__(message)


class PeerFailedError(HoldfastError, RuntimeError):
    """Another process of this program failed during a collective operation; the message says which one, and why.

    Attributes:
        process: The index of the process that failed.
    """

    def __init__(self, message: str, process: int) -> None:
        self.process = process
        super().__init__(message)


class StorageError(HoldfastError, OSError):
    """An operation of the file system or object store failed."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """The file or object does not exist."""


class StoragePermissionError(StorageError, PermissionError):
    """The file system or object store does not permit the operation."""


class StorageFullError(StorageError):
    """No space is left, or a quota is exceeded."""


class StorageConflictError(StorageError):
    """Another process changed the object during the operation."""


class StorageUnavailableError(StorageError, ConnectionError):
    """The storage service did not answer in time; retrying may help."""


class InvalidLocationError(StorageError, ValueError):
    """The path or URL cannot be used as a location."""


def describe_error(error: BaseException) -> str:
    """Return an error's message and notes as text, for logs and for processes that do not receive the exception."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def difference(path: str, expected: object, found: object, origin: str = "program") -> str:
    """Describe how the saved value at a path differs from the value that the program or a template expects."""
    return f"{path}: expected {expected} ({origin}), found {found} (checkpoint)"


def did_you_mean(word: str, words: Iterable[str], shown: str = "{}") -> str:
    """Return a message suffix that suggests the closest of ``words``, or ""."""
    import difflib  # imported lazily, because only errors need it

    close = difflib.get_close_matches(word, [*words], n=1)
    return f"; did you mean {shown.format(close[0])}?" if close else ""


def shortened(values: Iterable[object], most: int = 8) -> str:
    """Join the first ``most`` values with commas, followed by the number of omitted values, if any."""
    shown = [str(value) for value in values]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def shortened_steps(steps: Iterable[int]) -> str:
    """Join steps with commas, keeping only the first and last steps of a long list."""
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]])


def shortened_text(text: str) -> str:
    """Truncate a text to 60 characters."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def first_lines(lines: Sequence[str]) -> list[str]:
    """Return the first 20 lines, plus a line with the number of omitted lines if there are more."""
    return [*lines[:20], f"and {len(lines) - 20} more"] if len(lines) > 20 else list(lines)


def itemized(headline: str, lines: Sequence[str]) -> str:
    """Return a headline followed by the first 20 lines, indented."""
    return "\n  ".join([headline, *first_lines(lines)])


# ---- exit statuses of the command-line tool and of preempted programs

DONE = 0
FAILED = 1
"""An error occurred, or ``holdfast verify`` found damage."""
BAD_USAGE = 2
"""The arguments or the configuration are invalid, or a directory has no checkpoints; a retry will not help."""
PREEMPTED = 75
"""The run was preempted after a save; run the same command again (``EX_TEMPFAIL`` in ``sysexits.h``)."""
NO_PROGRESS = 93
"""``holdfast supervise`` gave up because restarts made no progress."""
INTERRUPTED = 130
"""The program was interrupted by Ctrl-C; shells report the same status."""
