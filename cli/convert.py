"""``holdfast cp``, ``import`` and ``export`` copy checkpoints and convert them between libraries."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import click

from ..engine.clock import format_size
from ..engine.errors import DONE, CheckpointExistsError, OptionError, TreeMismatchError, UnsupportedLeafError
from ..engine.manager import copy_checkpoint
from ..engine.sources import is_ours
from ..integrations.formats.convert import Conversion, ExportFormat, check_suffix, export_checkpoint, import_checkpoint
from . import arguments
from .arguments import checkpoints_at
from .progress import progress_of
from .report import count, print_json
from .streams import configure_logging, say

_OPTIONS = {  # maps function arguments in error messages to the corresponding command options
    "overwrite=True": "--overwrite",
    "item=": "--item",
    "step='best'": "--step best",
    "root=": "--root ",
    "to=": "--to ",
    "max_bandwidth=": "--max-bandwidth ",
    "select=": "--select ",
}


@click.command()
@arguments.source
@click.argument("destination", metavar="DST", help="Where the copy goes: a path or URL.")
@click.option("--overwrite", is_flag=True, help="Replace other checkpoints at DST.")
@click.option("--max-bandwidth", metavar="RATE", help="The maximum rate, such as '50 MB/s'.")
@arguments.as_json
def cp(source: str, destination: str, overwrite: bool, max_bandwidth: str | None, as_json: bool) -> int:
    """Copy a checkpoint, or a run with all its steps, between disks and object stores.

    Every byte is verified during the copy. Run the same command again to continue an interrupted copy.
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
            say(f"holdfast: {destination}: what was copied is kept; the same command continues it", file=sys.stderr)
            raise
    if as_json:
        print_json({"checkpoints": [dataclasses.asdict(copy) for copy in copies]})
        return DONE
    for copy in copies:
        there = "" if copy.sent == copy.bytes else f", {format_size(copy.bytes - copy.sent)} of it already there"
        say(f"{copy.source} -> {copy.path}: {format_size(copy.bytes)}{there}")
    return DONE


@click.command("import")
@click.argument("source", metavar="SRC", help="The checkpoint of another library: a file or a directory.")
@click.argument("destination", metavar="DST", help="Where the checkpoints go.")
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint.")
@arguments.as_json
def import_(source: str, destination: str, overwrite: bool, as_json: bool) -> int:
    """Import checkpoints of another library.

    Reads Orbax (one checkpoint or a whole run), safetensors (a file, or a folder with an index), torch.save and
    Lightning files, torch.distributed.checkpoint folders, Flax msgpack files, TensorFlow checkpoints (a prefix such as
    dir/ckpt-5, or their directory), Keras .keras and .h5 files, .npz files, and RLlib directories. Code in
    checkpoints is never executed.
    """
    configure_logging("error")  # hide warnings about omitted leaves, because the command lists these leaves
    location = checkpoints_at(source)
    if is_ours(location):
        raise OptionError(f"{source} is holdfast's own; holdfast cp copies it")
    with _command_options_in_errors(), progress_of("import", shown=not as_json) as progress:
        conversions = import_checkpoint(location, destination, overwrite=overwrite, progress=progress)
    _print(conversions, as_json=as_json)
    return DONE


def _step_or_best(text: str) -> int | str:
    if text == "best":
        return text
    if text.isdecimal():
        return int(text)
    raise click.BadParameter(f"{text!r} is neither a step number nor best")


@click.command()
@arguments.source
@click.argument(
    "destination", metavar="[DST]", required=False, help="The file (orbax, dcp: directory); none with --in-place."
)
@click.option(
    "--to",
    type=click.Choice(get_args(ExportFormat)),
    help="The format; by default torch for .pt, .pth and .ckpt, safetensors for .safetensors.",
)
@click.option("--in-place", is_flag=True, help="Only add the small files with which orbax reads it in place.")
@arguments.step_of("A number, or best; by default the newest.", value_type=_step_or_best)
@click.option("--item", help="The item, if there are several.")
@arguments.select
@click.option("--root", help="Only what is in this container, such as model, with names that begin there.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@arguments.as_json
def export(
    source: str,
    destination: str | None,
    to: ExportFormat | None,
    in_place: bool,
    step: Any,
    item: str | None,
    select: Sequence[str],
    root: str | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Export a checkpoint to the format of another library.

    An export to Orbax includes all steps unless a step is given.
    """
    configure_logging("error")  # hide warnings about omitted leaves, because the command lists these leaves
    if in_place:
        if to != "orbax" or destination is not None or item is not None or select or root or overwrite:
            raise OptionError("--in-place takes --to orbax and --step, but neither DST nor other options")
        if step == "best":
            raise OptionError("--in-place takes the number of a step, not --step best")
        from ..integrations.formats.orbax.export import add_orbax_metadata

        paths = [*map(str, add_orbax_metadata(checkpoints_at(source), step=step))]
        if as_json:
            print_json({"checkpoints": paths})
        else:
            say("".join(f"{path}: orbax can now read it, too\n" for path in paths), end="")
        return DONE
    if destination is None:
        raise OptionError(
            "DST is missing: give the file or directory to write" + (", or use --in-place" if to == "orbax" else "")
        )
    location, to = checkpoints_at(source), to or check_suffix(destination)
    chosen: dict[str, Any] = {"step": step, "item": item, "select": select or None, "root": root}
    with _command_options_in_errors(), progress_of("export", shown=not as_json) as progress:
        conversions = export_checkpoint(location, destination, to, **chosen, overwrite=overwrite, progress=progress)
    _print(conversions, as_json=as_json)
    return DONE


@contextlib.contextmanager
def _command_options_in_errors() -> Iterator[None]:
    """Replace function arguments in error messages with the corresponding command options."""
    try:
        yield
    except (CheckpointExistsError, OptionError, TreeMismatchError, UnsupportedLeafError) as error:
        message = str(error)
        for argument, option in _OPTIONS.items():
            message = message.replace(argument, option)
        raise type(error)(message) from error


def _print(conversions: Sequence[Conversion], *, as_json: bool) -> None:
    if as_json:
        print_json({"checkpoints": [dataclasses.asdict(conversion) for conversion in conversions]})
        return
    for conversion in conversions:
        size = f"{count(conversion.leaves, 'leaf', 'leaves')}, {format_size(conversion.bytes)}"
        say(f"{conversion.source} -> {conversion.path}: {size} ({conversion.format})")
        for line in conversion.left_out:
            say(f"  left out: {line}")
