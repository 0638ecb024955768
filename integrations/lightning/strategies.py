"""Strategies of Lightning: which ones the callback can save, and what has to be known of them."""

from __future__ import annotations

import subprocess
from typing import Any

from ...engine.errors import StateError

_SAVE_BY_THEMSELVES = {"FSDPStrategy", "DeepSpeedStrategy"}
_OWN_PROCESSES = {"XLAStrategy"}  # a DDPStrategy by descent, but not connected by torch.distributed

_SHARDED = "ModelParallelStrategy"

_released: list[subprocess.Popen[bytes]] = []


def check_strategy(trainer: Any) -> None:
    """Checks that the callback can save what a strategy holds.

    Args:
        trainer: The trainer.

    Raises:
        StateError: It cannot; says which strategies work.
    """
    strategy = trainer.strategy
    name = type(strategy).__name__
    works = "It works with one process, and in several with strategy='ddp' or ModelParallelStrategy (FSDP2)"
    if not can_save(strategy):
        raise StateError(
            f"CheckpointCallback cannot save what {name} holds in its {strategy.world_size} process(es). {works}; "
            f"ModelCheckpoint saves {name}"
        )
    if is_sharded(strategy) and not strategy._save_distributed_checkpoint:
        raise StateError(
            f"{name}(save_distributed_checkpoint=False) gathers everything in one process, for which the callback "
            "has no use: leave it out. What the processes save together loads in any number of them, and in one"
        )
    if type(getattr(strategy, "_ddp_comm_state", None)).__name__ == "PostLocalSGDState":
        raise StateError(
            f"CheckpointCallback cannot save a {name} that averages models (PostLocalSGDState), as every process has "
            f"parameters of its own between two averages. {works}"
        )


def can_save(strategy: Any) -> bool:
    """Returns whether the processes of a strategy hold what a checkpoint needs in a way that is known here."""
    kinds = _kinds(strategy)
    if kinds & _SAVE_BY_THEMSELVES:
        return False
    return strategy.world_size == 1 or bool(kinds & {"DDPStrategy", _SHARDED} and not kinds & _OWN_PROCESSES)


def is_sharded(strategy: Any) -> bool:
    """Returns whether parameters are DTensors, which the strategy saves and loads by itself."""
    return _SHARDED in _kinds(strategy)


def keeps_own_buffers(strategy: Any) -> bool:
    """Returns whether each process goes on with buffers of its own, rather than with those of process 0."""
    options = getattr(strategy, "_ddp_kwargs", {"broadcast_buffers": False})
    return strategy.world_size > 1 and not options.get("broadcast_buffers", True)


def own_buffers(module: Any) -> dict[str, Any]:
    """Returns the buffers that this process has, by name, but for those that lie divided among processes."""
    return {name: value for name, value in module.named_buffers() if not hasattr(value, "placements")}


def replicas(strategy: Any) -> int:
    """Returns among how many processes the training data is divided."""
    if strategy.world_size == 1:
        return 1
    return int(strategy.distributed_sampler_kwargs["num_replicas"])


def release_children(trainer: Any) -> None:
    """Lets a run end in all of its processes by itself.

    A trainer that has started the others watches them, and kills all that are left, itself too, as soon as one has
    ended with a status other than 0, which after SIGTERM all of them do.
    """
    processes = getattr(trainer.strategy.launcher, "procs", None)
    if isinstance(processes, list):
        _released.extend(processes)  # Python would complain of processes that are forgotten while they run
        processes.clear()


def _kinds(strategy: Any) -> set[str]:
    """Returns the names of a strategy's classes: those of two packages are called alike."""
    return {kind.__name__ for kind in type(strategy).__mro__}
