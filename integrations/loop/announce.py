"""The one line about a run that everyone should see: it starts fresh, resumes, is preempted, has nothing left to do."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("holdfast")


def announce(text: str, *args: object, shown: bool = True) -> None:
    """Log a line at INFO, and write it to stderr where the application has not configured logging.

    Args:
        text: The line, with ``%`` formats for the arguments, as loggers take them.
        *args: The arguments.
        shown: False on processes other than the first, whose line is only logged.
    """
    logger.info(text, *args)
    if shown and not _is_configured() and sys.stderr is not None:
        sys.stderr.write(f"holdfast: {text % args}\n")
        sys.stderr.flush()


def _is_configured() -> bool:
    """Return whether the application has said what becomes of log lines: by a handler, a level, or by disabling them.

    Without handlers, Python itself writes only warnings, to stderr.
    """
    root = logging.getLogger()
    levels = logger.level == logging.NOTSET and root.level == logging.WARNING  # as in a program that says nothing
    return logger.hasHandlers() or logger.disabled or root.manager.disable >= logging.INFO or not levels
