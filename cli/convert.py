"""``holdfast cp``, ``import`` and ``export``: copies of checkpoints, and conversions from and for other libraries."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Literal, cast, get_args

from ..engine.clock import format_size
from ..engine.errors import CheckpointExistsError, OptionError, TreeMismatchError
from ..engine.exit_status import DONE
from ..engine.manager import copy_checkpoint
from ..engine.sources import is_ours
from ..integrations.formats.convert import Conversion, ExportFormat, export_checkpoint, import_checkpoint
from .log import configure_logging
from .places import checkpoints_at
from .progress import progress_of
from .report import count, print_json
from .streams import say


def copy_checkpoints(
    source: str, destination: str, *, overwrite: bool, max_bandwidth: str | None, as_json: bool
) -> int:
    """Copy checkpoints, print a line for each, and return the exit status.

    Raises:
        CheckpointExistsError: Other checkpoints are at the destination.
    """
    configure_logging("warning")
    with _command_options_in_errors(), progress_of("copy", shown=not as_json) as progress:
        try:
            copies = copy_checkpoint(
                checkpoints_at(source).url,
                destination,
                overwrite=overwrite,
                max_bandwidth=max_bandwidth,
                progress=progress,
            )
        except KeyboardInterrupt:
            say(f"holdfast: {destination}: what was copied stays; the same command goes on with it", file=sys.stderr)
            raise
    if as_json:
        print_json({"checkpoints": [dataclasses.asdict(one) for one in copies]})
        return DONE
    for one in copies:
        there = "" if one.sent == one.bytes else f", {format_size(one.bytes - one.sent)} of it there already"
        say(f"{one.source} -> {one.path}: {format_size(one.bytes)}{there}")
    return DONE


def import_checkpoints(source: str, destination: str, *, overwrite: bool, as_json: bool) -> int:
    """Convert a checkpoint of another library, print a line for each conversion, and return the exit status.

    Raises:
        CheckpointExistsError: There is something at the destination.
    """
    configure_logging("error")  # leaves that are left out are printed below
    place = checkpoints_at(source)
    if is_ours(place):
        raise OptionError(f"{source} is holdfast's own; holdfast cp copies it")
    with _command_options_in_errors(), progress_of("import", shown=not as_json) as progress:
        conversions = import_checkpoint(place, destination, overwrite=overwrite, progress=progress)
    _print(conversions, as_json=as_json)
    return DONE


def export_checkpoints(
    source: str,
    destination: str | None,
    to: str,
    *,
    in_place: bool,
    step: int | Literal["best"] | None,
    item: str | None,
    select: Sequence[str] | None,
    root: str | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Write a checkpoint in the format of another library, print a line for each, and return the exit status.

    Raises:
        OptionError: Arguments do not go together.
    """
    configure_logging("warning")
    formats = get_args(ExportFormat)
    if to not in formats:
        raise OptionError(f"--to {to}: expected one of {', '.join(formats)}")
    if in_place:
        if to != "orbax" or destination is not None or item is not None or select or root or overwrite:
            raise OptionError("--in-place takes --to orbax and --step, and neither DST nor another option")
        if step == "best":
            raise OptionError("--in-place takes the number of a step, and not --step best")
        return _add_metadata(source, step, as_json=as_json)
    if destination is None:
        raise OptionError(
            "DST is missing: give the file or directory to write" + (", or use --in-place" if to == "orbax" else "")
        )
    place = checkpoints_at(source)
    chosen = cast("ExportFormat", to)
    with _command_options_in_errors(), progress_of("export", shown=not as_json) as progress:
        conversions = export_checkpoint(
            place,
            destination,
            chosen,
            step=step,
            item=item,
            select=select or None,
            root=root,
            overwrite=overwrite,
            progress=progress,
        )
    _print(conversions, as_json=as_json)
    return DONE


@contextlib.contextmanager
def _command_options_in_errors() -> Iterator[None]:
    """Name the option of the command where an error names the argument of the function."""
    try:
        yield
    except (CheckpointExistsError, OptionError, TreeMismatchError) as error:
        message = str(error).replace("overwrite=True", "--overwrite").replace("item=", "--item")
        message = message.replace("step='best'", "--step best").replace("root=", "--root ")
        message = message.replace("max_bandwidth=", "--max-bandwidth ")
        raise type(error)(message.replace("select=", "--select ")) from error


def _add_metadata(source: str, step: int | None, *, as_json: bool) -> int:
    from ..integrations.formats.orbax.export import add_orbax_metadata

    places = [str(place) for place in add_orbax_metadata(checkpoints_at(source), step=step)]
    if as_json:
        print_json({"checkpoints": places})
        return DONE
    for place in places:
        say(f"{place}: orbax can read it now, too")
    return DONE


def _print(conversions: Sequence[Conversion], *, as_json: bool) -> None:
    if as_json:
        found = [
            {
                "source": done.source,
                "path": done.path,
                "format": done.format,
                "step": done.step,
                "leaves": done.leaves,
                "bytes": done.bytes,
                "left_out": list(done.left_out),
            }
            for done in conversions
        ]
        print_json({"checkpoints": found})
        return
    for done in conversions:
        leaves = count(done.leaves, "leaf", "leaves")
        say(f"{done.source} -> {done.path}: {leaves}, {format_size(done.bytes)} ({done.format})")
        for line in done.left_out:
            say(f"  left out: {line}")
