"""Messages that every user of a run should see: how the run starts and ends, and which steps are lost."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from dataclasses import dataclass

from ...engine.checkpoint import at_exit
from ...engine.errors import HoldfastError
from ...engine.manager import Event
from ...engine.streams import handlers_of

logger = logging.getLogger("holdfast")


def announce(text: str, *args: object, shown: bool = True) -> None:
    """Log a line at INFO. If ``shown``, also write it to stderr, unless a handler emits it or logging is silenced."""
    logger.info(text, *args)
    # A program can silence the message by setting the level of this logger or disabling logging.
    silent = logger.level != logging.NOTSET or logger.disabled or logger.manager.disable >= logging.INFO
    is_handled = any(handler.level <= logging.INFO for handler in handlers_of(logger, logging.INFO))
    if shown and not silent and not is_handled and sys.stderr is not None:
        with contextlib.suppress(OSError):  # the terminal may be closed
            sys.stderr.write(f"holdfast: {text % args}\n")
            sys.stderr.flush()


_ADVICE: tuple[tuple[type[BaseException], str], ...] = (
    (HoldfastError, ""),  # the message already contains advice
    (KeyboardInterrupt, '. To save the step first at Ctrl-C, set signals=("SIGTERM", "SIGHUP", "SIGINT")'),
    (SystemExit, ". To save the step first, leave the loop with break, and call sys.exit after the with block"),
    (BaseException, ". To lose fewer steps, save more often: save_interval_steps= or save_interval_secs="),
)


@dataclass(slots=True, eq=False)
class Ending:
    """Tracks the reported and saved steps of a run. When the run ends, announces which steps are saved or lost."""

    directory: str
    saves_at_end: bool = True
    step: int | None = None  # last step that the loop has reported
    saved: int | None = None  # last step that was saved or restored

    def begin(self) -> None:
        """Start tracking. If the callback is still open at interpreter exit, lost steps are announced then."""
        _open[self.directory] = self

    def note(self, event: Event) -> None:
        if event["event"] in ("saved", "restored"):
            self.saved = event.get("step")

    def end(self, error: BaseException | None = None, *, shown: bool = False) -> None:
        """Stop tracking; if ``shown``, announce which steps were lost because of an exception."""
        if _open.get(self.directory) is self:
            del _open[self.directory]
        if error is not None and shown:
            advice = next(advice for kind, advice in _ADVICE if isinstance(error, kind))
            self.say(f"the loop ended with {type(error).__name__}", advice)

    def say(self, how: str, advice: str) -> None:
        """Announce which step is saved, or warn about lost steps."""
        if self.step is None:
            return
        if self.step == self.saved:
            announce("%s after step %d, which is saved in %s", how, self.step, self.directory)
            return
        saved, lost = ("no step", "all") if self.saved is None else (f"step {self.saved}", self.step - self.saved)
        text = "%s after step %d: %s is saved in %s, steps lost: %s%s"
        logger.warning(text, how, self.step, saved, self.directory, lost, advice)


_open: dict[str, Ending] = {}  # runs with an open callback, keyed by directory; holds no references to loop states
os.register_at_fork(after_in_child=_open.clear)


def _end_all() -> None:
    """Warn about lost steps at interpreter exit, when they can no longer be saved."""
    error = getattr(sys, "last_value", None)  # the exception that ends the program, if any
    for ending in _open.values():
        if ending.step != ending.saved:
            saves = ending.saves_at_end and error is None
            advice = ". The end of a with statement, or close() of the callback, saves the last step" if saves else ""
            ending.say("the program ended without closing the callback", advice)


at_exit(_end_all)
