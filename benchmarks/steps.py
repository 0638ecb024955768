"""``python -m benchmarks.steps``: does the cost of a run grow with the checkpoints that it keeps?

One directory holds 100 steps, another 10,000; all of them stay, by retention rules that look at every step at every
save. Each number is measured in new processes, with the directories' names and small files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from .goals import Goal
from .results import add_table_arguments, describe_machine
from .runner import tell
from .table import aligned, goal_rows, markdown

STEPS = (100, 10_000)
SAVES = 10  # of each process that saves
# Programs start from compiled modules, as installed ones do.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

COMMON = """
import json, sys, time
import numpy as np
import holdfast as hf
from holdfast.engine.steps import read_record
directory, count = sys.argv[1], int(sys.argv[2])
options = hf.CheckpointManagerOptions(
    best_fn="loss", best_mode="min", max_to_keep=10, keep_latest=3, keep_period=1000, keep_time_interval="1m"
)
tree = {"weights": np.arange(1000.0), "step": 1}
"""
# One step is saved; the others are copies of it, a minute apart, each with its own record.
FILL = """
import os, shutil
from dataclasses import replace
from pathlib import Path
from holdfast.engine.storage import as_location
hf.save(Path(directory) / "model", tree)
model = read_record(as_location(directory) / "model")
began = time.time() - 60 * (count + 1)
for step in range(1, count + 1):
    place = Path(directory) / str(step)
    shutil.copytree(Path(directory) / "model", place)
    record = replace(model, step=step, time=began + 60 * step, reason="every step", metrics={"loss": 1 / step})
    (place / "checkpoint.json").write_bytes(record.encode())
shutil.rmtree(Path(directory) / "model")
"""
OPEN = """
began = time.perf_counter()
manager = hf.CheckpointManager(directory, options=options)
opened = time.perf_counter()
assert len(manager.all_steps()) == count
before = time.perf_counter()
restored = manager.restore_latest(tree)
print(json.dumps({"open": opened - began, "resume": opened - began + time.perf_counter() - before}))
assert restored.step == count
manager.close()
"""
SAVE = """
import statistics
manager = hf.CheckpointManager(directory, options=options)
blocked, total = [], []
for step in range(count + 1, count + 2 + int(sys.argv[3])):
    time.sleep(0.2)
    began = time.perf_counter()
    manager.save(step, tree, metrics={"loss": 1 / step})
    blocked.append(time.perf_counter() - began)
    manager.wait_until_finished()
    total.append(time.perf_counter() - began)
found = {"first": total.pop(0), "blocked": statistics.median(blocked[1:]), "total": statistics.median(total)}
print(json.dumps(found))
manager.delete_after(count)
manager.close()
"""
COLUMNS = {
    "blocked": "save: blocked",
    "total": "save: durable",
    "first": "first save of a run",
    "open": "open",
    "resume": "open and resume",
    "ls": "holdfast ls",
}

Medians = dict[str, float]


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print a table; return 1 where ``--check`` was given and a goal was missed."""
    options = _parser().parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.directory.resolve()) as temporary:
        found = measure(Path(temporary), options.steps or list(STEPS), options.rounds)
        machine = describe_machine(Path(temporary))
    print(report(found, options.rounds, machine, as_markdown=options.markdown))
    return int(options.check and not all(goal.met for goal in goals(found)))


def measure(directory: Path, counts: list[int], rounds: int) -> dict[int, Medians]:
    """Return the median seconds of each operation by the number of kept steps."""
    places = {count: directory / str(count) for count in counts}
    values: dict[int, dict[str, list[float]]] = {count: {name: [] for name in COLUMNS} for count in counts}
    for count, place in places.items():
        _run(FILL, place, count)
        tell(f"{count:,} steps are there")
    for turn in range(rounds):
        for count, place in places.items():
            for found in (_run(OPEN, place, count), _run(SAVE, place, count, str(SAVES)), {"ls": _list(place, count)}):
                for name, value in found.items():
                    values[count][name].append(value)
        tell(f"round {turn + 1} of {rounds}")
    for place in places.values():
        shutil.rmtree(place)
    return {count: {name: median(found) for name, found in each.items()} for count, each in values.items()}


def goals(found: dict[int, Medians]) -> list[Goal]:
    """Return what must be reached with the most steps, beside the fewest."""
    few, many = min(found), max(found)
    ratios = [
        Goal(name=f"save, {what}, {many:,} steps / {few:,}", value=found[many][metric] / found[few][metric], limit=2.0)
        for what, metric in (("blocked", "blocked"), ("durable", "total"))
    ]
    limits = [
        Goal(name=f"{what}, {many:,} steps", value=found[many][metric], limit=limit, unit=" s")
        for what, metric, limit in (("open", "open", 2.0), ("holdfast ls", "ls", 2.0))
    ]
    return ratios + limits


def report(found: dict[int, Medians], rounds: int, machine: dict[str, str], *, as_markdown: bool) -> str:
    """Return the tables."""
    lay_out = markdown if as_markdown else aligned
    rows = [["kept steps", *COLUMNS.values()]]
    rows += [[f"{count:,}", *(_text(each[name]) for name in COLUMNS)] for count, each in sorted(found.items())]
    facts = ", ".join(f"{key} {value}" for key, value in machine.items())
    return "\n\n".join([lay_out(rows), f"Medians of {rounds}. {facts}", lay_out(goal_rows(goals(found)))])


def _text(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value:.2f} s"


def _list(place: Path, count: int) -> float:
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "ls", str(place)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    taken = time.perf_counter() - began
    assert len(done.stdout.splitlines()) == count + 1
    return taken


def _run(program: str, place: Path, count: int, *arguments: str) -> Medians:
    done = subprocess.run(
        [sys.executable, "-c", COMMON + program, str(place), str(count), *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    found: Medians = json.loads(done.stdout or "{}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument(
        "--steps", type=int, action="append", help="how many steps are kept; 100 and 10000 unless given; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each number; 5 unless given")
    add_table_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
