"""Conversion of operating system and obstore errors to holdfast's storage errors."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

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

E = TypeVar("E", bound=HoldfastError)

_NUMBERS: dict[type[StorageError], tuple[int, ...]] = {
    ObjectNotFoundError: (errno.ENOENT, errno.ENOTDIR),
    StoragePermissionError: (errno.EACCES, errno.EPERM, errno.EROFS),
    StorageFullError: (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    StorageConflictError: (errno.EEXIST, errno.ENOTEMPTY, errno.ESTALE),
    StorageUnavailableError: (
        *(errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN),
    ),
    InvalidLocationError: (errno.ENAMETOOLONG, errno.ELOOP),
}
OS_ERRORS = {number: cls for cls, numbers in _NUMBERS.items() for number in numbers}
"""The error class for each error number; all other numbers become plain StorageErrors."""

_UNREADABLE = frozenset(
    getattr(errno, name)
    for name in ("EIO", "EUCLEAN", "EBADMSG", "ENODATA", "EILSEQ", "EREMOTEIO", "ELOOP")
    if hasattr(errno, name)  # some systems do not define all error numbers
)
"""Error numbers that indicate a broken file or disk, as opposed to a forbidden or temporarily unavailable one."""

_STRANGE = frozenset({errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO})
"""Error numbers raised by opening, replacing or removing one of our files if its path is not a regular file."""


class GarbledAnswerError(StorageUnavailableError):
    """A response from a store could not be parsed. It may come from a proxy instead of the service."""


_OBSTORE_FAILURES: tuple[tuple[str, type[HoldfastError]], ...] = (
    (r"credential provider: \w*(Transport|Connect)\w*Error|login service", StorageUnavailableError),
    (r"Header missing|invalid [\w ]+response|response body error|no ETag|header not present", GarbledAnswerError),
    (r"status code: 416|InvalidRange|Wanted range starting|bytes 0--1/0|non-partial", DamagedCheckpointError),
    (
        r"status code: (413|507)|StorageFull|InsufficientStorage|QuotaExceeded|AccountLimitExceeded",
        StorageFullError,
    ),
    (
        r"code: 40[13]\b|400 Bad Request:\s*$|Expired(Authentication)?Token|InvalidToken|TokenRefreshRequired"
        r"|AuthorizationHeaderMalformed|Authenticat(ion|e)|IllegalLocationConstraint|token request|[Cc]redential"
        r"|Invalid Access Key|SAS query|Account must be specified|service account",
        StoragePermissionError,
    ),
    (r"status code: 404", ObjectNotFoundError),
    (r"status code: 409", StorageConflictError),
    (r"status code: 30\d", InvalidLocationError),
    (r"status code: (408|429|5\d\d)|HTTP error|timed? ?out|invalid \w+ ", StorageUnavailableError),
)
"""Patterns for errors without an obstore class. The first four take precedence over the class that obstore reports."""

_OBSTORE_CLASSES: dict[str, type[HoldfastError]] = {
    "FileNotFoundError": ObjectNotFoundError,
    "AlreadyExistsError": StorageConflictError,
    "PreconditionError": StorageConflictError,
    "PermissionDeniedError": StoragePermissionError,
    "UnauthenticatedError": StoragePermissionError,
    "CredentialsError": StoragePermissionError,
    "InvalidPathError": InvalidLocationError,
    "ValueError": InvalidLocationError,
}

_ADDRESS = r"[A-Za-z][A-Za-z0-9+.-]*:/+[^\s'\"]+"
# A password may contain any character, such as a space or slash (as in AWS keys). A colon before a number marks a port.
_PASSWORD = r"(:/+)(?<!///)[^/:\[\s'\"]*:(?!\d+(?:[/\s'\",;:)\]]|$))(?=\S)(?:(?!:/)[^\n])*@"
_USER = r"(:/+)[^/\s'\"]*@"
_QUERY = r"((?<=[?&])[\w.%-]+=)[^&\s'\"]+"

_ADVICE: dict[type[HoldfastError], str] = {
    StoragePermissionError: "check the permissions or credentials",
    StorageFullError: "free some space or choose another directory",
    StorageUnavailableError: "check the connection and try again",
}


class os_errors:  # noqa: N801 - used like a function; each small file needs several, and generators take three times as long
    """Context manager that converts operating system errors to holdfast errors: "cannot ``action`` ``path``: ..."."""

    __slots__ = ("_action", "_path")

    def __init__(self, path: str, action: str) -> None:
        self._path = path
        self._action = action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, HoldfastError):
            raise map_os_error(error, self._path, self._action) from error


def is_unreadable(error: object) -> bool:
    """Return whether an error means that a file is unreadable because the file or the disk is broken."""
    if isinstance(error, DamagedCheckpointError):
        return error.unreadable
    return isinstance(error, StorageError) and error.errno in _UNREADABLE


def is_strange(error: StorageError) -> bool:
    """Return whether an error means that something other than a regular file is at one of holdfast's paths."""
    return error.errno in _STRANGE or isinstance(error, StoragePermissionError)


@contextlib.contextmanager
def unreadable_as_damage(path: object) -> Iterator[None]:
    """Convert errors for which :func:`is_unreadable` is true to DamagedCheckpointError."""
    try:
        yield
    except StorageError as error:
        if not is_unreadable(error):
            raise
        raise DamagedCheckpointError(f"{path} cannot be read: {error}", unreadable=True) from error


def map_os_error(error: OSError, path: str, action: str) -> StorageError:
    cls = OS_ERRORS.get(error.errno or 0, StorageError)
    mapped = explain_failure(cls, action, path, error.strerror or str(error))
    mapped.errno = error.errno
    return mapped


def _first_match(failures: Sequence[tuple[str, type[HoldfastError]]], text: str) -> type[HoldfastError] | None:
    return next((cls for pattern, cls in failures if re.search(pattern, text)), None)


def map_obstore_error(error: Exception, path: str, action: str) -> HoldfastError:
    # obstore appends a debug dump, which only repeats the message.
    text = re.sub(r"\s+", " ", str(error).partition("\n\nDebug source:")[0]).strip()
    text = re.sub(r"<\?xml.*?<Code>(.*?)</Code>.*?<Message>(.*?)</Message>.*", r"\1, \2", text)
    cls = _first_match(_OBSTORE_FAILURES[:4], text) or _OBSTORE_CLASSES.get(type(error).__name__)
    cls = cls or _first_match(_OBSTORE_FAILURES, text) or StorageError
    if cls is StorageUnavailableError and not re.search(r"after \d+ retries|status code", text):
        cls = GarbledAnswerError  # causes a retry, because obstore does not retry a deletion after a lost connection
    text = re.sub(r"^The operation lacked.*? for path .*?: (?=Error performing)", "", text)
    text = re.sub(r"Error performing (\w+) \S+ in [^,\s]+", r"\1", text)  # the message already contains the address
    text = re.sub(
        r", max_retries: \d+, retry_timeout: \S+| - Server returned non-2xx(?= status)| code(?=: \d)", "", text
    )
    return explain_failure(cls, action, path, text)


def explain_failure(cls: type[E], action: str, path: str, reason: str) -> E:
    """Return an error with the message "cannot ``action`` ``path``: ``reason``" and advice, with all secrets masked."""
    advice = next((_ADVICE[base] for base in cls.__mro__ if base in _ADVICE), None)
    if "RequestTimeTooSkewed" in reason:
        advice = "set the clock of this machine, which is many minutes off from that of the service"
    elif reason == os.strerror(errno.EFBIG):
        advice = "raise the limit on the size of files (ulimit -f) or choose another directory"
    return cls(without_secrets(f"cannot {action} {path}: {reason}") + (f"; {advice}" if advice else ""))


def check_header(service: str, name: str, value: str) -> None:
    """Raise StoragePermissionError for an invalid HTTP header value, because a client would abort the process."""
    if not (value.isascii() and value.isprintable()):
        raise StoragePermissionError(
            f"cannot reach {service}: the value of {name} contains a character that a header cannot have, perhaps a "
            "line break at its end; set it again without it"
        )


def without_secrets(text: str) -> str:
    """Mask user names, passwords and query values in all URLs that occur in a text.

    >>> without_secrets("https://user:word@host/a?token=secret&b=1")
    'https://***@host/a?token=***&b=***'
    >>> without_secrets("s3://user:a/b@bucket and http://localhost:9000/a@b")
    's3://***@bucket and http://localhost:9000/a@b'
    """

    if ":/" not in text:
        return text
    text = re.sub(_USER, r"\1***@", re.sub(_PASSWORD, r"\1***@", text))
    return re.sub(_ADDRESS, lambda address: re.sub(_QUERY, r"\1***", address[0]), text)


def hidden_address(address: str) -> str:
    """Mask the secrets in one URL as :func:`without_secrets` does, even if it contains unusual characters.

    >>> hidden_address("s3://a user:it's 50% / #1@bucket/x")
    's3://***@bucket/x'
    """
    if (scheme := re.match(r"[^/]*:/+", address)) is None:
        return address
    start, rest = scheme[0], address[scheme.end() :]
    authority, _, path = rest.partition("/")
    has_port = re.search(r":\d+$", authority) is not None and not start.startswith(("s3", "gs", "gcs"))
    until = rest if ":" in authority and "@" in path and not has_port else authority
    if "@" in until:
        rest = f"***@{rest[until.rindex('@') + 1 :]}"
    return start + re.sub(r"((?<=[?&])[\w.%-]+=)[^&]+", r"\1***", rest)


def check_extent(path: str, size: int, offset: int, length: int) -> None:
    """Raise DamagedCheckpointError unless ``length`` bytes at ``offset`` lie within a file of ``size`` bytes."""
    if offset < 0 or length < 0 or offset + length > size:
        raise truncated(path, size, offset, length)


def truncated(path: str, size: int, offset: int, length: int) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path} is truncated or its index is wrong: expected {length} bytes at offset {offset}, "
        f"found a file of {size} bytes; restore an older checkpoint or copy this one again"
    )
