"""Translates errors of the operating system and of TensorStore into holdfast's own, in one place."""

from __future__ import annotations

import contextlib
import errno
import re
from typing import TYPE_CHECKING

from ..errors import (
    DamagedCheckpointError,
    HoldfastError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageConflictError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

OS_ERRORS: dict[int, type[StorageError]] = {
    errno.ENOENT: ObjectNotFoundError,
    errno.ENOTDIR: ObjectNotFoundError,
    errno.EACCES: StoragePermissionError,
    errno.EPERM: StoragePermissionError,
    errno.EROFS: StoragePermissionError,
    errno.ENOSPC: StorageFullError,
    errno.EDQUOT: StorageFullError,
    errno.EFBIG: StorageFullError,
    errno.EEXIST: StorageConflictError,
    errno.ENOTEMPTY: StorageConflictError,
    errno.ESTALE: StorageConflictError,
    errno.ETIMEDOUT: StorageUnavailableError,
    errno.EAGAIN: StorageUnavailableError,
    errno.ECONNREFUSED: StorageUnavailableError,
    errno.ECONNRESET: StorageUnavailableError,
    errno.ECONNABORTED: StorageUnavailableError,
    errno.EHOSTDOWN: StorageUnavailableError,
    errno.EHOSTUNREACH: StorageUnavailableError,
    errno.ENETDOWN: StorageUnavailableError,
    errno.ENETUNREACH: StorageUnavailableError,
    errno.ENOTCONN: StorageUnavailableError,
    errno.ENAMETOOLONG: InvalidLocationError,
    errno.ELOOP: InvalidLocationError,
}
"""Error numbers with a class of their own; all others are plain StorageErrors."""

STATUSES: dict[str, type[HoldfastError]] = {
    "CANCELLED": StorageUnavailableError,
    "UNKNOWN": StorageError,
    "INVALID_ARGUMENT": InvalidLocationError,
    "DEADLINE_EXCEEDED": StorageUnavailableError,
    "NOT_FOUND": ObjectNotFoundError,
    "ALREADY_EXISTS": StorageConflictError,
    "PERMISSION_DENIED": StoragePermissionError,
    "RESOURCE_EXHAUSTED": StorageFullError,
    "FAILED_PRECONDITION": StorageError,
    "ABORTED": StorageConflictError,
    "OUT_OF_RANGE": DamagedCheckpointError,
    "UNIMPLEMENTED": StorageError,
    "INTERNAL": StorageError,
    "UNAVAILABLE": StorageUnavailableError,
    "DATA_LOSS": DamagedCheckpointError,
    "UNAUTHENTICATED": StoragePermissionError,
}
"""The canonical status names of Abseil, https://abseil.io/docs/cpp/guides/status-codes, which TensorStore reports."""

_SERVICE_CODES: tuple[tuple[re.Pattern[str], type[HoldfastError]], ...] = (
    (re.compile(r"All \d+ retry attempts failed"), StorageUnavailableError),  # reported as ABORTED
    (
        re.compile(
            r"ExpiredToken|InvalidToken|TokenRefreshRequired|AuthorizationHeaderMalformed|RequestTimeTooSkewed"
            r"|IllegalLocationConstraint|credentials from provider"
        ),
        StoragePermissionError,
    ),
    (re.compile(r"was ignored by server|Content-Range header"), DamagedCheckpointError),  # it does not know ranges
    (re.compile(r"StorageFull|QuotaExceeded|http_response_code='507'"), StorageFullError),
    (re.compile(r"PermanentRedirect|http_response_code='30[178]'"), InvalidLocationError),
)
"""What object stores say that means something else than the status that TensorStore makes of it."""

_BODY = re.compile(r" \[(?:http_response_body|x-amzn-requestid)='(?:[^'\\]|\\.)*'\]")
"""What TensorStore adds to a message that has said the same in words."""

_ADVICE: dict[type[HoldfastError], str] = {
    StoragePermissionError: "check the permissions or credentials",
    StorageFullError: "free some space or choose another directory",
    StorageUnavailableError: "check the connection and try again",
}


@contextlib.contextmanager
def os_errors(path: str, action: str) -> Iterator[None]:
    """Raises holdfast's errors in place of the operating system's; see ``map_os_error`` for the arguments."""
    try:
        yield
    except HoldfastError:
        raise
    except OSError as error:
        raise map_os_error(error, path, action) from error


def map_os_error(error: OSError, path: str, action: str) -> StorageError:
    """Returns holdfast's error for one of the operating system.

    Args:
        error: What the system call raised.
        path: The path that the call was about.
        action: What was attempted, as a verb phrase such as ``"write"``.

    Returns:
        The error to raise ``from error``; it carries the same ``errno``.
    """
    kind = OS_ERRORS.get(error.errno or 0, StorageError)
    mapped = kind(_message(kind, action, path, error.strerror or str(error)))
    mapped.errno = error.errno
    return mapped


def map_status(error: Exception, path: str, action: str) -> HoldfastError:
    """Returns holdfast's error for one that TensorStore raised.

    Args:
        error: What TensorStore raised: a ValueError or NotImplementedError whose text begins with the status name.
        path: The URL that the operation was about.
        action: What was attempted, as a verb phrase such as ``"write"``.

    Returns:
        The error to raise ``from error``.
    """
    if isinstance(error, OSError):
        return map_os_error(error, path, action)
    text = str(error)
    status = re.match(r"[A-Z_]+(?=:)", text)
    found = next((kind for pattern, kind in _SERVICE_CODES if pattern.search(text)), None)
    kind: type[HoldfastError]
    if found is not None:
        kind = found
    elif status is not None:
        kind = STATUSES.get(status.group(), StorageError)
    elif isinstance(error, ValueError):
        kind = InvalidLocationError  # TensorStore leaves the status name out for arguments it cannot use.
    else:
        kind = StorageError
    return kind(_message(kind, action, path, _BODY.sub("", text)))


def _message(kind: type[HoldfastError], action: str, path: str, reason: str) -> str:
    advice = _ADVICE.get(kind)
    return f"cannot {action} {path}: {reason}" + (f"; {advice}" if advice else "")
