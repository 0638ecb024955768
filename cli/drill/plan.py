"""The instructions of ``holdfast drill`` for a start of the program."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...engine.observer import Point

PLAN = "plan.json"  # file in the folder of a rehearsal: the plan of the current start
TRACES = "traces"  # folder with a file for each start: the reports of its processes
RUNS = "runs"  # folder: the directories of the current run
CLAIMS = "claims.jsonl"  # file in RUNS: the claimed directories, as lines of {"url": ..., "target": ...}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """What one start of the program does; the positions of steps count from 1."""

    name: str  # of this start, and of its trace
    count: int | None = None  # end after this many different steps; None does not count
    last: int | None = None  # end after this step, if there is one
    save: tuple[int, ...] = ()  # steps to save in addition to those that the program saves
    save_places: tuple[int, ...] = ()  # positions of more steps to save
    dense_bytes: int = 0  # save every step if ``count`` checkpoints take no more bytes than this
    point: Point | None = None  # where to interrupt: ``step``, ``validation`` or ``commit``; None interrupts nothing
    step: int = 0  # the first step at which to interrupt
    signal: int = signal.SIGKILL

    def write(self, folder: Path) -> None:
        (folder / TRACES).mkdir(exist_ok=True)
        (folder / PLAN).write_text(json.dumps(asdict(self)), encoding="utf-8")

    def trace(self, folder: Path) -> Path:
        """Return the file with the reports of the processes of this start."""
        return folder / TRACES / f"{self.name}.jsonl"

    @staticmethod
    def read(folder: Path) -> DrillPlan:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return DrillPlan(**{**plan, "save": tuple(plan["save"]), "save_places": tuple(plan["save_places"])})


def read_claims(folder: Path) -> list[dict[str, Any]]:
    """Return the directories that were claimed in the folder of a run."""
    path = folder / CLAIMS
    return [*map(json.loads, path.read_text(encoding="utf-8").splitlines())] if path.exists() else []
