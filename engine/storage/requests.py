"""Waiting for an object store: every request ends, and says what it was about if it fails."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from ..errors import HoldfastError, StorageUnavailableError
from .statuses import map_status

if TYPE_CHECKING:
    from collections.abc import Callable

    import tensorstore

_logger = logging.getLogger("holdfast")

PATIENCE = 300.0
"""Seconds after which a request has failed, whatever TensorStore still tries: a service may never answer."""
TOLD_AFTER = 20.0
"""Seconds after which the log says what is waited for."""
SLOWEST = 64 << 10
"""Bytes a second; what is sent or received gets so much more time."""


def finish(
    start: Callable[[], tensorstore.Future[Any]],
    url: str,
    action: str,
    hint: Callable[[type[HoldfastError]], str],
    *,
    nbytes: int = 0,
) -> Any:
    """Starts a request and waits for its answer.

    Args:
        start: Starts it.
        url: What it is about, for messages.
        action: What is attempted, as a verb phrase such as ``"write"``.
        hint: Returns what may help against an error of some kind, or "".
        nbytes: How much is sent or received at most.

    Returns:
        The answer.

    Raises:
        HoldfastError: The store refused, could not be reached, or did not answer in time.
    """
    began = time.monotonic()
    patience = PATIENCE + nbytes / SLOWEST
    future = None
    try:
        future = start()
        try:
            return future.result(timeout=min(TOLD_AFTER, patience))
        except TimeoutError:
            if patience > TOLD_AFTER:
                advice = hint(StorageUnavailableError)
                _logger.warning(
                    "%s: still waiting to %s it after %.0f s%s", url, action, TOLD_AFTER, advice and f" ({advice})"
                )
                return future.result(timeout=patience - TOLD_AFTER)
            raise
    except TimeoutError as error:
        assert future is not None
        future.cancel()
        advice = hint(StorageUnavailableError)
        raise StorageUnavailableError(
            f"cannot {action} {url}: no answer after {time.monotonic() - began:.0f} s; check the connection and try "
            f"again{advice and f' ({advice})'}"
        ) from error
    except HoldfastError:
        raise
    except (ValueError, IndexError, RuntimeError, OSError) as error:
        # Without a name of its own: an error that its frame holds keeps what its callers hold until a collection.
        raise _advised(map_status(error, url, action), hint) from error


def _advised(error: HoldfastError, hint: Callable[[type[HoldfastError]], str]) -> HoldfastError:
    advice = hint(type(error))
    return type(error)(f"{error} ({advice})") if advice else error
