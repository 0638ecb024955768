"""The plan that ``holdfast drill`` passes to the program in each attempt."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...engine.observer import Point

PLAN = "plan.json"  # file in the rehearsal folder that contains the plan for the current attempt
TRACES = "traces"  # folder with one event file per attempt
RUNS = "runs"  # parent of the folders that stand in for the current run's directories
CLAIMS = "claims.jsonl"  # file in RUNS with a line {"url": ..., "target": ...} for each redirected directory


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """The instructions for one attempt to run the program. Step positions are 1-based."""

    name: str  # name of this attempt and of its trace file
    count: int | None = None  # end after this many distinct steps; None for no limit
    last: int | None = None  # end after this step; None for no limit
    save: Sequence[int] = ()  # steps to save in addition to the program's own saves
    save_places: Sequence[int] = ()  # positions of further steps to save
    dense_bytes: int = 0  # save every step if ``count`` checkpoints take up less than this many bytes
    point: Point | None = None  # interrupt at ``step``, ``validation`` or ``commit``; None for no interruption
    step: int = 0  # interrupt when the program first reaches ``point`` at or after this step
    signal: int = signal.SIGKILL

    def write(self, folder: Path) -> None:
        (folder / TRACES).mkdir(exist_ok=True)
        (folder / PLAN).write_text(json.dumps(asdict(self)), encoding="utf-8")

    def trace(self, folder: Path) -> Path:
        """Return the path of the trace file, to which the processes of this attempt append their events."""
        return folder / TRACES / f"{self.name}.jsonl"

    @staticmethod
    def read(folder: Path) -> DrillPlan:
        return DrillPlan(**json.loads((folder / PLAN).read_text(encoding="utf-8")))


def read_claims(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a run folder's claims file, one for each redirected directory."""
    path = folder / CLAIMS
    return [*map(json.loads, path.read_text(encoding="utf-8").splitlines())] if path.exists() else []
