"""Every error of the operating system becomes one of holdfast."""

from __future__ import annotations

import errno
import os

import pytest

from holdfast.engine import errors
from holdfast.engine.storage.status import OS_ERRORS, map_os_error, os_errors


@pytest.mark.parametrize(
    ("number", "expected", "builtin"),
    [
        (errno.ENOENT, errors.ObjectNotFoundError, FileNotFoundError),
        (errno.ENOTDIR, errors.ObjectNotFoundError, FileNotFoundError),
        (errno.EACCES, errors.StoragePermissionError, PermissionError),
        (errno.EROFS, errors.StoragePermissionError, PermissionError),
        (errno.ENOSPC, errors.StorageFullError, OSError),
        (errno.EDQUOT, errors.StorageFullError, OSError),
        (errno.ENOTEMPTY, errors.StorageConflictError, OSError),
        (errno.ESTALE, errors.StorageConflictError, OSError),
        (errno.ETIMEDOUT, errors.StorageUnavailableError, ConnectionError),
        (errno.ENAMETOOLONG, errors.InvalidLocationError, ValueError),
        (errno.EIO, errors.StorageError, OSError),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_os_errors(number: int, expected: type[errors.StorageError], builtin: type[Exception]) -> None:
    mapped = map_os_error(OSError(number, os.strerror(number), "x"), "/runs/x", "write")
    assert type(mapped) is expected
    assert isinstance(mapped, builtin)
    assert mapped.errno == number
    assert f"cannot write /runs/x: {os.strerror(number)}" in str(mapped)
    assert all(issubclass(kind, errors.StorageError) for kind in OS_ERRORS.values())


def test_the_cause_is_chained_and_ours_pass() -> None:
    with pytest.raises(errors.StoragePermissionError, match="/runs/x") as caught, os_errors("/runs/x", "read"):
        raise PermissionError(errno.EACCES, "Permission denied")
    assert isinstance(caught.value.__cause__, PermissionError)
    ours = errors.StorageFullError("already translated")
    with pytest.raises(errors.StorageFullError) as again, os_errors("/runs/x", "read"):
        raise ours
    assert again.value is ours
