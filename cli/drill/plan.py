"""The plan that ``holdfast drill`` gives to the program at each attempt."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...engine.observer import Point

PLAN = "plan.json"  # file in the rehearsal folder: the plan for the current attempt
TRACES = "traces"  # folder with one file per attempt: the events reported by its processes
RUNS = "runs"  # folder with the stand-ins for the current run's directories
CLAIMS = "claims.jsonl"  # file in RUNS: the redirected directories, as lines of {"url": ..., "target": ...}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """What the program does in one attempt; step positions count from 1."""

    name: str  # name of this attempt and its trace file
    count: int | None = None  # end after this many distinct steps; None for no limit
    last: int | None = None  # end after this step; None for no limit
    save: tuple[int, ...] = ()  # steps to save in addition to those that the program itself saves
    save_places: tuple[int, ...] = ()  # positions of further steps to save
    dense_bytes: int = 0  # save every step if ``count`` checkpoints do not exceed this size
    point: Point | None = None  # where to interrupt: ``step``, ``validation`` or ``commit``; None for no interruption
    step: int = 0  # interrupt at the first such point from this step on
    signal: int = signal.SIGKILL

    def write(self, folder: Path) -> None:
        (folder / TRACES).mkdir(exist_ok=True)
        (folder / PLAN).write_text(json.dumps(asdict(self)), encoding="utf-8")

    def trace(self, folder: Path) -> Path:
        """Return the path of the trace file, which has the events reported by the processes of this attempt."""
        return folder / TRACES / f"{self.name}.jsonl"

    @staticmethod
    def read(folder: Path) -> DrillPlan:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return DrillPlan(**{**plan, "save": tuple(plan["save"]), "save_places": tuple(plan["save_places"])})


def read_claims(folder: Path) -> list[dict[str, Any]]:
    """Read the redirected directories from the claims file in a run folder."""
    path = folder / CLAIMS
    return [*map(json.loads, path.read_text(encoding="utf-8").splitlines())] if path.exists() else []
