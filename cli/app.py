"""The commands, in the order of ``holdfast --help``; each is a function that returns the exit status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from .change import pin, prune, rm, rollback, unpin
from .convert import cp, export, import_
from .diff import diff
from .drill.command import drill
from .inspect import ls, show, verify
from .recipes import recipes, run
from .run_report import report
from .supervise import supervise
from .watch import watch

_COMMANDS: tuple[Callable[..., int], ...] = (
    *(run, supervise, drill, recipes),
    *(ls, watch, prune, rm, rollback, pin, unpin, show, diff, report, verify),
    *(cp, import_, export),
)

app = typer.Typer(
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Run training recipes, and inspect, verify, convert and delete checkpoints.",
)


@app.callback(invoke_without_command=True)
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


for _command in _COMMANDS:
    app.command(_command.__name__.rstrip("_"))(_command)
