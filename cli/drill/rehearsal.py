"""The in-process part of a rehearsal, which interrupts the process at a chosen point and records its events.

``cli/child.py`` creates the rehearsal, which observes all managers in the process. The rehearsal saves more steps than
the program would, keeps all checkpoints, and ends the process after the last step of the plan.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engine.errors import PREEMPTED, StateError
from ...engine.fingerprints import Fingerprints
from ...engine.manager import CheckpointManagerOptions
from ...engine.observer import Observer, Point, T
from ...engine.storage import append_line
from .plan import CLAIMS, RUNS, DrillPlan, read_claims

_LIBRARIES = ("jax", "torch", "lightning", "pytorch_lightning")  # libraries that affect the drill's advice
_PATIENCE = 60.0  # timeout for pending saves, in seconds
# Steps after which a signal counts as ignored: in one process, and in several, which must agree on a step to stop at.
_STEPS_UNTIL_IGNORED, _STEPS_TO_AGREE = 10, 100


class Rehearsal(Observer):
    """Carries out the plan for one attempt in one of the program's processes."""

    def __init__(self, folder: Path, heartbeat: Observer) -> None:
        self._heartbeat = heartbeat
        self._redirects = Redirects(folder / RUNS)
        self._plan = DrillPlan.read(folder)
        self._trace = self._plan.trace(folder)
        self._process = 0
        self._alone = True
        self._steps: dict[int, int] = {}  # 1-based positions in this attempt, keyed by step
        self._validated: int | None = None
        self._signalled: int | None = None  # position of the step at which the signal was sent
        self._largest = 0  # size of the largest checkpoint, in bytes
        self._writing = 0  # number of pending saves
        self._changed = threading.Condition()
        self._fingerprints = Fingerprints()

    # ---- calls from managers

    def place(self, url: str, *, writes: bool) -> str:
        return self._redirects.target(url, writes=writes)

    def writes(self, url: str) -> None:
        self._redirects.check(url)

    def options(self, options: T) -> T:
        """Return the options, changed to keep all checkpoints and to disable the mirror and local saves."""
        assert isinstance(options, CheckpointManagerOptions)
        return replace(options, mirror=None, local=None, max_to_keep=None, keep_latest=None, keep=())

    def joins(self, process: int, count: int) -> None:
        self._process, self._alone = process, count == 1

    def wants(self, step: int) -> str | None:
        plan, position = self._plan, self._steps.get(step, 0)
        planned = step in plan.save or position in plan.save_places or step == plan.last or position == plan.count
        dense = self._alone and self._largest * (plan.count or 1) < plan.dense_bytes
        return "rehearsal" if planned or dense else None

    def steps_after_signal(self, most: int) -> int:
        return 0  # the drill compares the resumed run with the undisturbed run, so no steps after the save are needed

    def event(self, event: Mapping[str, Any]) -> None:
        self._heartbeat.event(event)
        if event["event"] == "saved":
            self._largest = max(self._largest, event["bytes"] + event["shared_bytes"])

    # ---- points that the run reaches

    def reached(self, point: Point, step: int | None) -> None:
        self._heartbeat.reached(point, step)
        with self._changed:
            self._writing += {"saving": 1, "committed": -1, "save_failed": -1}.get(point, 0)
            self._changed.notify_all()
        if step is None:
            return
        if point == "step" and step not in self._steps:
            self._new_step(step)
        elif point == "validation" and step != self._validated:
            self._validated = step
            self._note("validation", step=step)
        elif point == "restored":
            self._note("restored", step=step)
        plan = self._plan
        if point == plan.point and step >= plan.step and self._signalled is None:
            self._interrupt(point, step)

    def _new_step(self, step: int) -> None:
        plan, position = self._plan, len(self._steps) + 1
        if (plan.count is not None and position > plan.count) or (plan.last is not None and step > plan.last):
            self._stop()
        self._steps[step] = position
        limit = _STEPS_UNTIL_IGNORED if self._alone else _STEPS_TO_AGREE
        if self._signalled is not None and position - self._signalled > limit:
            self._note("ignored", step=step)
            os.kill(os.getpid(), signal.SIGKILL)
        if position == 1:
            self._note("libraries", names=[name for name in _LIBRARIES if name in sys.modules])
        self._note("step", step=step, facts=self._fingerprints.changes())

    def _interrupt(self, point: Point, step: int) -> None:
        if point != "commit":
            self._wait_for_saves()
        self._signalled = len(self._steps)
        if self._plan.signal != signal.SIGKILL and self._process != 0:
            return  # Only process 0 receives the signal; all processes then agree on a step to stop at.
        self._note("interrupted", at=point, step=step)
        os.kill(os.getpid(), self._plan.signal)

    def _stop(self) -> None:
        """End the process after the last step of the rehearsal, once all pending saves have finished."""
        self._wait_for_saves()
        if self._signalled is not None and len(self._steps) - self._signalled > 1:
            # With several processes, the step that they agreed on may lie beyond the end of the drill.
            self._note("ignored" if self._alone else "too_late", step=max(self._steps))
        self._note("stopped", step=max(self._steps, default=0))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # Exit with 0 under a launcher, which might otherwise end the other processes before they save.
        os._exit(PREEMPTED if self._alone and "TORCHELASTIC_RUN_ID" not in os.environ else 0)

    def _wait_for_saves(self) -> None:
        until = time.monotonic() + _PATIENCE
        with self._changed:
            while self._writing > 0 and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def _note(self, point: str, **facts: Any) -> None:
        line = {"event": point, "process": self._process, "pid": os.getpid(), "time": time.time(), **facts}
        append_line(self._trace, json.dumps(line))


class Redirects:
    """Redirects the directories of the program's runs to folders of the rehearsal."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._targets: dict[str, str] = {}
        os.makedirs(folder, exist_ok=True)
        for claim in read_claims(folder):
            self._targets[claim["url"]] = claim["target"]

    def target(self, url: str, *, writes: bool) -> str:
        """Return the folder that replaces a URL. If there is none, assign one if ``writes``, else return the URL."""
        if self._stands_in(url):
            return url
        claimed = max((above for above in self._targets if f"{url}/".startswith(f"{above}/")), key=len, default=None)
        if claimed is not None:
            target = self._targets[claimed] + url[len(claimed) :]
        else:
            name = re.sub(r"[^A-Za-z0-9._-]+", "_", url.rstrip("/").rpartition("/")[2]).strip("_.-") or "run"
            target = os.path.join(self._folder, f"{name}.{zlib.crc32(os.fsencode(url)):08x}")
        if not writes or claimed == url:
            return url if claimed is None else target
        self._targets[url] = target
        append_line(os.path.join(self._folder, CLAIMS), json.dumps({"url": url, "target": target}))
        return target

    def check(self, url: str) -> None:
        """Raise StateError if a URL is outside the rehearsal folder, because writing there changes a real directory."""
        if not self._stands_in(url):
            raise StateError(
                f"{url}: the program is about to change this place in a rehearsal, but no folder of the rehearsal "
                "stands in for it, so nothing was changed; create the location with as_location(place, writes=True)"
            )

    def _stands_in(self, url: str) -> bool:
        return f"{url}/".startswith(f"{self._folder}/")
