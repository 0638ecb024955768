"""Observers, which receive the events of runs and may redirect paths, change options and request saves.

A manager takes an observer as ``observer=``. By default, it uses the process's observer from :func:`process_observer`,
which lets ``holdfast supervise`` and ``holdfast drill`` observe unmodified programs. Without these commands, the
process's observer does nothing.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from .errors import StateError

OBSERVER = "HOLDFAST_OBSERVER"
"""Environment variable that names the function that creates a process's observer, as ``module:function``."""

DRILL = "HOLDFAST_DRILL"
"""Environment variable with the folder of the rehearsal, set in programs that ``holdfast drill`` rehearses."""

STRAYS = "strays.jsonl"  # file in the rehearsal's folder, with one line per process started without HOLDFAST_DRILL

Point = Literal["step", "batch", "validation", "restored", "saving", "commit", "committed", "save_failed"]
"""A point that a run passes: ``step`` follows an update, ``saving`` precedes the writing of a step's files (possibly in
the background), ``commit`` immediately precedes the writing of its commit record, and ``committed`` follows it."""

T = TypeVar("T")


class Observer:
    """Base class for observers of a process's runs. Its methods do nothing unless a subclass overrides them."""

    def place(self, url: str, *, writes: bool) -> str:
        """Return the location to use instead of ``url``; by default, return ``url`` unchanged.

        Args:
            url: A URL or an absolute path.
            writes: Whether the program is about to write to the location.
        """
        return url

    def writes(self, url: str) -> None:
        """Called before holdfast writes, renames or deletes a file or object; an exception prevents the operation.

        Args:
            url: A URL or an absolute path.
        """

    def options(self, options: T) -> T:
        """Return the ``CheckpointManagerOptions`` that a manager should use instead of ``options``."""
        return options

    def joins(self, process: int, count: int) -> None:
        """Called when process ``process`` of the ``count`` processes that save together creates a manager."""

    def wants(self, step: int) -> str | None:
        """Return a reason to save a step even though no trigger is due, or None."""
        return None

    def steps_after_signal(self, most: int) -> int:
        """Return the maximum number of steps to take after a preemption save, for comparison with the resumed run."""
        return most

    def reached(self, point: Point, step: int | None) -> None:
        """Called when the run passes a point (see `Point`), on the same thread. A point may be passed several times."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Called with each event of a run (see ``docs/events.md``), with ``directory`` and ``process`` added."""


@functools.cache
def process_observer() -> Observer:
    """Return the observer that ``HOLDFAST_OBSERVER`` names; if the variable is not set, one that does nothing."""
    name = os.environ.get(OBSERVER)
    if not name:
        return Observer()
    import pkgutil  # imported lazily, because few processes are observed

    try:
        make = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise StateError(
            f"{OBSERVER}={name} names nothing that can be imported here ({error}). The program that started this one "
            "observes it with another version of holdfast: install the same one for both"
        ) from error
    observer: Observer = make()
    return observer


def check_write(url: str) -> None:
    """Raise an error if this process must not write to a location."""
    if not url.startswith("memory://"):
        _check_no_stray()
        process_observer().writes(url)


@functools.cache
def _check_no_stray() -> None:
    """Raise StateError if a rehearsed program started this process without passing on HOLDFAST_DRILL."""
    parent, folder, prefix = os.getppid(), b"", f"{DRILL}=".encode()
    while parent > 1 and DRILL not in os.environ and not folder:
        try:
            with open(f"/proc/{parent}/environ", "rb") as environ, open(f"/proc/{parent}/stat", "rb") as status:
                variables, stat = environ.read().split(b"\0"), status.read()
        except OSError:  # the process belongs to another user, or there is no /proc
            return
        folder = next((text.removeprefix(prefix) for text in variables if text.startswith(prefix)), b"")
        rehearsed, parent = parent, int(stat.rpartition(b")")[2].split()[1])
    if not folder:
        return
    try:
        with open(os.path.join(os.fsdecode(folder), STRAYS), "a", encoding="utf-8") as file:
            file.write(json.dumps({"pid": os.getpid(), "command": sys.argv}) + "\n")
    except OSError:  # the rehearsal has ended
        pass
    raise StateError(
        f"holdfast drill rehearses process {rehearsed}, which has started this one without the environment variable "
        f"{DRILL}, so that it would write to the real directories: start it with the environment of its parent, such "
        f"as env={{**os.environ, ...}}; or with an empty {DRILL}, if it is no part of what is rehearsed"
    )
