"""Runs every contender's programs of several processes, all of them once a round."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..disk import remove
from ..results import Measurements
from ..runner import TIMEOUT_SECONDS, tell
from ..workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def run_sharded(
    name: str, contenders: Sequence[str], processes: int, rounds: int, directory: Path
) -> Iterator[Measurements]:
    """Measure one workload, sharded over processes; yield the measurements so far after every round."""
    workload = WORKLOADS[name]()
    title = f"{workload.title}, sharded over {processes} processes"
    measurements = Measurements(title=title, nbytes=workload.nbytes)
    for contender in contenders:
        measurements.add(contender, {})
    for turn in range(rounds):
        first = turn % len(contenders)
        order = [*contenders[first:], *contenders[:first]]
        for operation in ("save", "load"):
            for contender in order:
                measured = _run_program(contender, name, operation, directory / contender.replace(" ", "_"), processes)
                measurements.add(contender, measured)
                seconds = [f"{key} {value:.4f}" for key, value in measured.items() if key.endswith("_seconds")]
                tell(f"{title}, round {turn + 1} of {rounds}: {contender}: {', '.join(seconds)}")
        for contender in order:
            remove(directory / contender.replace(" ", "_"))
        yield measurements


def _run_program(contender: str, workload: str, operation: str, path: Path, processes: int) -> dict[str, Any]:
    """Run one program, and keep the largest number of its processes for each measurement."""
    port = _free_port()
    command = [sys.executable, "-m", "benchmarks.sharded.worker", contender, workload, operation, str(path)]
    with ExitStack() as stack:
        running = []
        for index in range(processes):
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            arguments = [*command, str(index), str(processes), str(port)]
            process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, text=True)
            stack.enter_context(process)
            running.append((process, errors))
        watchdog = threading.Timer(TIMEOUT_SECONDS, _kill, [process for process, _ in running])
        watchdog.start()
        try:
            outputs = [process.communicate()[0] for process, _ in running]
        finally:
            watchdog.cancel()
        for index, (process, errors) in enumerate(running):
            if process.returncode:
                errors.seek(0)
                raise RuntimeError(
                    f"{contender}, {operation} of {workload}: process {index} ended with {process.returncode}:\n"
                    f"{errors.read()}"
                )
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    merged: dict[str, Any] = {}
    for each in found:
        for metric, value in each.items():
            if value is not None:
                merged[metric] = value if isinstance(value, str) else max(value, merged.get(metric, value))
    return merged


def _kill(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
