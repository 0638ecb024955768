"""Measurements, and their medians."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PACKAGES = ("numpy", "tensorstore", "jax", "torch", "orbax-checkpoint", "safetensors", "holdfast-checkpoint")


@dataclass
class Measurements:
    """Every number of one workload: contender, then metric, then one value a round.

    Attributes:
        title: The table's heading.
        nbytes: Bytes of the arrays; 0 where there are none.
        values: The numbers; seconds for ``*_seconds``, bytes for everything else.
        cold: How the page cache was emptied before loads.
    """

    title: str
    nbytes: int
    values: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    cold: str = ""

    def add(self, contender: str, measured: Mapping[str, Any]) -> None:
        """Add the measurements of one process; None stands for a number that this machine cannot measure."""
        values = self.values[contender]
        for metric, value in measured.items():
            if metric == "cold":
                self.cold = value
            elif value is not None:
                values[metric].append(value)

    def median(self, contender: str, metric: str) -> float | None:
        """Return the median over the rounds, or None without measurements."""
        values = self.values.get(contender, {}).get(metric)
        return median(values) if values else None


@dataclass
class Results:
    """One run: every workload's measurements and the machine they were made on."""

    rounds: int
    machine: dict[str, str] = field(default_factory=dict)
    workloads: dict[str, Measurements] = field(default_factory=dict)

    def median(self, workload: str, contender: str, metric: str) -> float | None:
        """Return a median, or None without measurements."""
        measurements = self.workloads.get(workload)
        return measurements.median(contender, metric) if measurements else None

    def write(self, path: Path) -> None:
        """Write every single number as JSON."""
        document = {
            "rounds": self.rounds,
            "machine": self.machine,
            "workloads": {
                name: {"title": each.title, "nbytes": each.nbytes, "cold": each.cold, "values": each.values}
                for name, each in self.workloads.items()
            },
        }
        path.write_text(json.dumps(document, indent=1) + "\n")

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Results:
        """Read files of :meth:`write`; if several hold one workload, the last one counts."""
        results = cls(rounds=0)
        for path in paths:
            document = json.loads(path.read_text())
            results.rounds = max(results.rounds, document["rounds"])
            results.machine |= document["machine"]
            results.workloads |= {name: Measurements(**each) for name, each in document["workloads"].items()}
        return results


def describe_machine(directory: Path) -> dict[str, str]:
    """Return what the numbers depend on: cores, memory, file system and versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": str(os.cpu_count()),
        "memory": f"{memory / 2**30:.0f} GiB",
        "file system": _file_system(directory),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _file_system(directory: Path) -> str:
    """The type of the mount that holds a directory: the last one whose mount point is a parent of it."""
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount_point, found, *_ = line.split()
        if directory.resolve().is_relative_to(mount_point) and len(mount_point) >= len(str(best)):
            best, kind = Path(mount_point), found
    return kind


def add_table_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where a command measures, how it prints its tables, and whether it checks its goals."""
    parser.add_argument(
        "--directory", type=Path, default=Path("runs"), help="a directory on the disk to measure; ./runs unless given"
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a goal is missed or was not measured")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the same, and where a command's numbers go or come from."""
    add_table_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single number to this file")
    parser.add_argument(
        "--report",
        action="append",
        type=Path,
        metavar="FILE",
        help="measure nothing, show the contents of this file; may be repeated",
    )
