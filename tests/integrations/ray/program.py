"""A run of TorchTrainer with two workers, as the tests and their faults see it: ``program.py STORAGE KIND``.

The faults: ``none``; ``kill`` and ``term`` send SIGKILL or SIGTERM to the second worker at step 7, once; ``driver``
kills the driver there; ``drain`` announces that the node is taken away; ``keep`` has Ray keep two checkpoints, and
``own`` the callback. ``given`` is ``kill`` on a storage that is a file system of the program's own. ``jax`` is a run of
``JaxTrainer`` without a fault, and ``jax-kill`` one in which the second worker is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

STEPS = 12


def train(config: dict[str, Any]) -> None:
    import ray.train
    import torch
    import torch.distributed as dist

    from holdfast.integrations.ray import CheckpointCallback, run_directory

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    rank = ray.train.get_context().get_world_rank()
    directory = run_directory()
    with CheckpointCallback(directory, save_interval_steps=2, **config["options"]) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer})
        known = ray.train.get_checkpoint()
        with Path(config["storage"], f"starts.{rank}").open("a") as file:
            file.write(f"{start} {known and Path(known.path).name}\n")
        step = start
        while step < STEPS:
            batch = torch.randn(16, 8)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            step += 1
            if step == 7 and rank == 1:
                fault(config)
            outcome = checkpoint.on_step(step, state, metrics={"loss": loss.item()})
            if outcome.should_stop:
                break
            if config["fault"] in ("term", "drain") and step >= 8 and start == 0:
                wait_for_notice(checkpoint, rank)


def train_jax(config: dict[str, Any]) -> None:
    import jax
    import jax.numpy as jnp
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    from holdfast.integrations.ray import CheckpointCallback, run_directory

    rank = ray.train.get_context().get_world_rank()
    jax.distributed.initialize(broadcast_from_rank_zero(f"localhost:{free_port()}"), 2, rank)
    parts: Any = jax.sharding.PartitionSpec
    sharding = jax.sharding.NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), parts("data"))
    state = {"w": jax.device_put(jnp.zeros(64), sharding), "key": jax.random.key(0)}
    update = jax.jit(lambda w, key: 2 * w + jax.random.normal(key, w.shape), out_shardings=sharding)
    with CheckpointCallback(run_directory(), save_interval_steps=2) as checkpoint:
        state, start = checkpoint.restore_or_initialize(state)
        with Path(config["storage"], f"starts.{rank}").open("a") as file:
            file.write(f"{start}\n")
        for step in range(start + 1, STEPS + 1):
            key, drawn = jax.random.split(state["key"])
            state = {"w": update(state["w"], drawn), "key": key}
            if step == 7 and rank == 1:
                fault(config)
            if checkpoint.on_step(step, state, metrics={"loss": float(step)}).should_stop:
                break


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def wait_for_notice(checkpoint: Any, rank: int) -> None:
    """Return on the second worker when it has the notice, so that the steps that are left do not end before it."""
    import time

    until = time.monotonic() + 30
    while rank == 1 and not checkpoint.preempted and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.3)  # for the workers to agree


def fault(config: dict[str, Any]) -> None:
    done = Path(config["storage"], "done")
    if config["fault"] in ("none", "keep", "jax") or done.exists():
        return
    done.touch()
    if config["fault"] == "driver":
        os.kill(config["driver"], signal.SIGKILL)
        signal.pause()
    if config["fault"] == "drain":
        drain()
        return
    os.kill(os.getpid(), signal.SIGTERM if config["fault"] == "term" else signal.SIGKILL)


def drain() -> None:
    """Announce that the node is taken away in a minute, as a cloud's notice reaches Ray."""
    import time

    import ray
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    node = ray.get_runtime_context().get_node_id()
    deadline = int((time.time() + 60) * 1000)
    print("DRAIN", client.drain_node(node, DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, "a notice", deadline))


def folder_as_file_system(folder: Path) -> Any:
    """Return a file system of pyarrow that Ray sends to the workers, and that no URL names."""
    import pyarrow.fs
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    inside = DirFileSystem(str(folder), fs=LocalFileSystem(auto_mkdir=True))
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(inside))


def main(storage: str, kind: str) -> None:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.jax import JaxTrainer

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    place: dict[str, Any] = {"storage_path": storage}
    if kind == "given":
        place = {"storage_path": Path(storage).name, "storage_filesystem": folder_as_file_system(Path(storage).parent)}
    fault, options = ("none", {"max_to_keep": 2}) if kind == "own" else (kind, {})
    settings = {"storage": storage, "fault": fault, "driver": os.getpid(), "options": options}
    kept = CheckpointConfig(num_to_keep=2 if kind == "keep" else None)
    trained = (JaxTrainer, train_jax) if kind.startswith("jax") else (TorchTrainer, train)
    trainer = trained[0](
        trained[1],
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", **place, failure_config=FailureConfig(max_failures=2), checkpoint_config=kept),
    )
    result = trainer.fit()
    print("RESULT", result.metrics, result.checkpoint and result.checkpoint.path)


if __name__ == "__main__":
    main(*sys.argv[1:])
