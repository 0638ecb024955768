"""``holdfast diff``: compares two checkpoints leaf by leaf."""

from __future__ import annotations

import sys
from dataclasses import asdict

from ..engine.errors import HoldfastError
from ..engine.exit_status import BAD_USAGE, DONE, FAILED
from ..engine.sources import compare_checkpoints, open_checkpoint
from .log import configure_logging
from .places import checkpoints_at
from .progress import progress_of
from .report import count, print_json, print_table
from .streams import say


def diff_checkpoints(
    one: str, other: str, steps: tuple[int | None, int | None], *, rtol: float, atol: float, as_json: bool
) -> int:
    """Print the leaves in which two checkpoints differ.

    Args:
        one: The first checkpoint, or the directory of a run: a path or URL.
        other: The second one.
        steps: The step of each; None for the newest.
        rtol: The relative tolerance.
        atol: The absolute tolerance.
        as_json: Print JSON instead of a table.

    Returns:
        The exit status, as of ``diff``: 0 if they are the same, 1 if they differ, 2 if they cannot be compared.
    """
    configure_logging("warning")
    try:
        first, second = (
            open_checkpoint(checkpoints_at(place), step) for place, step in zip((one, other), steps, strict=True)
        )
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
