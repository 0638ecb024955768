"""One life of a run that will be killed: looks, takes the directory over, checks everything, and saves until the end.

What it has to say goes line by line into a pipe, each line in one write, so that none is lost or torn by SIGKILL:

    listed STEP EDITION      a reader saw this step, and it was whole
    leftover KIND            the life before was interrupted in a save (``partial``) or a deletion (``deleted``)
    checked                  all checks are done; saving begins
    committed STEP EDITION   from the manager's listener, after the commit
    shared                   likewise, where the step shares files with an earlier one
    problem TEXT             a promise that was broken
"""

from __future__ import annotations

import itertools
import json
import os
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import holdfast as hf

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KEEP_NEWEST = 3
KEEP_PERIOD = 10
REPLACED_EVERY = 3  # steps; each of these is saved a second time, with another content
WARM_SAVES = 5
BIG_BYTES = 1 << 20
FROZEN = np.arange(200_000)
RECORD = "checkpoint.json"
ROOT_FILES = {"metadata", "options.json", "owner.json", "events.jsonl"}  # the manager's own


def content(step: int, edition: int) -> dict[str, Any]:
    """Make the tree of a step: different for each edition, and a function of step and edition alone."""
    generator = np.random.default_rng((step, edition))
    return {
        "step": step,
        "edition": edition,
        "note": f"step {step}, edition {edition}",
        "model": {
            "kernel": generator.standard_normal((65, 129), dtype=np.float32),
            "bias": generator.standard_normal(129),
            "count": np.int64(step),
        },
        "frozen": FROZEN,
        "big": np.resize(np.frombuffer(generator.bytes(4096), np.uint8), BIG_BYTES),
    }


def same(left: Any, right: Any) -> bool:
    """Return whether two trees have the same keys, types and bits."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and bool(left == right)


def warm_up(directory: Path) -> float:
    """Import the modules of a life, so that no child has to.

    Returns:
        The seconds that a save takes here.
    """
    manager = hf.CheckpointManager(directory)
    manager.save(0, content(0, 0))
    manager.wait_until_finished()
    began = time.perf_counter()
    for step in range(1, WARM_SAVES + 1):
        manager.save(step, content(step, 0))
    manager.close()
    seconds = (time.perf_counter() - began) / WARM_SAVES
    for summary in hf.list_checkpoints(directory):
        hf.load(directory / str(summary.step))
    hf.verify(directory)
    return seconds


class Life:
    """The work of the child process between fork and SIGKILL.

    Args:
        directory: The manager's directory.
        kept: The steps that retention must have kept, with the newest edition that was reported committed.
        pipe: Where its lines go.
    """

    def __init__(self, directory: Path, kept: Mapping[int, int], pipe: int) -> None:
        self._directory = directory
        self._kept = kept
        self._pipe = pipe

    def run(self) -> None:
        """Check, then save without end."""
        try:
            self.look()
            options = hf.CheckpointManagerOptions(max_to_keep=KEEP_NEWEST, keep_period=KEEP_PERIOD)
            manager = hf.CheckpointManager(self._directory, options=options)
            manager.acquire()
            self.check(manager)
            self._say("checked")
            self._save(manager)
        except Exception:
            self._problem(traceback.format_exc())

    def look(self) -> None:
        """Check as a reader, before any cleanup."""
        for marker in ("partial", "deleted"):
            for _ in self._directory.glob(f"*/checkpoint.{marker}"):
                self._say(f"leftover {marker}")
        listed = set()
        for summary in hf.list_checkpoints(self._directory):
            edition = self._edition(summary)
            if edition is not None:
                listed.add(summary.step)
                self._say(f"listed {summary.step} {edition}")
        newest = sorted({*listed, *self._kept})[-KEEP_NEWEST:]
        for step in self._kept:
            if step not in listed and (step in newest or step % KEEP_PERIOD == 0):
                self._problem(f"step {step} was reported committed, should be kept, and is gone")

    def _edition(self, summary: hf.reports.CheckpointSummary) -> int | None:
        """Read a listed step whole and return its edition; None if its content is wrong."""
        step = summary.step
        try:
            found = hf.load(self._directory / str(step))
        except hf.HoldfastError as error:
            self._problem(f"step {step} is listed, but cannot be read: {error} ({summary.damage})")
            return None
        edition = int(found["edition"])
        if not same(found, content(step, edition)):
            self._problem(f"step {step} is listed, but does not hold the saved values")
            return None
        if edition < self._kept.get(step, 0):
            self._problem(f"step {step} went back to edition {edition}")
        return edition

    def check(self, manager: hf.CheckpointManager) -> None:
        """Check as the new owner of the directory."""
        steps = manager.all_steps()
        for step in steps:
            for checkpoint in hf.verify(self._directory, step).checkpoints:
                for found in checkpoint.problems:
                    self._problem(f"step {step} does not verify: {found}")
        names = {path.name for path in self._directory.iterdir() if not _is_empty_folder(path)}
        strangers = names - {str(step) for step in steps} - ROOT_FILES
        if strangers:
            self._problem(f"left behind in the directory: {sorted(strangers)}")
        for step in steps:
            folder = self._directory / str(step)
            unknown = set(_files(folder)) - set(_recorded(folder))
            if unknown:
                self._problem(f"left behind in step {step}: {sorted(unknown)}")

    def _save(self, manager: hf.CheckpointManager) -> None:
        manager.events.add_listener(self._heard)
        latest = manager.latest_step()
        for step in itertools.count(0 if latest is None else latest + 1):
            for edition in range(2 if step % REPLACED_EVERY == 0 else 1):
                tree = content(step, edition)
                manager.save(step, tree, force=edition > 0, reason=str(edition))
                tree["big"] += 1  # changes after save must not matter
                tree["model"]["kernel"] *= 2

    def _heard(self, event: dict[str, Any]) -> None:
        if event["event"] == "saved":
            self._say(f"committed {event['step']} {event['reason']}")
            if event["shared_bytes"]:
                self._say("shared")

    def _say(self, line: str) -> None:
        os.write(self._pipe, f"{line}\n".encode())

    def _problem(self, text: str) -> None:
        self._say(f"problem {' | '.join(text.splitlines())}"[:4000])


def _is_empty_folder(path: Path) -> bool:
    """A kill right after mkdir or before rmdir leaves a folder without a marker, which another program may own."""
    return path.is_dir() and not any(path.iterdir())


def _files(folder: Path) -> Iterator[str]:
    """Every file below a step's folder, by relative path; folders that are empty count as well."""
    for root, folders, files in os.walk(folder):
        for name in (*files, *(each for each in folders if not os.listdir(Path(root, each)))):
            yield str(Path(root, name).relative_to(folder))


def _recorded(folder: Path) -> Iterator[str]:
    """Every file that a commit record names, and the record itself."""
    yield RECORD
    record = json.loads((folder / RECORD).read_text())
    for item in record["items"].values():
        yield from (f"{item['folder']}/{path}" for path in item["files"])
