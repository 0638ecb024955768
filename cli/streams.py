"""The standard streams of a command that outlives those who read them: closed ones, and those whose reader has gone."""

from __future__ import annotations

import os
import select
import sys

_LONGEST_WAIT = 5.0  # seconds for a reader that does not read
_NAMES = {0: "stdin", 1: "stdout", 2: "stderr"}


def open_closed_streams() -> None:
    """Open ``/dev/null`` in place of closed streams: else the next file gets their number, and what is printed."""
    for number, name in _NAMES.items():
        try:
            os.fstat(number)
        except OSError:
            _redirect(number)
        if getattr(sys, name) is None:  # as Python leaves it where the stream was closed at its start
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115 # as long as the process


def silence_lost_streams() -> list[str]:
    """Redirect output whose reader has gone to ``/dev/null``, as programs die of it; return the streams' names."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    lost = [number for number, state in poll.poll(0) if state & (select.POLLERR | select.POLLHUP | select.POLLNVAL)]
    for number in lost:
        _redirect(number)
    return [_NAMES[number] for number in lost]


def write_error(text: str) -> None:
    """Write to standard error, at once or not at all: the reader may have gone, or may not read any more."""
    data = text.encode(errors="backslashreplace")
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    try:
        while data and any(state & select.POLLOUT for _, state in poll.poll(_LONGEST_WAIT * 1000)):
            data = data[os.write(2, data) :]
    except OSError:
        pass


def _redirect(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == number:
        os.set_inheritable(null, True)
        return
    os.dup2(null, number)
    os.close(null)
