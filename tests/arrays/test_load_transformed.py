"""Checkpoints loaded into other structures: the values are those of a transformation in memory, and only needed leaves
are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from tests.damage import flipped
from tests.equality import assert_same

import holdfast as hf
from holdfast import Transform
from holdfast.engine.arrays import TreeReader
from holdfast.engine.arrays.transform import load_transformed_tree
from holdfast.engine.handlers import DEFAULT_REGISTRY
from holdfast.engine.pytree import LeafRequest
from holdfast.engine.storage import as_location

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jnp: Any = jax.numpy


TREE = {
    "layers": [{"w": np.full((64, 64), number, np.float32)} for number in (1, 2)],
    "head": (np.full((64, 64), 3, np.float32), np.full((64, 64), 4, np.float32)),
    "step": 7,
    "note": "text",
    "rng": None,
}
W = np.zeros((64, 64), np.float32)
T = Transform


@pytest.fixture
def saved(place: str) -> str:
    hf.save(place, TREE)
    return place


def damage(place: str, stored: Any, number: int) -> None:
    """Flip a bit in the one array that is filled with a number."""
    files = stored(place)
    content = files.read()["state/d/0"]
    at = content.index(np.full(64, number, np.float32).tobytes()) + 1000
    files.write("state/d/0", flipped(content, at))


PATHS = {"layers/0/w": 1, "layers/1/w": 2, "head/0": 3, "head/1": 4}
# Transformations, the new tree, and the leaves that are read for it.
CASES: dict[str, tuple[Any, Any, set[str]]] = {
    "nothing": ({}, {"new": 1}, set()),
    "the same keys": ({}, {"layers": [{"w": W}], "step": 0}, {"layers/0/w"}),
    "renamed": ({"x": T(original_key="layers/1/w")}, {"x": W}, {"layers/1/w"}),
    "container": ({"x": T(original_key="layers")}, {"x": {1: {"w": W}}}, {"layers/1/w"}),
    "placeholder": ({"x": T(original_key="layers")}, {"x": ...}, {"layers/0/w", "layers/1/w"}),
    "one for two": ({r"x\d": T(original_key="head/0")}, {"x1": W, "x2": ...}, {"head/0"}),
    "value": ({"x": T(original_key="head/0", value_fn=lambda v: v * 2)}, {"x": W}, {"head/0"}),
    "value, placeholder": ({"x": T(original_key="head", value_fn=len)}, {"x": ...}, {"head/0", "head/1"}),
    "tree": ({"x": T(multi_value_fn=lambda tree: tree["head"][1] + 1)}, {"x": W}, {"head/1"}),
    "key and tree": ({"head/.": T(multi_value_fn=lambda key, tree: tree["head"][0])}, {"head": [W, W]}, {"head/0"}),
    "part of the tree": ({"x": T(multi_value_fn=lambda tree: tree["layers"][0])}, {"x": {"w": W}}, {"layers/0/w"}),
    "slice": ({"x": T(multi_value_fn=lambda tree: tree["layers"][1:])}, {"x": ...}, {"layers/1/w"}),
    "sum": ({"x": T(multi_value_fn=lambda tree: sum(tree["head"]))}, {"x": W}, {"head/0", "head/1"}),
    "fallback": ({"step": T(use_fallback=True), "layers": T(use_fallback=True)}, {"step": 1, "layers": [W]}, set()),
    "bare": ({"": T(original_key="head/0")}, W, {"head/0"}),
    "plain values": ({"x": T(original_key="note")}, {"x": "", "step": 0, "rng": None}, set()),
    "not a leaf": ({"x": T(multi_value_fn=lambda tree: print)}, {"x": ...}, set()),
}


@pytest.mark.parametrize(("transformations", "new", "needed"), CASES.values(), ids=CASES)
def test_the_result_equals_that_in_memory_and_only_needed_leaves_are_read(
    transformations: Any, new: Any, needed: set[str], saved: str, stored: Any
) -> None:
    expected = hf.apply_transformations(TREE, transformations, new)
    assert_same(hf.load_transformed(saved, transformations, new), expected)
    for path, number in PATHS.items():
        damage(saved, stored, number)
        if path in needed:
            with pytest.raises(hf.DamagedCheckpointError, match=path):
                hf.load_transformed(saved, transformations, new)
        else:
            assert_same(hf.load_transformed(saved, transformations, new), expected)
        damage(saved, stored, number)
    assert_same(hf.load(saved), TREE)


def test_keys_of_the_new_tree_stay_where_it_is_preferred(saved: str, stored: Any) -> None:
    new = {"step": 1, "head": (W, W), "layers": [{"w": W}], "g": 2}
    for number in (2, 3, 4):
        damage(saved, stored, number)
    found = hf.load_transformed(saved, {"layers": T(use_fallback=True)}, new, default_to_original=False)
    assert found["step"] == 1
    assert found["g"] == 2
    assert found["head"][0] is W
    assert found["layers"][0]["w"][0, 0] == 1


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_the_bytes_that_are_read(tmp_path: Path) -> None:
    """Each leaf that is needed is read once, also if several want it."""
    size = 4 << 20
    hf.save(tmp_path / "ckpt", {name: np.full(size, number, np.uint8) for number, name in enumerate("abcd")})
    parts = {str(part): T(multi_value_fn=lambda key, tree: np.split(tree["d"], 4)[int(key)]) for part in range(4)}
    transformations = {"x": T(original_key="b"), "y": T(original_key="d"), **parts}
    like = np.zeros(size, np.uint8)
    before = bytes_read()
    found = hf.load_transformed(
        tmp_path / "ckpt", transformations, {"x": like, "y": ..., **dict.fromkeys(parts, like[::4])}
    )
    assert 2 * size < bytes_read() - before < 2.2 * size
    assert (set(found["x"]), set(found["y"])) == ({1}, {3})
    assert all((found[key].shape, set(found[key])) == ((size // 4,), {3}) for key in parts)


def test_the_tree_that_a_function_sees(saved: str, stored: Any) -> None:
    seen = []

    def look(tree: Any) -> int:
        seen.append(tree)
        assert isinstance(tree, Mapping)
        assert list(tree) == list(TREE)
        assert isinstance(tree["layers"], Sequence)
        assert (len(tree), len(tree["layers"]), len(tree["head"])) == (5, 2, 2)
        assert "layers" in tree
        assert "other" not in tree
        assert repr(tree["head"]) == "<tuple of 2 in a checkpoint, read when indexed>"
        assert tree["step"] == 7
        assert tree["note"] == "text"
        assert tree["rng"] is None
        with pytest.raises(KeyError):
            tree["other"]
        with pytest.raises(IndexError):
            tree["layers"][2]
        return 0

    for number in (1, 2, 3):
        damage(saved, stored, number)
    hf.load_transformed(saved, {"x": T(multi_value_fn=look)}, {"x": 0})
    tree = seen[0]
    assert tree["head"][-1][0, 0] == 4
    assert tree["head"][1:][0][0, 0] == 4
    assert tree["head"][:0] == ()
    assert tree["layers"][:0] == []
    with pytest.raises(hf.DamagedCheckpointError, match="layers/0/w"):
        dict(**tree["layers"][0])


def test_arrays_that_functions_are_given_cannot_be_changed_and_results_can(saved: str) -> None:
    def change(value: Any) -> Any:
        value += 1
        return value

    with pytest.raises(ValueError, match="read-only") as caught:
        hf.load_transformed(saved, {"x": T(original_key="head/0", value_fn=change)}, {"x": W})
    assert caught.value.__notes__ == ["raised by value_fn of the transformation for x"]
    same = T(original_key="head/0", value_fn=lambda value: value)
    renamed = T(original_key="head/0")
    found = hf.load_transformed(saved, {"[xy]": same, "z.*": renamed}, {"x": W, "y": ..., "z1": W, "z2": ...})
    for number, array in enumerate(found.values()):
        array[...] = number
    assert [array[0, 0] for array in found.values()] == [0, 1, 2, 3]


MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
SHARDING = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("x", "y"))


def test_the_template_decides_library_and_sharding(saved: str) -> None:
    like = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=SHARDING)
    transformations = {
        "renamed": T(original_key="head/0"),
        "twice/0": T(original_key="head/1"),
        "value": T(original_key="head/0", value_fn=lambda value: value * 2),
        "tree": T(multi_value_fn=lambda tree: jnp.asarray(tree["layers"][0]["w"]) + 1),
    }
    new = {"renamed": like, "twice": [like], "value": like, "tree": like, "head": (..., like)}
    found = hf.load_transformed(saved, transformations, new)
    found |= {"twice": found["twice"][0], "head": found["head"][1]}
    for value in found.values():
        assert isinstance(value, jax.Array)
        assert value.sharding == SHARDING
    first = {"renamed": 3, "twice": 4, "value": 6, "tree": 2, "head": 4}
    assert {key: float(value[0, 0]) for key, value in found.items()} == first
    zeros = torch.zeros(64, 64)
    tensors = {"renamed": zeros, "value": torch.nn.Parameter(zeros), "tree": zeros}
    loaded = hf.load_transformed(saved, {key: transformations[key] for key in tensors}, tensors)
    assert {key: value[0, 0].item() for key, value in loaded.items()} == {key: first[key] for key in tensors}
    assert {key: type(value) for key, value in loaded.items()} == {key: type(value) for key, value in tensors.items()}
    assert loaded["value"].requires_grad


def test_functions_may_return_arrays_of_any_library(saved: str) -> None:
    returned = {
        "numpy": W + 1,
        "jax": jnp.ones((64, 64)),
        "sharded": jax.device_put(jnp.ones((64, 64)), SHARDING),
        "torch": torch.ones(64, 64),
        "scalar": 1.0,
    }
    functions = {key: T(multi_value_fn=lambda key, tree: returned[key]) for key in returned}
    for like in (W, jnp.zeros((64, 64)), torch.zeros(64, 64)):
        found = hf.load_transformed(saved, functions, {**dict.fromkeys(returned, like), "scalar": np.float32(0)})
        for key, value in found.items():
            assert type(value) is (np.float32 if key == "scalar" else type(like))
            assert float(value.sum()) == (1 if key == "scalar" else 4096)
    with pytest.raises(hf.errors.UnsupportedLeafError, match="x: is of type"):
        hf.load_transformed(saved, {"x": T(multi_value_fn=lambda tree: object())}, {"x": 1})


def test_random_keys(place: str) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    hf.save(place, {"rng": keys})
    like = jax.ShapeDtypeStruct((3,), keys.dtype)
    functions = {
        "renamed": T(original_key="rng"),
        "again": T(original_key="rng"),
        "made": T(multi_value_fn=lambda tree: jax.random.wrap_key_data(tree["rng"])),
    }
    for wanted in (["renamed"], ["renamed", "again", "made"]):
        found = hf.load_transformed(place, {key: functions[key] for key in wanted}, dict.fromkeys(wanted, like))
        for value in found.values():
            assert value.dtype == keys.dtype
            np.testing.assert_array_equal(jax.random.key_data(value), jax.random.key_data(keys))


ABSTRACT = jax.ShapeDtypeStruct((64, 64), np.float32)
RETURNED = {"x": T(original_key="head/0", value_fn=lambda v: v[:3]), "y": T(multi_value_fn=lambda tree: "text")}
METADATA = {
    "x": hf.reports.LeafMetadata("numpy", (64, 64), "float32"),
    "y": hf.reports.LeafMetadata("int", (), "int64"),
}
RETURNED_LINES = [
    "x: expected float32[64, 64] (template), found float32[3, 64] (returned by value_fn)",
    "y: expected int (template), found str (returned by multi_value_fn)",
]
UNFILLED: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "shape and dtype": (
        {"x": T(original_key="head/0"), "y": T(original_key="head")},
        {"x": np.zeros((64, 3), np.float32), "y": [np.zeros((64, 64))]},
        [
            "x (saved as head/0): expected float32[64, 3] (template), found float32[64, 64] (checkpoint)",
            "y/0 (saved as head/0): expected float64[64, 64] (template), found float32[64, 64] (checkpoint)",
        ],
    ),
    "kind": ({}, {"step": W}, ["step: expected float32[64, 64] (template), found int (checkpoint)"]),
    "returned": (RETURNED, {"x": W, "y": 1}, RETURNED_LINES),
    "returned for metadata": (RETURNED, METADATA, RETURNED_LINES),
    "missing": (
        {"x": T(original_key="heads")},
        {"x": W},
        ["x: expected a value, 'heads' is not in the original tree"],
    ),
    "no values": (
        {},
        {"x": ABSTRACT, "y": torch.empty(3, device="meta"), "head": [ABSTRACT]},
        [f"{key}: expected a value, found only a shape and dtype in the new tree" for key in "xy"],
    ),
}


@pytest.mark.parametrize(("transformations", "new", "lines"), UNFILLED.values(), ids=UNFILLED)
def test_keys_that_cannot_be_filled(transformations: Any, new: Any, lines: list[str], saved: str) -> None:
    with pytest.raises(hf.TreeMismatchError, match=f"{len(lines)} of {len(new)} keys of the new tree") as caught:
        hf.load_transformed(saved, transformations, new)
    for found, line in zip(caught.value.differences, lines, strict=True):
        assert found.startswith(line)
    assert saved in str(caught.value)


def test_names_that_a_dictionary_of_their_own_would_not_give(place: str) -> None:
    hf.save(place, {1: W + 1, "1": W + 2, "a": {"b.c": W + 3, "d/e": W + 4}})
    paths = ["1", "%31", "a/b.c", "a/d%2Fe"]
    found = hf.load_transformed(
        place,
        {str(number): T(original_key=path) for number, path in enumerate(paths)},
        {str(number): W for number in range(4)},
    )
    assert [value[0, 0] for value in found.values()] == [1, 2, 3, 4]
    doubled = hf.load_transformed(place, {".*": T(value_fn=lambda value: value * 2)}, {1: W, "1": W, "a": {"b.c": W}})
    assert (doubled[1][0, 0], doubled["1"][0, 0], doubled["a"]["b.c"][0, 0]) == (2, 4, 6)


def test_a_step_of_a_run_and_one_of_several_items(place: str) -> None:
    checkpointers = {"state": hf.PyTreeCheckpointer(), "ema": hf.PyTreeCheckpointer()}
    with hf.CheckpointManager(place, {**checkpointers, "data": hf.Checkpointer(hf.JsonCheckpointHandler())}) as manager:
        for step in (1, 2):
            manager.save(step, {"state": {"w": W + step}, "ema": {"w": W - step}, "data": {"at": step}})
    renamed = {"x": T(original_key="w")}
    assert hf.load_transformed(place, renamed, {"x": W}, item="ema")["x"][0, 0] == -2
    assert hf.load_transformed(f"{place}/1", renamed, {"x": W}, item="state")["x"][0, 0] == 1
    with pytest.raises(hf.errors.OptionError, match="has the trees ema, state: name one with item="):
        hf.load_transformed(place, renamed, {"x": W})
    with pytest.raises(hf.CheckpointNotFoundError, match="no tree 'data'; it has ema, state"):
        hf.load_transformed(place, renamed, {"x": W}, item="data")
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load_transformed(f"{place}/3", renamed, {"x": W})


class PathHandler(hf.type_handlers.TypeHandler):
    """Keeps leaves of a type that is no array and no plain value."""

    name = "path"

    def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[hf.SaveArgs]) -> None:
        for value, info in zip(values, infos, strict=True):
            (info.folder / "path").write_bytes(str(value).encode())

    def deserialize(self, infos: Sequence[Any], args: Sequence[hf.RestoreArgs]) -> list[PurePosixPath]:
        return [PurePosixPath((info.folder / "path").read_bytes().decode()) for info in infos]


def test_leaves_that_a_handler_of_ones_own_keeps(place: str) -> None:
    hf.type_handlers.register_type_handler(PurePosixPath, PathHandler())
    try:
        hf.save(place, {"path": PurePosixPath("a/b"), "w": W})
        found = hf.load_transformed(place, {"x": T(original_key="path")}, {"x": ..., "w": W})
        assert found["x"] == PurePosixPath("a/b")
        with pytest.raises(hf.TreeMismatchError, match="path: expected int"):
            hf.load_transformed(place, {}, {"path": 1})
    finally:
        DEFAULT_REGISTRY.unregister(PurePosixPath)
    assert hf.load_transformed(place, {}, {"w": W})["w"].shape == W.shape
    with pytest.raises(hf.errors.OptionError, match="need handlers that are missing"):
        hf.load_transformed(place, {}, {"path": ...})


def test_requests_go_before_the_new_tree(place: str) -> None:
    """Requests use the names of the new tree, as ``restore_args`` of the handler do."""
    hf.save(place, {"old": W + 1, "half": W + 2})
    reader = TreeReader(as_location(place) / "state")
    transformations = {
        "renamed": T(original_key="old"),
        "value": T(original_key="half", value_fn=lambda value: value * 2),
        "tree": T(multi_value_fn=lambda tree: tree["half"]),
    }
    requests = {
        "renamed": LeafRequest(kind="jax", dtype=np.dtype(np.float16), sharding=SHARDING),
        "value": LeafRequest(shape=(64, 66), resize=True),
        "tree": LeafRequest(dtype=np.dtype(np.int32)),
    }
    for like in (W, ...):
        new = dict.fromkeys(transformations, like)
        found = load_transformed_tree(reader, transformations, new, requests=requests)
        assert found["renamed"].sharding == SHARDING
        assert found["renamed"].dtype == np.float16
        assert found["value"].shape == (64, 66)
        assert (found["value"][0, 0], found["value"][0, 65]) == (4, 0)
        assert found["tree"].dtype == np.int32
        assert float(found["tree"][0, 0]) == 2
