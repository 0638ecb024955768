"""Runs with a mirror, for processes that are killed: a loop of jax, and a Lightning trainer."""

from __future__ import annotations

import os
from typing import Any

from tests.processes.harness import Process

import holdfast as hf
from holdfast.engine.checkpoint.commit import PendingCheckpoint
from holdfast.engine.storage import object_store

TOTAL = 12


def prepare(process: Process, environment: dict[str, str], mirror: str) -> None:
    """Lets the process find the store and give up soon, and die before it commits the second upload."""
    os.environ.update(environment)
    object_store.RETRIES = 1
    commit = PendingCheckpoint.commit
    arrived: list[int] = []

    def dying(self: PendingCheckpoint, record: Any) -> None:
        if not self.location.url.startswith(mirror):
            commit(self, record)
            return
        if arrived:
            process.reached("in the middle of an upload")
        commit(self, record)
        arrived.append(record.step)

    PendingCheckpoint.commit = dying  # type: ignore[method-assign]


def wait_for(manager: hf.CheckpointManager, what: str) -> None:
    """Waits until something is true of the mirror."""
    mirror = manager._mirror
    assert mirror is not None
    wanted = {
        "it has a step": lambda: mirror.status().step is not None,
        "it has failed": lambda: mirror.status().error is not None,
    }
    with mirror._wake:
        assert mirror._wake.wait_for(wanted[what], 60), mirror.status()


def jax_loop(
    process: Process,
    directory: str,
    mirror: str,
    environment: dict[str, str],
    until: tuple[str, ...] = ("it has a step",),
) -> dict[str, Any]:
    """Trains to the end, or to the middle, where it waits for the mirror and dies.

    Two things to wait for are awaited one after the other, the first one before step 6 is saved: a mirror that is
    behind leaves out the steps that are not the newest any more.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    prepare(process, environment, mirror)

    @jax.jit
    def update(state: dict[str, Any]) -> dict[str, Any]:
        key, now = jax.random.split(state["key"])
        gradient = state["w"] * jax.random.normal(now, state["w"].shape) + 0.1
        moment = 0.9 * state["m"] + gradient
        return {"w": state["w"] - 0.01 * moment, "m": moment, "key": key}

    fresh = {"w": jnp.ones((40, 30)), "m": jnp.zeros((40, 30)), "key": jax.random.key(0)}
    with hf.CheckpointCallback(
        directory, save_interval_steps=2, max_to_keep=2, mirror=hf.Mirror(mirror, max_to_keep=2)
    ) as checkpoint:
        state, start = checkpoint.restore_or_initialize(fresh)
        for step in range(start, TOTAL):
            state = update(state)
            checkpoint.on_step(step + 1, state)
            if process.kill is not None and step == 4 and until[1:]:
                wait_for(checkpoint.manager, until[0])
            if process.kill is not None and step == 8:
                wait_for(checkpoint.manager, until[-1])
                process.reached("after some steps")
    return {"start": start, "final": {name: np.asarray(state[name]).tobytes() for name in ("w", "m")}}


def lightning_fit(
    process: Process,
    directory: str,
    mirror: str,
    environment: dict[str, str],
    until: str = "it has a step",
    seed: int = 1,
) -> dict[str, Any]:
    """The same with a trainer."""
    import lightning.pytorch as lightning
    from tests.integrations.lightning import program

    prepare(process, environment, mirror)

    class Dies(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 9 and process.kill is not None:
                wait_for(trainer.checkpoint_callback.manager, until)
                process.reached("after some steps")

    options = {"save_interval_steps": 2, "max_to_keep": 2, "mirror": mirror}
    outcome = program.run(directory, checkpoint=options, callbacks=(Dies(),), seed=seed)
    return {"start": outcome.recorder.first_step, "final": outcome.final}
