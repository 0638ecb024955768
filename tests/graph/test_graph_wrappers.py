"""Modules in wrappers: what was saved of one restores in any other, and what stays without a value is said at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

import holdfast as hf
from holdfast import graph


def new_net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


def checkpointed(net: torch.nn.Module) -> Any:
    """Computes activations anew in the backward pass: of the whole net, and of each layer."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as activations

    wrap: Any = activations
    wrap.apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, torch.nn.Linear))
    return torch.nn.parallel.DistributedDataParallel(wrap.checkpoint_wrapper(net))


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda net: net,
    "compiled": lambda net: torch.compile(net, backend="eager"),
    "parallel": torch.nn.parallel.DistributedDataParallel,
    "compiled_parallel": lambda net: torch.compile(torch.nn.parallel.DistributedDataParallel(net), backend="eager"),
    "fabric": lambda net: Fabric(accelerator="cpu", devices=1).setup_module(net),
    "checkpointed": checkpointed,
}


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        torch.manual_seed(step)
        optimizer.zero_grad()
        net(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()


def bits(net: torch.nn.Module) -> list[bytes]:
    return [value.detach().numpy().tobytes() for value in net.state_dict().values()]


def run(wrap: Callable[[Any], Any], seed: int) -> tuple[torch.nn.Module, torch.nn.Module, Any]:
    """A net, the same as the program uses it, and its optimizer."""
    net = new_net(seed)
    used = wrap(net)
    return net, used, torch.optim.Adam(used.parameters(), 0.1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("before", WRAPPERS)
@pytest.mark.parametrize("after", WRAPPERS)
def test_a_graph_goes_on_in_another_wrapper(place: str, before: str, after: str) -> None:
    net, used, optimizer = run(WRAPPERS[before], 0)
    steps(net, optimizer, 0, 2)
    path = graph.Checkpoint(net=used, optimizer=optimizer).save(f"{place}/ckpt")
    hf.save(f"{place}/tree", {"net": used.state_dict()})
    saved = bits(net)
    steps(net, optimizer, 2, 4)

    again, wrapped, other = run(WRAPPERS[after], 1)
    graph.Checkpoint(net=wrapped, optimizer=other).restore(path).assert_consumed()
    steps(again, other, 2, 4)
    assert bits(again) == bits(net)

    like = {"net": run(WRAPPERS[after], 1)[1].state_dict()}
    found = hf.load(f"{place}/tree", like=like)["net"]
    assert list(found) == list(like["net"])
    assert [value.numpy().tobytes() for value in found.values()] == saved


def test_wrapped_roots_and_files_of_torch(tmp_path: Path) -> None:
    net = new_net(0)
    for before in ("parallel", "compiled", "compiled_parallel"):
        torch.save(WRAPPERS[before](net).state_dict(), tmp_path / f"{before}.pt")
        graph.Checkpoint(WRAPPERS[before](net)).write(tmp_path / f"{before}.graph")
        for name in (f"{before}.pt", f"{before}.graph"):
            for after in ("bare", "compiled", "fabric"):
                again = new_net(1)
                graph.Checkpoint(WRAPPERS[after](again)).read(tmp_path / name).assert_consumed()
                assert bits(again) == bits(net)
    # A module that really is called so keeps its name.
    named = torch.nn.Module()
    named.module = torch.nn.Linear(2, 2)
    graph.Checkpoint(named).write(tmp_path / "named")
    names = graph.load_checkpoint(tmp_path / "named").get_variable_to_shape_map()
    assert set(names) == {"module/weight", "module/bias"}


class Counting(torch.nn.Module):
    """Counts its batches, and says so in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.seen = 0

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}seen"] = self.seen
        state[f"{prefix}scale"] = self.layer.weight.half()

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.seen = state.pop(f"{prefix}seen")
        del state[f"{prefix}scale"]
        super()._load_from_state_dict(state, prefix, *args)


@pytest.mark.parametrize(
    ("before", "after"), [("checkpointed", "bare"), ("bare", "checkpointed"), ("compiled", "bare")]
)
def test_states_of_modules_in_wrapped_parts(place: str, before: str, after: str) -> None:
    def program(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
        outer, inner = Counting(), Counting()
        outer.module = torch.nn.Sequential(wrap(inner))  # a name that wrappers have, too
        return outer, inner

    outer, inner = program(WRAPPERS[before])
    outer.seen, inner.seen = 3, 4
    path = graph.Checkpoint(net=outer).save(f"{place}/ckpt")
    again, within = program(WRAPPERS[after])
    graph.Checkpoint(net=again).restore(path).assert_consumed()
    assert (again.seen, within.seen) == (3, 4)
    assert torch.equal(within.layer.weight, inner.layer.weight)


def test_what_stays_without_a_value_is_said_at_once(place: str, caplog: pytest.LogCaptureFixture) -> None:
    class Wrapper(torch.nn.Module):
        """A wrapper of the program's own, which holdfast does not know."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

    path = graph.Checkpoint(net=new_net(0), step=1).save(f"{place}/ckpt")
    caplog.clear()
    status = graph.Checkpoint(net=Wrapper(new_net(1)), step=0).restore(path)
    [warning] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "net/inner/0/weight" in warning.getMessage()
    assert "net/0/weight" in warning.getMessage()
    status.expect_partial()

    caplog.clear()
    graph.Checkpoint(net=Wrapper(new_net(1)), step=0).restore(path, partial=True)
    graph.Checkpoint(net=new_net(1), step=0).restore(path).assert_consumed()
    graph.Checkpoint(step=0).restore(path, select="step").assert_existing_objects_matched()
    assert not caplog.records
