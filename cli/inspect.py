"""``holdfast show``, ``diff`` and ``verify`` inspect checkpoints without importing a framework."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..engine.clock import format_size
from ..engine.errors import (
    BAD_USAGE,
    DONE,
    FAILED,
    CheckpointNotFoundError,
    HoldfastError,
    OptionError,
    TreeMismatchError,
)
from ..engine.format import RECORD
from ..engine.inspection import LeafSummary, describe
from ..engine.inspection import verify as verify_checkpoints
from ..engine.pytree import PathFilter
from ..engine.sources import NativeCheckpoint, find_checkpoint, open_at, open_checkpoint
from ..engine.steps import shared_bytes
from ..engine.storage import Location
from . import arguments
from .arguments import checkpoints_at, where_else
from .progress import progress_of
from .report import age, count, print_json, print_table, print_tree, step_names
from .streams import configure_logging, one_line, say

if TYPE_CHECKING:
    from ..engine.sources import LeafStatistics


@contextlib.contextmanager
def _saying_where_else(location: Location) -> Iterator[None]:
    """Append the locations of nearby checkpoints to an error about a directory that has none."""
    try:
        yield
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"{error}{where_else(location)}") from error


@click.command()
@arguments.directory
@arguments.step
@arguments.select
@click.option(
    "--stats",
    "statistics",
    is_flag=True,
    help="Read the values: min, max, mean, norm, NaN and Inf of each leaf.",
)
@click.option("--tree", "as_tree", is_flag=True, help="Show containers as a tree, with their sizes.")
@arguments.as_json
def show(
    directory: str, step: int | None, select: Sequence[str], statistics: bool, as_tree: bool, as_json: bool
) -> int:
    """List every leaf of a checkpoint, by default of the newest."""
    configure_logging("warning")
    checkpoints = checkpoints_at(directory)
    with _saying_where_else(checkpoints):
        location = find_checkpoint(checkpoints, step)
    checkpoint = open_at(location)
    chosen = PathFilter(select or None)
    leaves = describe(location)
    shared = shared_bytes(location)
    try:
        chosen.check(leaf.path.split("/") for leaf in leaves)
    except TreeMismatchError as error:
        raise OptionError(str(error).replace("select=", "--select ")) from error
    leaves = [leaf for leaf in leaves if chosen.chooses(leaf.path.split("/"))]
    numbers = {}
    if statistics:
        from ..engine.sources import leaf_statistics  # imported lazily, because only --stats needs it

        with progress_of("read", shown=not as_json) as progress:
            numbers = {(leaf.item, leaf.path): leaf for leaf in leaf_statistics(checkpoint, select or None, progress)}
    if as_json:
        listed = [asdict(leaf) for leaf in leaves]
        if statistics:
            listed = [{**leaf, "statistics": _numbers(numbers.get((leaf["item"], leaf["path"])))} for leaf in listed]
        facts = {"path": str(location), "step": checkpoint.step, "time": checkpoint.time, "shared_bytes": shared}
        print_json({**facts, "leaves": listed})
        return DONE
    total = format_size(sum(leaf.bytes for leaf in leaves))
    saved = "" if checkpoint.time is None else f", saved {age(time.time() - checkpoint.time)} ago"
    wrote = "" if isinstance(checkpoint, NativeCheckpoint) else f", written by {checkpoint.format}"
    sizes = f" ({format_size(checkpoint.nbytes - shared)} on disk are its own, {format_size(shared)} shared)"
    summary = f"{location}: {count(len(leaves), 'leaf', 'leaves')}, {total}{sizes if shared else ''}{saved}{wrote}"
    if as_tree:
        print_tree(summary, [(f"{leaf.item}/{leaf.path}", leaf.bytes, _about(leaf, numbers)) for leaf in leaves])
        return DONE
    columns = ["ITEM", "LEAF", "SHAPE", "TYPE", "SHARDING", "SIZE", "VALUE"]
    rows = [
        [
            leaf.item,
            one_line(leaf.path),
            str(list(leaf.shape)) if leaf.dtype else "",
            "key" if leaf.kind == "key" else leaf.dtype or leaf.kind,
            leaf.sharding,
            format_size(leaf.bytes),
            leaf.value or "",
        ]
        for leaf in leaves
    ]
    if len({leaf.item for leaf in leaves}) < 2:
        columns, rows = columns[1:], [row[1:] for row in rows]
    if not any(leaf.value for leaf in leaves):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    if statistics:
        columns += ["MIN", "MAX", "MEAN", "NORM", "NAN", "INF"]
        rows = [[*row, *_columns(numbers.get((leaf.item, leaf.path)))] for row, leaf in zip(rows, leaves, strict=True)]
    print_table(columns, rows, right=["SIZE", "MIN", "MAX", "MEAN", "NORM", "NAN", "INF"])
    say(f"\n{summary}")
    return DONE


def _numbers(leaf: LeafStatistics | None) -> dict[str, Any] | None:
    return None if leaf is None else {key: value for key, value in asdict(leaf).items() if key not in ("item", "path")}


def _columns(leaf: LeafStatistics | None) -> list[str]:
    if leaf is None:
        return [""] * 6
    values = (leaf.minimum, leaf.maximum, leaf.mean, leaf.norm)
    return [*("" if value is None else f"{value:.5g}" for value in values), str(leaf.nan), str(leaf.inf)]


def _about(leaf: LeafSummary, numbers: Mapping[tuple[str, str], LeafStatistics]) -> str:
    """Describe a leaf on one line, with its type, shape, and value or statistics."""
    leaf_type = f"{leaf.dtype}{list(leaf.shape)}" if leaf.dtype else leaf.kind
    statistics = numbers.get((leaf.item, leaf.path))
    if statistics is None:
        return leaf_type if leaf.value is None else f"{leaf_type} {leaf.value}"
    texts = zip(("min", "max", "mean", "norm", "nan", "inf"), _columns(statistics), strict=True)
    return ", ".join([leaf_type, *(f"{name} {text}" for name, text in texts if text != "")])


@click.command()
@click.argument("left", metavar="A", help="A checkpoint, or the directory of a run: a path or URL.")
@click.argument("right", metavar="B", help="What to compare it with.")
@arguments.step_of("The step of A; by default the newest.", value_type=str)
@arguments.step_of("The step of B; by default the step of A, or the newest.", "other_step")
@click.option(
    "--rtol", type=click.FloatRange(min=0), default=0.0, help="Relative tolerance; by default bits are compared."
)
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, help="Absolute tolerance.")
@arguments.as_json
def diff(
    left: str, right: str, step: str | None, other_step: int | None, rtol: float, atol: float, as_json: bool
) -> int:
    """Compare two checkpoints leaf by leaf: structure, dtypes, shapes and values.

    Give the steps after both locations, as in `diff A B 1 2`, or each step after its location, as in `diff A 1 B 2`.

    Exit status: 0 if equal, 1 if different, 2 if the checkpoints cannot be compared. With a tolerance, NaN equals NaN.
    """
    configure_logging("warning")
    from ..engine.sources import compare_checkpoints

    if step is not None and not step.isdecimal():
        right, step = step, right
    number = click.IntRange(min=0)(step)
    try:
        first = open_checkpoint(checkpoints_at(left), number)
        second = open_checkpoint(checkpoints_at(right), number if other_step is None else other_step)
        with progress_of("compare", shown=not as_json) as progress:
            differences = list(compare_checkpoints(first, second, rtol=rtol, atol=atol, progress=progress))
    except HoldfastError as error:  # don't return 1, which means that the checkpoints differ
        say(f"holdfast: {error}", file=sys.stderr)
        return BAD_USAGE
    paths = [str(first.location), str(second.location)]
    if as_json:
        listed = [asdict(leaf) for leaf in differences]
        print_json({"checkpoints": paths, "same": not differences, "differences": listed})
    elif differences:
        print_table(["LEAF", "DIFFERS IN", "HOW"], [[leaf.name, leaf.kind, leaf.detail] for leaf in differences])
        say(f"\n{count(len(differences), 'leaf differs', 'leaves differ')} between {' and '.join(paths)}")
    else:
        within = f" within the tolerances (rtol {rtol:g}, atol {atol:g})" if rtol or atol else ", bit for bit"
        say(f"{' and '.join(paths)} are the same{within}")
    return FAILED if differences else DONE


@click.command()
@arguments.directory
@arguments.step
@arguments.as_json
def verify(directory: str, step: int | None, as_json: bool) -> int:
    """Check every byte of checkpoints, by default of all steps.

    The exit status is 1 if anything is damaged.
    """
    configure_logging("error")
    location = checkpoints_at(directory)
    with _saying_where_else(location), progress_of("verify", shown=not as_json) as progress:
        result = verify_checkpoints(location, step, progress=progress)
    if as_json:
        checkpoints = [
            {
                "step": item.step,
                "path": str(item.path),
                "bytes": item.bytes,
                "ok": not item.problems,
                "problems": [problem._asdict() for problem in item.problems],
            }
            for item in result.checkpoints
        ]
        facts = {"directory": str(location), "ok": result.ok}
        print_json({**facts, "checkpoints": checkpoints, "strays": list(result.strays)})
        return DONE if result.ok else FAILED
    names = step_names([(item.step, item.path) for item in result.checkpoints], "step ", result.checkpoints[0].path)
    for name, item in zip(names, result.checkpoints, strict=True):
        if not item.problems:
            say(f"{name}: whole, {format_size(item.bytes)} read and checked")
            continue
        say(f"{name}: DAMAGED, {count(len(item.problems), 'problem')}")
        for problem in item.problems:
            leaf = f" ({problem.leaf})" if problem.leaf else ""
            say(f"  {problem.file}{leaf}: {problem.what}")
    for path in result.strays:
        say(f"{path}: not a checkpoint, and left alone: it has no {RECORD}; `holdfast rm` deletes it")
    states = Counter("damaged" if item.problems else "whole" for item in result.checkpoints)
    say(", ".join(f"{number} {state}" for state, number in sorted(states.items(), reverse=True)))
    return DONE if result.ok else FAILED
