"""Small programs whose checkpoints are kept: what an earlier version wrote has to load, verify and resume.

``python tests/earlier_versions/programs.py DIRECTORY`` writes all of them with the holdfast that is installed. It uses
public names only. The arithmetic is exact (small integers and powers of two), so that a resumed run ends with the same
bits on every machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

import holdfast as hf

MIDDLE, END = 5, 12  # updates before and after the interruption

# ---- trees


def numpy_tree() -> dict[str, Any]:
    arrays = {
        np.dtype(dtype).name: np.arange(12).reshape(3, 4).astype(dtype)
        for dtype in ("bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64")
    }
    arrays |= {
        name: np.arange(6).reshape(1, 6).astype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn")
    }
    return {
        "arrays": arrays,
        "odd": {
            "a.b/c %": np.float32(1.5),
            "dates": np.array(["2026-01-01", "NaT"], "datetime64[D]"),
            "texts": np.array(["ä", "bc"]),
        },
        "empty": np.zeros((0, 3), np.float32),
        "large": np.arange(40_000, dtype=np.int32).reshape(200, 200),
        "values": [True, 7, 1 << 70, 2.5, 1 + 2j, "text", b"bytes", None],
        "nested": ({"x": ()}, []),
    }


def torch_tree() -> dict[str, Any]:
    import torch

    return {"weight": torch.arange(12.0).reshape(3, 4), "half": torch.arange(5).to(torch.bfloat16), "step": 3}


def jax_tree() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    return {
        "kernel": jnp.arange(12.0).reshape(3, 4),
        "half": jnp.arange(5, dtype=jnp.bfloat16),
        "key": jax.random.key(3),
    }


TREES: dict[str, Any] = {"numpy": numpy_tree, "torch": torch_tree, "jax": jax_tree}


def write_trees(place: Path) -> None:
    """Writes one checkpoint of each tree, and one with every option of arrays."""
    for name, tree in TREES.items():
        hf.save(place / name, tree())
    handler = hf.PyTreeCheckpointHandler(compression=3)
    arguments = {"small": hf.SaveArgs(aggregate=True), "large": hf.SaveArgs()}
    hf.Checkpointer(handler).save(place / "options", options_tree(), save_args=arguments)


def options_tree() -> dict[str, Any]:
    return {"small": np.arange(3), "large": np.arange(30_000, dtype=np.int64)}


# ---- managers


def manager_item(step: int) -> dict[str, Any]:
    return {"state": {"w": np.full((4, 3), step, np.float32), "n": step}, "facts": {"step": step}}


def open_manager(place: Path) -> hf.CheckpointManager:
    return hf.CheckpointManager(
        place,
        {
            "state": hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()),
            "facts": hf.Checkpointer(hf.JsonCheckpointHandler()),
        },
        hf.CheckpointManagerOptions(max_to_keep=2, best_fn="score", best_mode="max", keep_latest=1, step_prefix="ckpt"),
        metadata={"name": "kept"},
    )


def write_manager(place: Path) -> None:
    """Saves six steps, of which the best two, the newest and a pinned one stay."""
    with open_manager(place) as manager:
        for step in range(1, 7):
            manager.save(step, manager_item(step), metrics={"score": -abs(step - 3)})
            manager.wait_until_finished()
            if step == 1:
                manager.pin(1)


# ---- torch loops


def torch_objects() -> dict[str, Any]:
    """Returns a module with a state of its own, and an optimizer that overrides how its state is given."""
    import torch

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            self.register_buffer("seen", torch.zeros(1))

        def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(state, prefix, keep_vars)
            state[f"{prefix}number"] = 3

        def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
            state.pop(f"{prefix}number")
            super()._load_from_state_dict(state, prefix, *args)

    class Noted(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "note": 1}

    model = torch.nn.Sequential(Counting())
    return {"model": model, "optimizer": Noted(model.parameters(), lr=0.5, momentum=0.5)}


def write_torch_run(place: Path) -> None:
    import torch

    with hf.CheckpointCallback(place, save_interval_steps=1) as checkpoint:
        objects, _ = checkpoint.restore_or_initialize(torch_objects())
        for number, parameter in enumerate(objects["model"].parameters()):
            parameter.data.fill_(number)
            parameter.grad = torch.full_like(parameter, 4)
        objects["model"][0].seen.fill_(7)
        objects["optimizer"].step()
        checkpoint.on_step(1, objects)


# ---- graphs


def graph_objects() -> dict[str, Any]:
    import torch

    from holdfast import graph

    net = torch.nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.copy_(torch.arange(6.0).reshape(2, 3))
        net.bias.copy_(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    (net(torch.ones(1, 3)).sum()).backward()
    optimizer.step()
    return {
        "net": net,
        "optimizer": optimizer,
        "step": graph.Value(4),
        "alias": net,
        "notes": graph.TrackedDict({"a": [1, 2]}),
    }


def write_graphs(place: Path) -> None:
    from holdfast import graph

    graph.Checkpoint(**graph_objects()).save(place / "one")
    objects = graph_objects()
    manager = graph.CheckpointManager(graph.Checkpoint(**objects), place / "run", max_to_keep=2)
    for step in (1, 2, 3):
        objects["step"].assign(step)
        manager.save(step)


# ---- components


def make_trainer() -> Any:
    import torch

    from holdfast.components import Checkpointable

    class Policy(Checkpointable, torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(size, 2, bias=False)
            with torch.no_grad():
                self.layer.weight.copy_(torch.arange(2.0 * size).reshape(2, size))

    class Learner(Checkpointable):
        def __init__(self, size: int) -> None:
            self.policy = Policy(size)
            self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.5, momentum=0.5)
            self.updates = 0

        def update(self) -> None:
            self.optimizer.zero_grad()
            self.policy.layer.weight.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it so
            self.optimizer.step()
            self.updates += 1

    class Trainer(Checkpointable):
        def __init__(self, size: int = 3) -> None:
            self.learner = Learner(size)
            self.random = np.random.default_rng(7)
            self.seen: list[int] = []

        def train(self) -> None:
            self.seen.append(int(self.random.integers(1000)))
            self.learner.update()

    return Trainer()


def component_values(trainer: Any) -> dict[str, Any]:
    weight = trainer.learner.policy.layer.weight.detach().numpy().copy()
    return {"weight": weight, "updates": trainer.learner.updates, "seen": list(trainer.seen)}


def write_components(place: Path) -> None:
    trainer = make_trainer()
    for _ in range(MIDDLE):
        trainer.train()
    trainer.save_to_path(place)


# ---- a run of a Flax loop


class Numbers:
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.position += 1
        return self.position * self.position % 17

    def get_state(self) -> Mapping[str, Any]:
        return {"position": self.position}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def flax_run(place: Path, end: int = END) -> dict[str, Any]:
    """Trains up to an update, from the newest checkpoint if there is one; returns what it ends with."""
    import jax
    import jax.numpy as jnp
    import optax  # type: ignore[import-untyped]  # it has no types
    from flax.training.train_state import TrainState

    from holdfast.integrations.flax import CheckpointCallback

    optimizer = optax.sgd(0.5, momentum=0.5)
    create: Any = TrainState.create  # flax leaves it untyped
    state = create(apply_fn=lambda *_: None, params={"w": jnp.arange(6.0).reshape(2, 3)}, tx=optimizer)
    key, numbers = jax.random.key(1), Numbers()
    with CheckpointCallback(place, save_interval_steps=MIDDLE, save_at_end=False) as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, rng=key, data=numbers)
        key, numbers = checkpoint.extras["rng"], checkpoint.extras["data"]
        for step in range(start, end):
            key, now = jax.random.split(key)
            noise = jax.random.randint(now, (2, 3), 0, 8).astype(jnp.float32)
            state = state.apply_gradients(grads={"w": noise + next(numbers)})
            checkpoint.on_step(step + 1, state, metrics={"loss": 1.0}, rng=key, data=numbers)
    momentum = jax.tree.leaves(state.opt_state)[0]
    return {
        "w": np.asarray(state.params["w"]),
        "momentum": np.asarray(momentum),
        "position": numbers.position,
        "start": start,
    }


# ---- a run of a Lightning trainer


def lightning_run(place: Path, end: int = END) -> dict[str, Any]:
    """Trains up to an update, from the newest checkpoint if there is one; returns what it ends with."""
    import lightning.pytorch as lightning
    import torch

    from holdfast.integrations.lightning import CheckpointCallback

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1, bias=False)
            self.seen: list[float] = []
            with torch.no_grad():
                self.layer.weight.zero_()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.seen.append(float(batch[0].sum()))
            return cast("torch.Tensor", self.layer(batch[0]).sum())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)

    lightning.seed_everything(3, verbose=False)
    data = torch.utils.data.TensorDataset(torch.arange(16.0).reshape(8, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=1, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=end,
        accelerator="cpu",
        callbacks=[CheckpointCallback(place, save_interval_steps=MIDDLE, save_at_end=False)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, loader)
    return {"w": model.layer.weight.detach().numpy().copy(), "seen": model.seen[-(end - MIDDLE) :]}


# ---- two processes


def save_together(backend: str, place: Path) -> None:
    """Saves, as one of two processes that are connected, arrays divided between them."""
    if backend == "jax":
        import jax

        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(-1), ("x",))
        spec: Any = jax.sharding.PartitionSpec
        rows = jax.sharding.NamedSharding(mesh, spec("x"))
        whole = jax.sharding.NamedSharding(mesh, spec())
        tree: Any = {
            "rows": jax.make_array_from_callback((6, 4), rows, lambda at: together_values()[at]),
            "whole": jax.make_array_from_callback((6, 4), whole, lambda at: together_values()[at]),
        }
    else:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh_of_torch = init_device_mesh("cpu", (2,))
        values = torch.from_numpy(together_values())
        tree = {
            "rows": distribute_tensor(values, mesh_of_torch, [Shard(0)]),
            "whole": distribute_tensor(values, mesh_of_torch, [Replicate()]),
        }
    hf.save(place, tree)


def together_values() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(24, dtype=np.float32).reshape(6, 4)


def _one_of_two(backend: str, index: str, port: str, place: str) -> None:
    if backend == "jax":
        import jax

        jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    else:
        import torch

        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=int(index), world_size=2)
    save_together(backend, Path(place))


def write_together(place: Path) -> None:
    for backend in ("jax", "torch"):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        command = [sys.executable, __file__, "process", backend]
        environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
        both = [subprocess.Popen([*command, str(one), port, str(place / backend)], env=environment) for one in range(2)]
        assert [one.wait(120) for one in both] == [0, 0]


def write_all(place: Path) -> None:
    """Writes every kind of checkpoint, and what the two runs end with when nothing interrupts them."""
    write_trees(place / "trees")
    write_manager(place / "manager")
    write_torch_run(place / "torch")
    write_graphs(place / "graphs")
    write_components(place / "components")
    write_together(place / "together")
    for name, run in (("flax", flax_run), ("lightning", lightning_run)):
        run(place / name, MIDDLE)
        undisturbed = place / "undisturbed"
        ended = run(undisturbed, END)
        shutil.rmtree(undisturbed)
        ended.pop("start", None)
        arrays: dict[str, Any] = {key: np.asarray(value) for key, value in ended.items()}
        np.savez(place / f"{name}_end.npz", **arrays)
    for owner in place.rglob("owner.json"):
        owner.unlink()  # it names the machine


if __name__ == "__main__":
    if sys.argv[1] == "process":
        _one_of_two(*sys.argv[2:])
    else:
        write_all(Path(sys.argv[1]))
