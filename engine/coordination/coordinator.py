"""What processes that save and load together need of each other: a small store that all of them see."""

from __future__ import annotations

from typing import Protocol


class Coordinator(Protocol):
    """The processes of one program, and a key-value store that they share.

    Keys are text, values are bytes. All methods may be called from any thread, and one that waits does not keep
    others from getting on; none is a collective operation on devices, so that a background thread never gets in the
    way of a training step. `Group` builds barriers and the like on it.

    A coordinator can be referred to weakly. All methods raise ConnectionError when the store is gone, usually with
    the process that kept it.

    """

    @property
    def process_index(self) -> int:
        """Returns which process this is, from 0."""
        ...

    @property
    def process_count(self) -> int:
        """Returns how many processes there are."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Stores a value; every process that asks for the key gets it.

        Args:
            key: Names divided by slashes. No key may be another one that goes on after a slash, unless both are
                deleted together: some stores take the former for a folder.
            value: At most 512 KiB.
        """
        ...

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for a value.

        Args:
            key: The key.
            timeout: How long to wait, in seconds.

        Raises:
            TimeoutError: Nobody has stored it in that time.
        """
        ...

    def try_get(self, key: str) -> bytes | None:
        """Returns a value if it has been stored, without waiting."""
        ...

    def delete(self, key: str) -> None:
        """Forgets a value; nothing happens if there is none."""
        ...
