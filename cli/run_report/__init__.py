"""``holdfast report`` writes the history of runs to a single self-contained HTML page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from ...engine import __version__
from ...engine.clock import format_size
from ...engine.errors import DONE, OptionError
from ...engine.storage import as_location
from .. import arguments
from ..progress import progress_of
from ..report import count, print_json
from ..streams import configure_logging, say
from .facts import Reading, advice, choices, find_runs, read_run
from .page import GENERATOR, draw_page


@click.command()
@click.argument(
    "directories",
    metavar="DIR...",
    nargs=-1,
    required=True,
    help="Runs, folders of runs, or checkpoints: paths or URLs.",
)
@click.option("--output", "-o", metavar="FILE", default="report.html", help="The file; an earlier report is replaced.")
@click.option(
    "--no-stats", "no_statistics", is_flag=True, help="Read no values: quick, without statistics and norms of leaves."
)
@click.option(
    "--norm-steps",
    metavar="N",
    type=click.IntRange(min=1),
    help="Compare the norms of this many kept steps; each is read whole.",
)
@arguments.as_json
def report(directories: Sequence[str], output: str, no_statistics: bool, norm_steps: int | None, as_json: bool) -> int:
    """Write a report on runs as one HTML page, which opens without a network connection.

    The page shows the timeline (starts, saves, preemptions, crashes, hangs, fallbacks), metrics with marks for
    kept checkpoints, sizes, statistics of every leaf, changes in norms, the tree, and why each step is kept. Without
    --norm-steps, the report compares the norms of 8 steps, or of fewer if the earlier steps exceed 8 GiB in total.
    """
    configure_logging("error")
    target = Path(output)
    if target.is_dir():
        raise OptionError(f"--output={target}: this is a directory; name a file, such as {target / 'report.html'}")
    if not target.parent.is_dir():
        raise OptionError(f"--output={target}: there is no directory {target.parent}")
    if target.exists():
        with target.open("rb") as file:
            if GENERATOR.encode() not in file.read(1000):
                raise OptionError(f"--output={target}: this file is not a holdfast report; choose another name")
    locations, more = find_runs(directories)
    with progress_of("read", shown=not as_json) as progress:
        runs = [read_run(location, Reading(progress, not no_statistics, norm_steps)) for location in locations]
    page = draw_page(runs, now=time.time(), version=__version__, left_out=more)
    content = page.encode("utf-8", "replace")  # file names may contain lone surrogates
    as_location(target).write_bytes(content)
    if as_json:
        intervals = {run.path: [*map(asdict, choices(run.experience))] for run in runs}
        paths = [*map(str, locations)]
        print_json({"file": str(target), "runs": paths, "bytes": len(content), "intervals": intervals})
        return DONE
    say(f"{target}: {count(len(runs), 'run')}, {format_size(len(content))}")
    for run in runs:
        if (line := advice(run.experience)) is not None:
            say(f"{run.name}: {line}")
    return DONE
