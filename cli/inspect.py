"""``holdfast ls``, ``watch``, ``show``, ``diff`` and ``verify`` inspect checkpoints without any framework."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import click

from ..engine.clock import format_size, seconds
from ..engine.errors import CheckpointNotFoundError, HoldfastError, OptionError, TreeMismatchError, shortened_steps
from ..engine.exit_status import BAD_USAGE, DONE, FAILED
from ..engine.inspection import CheckpointSummary, LeafSummary, describe, list_checkpoints, shared_bytes
from ..engine.inspection import verify as verify_checkpoints
from ..engine.manager import finite
from ..engine.pytree import PathFilter
from ..engine.sources import (
    CheckpointSource,
    LeafStatistics,
    NativeCheckpoint,
    compare_checkpoints,
    find_checkpoint,
    is_ours,
    leaf_statistics,
    open_at,
    open_checkpoint,
)
from ..engine.storage import Location
from . import arguments
from .places import INSIDE_A_RUN, checkpoints_at, is_one_checkpoint, runs_below, where_else
from .progress import progress_of
from .report import age, count, metrics_text, print_json, print_table, print_tree
from .streams import configure_logging, one_line, say


@click.command()
@arguments.directory
@arguments.as_json
def ls(directory: str, as_json: bool) -> int:
    """List the checkpoints of a run, or the runs in a folder.

    For each checkpoint: its age, size and metrics, why it is kept, and whether it is damaged.
    """
    configure_logging("warning")
    return list_at(checkpoints_at(directory), as_json=as_json)


def list_at(location: Location, *, as_json: bool = False) -> int:
    """Print the checkpoints of a location, or its runs."""
    found = [shown(item) for item in _checkpoints(location)]
    runs = [] if found else [_run(location / name) for name in runs_below(location)]
    if as_json:
        print_json({"directory": str(location), "checkpoints": found, **({"runs": runs} if runs else {})})
        return DONE
    if runs:
        _print_runs(runs)
        return DONE
    if not found:
        say(f"no checkpoints in {location}{where_else(location)}")
        return DONE
    now = time.time()
    shares = any(item["shared_bytes"] for item in found)
    names = _names([(item["step"], item["path"]) for item in found])
    rows = [
        [
            name,
            "-" if item["time"] is None else age(now - item["time"]),
            *_sizes(item, shares=shares),
            metrics_text(item["metrics"]),
            ", ".join(item["kept"]),
            "ok" if item["damage"] is None else f"damaged: {item['damage']}",
        ]
        for name, item in zip(names, found, strict=True)
    ]
    sizes = ["SIZE", "OWN"] if shares else ["SIZE"]
    print_table(["STEP", "AGE", *sizes, "METRICS", "KEPT BECAUSE", "STATE"], rows, right=["STEP", "AGE", *sizes])
    return DONE


def _sizes(item: dict[str, Any], *, shares: bool) -> list[str]:
    """Return the size of a step and, where steps share files, the size of its own files."""
    if item["damage"] is not None and item["time"] is None:
        return ["-"] * (1 + shares)
    own = [format_size(item["bytes"] - item["shared_bytes"])] if shares else []
    return [format_size(item["bytes"]), *own]


def _run(location: Location) -> dict[str, Any]:
    """Return a run as JSON: its checkpoints in numbers, and the one that was saved last."""
    inside = location / INSIDE_A_RUN
    found = _checkpoints(inside if is_ours(inside) and not is_one_checkpoint(location) else location)
    checkpoints = [shown(item) for item in found]
    return {
        "name": location.name,
        "checkpoints": len(checkpoints),
        "bytes": sum(item.bytes for item in found),
        "disk_bytes": sum(item.added_bytes for item in found),
        "damaged": [item["step"] for item in checkpoints if item["damage"] is not None],
        "newest": max(checkpoints, key=lambda item: item["time"] or 0.0, default=None),
    }


def _print_runs(runs: list[dict[str, Any]]) -> None:
    now = time.time()
    shares = any(run["disk_bytes"] != run["bytes"] for run in runs)
    rows = []
    for run in runs:
        newest = run["newest"] or {"step": "-", "time": None, "metrics": None}
        rows.append(
            [
                run["name"],
                str(run["checkpoints"]),
                str(newest["step"]),
                "-" if newest["time"] is None else age(now - newest["time"]),
                format_size(run["bytes"]),
                *([format_size(run["disk_bytes"])] if shares else []),
                metrics_text(newest["metrics"]),
                f"damaged: {shortened_steps(run['damaged'])}" if run["damaged"] else "ok",
            ]
        )
    sizes = ["SIZE", "ON DISK"] if shares else ["SIZE"]
    columns = ["RUN", "CHECKPOINTS", "NEWEST", "AGE", *sizes, "METRICS", "STATE"]
    print_table(columns, rows, right=["CHECKPOINTS", "NEWEST", "AGE", *sizes])


@contextlib.contextmanager
def _saying_where_else(location: Location) -> Iterator[None]:
    """Add the places of checkpoints nearby to an error about a directory without any."""
    try:
        yield
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"{error}{where_else(location)}") from error


def _names(checkpoints: list[tuple[int | None, str]], step: str = "", other: str = "-") -> list[str]:
    """Return the names of checkpoints: their steps, unless they have several prefixes."""
    names = [path.rpartition("/")[2] for _, path in checkpoints]
    if len({name.rstrip("0123456789") for name in names}) > 1:
        return names
    return [other if number is None else f"{step}{number}" for number, _ in checkpoints]


def shown(item: CheckpointSummary) -> dict[str, Any]:
    """Return a checkpoint as JSON."""
    found = asdict(item)
    del found["added_bytes"]  # depends on the other steps of the list
    return {**found, "step": None if item.step < 0 else item.step}


def _checkpoints(location: Location) -> list[CheckpointSummary]:
    return [describe_one(location)] if is_one_checkpoint(location) else list_checkpoints(location)


def describe_one(location: Location) -> CheckpointSummary:
    """Describe one checkpoint, as a step of its directory if it is one; otherwise its step may be -1 (unknown)."""
    for item in list_checkpoints(location.parent):
        if item.path == str(location):
            return replace(item, added_bytes=item.bytes)
    checkpoint = open_at(location)
    return CheckpointSummary(
        step=-1 if checkpoint.step is None else checkpoint.step,
        path=str(location),
        time=checkpoint.time,
        bytes=checkpoint.nbytes,
        shared_bytes=_shared_bytes(checkpoint),
        added_bytes=checkpoint.nbytes,
        metrics=checkpoint.metrics,
        reason=checkpoint.reason,
    )


def _shared_bytes(checkpoint: CheckpointSource) -> int:
    return shared_bytes(checkpoint.location, checkpoint.record) if isinstance(checkpoint, NativeCheckpoint) else 0


@click.command()
@arguments.run_directory
@click.option("--interval", default="2s", help="How often to look, such as 10s.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each change, for programs.")
def watch(directory: str, interval: str, as_json: bool) -> int:
    """Follow a run: print its checkpoints as they come and go, until Ctrl-C."""
    pause = max(0.1, seconds(interval, name="--interval"))
    location = checkpoints_at(directory)
    before: dict[str, CheckpointSummary] = {}
    if not as_json:
        before = _listed(location)
        list_at(location)
    try:
        while True:
            now = _listed(location)
            for what, item, text in _changes(before, now):
                line = f"{time.strftime('%H:%M:%S')} {what} {text}"
                say(json.dumps(finite({"change": what, **shown(item)})) if as_json else line, flush=True)
            before = now
            time.sleep(pause)
    except KeyboardInterrupt:
        return DONE


def _listed(location: Location) -> dict[str, CheckpointSummary]:
    return {item.path: item for item in list_checkpoints(location)} if location.exists() else {}


def _changes(
    before: dict[str, CheckpointSummary], now: dict[str, CheckpointSummary]
) -> Iterator[tuple[str, CheckpointSummary, str]]:
    """Generate each difference between two listings: the change, its checkpoint, and the rest of a line."""
    for path in sorted(before.keys() - now.keys(), key=lambda path: before[path].step):
        yield "deleted", before[path], f"{before[path].step}"
    for path, item in sorted(now.items(), key=lambda pair: pair[1].step):
        if item == before.get(path):
            continue
        if item.damage is not None:
            yield "damaged", item, f"{item.step}: {item.damage}"
        elif path not in before or before[path].time != item.time:
            facts = (format_size(item.bytes), item.reason, metrics_text(item.metrics))
            yield "saved", item, f"{item.step}: {', '.join(fact for fact in facts if fact)}"
        elif before[path].metrics != item.metrics:
            yield "metrics", item, f"of {item.step}: {metrics_text(item.metrics)}"


@click.command()
@arguments.directory
@arguments.step
@arguments.select
@click.option(
    "--stats",
    "statistics",
    is_flag=True,
    help="Read the values: least, greatest, mean, norm, NaN and Inf of each leaf.",
)
@click.option("--tree", "as_tree", is_flag=True, help="Show containers as a tree, with their sizes.")
@arguments.as_json
def show(
    directory: str, step: int | None, select: Sequence[str], statistics: bool, as_tree: bool, as_json: bool
) -> int:
    """List every leaf of a checkpoint, by default of the newest."""
    configure_logging("warning")
    place = checkpoints_at(directory)
    with _saying_where_else(place):
        location = find_checkpoint(place, step)
    checkpoint = open_at(location)
    chosen = PathFilter(select or None)
    leaves = describe(location)
    shared = _shared_bytes(checkpoint)
    try:
        chosen.check(leaf.path.split("/") for leaf in leaves)
    except TreeMismatchError as error:
        raise OptionError(str(error).replace("select=", "--select ")) from error
    leaves = [leaf for leaf in leaves if chosen.chooses(leaf.path.split("/"))]
    numbers = {}
    if statistics:
        with progress_of("read", shown=not as_json) as progress:
            numbers = {(one.item, one.path): one for one in leaf_statistics(checkpoint, select or None, progress)}
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
    own = (
        f" ({format_size(checkpoint.nbytes - shared)} on disk are its own, {format_size(shared)} shared)"
        if shared
        else ""
    )
    summary = f"{location}: {count(len(leaves), 'leaf', 'leaves')}, {total}{own}{saved}{wrote}"
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


def _numbers(one: LeafStatistics | None) -> dict[str, Any] | None:
    """Return the statistics of a leaf as JSON."""
    return None if one is None else {key: value for key, value in asdict(one).items() if key not in ("item", "path")}


def _columns(one: LeafStatistics | None) -> list[str]:
    if one is None:
        return [""] * 6
    values = (one.minimum, one.maximum, one.mean, one.norm)
    return [*("" if value is None else f"{value:.5g}" for value in values), str(one.nan), str(one.inf)]


def _about(leaf: LeafSummary, numbers: Mapping[tuple[str, str], LeafStatistics]) -> str:
    """Return a leaf in one line: its type and shape, and its numbers."""
    one = numbers.get((leaf.item, leaf.path))
    kind = f"{leaf.dtype}{list(leaf.shape)}" if leaf.dtype else leaf.kind
    if one is None:
        return kind if leaf.value is None else f"{kind} {leaf.value}"
    names = ("min", "max", "mean", "norm", "nan", "inf")
    return ", ".join([kind, *(f"{name} {text}" for name, text in zip(names, _columns(one), strict=True) if text != "")])


@click.command()
@click.argument("one", metavar="A", help="A checkpoint, or the directory of a run: a path or URL.")
@click.argument("other", metavar="B", help="What it is compared with.")
@click.option("--step", type=click.IntRange(min=0), help="The step of A; by default the newest.")
@click.option("--other-step", type=click.IntRange(min=0), help="The step of B; by default that of A, or the newest.")
@click.option(
    "--rtol", type=click.FloatRange(min=0), default=0.0, help="Relative tolerance; by default bits are compared."
)
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, help="Absolute tolerance.")
@arguments.as_json
def diff(
    one: str, other: str, step: int | None, other_step: int | None, rtol: float, atol: float, as_json: bool
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


@click.command()
@arguments.directory
@arguments.step
@arguments.as_json
def verify(directory: str, step: int | None, as_json: bool) -> int:
    """Check every byte of checkpoints, by default of all steps.

    Exit status 1 if anything is damaged.
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
                "problems": [{"file": p.file, "leaf": p.leaf, "what": p.what} for p in item.problems],
            }
            for item in result.checkpoints
        ]
        print_json({"directory": str(location), "ok": result.ok, "checkpoints": checkpoints})
        return DONE if result.ok else FAILED
    names = _names([(item.step, item.path) for item in result.checkpoints], "step ", result.checkpoints[0].path)
    for name, item in zip(names, result.checkpoints, strict=True):
        if not item.problems:
            say(f"{name}: whole, {format_size(item.bytes)} read and checked")
            continue
        say(f"{name}: DAMAGED, {count(len(item.problems), 'problem', 'problems')}")
        for problem in item.problems:
            leaf = f" ({problem.leaf})" if problem.leaf else ""
            say(f"  {problem.file}{leaf}: {problem.what}")
    states = Counter("damaged" if item.problems else "whole" for item in result.checkpoints)
    say(", ".join(f"{number} {state}" for state, number in sorted(states.items(), reverse=True)))
    return DONE if result.ok else FAILED
