"""Restores of connected processes that read each byte once, and hand it on to the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.damage import flip
from tests.dtypes import DTYPES, EMPTY
from tests.equality import assert_same
from tests.processes.harness import Backend, Process, run_outcomes, run_processes, told
from tests.processes.meshes import abstract, distribute, pieces_of, torch_mesh

import holdfast as hf
from holdfast.engine.arrays import TreeReader
from holdfast.engine.distributed.all_gather import JaxTransport, TorchTransport

LAYOUT = hf.Layout(chunk_bytes=1 << 16, data_file_bytes=1 << 20)
NAN_WITH_PAYLOAD = np.array([0x7FA12345, 0xFFC00001, 0x80000000], np.uint32).view(np.float32)
SLACK = 1.02  # gaps between chunks that are read with them


class Counting(hf.PyTreeCheckpointHandler):
    """Notes the bytes that the last restore has read of the arrays."""

    shares_reads = True
    bytes_read = 0

    def restore(self, directory: Any, item: Any = None, *, files: Any = None, **kwargs: Any) -> Any:
        reader = TreeReader(directory, files)
        before = reader.bytes_read
        try:
            return super().restore(directory, item, files=files, source=reader, **kwargs)
        finally:
            self.bytes_read = reader.bytes_read - before


def manager(directory: str, handler: Counting | None = None, **options: Any) -> tuple[hf.CheckpointManager, Counting]:
    handler = handler or Counting(layout=LAYOUT)
    limits = {"load_and_broadcast": True, "barrier_timeout_secs": 20, **options}
    made = hf.CheckpointManager(directory, hf.Checkpointer(handler), hf.CheckpointManagerOptions(**limits))
    return made, handler


def arrays() -> dict[str, Any]:
    """Arrays of several chunks and of one, of every dtype, without axes and without elements."""
    numbers = np.random.default_rng(3)
    every = {
        f"{dtype.name}{number}": np.frombuffer(numbers.bytes(24 * dtype.itemsize), np.uint8).view(dtype).reshape(4, 6)
        for number, dtype in enumerate(DTYPES)
        if dtype.kind not in "?U" and dtype.char not in "gG"
    }
    return {
        "large": numbers.normal(size=(500, 400)).astype(np.float32),
        "cut along both axes": numbers.normal(size=(3, 50_000)),
        "small": [numbers.normal(size=7).astype(np.float32) for _ in range(40)],
        "every dtype": every,
        "bool": np.array([True, False, True]),
        "text": np.array(["one", "two"]),
        "without bytes": [np.zeros(3, dtype) for dtype in EMPTY],
        "payloads": NAN_WITH_PAYLOAD,
        "minus zero": np.array(-0.0),
        "empty": np.zeros((0, 3), np.int8),
        "number": -0.0,
        "name": "run",
    }


def save(directory: Path, *steps: int) -> int:
    """Saves the arrays as some steps; returns the bytes that one process reads of them."""
    with hf.CheckpointManager(directory, hf.Checkpointer(hf.PyTreeCheckpointHandler(layout=LAYOUT))) as saving:
        for step in steps:
            saving.save(step, arrays())
    reading, handler = manager(str(directory))
    with reading:
        reading.restore()
    return handler.bytes_read


def restore_all(process: Process, directory: str, options: dict[str, Any]) -> int:
    """Return the bytes that this process has read of the arrays."""
    TorchTransport.largest_group = options.get("largest_group", 64)
    reading, handler = manager(directory)
    with reading:
        assert_same(reading.restore(options.get("step")), arrays())
    return handler.bytes_read


@pytest.mark.parametrize(
    ("backend", "count", "options"),
    [
        *(("torch", count, {}) for count in (2, 4)),
        *(("jax", count, {}) for count in (2, 4)),
        pytest.param("torch", 4, {"largest_group": 2}, id="large teams of torch are grids of groups"),
        pytest.param("torch", 2, {"step": 1}, id="a step that is given"),
    ],
)
def test_replicas_read_each_byte_once(tmp_path: Path, backend: Backend, count: int, options: dict[str, Any]) -> None:
    alone = save(tmp_path / "run", 1, 2)
    found = run_processes(restore_all, count, str(tmp_path / "run"), options, backend=backend)
    assert sum(found) <= SLACK * alone, (found, alone)
    assert options or max(found) <= 1.3 * alone / count, (found, alone)


def jax_template() -> dict[str, Any]:
    """The arrays on a mesh of two replicas with two parts each, and some whole ones."""
    import jax

    mesh, values = jax.make_mesh((2, 2), ("data", "fsdp")), divided()
    axes = {"rows": ("fsdp",), "columns": (None, "fsdp"), "bfloat16": ("fsdp",)}
    found: dict[str, Any] = {name: abstract(values[name], mesh, *spec) for name, spec in axes.items()}
    return {**found, "norms": [abstract(value, mesh) for value in values["norms"]]}


def torch_template() -> dict[str, Any]:
    import torch
    from torch.distributed.tensor import Replicate, Shard

    mesh, values = torch_mesh(2, 2, names=("data", "fsdp")), divided()
    kinds = {"rows": Shard(0), "columns": Shard(1), "bfloat16": Shard(0)}
    found: dict[str, Any] = {"norms": [torch.zeros(value.shape) for value in values["norms"]]}
    for name, kind in kinds.items():
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        found[name] = distribute(torch.zeros(values[name].shape, dtype=dtype), mesh, Replicate(), kind)
    return found


def divided() -> dict[str, Any]:
    import ml_dtypes

    numbers = np.random.default_rng(5)
    return {
        "rows": numbers.normal(size=(512, 300)).astype(np.float32),
        "columns": numbers.normal(size=(256, 200)).astype(np.float32),
        "norms": [numbers.normal(size=300).astype(np.float32) for _ in range(8)],
        "bfloat16": np.frombuffer(numbers.bytes(1 << 18), np.uint8).view(ml_dtypes.bfloat16).reshape(256, -1),
    }


def restore_divided(process: Process, directory: str, backend: str) -> tuple[int, list[Any]]:
    """Returns the bytes that were read, and the place and the bits of each part that this process got."""
    reading, handler = manager(directory)
    with reading:
        template = jax_template() if backend == "jax" else torch_template()
        reading.restore(None, template)
        found = reading.restore(None, template)  # new connections, which nothing of the first ones disturbs
    for name, expected in divided().items():
        several = [found[name], expected] if name == "norms" else [[found[name]], [expected]]
        for value, whole in zip(*several, strict=True):
            for place, part in pieces_of(value):
                assert part.tobytes() == np.ascontiguousarray(whole[place]).tobytes(), name
    return handler.bytes_read, [str(place) for place, _ in pieces_of(found["rows"])]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_replicas_of_parts_read_each_part_once(tmp_path: Path, backend: Backend) -> None:
    with hf.CheckpointManager(tmp_path, hf.Checkpointer(hf.PyTreeCheckpointHandler(layout=LAYOUT))) as saving:
        saving.save(1, divided())
    reading, handler = manager(str(tmp_path))
    with reading:
        reading.restore()
    found = run_processes(restore_divided, 4, str(tmp_path), backend, backend=backend)
    assert sum(read for read, _ in found) <= SLACK * handler.bytes_read, (found, handler.bytes_read)
    assert found[0][1] == found[2][1] != found[1][1] == found[3][1]


def restore_damaged(process: Process, directory: str) -> tuple[int, list[int]]:
    reading, _ = manager(directory)
    with reading:
        found = reading.restore_latest()
        assert found is not None
        assert_same(found.items, arrays())
        return found.step, [step for step, _ in found.skipped]


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("victim", ["data", "tree.json"])
def test_damage_that_one_process_finds_sends_all_to_an_older_step(
    tmp_path: Path, backend: Backend, victim: str
) -> None:
    save(tmp_path, 1, 2)
    files = [path for path in (tmp_path / "2").rglob("*") if path.is_file()]
    chosen = max(files, key=lambda path: (path.name == victim, path.stat().st_size))
    flip(chosen)
    assert run_processes(restore_damaged, 3, str(tmp_path), backend=backend) == [(1, [2])] * 3


class Stopping(Counting):
    """A handler with which one process does not get to its reads."""

    shares_reads = True
    process: Process

    def restore(self, directory: Any, item: Any = None, **kwargs: Any) -> Any:
        self.process.reached("reads")
        return super().restore(directory, item, **kwargs)


def dies_in_the_exchange(process: Process) -> None:
    for transport in (TorchTransport, JaxTransport):
        connect: Any = transport.connect

        def connected(self: Any, *arguments: Any, connect: Any = connect) -> Any:
            all_gather = connect(self, *arguments)

            def exchange(mine: Any) -> Any:
                process.reached("exchange")
                return all_gather(mine)

            return exchange

        transport.connect = connected  # type: ignore[assignment,method-assign]


def restore_or_die(process: Process, directory: str) -> None:
    dies_in_the_exchange(process)
    handler = Stopping()
    handler.process = process
    reading, _ = manager(directory, handler, barrier_timeout_secs=5)
    with reading:
        reading.restore_latest()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("moment", ["reads", "exchange"])
def test_a_process_that_dies_is_missed(tmp_path: Path, backend: Backend, moment: str) -> None:
    save(tmp_path, 1)
    ended = run_outcomes(restore_or_die, 3, str(tmp_path), backend=backend, kill=(1, moment))
    for one in (ended[0], ended[2]):
        assert (one.error or "").startswith(("BarrierTimeoutError", "PeerFailedError")), told(ended)
        assert "process 1" in (one.error or "") or moment == "exchange", told(ended)


def train(process: Process, directory: str, steps: int, divided: bool) -> tuple[int, int, list[bytes]]:
    """Returns the step that a loop of objects begins with, the bytes that it has read before, and its parameters."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(process.index)
    model = torch.nn.Sequential(torch.nn.Linear(400, 600), torch.nn.Tanh(), torch.nn.Linear(600, 2))
    if divided:
        fully_shard(model, mesh=torch_mesh(process.count))
    optimizer = torch.optim.AdamW(model.parameters())
    readers: list[TreeReader] = []
    create = TreeReader.__init__

    def noted(reader: TreeReader, *args: Any, **kwargs: Any) -> None:
        create(reader, *args, **kwargs)
        readers.append(reader)

    TreeReader.__init__ = noted  # type: ignore[assignment,method-assign]
    with hf.CheckpointCallback(directory, save_interval_steps=1, load_and_broadcast=True) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer})
        read = sum(reader.bytes_read for reader in readers)
        for step in range(start, start + steps):
            model(torch.ones(1, 400)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.on_step(step + 1, state)
    parameters: list[Any] = list(model.parameters())
    whole = [one.full_tensor() if divided else one for one in parameters]
    return start, read, [one.detach().numpy().tobytes() for one in whole]


def test_objects_of_a_loop_are_read_once(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    saved = run_processes(train, 1, directory, 1, False, backend="torch")
    (alone,) = run_processes(train, 1, directory, 0, False, backend="torch")
    for divided in (False, True):
        found = run_processes(train, 2, directory, 0, divided, backend="torch")
        assert [(start, parameters) for start, _, parameters in found] == [(1, saved[0][2])] * 2, divided
        assert sum(read for _, read, _ in found) <= 1.1 * alone[1], divided  # each reads the index and tree.json
