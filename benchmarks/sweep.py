"""``python -m benchmarks.sweep``: interrupts many small programs, resumes them, and compares every bit.

The programs and their interruptions are in ``tests/sweep``; this runs them in a few processes, and counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path

from tests.sweep.cases import Case

from .table import aligned

FRAMEWORKS = ("lightning", "jax", "torch", "hidden")

Only = tuple[str, ...]


def run_framework(framework: str, only: Only, processes: int) -> Iterator[Case]:
    """Run the cases of one framework whose names contain one of ``only``."""
    module = f"tests.sweep.{framework}_runs"
    if processes == 1:
        for group in _groups(module, only):
            yield from _run(module, group, only)
        return
    # Processes that are forked from one with everything imported, and no threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare, initargs=(module,)) as pool:
        groups = pool.submit(_groups, module, only).result()
        runs = [pool.submit(_run, module, group, only) for group in groups]
        for count, done in enumerate(as_completed(runs), start=1):
            yield from done.result()
            print(f"{framework}: {count} of {len(runs)} groups", end="\r", file=sys.stderr, flush=True)


def _prepare(module: str) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([module])


def _groups(module: str, only: Only) -> list[tuple[str, str]]:
    """Return the groups that may have a case whose name contains one of ``only``; all of them if none is named."""
    framework = module.rpartition(".")[2].removesuffix("_runs")
    found = import_module(module).groups()
    names = {group: f"{framework}/{'/'.join(group)}/" for group in found}
    named = [group for group in found if any(name in names[group] or name.startswith(names[group]) for name in only)]
    return named or list(found)


def _run(module: str, group: tuple[str, str], only: Only) -> list[Case]:
    runs = import_module(module)
    runs.be_quiet()
    return list(runs.run_group(*group, only))


def summary(cases: list[Case]) -> str:
    """Return how many cases of each framework and kind of interruption or state ended equal."""
    lines = [["", "cases", "equal", "refused", "not equal"]]
    rows: dict[str, Counter[str]] = {}
    for case in cases:
        framework, _, setup, _ = case.name.split("/", 3)
        for row in (f"{framework}: {setup}", f"{framework}, all", "all"):
            rows.setdefault(row, Counter())[case.verdict] += 1
    last = [row for row in rows if row.endswith(", all")]
    for row in [*sorted(rows.keys() - {*last, "all"}), *last, *(["all"] if "all" in rows else [])]:
        counts = rows[row]
        bad = counts["differs"] + counts["failed"]
        lines.append([row, *map(str, (counts.total(), counts["equal"], counts["refused"], bad))])
    return aligned(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        1 where a case ended otherwise than equal or refused, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep",
        description="Interrupts many small programs, resumes them, and compares every bit.",
    )
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="only cases whose names contain this text; may be repeated"
    )
    parser.add_argument("--framework", choices=FRAMEWORKS, action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="how many to run at a time; one for each core"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every case to this file")
    options = parser.parse_args(arguments)
    began, cases = time.perf_counter(), []
    for framework in options.framework or FRAMEWORKS:
        for case in run_framework(framework, tuple(options.only or ()), options.processes):
            cases.append(case)
            if not case.is_good:
                print(f"{case.name}: {case.verdict}: {case.detail}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([case.as_dict() for case in cases], indent=1))
    equal = sum(case.verdict == "equal" for case in cases)
    refused = [case for case in cases if case.verdict == "refused"]
    print(summary(cases))
    for detail, count in Counter(case.detail for case in refused).items():
        print(f"refused {count} times: {detail}")
    print(
        f"{equal} of {len(cases)} cases equal bit for bit, {len(refused)} refused with a message, "
        f"{len(cases) - equal - len(refused)} not equal, in {time.perf_counter() - began:.0f} s"
    )
    return int(equal + len(refused) < len(cases))


if __name__ == "__main__":
    sys.exit(main())
