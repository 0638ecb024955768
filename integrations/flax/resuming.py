"""Coming back from the newest whole checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...engine.errors import CheckpointExistsError, CheckpointNotFoundError, TreeMismatchError
from ...engine.manager import CheckpointManager
from ..options import Resume
from . import extras as extra_items
from .states import from_tree, to_tree

logger = logging.getLogger("holdfast")

_CHANGED = (
    "A run resumes with the state that it had, or not at all. To go on with another model or optimizer, begin a run in "
    "another directory: init_from= takes weights whose names all agree, hf.load_transformed whatever fits."
)


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run goes on.

    Attributes:
        step: The number of updates done.
        state: The state after them.
        extras: The restored extras by name.
    """

    step: int
    state: Any
    extras: dict[str, Any]


def check_resume(manager: CheckpointManager, resume: Resume) -> None:
    """Checks that the directory is what ``resume`` expects.

    Raises:
        CheckpointNotFoundError: ``resume="must"``, and there is no checkpoint.
        CheckpointExistsError: ``resume="never"``, and there are checkpoints.
        NoWholeCheckpointError: ``resume="must"``, and every checkpoint is damaged.
    """
    directory, steps = manager.directory, manager.all_steps()
    if resume == "must" and not steps:
        manager.restore_latest({})  # if there are damaged ones, says so
        raise CheckpointNotFoundError(
            f"resume='must', but there is no checkpoint in {directory}; check the path, or pass resume='auto' to "
            "start fresh when there is none"
        )
    if resume == "never" and steps:
        raise CheckpointExistsError(
            f"resume='never', but {directory} holds {len(steps)} checkpoint(s), the newest of step {steps[-1]}; "
            "choose another directory, delete this one, or pass resume='auto' to go on from there"
        )


def restore(manager: CheckpointManager, state: Any, extras: Mapping[str, Any]) -> Resumed | None:
    """Restores the newest whole checkpoint; nothing is changed in place before everything has been read.

    Args:
        manager: The manager of the directory, with the items "state", "extras" and, for several processes, "process".
        state: The template.
        extras: The extras to restore.

    Returns:
        Where to go on, or None when there is no checkpoint.
    """
    templates: dict[str, Any] = {"state": to_tree(state)}
    if extras:
        templates |= {"extras": None, "process": None}
    try:
        restored = manager.restore_latest(templates)
    except TreeMismatchError as error:
        error.add_note(_CHANGED)
        raise
    if restored is None:
        return None
    step = restored.step
    saved = {**restored.items["extras"], **restored.items.get("process", {})} if extras else {}
    found = _read_extras(manager, step, extras, saved) if extras else {}
    values = extra_items.restore(extras, found)
    state = from_tree(state, restored.items["state"])
    if restored.skipped:
        lost = ", ".join(str(skipped) for skipped, _ in restored.skipped)
        logger.warning("fell back past damaged steps (%s): resumed from step %d in %s", lost, step, manager.directory)
    else:
        logger.info("resumed from step %d in %s", step, manager.directory)
    return Resumed(step, state, values)


def _read_extras(
    manager: CheckpointManager, step: int, extras: Mapping[str, Any], saved: dict[str, Any]
) -> dict[str, Any]:
    """Reads those extras again that have templates; the others are taken as they were saved."""
    extra_items.check_names(extras, saved, f"step {step} in {manager.directory}")
    templates = extra_items.templates_of(extras)
    if not templates:
        return saved
    patterns = [f"{name}/**" if isinstance(saved[name], (dict, list, tuple)) else name for name in templates]
    typed = manager.restore(step, {"extras": templates}, restore_kwargs={"extras": {"select": patterns}})
    return {**saved, **typed["extras"]}
