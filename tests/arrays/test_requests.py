"""Requests: leaves loaded as another type, dtype, shape or sharding than they were saved."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.equality import assert_same

import holdfast as hf
from holdfast.engine.arrays import TreeReader, load_tree
from holdfast.engine.pytree import LeafRequest
from holdfast.engine.storage import as_location

jax: Any = pytest.importorskip("jax")
torch: Any = pytest.importorskip("torch")
jnp: Any = jax.numpy

W = np.arange(12, dtype=np.float32).reshape(3, 4) / 8
TREE: dict[str, Any] = {
    "w": W,
    "count": np.int64(5),
    "step": 7,
    "rate": 0.5,
    "flag": True,
    "phase": 1 + 2j,
    "name": "adam",
    "nothing": None,
    "key": jax.random.key(1),
    "half": torch.arange(4, dtype=torch.bfloat16),
}


@pytest.fixture
def reader(place: str) -> TreeReader:
    hf.save(place, TREE)
    return TreeReader(as_location(place) / "state")


def request_of(**request: Any) -> LeafRequest:
    if "dtype" in request:
        request["dtype"] = np.dtype(request["dtype"])
    return LeafRequest(**request)


def ask(reader: TreeReader, name: str, like: Any = None, **request: Any) -> Any:
    template = None if like is None else {name: like}
    return load_tree(reader, like=template, select=name, requests={name: request_of(**request)})[name]


PADDED = np.zeros((5, 2), np.float32)
PADDED[:3] = W[:, :2]

# Name, request, what is loaded without a template.
REQUESTS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "nothing": ("w", {}, W),
    "numpy": ("w", {"kind": "numpy"}, W),
    "wider": ("w", {"dtype": np.float64}, W.astype(np.float64)),
    "narrower": ("w", {"dtype": ml_dtypes.bfloat16}, W.astype(ml_dtypes.bfloat16)),
    "whole numbers": ("half", {"dtype": np.int8}, np.arange(4, dtype=np.int8)),
    "same shape": ("w", {"shape": (3, 4)}, W),
    "resized": ("w", {"shape": (5, 2), "resize": True}, PADDED),
    "resized and cast": ("w", {"shape": (5, 2), "resize": True, "dtype": np.float64}, PADDED.astype(np.float64)),
    "to nothing": ("w", {"shape": (0, 4), "resize": True}, W[:0]),
    "scalar": ("count", {"dtype": np.int32}, np.int32(5)),
    "scalar as array": ("count", {"kind": "numpy"}, np.array(5)),
    "int": ("count", {"kind": "int"}, 5),
    "int as float": ("step", {"kind": "float"}, 7.0),
    "int cast": ("step", {"dtype": np.float32}, 7.0),
    "number as array": ("step", {"kind": "numpy"}, np.array(7)),
    "number as array, cast": ("rate", {"kind": "numpy", "dtype": np.float16}, np.array(0.5, np.float16)),
    "bool as int": ("flag", {"kind": "int"}, 1),
    "float as complex": ("rate", {"kind": "complex"}, 0.5 + 0j),
    "text": ("name", {"kind": "str"}, "adam"),
    "text, cast": ("name", {"dtype": np.float32}, "adam"),
    "none": ("nothing", {"kind": "jax"}, None),
    "key": ("key", {"kind": "numpy"}, np.asarray(jax.random.key_data(TREE["key"]))),
    "key as key": ("key", {"kind": "jax"}, TREE["key"]),
    "jax": ("w", {"kind": "jax"}, jnp.asarray(W)),
    "jax, of a tensor": ("half", {"kind": "jax"}, jnp.arange(4, dtype=jnp.bfloat16)),
    "jax, of a number": ("step", {"kind": "jax"}, jnp.array(7, jnp.int32)),
    "jax, of a bool": ("flag", {"kind": "jax"}, jnp.array(True)),
    "jax, cast": ("flag", {"kind": "jax", "dtype": np.float32}, jnp.array(1, jnp.float32)),
    "torch": ("w", {"kind": "torch"}, torch.from_numpy(W)),
    "torch, of a tensor": ("half", {"kind": "torch"}, TREE["half"]),
    "torch, of a number": ("step", {"kind": "torch"}, torch.tensor(7)),
    "torch, cast": ("w", {"kind": "torch", "dtype": np.float64}, torch.from_numpy(W.astype(np.float64))),
    "torch, bfloat16": ("step", {"kind": "torch", "dtype": ml_dtypes.bfloat16}, torch.tensor(7, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize(("name", "request_", "expected"), REQUESTS.values(), ids=REQUESTS)
def test_without_a_template(name: str, request_: dict[str, Any], expected: Any, reader: TreeReader) -> None:
    assert_same(ask(reader, name, **request_), expected)
    beside = load_tree(reader, requests={name: request_of(**request_)})
    assert_same(beside, {**load_tree(reader), name: expected})


def test_a_request_goes_before_the_template(reader: TreeReader) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    found = ask(reader, "w", parameter, dtype=np.float64)
    assert isinstance(found, torch.nn.Parameter)
    assert found.dtype == torch.float64
    assert torch.equal(found, torch.tensor(W, dtype=torch.float64))
    whole = ask(reader, "half", torch.nn.Parameter(torch.zeros(4)), dtype=np.int32)
    assert torch.equal(whole, torch.arange(4, dtype=torch.int32))
    assert not whole.requires_grad
    with pytest.raises(hf.TreeMismatchError, match="torch has no such dtype"):
        ask(reader, "w", parameter, dtype=ml_dtypes.float8_e3m4)
    resized = ask(reader, "w", parameter, shape=(5, 2), resize=True)
    assert torch.equal(resized, torch.tensor(PADDED))
    assert isinstance(ask(reader, "w", parameter, kind="numpy"), np.ndarray)
    [device] = jax.devices()[2:3]
    array = ask(reader, "w", jax.device_put(jax.numpy.zeros((3, 4)), device), dtype=np.float16)
    assert array.devices() == {device}
    assert array.dtype == np.float16
    assert ask(reader, "step", np.zeros(()), kind="int") == 7
    assert ask(reader, "w", ..., dtype=np.float64).dtype == np.float64


def test_resized_on_devices(reader: TreeReader) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    for spec, shape in {("x",): (8, 3), (None, "x"): (2, 8), (): (3, 4)}.items():
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        found = ask(reader, "w", shape=shape, resize=True, sharding=sharding, dtype=np.float16)
        expected = np.zeros(shape, np.float16)
        expected[: min(3, shape[0]), : min(4, shape[1])] = W[: shape[0], : shape[1]]
        assert found.sharding == sharding
        np.testing.assert_array_equal(np.asarray(found), expected)


ON_ONE_DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
MISMATCH, OPTION = hf.TreeMismatchError, hf.errors.OptionError
WRONG: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "another shape": (
        "w",
        {"shape": (5, 2)},
        MISMATCH,
        r"w: expected float32\[5, 2\] \(request\), found float32\[3, 4",
    ),
    "other axes": ("w", {"shape": (12,), "resize": True}, MISMATCH, r"w: expected float32\[12\]"),
    "imaginary part": ("phase", {"kind": "float"}, MISMATCH, "phase: expected float .*found complex"),
    "not whole, in an array": (
        "w",
        {"dtype": np.int8},
        MISMATCH,
        r"w: expected values that int8 can hold, found 0\.125",
    ),
    "not whole": ("rate", {"kind": "int"}, MISMATCH, "rate: expected a Python int .request., found 0.5"),
    "no number": ("name", {"kind": "int"}, MISMATCH, "name: expected int .request., found str"),
    "no array": ("name", {"kind": "jax"}, MISMATCH, "name: expected jax .request., found str"),
    "no text": ("w", {"kind": "str"}, MISMATCH, r"w: expected str .request., found float32"),
    "array as a number": ("w", {"kind": "float"}, MISMATCH, r"w: expected float .request., found float32\[3, 4\]"),
    "a key is no number": ("key", {"kind": "jax", "dtype": np.float32}, MISMATCH, "key: expected key"),
    "too wide": ("w", {"kind": "jax", "dtype": np.float64}, MISMATCH, "jax would convert it to float32"),
    "unknown to torch": ("w", {"kind": "torch", "dtype": ml_dtypes.float8_e3m4}, MISMATCH, "torch has no such dtype"),
    "unknown kind": ("w", {"kind": "tuple"}, OPTION, "w: kind='tuple' is not known"),
    "no sharding": ("w", {"sharding": "x"}, OPTION, "w: sharding='x' must be"),
    "a sharding for numpy": ("w", {"kind": "numpy", "sharding": ON_ONE_DEVICE}, OPTION, "w: sharding="),
    "no such leaf": ("v", {}, OPTION, "cannot request v,"),
}


@pytest.mark.parametrize(("name", "request_", "error", "message"), WRONG.values(), ids=WRONG)
def test_requests_that_do_not_fit(
    name: str, request_: dict[str, Any], error: type[Exception], message: str, reader: TreeReader
) -> None:
    with pytest.raises(error, match=message):
        load_tree(reader, requests={name: request_of(**request_)})
