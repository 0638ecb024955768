"""``python -m benchmarks.compare``: measures holdfast and its peers in one run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .goals import goals
from .peers import PEERS
from .results import Results, add_output_arguments, describe_machine
from .runner import run_startup, run_workload, settle_raw_disk, tell
from .sharded import SHARDED_PEERS
from .sharded.runner import run_sharded
from .table import report
from .workloads import STANDARD, WORKLOADS

STARTUP = "startup"


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison and print it.

    Returns:
        1 where ``--check`` was given and a goal was missed, else 0.
    """
    options = _parser().parse_args(arguments)
    results = Results.read(options.report) if options.report else _measure(options)
    all_goals = goals(results)
    shown = all_goals if options.check else [goal for goal in all_goals if goal.value is not None]
    print(report(results, shown, as_markdown=options.markdown))
    return int(options.check and not all(goal.met for goal in all_goals))


def _measure(options: argparse.Namespace) -> Results:
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.directory.resolve()) as temporary:
        directory = Path(temporary)
        return _measure_sharded(options, directory) if options.processes > 1 else _measure_alone(options, directory)


def _measure_sharded(options: argparse.Namespace, directory: Path) -> Results:
    """Programs of several processes, each of which holds a part of every array."""
    results = Results(rounds=options.rounds, machine=describe_machine(directory))
    contenders = [name for name in options.only or SHARDED_PEERS if name in SHARDED_PEERS]
    names = options.workload or ["model"]
    if any(name.startswith("raw disk") for name in contenders) and any(name in STANDARD for name in names):
        results.machine |= settle_raw_disk(directory, options.processes)
        tell(f"raw disk settled: {results.machine}")
    for name in names:
        for measurements in run_sharded(name, contenders, options.processes, options.rounds, directory):
            results.workloads[f"{name}, {options.processes} processes"] = measurements
            if options.json:
                results.write(options.json)
    return results


def _measure_alone(options: argparse.Namespace, directory: Path) -> Results:
    contenders = options.only or list(PEERS)
    workloads = options.workload or [*STANDARD, STARTUP]
    results = Results(rounds=options.rounds, machine=describe_machine(directory))
    if "raw disk" in contenders and any(name in STANDARD for name in workloads):
        results.machine |= settle_raw_disk(directory)
        tell(f"raw disk settled: {results.machine}")
    for name in workloads:
        rounds = (
            [run_startup(options.rounds, directory)]
            if name == STARTUP
            else run_workload(name, contenders, options.rounds, directory)
        )
        for measurements in rounds:
            results.workloads[name] = measurements
            if options.json:  # after every round: a long run that fails keeps its measurements
                results.write(options.json)
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument(
        "--workload", action="append", choices=[*WORKLOADS, STARTUP], help="measure only this workload; may be repeated"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(PEERS),
        metavar="NAME",
        help="measure only this contender; may be repeated",
    )
    parser.add_argument(
        "--processes",
        type=_positive,
        default=1,
        help="processes of each program; with 2 or more, every array is sharded; workload model unless given",
    )
    parser.add_argument("--rounds", type=_positive, default=5, help="measurements of each number; 5 unless given")
    add_output_arguments(parser)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
