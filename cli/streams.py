"""Standard streams: safe text, log lines, streams that are closed, and streams whose reader has gone."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import sys
from typing import TextIO

from ..engine.storage import without_secrets
from ..engine.streams import STREAMS, redirect

# Characters that act on a terminal: controls, marks that reorder text, and other line separators.
_ACTING = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
_LONGEST_WAIT = 5.0  # seconds to wait for a reader that does not read


def visible(text: object) -> str:
    r"""Return printable text: characters that act on a terminal are escaped, and passwords in addresses hidden.

    >>> visible("a\x1b[31m b"), visible("s3://user:word@host/x")
    ('a\\x1b[31m b', 's3://***@host/x')
    """
    return _ACTING.sub(lambda match: ascii(match[0])[1:-1], without_secrets(str(text)))


def one_line(name: object) -> str:
    """Return a name from a file or a program, such as that of a leaf or a metric, for use within a line."""
    return visible(name).replace("\n", "\\n").replace("\t", "\\t")


def say(*texts: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print printable text; the commands print all text for users with this function."""
    print(*map(visible, texts), end=end, file=file, flush=flush)


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


def open_closed_streams() -> None:
    """Open ``/dev/null`` in place of closed streams, or the next file would get their output."""
    for number, name in STREAMS.items():
        try:
            os.fstat(number)
        except OSError:
            redirect(number)
        if getattr(sys, name) is None:  # Python sets a stream to None if its descriptor was closed at startup.
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115 # stays open as long as the process
        elif number and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            with contextlib.suppress(OSError):  # a pipe that is opened to append
                stream.reconfigure(errors="backslashreplace")  # A terminal of ASCII shows what it can.


def write_error(text: str) -> None:
    """Write to standard error, but give up if the reader has gone or does not read."""
    data = visible(text).encode(errors="backslashreplace")
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    try:
        while data and any(state & select.POLLOUT for _, state in poll.poll(_LONGEST_WAIT * 1000)):
            data = data[os.write(2, data) :]
    except OSError:
        pass
