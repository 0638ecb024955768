"""One process of a training run of several that will be signalled at a certain moment; see ``kills_cases.py``.

It tells the parent, line by line, what it has reached:

    resumed STEP DIGEST    the step that the run begins with, and what was restored
    started                all processes have started
    entered                it takes signals now
    step STEP DIGEST       a step is done
    leaving                all steps are done; when the callback has ended, it takes no signals any more
    left STATUS            the callback has ended, and the exit status will be this
    reached PHASE          the moment at which this process was told to wait for the parent
    error TEXT             the exception with which it ends
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.engine.arrays import TreeWriter
from holdfast.engine.checkpoint.commit import PendingCheckpoint
from holdfast.engine.distributed import ProcessGroup, Rendezvous
from holdfast.engine.manager.directory import RunDirectory
from holdfast.engine.manager.local_tier import LocalTier
from holdfast.engine.storage import Location

STEPS = 10
SAVE_EVERY = 4  # steps between two saves in the directory; a local step is saved at each
WIDTH = 16  # features of the model; a multiple of every number of processes
START_SECONDS = 60.0  # within which all processes must have started and compiled

# The class and the method that is called at a moment, and whether the moment is after the call.
CALLS: dict[str, tuple[type, Callable[..., Any], bool]] = {
    "taking the directory over": (hf.CheckpointManager, hf.CheckpointManager.acquire, False),
    "asking for the steps": (ProcessGroup, ProcessGroup.decide, False),
    "restoring": (RunDirectory, RunDirectory.open_step, False),
    "agreeing on what was restored": (ProcessGroup, ProcessGroup.first, False),
    "snapshot": (TreeWriter, TreeWriter.__init__, False),
    "writing": (Location, Location.write_data_files, False),
    "written": (Location, Location.write_data_files, True),
    "at the barrier": (Rendezvous, Rendezvous.gather, False),
    "after the barrier": (Rendezvous, Rendezvous.gather, True),
    "merging": (TreeWriter, TreeWriter.merge, False),
    "at the commit": (PendingCheckpoint, PendingCheckpoint.commit, False),
    "after the commit": (PendingCheckpoint, PendingCheckpoint.commit, True),
    "sending copies": (LocalTier, LocalTier._send_copies, False),
    "copies sent": (LocalTier, LocalTier._send_copies, True),
}
LOCAL_ONLY = ("sending copies", "copies sent")
LOOP = ("before the callback", "before the restore", "before the first step", "between saves", "before the end")
RESUMING = ("asking for the steps", "restoring", "agreeing on what was restored")
PRIMARY_ONLY = ("merging", "at the commit", "after the commit")
ON_A_SAVE = ("snapshot", "writing", "written", "at the barrier", "after the barrier", *PRIMARY_ONLY, *LOCAL_ONLY)


@dataclass(frozen=True, slots=True)
class Order:
    """The moment at which a process waits for the parent: when it first comes to a phase from a step on."""

    phase: str
    step: int


class Member:
    """One process: its place among the others, and its pipes to the parent.

    Args:
        index: Its index.
        count: The number of processes.
        directory: The directory of the run.
        port: Where process 0 hosts the store.
        barrier: The barrier timeout, in seconds.
        order: Where to wait for the parent, if anywhere.
        says: The pipe for lines to the parent.
        hears: The pipe through which the parent lets it continue.
        step_seconds: How long it sleeps at each step.
        is_local: Whether each process is a host, which saves every step locally, and the run has a mirror.
    """

    def __init__(
        self, index: int, count: int, directory: Path, port: int, barrier: float, order: Order | None,
        says: int, hears: int, step_seconds: float, is_local: bool = False,
    ) -> None:  # fmt: skip
        self.index, self.count, self.directory, self.port, self.barrier = index, count, directory, port, barrier
        self._order, self._says, self._hears = order, says, hears
        self._step = -1  # the step that it does; 0 before the first one, negative before it begins
        self._step_seconds = step_seconds
        self._places: dict[str, Any] = {}
        if is_local:
            host = f"host{index}"
            local = hf.Local(local_place(directory, index), every=1, host=host)
            self._places = {"local": local, "mirror": f"{directory}.mirror"}
        self.batches = Batches(index)

    def say(self, line: str) -> None:
        """Tell the parent a line."""
        os.write(self._says, f"{' | '.join(line.splitlines())[:2000]}\n".encode())

    def reached(self, phase: str) -> None:
        """Wait for the parent, if this is the moment of the order."""
        order = self._order
        if order is not None and phase == order.phase and self._step >= order.step:
            self._order = None
            self.say(f"reached {phase}")
            os.read(self._hears, 1)

    def mark_calls(self) -> None:
        """Have the function of the order's phase report its calls."""
        if self._order is None or self._order.phase not in CALLS:
            return
        phase = self._order.phase
        owner, function, after = CALLS[phase]

        def marked(*arguments: Any, **options: Any) -> Any:
            if not after:
                self.reached(phase)
            found = function(*arguments, **options)
            if after:
                self.reached(phase)
            return found

        setattr(owner, function.__name__, marked)

    def run(self, train: Callable[[Member], int]) -> int:
        """Train, and return the exit status."""
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        self.mark_calls()
        try:
            return train(self)
        except SystemExit as end:  # The loop has ended by itself in the steps after a preemption.
            self.say(f"left {end.code}")
            return int(end.code or 0)
        except BaseException as error:
            self.say(f"error {type(error).__name__}: {error}")
            raise

    def loop(self, state: Any, update: Callable[[Any, np.ndarray], Any], digest: Callable[[Any], str]) -> int:
        """Train to the end, or to a preemption; return the exit status."""
        # On a busy machine, the processes come here up to some seconds one after the other.
        ProcessGroup("kills", None, START_SECONDS).barrier("start")
        self.say("started")
        self._step = 0
        self.reached("before the callback")
        with hf.CheckpointCallback(
            self.directory,
            save_interval_steps=SAVE_EVERY,
            max_to_keep=None,
            barrier_timeout_secs=self.barrier,
            **self._places,
        ) as checkpoint:
            self.say("entered")
            self.reached("before the restore")
            state, start = checkpoint.restore_or_initialize(state, batches=self.batches)
            self.say(f"resumed {start} {digest(state)}")
            self.reached("before the first step")
            for step in range(start + 1, STEPS + 1):
                self._step = step
                state = update(state, next(self.batches))
                time.sleep(self._step_seconds)
                self.say(f"step {step} {digest(state)}")
                stops = checkpoint.on_step(step, state, batches=self.batches).should_stop
                self.reached("between saves")
                if stops:
                    break
            self.say("leaving")
            self.reached("before the end")
        self.say(f"left {checkpoint.exit_status}")
        return checkpoint.exit_status


def local_place(directory: Path, index: int) -> Path:
    """Return the local folder of a process that is a host."""
    return directory.with_name(f"{directory.name}.host{index}")


class Batches:
    """Rows of random numbers: another stream in each process."""

    def __init__(self, index: int) -> None:
        self._index, self._position = index, 0

    def __next__(self) -> np.ndarray:
        self._position += 1
        return np.random.default_rng((self._index, self._position)).standard_normal((2, WIDTH), dtype=np.float32)

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]


def train_torch(member: Member) -> int:
    """Train a torch model with dropout, replicated, its gradients reduced over gloo."""
    import torch

    distributed = torch.distributed
    distributed.init_process_group(
        "gloo",
        f"tcp://127.0.0.1:{member.port}",
        timedelta(seconds=member.barrier),
        rank=member.index,
        world_size=member.count,
    )
    distributed.barrier()  # in that call, torch waits without a deadline for a store that is silent
    # On a busy machine, several threads divide an update of Adam in other ways, with other bits at the borders.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4096), torch.nn.Dropout(0.3), torch.nn.Linear(4096, 1))
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(member.index + 1)

    def update(state: Any, batch: np.ndarray) -> Any:
        model(torch.from_numpy(batch)).square().mean().backward()
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        return state

    def digest(_state: Any) -> str:
        parts = [*model.parameters(), torch.get_rng_state()]
        parts += [value for moments in optimizer.state.values() for value in moments.values()]
        return hashed([part.detach().numpy() for part in parts], member.batches)

    status = member.loop({"model": model, "optimizer": optimizer}, update, digest)
    distributed.destroy_process_group()
    return status


def train_jax(member: Member) -> int:
    """Train a linear model in jax whose weights are divided among the processes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as Spec

    spec: Any = Spec
    global_array: Any = jax.make_array_from_process_local_data
    shut_down: Any = jax.distributed.shutdown
    configure: Any = jax.config.update
    configure("jax_compilation_cache_dir", str(member.directory.with_name("compiled")))
    configure("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.distributed.initialize(
        f"127.0.0.1:{member.port}",
        member.count,
        member.index,
        coordinator_bind_address=f"127.0.0.1:{member.port}",
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=round(1.6 * member.barrier),
        initialization_timeout=60,
    )
    mesh = Mesh(np.array(jax.devices()), ("data",))
    divided, whole = NamedSharding(mesh, spec("data")), NamedSharding(mesh, spec())

    def fresh() -> Any:
        weights = jax.random.normal(jax.random.key(0), (WIDTH, 4096))
        return {
            "w": weights,
            "velocity": jnp.zeros_like(weights),
            "key": jax.random.key(1),
            "count": jnp.zeros((), int),
        }

    places = {"w": divided, "velocity": divided, "key": whole, "count": whole}
    state = jax.jit(fresh, out_shardings=places)()

    def loss(weights: Any, batch: Any, key: Any) -> Any:
        return jnp.square((batch + 0.1 * jax.random.normal(key, batch.shape)) @ weights).mean()

    def step(state: Any, batch: Any) -> Any:
        key, noise = jax.random.split(state["key"])
        velocity = 0.9 * state["velocity"] + jax.grad(loss)(state["w"], batch, noise)
        return {"w": state["w"] - 0.01 * velocity, "velocity": velocity, "key": key, "count": state["count"] + 1}

    batch = global_array(divided, np.zeros((2, WIDTH), np.float32))
    compiled = jax.jit(step, out_shardings=places).lower(state, batch).compile()

    def update(state: Any, batch: np.ndarray) -> Any:
        return compiled(state, global_array(divided, batch))

    def digest(state: Any) -> str:
        plain = {**state, "key": jax.random.key_data(state["key"])}
        parts = [shard.data for leaf in jax.tree.leaves(plain) for shard in leaf.addressable_shards]
        return hashed([np.asarray(part) for part in parts], member.batches)

    status = member.loop(state, update, digest)
    shut_down()
    return status


def hashed(parts: list[np.ndarray], batches: Batches) -> str:
    """Return a digest of arrays and of the place in the data."""
    found = hashlib.sha256(repr(batches.state_dict()).encode())
    for part in parts:
        found.update(part.tobytes())
    return found.hexdigest()[:16]


TRAIN: dict[str, Callable[[Member], int]] = {"torch": train_torch, "jax": train_jax}
