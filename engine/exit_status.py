"""Exit statuses of the command, and of a program that was preempted."""

from __future__ import annotations

DONE = 0
FAILED = 1
"""An error; for ``holdfast verify``: something is damaged."""
BAD_USAGE = 2
"""Arguments, a configuration, or a directory without checkpoints: running the same again will not help."""
PREEMPTED = 75
"""Preempted and saved: run the same command again (``EX_TEMPFAIL`` of ``sysexits.h``)."""
NO_PROGRESS = 93
"""``holdfast supervise``: restarts make no progress."""
INTERRUPTED = 130
"""Ctrl-C, as shells report it."""
