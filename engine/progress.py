"""The protocol by which long-running calls report progress, and shares for parts that count in other units."""

from __future__ import annotations

from typing import Protocol, Self

from .forks import Lock


class Progress(Protocol):
    """Receives the progress of a long-running call in bytes. Several threads call the methods often and concurrently.

    An exception raised by a method ends the call, as an interrupt would. When a call returns successfully, the sum of
    all numbers passed to ``advance`` equals the sum of all numbers passed to ``expect``.

    >>> import tempfile, numpy as np
    >>> import holdfast as hf
    >>> class Percent:
    ...     expected = done = 0
    ...     def expect(self, nbytes: int) -> None:
    ...         self.expected += nbytes
    ...     def advance(self, nbytes: int) -> None:
    ...         self.done += nbytes
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     report = hf.save(f"{directory}/a", {"w": np.arange(3)})
    ...     percent = Percent()
    ...     hf.verify(f"{directory}/a", progress=percent).ok, percent.done == percent.expected > 24
    (True, True)
    """

    def expect(self, nbytes: int) -> None:
        """Increase the number of bytes to process. Called before the bytes are processed, possibly several times."""

    def advance(self, nbytes: int) -> None:
        """Increase the number of processed bytes."""


class _Null:
    def expect(self, nbytes: int) -> None:
        return

    def advance(self, nbytes: int) -> None:
        return


NULL: Progress = _Null()


class Share:
    """A part of a call that counts in its own units. If the part succeeds, its progress adds up to ``nbytes`` bytes."""

    def __init__(self, progress: Progress, nbytes: int, units: int = 0) -> None:
        self._progress = progress
        self._nbytes = nbytes
        self._units = units
        self._done = self._reported = 0
        self._lock = Lock()

    def expect(self, units: int) -> None:
        """Increase the number of units to process."""
        with self._lock:
            self._units += units

    def advance(self, units: int) -> None:
        """Increase the number of processed units."""
        with self._lock:
            self._done = min(self._done + units, self._units)
            self._report(self._nbytes * self._done // max(1, self._units))

    def _report(self, reached: int) -> None:
        if reached > self._reported:
            new, self._reported = reached - self._reported, reached
            self._progress.advance(new)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            with self._lock:
                self._report(self._nbytes)
