"""What the structure of a tree determines is found out once; every later save writes what a first save would write."""

from __future__ import annotations

import gc
import importlib
import re
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.checkpoint.snapshots import Saves, Tree
from tests.equality import assert_same

import holdfast as hf
from holdfast.engine.distributed import ProcessInfo
from holdfast.engine.storage import as_location

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

Change = Callable[[Tree], object]
Pair = namedtuple("Pair", ["first", "second"])  # noqa: PYI024 - the plain kind


def module() -> Tree:
    weight = torch.ones(4, 3)
    return OrderedDict(weight=weight, bias=torch.nn.Parameter(torch.ones(3)), tied=weight, half=torch.ones(5).half())


def moments() -> Tree:
    return {"step": torch.tensor(1.0), "mean": torch.ones(4, 3)}


def a_tree() -> Tree:
    return {
        "one": module(),
        "two": {"weight": torch.ones(4, 3)},
        "states": {0: moments(), 1: moments()},
        "groups": [{"rate": 0.5, "parameters": [0, 1]}, ()],
        "pair": Pair(np.ones(2), torch.ones(2)),
        "host": {"array": np.ones((3, 2)), "scalar": np.float32(1), "number": 3, "flag": True, "no": None, "text": "a"},
        "jax": {"array": jax.numpy.ones((8, 2)), "key": jax.random.key(1), "other": jax.numpy.ones(3)},
        "large": torch.ones(200, 200),
    }


def put(*path: Any) -> Callable[[Callable[[Any], Any]], Change]:
    """Return what makes a change of one value in a tree from a function of the value."""

    def change(make: Callable[[Any], Any]) -> Change:
        def apply(tree: Tree) -> None:
            node: Any = tree
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = make(node[path[-1]])

        return apply

    return change


def sharded(*axes: str | None, devices: int = 4) -> Callable[[Any], Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    return lambda array: jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))


def set_data(tensor: Any) -> Any:
    tensor.data = torch.full((4, 3), 7.0)
    return tensor


def freed(tensor: Any) -> Any:
    freed = torch.ones(4, 3)
    freed.untyped_storage().resize_(0)
    return freed


def deleted(array: Any) -> Any:
    gone = array + 1
    gone.delete()
    return gone


weight, array, number = put("two", "weight"), put("host", "array"), put("host", "number")
CHANGES: dict[str, Change] = {
    "nothing": lambda tree: None,
    "a container goes": lambda tree: tree.pop("groups", None),
    "modules are swapped": lambda tree: tree.update(one=tree["two"], two=tree["one"]),
    "names of a module change their order": put("one")(lambda found: type(found)(reversed(found.items()))),
    "keys change their order": put("jax")(lambda found: dict(reversed(found.items()))),
    "equal states change places": put("states")(lambda found: dict(reversed(found.items()))),
    "another name": put("states", 0)(lambda found: {"step": found["step"], "average": found["mean"]}),
    "a leaf is removed": lambda tree: tree["host"].popitem(),
    "a leaf is added": lambda tree: tree["states"].update({len(tree["states"]): moments()}),
    "another dtype": weight(lambda _: torch.ones(4, 3, dtype=torch.float64)),
    "bfloat16": weight(lambda _: torch.ones(4, 3).bfloat16()),
    "float8": weight(lambda _: torch.ones(4, 3).to(torch.float8_e4m3fn)),
    "complex": weight(lambda _: torch.full((4, 3), 1 + 2j)),
    "a conjugate": weight(lambda _: torch.full((4, 3), 1 + 2j).conj()),
    "a negative view": weight(lambda _: torch.full((4, 3), 1 + 2j).conj().imag),
    "another shape": weight(lambda _: torch.ones(3, 4)),
    "one that would be broadcast": weight(lambda _: torch.ones(1, 3)),
    "turned": weight(lambda _: torch.arange(12.0).reshape(3, 4).T),
    "expanded": weight(lambda _: torch.arange(3.0).expand(4, 3)),
    "empty": weight(lambda _: torch.ones(0, 3)),
    "a scalar": weight(lambda _: torch.tensor(2.0)),
    "large": weight(lambda _: torch.ones(300, 300)),
    "of inference mode": weight(torch.inference_mode()(lambda _: torch.ones(4, 3))),
    "a gradient": weight(lambda _: torch.ones(4, 3, requires_grad=True) * 2),
    "a parameter": weight(lambda _: torch.nn.Parameter(torch.ones(4, 3))),
    "no parameter": put("one")(lambda found: {**found, "bias": torch.ones(3)}),
    "no gradient": put("one")(lambda found: {**found, "bias": torch.nn.Parameter(torch.ones(3), requires_grad=False)}),
    "untied": put("one")(lambda found: {**found, "tied": torch.full((4, 3), 5.0)}),
    "tied": put("two")(lambda found: {**found, "weight": found["weight"], "again": found["weight"]}),
    "other data": weight(set_data),
    "torch becomes numpy": weight(lambda _: np.ones((4, 3), np.float32)),
    "numpy becomes torch": array(lambda _: torch.ones(3, 2)),
    "jax becomes numpy": put("jax", "array")(lambda found: np.asarray(found).copy()),
    "an array of another order": array(lambda _: np.asfortranarray(np.arange(6.0).reshape(3, 2))),
    "an array of another byte order": array(lambda _: np.ones((3, 2), ">f8")),
    "an array of bfloat16": array(lambda _: np.ones((3, 2), ml_dtypes.bfloat16)),
    "an array of text": array(lambda _: np.array(["a", "bc"])),
    "read only": array(lambda _: np.broadcast_to(np.arange(2.0), (3, 2))),
    "another number": number(lambda _: 17),
    "a bool for an int": number(lambda _: True),
    "a float for an int": number(lambda _: 3.0),
    "a long int": number(lambda _: 1 << 100),
    "a long text": number(lambda _: "long " * 20_000),
    "text for None": number(lambda _: None),
    "another text": number(lambda found: f"{found}!"),
    "a list of many numbers": number(lambda _: list(range(100))),
    "an ordered dictionary": put("two")(OrderedDict),
    "a dictionary": put("one")(dict),
    "a named tuple": put("two")(lambda found: Pair(found, 1)),
    "a list for a tuple": put("pair")(list),
    "keys that are text": put("states")(lambda found: {str(key): value for key, value in found.items()}),
    "keys that are bool": put("states")(lambda found: {bool(key): value for key, value in list(found.items())[:2]}),
    "keys of numpy": put("states")(lambda found: {np.int64(key): value for key, value in found.items()}),
    "sharded over devices": put("jax", "array")(sharded("x")),
    "sharded otherwise": put("jax", "array")(sharded("x", None)),
    "on one device of a mesh": put("jax", "array")(sharded("x", devices=1)),
    "on another device": put("jax", "other")(lambda found: jax.device_put(found, jax.devices()[1])),
    "another key": put("jax", "key")(lambda _: jax.random.key(2, impl="rbg")),
    "refused: sparse": weight(lambda _: torch.ones(4, 3).to_sparse()),
    "refused: meta": weight(lambda _: torch.ones(4, 3, device="meta")),
    "refused: freed": weight(freed),
    "refused: deleted": put("jax", "other")(deleted),
    "refused: objects": number(lambda _: object()),
}


def fill(tree: Any, value: int) -> None:
    """Change every element in place, as a training step does."""
    if isinstance(tree, torch.Tensor):
        if tree.layout is torch.strided and tree.untyped_storage().nbytes() and not tree.is_inference():
            with torch.no_grad():
                (tree if 0 not in tree.stride() else tree[:1]).copy_(torch.tensor(value % 2))
    elif isinstance(tree, np.ndarray) and tree.flags.writeable and tree.dtype.kind != "U":
        tree[...] = value
    elif isinstance(tree, dict | list | tuple):
        for one in tree.values() if isinstance(tree, dict) else tree:
            fill(one, value)


class Compared(Saves):
    """Saves of which each is compared with the first save of a new handler."""

    def check(self, tree: Tree) -> None:
        try:
            expected = self.write(hf.PyTreeCheckpointHandler().prepare(tree, snapshot=False)), self.document
        except hf.errors.UnsupportedLeafError as error:
            with pytest.raises(hf.errors.UnsupportedLeafError, match=f"^{re.escape(str(error))}$"):
                self.prepare(tree)
            return
        prepared = self.prepare(tree)
        fill(tree, 9)
        found = self.write(prepared)
        assert self.document == expected[1]
        assert_same(found, expected[0])


# Changes of elements and of Python values: what is stored stays the same in all else.
SAME = {"nothing", "other data", "another number", "of inference mode", "an array of another order", "read only"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_saves(name: str, tmp_path: Path, known: list[bool]) -> None:
    saves, tree = Compared(tmp_path), a_tree()
    saves.write(saves.prepare(tree))
    CHANGES[name](tree)
    saves.check(tree)
    assert known == [name in SAME]
    if not name.startswith("refused"):
        fill(tree, 5)
        saves.check(tree)
        assert known[1:] == [True]


@settings(max_examples=15)
@given(
    names=st.lists(st.sampled_from(sorted(CHANGES)) | st.just("nothing"), min_size=2, max_size=5),
    fates=st.lists(st.sampled_from(["saved", "saved", "dropped", "failed"]), min_size=5, max_size=5),
    back=st.booleans(),
)
@example(names=["keys that are bool", "an ordered dictionary", "a list for a tuple"], fates=["saved"] * 5, back=True)
def test_any_changes_between_saves(
    names: list[str], fates: list[str], back: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    saves, tree = Compared(tmp_path_factory.mktemp("saves")), a_tree()
    saves.check(tree)
    for step, (name, fate) in enumerate(zip(names, fates, strict=False)):
        before = dict(tree)
        try:
            CHANGES[name](tree)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError):
            tree = before  # an earlier change has left nothing to change
        fill(tree, step)
        if fate == "saved":
            saves.check(tree)
        else:  # a save that ends before its first byte, or that cannot write
            try:
                prepared = saves.prepare(tree)
            except hf.errors.UnsupportedLeafError:
                continue
            if fate == "failed":
                with pytest.raises(OSError, match=r"/proc"):
                    prepared.write(as_location("/proc/none"), ProcessInfo())
            del prepared
        if back:
            tree = before
            saves.check(tree)


def test_two_handlers_save_one_tree(tmp_path: Path, known: list[bool]) -> None:
    tree = a_tree()
    handlers = Compared(tmp_path / "one"), Compared(tmp_path / "two")
    for step in range(3):
        for saves in handlers:
            fill(tree, step)
            CHANGES["another number"](tree)
            saves.check(tree)
    assert known == [True] * 4


def test_a_snapshot_that_is_still_needed_is_left_alone(tmp_path: Path, known: list[bool]) -> None:
    saves, tree = Compared(tmp_path), {"tensor": torch.zeros(10), "array": np.zeros(10)}
    saves.check(tree)
    prepared = []
    for value in (3, 4, 5):
        tree["tensor"].fill_(value)
        tree["array"].fill(value)
        prepared.append(saves.prepare(tree))
    for value, one in zip((3, 4, 5), prepared, strict=True):
        found = saves.write(one)
        assert set(found["tensor"].tolist()) == set(found["array"].tolist()) == {value}
    assert known == [True, False, False]


def test_nothing_of_a_tree_is_kept(tmp_path: Path) -> None:
    saves = Compared(tmp_path)
    torch_model = torch.nn.Linear(3, 2)
    for _ in range(2):
        tree = {
            "torch": torch_model.state_dict(keep_vars=False),  # an OrderedDict that has attributes
            "tensor": torch.ones(5),
            "large": torch.ones(200, 200),
            "array": np.ones(3),
            "jax": jax.numpy.ones(3),
            "sharded": sharded("x")(jax.numpy.ones(8)),
        }
        references = [weakref.ref(leaf) for leaf in (tree["torch"]["weight"], *list(tree.values())[1:])]
        saves.check(tree)
        del tree
        gc.collect()
        assert [reference() for reference in references] == [None] * len(references)


def test_the_arguments_of_a_save(tmp_path: Path, known: list[bool]) -> None:
    saves, tree = Compared(tmp_path), {"weight": torch.ones(500), "array": np.arange(3.0)}
    saves.check(tree)
    half = saves.write(saves.prepare(tree, save_args=hf.SaveArgs(dtype="float16")))
    assert half["array"].dtype == np.float16
    small = saves.write(saves.prepare(tree, layout=hf.Layout(compression=3)))
    assert set(small["weight"].tolist()) == {1.0}
    saves.check(tree)
    assert known == []
    saves.check(tree)
    assert known == [True]


def test_a_type_handler_that_comes_later(tmp_path: Path) -> None:
    class Refuses(hf.type_handlers.TypeHandler):
        name = "refuses"

        def param_infos(self, values: Any, names: Any) -> Any:
            raise RuntimeError("asked")

        serialize: Any = param_infos  # neither is reached
        deserialize: Any = param_infos

    registry = hf.type_handlers.TypeHandlerRegistry()
    saves, tree = Compared(tmp_path), {"array": np.ones(3)}
    saves.handler = hf.PyTreeCheckpointHandler(type_handler_registry=registry)
    saves.check(tree)
    registry.register(np.ndarray, Refuses())
    with pytest.raises(RuntimeError, match="asked"):
        saves.prepare(tree)


def test_under_fake_tensors(tmp_path: Path, known: list[bool]) -> None:
    """A mode that turns copies of tensors into something else does not reach a snapshot."""
    base: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode

    class Nothing(base):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if "copy_" in str(function) else function(*args, **(kwargs or {}))

    saves, tree = Compared(tmp_path), {"weight": torch.zeros(5)}
    saves.check(tree)
    tree["weight"].fill_(4)
    with Nothing():
        prepared = saves.prepare(tree)
    assert set(saves.write(prepared)["weight"].tolist()) == {4.0}
    assert known == [False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_that_are_offloaded_and_come_back(tmp_path: Path, known: list[bool]) -> None:
    saves, tree = Compared(tmp_path), {"weight": torch.ones(500, 500), "small": torch.ones(3)}
    for step, device in enumerate(["cuda", "cpu", "cuda", "cuda"]):
        tree["weight"] = tree["weight"].to(device)
        fill(tree, step)
        saves.check(tree)
    assert known == [True] * 3  # a tensor may come from the host or the GPU


def test_the_steps_of_a_run(tmp_path: Path, known: list[bool]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with hf.CheckpointManager(tmp_path / "run") as manager:
        for step in range(1, 5):
            model(torch.randn(6, 4)).sum().backward()
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            hf.save(tmp_path / f"{step}", state)
            manager.save(step, state)
            for parameter in model.parameters():
                parameter.data.add_(1)
        manager.wait_until_finished()
        assert known == [True] * 3
        for step in range(1, 5):
            assert_same(manager.restore(step), hf.load(tmp_path / f"{step}", like=manager.restore(step)))
