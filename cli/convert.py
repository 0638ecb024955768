"""``holdfast import`` and ``holdfast export``: between holdfast's checkpoints and those of other libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast, get_args

from ..engine.errors import CheckpointExistsError, OptionError
from ..engine.interop.conversion import Conversion, ExportFormat, export_checkpoint, import_checkpoint
from .log import configure_logging
from .places import checkpoints_at
from .report import count, print_json, size
from .status import DONE


def import_checkpoints(source: str, destination: str, *, overwrite: bool, as_json: bool) -> int:
    """Converts what another library wrote, and prints what was done.

    Args:
        source: A file or directory.
        destination: Where the checkpoints go.
        overwrite: Replace a checkpoint that is there.
        as_json: Print JSON instead of text.

    Returns:
        The exit status.

    Raises:
        CheckpointExistsError: There is something at the destination.
    """
    configure_logging("error")  # what is left out is printed below
    with _speaking_to_people():
        conversions = import_checkpoint(source, destination, overwrite=overwrite)
    _print(conversions, as_json=as_json)
    return DONE


def export_checkpoints(
    source: str,
    destination: str | None,
    to: str,
    *,
    in_place: bool,
    step: int | None,
    item: str | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Writes a checkpoint in the format of another library, and prints what was done.

    Args:
        source: A run, a directory of checkpoints, or one checkpoint.
        destination: A file, or a directory; None with ``in_place``.
        to: The format.
        in_place: Whether to make the checkpoint readable for Orbax where it is.
        step: Which step.
        item: Which item.
        overwrite: Replace a file that is there.
        as_json: Print JSON instead of text.

    Returns:
        The exit status.

    Raises:
        OptionError: Arguments do not go together.
    """
    configure_logging("warning")
    formats = get_args(ExportFormat)
    if to not in formats:
        raise OptionError(f"--to {to}: expected one of {', '.join(formats)}")
    if in_place:
        if to != "orbax" or destination is not None or item is not None or overwrite:
            raise OptionError("--in-place takes --to orbax and --step, and neither DST nor another option")
        return _add_metadata(source, step, as_json=as_json)
    if destination is None:
        raise OptionError("DST is missing: say where to write to" + (", or use --in-place" if to == "orbax" else ""))
    place = checkpoints_at(source)
    chosen = cast("ExportFormat", to)
    with _speaking_to_people():
        conversions = export_checkpoint(place, destination, chosen, step=step, item=item, overwrite=overwrite)
    _print(conversions, as_json=as_json)
    return DONE


@contextlib.contextmanager
def _speaking_to_people() -> Iterator[None]:
    """Names the option of the command where an error names the argument of the function."""
    try:
        yield
    except (CheckpointExistsError, OptionError) as error:
        told = str(error).replace("overwrite=True", "--overwrite").replace("item=", "--item")
        raise type(error)(told) from error


def _add_metadata(source: str, step: int | None, *, as_json: bool) -> int:
    from ..engine.interop.orbax_export import add_orbax_metadata

    places = [str(place) for place in add_orbax_metadata(checkpoints_at(source), step=step)]
    if as_json:
        print_json({"checkpoints": places})
        return DONE
    for place in places:
        print(f"{place}: orbax reads it now, too")
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
        print(f"{done.source} -> {done.path}: {leaves}, {size(done.bytes)} ({done.format})")
        for line in done.left_out:
            print(f"  left out: {line}")
