"""Processes that ``jax.distributed`` has connected."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class JaxCoordinator:
    """The processes of a jax program, and the key-value store of its coordination service.

    The service runs in process 0, and every process keeps in touch with it by heartbeats:

    - When process 0 dies, jax aborts the others within milliseconds (SIGABRT, with a message on stderr). No option of
      ``jax.distributed.initialize`` changes that.
    - When another one dies, jax aborts the rest ``heartbeat_timeout_seconds`` later (100 by default). Until then they
      run on, so that an error which says what is missing is seen only if timeouts are shorter than that. With
      ``jax.config.update("jax_enable_recoverability", True)`` before ``initialize``, they are not aborted at all.

    Args:
        client: What ``jax.distributed.initialize`` made.
        index: Which process this is.
        count: How many there are.
    """

    def __init__(self, client: Any, index: int, count: int) -> None:
        self.process_index = index
        self.process_count = count
        self._client = client

    def put(self, key: str, value: bytes) -> None:
        """Stores a value."""
        with _translated(key):
            self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for a value. Raises TimeoutError when nobody has stored it in that time."""
        try:
            with _translated(key):
                value: bytes = self._client.blocking_key_value_get_bytes(key, max(1, round(timeout * 1000)))
        except TimeoutError:
            late = self.try_get(key)  # the time may have been too short for any answer
            if late is None:
                raise
            return late
        return value

    def try_get(self, key: str) -> bytes | None:
        """Returns a value if there is one."""
        try:
            with _translated(key):
                value: bytes = self._client.key_value_try_get_bytes(key)
        except KeyError:
            return None
        return value

    def delete(self, key: str) -> None:
        """Forgets a value, and all those whose keys go on after a slash."""
        with _translated(key):
            self._client.key_value_delete(key)


@contextlib.contextmanager
def _translated(key: str) -> Iterator[None]:
    """Turns what the client raises, which is a RuntimeError whose text begins with a status, into errors of Python."""
    try:
        yield
    except RuntimeError as error:
        status = str(error).partition(":")[0]
        if status == "NOT_FOUND":
            raise KeyError(key) from None
        if status == "DEADLINE_EXCEEDED":
            raise TimeoutError(f"nobody stored {key} in time") from None
        raise ConnectionError(f"jax's coordination service: {error}") from error
