"""The output of a program: its standard streams, whose readers may have exited, and its logging handlers."""

from __future__ import annotations

import logging
import os
import select

STREAMS = {0: "stdin", 1: "stdout", 2: "stderr"}
"""Names of the standard streams, keyed by file descriptor."""


def silence_lost_streams() -> list[str]:
    """Redirect output streams without a reader to ``/dev/null``, because writing to them would end the program."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    lost = [number for number, state in poll.poll(0) if state & (select.POLLERR | select.POLLHUP | select.POLLNVAL)]
    for number in lost:
        redirect(number)
    return [STREAMS[number] for number in lost]


def handlers_of(logger: logging.Logger, level: int) -> list[logging.Handler]:
    """Return the handlers to which a logger passes records of a given level, ignoring the handlers' own levels."""
    handlers: list[logging.Handler] = []
    owner: logging.Logger | None = logger if logger.isEnabledFor(level) else None
    while owner is not None:
        handlers += owner.handlers
        owner = owner.parent if owner.propagate else None
    return handlers


def redirect(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == number:
        os.set_inheritable(null, True)
        return
    os.dup2(null, number)
    os.close(null)
