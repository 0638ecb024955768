"""How the programs end that tests fork from a process with their imports.

A program waits for its threads and calls the functions of ``atexit``, as at the end of any other. Only then it leaves
out that Python destroys all objects and modules: with torch and Lightning, that takes four times as long as to train.
Import this module before the others: functions of ``atexit`` are called in reverse order.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

_status: int | None = None


def run_to_end(program: Callable[..., object], *arguments: Any) -> NoReturn:
    """Calls a function, and ends as a program does whose script comes to its end, to ``sys.exit`` or to an error."""
    global _status
    try:
        program(*arguments)
        _status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        _status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())
        _status = 1
    sys.exit(_status)


def _leave() -> None:
    if _status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)


atexit.register(_leave)
