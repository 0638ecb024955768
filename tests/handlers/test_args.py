"""Arguments for single leaves: which leaf each is for, what it means, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast as hf
from holdfast.engine.handlers.args import broadcast_prefix, leaf_request
from holdfast.engine.pytree import LeafRequest, flatten

Spec: Any = PartitionSpec
Struct: Any = jax.ShapeDtypeStruct


class Pair(NamedTuple):
    first: Any
    second: Any


TREE = {"a": 1, "b": {"c": [2, 3], "d": (4,)}, "pair": Pair(5, None), "empty": {}}
ONE, OTHER = hf.SaveArgs(aggregate=True), hf.SaveArgs(dtype=np.float32)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [None] * 6),
        (ONE, [ONE] * 6),
        ({"b": ONE}, [None, ONE, ONE, ONE, None, None]),
        ({"b": {"c": ONE}, "a": OTHER}, [OTHER, ONE, ONE, None, None, None]),
        ({"b": {"c": (OTHER, ONE)}}, [None, OTHER, ONE, None, None, None]),
        ({"pair": Pair(ONE, None)}, [None, None, None, None, ONE, None]),
        ({"pair": {"first": ONE}}, [None, None, None, None, ONE, None]),
        (jax.tree.map(lambda _: ONE, TREE), [ONE] * 5 + [None]),
    ],
    ids=["none", "one", "prefix", "deeper", "tuple", "namedtuple", "mapping", "jax"],
)
def test_arguments_find_their_leaves(given: Any, expected: list[Any]) -> None:
    assert broadcast_prefix(given, flatten(TREE).structure, hf.SaveArgs, "save_args") == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"z": ONE}, "save_args: the tree has no z"),
        ({"b": {"c": {"2": ONE}}}, "save_args: the tree has no b/c/2"),
        ({"a": {"x": ONE}}, "save_args: expected SaveArgs at the leaf a, found dict"),
        ({"b": {"d": "float32"}}, "save_args: expected SaveArgs at b/d, found str"),
        (hf.RestoreArgs(), "save_args: the tree has no restore_type"),
        (7, r"save_args: expected SaveArgs at \(root\), found int"),
    ],
    ids=["unknown", "index", "below a leaf", "text", "other args", "number"],
)
def test_arguments_without_a_leaf(given: Any, message: str, place: str) -> None:
    with pytest.raises(hf.errors.OptionError, match=message):
        hf.PyTreeCheckpointer().save(place, TREE, save_args=given)
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load(place)


def test_arguments_of_a_bare_leaf() -> None:
    assert broadcast_prefix(ONE, None, hf.SaveArgs, "save_args") == [ONE]
    assert broadcast_prefix(None, None, hf.SaveArgs, "save_args") == [None]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.float32, np.float32),
        (jnp.bfloat16, ml_dtypes.bfloat16),
        (torch.bfloat16, ml_dtypes.bfloat16),
        (bool, np.bool_),
    ],
    ids=str,
)
def test_dtypes_of_three_libraries(given: Any, expected: Any) -> None:
    assert hf.SaveArgs(dtype=given).dtype == np.dtype(expected)
    assert hf.RestoreArgs(dtype=given).dtype == np.dtype(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hf.SaveArgs(dtype="<U5"), "dtype='<U5' is not a dtype of numbers or bool"),
        (lambda: hf.SaveArgs(dtype="float33"), "dtype='float33' is not a dtype"),
        (
            lambda: hf.SaveArgs(dtype=torch.complex32),
            "complex32 is not a dtype of (numbers or bool|numpy, jax or torch)",
        ),
        (lambda: hf.SaveArgs(compression=23), "compression=23 must be a level of zstd, 1 to 22"),
        (lambda: hf.SaveArgs(chunk_bytes=100), "chunk_bytes=100 must be a whole number of bytes, at least 4096"),
        (lambda: hf.RestoreArgs(restore_type=dict), "restore_type=<class 'dict'> is not known; expected jax.Array"),
        (lambda: hf.ArrayRestoreArgs(mesh=1), "mesh= and mesh_axes= go together"),
        (lambda: hf.ArrayRestoreArgs(mesh=1, mesh_axes=("x",), sharding=2), "leave out mesh= and mesh_axes="),
        (lambda: hf.ArrayRestoreArgs(global_shape=(2, -1)), "must not hold negative"),
        (lambda: hf.ArrayRestoreArgs(global_shape=cast(Any, "ab")), "must be a tuple of whole numbers"),
        (lambda: hf.ArrayRestoreArgs(global_shape=(2,), global_shapes=(3,)), "mean the same; give one"),
        (lambda: hf.ArrayRestoreArgs(strict=False), "pads or truncates to global_shape="),
        (lambda: hf.PyTreeCheckpointHandler(use_ocdbt=False), "holdfast always stores arrays in an OCDBT database"),
        (
            lambda: hf.PyTreeCheckpointHandler().restore(hf.storage.as_location("x"), transforms={}),
            r"transforms= needs a template \(item=\)",
        ),
    ],
)
def test_invalid_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(hf.errors.OptionError, match=message):
        make()


def test_args_for_a_target(mesh: Mesh) -> None:
    spread_out, everywhere = NamedSharding(mesh, Spec("x")), NamedSharding(mesh, Spec())
    target = {
        "w": jax.device_put(np.zeros((4, 2), np.float32), spread_out),
        "abstract": Struct((3,), jnp.bfloat16),
        "n": np.zeros(2, np.int16),
        "t": torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)),
        "key": jax.random.key(0),
        "step": 3,
        "name": "x",
        "nothing": None,
        "anything": object(),
    }
    args = hf.checkpoint_utils.construct_restore_args(target)
    assert list(args) == list(target)
    assert {name: leaf_request(name, one) for name, one in args.items()} == {
        "w": LeafRequest(kind="jax", dtype=np.dtype(np.float32), shape=(4, 2), sharding=spread_out),
        "abstract": LeafRequest(kind="jax", dtype=np.dtype(ml_dtypes.bfloat16), shape=(3,)),
        "n": LeafRequest(kind="numpy", dtype=np.dtype(np.int16)),
        "t": LeafRequest(kind="torch", dtype=np.dtype(ml_dtypes.bfloat16)),
        "key": LeafRequest(),
        "step": LeafRequest(kind="int"),
        "name": LeafRequest(kind="str"),
        "nothing": LeafRequest(),
        "anything": LeafRequest(),
    }
    for shardings in (everywhere, {"w": everywhere}):
        other = hf.checkpoint_utils.construct_restore_args(target, shardings, set_global_shape=False)
        assert leaf_request("w", other["w"]).sharding is everywhere
        assert leaf_request("w", other["w"]).shape is None
    with pytest.raises(hf.errors.OptionError, match="sharding_tree: the tree has no v"):
        hf.checkpoint_utils.construct_restore_args(target, {"v": everywhere})
