"""Parameters that are on one axis of a mesh only, beside others that are on two: saved once, and loaded anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.processes.harness import Process, run_processes
from tests.processes.meshes import distribute, torch_mesh

import holdfast as hf

torch: Any = pytest.importorskip("torch")
STEPS = 2


def new_model(seed: int) -> Any:
    torch.manual_seed(seed)
    layers = [torch.nn.LayerNorm(6), torch.nn.Linear(6, 10), torch.nn.Linear(10, 6), torch.nn.Linear(6, 3)]
    return torch.nn.Sequential(*layers)


def new_program(seed: int, shape: tuple[int, int] | None = None) -> dict[str, Any]:
    """A norm under FSDP2 alone, two layers under both, and one under tensor parallelism alone."""
    model = new_model(seed)
    if shape is not None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = torch_mesh(*shape, names=("dp", "tp"))
        plan: Any = {"1": ColwiseParallel(), "2": RowwiseParallel(), "3": ColwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        for layer in list(model)[:3]:
            fully_shard(layer, mesh=mesh["dp"])
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.1, foreach=False)}


def whole(program: dict[str, Any]) -> dict[str, Any]:
    state = program["optimizer"].state
    found = {}
    for name, one in program["model"].named_parameters():
        for key, value in {"value": one, **state[one]}.items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name}.{key}"] = value.detach().clone()
    return found


def differing(process: Process, program: dict[str, Any]) -> list[str]:
    """Changes copies of one process along either axis of the mesh; returns what is said to differ."""
    tree = dict(program["model"].state_dict())
    hf.processes.check_replicas(tree, timeout_secs=20)
    with torch.no_grad():
        if process.index == 1:  # of the norm under FSDP2 alone
            program["model"][0].weight.to_local()[-1] += 1
        if process.index == 3:  # of the layer under tensor parallelism alone
            program["model"][3].weight.to_local()[0] += 1
    with pytest.raises(hf.TreeMismatchError) as raised:
        hf.processes.check_replicas(tree, timeout_secs=20)
    return list(raised.value.differences)


def train(process: Process, path: str) -> tuple[dict[str, Any], list[str]]:
    program = new_program(1, (2, 2))
    with hf.CheckpointCallback(path, save_interval_steps=1) as checkpoint:
        checkpoint.restore_or_initialize(program)
        for step in range(1, STEPS + 1):
            for number, one in enumerate(program["model"].parameters()):
                gradient = torch.full(one.shape, 0.5 * step + number) + torch.arange(one.shape[0]).view(
                    -1, *[1] * (one.ndim - 1)
                )
                one.grad = distribute(gradient, one.device_mesh, *one.placements)
            program["optimizer"].step()
            checkpoint.on_step(step, program)
    saved = whole(program)
    for shape in ((2, 2), (4, 1), (1, 4)):
        again = new_program(2, shape)
        with hf.CheckpointCallback(path, save_at_end=False) as checkpoint:
            _, start = checkpoint.restore_or_initialize(again)
        assert start == STEPS
        found = whole(again)
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved)
    return {name: value.numpy() for name, value in saved.items()}, differing(process, program)


def test_parameters_on_one_axis_of_a_mesh(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    ended = run_processes(train, 4, path, backend="torch")
    saved = ended[0][0]
    expected = [
        "0.weight: process 0 has other values than process 1",
        "3.weight: process 1 has other values than process 3",
    ]
    assert [differences for _, differences in ended] == [expected] * 4
    program = new_program(3)
    with hf.CheckpointCallback(path, save_at_end=False) as checkpoint:
        _, start = checkpoint.restore_or_initialize(program)
    assert start == STEPS
    found = whole(program)
    assert found.keys() == saved.keys()
    assert all((found[name].numpy() == saved[name]).all() for name in saved)


def save_stages(process: Process, path: str) -> str:
    """Two stages of a pipeline that call different parameters by the same name."""
    from torch.distributed.tensor import Shard

    mesh = torch_mesh(2, 2, names=("pp", "dp"))
    weight = distribute(torch.full((4, 2), float(process.index // 2)), mesh["dp"], Shard(0))
    with pytest.raises((hf.TreeMismatchError, hf.errors.PeerFailedError)) as raised:
        hf.save(path, {"weight": weight})
    with pytest.raises(hf.TreeMismatchError, match="process 2 has another tree than process 0"):
        hf.processes.check_replicas({"weight": weight}, timeout_secs=20)
    return str(raised.value)


def test_stages_of_a_pipeline_are_not_taken_for_copies(tmp_path: Path) -> None:
    for message in run_processes(save_stages, 4, str(tmp_path / "x"), backend="torch"):
        assert "weight: process 0 has float32[4, 2]" in message
