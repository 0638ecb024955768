"""Standard streams: escape text, print log lines, and handle closed streams and blocked pipes."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import sys
import time
from typing import TextIO

from ..engine.storage import without_secrets
from ..engine.streams import STREAMS, redirect

# Terminal control characters, bidirectional marks, and unusual line separators.
_ACTING = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
_LONGEST_WAIT = 5.0  # timeout for a blocked reader, in seconds


def visible(text: object) -> str:
    r"""Make text printable: escape terminal control characters, and hide passwords in URLs.

    >>> visible("a\x1b[31m b"), visible("s3://user:word@host/x")
    ('a\\x1b[31m b', 's3://***@host/x')
    """
    return _ACTING.sub(lambda match: ascii(match[0])[1:-1], without_secrets(str(text)))


def one_line(name: object) -> str:
    """Escape an untrusted name, such as the name of a leaf or metric, for display on one line."""
    return visible(name).replace("\n", "\\n").replace("\t", "\\t")


def say(*texts: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print text with control characters escaped; all text output of the commands uses this function."""
    print(*map(visible, texts), end=end, file=file, flush=flush)


class _Lines(logging.Handler):
    """Writes lines such as ``12:00:00 warning: message`` to the standard streams; ``info`` lines omit the level."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
            level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
            moment = time.strftime("%H:%M:%S", time.localtime(record.created))
            say(f"{moment} {level}{record.getMessage()}", file=stream, flush=True)
        except Exception:
            self.handleError(record)


def configure_logging(level: str) -> None:
    """Print holdfast's log messages at or above a level: debug, info, warning or error."""
    logger = logging.getLogger("holdfast")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Lines)]:
        logger.removeHandler(handler)
    logger.addHandler(_Lines())
    logger.setLevel(level.upper())
    logger.propagate = False


def open_closed_streams() -> None:
    """Replace closed standard streams with ``/dev/null``, so that no file opened later receives printed text."""
    for number, name in STREAMS.items():
        try:
            os.fstat(number)
        except OSError:
            redirect(number)
        if getattr(sys, name) is None:  # the descriptor was already closed when Python started
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115 # stays open as long as the process
        elif number and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            with contextlib.suppress(OSError):  # raised for a pipe that was opened for appending
                stream.reconfigure(errors="backslashreplace")  # for terminals that support only ASCII


def write_error(text: str) -> None:
    """Write to standard error, but give up if the reader has exited or is blocked."""
    data = visible(text).encode(errors="backslashreplace")
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    try:
        while data and any(state & select.POLLOUT for _, state in poll.poll(_LONGEST_WAIT * 1000)):
            data = data[os.write(2, data) :]
    except OSError:
        pass
