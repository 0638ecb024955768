"""Trains with every contender once in each round, each in its own process."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..disk import remove
from ..results import Measurements, Results, add_output_arguments, describe_machine
from ..runner import TIMEOUT_SECONDS, tell
from . import CONTENDERS, HOLDFAST, NO_SAVING
from .report import TITLES, goals, report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        1 where ``--check`` was given and a goal was missed, else 0.
    """
    options = _parser().parse_args(arguments)
    results = Results.read(options.report) if options.report else _measure(options)
    found = goals(results)
    print(report(results, found, as_markdown=options.markdown))
    return int(options.check and not (found and all(goal.met for goal in found)))


def _measure(options: argparse.Namespace) -> Results:
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.directory.resolve()) as temporary:
        directory = Path(temporary)
        results = Results(rounds=1 if options.quick else options.rounds, machine=describe_machine(directory))
        for framework in options.framework or CONTENDERS:
            always = (NO_SAVING, HOLDFAST)
            chosen = [c for c in CONTENDERS[framework] if not options.only or c in always or c in options.only]
            for measurements in _run_rounds(framework, chosen, results.rounds, directory, quick=options.quick):
                results.workloads[framework] = measurements
                if options.json:  # after every round: a long run that fails keeps its measurements
                    results.write(options.json)
        return results


def _run_rounds(
    framework: str, contenders: Sequence[str], rounds: int, directory: Path, *, quick: bool
) -> Iterator[Measurements]:
    """Measure one framework; yield the measurements so far after every round, which begins with another contender."""
    measurements = Measurements(title=TITLES[framework], nbytes=0)
    for contender in contenders:
        measurements.add(contender, {})
    for turn in range(rounds):
        first = turn % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            path = directory / contender.replace(" ", "_")
            measured = _run_worker(framework, contender, path, quick=quick)
            remove(path)
            measurements.add(contender, measured)
            seconds = ", ".join(f"{key.removesuffix('_seconds')} {value:.4f} s" for key, value in measured.items())
            tell(f"{framework}, round {turn + 1} of {rounds}: {contender}: {seconds}")
        yield measurements


def _run_worker(framework: str, contender: str, path: Path, *, quick: bool) -> dict[str, float]:
    arguments = [framework, contender, "quick" if quick else "standard", str(path)]
    command = [sys.executable, "-m", f"{__package__}.worker", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{framework}, {contender} ended with {done.returncode}:\n{done.stderr}")
    measured = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(measured, dict)
    return measured


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loop",
        description="Trains one model with every way to save it, and compares the steps with those without saving.",
    )
    parser.add_argument("--framework", action="append", choices=list(CONTENDERS), help="only this one; may be repeated")
    parser.add_argument(
        "--only",
        action="append",
        choices=sorted({name for contenders in CONTENDERS.values() for name in contenders}),
        metavar="NAME",
        help="besides no saving and holdfast, only this contender; may be repeated",
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each number; 5 unless given")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round, to try the harness")
    add_output_arguments(parser)
    return parser
