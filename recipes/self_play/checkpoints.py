"""The checkpoints of a trainer: when to save it, where it goes on, and how it ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from ...engine.checkpointer import AsyncCheckpointer, Place
from ...engine.commit import read_record
from ...engine.components import ComponentCheckpointHandler
from ...engine.errors import CheckpointExistsError, CheckpointNotFoundError, SaveFailedError
from ...engine.interop.places import find_checkpoint
from ...engine.interop.weights import load_weights
from ...engine.manager import CheckpointManager
from ...engine.record import RECORD
from ...engine.storage import Location, as_location
from ...integrations.options import CallbackOptions
from ...integrations.preemption import PreemptionSignal
from .trainer import NAMES, Trainer

logger = logging.getLogger("holdfast.recipes")

ITEM = "trainer"
"""The name of the item in the checkpoints, and of its folder in the directory of a step."""
POLICIES = "learner/policies"
"""The path of the policies in the trainer."""


class TrainerCheckpoints:
    """Saves a trainer after its updates, keeps the right checkpoints, and brings it back where it was.

    Args:
        directory: Where the checkpoints go: a path or a URL.
        trainer: What to save and restore.
        **arguments: When to save, what to keep and whether to resume, as for :class:`CallbackOptions`.
    """

    def __init__(self, directory: Place, trainer: Trainer, **arguments: Any) -> None:
        self._options = CallbackOptions(**arguments)
        self._trainer = trainer
        self._metrics: Mapping[str, float] = {}
        self._saved: int | None = None
        handler = ComponentCheckpointHandler(compression=self._options.compression)
        self._manager = CheckpointManager(
            directory, {ITEM: AsyncCheckpointer(handler)}, self._options.manager_options()
        )
        self._preemption = PreemptionSignal()

    def resume(self) -> None:
        """Restores the newest whole checkpoint; without any, takes the weights of ``init_from`` if that is given.

        Raises:
            CheckpointNotFoundError: ``resume="must"``, and there is no checkpoint.
            CheckpointExistsError: ``resume="never"``, and there are checkpoints.
            TreeMismatchError: The checkpoint is one of another trainer.
            OwnershipError: Another live run writes to the directory.
        """
        manager, resume = self._manager, self._options.resume
        manager.acquire()
        if resume == "never" and manager.all_steps():
            raise CheckpointExistsError(f"resume='never', but {manager.directory} holds checkpoints")
        restored = manager.restore_latest({ITEM: self._trainer})
        if restored is not None:
            self._saved = restored.step
            if restored.skipped:
                lost = ", ".join(str(step) for step, _ in restored.skipped)
                logger.warning("fell back past damaged steps (%s) in %s", lost, manager.directory)
            logger.info("resumed from step %d in %s", restored.step, manager.directory)
            return
        if resume == "must":
            raise CheckpointNotFoundError(f"resume='must', but there is no checkpoint in {manager.directory}")
        logger.info("started fresh: no checkpoint in %s", manager.directory)
        if self._options.init_from is not None:
            taken = take_weights(self._trainer, self._options.init_from)
            logger.info("took the weights from %s; all else starts fresh", taken)

    def on_step(self, metrics: Mapping[str, float]) -> bool:
        """Tells that an update is done; saves if a save is due, or if the process was asked to end.

        Args:
            metrics: What is known about the step.

        Returns:
            Whether to stop: the step is saved then.
        """
        self._metrics = metrics
        decision = self._manager.decide(self._trainer.step, metrics=metrics)
        stop = self._preemption.reached(self._trainer.step)
        if decision.save or stop:
            self._save("preempted" if stop else decision.reason)
        if stop:
            self._manager.wait_until_finished()
            logger.info("preempted: step %d is saved in %s; stopping", self._trainer.step, self._manager.directory)
        return stop

    def _save(self, reason: str) -> None:
        step = self._saved = self._trainer.step
        self._manager.save(step, {ITEM: self._trainer}, metrics=self._metrics, force=True, reason=reason)

    def __enter__(self) -> Self:
        self._preemption.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Saves the last step if that is not done yet, unless an error has ended the loop."""
        step = self._trainer.step
        try:
            if error is None and step and self._options.save_at_end and step != self._saved:
                self._save("at the end")
        finally:
            self._preemption.restore()
            try:
                self._manager.close()
            except SaveFailedError:
                if error is None:
                    raise
                # The error under way matters more; this one must not take its place.
                logger.exception("a save failed while the run was ending with %s", type(error).__name__)


def take_weights(trainer: Trainer, place: Place) -> str:
    """Gives the policies of a trainer the weights of another checkpoint; all else stays as it is.

    Args:
        trainer: The trainer.
        place: Another run's checkpoints, one of them, or the directory of its trainer or of its policies; or any
            checkpoint with the weights of one policy, which both policies then get.

    Returns:
        What was taken.
    """
    found = find_checkpoint(as_location(place))
    policies = _policies_in(found)
    if policies is not None:
        trainer.restore_from_path(policies, component=POLICIES, strict=True)
        return str(policies)
    loaded = [load_weights(place, dict(policy.state_dict())) for policy in trainer.learner.policies.values()]
    for policy, weights in zip(trainer.learner.policies.values(), loaded, strict=True):
        policy.load_state_dict(weights.tree)
    return f"{loaded[0]} for every policy"


def _policies_in(found: Location) -> Location | None:
    if not (found / RECORD).exists():
        return None
    items = read_record(found).items
    if ITEM in items:
        found = found / items[ITEM].folder
    if (found / POLICIES).is_directory():
        return found / POLICIES
    return found if set(NAMES) <= items.keys() else None
