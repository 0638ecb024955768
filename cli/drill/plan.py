"""What ``holdfast drill`` asks a start of the program to do: the interface between the command and the program."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from ...engine.observer import Point

PLAN = "plan.json"  # file in the folder of a rehearsal: the plan of the current start
TRACES = "traces"  # folder with a file for each start: what its processes report
RUNS = "runs"  # folder: the directories of the current run
CLAIMS = "claims.jsonl"  # file in it: the directories that were claimed, as lines of {"url": ..., "target": ...}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """What one start of the program must do; places of steps count from 1."""

    name: str  # of this start, and of the folder of its traces
    count: int | None = None  # end after this many different steps; None does not count
    last: int | None = None  # end after this step, if there is one
    save: tuple[int, ...] = ()  # steps to save in addition to those that the program saves
    save_places: tuple[int, ...] = ()  # places of further steps to save
    dense_bytes: int = 0  # save every step as long as ``count`` of them take no more bytes than this
    point: Point | None = None  # where to interrupt: ``step``, ``validation`` or ``commit``; None interrupts nothing
    step: int = 0  # the first step at which to interrupt
    signal: int = signal.SIGKILL

    def write(self, folder: Path) -> None:
        """Write it where the program finds it."""
        (folder / TRACES).mkdir(exist_ok=True)
        (folder / PLAN).write_text(json.dumps(asdict(self)), encoding="utf-8")

    def trace(self, folder: Path) -> Path:
        """Return the file in which the processes of this start report what they pass."""
        return folder / TRACES / f"{self.name}.jsonl"

    @staticmethod
    def read(folder: Path) -> DrillPlan:
        """Read what :meth:`write` wrote."""
        found = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return DrillPlan(**{**found, "save": tuple(found["save"]), "save_places": tuple(found["save_places"])})
