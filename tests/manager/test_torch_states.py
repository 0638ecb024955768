"""What a manager restores of torch's state dicts: what ``load_state_dict`` takes, with a template and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "groups": lambda parameters: torch.optim.Adam([{"params": [one], "lr": 0.1} for one in parameters], amsgrad=True),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=1.0, max_iter=3),
}


class Program:
    """A model, its optimizer and a schedule, as a loop has them."""

    def __init__(self, make: Make, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.optimizer = make(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def train(self, steps: int) -> None:
        data = torch.linspace(-1, 1, 24).reshape(8, 3)

        def closure() -> Any:
            self.optimizer.zero_grad()
            loss: Any = self.model(data).square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            self.optimizer.step(closure)
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [self.optimizer.state_dict()],
            "schedule": self.schedule.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizers"][0])
        self.schedule.load_state_dict(state["schedule"])

    def bits(self) -> list[bytes]:
        return [value.detach().numpy().tobytes() for value in self.model.state_dict().values()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_program_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    program = Program(OPTIMIZERS[name], 0)
    program.train(3)
    with hf.CheckpointManager(tmp_path) as manager:
        manager.save(3, program.state())
    torch.save(program.state(), tmp_path / "theirs.pt")
    program.train(2)
    stepped = Program(OPTIMIZERS[name], 2)
    stepped.train(1)
    manager = hf.CheckpointManager(tmp_path)
    loads: tuple[Callable[[Any], Any], ...] = (
        lambda template: manager.restore(3),
        lambda template: manager.restore(3, template),
        lambda template: manager.restore(),
        lambda template: hf.load(tmp_path / "3", like=template),
        lambda template: hf.load(tmp_path / "theirs.pt", like=template),
    )
    for load in loads:
        fresh = Program(OPTIMIZERS[name], 1)
        fresh.load(load(fresh.state()))
        fresh.train(2)
        assert fresh.bits() == program.bits()
    if name != "lbfgs":  # whose history has another length
        stepped.load(manager.restore(3, stepped.state()))
        stepped.train(2)
        assert stepped.bits() == program.bits()


def test_only_tensors_of_torch_become_tensors(tmp_path: Path) -> None:
    began = np.array(["2026-01-01"], "datetime64[D]")
    optimizer = {"state": {0: {"began": began, "m": torch.ones(2)}}, "param_groups": []}
    tree = {"tensor": torch.ones(2, dtype=torch.bfloat16), "array": np.ones(2), "number": 3, "optimizer": optimizer}
    with hf.CheckpointManager(tmp_path) as manager:
        manager.save(1, tree)
        found = manager.restore(1)
        fresh: Any = manager.restore(1, {**tree, "optimizer": {"state": {}, "param_groups": []}})
    assert (type(found["tensor"]), found["tensor"].dtype) == (torch.Tensor, torch.bfloat16)
    assert (type(found["array"]), found["number"]) == (np.ndarray, 3)
    assert isinstance(hf.load(tmp_path)["tensor"], np.ndarray)
    values = fresh["optimizer"]["state"][0]
    assert values["began"].tolist() == began.tolist(), "an optimizer without steps takes what torch has no dtype for"
    assert torch.equal(values["m"], torch.ones(2))


def test_what_does_not_fit_is_still_named(tmp_path: Path) -> None:
    program = Program(OPTIMIZERS["adamw"], 0)
    program.train(1)
    hf.save(tmp_path / "1", program.state())
    template = Program(OPTIMIZERS["adamw"], 1).state()
    template["optimizers"][0]["param_groups"][0]["new"] = 1
    with pytest.raises(hf.TreeMismatchError, match=r"optimizers/0/param_groups/0/new: expected int"):
        hf.load(tmp_path / "1", like=template)
    template = {**Program(OPTIMIZERS["adamw"], 1).state(), "optimizers": []}
    with pytest.raises(hf.TreeMismatchError, match=r"optimizers/0/state/0/exp_avg: not in the template"):
        hf.load(tmp_path / "1", like=template)
