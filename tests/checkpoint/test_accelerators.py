"""Snapshots of torch tensors on GPUs: the program continues while the copies run, and a checkpoint has the old values.

Every story is told on the host, on a GPU that is simulated (`tests/accelerators.py`), and on a GPU where there is one.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.snapshots import Saves, Tree, shared_saves
from tests.events import heard

import holdfast as hf
from holdfast.engine.arrays.snapshot import StagingBuffer
from holdfast.engine.distributed import ProcessInfo
from holdfast.engine.pytree import default_pinned_bytes, device_arrays, jax_leaves, leaves, torch_leaves
from holdfast.engine.storage import DataFile, Location

torch = pytest.importorskip("torch")
fakes = pytest.importorskip("tests.accelerators")

Work = Callable[[], object]


class Machine:
    """The host, where all that the program starts is done at once, or a GPU that is kept busy, and does it late."""

    def __init__(self, device: str) -> None:
        self.device = device

    def busy(self) -> None:
        if self.device == "cuda":
            torch.cuda._sleep(100_000_000)

    def launch(self, work: Work) -> None:
        work()

    def settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Take the CPU for a GPU."""
    found = fakes.FakeGpu()
    found.device, found.busy = "cpu", lambda: None
    monkeypatch.setattr(device_arrays, "ACCELERATORS", {"cpu"})
    monkeypatch.setattr(leaves.torch, "cpu", found)  # the module with streams and events
    monkeypatch.setattr(torch_leaves, "HOST_DEVICES", {"meta"})
    monkeypatch.setattr(torch.Tensor, "record_stream", fakes.record_stream)
    with found:
        yield found


GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


@pytest.fixture(params=["cpu", "fake", GPU])
def machine(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "fake":
        gpu = request.getfixturevalue("gpu")
        yield gpu
        assert "copy" in gpu.log
    else:
        yield Machine(request.param)


def bits(tensor: Any) -> Any:
    """Return the bytes of a tensor, element by element."""
    plain = torch.Tensor.resolve_neg(tensor.detach().resolve_conj()).contiguous().clone()
    return plain.reshape(-1).view(torch.uint8).cpu().numpy().copy()


def filled(tensor: Any, seed: int) -> None:
    """Fill a tensor in place with any bytes at all, NaNs included."""
    raw = np.random.default_rng(seed).integers(0, 256, tensor.numel() * tensor.element_size(), np.uint8)
    new = torch.from_numpy(raw % 2 if tensor.dtype is torch.bool else raw)
    with torch.no_grad():
        tensor.copy_(new.view(tensor.dtype).reshape(tensor.shape).to(tensor.device))


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32),
]


def tensors(device: str) -> tuple[Tree, Tree]:
    """Return tensors of every kind; and others, which are empty, or views of these, or copied while a save blocks."""
    tree: Tree = {str(number): torch.zeros(1 + number % 40, device=device) for number in range(200)}
    for dtype in DTYPES:
        tree[f"array of {dtype}"] = torch.zeros(7, 3, dtype=dtype, device=device)
        tree[f"scalar of {dtype}"] = torch.zeros((), dtype=dtype, device=device)
    tree |= {
        "base": torch.zeros(60, 50, device=device),
        "parameter": torch.nn.Parameter(torch.zeros(9, 9, device=device)),
        "wide": torch.zeros(1, 2, 40_000, device=device),
        "large": torch.zeros(300, 1000, dtype=torch.float64, device=device),
        "negative": torch._neg_view(torch.zeros(4, device=device)),
        "conjugate": torch.zeros(4, dtype=torch.complex64, device=device).conj(),
    }
    base = tree["base"]
    others = {"view": base[10:20], "transposed": base.t(), "strided": base[::3, 1::2], "tied": tree["parameter"]}
    return tree, {**others, "expanded": base[:1].expand(4, 50), "empty": torch.zeros(0, 5, device=device)}


def fill(tree: Tree, seed: int) -> None:
    with torch._C.DisableTorchFunction():
        for number, value in enumerate(tree.values()):
            filled(value, seed * 1000 + number)


def clones(tree: Tree) -> Tree:
    with torch._C.DisableTorchFunction():
        return {name: value.detach().clone() for name, value in tree.items()}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_kind_of_tensor(machine: Any, tmp_path: Path, known: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that was started before a save is in it, and work that is started after it is not."""
    monkeypatch.setattr(device_arrays, "BLOCK_BYTES", 1 << 20)  # the largest tensor is larger
    monkeypatch.setattr(device_arrays, "FIRST_BYTES", 1 << 14)
    saves, (tree, others) = Saves(tmp_path), tensors(machine.device)
    for step in range(3):
        machine.busy()
        machine.launch(lambda step=step: fill(tree, 2 * step))
        was: Tree = {}
        machine.launch(lambda found=was: found.update(clones({**tree, **others})))
        prepared = saves.prepare({**tree, **others})
        machine.launch(lambda step=step: fill(tree, 2 * step + 1))
        if step:  # the loop is ahead of the copies
            machine.settle()
        found = saves.write(prepared, torch_tensors=True)
        machine.settle()
        del prepared
        with torch._C.DisableTorchFunction():
            for name, value in found.items():
                np.testing.assert_array_equal(bits(value), bits(was[name]), err_msg=name)
    assert known == [True, True]


def test_a_tensor_that_is_deleted_at_once_by_a_program_without_jax(
    machine: Any, tmp_path: Path, known: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_leaves, "jax", None)
    saves = Saves(tmp_path)
    for step in range(3):
        machine.busy()
        tree = {"large": torch.full((400, 300), float(step), device=machine.device)}
        prepared = saves.prepare(tree)
        tree.clear()
        again = [torch.full((400, 300), -1.0, device=machine.device) for _ in range(3)]  # perhaps in its memory
        machine.settle()
        assert set(saves.write(prepared)["large"].reshape(-1).tolist()) == {float(step)}
        del again, prepared
    assert known == [True, True]


def test_a_share_of_a_tree(machine: Any, tmp_path: Path, known: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several processes with the same tensors, each copies what it writes."""
    monkeypatch.setattr(device_arrays, "LEAST_ROOM_BYTES", 1 << 16)
    count = 3
    members = [ProcessInfo(index, count, "token") for index in range(count)]
    handlers = [hf.PyTreeCheckpointHandler(chunk_bytes=100_000) for _ in members]
    large, array = torch.zeros(700, 200, device=machine.device), np.ones((400, 300))
    tree: Tree = {"large": large, "array": array, "small": torch.ones(3), "number": 1}

    def spoil() -> None:
        assert max(one._staging.nbytes for one in handlers) <= 1 << 20, "a third of it, in a block"
        machine.launch(lambda: large.fill_(-1))
        array[...] = -1
        machine.settle()

    for step in range(3):
        machine.busy()
        machine.launch(lambda step=step: large.copy_(torch.arange(140_000.0).reshape(700, 200) + step))
        array[...] = np.arange(120_000.0).reshape(400, 300) * step
        tree["number"] = step
        found = shared_saves(tmp_path / str(step), tree, handlers, members, spoil)
        np.testing.assert_array_equal(found["large"].reshape(-1), np.arange(140_000.0, dtype=np.float32) + step)
        np.testing.assert_array_equal(found["array"].reshape(-1), np.arange(120_000.0) * step)
        assert (found["small"].tolist(), found["number"]) == ([1, 1, 1], step)
    assert known == [True] * 2 * count


def test_dtensors(machine: Any, tmp_path: Path, known: list[bool]) -> None:
    """Those of a program whose one process is a group of torch.distributed."""
    tensor, distributed = pytest.importorskip("torch.distributed.tensor"), torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh(machine.device, (1,))
        local = torch.zeros(40, 30, device=machine.device)
        tree = {"sharded": tensor.DTensor.from_local(local, mesh, [tensor.Shard(0)], run_check=False)}
        saves = Saves(tmp_path)
        for step in range(3):
            machine.busy()
            machine.launch(lambda step=step: local.fill_(step))
            prepared = saves.prepare(tree)
            machine.launch(lambda: local.fill_(-1))
            found = saves.write(prepared)
            del prepared
            assert set(found["sharded"].reshape(-1).tolist()) == {float(step)}
        assert known == [True, True]
    finally:
        distributed.destroy_process_group()


# ---- the rules


def test_what_a_save_waits_for(gpu: Any, tmp_path: Path) -> None:
    """``prepare`` starts all copies and waits for none; memory is pinned once; small tensors are copied together."""
    saves = Saves(tmp_path)
    tree = {"large": [torch.zeros(300, 300) for _ in range(3)], "small": [torch.zeros(5) for _ in range(50)]}
    for step in range(4):
        gpu.log.clear()
        prepared = saves.prepare(tree)
        copies = [entry for entry in gpu.log if entry != "pin"]
        assert copies == ["copy"] * 3 + ["gather", "copy"], step
        saves.write(prepared)
        assert gpu.log[-1] == "wait", step
        del prepared
    for _ in range(3):  # another structure, in the same memory
        tree["large"].pop()
        saves.write(saves.prepare(tree))
    assert gpu.pinned == [2 << 20]
    assert len(gpu.streams) == 1


@pytest.fixture
def written(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log when data files are written, and how many tensors are in them; then do what the test says."""
    monkeypatch.setattr(device_arrays, "FIRST_BYTES", 1 << 18)
    write_data_files, gpu.after_write = Location.write_data_files, lambda: None

    def noted(self: Location, files: Sequence[DataFile], *rest: Any, **options: Any) -> None:
        gpu.log.append(f"write {sum(file.size for file in files) // TENSOR}")
        write_data_files(self, files, *rest, **options)
        gpu.after_write()

    monkeypatch.setattr(Location, "write_data_files", noted)


def check_numbers(found: Tree, add: int = 0) -> None:
    """Each tensor is filled with its number."""
    assert [set(array.tolist()) for array in found.values()] == [{add + number} for number in range(7)]


TENSOR = 200 << 10  # bytes
IN_TURN = ["wait", "write 2", "wait", "write 3", "wait", "write 2"]  # after 256 KiB, 512 KiB more, and the rest


def test_chunks_are_written_as_they_arrive(gpu: Any, written: None, tmp_path: Path) -> None:
    """The first files are written while the device still copies; each wave is twice as large as the one before."""
    saves, tree = Saves(tmp_path), {str(number): torch.zeros(TENSOR // 4) for number in range(7)}
    for step in range(3):
        for number, value in enumerate(tree.values()):
            gpu.launch(lambda value=value, number=number, step=step: value.fill_(10 * step + number))
        prepared = saves.prepare(tree)
        for value in tree.values():
            gpu.launch(lambda value=value: value.fill_(-1))
        gpu.log.clear()
        check_numbers(saves.write(prepared), 10 * step)
        del prepared
        assert gpu.log == IN_TURN, step


def test_tensors_are_not_held_while_others_are_written(
    gpu: Any, written: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk is slower than the copies: all that they have brought meanwhile is one wave, and no longer held."""
    saves = Saves(tmp_path)
    prepared = saves.prepare({str(number): torch.full((TENSOR // 4,), float(number)) for number in range(7)})
    arrival, held = prepared._tree.leaves.arrival, []

    def after() -> None:
        held.append(len(arrival.held))
        gpu.streams[0].run(gpu.streams[0].started)

    monkeypatch.setattr(gpu, "after_write", after)
    gpu.log.clear()
    check_numbers(saves.write(prepared))
    assert gpu.log == ["wait", "write 2", "wait", "write 5"]
    assert held == [7, 0]


def test_unchanged_tensors_that_arrive_in_turn(gpu: Any, written: None, tmp_path: Path) -> None:
    """Each wave shares the files of its own that an earlier step has, once it has arrived."""
    base = {f"base {number}": torch.full((2 * TENSOR,), float(number)) for number in range(5)}  # of 1.6 MB
    adapters = [torch.zeros(TENSOR) for _ in range(2)]
    tree = {"adapter 0": adapters[0], **base, "adapter 1": adapters[1]}
    with hf.CheckpointManager(tmp_path, options=hf.CheckpointManagerOptions(max_to_keep=3)) as manager:
        events = heard(manager)
        for step in range(7):
            for adapter in adapters:
                gpu.launch(lambda adapter=adapter, step=step: adapter.fill_(step))
            manager.save(step, tree)
            for adapter in adapters:
                gpu.launch(lambda adapter=adapter: adapter.fill_(-1))
            manager.wait_until_finished()
        shared = [event["shared_bytes"] >= 5 * 8 * TENSOR for event in events]
        assert shared == [False, False, True, True, True, True, True]
        for step in manager.all_steps():
            found = manager.restore(step)
            for name, value in base.items():
                np.testing.assert_array_equal(bits(found[name]), bits(value), err_msg=f"{step} {name}")
            assert {*found["adapter 0"].tolist(), *found["adapter 1"].tolist()} == {float(step)}


@pytest.mark.parametrize("waves", [0, 1], ids=["at once", "between two waves"])
def test_a_device_that_fails(gpu: Any, written: None, tmp_path: Path, waves: int) -> None:
    """Its error is one of the save, whose files go; the next save, which uses its memory again, is whole."""
    tree = {str(number): torch.full((TENSOR // 4,), float(number)) for number in range(7)}

    def fail() -> None:
        gpu.failure = "an illegal memory access was encountered"

    with hf.CheckpointManager(tmp_path) as manager:
        gpu.after_write = fail
        if not waves:
            fail()
        manager.save(1, tree)
        with pytest.raises(hf.SaveFailedError, match="illegal memory access"):
            manager.wait_until_finished()
        assert not waves or gpu.log[-4:] == ["wait", "write 2", "wait", "wait"], "all copies are waited for"
        assert manager.all_steps() == []
        assert not list(tmp_path.rglob("d"))
        gpu.failure, gpu.after_write = None, lambda: None
        manager.save(2, tree)
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
        check_numbers(manager.restore(2))


def test_two_devices_arrive_in_the_order_of_the_leaves() -> None:
    """A leaf is there once every device has copied all that lies before the next batch."""
    done: set[str] = set()

    class Done:
        def __init__(self, name: str) -> None:
            self._name = name

        def record(self, stream: Any) -> None: ...

        def synchronize(self) -> None:
            done.add(self._name)

        def query(self) -> bool:
            return self._name in done

    arrival = device_arrays.Arrival()
    arrival.events = [(0, Done("a0-3")), (3, Done("a3-9")), (1, Done("b1-4")), (4, Done("b4-8"))]
    seen = [(count, sorted(done)) for count in arrival.in_turn()]
    assert seen == [(1, ["a0-3"]), (3, ["a0-3", "b1-4"]), (4, ["a0-3", "a3-9", "b1-4"])]
    assert done == {"a0-3", "a3-9", "b1-4", "b4-8"}


def test_the_memory_of_several_saves(gpu: Any, tmp_path: Path) -> None:
    """A second snapshot before the first is written has memory of its own; after one that is given up, it is reused.

    The copies of that one may still be under way: the next save waits for them.
    """
    saves = Saves(tmp_path)
    first, second = (saves.prepare({"x": torch.full((200, 200), value)}) for value in (1.0, 2.0))
    assert set(saves.write(second)["x"].reshape(-1).tolist()) == {2.0}
    assert set(saves.write(first)["x"].reshape(-1).tolist()) == {1.0}
    saves, tree = Saves(tmp_path / "other"), {"x": torch.full((200, 200), 1.0)}
    del saves.prepare(tree).__dict__
    gpu.log.clear()
    saves.prepare(tree)
    assert gpu.log == ["wait", "copy"]
    early = device_arrays.DeviceArray(torch.ones(3), np.dtype(np.float32))
    with pytest.raises(TypeError, match="before they were copied"):
        np.asarray(early)
    tree["x"].untyped_storage().resize_(0)
    with pytest.raises(hf.errors.UnsupportedLeafError, match="has no memory"):
        saves.prepare(tree)


# ---- what does not fit, and what cannot be started


@pytest.mark.parametrize(
    ("what", "number", "said"),
    [
        *(("limit", blocks, "can be pinned: out of pinned memory") for blocks in (0, 1, 3)),
        *(("refuses", copies, "its copies could not run: no copy can be started") for copies in (1, 2, 4, 6)),
    ],
)
def test_what_the_device_refuses(
    gpu: Any,
    tmp_path: Path,
    what: str,
    number: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What has no pinned memory, or cannot be copied beside the program, is copied while the save blocks."""
    monkeypatch.setattr(device_arrays, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(gpu, what, number)
    tree = {str(number): torch.zeros(200, 1000) for number in range(6)}
    assert list(Saves(tmp_path).steps(gpu, tree)) == [0, 1, 2]
    assert said in caplog.text
    if what == "limit":
        assert len(gpu.pinned) == number
        assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(("option", "pinned"), [(0, []), (3 << 20, [1 << 20] * 3), (1 << 30, [1 << 20] * 5)])
def test_the_limit_of_pinned_memory(
    gpu: Any, tmp_path: Path, option: int, pinned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_arrays, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(device_arrays, "LEAST_ROOM_BYTES", 1 << 16)
    monkeypatch.setattr(torch_leaves, "HOST_DEVICES", {"meta"} if option else {"cpu", "meta"})
    saves, tree = Saves(tmp_path, pinned_bytes=option), {str(number): torch.zeros(200, 1000) for number in range(6)}
    assert list(saves.steps(gpu, tree, settled=True)) == [0, 1, 2]
    assert gpu.pinned == pinned


def test_a_save_that_waits_pins_little(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps what it pins for a copy that is not waited for: only so much is copied like that."""
    monkeypatch.setattr(torch_leaves, "ASYNCHRONOUS_DEVICES", {"cpu"})
    monkeypatch.setattr(torch_leaves, "BYTES_AT_ONCE", 3 * TENSOR)
    hf.save(tmp_path / "1", {str(number): torch.full((TENSOR // 4,), float(number)) for number in range(5)})
    assert gpu.log == ["pin", "pin", "pin", "block", "block"]
    for number, found in enumerate(hf.load(tmp_path / "1").values()):
        assert set(found.tolist()) == {number}


def test_a_number_of_bytes() -> None:
    assert default_pinned_bytes() > 1 << 20
    assert pickle.loads(pickle.dumps(StagingBuffer(5))).pinned_bytes == 5
    value: Any
    for value in (-1, 1.5, True, "1GB"):
        with pytest.raises(hf.errors.OptionError, match="pinned_bytes"):
            hf.PyTreeCheckpointHandler(pinned_bytes=value)
