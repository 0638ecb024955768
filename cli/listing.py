"""``holdfast ls`` and ``watch`` list checkpoints without importing numpy, which would take longer than the listing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import click

from ..engine.clock import format_size
from ..engine.errors import DONE, StorageError, shortened_steps
from ..engine.format import WITNESS
from ..engine.listing import CheckpointSummary, list_checkpoints
from ..engine.manager import finite, number_in_event, read_run_events, stored_identity
from ..engine.sources import is_ours
from ..engine.steps import shared_bytes
from ..engine.storage import Location
from . import arguments
from .arguments import INSIDE_A_RUN, checkpoints_at, is_one_checkpoint, runs_below, where_else
from .report import age, metrics_text, print_json, print_table, proof_text, step_names, witness_events
from .streams import configure_logging, say

_PLACES = {
    "mirror": "steps of the run were also copied to a mirror, which `holdfast ls {}` lists",
    "local": "the last start with local steps keeps them on its hosts, in {}",
    "mirror_of": "this is the mirror of {}",
}


@click.command()
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, help="Runs, or folders of runs.")
@arguments.as_json
def ls(directories: Sequence[str], as_json: bool) -> int:
    """List the checkpoints of runs, or the runs in a folder.

    Each checkpoint is listed with its age, size and metrics, the reasons for keeping it, any damage, and whether the
    newest resume from it was exact ("recorded" means that no resume has been compared). After the list, the
    command shows the run's mirror, and the path of the local steps on the run's hosts.
    """
    configure_logging("warning")
    locations = [checkpoints_at(directory) for directory in directories]
    if as_json:
        documents = [_listing(location) for location in locations]
        print_json({"directories": documents} if len(documents) > 1 else documents[0])
        return DONE
    for number, location in enumerate(locations):
        if len(locations) > 1:
            say("\n" * (number > 0) + f"{location}:")
        list_at(location)
    return DONE


def _listing(location: Location) -> dict[str, Any]:
    """Return the checkpoints or runs at a location as JSON, with the run's mirror and the path of its local steps."""
    checkpoints = [{**shown(summary), "witness": None} for summary in _checkpoints(location)]
    _add_witness(location, checkpoints)
    runs = [] if checkpoints else [_run(location / name) for name in runs_below(location)]
    facts = {"directory": str(location), "checkpoints": checkpoints}
    return {**facts, **({"runs": runs} if runs else {}), **_other_places(location)}


def list_at(location: Location) -> None:
    """Print the checkpoints or runs at a location, then the run's mirror and the path of its local steps."""
    listing = _listing(location)
    if "runs" in listing:
        _print_runs(listing["runs"])
    elif not listing["checkpoints"]:
        say(f"no checkpoints in {location}{where_else(location)}")
    else:
        _print_steps(listing["checkpoints"])
    for name, text in _PLACES.items():
        if name in listing:
            say(text.format(listing[name]))


def _add_witness(location: Location, checkpoints: list[dict[str, Any]]) -> None:
    """Add a verdict on the newest resume from each step, such as ``exact``, or ``recorded`` if none was compared."""
    listed, only = location.snapshot(), [item["path"] for item in checkpoints] == [str(location)]
    proofs = witness_events(read_run_events(location.parent if only else location))
    for item in checkpoints:
        proof = proofs.get(item["step"])
        folder = listed if only else listed / item["path"].rpartition("/")[2]
        # An event older than the save belongs to an earlier checkpoint of the same step.
        if proof and (number_in_event(proof.get("time")) or 0.0) >= (item["time"] or 0.0):
            item["witness"] = proof_text(proof)
        elif (folder / WITNESS).is_there():
            item["witness"] = "recorded"


def _other_places(location: Location) -> dict[str, str]:
    """Return the other locations that a directory records: its mirror, its local steps, and the run that it mirrors."""
    try:
        run = stored_identity(location)
    except StorageError:
        return {}
    urls = {"mirror": run.mirror, "local": run.local, "mirror_of": run.directory}
    return {name: url for name, url in urls.items() if url is not None}


def _print_steps(checkpoints: list[dict[str, Any]]) -> None:
    now = time.time()
    shares = any(item["shared_bytes"] for item in checkpoints)
    witness = ["WITNESS"] if any(item["witness"] for item in checkpoints) else []
    names = step_names([(item["step"], item["path"]) for item in checkpoints])
    rows = [
        [
            name,
            "-" if item["time"] is None else age(now - item["time"]),
            *_sizes(item, shares=shares),
            metrics_text(item["metrics"]),
            ", ".join(item["kept"]),
            *[item["witness"] or "" for _ in witness],
            "ok" if item["damage"] is None else f"damaged: {item['damage']}",
        ]
        for name, item in zip(names, checkpoints, strict=True)
    ]
    sizes = ["SIZE", "OWN"] if shares else ["SIZE"]
    columns = ["STEP", "AGE", *sizes, "METRICS", "KEPT BECAUSE", *witness, "STATE"]
    print_table(columns, rows, right=["STEP", "AGE", *sizes])


def _sizes(item: dict[str, Any], *, shares: bool) -> list[str]:
    """Format a step's size and, if ``shares`` is true, its size without the data that it shares with other steps."""
    if item["damage"] is not None and item["time"] is None:
        return ["-"] * (1 + shares)
    unshared = [format_size(item["bytes"] - item["shared_bytes"])] if shares else []
    return [format_size(item["bytes"]), *unshared]


def _run(location: Location) -> dict[str, Any]:
    """Summarize a run as JSON: the number and size of its checkpoints, and the most recently saved checkpoint."""
    inside = location / INSIDE_A_RUN
    summaries = _checkpoints(inside if is_ours(inside) and not is_one_checkpoint(location) else location)
    checkpoints = [shown(summary) for summary in summaries]
    return {
        "name": location.name,
        "checkpoints": len(checkpoints),
        "bytes": sum(summary.bytes for summary in summaries),
        "disk_bytes": sum(summary.added_bytes for summary in summaries),
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


def shown(summary: CheckpointSummary) -> dict[str, Any]:
    """Convert a checkpoint summary to JSON."""
    facts = {**asdict(summary), "step": None if summary.step < 0 else summary.step}
    del facts["added_bytes"]  # this value depends on the other steps in the list
    return facts


def _checkpoints(location: Location) -> list[CheckpointSummary]:
    return [describe_one(location)] if is_one_checkpoint(location) else list_checkpoints(location)


def describe_one(location: Location) -> CheckpointSummary:
    """Summarize a checkpoint, using its parent directory's listing if possible; -1 stands for an unknown step."""
    for item in list_checkpoints(location.parent):
        if item.path == str(location):
            return replace(item, added_bytes=item.bytes)
    from ..engine.sources import open_at  # imported lazily, because the import takes longer than listing a run

    checkpoint = open_at(location)
    return CheckpointSummary(
        step=-1 if checkpoint.step is None else checkpoint.step,
        path=str(location),
        time=checkpoint.time,
        bytes=checkpoint.nbytes,
        shared_bytes=shared_bytes(location),
        added_bytes=checkpoint.nbytes,
        metrics=checkpoint.metrics,
        reason=checkpoint.reason,
    )


@click.command()
@arguments.run_directory
@arguments.duration("--interval", "How often to check, such as 10s.", default="2s")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each change, for programs.")
def watch(directory: str, interval: float, as_json: bool) -> int:
    """Follow a run: print its checkpoints as they come and go, until Ctrl-C."""
    location = checkpoints_at(directory)
    before = {} if as_json else _listed(location)
    if not as_json:
        list_at(location)
    try:
        while True:
            now = _listed(location)
            for change, summary, text in _changes(before, now):
                line = f"{time.strftime('%H:%M:%S')} {change} {text}"
                say(json.dumps(finite({"change": change, **shown(summary)})) if as_json else line, flush=True)
            before = now
            time.sleep(max(0.1, interval))
    except KeyboardInterrupt:
        return DONE


def _listed(location: Location) -> dict[str, CheckpointSummary]:
    return {item.path: item for item in list_checkpoints(location)} if location.exists() else {}


def _changes(
    before: dict[str, CheckpointSummary], now: dict[str, CheckpointSummary]
) -> Iterator[tuple[str, CheckpointSummary, str]]:
    """Yield each change between two listings: its kind, the checkpoint, and the text to print."""
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
