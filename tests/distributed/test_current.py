"""The coordinator of a program, which is found without side effects."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
from tests.processes.harness import Backend, Process, free_port, run_processes

from holdfast.engine.distributed import Alone, current_coordinator, next_rendezvous


def test_a_program_of_its_own_is_alone() -> None:
    assert isinstance(current_coordinator(), Alone)
    assert current_coordinator() is current_coordinator()


@pytest.mark.parametrize("imports", ["sys", "jax"])
def test_finding_it_imports_and_starts_nothing(imports: str) -> None:
    if imports != "sys":
        pytest.importorskip(imports)
    program = f"""
import {imports}, sys
from holdfast.engine.distributed import current_coordinator
before = set(sys.modules)
print(type(current_coordinator()).__name__, sorted(set(sys.modules) - before))
if {imports!r} == "jax":
    from jax._src import xla_bridge
    print(xla_bridge.backends_are_initialized())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[0] == "Alone []"
    assert "True" not in done.stdout


def of_jax(process: Process) -> list[str]:
    import jax

    found = [current_coordinator()]
    names = [next_rendezvous(found[0], "a").name]
    jax.devices()
    found.append(current_coordinator())
    names.append(next_rendezvous(found[1], "a").name)
    assert names == ["a#1", "a#2"]
    assert found[0] is found[1]
    assert found[1].process_index == jax.process_index() == process.index
    next_rendezvous(found[0], "end").barrier("end", 30)
    client = jax._src.distributed.global_state.client
    jax._src.distributed.global_state.client = None  # as after a shutdown, which would wait for the others
    found.append(current_coordinator())
    jax._src.distributed.global_state.client = client
    return [type(each).__name__ for each in found]


def of_torch(process: Process) -> list[str]:
    distributed: Any = importlib.import_module("torch.distributed")
    found = [current_coordinator()]
    distributed.barrier()
    distributed.destroy_process_group()
    found.append(current_coordinator())
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    found.append(current_coordinator())
    return [type(each).__name__ for each in found]


def of_both(process: Process) -> list[str]:
    import jax

    found = [current_coordinator()]
    rendezvous = next_rendezvous(found[0], "address")
    address = rendezvous.broadcast("port", b"127.0.0.1:%d" % free_port(), 30).decode()
    initialize: Any = jax.distributed.initialize
    initialize(address, 2, process.index, coordinator_bind_address=address)
    found.append(current_coordinator())
    return [type(each).__name__ for each in found]


@pytest.mark.parametrize(
    ("work", "backend", "kinds"),
    [
        pytest.param(of_jax, "jax", ["JaxCoordinator", "JaxCoordinator", "Alone"], id="jax, before its backend starts"),
        pytest.param(of_torch, "torch", ["TorchCoordinator", "Alone", "Alone"], id="torch, until its group is gone"),
        pytest.param(of_both, "torch", ["TorchCoordinator", "JaxCoordinator"], id="jax goes before torch"),
    ],
)
def test_the_coordinator_of_a_program(work: Any, backend: Backend, kinds: list[str]) -> None:
    if work is of_both:
        pytest.importorskip("jax")
    assert run_processes(work, 2, backend=backend) == [kinds] * 2
