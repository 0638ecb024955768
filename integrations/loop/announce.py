"""The lines about a run that every user should see: it starts fresh, resumes, is preempted, has nothing left to do."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("holdfast")


def announce(text: str, *args: object, shown: bool = True) -> None:
    """Log a line at INFO; process 0 also writes it to stderr if the application has not configured logging."""
    logger.info(text, *args)
    if shown and not _is_configured() and sys.stderr is not None:
        sys.stderr.write(f"holdfast: {text % args}\n")
        sys.stderr.flush()


def _is_configured() -> bool:
    """Return whether the application has configured logging: by a handler, a level, or by disabling it."""
    root = logging.getLogger()
    levels = logger.level == logging.NOTSET and root.level == logging.WARNING  # Python's defaults
    return logger.hasHandlers() or logger.disabled or root.manager.disable >= logging.INFO or not levels
