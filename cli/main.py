"""The entry point: takes arguments, returns the exit status, prints errors as one line on standard error."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from ..engine.errors import CheckpointExistsError, CheckpointNotFoundError, InvalidLocationError, OptionError
from .status import BAD_USAGE, DONE, FAILED, INTERRUPTED

_USAGE_ERRORS = (OptionError, CheckpointNotFoundError, CheckpointExistsError, InvalidLocationError)
_OWN_PACKAGES = ("pydantic", "pydantic_core", "rich", "ruamel", "tqdm", "typer")
_TRACEBACK = "--traceback"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with its arguments, by default those of the process, and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own = arguments.index("--") if "--" in arguments else len(arguments)  # what follows belongs to another program
    with_traceback = _TRACEBACK in arguments[:own]
    arguments = [argument for argument in arguments[:own] if argument != _TRACEBACK] + arguments[own:]
    try:
        from .app import app

        status = app(args=arguments, prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe has gone, as in `holdfast ls | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # extension modules make it an ImportError
            return _complain("interrupted", INTERRUPTED)
        if with_traceback:
            traceback.print_exception(error)
        return _explain(error)
    if status == INTERRUPTED:  # typer's status for Ctrl-C
        return _complain("interrupted", INTERRUPTED)
    return status if isinstance(status, int) else DONE


def _explain(error: Exception) -> int:
    if isinstance(error, _USAGE_ERRORS):
        return _complain(str(error), BAD_USAGE)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _OWN_PACKAGES:
        return _complain(f"the command needs {error.name}: pip install 'holdfast[cli]'", FAILED)
    usage_message = getattr(error, "format_message", None)  # errors of the argument parser
    if usage_message is not None:
        return _complain(f"{usage_message()} (holdfast --help lists the commands)", BAD_USAGE)
    kind = type(error)
    if kind.__module__.partition(".")[0] == __package__.partition(".")[0]:
        return _complain(str(error), FAILED)
    return _complain(f"{kind.__qualname__}: {error} ({_TRACEBACK} shows where)", FAILED)


def _complain(message: str, status: int) -> int:
    print(f"holdfast: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
