"""Every error of the operating system and of TensorStore becomes one of holdfast."""

from __future__ import annotations

import errno
import os

import pytest
import tensorstore

from holdfast.engine import errors
from holdfast.engine.storage.status import OS_ERRORS, STATUSES, map_os_error, map_status, os_errors

# https://github.com/abseil/abseil-cpp/blob/master/absl/status/status.h, all but OK.
ABSEIL = [
    *("CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE"),
    *("UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
]


def test_every_status_is_mapped() -> None:
    assert sorted(STATUSES) == sorted(ABSEIL)


@pytest.mark.parametrize("status", ABSEIL)
def test_status(status: str) -> None:
    mapped = map_status(ValueError(f"{status}: some reason [a='b']"), "s3://bucket/x", "read")
    assert type(mapped) is STATUSES[status]
    assert isinstance(mapped, (errors.StorageError, errors.DamagedCheckpointError))
    assert "cannot read s3://bucket/x" in str(mapped)
    assert "some reason" in str(mapped)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("ABORTED: All 8 retry attempts failed: SlowDown: [http_response_code='503']", errors.StorageUnavailableError),
        ("ABORTED: changed meanwhile", errors.StorageConflictError),
        ("ExpiredToken: The token has expired [http_response_code='400']", errors.StoragePermissionError),
        ("AuthorizationHeaderMalformed: wrong region [http_response_code='400']", errors.StoragePermissionError),
        ("INTERNAL: Failed to get credentials from provider: none", errors.StoragePermissionError),
        ("UNKNOWN: XMinioStorageFull: no space [http_response_code='507']", errors.StorageFullError),
        ("FAILED_PRECONDITION: PermanentRedirect: elsewhere [http_response_code='301']", errors.InvalidLocationError),
        ("FAILED_PRECONDITION: Requested byte range [0, 9) was ignored by server", errors.DamagedCheckpointError),
        ('Invalid key: "x"', errors.InvalidLocationError),
        ("Invalid: COLON: later", errors.InvalidLocationError),
        ("BRAND_NEW: status", errors.StorageError),
        (NotImplementedError("KeyValueStore does not support writing"), errors.StorageError),
        (OSError(errno.ENOSPC, "No space left on device"), errors.StorageFullError),
    ],
)
def test_errors_that_mean_more_or_less_than_their_status(
    error: str | Exception, expected: type[errors.HoldfastError]
) -> None:
    raised = ValueError(error) if isinstance(error, str) else error
    assert type(map_status(raised, "s3://bucket/x", "read")) is expected


def test_what_was_said_in_words_is_not_repeated() -> None:
    text = (
        "PERMISSION_DENIED: AccessDenied: no [http_response_body='<Error>\\n<M>it\\'s</M>'] [x-amzn-requestid='1'] "
        "[http_response_code='403']"
    )
    assert str(map_status(ValueError(text), "s3://b/x", "read")) == (
        "cannot read s3://b/x: PERMISSION_DENIED: AccessDenied: no [http_response_code='403']; "
        "check the permissions or credentials"
    )


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


def test_every_mapped_os_error_is_a_storage_error() -> None:
    assert all(issubclass(kind, errors.StorageError) for kind in OS_ERRORS.values())


def test_the_cause_is_chained_and_ours_pass() -> None:
    with pytest.raises(errors.StoragePermissionError, match="/runs/x") as caught, os_errors("/runs/x", "read"):
        raise PermissionError(errno.EACCES, "Permission denied")
    assert isinstance(caught.value.__cause__, PermissionError)
    ours = errors.StorageFullError("already translated")
    with pytest.raises(errors.StorageFullError) as again, os_errors("/runs/x", "read"):
        raise ours
    assert again.value is ours


def test_an_error_that_tensorstore_raises() -> None:
    with pytest.raises(ValueError, match="NOT_FOUND") as caught:
        tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "memory"}}).result()
    assert type(map_status(caught.value, "memory://", "open")) is errors.ObjectNotFoundError
