"""DTensors over several processes: who holds what, as every process sees it, and what training leaves behind."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Process, run_processes
from tests.processes.leaf_checks import Facts, agreed, checked, described, holders

from holdfast.engine.errors import UnsupportedLeafError

pytest.importorskip("torch")


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


def spread(array: Any, mesh: Any, placements: Any) -> Any:
    import torch
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(torch.from_numpy(array), mesh, placements, src_data_rank=None)


def placed(process: Process) -> dict[str, Facts]:
    """Every placement on meshes of four processes, of arrays whose sizes the mesh divides, and of others."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ways: list[Any] = [Shard(0), Shard(1), Replicate()]
    facts = {}
    for shape in [(8, 4), (7, 5), (3, 1), (1, 9), (0, 3)]:
        array = numbers(*shape)
        for way in ways:
            facts[f"{shape} {way}"] = checked(spread(array, line, [way]), process.index, array)
        for both in itertools.product(ways, ways):
            facts[f"{shape} {both}"] = checked(spread(array, square, both), process.index, array)
    array = numbers(13, 3)
    for factor in (2, 3):
        strided = [_StridedShard(0, split_factor=factor), Replicate()]
        facts[f"in turns of {factor}"] = checked(spread(array, square, strided), process.index, array)
    crossed: Any = [_StridedShard(0, split_factor=2), Shard(0)]
    facts["crossed"] = checked(spread(numbers(8, 2), square, crossed), process.index, numbers(8, 2))
    facts["last axis"] = checked(spread(numbers(2, 8), line, [Shard(-1)]), process.index, numbers(2, 8))
    facts["scalar"] = checked(spread(numbers(), line, [Replicate()]), process.index, numbers())
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    facts_of_half, _ = checked(spread(array, half, [Shard(0)]), process.index, array)
    assert facts_of_half is not None
    first = 0 if process.index < 2 else 2
    assert [part.holders for part in facts_of_half] == [(first,), (first + 1,)]
    three = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("pp",))
    facts["on three"] = checked(spread(array, three, [Shard(0)]), process.index, array)
    small = array.astype(np.float16)
    facts["half precision"] = checked(spread(small, line, [Shard(0)]), process.index, small)
    complex_numbers = torch.complex(torch.arange(6.0), torch.arange(6.0)).to(torch.complex64)
    pairs = np.stack([np.arange(6), np.arange(6)], 1).astype(np.float16)
    halves: Any = spread(complex_numbers.numpy(), line, [Shard(0)])
    facts["complex32"] = checked(halves.to(torch.complex32), process.index, pairs)
    return facts


def test_parts_are_what_the_placements_say() -> None:
    facts = agreed(run_processes(placed, 4, backend="torch"))
    each = [(0,), (1,), (2,), (3,)]
    everybody = [(0, 1, 2, 3)]
    expected = {
        "(8, 4) S(0)": each,
        "(8, 4) R": everybody,
        "(8, 4) (Shard(dim=0), Shard(dim=1))": each,
        "(8, 4) (Replicate(), Shard(dim=1))": [(0, 2), (1, 3)],
        "(8, 4) (Shard(dim=1), Replicate())": [(0, 1), (2, 3)],
        "(3, 1) S(0)": [(0,), (1,), (2,)],  # nothing is left for the last one
        "(0, 3) S(1)": everybody,
        "in turns of 2": [(0, 1), (2, 3)] * 2,
        "in turns of 3": [(0, 1), (2, 3)] * 3,
        "crossed": [(0,), (2,), (1,), (3,)],
        "last axis": each,
        "scalar": everybody,
        "on three": each[:3],
        "complex32": each[:3],
    }
    assert {name: holders(facts[name]) for name in expected} == expected
    mesh = {"axes": [["dp", 2], ["tp", 2]]}
    assert facts["(8, 4) (Shard(dim=0), Replicate())"][1]["sharding"] == {
        "type": "DTensor",
        "mesh": mesh,
        "spec": ["dp", None],
    }
    assert facts["crossed"][1]["sharding"] == {
        "type": "DTensor",
        "mesh": mesh,
        "spec": [["dp", "tp"], None],
        "rounds": [2, 1],
    }


def network() -> Any:
    import torch

    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))


def trained(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gives the tensors of a model and of its optimizer after one step."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    slots = {
        f"{index}.{name}": tensor
        for index, state in optimizer.state_dict()["state"].items()
        for name, tensor in state.items()
    }
    return dict(model.named_parameters()), slots


def fully_sharded(process: Process) -> dict[str, Facts]:
    """FSDP2, alone and within a tensor-parallel mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    facts: dict[str, Facts] = {}

    def check(kind: str, model: Any) -> None:
        for tensors in trained(model):
            for name, tensor in tensors.items():
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                facts[f"{kind} {name}"] = checked(tensor, process.index, whole.detach().numpy())

    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    check("fsdp", model)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(network(), square["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=square["dp"])
    check("both", model)
    return facts


def test_models_and_optimizers_of_fsdp2() -> None:
    facts = agreed(run_processes(fully_sharded, 4, backend="torch"))
    each = [(0,), (1,), (2,), (3,)]
    assert holders(facts["fsdp 0.weight"]) == each
    assert holders(facts["fsdp 2.weight"]) == each[:3]
    assert holders(facts["fsdp 0.exp_avg"]) == each
    assert holders(facts["fsdp 0.step"]) is None
    assert facts["fsdp 0.weight"][1]["requires_grad"]
    assert holders(facts["both 0.weight"]) == [(0,), (2,), (1,), (3,)]
    assert holders(facts["both 2.weight"]) == [(0,), (1,), (2,), (3,)]
    assert facts["both 0.weight"][1]["sharding"]["rounds"] == [2, 1]


def data_parallel(process: Process) -> dict[str, Facts]:
    from torch.nn.parallel import DistributedDataParallel

    parameters, slots = trained(DistributedDataParallel(network()))
    return {
        name: checked(tensor, process.index, tensor.detach().numpy())
        for name, tensor in (parameters | slots).items()
    }  # fmt: skip


def test_plain_tensors_are_everywhere() -> None:
    facts = agreed(run_processes(data_parallel, 2, backend="torch"))
    assert {holders(each) is None for each in facts.values()} == {True}
    assert facts["module.0.weight"][1] == {"kind": "torch", "requires_grad": True}


def refused(process: Process) -> list[str]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh = init_device_mesh("cpu", (2,))
    wrong = [
        DTensor.from_local(torch.ones(2), mesh, [Partial()]),
        DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=torch.Size([4]), stride=(1,)),
    ]
    messages = []
    for tensor in wrong:
        with pytest.raises(UnsupportedLeafError) as caught:
            described(tensor)
        messages.append(str(caught.value).splitlines()[1])
    return messages


def test_what_cannot_be_told_is_refused() -> None:
    messages = run_processes(refused, 2, backend="torch")
    assert messages[0] == messages[1]
    assert "x: is a DTensor with Partial(sum), not summed up yet" in messages[0][0]
    assert "x: is a DTensor whose own part has shape (3,); its placements give (2,)" in messages[0][1]


def alone(process: Process) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    leaf = described(spread(numbers(4), init_device_mesh("cpu", (1,)), [Shard(0)]))
    return leaf.parts is None and leaf.volatile and leaf.pieces[0].array.shape == (4,)


def test_a_program_of_one_process_has_everything() -> None:
    assert run_processes(alone, 1, backend="torch") == [True]
