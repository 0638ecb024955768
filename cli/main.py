"""The entry point of the command, which prints errors to standard error as one line and returns the exit status.

With ``--json``, errors are also printed to standard output as JSON.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence

from ..engine.errors import (
    BAD_USAGE,
    DONE,
    FAILED,
    INTERRUPTED,
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidLocationError,
    OptionError,
)
from ..engine.installed import install_command
from .streams import open_closed_streams, say

_USAGE_ERRORS = (OptionError, CheckpointNotFoundError, CheckpointExistsError, InvalidLocationError)
_OWN_PACKAGES = ("click", "pydantic", "pydantic_core", "rich", "ruamel")
_TRACEBACK = "--traceback"
_JSON = "--json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with the given arguments, by default ``sys.argv[1:]``, and return the exit status."""
    open_closed_streams()
    if arguments is None and sys.argv[1:2] != ["run"]:  # a recipe may rely on the final garbage collection
        atexit.register(gc.freeze)  # collecting garbage in all imported modules would delay the exit
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)  # arguments after -- belong to another program
    with_traceback, as_json = (flag in arguments[:end] for flag in (_TRACEBACK, _JSON))
    arguments = [argument for argument in arguments[:end] if argument != _TRACEBACK] + arguments[end:]
    try:
        from .app import execute

        status = execute(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has closed the pipe, as in `holdfast ls | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        # Ctrl-C during the import of an extension module raises an ImportError caused by the KeyboardInterrupt.
        problem: BaseException = error.__cause__ if isinstance(error.__cause__, KeyboardInterrupt) else error
        if with_traceback and problem is error:
            traceback.print_exception(error)
    message, status = _explained(problem)
    if as_json:
        say(json.dumps({"error": message, "kind": type(problem).__qualname__, "status": status}, indent=2))
    say(f"holdfast: {message}", file=sys.stderr)
    return status


def _explained(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, _USAGE_ERRORS):
        return str(error), BAD_USAGE
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _OWN_PACKAGES:
        return f"the command needs {error.name}: {install_command('cli')}", FAILED
    if (usage_message := getattr(error, "format_message", None)) is not None:  # a click usage error
        command = getattr(getattr(error, "ctx", None), "command_path", "holdfast")
        return f"{usage_message()} (see {command} --help)", BAD_USAGE
    error_type = type(error)
    if error_type.__module__.partition(".")[0] == __package__.partition(".")[0]:
        return str(error), FAILED
    return f"{error_type.__qualname__}: {error} ({_TRACEBACK} shows where)", FAILED


if __name__ == "__main__":
    sys.exit(main())
