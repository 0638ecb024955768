"""Lightning's training loops, entered from outside.

Callback hooks come before the loops have done their bookkeeping: after ``on_train_batch_end`` the module's own hook,
the validation and the schedulers that wait for it are still to come, and after ``on_train_epoch_end`` those of the
epoch. A checkpoint saved from a hook therefore lacks them. The methods of the loops that enclose all of that are
wrapped, on the loop objects of one trainer and for one run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...engine.errors import StateError

Wrapper = Callable[..., Any]

_RESTART_FLAGS = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint")


class LoopHooks:
    """Wrappers around methods of single objects, used where ``applies()``, which :meth:`remove` takes off again."""

    def __init__(self, applies: Callable[[], bool] = lambda: True) -> None:
        self._placed: list[tuple[Any, str, Any, Any]] = []
        self._active = True
        self._applies = applies

    def place(self, owner: Any, name: str, wrapper: Wrapper) -> None:
        """Wrap a method of one object; the wrapper is called with the original method and its arguments.

        Raises:
            StateError: There is no such method.
        """
        original = getattr(owner, name, None)
        if not callable(original):
            raise StateError(
                f"{type(owner).__qualname__} has no method {name}(): this version of Lightning is built differently "
                "from those that holdfast supports (2.5 and 2.6)"
            )

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if not self._active or not self._applies():
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        self._placed.append((owner, name, vars(owner).get(name), method))
        setattr(owner, name, method)

    def remove(self) -> None:
        """Take all wrappers off. One that was wrapped in turn stays, and only passes on."""
        self._active = False
        for owner, name, before, method in reversed(self._placed):
            if vars(owner).get(name) is not method:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._placed.clear()


def clear_restart(loop: Any) -> None:
    """Make a loop, and the loops inside it, forget that their counters were restored.

    A restored loop guesses from the counters at which hook it was saved, then counts steps, skips validations and
    leaves schedulers out to make up for it. After a save between batches there is nothing to make up for.
    """
    for name in _RESTART_FLAGS:
        if name in vars(loop):
            setattr(loop, name, False)
    loop.reset_restart_stage()
    for child in vars(loop).values():
        if "_restarting" in getattr(child, "__dict__", ()) and hasattr(child, "reset_restart_stage"):
            clear_restart(child)


def finish_epoch(progress: Any) -> None:
    """Set the counters of a loop that was saved between two epochs to those of a finished epoch."""
    for tracker in (progress.total, progress.current):
        tracker.ready = tracker.started = tracker.completed = tracker.processed


def end_epoch(progress: Any) -> None:
    """Count the epoch of a loop that was saved within it, as the last thing before its end."""
    for tracker in (progress.total, progress.current):
        tracker.processed = tracker.ready
    finish_epoch(progress)


def forget_unfinished(progress: Any) -> None:
    """Remove an evaluation that will be repeated from the counters."""
    for name, done in vars(progress.current).items():
        setattr(progress.total, name, max(0, getattr(progress.total, name) - done))
    progress.current.reset()
