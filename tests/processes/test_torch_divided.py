"""A loop of torch in two processes, with parameters that are divided between them: killed and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.processes.harness import Process, run_outcomes, run_processes

import holdfast as hf

STEPS = 6


def train(process: Process, directory: str, seed: int) -> tuple[int, list[float], list[float]]:
    """Trains to the end; returns the first step, this process's part of a weight, and the losses."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (process.count,))
    torch.manual_seed(seed)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]))
            self.b = torch.nn.Parameter(distribute_tensor(torch.randn(3), mesh, [Replicate()]))

    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    generator = torch.Generator().manual_seed(10 + process.index)  # each process draws its own
    state = {"net": net, "optimizer": optimizer}
    drawn = []
    with hf.CheckpointCallback(directory, save_interval_steps=2) as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, rng=generator)
        for step in range(start, STEPS):
            drawn.append(float(torch.rand((), generator=generator)))
            w: Any = net.w
            w.grad = DTensor.from_local(w.to_local() * 0.1 + drawn[-1], mesh, [Shard(0)])
            net.b.grad = distribute_tensor(torch.full((3,), float(step)), mesh, [Replicate()])
            optimizer.step()
            checkpoint.on_step(step + 1, state, rng=generator)
            if step + 1 == 4:
                checkpoint.manager.wait_until_finished()
                process.reached("saved")
    parts: Any = [net.w, optimizer.state[net.w]["exp_avg"], optimizer.state[net.w]["exp_avg_sq"], net.b]
    return start, [value for part in parts for value in part.detach().to_local().flatten().tolist()], drawn


def test_parameters_that_are_divided(tmp_path: Path) -> None:
    whole = run_processes(train, 2, str(tmp_path / "whole"), 1, backend="torch")
    run_outcomes(train, 2, str(tmp_path / "run"), 1, backend="torch", kill=(1, "saved"), timeout=30)
    resumed = run_processes(train, 2, str(tmp_path / "run"), 2, backend="torch")
    assert [start for start, _, _ in resumed] == [4, 4]
    assert [values for _, values, _ in resumed] == [values for _, values, _ in whole]
    assert [drawn for _, _, drawn in resumed] == [drawn[4:] for _, _, drawn in whole]
    assert resumed[0][2] != resumed[1][2]
    assert hf.verify(tmp_path / "run").ok
