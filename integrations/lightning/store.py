"""The checkpoints of one run, as the callback and Lightning's ``CheckpointIO`` see them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from ...engine.api import load
from ...engine.checkpointer import AsyncCheckpointer, Place
from ...engine.errors import CheckpointNotFoundError, StateError
from ...engine.manager import CheckpointManager
from ...engine.options import CheckpointManagerOptions
from ...engine.policy import metric_value
from ...engine.record import RECORD
from ...engine.report import SaveReport
from ...engine.steps import StepIndex
from ...engine.storage import Location, as_location
from ..options import CallbackOptions
from .trees import from_tree, to_tree

logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Intent:
    """Why a checkpoint is being saved, and what was measured at its step."""

    reason: str
    metrics: dict[str, float] | None = None


class RunStore:
    """A directory of steps: open for writing while a model is fitted, and for reading at any time.

    Args:
        directory: The directory: a path or a URL.
        options: When to save and what to keep.
    """

    def __init__(self, directory: Place, options: CallbackOptions) -> None:
        self.directory: Location = as_location(directory)
        self._options = options.manager_options()
        self._saves = AsyncCheckpointer(options.tree_handler())
        self._manager: CheckpointManager | None = None
        self._is_open = False
        self._told: set[str] = set()
        self.reports: list[SaveReport] = []
        self.intent: Intent | None = None

    @property
    def manager(self) -> CheckpointManager:
        """The manager that writes, or wrote last in this process; one that only reads when there is none."""
        if self._manager is None:
            return CheckpointManager(self.directory, options=replace(self._options, read_only=True))
        return self._manager

    def open(self) -> None:
        """Takes the right to write to the directory.

        Raises:
            OwnershipError: Another live run writes to it.
        """
        self.close()
        manager = CheckpointManager(self.directory, self._saves, self._options)
        manager.acquire()
        manager.add_listener(self.reports.append)
        self._manager, self._is_open = manager, True

    def close(self) -> None:
        """Waits for the save that is under way and gives the directory back.

        Raises:
            SaveFailedError: A save failed in the background.
        """
        if self._is_open and self._manager is not None:
            self._is_open = False
            self._manager.close()

    def steps(self) -> list[int]:
        """Returns the steps that are there now, damaged ones among them, in ascending order."""
        index = StepIndex(self.directory)
        return sorted({*index.steps(), *index.damage})

    def path_of(self, step: int) -> str:
        """Returns the path or URL of a step."""
        return str(self.directory / str(step))

    def step_of(self, path: Place) -> int | None:
        """Returns the step that a path stands for, or None when it is none of this directory."""
        location = as_location(path)
        name = location.name
        return int(name) if location.parent == self.directory and name.isdecimal() and name == str(int(name)) else None

    def score(self, step: int | None) -> float | None:
        """Returns the metric that checkpoints are ranked by, or None when there is none."""
        metric = self._options.best_fn
        if metric is None or step is None:
            return None
        try:
            return metric_value(self.manager.metrics(step), metric)
        except CheckpointNotFoundError:  # its save has not been committed yet
            return None

    def save(self, step: int, checkpoint: dict[str, Any]) -> None:
        """Saves what Lightning made.

        Args:
            step: The number of updates in it.
            checkpoint: Lightning's dictionary.

        Raises:
            UnsupportedLeafError: It cannot be saved.
            SaveFailedError: The save before this one failed; this one is under way nevertheless.
        """
        tree, left = to_tree(checkpoint)
        if new := [line for line in left if line not in self._told]:
            self._told.update(new)
            logger.warning(
                "left out of the checkpoints in %s, as they are neither arrays nor plain data: %s. Nothing is pickled; "
                "a resumed run gets these from the program that resumes it",
                self.directory,
                ", ".join(new),
            )
        intent = self.intent or Intent("trainer.save_checkpoint")
        manager = self.manager
        if self._is_open:
            manager.save(step, tree, metrics=intent.metrics, force=True, reason=intent.reason)
            return
        with CheckpointManager(self.directory, self._saves, self._options) as manager:
            manager.save(step, tree, metrics=intent.metrics, force=True, reason=intent.reason)

    def load_newest(self) -> dict[str, Any]:
        """Returns the newest whole checkpoint as Lightning's dictionary.

        Raises:
            CheckpointNotFoundError: There is none.
            NoWholeCheckpointError: All of them are damaged.
        """
        return _newest(self.manager)

    def load(self, step: int) -> dict[str, Any]:
        """Returns the checkpoint of a step as Lightning's dictionary.

        Raises:
            CheckpointNotFoundError: There is none of this step.
            DamagedCheckpointError: It does not verify.
        """
        return _checkpoint(self.manager.restore(step), self.path_of(step))


def load_checkpoint(path: Place) -> dict[str, Any]:
    """Reads a checkpoint into the dictionary that Lightning's own ``.ckpt`` files hold.

    ::

        model.load_state_dict(load_checkpoint("runs/x/checkpoints/1200")["state_dict"])

    Args:
        path: A checkpoint, or a directory of steps, of which the newest whole one is read.

    Returns:
        The dictionary; arrays are tensors on the CPU.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        DamagedCheckpointError: It does not verify.
        NoWholeCheckpointError: It is a directory of steps, and all of them are damaged.
        StateError: It was not saved from a Lightning trainer.
    """
    location = as_location(path)
    if (location / RECORD).exists():
        return _checkpoint(load(location), location)
    return _newest(CheckpointManager(location, options=CheckpointManagerOptions(read_only=True)))


def is_checkpoint(path: Place) -> bool:
    """Returns whether there is a checkpoint of the engine, or a directory of them, at a path."""
    location = as_location(path)
    if location.name.endswith(".ckpt") or not location.is_directory():
        return False  # Lightning's own files are not looked for where they may take a network to look
    if (location / RECORD).exists():
        return True
    index = StepIndex(location)
    return bool(index.steps() or index.damage)


def _newest(manager: CheckpointManager) -> dict[str, Any]:
    restored = manager.restore_latest()
    if restored is None:
        raise CheckpointNotFoundError(f"{manager.directory}: there is no checkpoint to restore")
    return _checkpoint(restored.items, manager.directory / str(restored.step))


def _checkpoint(tree: Any, place: Place) -> dict[str, Any]:
    if not isinstance(tree, dict) or not {"state_dict", "pytorch-lightning_version"} <= tree.keys():
        raise StateError(
            f"{place} was not saved from a Lightning trainer; load it with hf.load, or with the callback that saved it"
        )
    return from_tree(tree)
