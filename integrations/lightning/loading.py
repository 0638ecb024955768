"""Modules made from checkpoints, and steps for trainers that have no callback of ours."""

from __future__ import annotations

import importlib
from typing import Any, Literal, TypeVar

from ...engine.manager import best_step_in
from ...engine.steps import list_steps, newest_step
from ...engine.storage import Location, Place, as_location
from .store import read_checkpoint

Step = int | Literal["best", "latest"] | None

T = TypeVar("T")

_CORES = ("lightning.pytorch", "pytorch_lightning")


def load_checkpoint(path: Place, step: Step = None) -> dict[str, Any]:
    """Read a checkpoint into the dictionary that Lightning's own ``.ckpt`` files hold.

    ::

        model.load_state_dict(load_checkpoint("runs/x/checkpoints", 1200)["state_dict"])

    Args:
        path: A checkpoint, or a directory of steps.
        step: Which step of a directory: its number, or ``"best"``, as the run's ``best_fn`` ranks them. None and
            ``"latest"`` are the newest whole one.

    Returns:
        The dictionary; arrays are tensors on the CPU.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or none with the metric of ``best_fn``.
        OptionError: ``step="best"``, and the run ranks its checkpoints by no metric.
        DamagedCheckpointError: It does not verify.
        NoWholeCheckpointError: It is a directory of steps, and all of them are damaged.
        StateError: It was not saved from a Lightning trainer.
    """
    return read_checkpoint(_place(as_location(path), step), with_position=False)


def load_from_checkpoint(
    kind: type[T], path: Place, step: Step = None, *, strict: bool | None = None, **arguments: Any
) -> T:
    """Make a ``LightningModule`` or ``LightningDataModule`` with the hyper-parameters and the state of a checkpoint.

    As ``kind.load_from_checkpoint``, which reads Lightning's own files only::

        model = load_from_checkpoint(Model, "runs/x/checkpoints", step="best")

    Args:
        kind: The class.
        path: A checkpoint, or a directory of steps.
        step: Which step of a directory: its number, or ``"best"``, as the run's ``best_fn`` ranks them. None and
            ``"latest"`` are the newest whole one.
        strict: Whether the state must have exactly the module's keys; None takes the setting of the module.
        **arguments: Arguments of the constructor that replace saved hyper-parameters, or were not saved.

    Returns:
        The module, on the CPU.

    Raises:
        TypeError: The class is none of Lightning's.
        CheckpointNotFoundError: There is no checkpoint, or none with the metric of ``best_fn``.
        OptionError: ``step="best"``, and the run ranks its checkpoints by no metric.
        DamagedCheckpointError: It does not verify.
        StateError: It was not saved from a Lightning trainer.
        RuntimeError: The module's state has other keys or shapes, as in ``load_state_dict``.
    """
    package = next((core for core in _CORES if _is_of(kind, core)), None)
    if package is None:
        raise TypeError(f"{kind!r} is neither a LightningModule nor a LightningDataModule")
    place = _place(as_location(path), step)
    checkpoint = read_checkpoint(place, with_position=False)
    saving = importlib.import_module(f"{package}.core.saving")
    checkpoint = saving._pl_migrate_checkpoint(checkpoint, str(place))
    checkpoint.setdefault("hyper_parameters", {}).update(arguments)
    loaded: T = saving._load_state(kind, checkpoint, strict, **arguments)
    return loaded


def _is_of(kind: type, package: str) -> bool:
    try:
        core = importlib.import_module(f"{package}.core")
    except ImportError:
        return False
    return issubclass(kind, core.LightningModule | core.LightningDataModule)


def _place(location: Location, step: Step) -> Location:
    if step is None or step == "latest":
        return location
    number = best_step_in(location) if step == "best" else step
    found = newest_step(entry for entry in list_steps(location) if entry.step == number)
    return location / str(number) if found is None else found.location
