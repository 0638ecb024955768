"""The directories in which this process has finished a run, and the modules of these runs."""

from __future__ import annotations

import weakref
from typing import Any

from ...engine.errors import StateError
from ...engine.storage import Location

_modules: dict[str, weakref.ref[Any]] = {}  # by the URL of the directory; a module that is gone is no other's


def note_finished(directory: Location, module: Any) -> None:
    """Note that a run of a module has ended as it should."""
    _modules[directory.url] = weakref.ref(module)


def check_module(directory: Location, module: Any) -> None:
    """Refuse to resume a run that this process has finished, with another module: it is most likely another run.

    Raises:
        StateError: The module is another one, as in the next fold of a cross-validation.
    """
    finished = _modules.get(directory.url)
    if finished is not None and finished() is not module:
        raise StateError(
            f"{directory} holds a run that this process has finished with another module, which would get the weights "
            "and the score of that run. Give every fold, trial or phase a directory of its own; to go on with that "
            "run, pass resume='must' to the callback, or ckpt_path='last' to fit"
        )
