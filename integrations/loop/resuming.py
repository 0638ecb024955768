"""When a run resumes, and how: the rules of ``resume=``, and the newest whole checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...engine.errors import CheckpointExistsError, CheckpointNotFoundError, TreeMismatchError
from ...engine.manager import CheckpointManager, Restored, list_steps
from ...engine.stateful import is_stream
from ...engine.storage import Location
from ..options import Resume
from .announce import announce
from .states import Extras, StateAdapter, check_names

logger = logging.getLogger("holdfast")

_CHANGED = (
    "A run resumes with the state that it had, or not at all. To go on with another model or optimizer, begin a run in "
    "another directory: init_from= takes weights whose names all agree, hf.load_transformed takes what fits."
)


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run goes on: the number of updates done, the state after them, and the restored extras by name."""

    step: int
    state: Any
    extras: dict[str, Any]


def all_steps(directory: Location) -> list[int]:
    """Return the steps in a directory, damaged ones included, in ascending order."""
    return [entry.step for entry in list_steps(directory, "")]


def check_resume(
    resume: Resume,
    steps: Sequence[int],
    directory: object,
    *,
    option: str = "resume={!r}",
    elsewhere: str = "choose another directory, delete this one",
) -> None:
    """Check that a directory is what ``resume`` expects: the rules of every callback and recipe.

    Args:
        resume: The rule.
        steps: The steps in the directory, damaged ones among them: they are a run, too.
        directory: The directory, for messages.
        option: How the user writes the option.
        elsewhere: How the user begins another run.

    Raises:
        CheckpointNotFoundError: ``"must"``, and there is no checkpoint.
        CheckpointExistsError: ``"never"``, and there are checkpoints.
    """
    auto = option.format("auto")
    if resume == "must" and not steps:
        raise CheckpointNotFoundError(
            f"{option.format(resume)}, but there is no checkpoint in {directory}; check the path, or set {auto} to "
            "start fresh when there is none"
        )
    if resume == "never" and steps:
        raise CheckpointExistsError(
            f"{option.format(resume)}, but {directory} holds {len(steps)} checkpoint(s), the newest of step "
            f"{steps[-1]}; {elsewhere}, or set {auto} to go on from there"
        )


def restore(manager: CheckpointManager, adapter: StateAdapter, state: Any, extras: Mapping[str, Any]) -> Resumed | None:
    """Restore the newest whole checkpoint, or returns None when there is none.

    Everything is read before anything is changed in place.
    """
    templates: dict[str, Any] = {adapter.item: adapter.to_tree(state)}
    if extras:
        templates |= {"extras": None, "process": None}
    try:
        restored = manager.restore_latest(templates)
    except TreeMismatchError as error:
        error.add_note(_CHANGED)
        raise
    if restored is None:
        return None
    step, values = restored.step, {}
    if extras:
        saved, fresh = _saved_extras(manager, restored, extras)
        values = Extras(adapter).restore(extras, _read_extras(manager, adapter, step, extras, saved), fresh)
    state = adapter.from_tree(state, restored.items[adapter.item])
    if restored.skipped:
        lost = ", ".join(str(skipped) for skipped, _ in restored.skipped)
        logger.warning("fell back past damaged steps (%s): resumed from step %d in %s", lost, step, manager.directory)
    else:
        announce("resumed from step %d in %s", step, manager.directory, shown=manager.process_index == 0)
    return Resumed(step, state, values)


def _saved_extras(
    manager: CheckpointManager, restored: Restored, extras: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the saved extras by name, and the names of the streams that the checkpoint has of other processes only."""
    common, own = restored.items.get("extras", {}), restored.items.get("process")
    # A process saves its own extras alone if it is the only one; they are those of process 0 then.
    has_own = own is not None or ("process" not in restored.items and manager.process_index == 0)
    if own is None and "process" in restored.items:
        other = {"process": {"process": 0}}
        own = manager.restore(restored.step, {"process": None}, restore_kwargs=other)["process"]
    fresh = [] if has_own else [name for name, extra in extras.items() if is_stream(extra)]
    if fresh:
        logger.warning(
            "step %d in %s has no random streams and places in the data of process %d, which keeps its fresh ones: %s",
            restored.step,
            manager.directory,
            manager.process_index,
            ", ".join(fresh),
        )
    return {**common, **(own or {})}, fresh


def _read_extras(
    manager: CheckpointManager, adapter: StateAdapter, step: int, extras: Mapping[str, Any], saved: dict[str, Any]
) -> dict[str, Any]:
    """Read the extras with templates again, with these; take the others as they were saved."""
    check_names(extras, saved, f"step {step} in {manager.directory}")
    templates = Extras(adapter).templates_of(extras)
    if not templates:
        return saved
    patterns = [f"{name}/**" if isinstance(saved[name], (dict, list, tuple)) else name for name in templates]
    typed = manager.restore(step, {"extras": templates}, restore_kwargs={"extras": {"select": patterns}})
    return {**saved, **typed["extras"]}
