"""``holdfast report``: the life of runs on one page, which opens from a disk without a network."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from ...engine.clock import format_size
from ...engine.errors import OptionError
from ...engine.exit_status import DONE
from ..log import configure_logging
from ..progress import progress_of
from ..report import count, print_json
from ..streams import say
from .facts import Reading, find_runs, read_run
from .page import GENERATOR, draw_page


def write_report(
    places: Sequence[str],
    output: str,
    *,
    statistics: bool = True,
    norm_steps: int | None = None,
    as_json: bool = False,
) -> int:
    """Write the report of some runs.

    Args:
        places: Runs, folders of runs, or checkpoints: paths or URLs.
        output: The file; a report that is there is replaced.
        statistics: Read the values of the newest step, and the norms of some earlier ones.
        norm_steps: Of how many steps; None for 8, as far as the earlier ones have 8 GiB at most.
        as_json: Print JSON, which names the file.

    Returns:
        The exit status.

    Raises:
        OptionError: There is a file that is no report.
        CheckpointNotFoundError: There is nothing at one of the places.
    """
    configure_logging("error")
    target = Path(output)
    _check(target)
    locations, more = find_runs(places)
    with progress_of("read", shown=not as_json) as progress:
        runs = [read_run(location, Reading(progress, statistics, norm_steps)) for location in locations]
    page = draw_page(runs, now=time.time(), version=version("holdfast"), left_out=more)
    content = page.encode("utf-8", "replace")  # names of files may hold halves of surrogate pairs
    _replace(target, content)
    if as_json:
        print_json({"file": str(target), "runs": [str(location) for location in locations], "bytes": len(content)})
        return DONE
    say(f"{target}: {count(len(runs), 'run', 'runs')}, {format_size(len(content))}")
    return DONE


def _check(target: Path) -> None:
    """Refuse to replace anything that is no report."""
    if target.is_dir():
        raise OptionError(f"--output={target}: this is a directory; name a file, such as {target / 'report.html'}")
    if not target.parent.is_dir():
        raise OptionError(f"--output={target}: there is no directory {target.parent}")
    if target.exists():
        with target.open("rb") as file:
            if GENERATOR.encode() not in file.read(1000):
                raise OptionError(f"--output={target}: this file is no report of holdfast; choose another name")


def _replace(target: Path, content: bytes) -> None:
    """Write a file so that a crash leaves the earlier one."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
