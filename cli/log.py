"""Log lines of a command: to standard output, and warnings and errors to standard error."""

from __future__ import annotations

import logging
import sys

from .streams import say, visible


class _Lines(logging.Handler):
    """Writes to the current standard streams."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
            say(self.format(record), file=stream, flush=True)
        except Exception:
            self.handleError(record)


class _Format(logging.Formatter):
    """``12:00:00 message``, with the level's name where it is not info."""

    def format(self, record: logging.LogRecord) -> str:
        name = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{self.formatTime(record, '%H:%M:%S')} {name}{visible(record.getMessage())}"


def configure_logging(level: str) -> None:
    """Show log messages of holdfast from a level on: debug, info, warning or error."""
    logger = logging.getLogger("holdfast")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Lines)]:
        logger.removeHandler(handler)
    handler = _Lines()
    handler.setFormatter(_Format())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
