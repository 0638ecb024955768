"""The commands, in the order of ``holdfast --help``; each is a function that returns the exit status."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

COMMANDS = (
    *("run", "supervise", "drill", "recipes"),
    *("ls", "watch", "prune", "rm", "rollback", "pin", "unpin", "show", "diff", "report", "verify"),
    *("cp", "import", "export"),
)


def make_app(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """Return the command line with some of the commands; only their modules are imported."""
    app = typer.Typer(
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="Run training recipes, and inspect, verify, convert and delete checkpoints.",
    )
    app.callback(invoke_without_command=True)(_start)
    for name in names:
        app.command(name)(_function(name))
    return app


def _function(name: str) -> Callable[..., int]:
    """Return the function of a command. To import all of their modules takes longer than to list checkpoints."""
    module: Any
    if name in ("ls", "show", "verify"):
        from . import inspect as module
    elif name in ("prune", "rm", "rollback", "pin", "unpin"):
        from . import change as module
    elif name in ("cp", "import", "export"):
        from . import convert as module
    elif name in ("run", "recipes"):
        from . import recipes as module
    elif name == "supervise":
        from . import supervise as module
    elif name == "drill":
        from .drill import command as module
    elif name == "watch":
        from . import watch as module
    elif name == "diff":
        from . import diff as module
    elif name == "report":
        from . import run_report as module
    else:
        raise AssertionError(name)
    function: Callable[..., int] = module.import_ if name == "import" else getattr(module, name)
    return function


def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    _traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the traceback of an error; accepted anywhere.")
    ] = False,
) -> None:
    # --traceback is declared for --help only: the entry point has handled it already.
    if version:
        from importlib.metadata import version as version_of

        typer.echo(version_of("holdfast"))
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
