"""Arguments and options shared by several commands, and the lookup of checkpoints by path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ..engine.clock import seconds
from ..engine.errors import CheckpointNotFoundError, StorageError, shortened
from ..engine.format import RECORD
from ..engine.sources import is_foreign, is_ours, left_by_download
from ..engine.storage import Location, as_location

INSIDE_A_RUN = "checkpoints"
_STEP = click.IntRange(min=0)
_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_SEARCHED = 100  # maximum number of subfolders to search if a directory has no checkpoints

directory = click.argument(
    "directory", metavar="DIR", help="A run, a directory of checkpoints, or one checkpoint: a path or URL."
)
run_directory = click.argument("directory", metavar="DIR", help="The directory of a run: a path or URL.")
source = click.argument("source", metavar="SRC", help="A run, a directory of checkpoints, or one checkpoint.")


def step_of(
    text: str, name: str = "step", value_type: Any = _STEP, *, many: bool = False, required: bool = False
) -> _Decorator:
    """Return a decorator that adds a step as an argument and as an option; ``many`` allows several steps."""
    option = f"--{name.removesuffix('s').replace('_', '-')}"
    shown = option[2:].upper() + "..." * many

    def note(context: click.Context, _: click.Parameter, value: tuple[Any, ...]) -> None:
        context.meta[name] = value

    def merge(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        given = (*(value if many else () if value is None else (value,)), *context.meta.pop(name, ()))
        if len(given) > 1 and not many:
            raise click.BadParameter("give it once, by position or as an option", context, parameter)
        if required and not given:
            raise click.MissingParameter(ctx=context, param=parameter)
        return given if many else next(iter(given), None)

    more: dict[str, Any] = {"type": value_type, "callback": note, "help": "The same, as an option."}
    more |= {"multiple": True, "expose_value": False, "is_eager": True}
    by_name = click.option(option, f"{name}_option", metavar="STEP", **more)
    more = {"type": value_type, "callback": merge, "help": text, "nargs": -1 if many else 1, "required": False}
    by_position = click.argument(name, metavar=shown if required else f"[{shown}]", **more)
    return lambda function: by_position(by_name(function))


def duration(option: str, text: str, *, name: str | None = None, default: str | None = None) -> _Decorator:
    """Return a decorator that adds an option for a duration such as ``10m``; the command receives seconds."""

    def read(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
        return None if value is None else seconds(value, name=option)

    return click.option(option, *filter(None, [name]), default=default, callback=read, help=text)


step = step_of("The step.")
steps = step_of("The steps.", "steps", many=True, required=True)
program = click.argument(
    "command", metavar="-- PROGRAM [ARGUMENT]...", nargs=-1, required=True, help="The program to run."
)
select = click.option(
    "--select", metavar="PATTERN", multiple=True, help="Only leaves whose paths match, such as '**/lora_A/**'."
)
prefix = click.option("--prefix", help="The prefix of the steps, if the directory has several.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def deletes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options shared by all commands that delete checkpoints."""
    dry_run = click.option("--dry-run", is_flag=True, help="Print what would be deleted; delete nothing.")
    yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
    return prefix(dry_run(yes(as_json(function))))


def checkpoints_at(path: str) -> Location:
    """Resolve a user's path or URL to a checkpoint directory, or to a single checkpoint of any supported library."""
    location = as_location(path).snapshot()
    if (location / RECORD).is_there():
        return location
    inside = location / INSIDE_A_RUN
    if inside.is_directory() and not is_foreign(location):
        return inside
    if not location.is_directory() and not is_foreign(location):
        problem = "no such directory"
        if location.exists():
            with location.open_data() as file:
                left = left_by_download(file)
            problem = f"this is {left}" if left else "this file is not a checkpoint of a supported library"
        raise CheckpointNotFoundError(f"{path}: {problem}; give a run, a directory of checkpoints or one step")
    return location


def is_one_checkpoint(location: Location) -> bool:
    return (location / RECORD).is_there() or is_foreign(location)


def runs_below(location: Location) -> list[str]:
    """Return the names of local subfolders that contain holdfast checkpoints, searching at most 100 subfolders."""
    if not location.is_local or is_ours(location):  # listing object stores is slow
        return []
    try:
        folders = [entry.name for entry in location.entries() if entry.is_directory][:_SEARCHED]
        return sorted(name for name in folders if any(map(is_ours, (location / name, location / name / INSIDE_A_RUN))))
    except StorageError:
        return []


def where_else(location: Location) -> str:
    """Return a hint about nearby checkpoints to append to an error message, or an empty string if there are none."""
    if (location.parent / RECORD).is_there():
        return f"; it is part of the checkpoint {location.parent}"
    runs = runs_below(location)
    return f"; there are some in {shortened(runs)}" if runs else ""
