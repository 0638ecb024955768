"""Values that do not fit, reading without the program, saves in the background, damage, and the file sizes."""

from __future__ import annotations

import enum
import os
import random
import re
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from tests.damage import flip
from tests.graph.held import Held
from tests.versions import nnx_assign

import holdfast as hf
from holdfast import graph
from holdfast.engine.checkpoint import commit
from holdfast.integrations.graph import GraphCheckpointHandler, capture, walk

# ---- values that do not fit


def test_a_slot_that_does_not_fit_is_refused(place: str) -> None:
    net, other = torch.nn.Linear(2, 3), torch.nn.Linear(5, 3)
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    path = graph.Checkpoint(net=net, optimizer=optimizer).save(f"{place}/ckpt")
    checkpoint = graph.Checkpoint(net=other, optimizer=torch.optim.Adam(other.parameters()))
    with pytest.raises(hf.TreeMismatchError, match="optimizer/slots/net/weight/exp_avg"):
        checkpoint.restore(path, exclude="net/weight")
    assert not checkpoint.optimizer.state


def of_libraries(value: float) -> dict[str, Any]:
    parameter = nnx.Param(jnp.full(3, value))
    return {"numpy": np.full(3, value, np.float32), "torch": torch.full((3,), value), "nnx": parameter}


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        library: ({"w": array}, r"w: expected float32\[1\] \(program\), found float32\[3\] \(checkpoint\)")
        for library, array in (
            ("numpy", np.zeros(1, np.float32)),
            ("torch", torch.zeros(1)),
            ("nnx", nnx.Param(jnp.zeros(1))),
        )
    },
    "dtype": ({"w": np.zeros(3)}, r"w: expected float64\[3\] \(program\), found float32\[3\] \(checkpoint\)"),
    "number": ({"w": 1.5}, r"w: expected float \(program\), found float32\[3\] \(checkpoint\)"),
    "text": ({"n": "one"}, r"n: expected str \(program\), found int \(checkpoint\)"),
    "shared memory": ({"w": torch.zeros(1).expand(3)}, r"w: elements of this tensor share memory, as after expand\(\)"),
    "array for an object": ({"rng": torch.zeros(3)}, r"rng: expected one array .*found the state of an object"),
    "number for an object": ({"rng": 3}, r"rng: expected 3 \(program\), found the state of an object \(checkpoint\)"),
}


@pytest.mark.parametrize(("live", "why"), MISFITS.values(), ids=list(MISFITS))
def test_what_does_not_fit_restores_nothing_and_is_not_attached(place: str, live: dict[str, Any], why: str) -> None:
    saved = graph.Checkpoint(w=np.ones(3, np.float32), n=1, rng=np.random.default_rng(0), others=of_libraries(1))
    path, ((name, value),) = saved.save(f"{place}/x"), live.items()
    checkpoint = graph.Checkpoint(**live, others=of_libraries(0))
    with pytest.raises(hf.TreeMismatchError, match=why):
        checkpoint.restore(path)
    assert checkpoint.save_counter == 0
    assert [float(array[...].sum()) for array in checkpoint.others.values()] == [0, 0, 0]
    checkpoint.restore(path, exclude=f"{name}/**").assert_existing_objects_matched().expect_partial()
    assert [float(array[...].sum()) for array in checkpoint.others.values()] == [3, 3, 3]
    late = graph.Checkpoint(others=of_libraries(0))
    late.read(path, partial=True)
    with pytest.raises(hf.TreeMismatchError, match=why):
        setattr(late, name, value)


# ---- reading without the program


@pytest.fixture
def saved(place: str) -> str:
    """A directory with one checkpoint of a net, an alias, an iterator and names that mean something."""
    bias = np.arange(3, dtype=np.float32)
    odd = graph.Node(**{"a/b/c": np.ones(1), "c/": np.ones(2), ".S": np.ones(3), "slots": np.ones(4), "": np.ones(5)})
    checkpoint = graph.Checkpoint(
        net=graph.Node(bias=bias), alias=graph.Node(b=bias), odd=odd, iterator=np.random.default_rng(3), name="text"
    )
    checkpoint.save(f"{place}/ckpt")
    return place


def test_a_reader_has_names_shapes_dtypes_and_values(saved: str) -> None:
    for path in (saved, f"{saved}/ckpt-1"):
        reader = graph.load_checkpoint(path)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        assert reader.path == f"{saved}/ckpt-1"
        assert shapes.keys() == dtypes.keys()
        assert (shapes["net/bias"], shapes["save_counter"]) == ([3], [])
        assert dtypes["net/bias"] == np.float32
        assert dtypes["name"] is None
        assert reader.get_tensor("name") == "text"
        assert reader.get_tensor("iterator") == np.random.default_rng(3).bit_generator.state
        assert reader.get_tensor("iterator/bit_generator") == "PCG64"
        assert all(reader.has_tensor(path) for path in shapes)
        assert "alias/b" not in shapes
        leads = {"net/bias": True, "alias/b": True, "odd/a.Sb.Sc": True, "net": False, "nat/b": False}
        for name, there in leads.items():
            assert reader.has_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE") is there
        for name in ("alias/b", "net.bias", "alias/b/.ATTRIBUTES/VARIABLE_VALUE"):
            assert reader.get_tensor(name).tolist() == [0, 1, 2]
        for name in ("nat/bias", "nat/b/.ATTRIBUTES/VARIABLE_VALUE"):
            with pytest.raises(hf.errors.ObjectNotFoundError, match=re.escape(name)):
                reader.get_tensor(name)
        odd = {path: shape for path, shape in shapes.items() if path.startswith("odd/")}
        assert sorted(shape[0] for shape in odd.values()) == [1, 2, 3, 4, 5]
        assert all(reader.get_tensor(path).shape == tuple(shape) for path, shape in odd.items())
    view = reader.graph
    assert set(view.children()) == {"net", "alias", "odd", "iterator", "name", "save_counter"}
    assert view.children("alias") == {"b": "net/bias"}
    assert view.same("net/bias", "alias/b")
    assert view.type_of("net").endswith("Node")
    with pytest.raises(hf.errors.ObjectNotFoundError, match="nat"):
        view.children("nat")
    with pytest.raises(hf.CheckpointNotFoundError):
        graph.load_checkpoint(f"{saved}/nothing")

    net = torch.nn.Linear(1, 1)
    adam = torch.optim.Adam(net.parameters())
    net(torch.ones(1)).backward()
    adam.step()
    reader = graph.load_checkpoint(graph.Checkpoint(net=net, adam=adam).save(f"{saved}/slots"))
    name = "net/weight/.OPTIMIZER_SLOT/adam/exp_avg/.ATTRIBUTES/VARIABLE_VALUE"
    assert reader.get_tensor(name) == adam.state[net.weight]["exp_avg"]


def test_a_plain_tree_is_a_graph_of_containers(place: str) -> None:
    layers = [np.ones(2), np.ones(3)]
    hf.save(place, {"net": {"layers": layers}, "history": [1.0, 2.0], "pairs": {"a": (1, 2)}, "named": {"x": 1}})
    checkpoint = graph.Checkpoint(net=graph.Node(layers=[np.zeros(2), np.zeros(3)]), history=[], pairs={}, named=[])
    status = checkpoint.read(place)
    assert (checkpoint.history, checkpoint.pairs, checkpoint.named) == ([1.0, 2.0], {"a": (1, 2)}, [])
    assert [layer.tolist() for layer in checkpoint.net.layers] == [[1, 1], [1, 1, 1]]
    assert status.expect_partial().report.pending == ("named/x",)
    assert graph.load_checkpoint(place).get_tensor("net/layers/1").tolist() == [1, 1, 1]


# ---- saves in the background


@pytest.mark.parametrize(
    ("leaf", "change"),
    [
        (np.zeros(1000), lambda x: x.fill(1)),
        (torch.zeros(1000), lambda x: x.fill_(1)),
        (nnx.Param(jnp.zeros(1000)), lambda x: nnx_assign(x, jnp.ones(1000))),
        (graph.Value(0), lambda x: x.assign(1)),
        (random.Random(5), lambda x: x.random()),
    ],
    ids=["numpy", "torch", "nnx", "value", "generator"],
)
def test_a_save_in_the_background_is_a_snapshot(place: str, leaf: Any, change: Callable[[Any], Any]) -> None:
    checkpoint = graph.Checkpoint(leaf=leaf)
    before = graph.load_checkpoint(checkpoint.write(f"{place}/before")).get_tensor("leaf")
    path = checkpoint.write(f"{place}/x", background=True)
    change(leaf)
    second = checkpoint.write(f"{place}/y", background=True)  # waits for the first
    status = checkpoint.read(path)  # waits for the second
    np.testing.assert_equal(graph.load_checkpoint(path).get_tensor("leaf"), before)
    status.assert_consumed()
    assert hf.verify(second).ok
    after = graph.load_checkpoint(second).get_tensor("leaf")
    with pytest.raises(AssertionError):
        np.testing.assert_equal(after, before)


def test_an_error_of_a_save_in_the_background_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "no space")

    checkpoint = graph.Checkpoint(w=np.zeros(3))
    good = checkpoint.save(tmp_path / "run")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        lost = checkpoint.save(tmp_path / "run", background=True)
        with pytest.raises(hf.SaveFailedError, match="run-2"):
            checkpoint.wait_until_finished()
        checkpoint.close()
        assert not os.path.exists(lost)
        assert graph.latest_checkpoint(tmp_path) == good
        checkpoint.save(tmp_path / "run", background=True)
        checkpoint.peek(good)  # waits for the save, and raises no error of it
    with pytest.raises(hf.SaveFailedError):
        checkpoint.save(tmp_path / "run")
    newest = graph.latest_checkpoint(tmp_path)
    assert newest is not None
    assert graph.load_checkpoint(newest).get_tensor("save_counter") == checkpoint.save_counter


def test_the_newest_checkpoint_is_the_newest_committed_one(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write_record = commit.write_record

    def waiting(location: Any, record: Any, **options: Any) -> None:
        gate.wait(10)
        write_record(location, record, **options)

    with graph.CheckpointManager(graph.Checkpoint(w=1), place, 3, background=True) as manager:
        first = manager.save()
        manager.wait_until_finished()
        monkeypatch.setattr(commit, "write_record", waiting)
        second = manager.save()
        assert manager.latest_checkpoint == first == graph.latest_checkpoint(place)
        gate.set()
        manager.wait_until_finished()
        assert manager.latest_checkpoint == second == graph.latest_checkpoint(place)


# ---- damage


def test_every_flipped_byte_of_a_graph_is_found(tmp_path: Path) -> None:
    saved = graph.Checkpoint(net=graph.Node(w=np.arange(5.0), n=3), name="x")
    path = Path(saved.write(tmp_path / "x"))
    file = path / "state" / "graph.json"
    for place in range(file.stat().st_size):
        flip(file, place)
        other = graph.Checkpoint(net=graph.Node(w=np.zeros(5), n=0), name="")
        with pytest.raises(hf.HoldfastError):
            other.read(path)
        assert not other.net.w.any()
        flip(file, place)
    assert hf.verify(path).ok


@pytest.mark.parametrize(("size", "count"), [(1000, 1), (100_000, 4)], ids=["zip file", "folder"])
def test_what_each_process_has_of_its_own_is_verified(tmp_path: Path, size: int, count: int) -> None:
    batches = Held({"words": np.arange(size), "position": 3})
    found = capture(walk(graph.Checkpoint(batches=batches, w=np.ones(3))), apart=True)
    path = tmp_path / "x"
    hf.Checkpointer(GraphCheckpointHandler()).save(path, found)
    assert hf.verify(path).ok
    files = [file for file in (path / "state" / "own").rglob("*") if file.is_file()]
    assert len(files) == count
    for file in files:
        for place in (0, file.stat().st_size // 2, -1):
            flip(file, place)
            problems = hf.verify(path).checkpoints[0].problems
            assert {problem.file for problem in problems} == {str(file.relative_to(path))}, problems
            assert len({(problem.file, problem.leaf) for problem in problems}) == len(problems)
            flip(file, place)
    assert hf.verify(path).ok


def test_the_manager_falls_back_to_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    checkpoint = graph.Checkpoint(w=np.zeros(100))
    with graph.CheckpointManager(checkpoint, tmp_path, 3) as manager:
        for value in (1.0, 2.0):
            checkpoint.w[...] = value
            manager.save()
    (data,) = [file for file in (tmp_path / "ckpt-2" / "state" / "d").iterdir() if file.name != "index"]
    flip(data, 100)
    assert not hf.verify(tmp_path / "ckpt-2").ok
    with graph.CheckpointManager(checkpoint, tmp_path, 3) as manager:
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
        assert set(checkpoint.w) == {1.0}
        assert manager.save() == str(tmp_path / "ckpt-3")


# ---- sizes of files


def test_data_files_have_the_size_of_the_layout(tmp_path: Path) -> None:
    layout = hf.Layout(chunk_bytes=4096, segment_bytes=4096, data_file_bytes=8192)
    path = graph.Checkpoint(w=np.arange(6000.0)).write(tmp_path / "x", layout=layout)
    sizes = [file.stat().st_size for file in (Path(path) / "state" / "d").iterdir() if file.name != "index"]
    assert len(sizes) > 5
    assert max(sizes) <= 8192
    assert hf.load(path)["w"].tolist() == list(range(6000))


# ---- objects of every kind


class Trainer:
    """An ordinary object."""

    __untracked__ = ("log",)

    def __init__(self, seed: int) -> None:
        self.weights = np.random.default_rng(seed).normal(size=3)
        self.history = {"loss": [0.5 * seed], 7: "seven", 1: True}
        self.generator = np.random.default_rng(seed)
        self.random = random.Random(seed)
        self.best = (seed, np.full(2, float(seed)))
        self.log = iter(())  # which cannot be saved
        self.on_step = print
        self.big = 1 << 200 + seed
        self.parent = self


class Derived(Trainer):
    __untracked__ = ("cache",)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.cache = np.full(3, seed)


def test_plain_objects(place: str) -> None:
    one, other = Derived(1), Derived(2)
    one.generator.normal(), one.random.random()
    path = graph.Checkpoint(trainer=one).save(f"{place}/ckpt")
    graph.Checkpoint(trainer=other).restore(path).assert_consumed()
    assert (other.weights.tolist(), other.history, other.big) == (one.weights.tolist(), one.history, one.big)
    assert (other.generator.normal(), other.random.random()) == (one.generator.normal(), one.random.random())
    assert (other.best[0], other.best[1].tolist(), other.cache.tolist()) == (1, [1, 1], [2, 2, 2])
    assert set(hf.load(path)["trainer"]["history"]) == {"loss", 7, 1}
    assert not {"cache", "log"} & set(graph.load_checkpoint(path).graph.children("trainer"))


def test_a_flat_state_dict_is_a_tree_of_modules(place: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    net, other = (torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)) for _ in range(2))
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    torch.save(net.state_dict(), tmp_path / "model.pt")
    hf.save(f"{place}/x", net.state_dict())
    for path in (tmp_path / "model.safetensors", tmp_path / "model.pt", f"{place}/x"):
        for parameter in other.parameters():
            torch.nn.init.zeros_(parameter)
        checkpoint = graph.Checkpoint(other)
        checkpoint.read(path).assert_consumed()
        assert all(torch.equal(*pair) for pair in zip(net.parameters(), other.parameters(), strict=True))
    odd = {"a.b": 1, "a": 2, "c.": 3, ".d": 4, "e.f": 5, "e.f.g": 6, "h..i": 7}
    hf.save(f"{place}/odd", odd)
    reader = graph.load_checkpoint(f"{place}/odd")
    assert {path: reader.get_tensor(path) for path in reader.get_variable_to_shape_map()} == odd


def test_namespaces_and_enumerations(place: str) -> None:
    class Color(enum.Enum):
        RED = "red"
        BLUE = "blue"

    class Level(enum.IntEnum):
        LOW = 1
        HIGH = 2

    class Phase(enum.Flag):
        WARM = 1
        DECAY = 2

    class Fewer(enum.Enum):
        BLUE = "blue"

    both, neither = Phase.WARM | Phase.DECAY, Phase(0)
    saved = graph.Checkpoint(space=types.SimpleNamespace(name="a", level=Level.HIGH), color=Color.RED)
    saved.one, saved.two, saved.three = both, neither, Phase.DECAY
    path = saved.save(f"{place}/x")

    def fresh(color: Any) -> graph.Checkpoint:
        space = types.SimpleNamespace(name="b", level=Level.LOW)
        return graph.Checkpoint(space=space, color=color, one=neither, two=both, three=neither)

    checkpoint = fresh(Color.BLUE)
    checkpoint.restore(path).assert_consumed()
    assert (checkpoint.space.name, checkpoint.space.level) == ("a", Level.HIGH)
    assert type(checkpoint.space.level) is Level
    assert checkpoint.color is Color.RED
    assert (checkpoint.one, checkpoint.two, checkpoint.three) == (both, neither, Phase.DECAY)
    checkpoint = fresh(Fewer.BLUE)
    with pytest.raises(hf.TreeMismatchError, match=r"color: expected a member .*Fewer \(program: BLUE\), found 'RED'"):
        checkpoint.restore(path)
    assert (checkpoint.color, checkpoint.space.name) == (Fewer.BLUE, "b")
    with pytest.raises(hf.errors.UnsupportedLeafError, match=r"both/0: is an enum member"):
        graph.Checkpoint(both=(Color.RED, Color.BLUE)).save(f"{place}/x")
