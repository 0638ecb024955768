"""``holdfast diff``: compares two checkpoints leaf by leaf."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from ..engine.errors import HoldfastError
from ..engine.exit_status import BAD_USAGE, DONE, FAILED
from ..engine.sources import compare_checkpoints, open_checkpoint
from .arguments import AsJson
from .log import configure_logging
from .places import checkpoints_at
from .progress import progress_of
from .report import count, print_json, print_table
from .streams import say


def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, or the directory of a run: a path or URL.")],
    other: Annotated[str, typer.Argument(metavar="B", help="What it is compared with.")],
    step: Annotated[int | None, typer.Option("--step", help="The step of A; by default the newest.", min=0)] = None,
    other_step: Annotated[
        int | None, typer.Option("--other-step", help="The step of B; by default that of A, or the newest.", min=0)
    ] = None,
    rtol: Annotated[
        float, typer.Option("--rtol", help="Relative tolerance; by default bits are compared.", min=0)
    ] = 0.0,
    atol: Annotated[float, typer.Option("--atol", help="Absolute tolerance.", min=0)] = 0.0,
    as_json: AsJson = False,
) -> int:
    """Compare two checkpoints leaf by leaf: structure, dtypes, shapes and values.

    Exit status: 0 the same, 1 different, 2 they cannot be compared. With a tolerance, NaN equals NaN.
    """
    configure_logging("warning")
    try:
        first = open_checkpoint(checkpoints_at(one), step)
        second = open_checkpoint(checkpoints_at(other), step if other_step is None else other_step)
        with progress_of("compare", shown=not as_json) as progress:
            found = list(compare_checkpoints(first, second, rtol=rtol, atol=atol, progress=progress))
    except HoldfastError as error:  # 1 would say that they differ
        say(f"holdfast: {error}", file=sys.stderr)
        return BAD_USAGE
    places = [str(checkpoint.location) for checkpoint in (first, second)]
    if as_json:
        print_json({"checkpoints": places, "same": not found, "differences": [asdict(item) for item in found]})
        return FAILED if found else DONE
    if not found:
        within = "" if not rtol and not atol else f" within the tolerances (rtol {rtol:g}, atol {atol:g})"
        say(f"{places[0]} and {places[1]} are the same{within or ', bit for bit'}")
        return DONE
    print_table(["LEAF", "DIFFERS IN", "HOW"], [[item.name, item.kind, item.detail] for item in found])
    say(f"\n{count(len(found), 'leaf differs', 'leaves differ')} between {places[0]} and {places[1]}")
    return FAILED
