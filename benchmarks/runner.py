"""Runs all operations of all contenders once in each round, each in its own process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from . import startup
from .disk import remove
from .memory import Reserve
from .peers import PEERS
from .peers.raw_disk import READ_SETTING, SETTINGS, WRITE_SETTING, read, setting_text, write
from .results import Measurements
from .worker import READY
from .workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

OPERATIONS = ("save", "load_numpy", "load_native")
SETTLE_BYTES = 1 << 30
SETTLE_REPEATS = 2
TIMEOUT_SECONDS = 600.0
RESERVE_FACTOR = 2.2  # times the bytes of the arrays: for the arrays and for their pages in the page cache


def run_workload(name: str, contenders: Sequence[str], rounds: int, directory: Path) -> Iterator[Measurements]:
    """Measure one workload; yield the measurements so far after every round.

    Every round runs each operation of every contender once, beginning with another contender each time, so that a
    machine that slows down or speeds up does so for all of them.
    """
    workload = WORKLOADS[name]()
    measurements = Measurements(title=workload.title, nbytes=workload.nbytes)
    reserve = Reserve(int(RESERVE_FACTOR * workload.nbytes))
    able = [contender for contender in contenders if name not in PEERS[contender].skipped]
    for contender in able:
        measurements.add(contender, {})
    for turn in range(rounds):
        first = turn % len(able)
        order = able[first:] + able[:first]
        for operation in OPERATIONS:
            for contender in (each for each in order if operation == "save" or operation in PEERS[each].loads):
                path = directory / contender.replace(" ", "_")
                measured = run_worker(contender, name, operation, path, reserve)
                measurements.add(contender, measured)
                tell(f"{name}, round {turn + 1} of {rounds}: {contender}, {operation}: {_brief(measured)}")
        for contender in able:
            remove(directory / contender.replace(" ", "_"))
        yield measurements


def run_startup(rounds: int, directory: Path) -> Measurements:
    """Measure the import and the opening of a manager; their files are in the page cache."""
    measurements = Measurements(title="startup", nbytes=0)
    steps = directory / "steps"
    startup.fill(steps)
    for turn in range(rounds + 1):
        measured = {"import_seconds": startup.measure_import(), "manager_seconds": startup.measure_manager(steps)}
        if turn:  # the first one fills the page cache
            measurements.add("holdfast", measured)
    tell(f"startup: {_brief(measured)}")
    remove(steps)
    return measurements


def settle_raw_disk(directory: Path, processes: int = 1) -> dict[str, str]:
    """Find the fastest threads and request sizes for this disk, and set them for all measuring processes.

    For several processes, each writes and reads a file of its own; a thread stands for each of them here.
    """
    paths = [directory / f"raw_disk_settings.{index}" for index in range(processes)]
    writes: dict[str, float] = {}
    reads: dict[str, float] = {}
    for setting in SETTINGS * SETTLE_REPEATS:
        text = setting_text(*setting)
        for path in paths:
            remove(path)
        transfers = (
            (writes, [partial(write, path, SETTLE_BYTES // processes, *setting) for path in paths]),
            (reads, [partial(read, path, *setting) for path in paths]),
        )
        for found, actions in transfers:
            found[text] = min(_timed(partial(_together, actions)), found.get(text, math.inf))
    for path in paths:
        remove(path)
    settled = {WRITE_SETTING: min(writes, key=writes.__getitem__), READ_SETTING: min(reads, key=reads.__getitem__)}
    os.environ.update(settled)
    return {"raw disk writes (threads x bytes)": settled[WRITE_SETTING], "reads": settled[READ_SETTING]}


def tell(line: str) -> None:
    """Print the progress of the run to standard error."""
    print(line, file=sys.stderr, flush=True)


def run_worker(contender: str, workload: str, operation: str, path: Path, reserve: Reserve) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.worker", contender, workload, operation, str(path)]
    reserve.hold()
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
    ):
        watchdog = threading.Timer(TIMEOUT_SECONDS, process.kill)
        watchdog.start()
        last = ""
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            for line in process.stdout:
                last = line
                if line.strip() == READY:
                    reserve.release()
                    process.stdin.write("\n")
                    process.stdin.flush()
            status = process.wait()
        finally:
            watchdog.cancel()
        if status:
            errors.seek(0)
            raise RuntimeError(f"{contender}, {operation} of {workload} ended with {status}:\n{errors.read()}")
    measured = json.loads(last)
    assert isinstance(measured, dict)
    return measured


def _together(actions: Sequence[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(len(actions)) as pool:
        for done in [pool.submit(action) for action in actions]:
            done.result()


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _brief(measured: Mapping[str, Any]) -> str:
    seconds = {k.removesuffix("_seconds"): v for k, v in measured.items() if k.endswith("_seconds")}
    return ", ".join(f"{metric} {value:.4f} s" for metric, value in seconds.items())
